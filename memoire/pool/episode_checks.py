"""Received episodes, completely checked before a memory takes them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.replay import dataset
from memoire.replay.parameters import Parameters, reward_size
from memoire.replay.schema import Schema
from memoire.replay.value_conversion import is_finite
from memoire.wire import messages, unpack
from memoire.wire.layout import layout_of
from memoire.wire.parts import ContainerKind


@dataclass(frozen=True, slots=True)
class CheckedEpisode:
    """A received episode that fits; its arrays may lie in the received buffer."""

    episode: dataset.Episode
    age: NDArray[np.float32]
    """[T] seconds since the entries were recorded."""
    samples: int
    """Entries."""


def checked_episode(
    body: messages.Body,
    payload: Any,
    schema: Schema,
    parameters: Parameters,
    capacity: int,
    *,
    limits: Limits,
    checksum: int | None,
    stays: bool = False,
) -> CheckedEpisode:
    """An episode that there is room for, if no other one is there; see `container.check`.

    Args:
        capacity: Entries there is room for.
        stays: Whether the arrays are kept: then they lie in a copy of what was received.

    Raises:
        ProtocolError: and nothing else, whatever the bytes.
    """
    if not isinstance(body, messages.Episode):
        raise ProtocolError("unexpected", f"{body.type.name} was pushed; this table stores whole episodes")
    layout = layout_of(schema, parameters, ContainerKind.EPISODE, final=body.has_final)
    if checksum is None or stays:
        held = unpack.check(payload, layout, limits, checksum=checksum)
    else:
        held = unpack.check_in_place(payload, layout, limits, checksum=checksum)
    entries = int(held.samples)
    if entries > capacity:
        raise ProtocolError("too_large", f"an episode of {entries} entries; there is room for {capacity} in all")
    rows = unpack.read_episode(held, layout)
    _check_finite(schema, rows.columns, rows.final)
    episode = dataset.Episode(
        columns=rows.columns,
        init_w=rows.init_w,
        priority=None,
        learned=np.zeros(entries, np.bool_),
        born=None,
        model_version=rows.model_version,
        multiplier=body.multiplier,
        terminated=body.terminated,
        final_state=rows.final,
        bootstrap_value=_bootstrap(body, schema),
        update_value=body.update_value,
        update_weight=body.update_weight,
        is_cut=body.cut,
    )
    return CheckedEpisode(episode, rows.age, entries)


def _check_finite(schema: Schema, columns: dict[str, Any], final: dict[str, Any] | None) -> None:
    for name in schema.finite:
        for values in (columns[name], None if final is None else final.get(name)):
            if values is not None and not is_finite(values):
                raise ProtocolError("value", f"column {name!r} is not finite")


def _bootstrap(body: messages.Episode, schema: Schema) -> NDArray[np.float32] | None:
    """The value of the state in which the episode was cut off, in the reward's shape."""
    if body.bootstrap is None:
        return None
    shape = () if schema.reward is None else schema[schema.reward].shape
    with np.errstate(over="ignore"):
        value = np.array(body.bootstrap, np.float32)
    if value.size != reward_size(schema) or not np.isfinite(value).all():
        raise ProtocolError("value", f"the value of the final state is not {reward_size(schema)} finite numbers")
    if body.terminated and value.any():
        raise ProtocolError("value", "the value of a state after which nothing comes is not 0")
    return value.reshape(shape)
