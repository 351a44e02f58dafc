"""A draw over the caches of several servers: `plan` shares a batch out over their clients, `finish` makes one batch of
what they sent.

`caches` derives the rule, and follows it over the caches of one server.

Samples that a draw took: how long they waited, and the container in which a server sends them to a reader.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from memoire import _core
from memoire.errors import ProtocolError
from memoire.replay import mixing
from memoire.replay.batch import Batch, GatheredSamples, place, sequence_mask
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.wire._container import HeldCache, container_bytes
from memoire.wire.compression import codec_of, may_pack, pack_block
from memoire.wire.containers import Container, ContainerHead
from memoire.wire.layout import ContainerLayout
from memoire.wire.parts import BOOKKEEPING, OF_DRAWN, BlockSpec, Part, Payload, RowCount
from memoire.wire.receivers import Page
from memoire.wire.rows import CLIENT_COUNTS

from .caches._draw import Clients, Frames, Picks, assemble


def waits_of(picks: Picks, clock: float, *, in_order: bool = False) -> NDArray[np.float32]:
    """Seconds float32 [B] for which the samples have been held: a cache says how old its entries were when it was made.

    Args:
        clock: The pool's now.
        in_order: As they were drawn, not as they lie in the batch.
    """
    arrived = np.empty(picks.size, np.float64)
    picks.arrivals(arrived, in_order)
    return np.maximum(clock - arrived, 0.0).astype(np.float32)


@lru_cache(maxsize=64)
def most_bytes(drawn: ContainerLayout, samples: int) -> float:
    """Bytes of the largest container of so many samples: no two have a frame in common. Infinity where the length of
    values is theirs to say.
    """
    if drawn.ragged:
        return float("inf")
    frames = drawn.frame_stack + drawn.length if drawn.length else 2 * drawn.frame_stack
    return container_bytes(drawn.core, samples, samples * frames, samples, samples * max(1, drawn.length), {})


class DistinctRows:
    """Picked samples as they share frames and entries: each of these once, and where each sample has its own."""

    def __init__(self, picks: Picks, layout: ContainerLayout, drawn: ContainerLayout) -> None:
        samples = picks.size
        self.indices = {
            part: np.empty((samples, layout.blocks[layout.bookkeeping(part)].row_bytes // 4), np.uint32)
            for part in layout.indices
        }
        indices = self.indices.items()
        self.frames = picks.distinct({part: index for part, index in indices if part is not Part.ENTRY_INDEX})
        self.entries = picks.distinct({part: index for part, index in indices if part is Part.ENTRY_INDEX})
        self.owner, self.chance, self.population = np.empty(samples, np.uint32), np.empty(samples), np.empty(samples)
        self.owners = np.frombuffer(picks.pack_owners(self.owner, self.chance, self.population), np.uint8)
        of_extent: dict[RowCount, Any] = {
            RowCount.PER_SAMPLE: picks,
            RowCount.PER_FRAME: self.frames,
            RowCount.PER_ENTRY: self.entries,
        }
        forms = [(i, drawn.blocks[i]) for i in drawn.ragged]
        self.elements = {
            i: of_extent[form.extent].bytes_of(_same_block(layout, drawn, form)) // form.row_bytes for i, form in forms
        }
        self.rows = samples, max(1, self.frames.size), len(self.owners) // 16, max(1, self.entries.size)
        self._drawn = drawn

    @property
    def nbytes(self) -> int:
        """Bytes of the container that `pack_drawn` makes of them, without compression."""
        return container_bytes(self._drawn.core, *self.rows, self.elements)


def pack_drawn(
    picks: Picks,
    layout: ContainerLayout,
    drawn: ContainerLayout,
    *,
    now: float,
    clock: float | None = None,
    compression: str = "none",
    page: Page | None = None,
    parts: DistinctRows | None = None,
) -> Payload:
    """Picked samples as the container of a DRAWN message: frames once, each sample with its chance and its owner.

    Args:
        picks: From a pool of `layout`, not shuffled: a client's samples are side by side.
        layout, drawn: Those of caches and of drawn containers under the same schema and parameters.
        clock: The pool's now, so that ages are those of now; None: as they came.
        compression: As of `build`, which the reader must have.
        page: Of the reply, on which they have room without compression.
        parts: What `DistinctRows` makes of the picks, if it was made already.
    """
    parts = parts or DistinctRows(picks, layout, drawn)
    frames, entries = parts.frames, parts.entries
    head = ContainerHead(picks.multi_step, made_at=now)
    packed = _pack_picked(frames, layout, drawn, parts.elements, codec_of(compression))
    if page is not None and not page.may_expand(packed, parts.nbytes):
        packed = {}
    samples, frame_rows, owner_rows, entry_rows = parts.rows
    made = Container(drawn, head, samples, frame_rows, owner_rows, packed, entry_rows, parts.elements)
    carried: dict[Part, NDArray[Any]] = {**parts.indices, Part.OWNER: parts.owner, Part.OWNERS: parts.owners}
    carried |= {Part.CHANCE: parts.chance, Part.POPULATION: parts.population}
    made.fill_blocks({drawn.bookkeeping(part): values for part, values in carried.items()})
    for i, form, source in _copied_blocks(layout, drawn):
        if i not in packed:
            distinct = entries if form.extent is RowCount.PER_ENTRY else frames
            _fill_drawn(made.view(i), picks, distinct, source, form)
    ages = made.array(Part.AGE, "<f4")
    if clock is not None and ages is not None:
        ages[:, 0] += waits_of(picks, clock, in_order=True)
    return made.payload


def _pack_picked(
    frames: Frames, layout: ContainerLayout, drawn: ContainerLayout, elements: dict[int, int], codec: int
) -> dict[int, tuple[int, bytes]]:
    """The state columns of picked samples, compressed: block -> (codec, bytes)."""
    packed: dict[int, tuple[int, bytes]] = {}
    for i, form in enumerate(drawn.blocks if codec and frames.size else ()):
        size = elements.get(i, frames.size) * form.row_bytes
        if may_pack(drawn, form, size):
            raw: Payload = np.empty(size, np.uint8)
            frames.pack_frames(_same_block(layout, drawn, form), raw)
            pack_block(packed, i, raw, codec)
    return packed


@lru_cache(maxsize=64)
def _copied_blocks(layout: ContainerLayout, drawn: ContainerLayout) -> tuple[tuple[int, BlockSpec, int], ...]:
    """The blocks of drawn containers whose rows are those of caches: (block, what it is, block in caches)."""
    forms = enumerate(drawn.blocks)
    copied = [(i, form) for i, form in forms if form.part not in OF_DRAWN and form.part not in layout.indices]
    return tuple((i, form, _same_block(layout, drawn, form)) for i, form in copied)


def _same_block(layout: ContainerLayout, drawn: ContainerLayout, form: BlockSpec) -> int:
    """Number in caches of a block of drawn containers."""
    block = layout.place(form.part, None if form.column == BOOKKEEPING else drawn.schema.names[form.column])
    assert block is not None
    return block


def _fill_drawn(target: Payload, picks: Picks, distinct: Frames, source: int, form: BlockSpec) -> None:
    if form.extent is RowCount.PER_SAMPLE:
        picks.pack_rows(source, target)
    elif distinct.size:
        distinct.pack_frames(source, target)
    else:
        target[:] = 0


MAX_BATCH: Final = (1 << 31) - 1
"""Samples of one batch."""
MAX_DRAWN: Final = 1 << 20
"""Samples that a reader may take at once."""


def check_count(samples: int) -> None:
    """Refuse to draw more than `MAX_DRAWN` samples at once. Raises ProtocolError."""
    if samples > MAX_DRAWN:
        raise ProtocolError("too_large", f"{samples} samples at once; {MAX_DRAWN} are allowed. Draw smaller batches")


@dataclass(frozen=True, slots=True)
class PooledBatch:
    """A batch out of held caches."""

    gathered: GatheredSamples
    importance: NDArray[np.float32]
    """[B] in (0, 1]: (N P(i) N_k / N_c) ** -beta over `divisor`."""
    divisor: float
    left_out: float
    """Share of all clients' weight that belongs to those which could not serve."""

    @property
    def nbytes(self) -> int:
        """Of its arrays."""
        values = vars(self.gathered).values()
        columns = (column for value in values if isinstance(value, dict) for column in value.values())
        return sum(array.nbytes for array in (*values, *columns) if isinstance(array, np.ndarray))

    def parted(self, batch_size: int, is_global: bool) -> "Iterator[PooledBatch]":
        """Cut this batch into batches of `batch_size` samples, which share its arrays. Samples that are left over, too
        few for a batch, are left out.

        Args:
            is_global: True: importance weights are divided by the largest one that any entry can have. False: by the
                largest one in each batch.
        """
        for begin in range(0, len(self.importance) - batch_size + 1, batch_size):
            yield self.rows(slice(begin, begin + batch_size), is_global)

    def rows(self, rows: slice, is_global: bool) -> "PooledBatch":
        """Some of the samples, in the same arrays; `is_global` as in `parted`."""
        importance, divisor = _divided(self.importance[rows], self.divisor, is_global)
        return PooledBatch(self.gathered.rows(rows), importance, divisor, self.left_out)

    def joined(self, newer: "PooledBatch", is_global: bool) -> "PooledBatch":
        """These samples and newer ones of the same table behind them, in new arrays; `is_global` as in `parted`."""
        divisor = max(self.divisor, newer.divisor)
        parts = [each.importance * np.float32(each.divisor / divisor) for each in (self, newer)]
        importance, divisor = _divided(np.concatenate(parts), divisor, is_global)
        gathered = mixing.joined([self.gathered, newer.gathered])
        return PooledBatch(gathered, importance, divisor, newer.left_out)

    def batch(self, schema: Schema, update: Callable[[NDArray[Any], Any], Any]) -> Batch:
        """What a learner gets; `update` is its `update_priorities`, given ids (`batch.ID`) and TD errors, both [B]."""
        return Batch(schema, self.gathered, self.importance, update, divisor=self.divisor, left_out=self.left_out)


