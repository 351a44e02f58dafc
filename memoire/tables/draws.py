"""Draws over the caches of several servers: `plan` shares a batch out over all clients, `build_batch` builds the batch.

`caches` derives the rule, and applies the rule to the caches of one server.

The module also packs the samples of a draw into the container that a server sends to a reader.
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
from memoire.replay.batch import Batch, GatheredSamples, sequence_mask, use_output_arrays
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.wire._container import HeldCache, container_bytes
from memoire.wire.compression import codec_of, may_pack, pack_block
from memoire.wire.containers import ContainerHead, ContainerWriter
from memoire.wire.layout import ContainerLayout
from memoire.wire.parts import BOOKKEEPING, OF_DRAWN, BlockSpec, Part, Payload, RowCount
from memoire.wire.receivers import ReplyPage
from memoire.wire.rows import CLIENT_COUNTS

from .caches._draw import Clients, Frames, Picks, assemble


def waits_of(picks: Picks, clock: float, *, in_order: bool = False) -> NDArray[np.float32]:
    """Return float32 [B] seconds for which samples have been held. A cache states its entries' ages at its creation.

    Args:
        clock: The pool's current time.
        in_order: True: in the order of the draw, False: in the order of the batch.
    """
    arrived = np.empty(picks.size, np.float64)
    picks.arrivals(arrived, in_order)
    return np.maximum(clock - arrived, 0.0).astype(np.float32)


@lru_cache(maxsize=64)
def most_bytes(drawn: ContainerLayout, samples: int) -> float:
    """Return the bytes of the largest container of this many samples, in which no two samples share a frame. Ragged
    columns have no limit; the result is infinity.
    """
    if drawn.ragged:
        return float("inf")
    frames = drawn.frame_stack + drawn.length if drawn.length else 2 * drawn.frame_stack
    return container_bytes(drawn.core, samples, samples * frames, samples, samples * max(1, drawn.length), {})


class DistinctRows:
    """Distinct frames and entries of picked samples, with each sample's indices into them."""

    def __init__(self, picks: Picks, layout: ContainerLayout, drawn: ContainerLayout) -> None:
        samples = picks.size
        self.indices = {
            part: np.empty((samples, layout.blocks[layout.bookkeeping_block(part)].row_bytes // 4), np.uint32)
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
        """Bytes of the container that `pack_drawn` makes, without compression."""
        return container_bytes(self._drawn.core, *self.rows, self.elements)


def pack_drawn(
    picks: Picks,
    layout: ContainerLayout,
    drawn: ContainerLayout,
    *,
    now: float,
    clock: float | None = None,
    compression: str = "none",
    page: ReplyPage | None = None,
    parts: DistinctRows | None = None,
) -> Payload:
    """Pack picked samples into the container of a DRAWN message: distinct frames, and each sample's chance and owner.

    Args:
        picks: From a pool of `layout`, not shuffled: a client's samples are side by side.
        layout, drawn: Layouts of caches and of drawn containers under the same schema and parameters.
        now: Unix seconds, written into the container.
        clock: The pool's current time, to add the time in the pool to the ages; None: the ages as received.
        compression: Codec as in `build`, which the reader must have.
        page: Page of the reply. The samples have room on the page without compression.
        parts: `DistinctRows` of the picks, if already computed.
    """
    parts = parts or DistinctRows(picks, layout, drawn)
    frames, entries = parts.frames, parts.entries
    head = ContainerHead(picks.multi_step, made_at=now)
    packed = _pack_picked(frames, layout, drawn, parts.elements, codec_of(compression))
    if page is not None and not page.may_expand(packed, parts.nbytes):
        packed = {}
    samples, frame_rows, owner_rows, entry_rows = parts.rows
    container = ContainerWriter(drawn, head, samples, frame_rows, owner_rows, packed, entry_rows, parts.elements)
    carried: dict[Part, NDArray[Any]] = {**parts.indices, Part.OWNER: parts.owner, Part.OWNERS: parts.owners}
    carried |= {Part.CHANCE: parts.chance, Part.POPULATION: parts.population}
    container.fill_blocks({drawn.bookkeeping_block(part): values for part, values in carried.items()})
    for i, form, source in _copied_blocks(layout, drawn):
        if i not in packed:
            distinct = entries if form.extent is RowCount.PER_ENTRY else frames
            _fill_drawn(container.view(i), picks, distinct, source, form)
    ages = container.array(Part.AGE, "<f4")
    if clock is not None and ages is not None:
        ages[:, 0] += waits_of(picks, clock, in_order=True)
    return container.payload


def _pack_picked(
    frames: Frames, layout: ContainerLayout, drawn: ContainerLayout, elements: dict[int, int], codec: int
) -> dict[int, tuple[int, bytes]]:
    """Return the compressed state columns of picked samples: block -> (codec, bytes)."""
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
    """Return the blocks of drawn containers that copy rows of caches: (block, its form, block in caches)."""
    forms = enumerate(drawn.blocks)
    copied = [(i, form) for i, form in forms if form.part not in OF_DRAWN and form.part not in layout.indices]
    return tuple((i, form, _same_block(layout, drawn, form)) for i, form in copied)


def _same_block(layout: ContainerLayout, drawn: ContainerLayout, form: BlockSpec) -> int:
    """Return the number of the block in caches that corresponds to this block of drawn containers."""
    block = layout.block_number(form.part, None if form.column == BOOKKEEPING else drawn.schema.names[form.column])
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
"""Maximum number of samples in a batch."""
MAX_DRAWN: Final = 1 << 20
"""Maximum number of samples that a reader may draw with one request."""


def check_count(samples: int) -> None:
    """Raise ProtocolError if a request asks for more than `MAX_DRAWN` samples."""
    if samples > MAX_DRAWN:
        raise ProtocolError(
            "too_large", f"{samples} samples in one request; the limit is {MAX_DRAWN}. Draw smaller batches"
        )


@dataclass(frozen=True, slots=True)
class PooledBatch:
    """Batch drawn from held caches."""

    gathered: GatheredSamples
    importance: NDArray[np.float32]
    """[B] in (0, 1]: (N P(i) N_k / N_c) ** -beta over `divisor`."""
    divisor: float
    left_out: float
    """Share of all clients' weight that belongs to clients that could not serve."""

    @property
    def nbytes(self) -> int:
        """Bytes of the batch's arrays."""
        values = vars(self.gathered).values()
        columns = (column for value in values if isinstance(value, dict) for column in value.values())
        return sum(array.nbytes for array in (*values, *columns) if isinstance(array, np.ndarray))

    def split(self, batch_size: int, is_global: bool) -> "Iterator[PooledBatch]":
        """Yield batches of `batch_size` samples that share this batch's arrays. A smaller rest is omitted.

        Args:
            is_global: True: importance weights are divided by the largest one that any entry can have. False: by the
                largest one in each batch.
        """
        for begin in range(0, len(self.importance) - batch_size + 1, batch_size):
            yield self.rows(slice(begin, begin + batch_size), is_global)

    def rows(self, rows: slice, is_global: bool) -> "PooledBatch":
        """Return some of the samples, in the same arrays; `is_global` as in `split`."""
        importance, divisor = _divided(self.importance[rows], self.divisor, is_global)
        return PooledBatch(self.gathered.rows(rows), importance, divisor, self.left_out)

    def joined(self, newer: "PooledBatch", is_global: bool) -> "PooledBatch":
        """Return these samples followed by newer ones of the same table, in new arrays; `is_global` as in `split`."""
        divisor = max(self.divisor, newer.divisor)
        parts = [each.importance * np.float32(each.divisor / divisor) for each in (self, newer)]
        importance, divisor = _divided(np.concatenate(parts), divisor, is_global)
        gathered = mixing.joined([self.gathered, newer.gathered])
        return PooledBatch(gathered, importance, divisor, newer.left_out)

    def batch(self, schema: Schema, update: Callable[[NDArray[Any], Any], Any]) -> Batch:
        """Return the `Batch` for a learner. The batch's `update_priorities` calls `update` with ids (`batch.ID`) and TD
        errors, [B].
        """
        return Batch(schema, self.gathered, self.importance, update, divisor=self.divisor, left_out=self.left_out)


def _divided(importance: NDArray[np.float32], divisor: float, is_global: bool) -> tuple[NDArray[np.float32], float]:
    """Divide importance by the largest one in the batch, unless `is_global`; return importance and the new divisor."""
    if is_global:
        return importance, divisor
    most = float(importance.max())
    return importance / np.float32(most), divisor * most


def arrays_for(
    schema: Schema, layout: ContainerLayout, samples: int, out: Mapping[str, NDArray[Any]] | None
) -> GatheredSamples:
    """Return arrays for B samples: the caller's [B, ...], or new ones. Raise ParameterError if one does not fit."""
    arrays = layout.allocate(samples)
    if out is not None:
        use_output_arrays(schema, arrays, out)
    return arrays


def gather(picks: Picks, layout: ContainerLayout, out: GatheredSamples) -> None:
    """Fill the arrays of `out`, which the layout allocated, with the picked samples, and add the ragged columns."""
    arrays = [*out.prev.values(), *out.next.values()]
    reward: NDArray[np.float32] | None = out.reward if layout.schema.reward is not None else None
    burn_in = np.empty(picks.size if layout.length else 0, np.uint32)
    if layout.length:  # sequences have reward fields
        arrays += [burn_in] if reward is None else [reward, burn_in]
        reward = None
    facts = out.discount, out.steps, out.weight, out.ids, out.age, out.model_version
    picks.gather(arrays, reward, *facts)
    longest: dict[str, int] = {}  # width of each column: at least 1, and the longest value of both sides
    lengths_of = {"prev": out.prev_lengths, "next": out.next_lengths}
    for i, (side, name, shape, _, _) in enumerate(layout.ragged_outputs):
        lengths = lengths_of[side][name] = np.empty((picks.size, *shape), np.int32)
        longest[name] = max(longest.get(name, 1), picks.gather_lengths(i, lengths))
    for i, (side, name, shape, dtype, element) in enumerate(layout.ragged_outputs):
        padded = _core.empty((picks.size, *shape, longest[name], *(element or ())), dtype)
        picks.gather_padded(i, longest[name], padded)
        (out.prev if side == "prev" else out.next)[name] = padded
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
    """Return the batch of the picks, copied into `gathered` without the GIL, with importance computed by `beta`.

    Args:
        clock: The pool's current time, to add the time in the pool to the ages; None: the ages as received.
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
    """Requests of a reader to each server, and the facts that `build_batch` needs."""

    counts: list[NDArray[np.void]]
    """Rows of `rows.CLIENT_COUNTS` for each server; no rows for a server that is not asked."""
    asked: dict[bytes, tuple[float, float]]
    """pi_c and N_c of each client that samples are requested from."""
    population: float
    left_out: float
    rarest: float
    """Smallest N P(i) that an entry of the serving clients can have; inf if no minimum is known."""

    def checked(self, drawn: HeldCache) -> HeldCache:
        """Return a server's container. Raise ProtocolError (code "client") if a sample's client was not asked."""
        if not self.asked.keys() >= set(_owners_of(drawn)):
            raise ProtocolError("client", "a drawn container has samples of a client that was not asked for")
        return drawn


def _owners_of(drawn: HeldCache) -> list[bytes]:
    ids = drawn.part(Part.OWNERS)
    return [ids[i : i + 16] for i in range(0, len(ids), 16)]


def plan(tables: Sequence[NDArray[np.void]], samples: int, fraction: float) -> Plan | None:
    """Return the samples to request from each server's clients, by the pool's own rule, or None if there are too few.

    Args:
        tables: Current rows of `rows.CLIENT_SUMS` of each server. A client of two servers counts once, with its newest
            sums.
        samples: At least 1.
        fraction: Random number in [0, 1), the offset of systematic sampling.
    """
    clients = Clients(list(tables), int(fraction * (1 << 53)))
    if not clients.plan(samples, fraction):
        return None
    asked = clients.asked()
    counts = [np.frombuffer(packed, CLIENT_COUNTS) for packed in clients.counts()]
    return Plan(counts, asked, clients.population, clients.left_out, clients.rarest)


def build_batch(
    plan: Plan,
    drawn: Sequence[HeldCache],
    layout: ContainerLayout,
    parameters: Parameters,
    seed: int,
    beta: float,
) -> PooledBatch:
    """Return the batch made of DRAWN containers of `layout` (kind DRAWN), checked by `Plan.checked`.
    The order is shuffled by `seed`; importance has the exponent `beta`. If a server sends fewer samples than requested,
    the batch is smaller; the importance of its samples is still exact.
    """
    shares, newest = [], []
    for held in drawn:
        known = np.array([plan.asked[owner] for owner in _owners_of(held)])
        shares.append(np.ascontiguousarray(known[:, 0]))
        newest.append(np.ascontiguousarray(known[:, 1]))
    picks = assemble(
        layout.core, list(drawn), shares, newest, plan.population, plan.left_out, plan.rarest, seed & (2**64 - 1)
    )
    return gathered_from(picks, layout, parameters, beta, layout.allocate(picks.size))
