"""Checkpoints of an agent: its state as one file of named arrays, read from its attributes and restored to them.

    model.actor.net.0.weight      parameters and buffers of a module     :facts      everything else, a plain value:
    log_alpha                     a tensor, or an array                              numbers, texts, generators, lists,
    pi_optimizer['state'][3][...  arrays of an optimizer                         dicts, the trainer's counters

A file holds no code. The file also holds the agent's form at its creation. If a later agent is created with another
setting, the checkpoint's value is compared with both:

    first created with   in the checkpoint   created with now   value after a restart
    64                   64                   64                 64
    0                    500                  0                  500     training has changed it
    0.99                 0.99                 0.9                0.9     the new setting; logged
    1.0                  0.1                  0.5                none: ParameterError names the values
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from memoire.errors import DataError, ParameterError
from memoire.kinds import KINDS, pack, unpack

from . import weights

_log = logging.getLogger(__name__)

PREFIX: Final = "agent-"
"""Prefix of checkpoints' file names."""
FACTS: Final = ":facts"
"""Name of the file's array with all other values, as plain values of `wire.values`. No attribute has this name."""
LEFT_OUT: Final = ("observation_space", "action_space", "device")
"""Attributes that the agent's caller sets; a checkpoint leaves them out."""
SETTINGS: Final = (bool, int, float, str, bytes, type(None))
"""Types of values that are nodes without change. NumPy's numbers are nodes, too."""
CONTAINERS: Final[dict[str, type]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
ARRAYS: Final = ("array", "tensor", "module")
"""Kinds of nodes whose values are arrays of the file."""
MISSING: Final = {"kind": "missing"}
KEEP: Final = {"kind": "keep"}
"""Node that keeps the agent's present value."""

Arrays = dict[str, NDArray[Any]]
Node = Any
"""Node of the tree: a setting itself, or a dict with "kind" for any other value."""


class _NotHeld(Exception):
    """A value that no checkpoint can hold; the argument is its type."""


def save_agent(folder: Path, agent: Any, form: Node, facts: Mapping[str, Any]) -> list[str]:
    """Write a checkpoint; it is on disk as a whole when the call returns. Raises OSError.

    Args:
        form: `form_of` the agent before its training.
        facts: Counters of the trainer.

    Returns:
        Names of modules and optimizers that the agent created since. A restart cannot create them, and fails.
    """
    arrays, tree = state_of(agent)
    tree |= {"made": form, "trainer": dict(facts)}
    files = weights.NumberedFiles(folder, PREFIX)
    files.save((files.newest() or 0) + 1, arrays | {FACTS: packed_tree(tree)})
    nodes = tree["agent"].items()
    return [name for name, node in nodes if _kind(node) in ("module", "state") and _kind(form.get(name)) != _kind(node)]


def load_agent(folder: Path, agent: Any) -> dict[str, Any] | None:
    """Restore a new agent from the newest checkpoint; return the trainer's counters, or None without a checkpoint.

    Raises:
        DataError: the checkpoint is damaged, or of another agent.
        ParameterError: the agent was created with another value of a setting that training has changed, too.
    """
    files = weights.NumberedFiles(folder, PREFIX)
    if (number := files.newest()) is None:
        return None
    path = files.path(number)
    arrays = weights.load(path)
    with raise_data_errors(str(path), "does not fit this agent"):
        tree = unpack(arrays.pop(FACTS).tobytes(), str(path))
        trainer = dict(tree["trainer"])
        restore(agent, arrays, tree, tree["made"], str(path))
    return trainer


@contextlib.contextmanager
def raise_data_errors(path: str, problem: str) -> Iterator[None]:
    """Raise DataError for errors in the block, which reads a checkpoint."""
    try:
        yield
    except (KeyError, ValueError, TypeError, RuntimeError, AttributeError, OverflowError) as error:
        if isinstance(error, DataError | ParameterError):
            raise
        raise DataError(path, f"{problem} ({(str(error) or type(error).__name__).splitlines()[0]})") from error


def warn_of_changed_settings(settings: Mapping[str, Any], saved: Mapping[str, Any], who: str) -> None:
    """Warn of each setting of a trainer or learner that differs from its checkpoint; the new setting is used."""
    for name, value in settings.items():
        if name in saved and not _same(saved[name], value):
            _log.warning("going on with %s = %r, as set on this %s; the checkpoint has %r",
                         name, value, who, saved[name])  # fmt: skip


def state_of(owner: Any, skipped: Collection[str] = LEFT_OUT) -> tuple[Arrays, dict[str, Any]]:
    """Return arrays [*F] by name and a tree of plain values: an object's attributes and the global generators."""
    writer = _Writer(owner)
    agent = {name: node for name, node in writer.attributes(skipped) if not isinstance(node, _NotHeld)}
    return writer.arrays, {"agent": agent, "random": _global_random()}


def form_of(owner: Any, skipped: Collection[str] = LEFT_OUT) -> Node:
    """Return an object's form: its settings, and the shapes and dtypes of its arrays."""
    return {name: _form(node) for name, node in state_of(owner, skipped)[1]["agent"].items()}


def restore(
    owner: Any, arrays: Mapping[str, NDArray[Any]], tree: Mapping[str, Any], form: Node, path: str,
    skipped: Collection[str] = LEFT_OUT,
) -> list[str]:  # fmt: skip
    """Restore a new object, and the global generators, from `state_of` a former object: arrays [*F] and tree.

    Args:
        form: `form_of` the former object at its creation.
        path: Name of the checkpoint in errors.

    Returns:
        A sentence for each setting that differs from the checkpoint and is not restored; they are logged.

    Raises:
        DataError: they do not fit. ParameterError: the setting differs, and training has changed it.
    """
    now, saved = form_of(owner, skipped), tree["agent"]
    merge = _Merge(path, frozenset(getattr(owner, "fixed", ())))
    for name in now.keys() - saved.keys():
        if _kind(now[name]) in (*ARRAYS, "state"):
            raise DataError(path, f"has no {name!r}, which this agent has as {_describe(now[name])}")
    merged = {name: merge(form.get(name, MISSING), node, now.get(name, MISSING), name) for name, node in saved.items()}
    reader = _Reader(owner, arrays, path)
    # Modules come first: lists and optimizers hold their parameters.
    for name in sorted(merged, key=lambda name: _kind(merged[name]) != "module"):
        if merged[name] is not KEEP:
            setattr(owner, name, reader.value(getattr(owner, name, None), merged[name], name))
    _restore_random(tree["random"])
    for sentence in merge.kept:
        _log.warning("%s", sentence)
    return merge.kept


def unsaved(owner: Any, skipped: Collection[str] = LEFT_OUT) -> list[str]:
    """Return attributes that no checkpoint holds, with their types. Functions and classes are not listed."""
    nodes = _Writer(owner).attributes(skipped)
    lost = [(name, node) for name, node in nodes if isinstance(node, _NotHeld) and not callable(getattr(owner, name))]
    return [f"{name} ({node})" for name, node in lost]


def packed_tree(tree: Any) -> NDArray[np.uint8]:
    """Encode a tree as an array [B] of a file."""
    return np.frombuffer(pack(tree, "checkpoint"), np.uint8)


# The module is imported without torch, and does not import it here.


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach") and hasattr(value, "requires_grad") and not hasattr(value, "state_dict")


def _is_module(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "parameters", None))