def _divided(importance: NDArray[np.float32], divisor: float, is_global: bool) -> tuple[NDArray[np.float32], float]:
    """Importance by the largest one in the batch, unless it is global, and what it is divided by."""
    if is_global:
        return importance, divisor
    most = float(importance.max())
    return importance / np.float32(most), divisor * most


def arrays_for(
    schema: Schema, layout: ContainerLayout, samples: int, out: Mapping[str, NDArray[Any]] | None
) -> GatheredSamples:
    """Arrays for a batch of B samples: the caller's [B, ...], or new ones. Raises ParameterError: one does not fit."""
    made = layout.allocate(samples)
    if out is not None:
        place(schema, made, out)
    return made


def gather(picks: Picks, layout: ContainerLayout, out: GatheredSamples) -> None:
    """Fill the arrays of `out`, which the layout allocated, with the picked samples, and add the ragged columns."""
    arrays = [*out.prev.values(), *out.next.values()]
    reward: NDArray[np.float32] | None = out.reward if layout.schema.reward is not None else None
    burn_in = np.empty(picks.size if layout.length else 0, np.uint32)
    if layout.length:  # rewards are fields of their own there
        arrays += [burn_in] if reward is None else [reward, burn_in]
        reward = None
    facts = out.discount, out.steps, out.weight, out.ids, out.age, out.model_version
    picks.gather(arrays, reward, *facts)
    longest: dict[str, int] = {}  # both sides are as wide as the longest value of both, and at least 1
    lengths_of = {"prev": out.prev_lengths, "next": out.next_lengths}
    for i, (side, name, shape, _, _) in enumerate(layout.ragged_outputs):
        lengths = lengths_of[side][name] = np.empty((picks.size, *shape), np.int32)
        longest[name] = max(longest.get(name, 1), picks.gather_lengths(i, lengths))
    for i, (side, name, shape, dtype, element) in enumerate(layout.ragged_outputs):
        made = _core.empty((picks.size, *shape, longest[name], *(element or ())), dtype)
        picks.gather_padded(i, longest[name], made)
        (out.prev if side == "prev" else out.next)[name] = made
    if out.mask is not None:
        sequence_mask(burn_in, out.steps, out.mask)


