"""Received containers: checked completely before anything in them is believed, then read in place."""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.replay.parameters import Parameters
from memoire.replay.ragged import Ragged
from memoire.replay.schema import Schema

from . import _container
from .compression import unpack_block
from .frames import check_payload
from .layout import MAKING, ContainerLayout, layout_of
from .parts import ALIGNMENT, BOOKKEEPING, FACTS, HEAD, LENGTH, LENGTHS, ROW, BlockRow, ContainerKind, Part

_DEFAULTS: Final = Limits()
_OF_ENTRIES: Final = (Part.INIT_WEIGHT, Part.AGE, Part.MODEL)


class EpisodeRows(NamedTuple):
    """What a received episode holds; arrays are read-only and may lie in the payload. T entries, F a column's shape."""

    columns: dict[str, Any]
    """Each column [T, *F] but the return; a ragged one as `Ragged`."""
    final: dict[str, NDArray[Any]] | None
    """Each state column [*F]."""
    init_w: NDArray[np.float32]
    age: NDArray[np.float32]
    model_version: NDArray[np.int64]


def read_episode(held: _container.HeldCache, layout: ContainerLayout) -> EpisodeRows:
    """The arrays of a container of kind EPISODE that `check` found fit `layout`."""
    rows = _Rows(held, layout)
    told = [rows.array(layout.bookkeeping(part), FACTS[part].dtype, ()) for part in _OF_ENTRIES]
    columns, final = rows.columns()
    return EpisodeRows(columns, final or None, *told)