def _is_stateful(value: Any) -> bool:
    """Return True if the value has `state_dict` and `load_state_dict`, as optimizers and schedulers have."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def state_of_generator(value: Any) -> tuple[str, Any] | None:
    """Return kind and state (a plain value) of a random generator; None for any other value."""
    if isinstance(value, np.random.Generator):
        return "numpy", value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return "numpy.legacy", value.get_state(legacy=False)
    if type(value) is random.Random:
        return "python", value.getstate()
    if type(value).__name__ == "Generator" and hasattr(value, "initial_seed"):
        return "torch", value.get_state().numpy()
    return None


class _Writer:
    """Encoder of an object's values as nodes; collects their arrays.

    Args:
        owner: Object with the modules, whose parameters other attributes may hold, too.
    """

    def __init__(self, owner: Any) -> None:
        self.arrays: Arrays = {}
        self._owner = owner
        self._seen: dict[int, tuple[str, Any]] = {}  # path and object by the object's id
        self._parameters = {
            id(parameter): [name, key]
            for name, module in vars(owner).items()
            if not isinstance(module, type) and _is_module(module) and hasattr(module, "named_parameters")
            for key, parameter in module.named_parameters()
        }

    def attributes(self, skipped: Collection[str]) -> Iterator[tuple[str, Node | _NotHeld]]:
        """Yield name and node of each attribute, or _NotHeld if no checkpoint can hold it."""
        for name, value in list(vars(self._owner).items()):
            if name not in skipped:
                before = dict(self.arrays)
                try:
                    yield name, self.node(value, name)
                except _NotHeld as error:
                    self.arrays = before
                    yield name, error

    def node(self, value: Any, path: str) -> Node:
        """Return the node of a value and of all values in it. Raises _NotHeld."""
        if type(value) in SETTINGS or (isinstance(value, np.generic) and value.dtype.kind in KINDS):
            return value
        if isinstance(value, type):
            raise _NotHeld("a class")
        if id(value) in self._parameters:
            return {"kind": "parameter", "of": self._parameters[id(value)]}
        if id(value) in self._seen:
            return {"kind": "same", "of": self._seen[id(value)][0]}
        node = self._new(value, path)
        self._seen[id(value)] = path, value  # keeps the object, so that its id stays unique
        return node

    def _new(self, value: Any, path: str) -> Node:
        generator = state_of_generator(value)
        if generator is not None:
            return {"kind": "generator", "of": generator[0], "state": generator[1]}
        if _is_module(value):
            forms = {key: self._add(f"{path}.{key}", tensor) for key, tensor in value.state_dict().items()}
            return {"kind": "module", "arrays": forms}
        if _is_stateful(value):
            return {"kind": "state", "of": type(value).__name__, "tree": self.node(value.state_dict(), path)}
        if _is_tensor(value):
            grad = bool(value.requires_grad and value.is_leaf)
            return {"kind": "tensor", "name": path, "form": self._add(path, value), "grad": grad,
                    "is_on_cpu": value.device.type == "cpu"}  # fmt: skip
        if type(value) is np.ndarray:
            return {"kind": "array", "name": path, "form": self._add(path, value)}
        return self._container(value, path)

    def _container(self, value: Any, path: str) -> Node:
        name = type(value).__name__
        if CONTAINERS.get(name) is type(value):
            each: Any = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
            items = [self.node(item, f"{path}[{index}]") for index, item in enumerate(each)]
            return {"kind": name, "items": items, "room": getattr(value, "maxlen", None)}
        if type(value) is dict or name in ("OrderedDict", "defaultdict"):
            pairs = [[self.node(key, path), self.node(each, f"{path}[{key!r}]")] for key, each in value.items()]
            return {"kind": "dict", "items": pairs}
        raise _NotHeld(type(value).__name__)

    def _add(self, name: str, value: Any) -> list[Any]:
        """Add a tensor or array [*F]; return its dtype and shape. Dtypes that files lack are stored as bytes."""
        try:
            array: Any = value.detach().cpu().contiguous() if _is_tensor(value) else np.ascontiguousarray(value)
            dtype, shape = str(array.dtype).removeprefix("torch."), [int(each) for each in value.shape]
            if _is_tensor(value):
                if dtype in ("bfloat16", "complex32") or dtype.startswith("float8"):
                    import torch

                    array = array.reshape(-1).view(torch.uint8)
                array = array.numpy()
        except (TypeError, RuntimeError, AttributeError) as error:
            raise _NotHeld(type(value).__name__) from error
        if array.dtype.hasobject:
            raise _NotHeld("an array of objects")
        if array.dtype not in weights.DTYPES.values():
            dtype = dtype if _is_tensor(value) else array.dtype.str
            array = np.frombuffer(array.tobytes(), np.uint8)
        self.arrays[name] = np.array(array)
        return [dtype, shape]


class _Merge:
    """Merge of a checkpoint's nodes with those of a new object; see the table at the top.

    Args:
        path: Name of the checkpoint in errors.
        fixed: Names of attributes that must equal those of the checkpoint.
    """

    def __init__(self, path: str, fixed: frozenset[str]) -> None:
        self._path, self._fixed = path, fixed
        self.kept: list[str] = []
        """A sentence for each value that differs from the checkpoint."""

    def __call__(self, first: Node, saved: Node, now: Node, name: str) -> Node:
        """Return the node to restore, with KEEP for unchanged parts. `first` and `saved` are the former object's."""
        kind, form = _kind(now), _form(saved)
        if _kind(saved) in ("module", "state") and _kind(now) != _kind(saved):
            problem = f"holds {name!r} as {_describe(saved)}, but this agent has {_describe(now)}"
            raise DataError(self._path, f"{problem}: create it in the agent's __init__, so that a restart can fill it")
        if now is MISSING or _same(form, now) or (_same(first, now) and kind not in ("module", "state")):
            return saved
        if name in self._fixed:
            if now is None:
                return saved
            raise ParameterError(name, _value(now), self._expected(first, saved))
        if kind == "state" and _kind(first) in ("state", "missing"):
            before = first if first is MISSING else first["tree"]
            return saved | {"tree": self(before, saved["tree"], now["tree"], name)}
        if kind == _kind(saved) == _kind(first) == "dict":
            return saved | {"items": self._pairs(first, saved, now, name)}
        if kind == _kind(saved) == _kind(first) and kind in ("list", "tuple") and (
            len(first["items"]) == len(saved["items"]) == len(now["items"])
        ):  # fmt: skip
            rows = enumerate(zip(first["items"], saved["items"], now["items"], strict=True))
            return saved | {"items": [self(*three, f"{name}[{index}]") for index, three in rows]}
        if kind == _kind(saved) == "module":
            name, saved, now = _first_difference(name, saved, now)
        if {kind, _kind(saved)} & {*ARRAYS, "generator"} or name.endswith("['params']"):
            raise DataError(self._path, f"holds {name!r} as {_describe(saved)}, but this agent has {_describe(now)}")
        if first is not MISSING and _same(form, first):
            self.kept.append(f"going on with {name} = {_describe(now)}, as set on this agent; "
                             f"{self._path} has {_describe(saved)}")  # fmt: skip
            return KEEP
        if first is MISSING:
            self.kept.append(f"going on with {name} = {_describe(saved)} of {self._path}; this agent was created with "
                             f"{_describe(now)}")  # fmt: skip
            return saved
        raise ParameterError(name, _value(now), self._expected(first, saved))

    def _pairs(self, first: Node, saved: Node, now: Node, name: str) -> list[Any]:
        before, former, new = ({pack(key): [key, each] for key, each in node["items"]} for node in (first, saved, now))
        pairs = []
        for packed in [*new, *(packed for packed in former if packed not in new and packed not in before)]:
            key, node = (new if packed in new else former)[packed][0], KEEP
            if packed in former:
                one, two, three = (each.get(packed, [key, MISSING])[1] for each in (before, former, new))
                node = self(one, two, three, f"{name}[{key!r}]")
            pairs.append([key, node])
        return pairs

    def _expected(self, first: Node, saved: Node) -> str:
        if _same(_form(saved), first):
            return f"{_describe(saved)}, as in {self._path}: it cannot be changed"
        return (
            f"{_describe(first)}, its value when the agent of {self._path} was created; training has changed it to "
            f"{_describe(saved)} since. Set it after the trainer is created, or move the checkpoint away"
        )