def gathered_from(
    picks: Picks,
    layout: ContainerLayout,
    parameters: Parameters,
    beta: float,
    gathered: GatheredSamples,
    clock: float | None = None,
) -> PooledBatch:
    """The batch of these samples, copied into the arrays of `gathered` without the GIL, with importance by `beta`.

    Args:
        clock: The pool's now, so that ages are those of now; None: as they came.
    """
    gather(picks, layout, gathered)
    if clock is not None:
        gathered.age += waits_of(picks, clock)
    if gathered.mask is not None:
        gathered.max_share = parameters.sequence_max_share
    importance = np.empty(picks.size, np.float32)
    divisor = picks.importance(beta, parameters.normalize == "global", importance)
    return PooledBatch(gathered, importance, divisor, picks.left_out)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a reader asks each server for, and what it needs to know when the samples are there."""

    counts: list[NDArray[np.void]]
    """For each server rows of `rows.CLIENT_COUNTS`; no row where nothing is wanted."""
    asked: dict[bytes, tuple[float, float]]
    """Of each client that samples are asked of: pi_c and N_c."""
    population: float
    left_out: float
    rarest: float
    """Smallest N P(i) that an entry of the serving clients can have; inf where no minimum is known."""

    def checked(self, drawn: HeldCache) -> HeldCache:
        """What a server sent. Raises ProtocolError (code "client"): a sample is of a client that was not asked for."""
        if not self.asked.keys() >= set(_owners_of(drawn)):
            raise ProtocolError("client", "a drawn container has samples of a client that was not asked for")
        return drawn


def _owners_of(drawn: HeldCache) -> list[bytes]:
    ids = drawn.part(Part.OWNERS)
    return [ids[i : i + 16] for i in range(0, len(ids), 16)]


def plan(tables: Sequence[NDArray[np.void]], samples: int, fraction: float) -> Plan | None:
    """How many samples to ask of which client of which server, by the pool's own rule: None where there are too few.

    Args:
        tables: Rows of `rows.CLIENT_SUMS` of each server, as they are now. A client of two servers counts once,
            with the sums that are newest.
        samples: At least 1.
        fraction: A random number in [0, 1), the offset of systematic sampling.
    """
    clients = Clients(list(tables), int(fraction * (1 << 53)))
    if not clients.plan(samples, fraction):
        return None
    asked = clients.asked()
    counts = [np.frombuffer(packed, CLIENT_COUNTS) for packed in clients.counts()]
    return Plan(counts, asked, clients.population, clients.left_out, clients.rarest)


def finish(
    made: Plan,
    drawn: Sequence[HeldCache],
    layout: ContainerLayout,
    parameters: Parameters,
    seed: int,
    beta: float,
) -> PooledBatch:
    """The batch out of what the servers sent: DRAWN containers of `layout` (kind DRAWN), checked by `Plan.checked`,
    shuffled by `seed`, its importance made with exponent `beta`.

    A server that had less than it was asked for makes the batch smaller; every sample that is there is weighed right.
    """
    shares, newest = [], []
    for held in drawn:
        known = np.array([made.asked[owner] for owner in _owners_of(held)])
        shares.append(np.ascontiguousarray(known[:, 0]))
        newest.append(np.ascontiguousarray(known[:, 1]))
    picks = assemble(
        layout.core, list(drawn), shares, newest, made.population, made.left_out, made.rarest, seed & (2**64 - 1)
    )
    return gathered_from(picks, layout, parameters, beta, layout.allocate(picks.size))
