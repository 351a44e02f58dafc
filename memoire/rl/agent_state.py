"""An agent's state as one file of named arrays: found by looking at its attributes, put back into the same ones.

    model.actor.net.0.weight      parameters and buffers of a module      facts      numbers, texts, random generators,
    pi_optimizer:3.exp_avg        of an optimizer, by parameter                      what the trainer counts: as JSON
    log_alpha                     a tensor, or an array

Nothing in a file can run anything. What is neither is left out, and named in the log once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from memoire.errors import DataError

from . import weights

_log = logging.getLogger(__name__)

KEPT: Final = 2
"""Checkpoints that stay: the newest, and the one before."""
LEFT_OUT: Final = frozenset({"observation_space", "action_space", "device"})
"""Attributes that whoever makes an agent gives it."""

Arrays = dict[str, NDArray[Any]]


def save_agent(folder: Path, agent: Any, facts: Mapping[str, Any]) -> None:
    """Write a checkpoint: on disk, as a whole, when this returns. Raises OSError."""
    arrays, own = state_of(agent)
    number = max(_numbers(folder), default=0) + 1
    arrays["facts"] = _text({"agent": own, "trainer": dict(facts)})
    weights.save(_path(folder, number), arrays)
    for old in sorted(_numbers(folder))[:-KEPT]:
        _path(folder, old).unlink(missing_ok=True)


def load_agent(folder: Path, agent: Any) -> dict[str, Any] | None:
    """Put the newest checkpoint into an agent; what the trainer counted, or None if there is no checkpoint.

    Raises:
        DataError: it is damaged, or of another agent.
    """
    number = max(_numbers(folder), default=0)
    if not number:
        return None
    path = _path(folder, number)
    arrays = weights.load(path)
    try:
        facts = json.loads(arrays.pop("facts").tobytes())
        restore(agent, arrays, facts["agent"])
        return dict(facts["trainer"])
    except (KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise DataError(str(path), f"does not fit this agent ({str(error).splitlines()[0]})") from error


def state_of(agent: Any) -> tuple[Arrays, dict[str, Any]]:
    """Arrays [*F] by name, and plain facts by attribute, of what an agent's attributes hold."""
    arrays: Arrays = {}
    facts: dict[str, Any] = {}
    for name, value in _attributes(agent):
        if _is_module(value):
            arrays |= {f"{name}.{key}": _array(tensor) for key, tensor in value.state_dict().items()}
        elif _is_optimizer(value):
            _add_optimizer(name, value, arrays, facts)
        elif _is_tensor(value) or isinstance(value, np.ndarray):
            arrays[name] = _array(value)
        elif isinstance(value, np.random.Generator):
            facts[name] = {"generator": value.bit_generator.state}
        elif _is_plain(value):
            facts[name] = {"value": value}
    arrays |= _random_arrays()
    return arrays, facts


def restore(agent: Any, arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> None:
    """Put arrays [*F] and facts of `state_of` back. Raises KeyError, DataError, RuntimeError: they do not fit."""
    for name, value in _attributes(agent):
        if _is_module(value):
            _restore_module(name, value, arrays)
        elif _is_optimizer(value):
            _restore_optimizer(name, value, arrays, facts)
        elif _is_tensor(value):
            _copy_into(value, arrays[name])
        elif isinstance(value, np.ndarray):
            value[...] = arrays[name]
        elif isinstance(value, np.random.Generator):
            value.bit_generator.state = facts[name]["generator"]
        elif _is_plain(value) and name in facts:
            setattr(agent, name, facts[name]["value"])
    _restore_random(arrays)


def unsaved(agent: Any) -> list[str]:
    """Attributes that no checkpoint holds, with their types."""
    kinds = (np.ndarray, np.random.Generator)
    return [
        f"{name} ({type(value).__name__})"
        for name, value in _attributes(agent)
        if not (_is_module(value) or _is_optimizer(value) or _is_tensor(value) or _is_plain(value))
        and not isinstance(value, kinds) and not callable(value) and not _is_parameters(value)
    ]  # fmt: skip


def _attributes(agent: Any) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in vars(agent).items() if name not in LEFT_OUT)