class _Reader:
    """Decoder of nodes; writes their content into the object's present values if these fit.

    Args:
        owner: Object with the modules of the parameters; tensors go to its device.
        arrays: Arrays of the file.
        path: Name of the checkpoint in errors.
    """

    def __init__(self, owner: Any, arrays: Mapping[str, NDArray[Any]], path: str) -> None:
        self._owner, self._arrays, self._path = owner, arrays, path
        self._decoded: dict[str, Any] = {}  # decoded values by path
        self._filled: dict[int, Any] = {}  # values that already belong to a node, by id

    def value(self, now: Any, node: Node, path: str) -> Any:
        """Return the value of a node: `now` with new content if it can hold that, else a new object."""
        if not isinstance(node, dict):
            return node
        kind = node["kind"]
        if kind == "keep":
            return now
        if kind == "same":
            return self._decoded[node["of"]]
        if kind == "parameter":
            name, key = node["of"]
            return dict(getattr(self._owner, name).named_parameters())[key]
        former = None if id(now) in self._filled else now
        self._decoded[path] = value = getattr(self, f"_{kind}")(former, node, path)
        self._filled[id(value)] = value
        return value

    def _module(self, now: Any, node: Node, path: str) -> Any:
        for key, tensor in now.state_dict().items():
            if [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] != node["arrays"].get(key):
                raise DataError(self._path, f"holds {path!r} as {_describe(node)}, but this agent has another module")
            self._fill(tensor, f"{path}.{key}", node["arrays"][key])
        return now

    def _state(self, now: Any, node: Node, path: str) -> Any:
        now.load_state_dict(self.value(now.state_dict(), node["tree"], path))
        return now

    def _tensor(self, now: Any, node: Node, path: str) -> Any:
        if _is_tensor(now) and [str(now.dtype).removeprefix("torch."), list(now.shape)] == node["form"]:
            return self._fill(now, node["name"], node["form"])
        tensor = self._torch(node["name"], node["form"])
        device = None if node["is_on_cpu"] else getattr(self._owner, "device", None)
        return (tensor if device is None else tensor.to(device)).requires_grad_(node["grad"])

    def _array(self, now: Any, node: Node, path: str) -> Any:
        dtype, shape = node["form"]
        array = self._arrays[node["name"]]
        result = (np.frombuffer(array.tobytes(), dtype) if str(array.dtype) != dtype else array).reshape(shape)
        if type(now) is np.ndarray and (now.dtype, now.shape) == (result.dtype, result.shape) and now.flags.writeable:
            now[...] = result
            return now
        return np.array(result)

    def _generator(self, now: Any, node: Node, path: str) -> Any:
        state = node["state"]
        present = None if now is None else state_of_generator(now)
        if present is None or present[0] != node["of"] or _bits(present[1]) != _bits(state):
            now = _new_generator(node["of"], state, getattr(self._owner, "device", None))
        put_generator(now, node["of"], state)
        return now

    def _dict(self, now: Any, node: Node, path: str) -> Any:
        present = now if isinstance(now, dict) else {}
        items = {}
        for key, each in node["items"]:
            name = self.value(None, key, path)
            items[name] = self.value(present.get(name), each, f"{path}[{name!r}]")
        return _refill(now, items, dict)

    def _list(self, now: Any, node: Node, path: str) -> Any:
        kind = CONTAINERS[node["kind"]]
        present = list(now) if isinstance(now, list | tuple | deque) and len(now) == len(node["items"]) else None
        items = [
            self.value(None if present is None else present[index], each, f"{path}[{index}]")
            for index, each in enumerate(node["items"])
        ]
        return _refill(now, deque(items, node["room"]) if kind is deque else kind(items), kind)

    _tuple = _set = _frozenset = _deque = _list

    def _fill(self, tensor: Any, name: str, form: list[Any]) -> Any:
        import torch

        with torch.no_grad():
            tensor.copy_(self._torch(name, form))
        return tensor

    def _torch(self, name: str, form: list[Any]) -> Any:
        import torch

        dtype, array = getattr(torch, form[0]), np.array(self._arrays[name])
        tensor = torch.from_numpy(array)
        return tensor if tensor.dtype == dtype else tensor.reshape(-1).view(dtype).reshape(form[1])