def read_columns(held: _container.HeldCache, layout: ContainerLayout) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Each column [n, *F] of a container of kind EPISODE or ROWS that `check` found fit `layout`, a ragged one as
    `Ragged`; and each column of the final state [*F]. The arrays may lie in the payload.
    """
    return _Rows(held, layout).columns()


class _Rows:
    """A checked container whose blocks are read as arrays."""

    def __init__(self, held: _container.HeldCache, layout: ContainerLayout) -> None:
        self._held, self._layout, self._payload = held, layout, held.payload
        self._table = list(ROW.iter_unpack(self._payload[HEAD.size : HEAD.size + ROW.size * len(layout.blocks)]))

    def columns(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """See `read_columns`."""
        columns: dict[str, Any] = {}
        final: dict[str, NDArray[Any]] = {}
        for block, part, name in self._layout.columns:
            column = self._layout.schema[name]
            if part in LENGTHS:
                continue
            array = self.array(block, column.dtype, column.element)
            if part is Part.FINAL:
                final[name] = array if column.is_ragged else array[0]
            elif column.is_ragged:
                columns[name] = Ragged(array, self.array(self._layout.ragged[block], LENGTH, ()))
            else:
                columns[name] = array
        return columns, final

    def array(self, block: int, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
        """The values of a block: [n, *shape]."""
        _, _, codec, count, offset, stored, raw = self._table[block]
        if block in self._layout.ragged:
            count = raw // self._layout.blocks[block].row_bytes
        if not raw:
            return np.zeros((count, *shape), dtype)
        data = self._held.block(block) if codec else self._payload[offset : offset + stored]
        array = np.frombuffer(data, dtype)
        if shape:
            array = array.reshape(count, *shape)
        return array if array.flags.aligned else array.copy()  # a small message lies wherever it was received


def unpacked_bytes(payload: Any) -> int:
    """Bytes of a received container and of its packed blocks, as its table says; nothing of it was checked yet."""
    data = memoryview(payload).cast("B")
    end = HEAD.size + ROW.size * (HEAD.unpack_from(data)[7] if len(data) >= HEAD.size else 0)
    if len(data) < end or not any(data[HEAD.size + 3 : end : ROW.size]):  # no block has a codec
        return len(data)
    packed: int = sum(raw for *_, codec, _, _, _, raw in ROW.iter_unpack(data[HEAD.size : end]) if codec)
    return len(data) + packed


def check(
    payload: Any, layout: ContainerLayout, limits: Limits = _DEFAULTS, *, checksum: int | None = None
) -> _container.HeldCache:
    """A received container, completely checked, ready for `Pool.add`; gathering reads it in place.

    With a checksum, the bytes are copied while they are checked. The buffer that they were received into can then take
    the next message while it is still in the processor's cache. Without a checksum, the result keeps the buffer.

    Checks sizes, order, alignment, padding, and the range of indices, weights, discounts and counts. Packed blocks are
    unpacked now, after their declared size was compared with the schema's. One pass without the GIL, with the checksum.

    Args:
        payload: The frame as it was received; it must not change afterwards.
        layout: What it must be: `layout_of(schema, parameters)`.
        checksum: The header's, where `frames.parse` was told not to compare it.

    Raises:
        ProtocolError: and nothing else, whatever the bytes.
    """
    _check_size(payload, limits)
    return _container.HeldCache(payload, layout.core, checksum, limits.message_bytes, unpack_block)


def _check_size(payload: Any, limits: Limits) -> None:
    size = memoryview(payload).nbytes
    if size > limits.message_bytes:
        raise ProtocolError("too_large", f"{size} bytes; {limits.message_bytes} are allowed (message_bytes)")


def check_making(held: _container.HeldCache, making: int) -> None:
    """Refuse samples that were made with other parameters than those that hold here, `layout.making_of`, although they
    look alike. A former peer says a version of its server's instead, and is believed.

    Raises:
        ProtocolError: (code "parameters")
    """
    if held.making >= MAKING and held.making != making:
        raise ProtocolError(
            "parameters", "samples made with other parameters, such as another discount, than hold here"
        )


def check_in_place(payload: Any, layout: ContainerLayout, limits: Limits, *, checksum: int) -> _container.HeldCache:
    """`check` of what is read once, right away: it is summed up where it was received, and not copied.

    The buffer stays as long as what this returns, and must not change. Raises ProtocolError.
    """
    _check_size(payload, limits)
    check_payload(payload, checksum)
    return check(payload, layout, limits)


def copy_of(held: _container.HeldCache, layout: ContainerLayout) -> _container.HeldCache:
    """The same cache of that layout once more, none of its samples drawn; the bytes that came are shared."""
    copy = _container.HeldCache(held.payload, layout.core, None, 1 << 62, unpack_block)
    copy.arrived = held.arrived
    return copy


def read_feedback(payload: Any, schema: Schema, limits: Limits = _DEFAULTS) -> dict[bytes, tuple[Any, Any]]:
    """Client id -> (numbers int64 [n], td_errors float32 [n]) of a received FEEDBACK container. ProtocolError."""
    held = check(payload, layout_of(schema, Parameters(), ContainerKind.FEEDBACK), limits)
    numbers, errors, owner = (
        np.frombuffer(held.part(part), FACTS[part].dtype) for part in (Part.NUMBER, Part.TD_ERROR, Part.OWNER)
    )
    owners = held.part(Part.OWNERS)
    if len(owners) == 16:
        return {owners: (numbers, errors)}
    order = np.argsort(owner, kind="stable")
    ends = np.searchsorted(owner[order], np.arange(len(owners) // 16 + 1))
    found = {}
    for i in range(len(ends) - 1):
        mine = order[ends[i] : ends[i + 1]]
        found[owners[16 * i : 16 * i + 16]] = (numbers[mine], errors[mine])
    return found


def table(payload: Any) -> list[BlockRow]:
    """The block table of any container, for tools; sizes are compared with the payload, contents are not looked at.

    Raises:
        ProtocolError: the table does not fit the bytes.
    """
    data = memoryview(payload).cast("B")
    if len(data) < HEAD.size or len(data) < HEAD.size + ROW.size * (blocks := HEAD.unpack_from(data)[7]):
        raise ProtocolError("container", f"{len(data)} bytes are too few for a head and its table")
    rows = [BlockRow(*ROW.unpack_from(data, HEAD.size + ROW.size * i)) for i in range(blocks)]
    end, order = HEAD.size + ROW.size * blocks, (-1, 0)
    for row in rows:
        key = (-1 if row.column == BOOKKEEPING else row.column, row.part)
        if key <= order or row.offset != -(-end // ALIGNMENT) * ALIGNMENT or any(data[end : row.offset]):
            raise ProtocolError("container", f"{row} is out of order or not where it belongs")
        end, order = row.offset + row.stored, key
        if end > len(data):
            break
    if end != len(data):
        raise ProtocolError("container", f"the blocks end at byte {end} of {len(data)}")
    return rows