# Torch is asked for nothing by name: this module is imported where there is none.


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach") and hasattr(value, "requires_grad") and not hasattr(value, "state_dict")


def _is_module(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "parameters", None))


def _is_optimizer(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and hasattr(value, "param_groups")


def _is_parameters(value: Any) -> bool:
    """Whether it is a list of tensors: those are of a module, which has them."""
    return isinstance(value, list | tuple) and all(_is_tensor(each) for each in value)


def _is_plain(value: Any) -> bool:
    """Whether JSON holds it as it is."""
    if isinstance(value, bool | int | float | str) or value is None:
        return type(value) in (bool, int, float, str, type(None))
    if isinstance(value, list):
        return all(_is_plain(each) for each in value)
    return isinstance(value, dict) and all(type(key) is str and _is_plain(each) for key, each in value.items())


def _array(value: Any) -> NDArray[Any]:
    return np.array(value.detach().cpu().numpy() if _is_tensor(value) else value)


def _copy_into(tensor: Any, array: NDArray[Any]) -> None:
    import torch

    if tuple(tensor.shape) != array.shape:
        problem = f"holds a tensor of shape {array.shape} where this agent has one of {tuple(tensor.shape)}"
        raise DataError("a checkpoint", problem)
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(array))


def _restore_module(name: str, module: Any, arrays: Mapping[str, NDArray[Any]]) -> None:
    for key, tensor in module.state_dict().items():
        _copy_into(tensor, arrays[f"{name}.{key}"])


def _add_optimizer(name: str, optimizer: Any, arrays: Arrays, facts: dict[str, Any]) -> None:
    state = optimizer.state_dict()
    plain: dict[str, dict[str, Any]] = {}
    for number, each in state["state"].items():
        for key, value in each.items():
            if _is_tensor(value):
                arrays[f"{name}:{number}.{key}"] = _array(value)
            else:
                plain.setdefault(str(number), {})[key] = value
    facts[name] = {"state": plain, "groups": [_plain_group(group) for group in state["param_groups"]]}


def _plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in group.items()}
    return {key: value for key, value in values.items() if key != "params" and _is_plain(value)}


def _restore_optimizer(name: str, optimizer: Any, arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> None:
    import torch

    found = facts[name]
    state: dict[int, dict[str, Any]] = {int(number): dict(each) for number, each in found["state"].items()}
    for key, array in arrays.items():
        if key.startswith(f"{name}:"):
            number, _, field = key.removeprefix(f"{name}:").partition(".")
            state.setdefault(int(number), {})[field] = torch.from_numpy(array)
    groups = optimizer.state_dict()["param_groups"]
    for group, saved in zip(groups, found["groups"], strict=True):
        group |= {key: tuple(v) if isinstance(group.get(key), tuple) else v for key, v in saved.items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _random_arrays() -> Arrays:
    """States of the generators that agents draw from."""
    import sys

    torch = sys.modules.get("torch")
    return {} if torch is None else {"random:torch": torch.get_rng_state().numpy()}


def _restore_random(arrays: Mapping[str, NDArray[Any]]) -> None:
    import sys

    torch = sys.modules.get("torch")
    if torch is not None and "random:torch" in arrays:
        torch.set_rng_state(torch.from_numpy(arrays["random:torch"]))


def _text(facts: Any) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(facts).encode(), np.uint8)


def _path(folder: Path, number: int) -> Path:
    return folder / f"agent-{number}.safetensors"


def _numbers(folder: Path) -> list[int]:
    names = (
        path.name.removeprefix("agent-").removesuffix(".safetensors") for path in folder.glob("agent-*.safetensors")
    )
    return [int(name) for name in names if name.isdigit()]
