"""The memory that holds a table's episodes, its name, and how many entries a limit of bytes has room for.

    limit of 1 MB, entries of 100 bytes     plain columns: room for 10,000 entries
                                            ragged columns: 5,000 entries, and 0.5 MB for their values

Another number of entries is another memory, with another name. The engine locks itself; one thread at a time may call
what changes the episodes, and any may read `now`.

Received episodes, completely checked before a memory takes them. Pure.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memoire.errors import EpisodeTooLong, MemoireError, ParameterError, ProtocolError, StaleEntry
from memoire.limits import Limits
from memoire.replay import dataset
from memoire.replay.conversion import ENTRY_OVERHEAD, is_finite
from memoire.replay.dataset import KeptEpisode
from memoire.replay.memory import MAX_ROWS, Memory
from memoire.replay.memory_state import SavedLayout
from memoire.replay.parameters import Parameters, reward_size
from memoire.replay.schema import Schema
from memoire.wire import _bytes, containers, messages
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
        held = containers.check(payload, layout, limits, checksum=checksum)
    else:
        held = containers.check_in_place(payload, layout, limits, checksum=checksum)
    entries = int(held.samples)
    if entries > capacity:
        raise ProtocolError("too_large", f"an episode of {entries} entries; there is room for {capacity} in all")
    rows = containers.read_episode(held, layout)
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


MAX_DEFAULT_ENTRIES: Final = 1_000_000
"""Entries that there is room for at most where nobody said a number: their bookkeeping takes memory at once."""


class NamedMemory(NamedTuple):
    """The engine, and the 16 bytes by which ids call it. Numbers never come again under one name."""

    memory: Memory
    owner: bytes


@dataclass(frozen=True, slots=True)
class ByteRoom:
    """What fits into a limit of bytes.

    Args:
        capacity: Entries that are asked for; 0: as many as fit, `MAX_DEFAULT_ENTRIES` at most.
    """

    schema: Schema
    capacity: int

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry, but for the values of ragged columns."""
        return self.schema.entry_bytes + ENTRY_OVERHEAD

    @property
    def least_bytes(self) -> int:
        """The least limit: for the capacity that was asked for, or one entry."""
        return self.entry_bytes * max(1, self.capacity)

    def entries(self, byte_limit: int) -> int:
        """Entries there is room for. Raises ParameterError where the limit is too small."""
        most = min(byte_limit // self.entry_bytes, MAX_ROWS)
        if byte_limit < self.least_bytes:
            expected = f"at least {self.least_bytes} for {max(1, self.capacity)} entries of {self.entry_bytes} bytes"
            raise ParameterError("byte_limit", byte_limit, expected)
        if self.schema.ragged:
            most = max(1, most // 2)
        return self.capacity or min(most, MAX_DEFAULT_ENTRIES)

    def value_bytes(self, entries: int, byte_limit: int) -> int:
        """Bytes that values of ragged columns may take beside so many entries; 0 where there are none."""
        return max(1, byte_limit - entries * self.entry_bytes) if self.schema.ragged else 0


class EpisodeMemory:
    """Takes episodes in, and is replaced by a memory of another size where that is asked for.

    Raises:
        ParameterError: not one entry fits into `byte_limit`, or the room's capacity does not.
    """

    def __init__(self, room: ByteRoom, parameters: Parameters | None, byte_limit: int, seed: int | None) -> None:
        self.room, self._seed, self._made = room, seed, 0
        self.byte_limit = byte_limit
        self.now = self._make(room.entries(byte_limit), byte_limit, parameters)
        """The memory of this moment."""
        self._put_back: dict[int, int] = {}  # checksum of the name of each episode that came from a file: its number

    def _make(self, entries: int, byte_limit: int, parameters: Parameters | None) -> NamedMemory:
        limit = self.room.value_bytes(entries, byte_limit)
        seed = seed_of(self._seed, self._made)
        made = Memory(self.room.schema, entries, parameters, seed=seed, ragged_limit=limit, container=None)
        self._made += 1
        return NamedMemory(made, secrets.token_bytes(16))

    @property
    def reserved(self) -> int:
        """Bytes that the entries may take in all."""
        memory = self.now.memory
        return memory.capacity * self.room.entry_bytes + self.room.value_bytes(memory.capacity, self.byte_limit)

    def reseed(self, seed: int) -> None:
        """Draw as a memory that was made with this seed; while it is empty."""
        self._seed, self._made = seed, 0
        old = self.now.memory
        self._replace(self._make(old.capacity, self.byte_limit, old.parameters))

    def add(self, checked: CheckedEpisode) -> tuple[int, int]:
        """Store a checked episode; the oldest make room. Returns how many episodes left, and entries.

        Raises:
            ProtocolError: the memory has become too small for it meanwhile.
        """
        memory, episode = self.now.memory, checked.episode
        values = [episode.columns[name] for name in self.room.schema.entry_names]
        with memory.held():
            episodes, entries = memory.num_episodes, memory.num_entries
            try:
                memory.insert(values, episode.init_w, episode.model_version, checked.age, **episode.end)
            except MemoireError as error:
                raise ProtocolError("too_large", str(error)) from error
            return episodes + 1 - memory.num_episodes, entries + checked.samples - memory.num_entries

    def put_back(self, kept: KeptEpisode) -> tuple[bool, int]:
        """Store an episode that was walked over: see `EpisodePool.put_back`. Returns whether it was not here already,
        and how many left.
        """
        name, (memory, owner) = _name_of(kept.owner, kept.number), self.now
        number = kept.number if kept.owner == owner else self._put_back.get(name)
        if number is not None and _has(memory, number):
            return False, 0
        with memory.held():
            before = memory.num_episodes
            number = int(dataset.put(memory, kept.episode)[0])
            gone = before + 1 - memory.num_episodes
        self._put_back[name] = number
        if len(self._put_back) > 2 * memory.num_episodes + 100:  # most of them have left since
            self._put_back = {name: number for name, number in self._put_back.items() if _has(memory, number)}
        return True, gone

    def heir(
        self, layout: SavedLayout, parameters: Parameters, *, keeps_generator: bool
    ) -> tuple[Memory, SavedLayout] | None:
        """An empty memory for the state of another one: see `EpisodePool.heir`."""
        old, numbers = self.now.memory, layout.numbers
        mine = old._counters()["random"], old.generator.bit_generator.state
        form = {"capacity": old.capacity, "page_rows": old.contents()["page_rows"], "live": old.live}
        if any(numbers[name] != value for name, value in form.items()):
            return None
        numbers = numbers | {"ragged_limit": old.ragged_limit}
        if keeps_generator:
            numbers |= {"engine": numbers["engine"] | {"random": mine[0]}, "generator": mine[1]}
        return Memory(self.room.schema, old.capacity, parameters, container=None), SavedLayout(numbers, layout.arrays)

    def take_over(self, memory: Memory, names: Mapping[int, tuple[bytes, int]]) -> None:
        """Go on with this memory: see `EpisodePool.take_over`."""
        memory.limit_ragged(self.now.memory.ragged_limit)
        self._replace(NamedMemory(memory, secrets.token_bytes(16)))
        self._put_back = {_name_of(*name): number for number, name in names.items()}

    def configure(self, parameters: Parameters) -> int:
        """Weigh and cut everything stored by new parameters; returns how many episodes `max_episode` let go."""
        memory = self.now.memory
        with memory.held():
            before = memory.num_episodes
            memory.configure(parameters)
            return before - memory.num_episodes

    def limit(self, byte_limit: int) -> int:
        """Have room for this many bytes from now on; returns how many episodes had to go: see `EpisodePool.limit`."""
        entries, old = self.room.entries(byte_limit), self.now.memory
        if entries != old.capacity:
            fresh = self._make(entries, byte_limit, old.parameters)
            moved = _move(old, fresh.memory)
            gone = old.num_episodes - fresh.memory.num_episodes
            self._put_back = {name: moved[was] for name, was in self._put_back.items() if was in moved}
            self._replace(fresh)
        else:
            before = old.num_episodes
            old.limit_ragged(self.room.value_bytes(entries, byte_limit))
            gone = before - old.num_episodes
        self.byte_limit = byte_limit
        return gone

    def clear(self) -> int:
        """Let all episodes go; returns how many."""
        old = self.now.memory
        self._put_back.clear()
        self._replace(self._make(old.capacity, self.byte_limit, old.parameters))
        return old.num_episodes

    def _replace(self, fresh: NamedMemory) -> None:
        fresh.memory.saw_model(self.now.memory.newest_model)
        self.now = fresh


def seed_of(seed: int | None, life: int) -> int | None:
    """The seed of so many former lives, or memories, of one that was given this seed: none draws as another did."""
    if seed is None or life == 0:
        return seed
    return int(np.random.SeedSequence(seed & (2**64 - 1), spawn_key=(life,)).generate_state(1, np.uint64)[0])


def _move(old: Memory, fresh: Memory) -> dict[int, int]:
    """Put all episodes that have room into a fresh memory; returns the new number of each, by its old one."""
    moved = {}
    with old.held():
        for number, episode in dataset.walk(old):
            if len(episode) <= fresh.capacity:
                with suppress(EpisodeTooLong):  # its ragged values have no room
                    moved[number] = int(dataset.put(fresh, episode)[0])
    return moved


def _name_of(owner: bytes, number: int) -> int:
    """What names an episode for ever."""
    return _bytes.checksum(owner + number.to_bytes(8, "little", signed=True))


def _has(memory: Memory, number: int) -> bool:
    """Whether an entry is still there."""
    try:
        memory.weights([number])
    except StaleEntry:
        return False
    return True