def _refill(now: Any, new: Any, kind: Any) -> Any:
    """Return a list, dict or deque with new content if its type fits, else the new object."""
    if type(now) is not kind or kind not in (list, dict, deque) or getattr(now, "maxlen", None) != getattr(
        new, "maxlen", None
    ):  # fmt: skip
        return new
    now.clear()
    getattr(now, "update" if kind is dict else "extend")(new)
    return now


def _kind(node: Node) -> str:
    return str(node["kind"]) if isinstance(node, dict) else "value"


def _form(node: Node) -> Node:
    """Return a node without the states of generators."""
    if isinstance(node, list):
        return [_form(each) for each in node]
    if not isinstance(node, dict):
        return node
    return {key: _form(each) for key, each in node.items() if key != "state" or _kind(node) != "generator"}


def _same(one: Node, other: Node) -> bool:
    return pack(one) == pack(other)


def _value(node: Node) -> Any:
    """Return a node as errors show it."""
    return _Shown(_describe(node)) if isinstance(node, dict) else node.item() if isinstance(node, np.generic) else node


class _Shown(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _describe(node: Node) -> str:
    if not isinstance(node, dict):
        return repr(_value(node))
    kind = node["kind"]
    if kind == "missing":
        return "nothing"
    if kind in ("array", "tensor"):
        return f"{node['form'][0]}{node['form'][1]}"
    if kind == "module":
        forms = ", ".join(f"{key} {dtype}{shape}" for key, (dtype, shape) in node["arrays"].items())
        return f"a module of {forms or 'no arrays'}"
    if kind == "dict":
        return "{" + ", ".join(f"{_describe(key)}: {_describe(each)}" for key, each in node["items"]) + "}"
    if "items" in node:
        return f"{kind}({', '.join(map(_describe, node['items']))})"
    return f"a {node.get('of', kind)}" if kind != "generator" else f"a generator of {node['of']}"


def _first_difference(name: str, one: Node, other: Node) -> tuple[str, Node, Node]:
    """Return name and nodes of an array in which two modules differ."""
    arrays, others = one["arrays"], other["arrays"]
    key = next(key for key in (*arrays, *others) if arrays.get(key) != others.get(key))
    first, second = (MISSING if key not in each else {"kind": "array", "form": each[key]} for each in (arrays, others))
    return f"{name}.{key}", first, second


def _bits(state: Any) -> Any:
    """Return the name of NumPy's bit generator if the state is of one, else None."""
    return state.get("bit_generator") if isinstance(state, Mapping) else None


BIT_GENERATORS: Final = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


def _new_generator(kind: str, state: Any, device: Any) -> Any:
    if kind == "python":
        return random.Random()
    if kind == "torch":
        import torch

        return torch.Generator(device or "cpu")
    name = _bits(state)
    if name not in BIT_GENERATORS:
        raise DataError("a checkpoint", f"holds a generator of {name}; known are {', '.join(BIT_GENERATORS)}")
    bits = getattr(np.random, name)()
    return np.random.RandomState(bits) if kind == "numpy.legacy" else np.random.Generator(bits)


def put_generator(generator: Any, kind: str, state: Any) -> None:
    """Set a generator to a state that `state_of_generator` returned."""
    if kind == "python":
        generator.setstate(state)
    elif kind == "torch":
        import torch

        generator.set_state(torch.from_numpy(state))
    elif kind == "numpy":
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _global_random() -> dict[str, Any]:
    """Return the states of the process's generators: Python's, NumPy's, and torch's of each device in use."""
    states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}  # noqa: NPY002
    torch = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = torch.get_rng_state().numpy()
        if torch.cuda.is_initialized():
            states["cuda"] = [each.numpy() for each in torch.cuda.get_rng_state_all()]
    return states


def _restore_random(states: Mapping[str, Any]) -> None:
    put_generator(random, "python", states["python"])
    put_generator(np.random, "numpy.legacy", states["numpy"])
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if "torch" in states:
        torch.set_rng_state(torch.from_numpy(states["torch"]))
    if torch.cuda.is_available():
        for number, state in enumerate(states.get("cuda", ())[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(torch.from_numpy(state), number)
