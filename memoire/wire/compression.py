"""Compression of blocks of frames: the codecs of this process, and the choice between packed and plain frames.

A peer offers its codecs in HELLO, and WELCOME answers with the offered codecs that the home server has too.

`CompressionChoice` tries whether compression pays (`Parameters(compression="auto")`). The callers measure the time.

    plain ──▶ a caller waits for the network ──▶ packed, on trial ──▶ less time for a sample ──▶ packed for a while
      ▲                                                └─▶ not less ──▶ plain for a while ──┐              │
      └─────────────────────────────────────────────────────────────────────────────────────┴──────────────┘

The choice compares the seconds that callers spent for each sample sent. Link, data and processor count as they are, and
nothing is estimated. The first messages after a change do not count: messages of the former kind that are still on the
link delay them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from memoire.errors import ParameterError, ProtocolError

from .parts import LENGTHS, BlockSpec, ContainerKind, Payload, RowCount

if TYPE_CHECKING:
    from .layout import ContainerLayout

CODECS: Final = {"none": 0, "zlib": 1, "lz4": 2}
MAX_PACKED: Final = 1 << 26
"""Largest block, in bytes, that a server compresses to answer a draw: other readers wait meanwhile."""


def may_pack(layout: ContainerLayout, form: BlockSpec, size: int) -> bool:
    """Return True if a block of `size` bytes may be compressed: it holds frames, and is not too large for a draw."""
    is_frames = form.extent is RowCount.PER_FRAME and form.part not in LENGTHS
    return is_frames and (layout.kind not in (ContainerKind.DRAWN, ContainerKind.DRAWN_SEQUENCES) or size <= MAX_PACKED)


def pack_block(packed: dict[int, tuple[int, bytes]], block: int, raw: Payload, codec: int) -> None:
    """Compress the bytes of block number `block` into `packed`, unless they would not get smaller."""
    data = _COMPRESS[codec](raw) if raw.nbytes else b""
    if len(data) < raw.nbytes:
        packed[block] = (codec, data)


def codecs() -> list[str]:
    """Return the names of the codecs that this process has."""
    return ["zlib", "lz4"] if _lz4 is not None else ["zlib"]


def _import_lz4() -> Any:
    """Return the module lz4.block, or None if the [lz4] extra is not installed."""
    try:
        return import_module("lz4.block")
    except ImportError:
        return None


_lz4: Any = _import_lz4()


def codec_of(name: str) -> int:
    """Return the number of a codec on the wire. Raises ParameterError if this process does not have the codec."""
    if name not in ("none", *codecs()):
        raise ParameterError("compression", name, f"one of none, {', '.join(codecs())}, which are available here")
    return CODECS[name]


def unpack_block(codec: int, stored: bytes, raw: int) -> bytes:
    """Decompress a block to exactly `raw` bytes, a size that matches the schema. Raises ProtocolError for damage."""
    if codec == CODECS["zlib"]:
        return _unpack_zlib(stored, raw)
    return _unpack_lz4(stored, raw)


def _unpack_zlib(stored: bytes, raw: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(stored, raw + 1)
    except zlib.error as error:
        raise ProtocolError("codec", f"a zlib block is damaged: {error}") from None
    if len(data) != raw or not stream.eof or stream.unused_data:
        raise ProtocolError("codec", f"a zlib block is not one stream of the {raw} bytes that its table declares")
    return data


def _unpack_lz4(stored: bytes, raw: int) -> bytes:
    if _lz4 is None:
        raise ProtocolError("codec", "a block is packed by lz4, which is not installed: pip install memoire-rl[lz4]")
    try:
        data: bytes = _lz4.decompress(stored, uncompressed_size=raw)
    except (_lz4.LZ4BlockError, ValueError, MemoryError, OverflowError) as error:
        raise ProtocolError("codec", f"an lz4 block is damaged: {error}") from None
    if len(data) != raw:
        raise ProtocolError("codec", f"an lz4 block unpacks to {len(data)} bytes; its table declares {raw}")
    return data


_COMPRESS: Final[dict[int, Callable[[Payload], bytes]]] = {
    1: lambda raw: zlib.compress(raw.data, 1),
    2: lambda raw: _lz4.compress(raw, store_size=False),
}


TRIAL: Final = 8
"""Messages that are counted before each decision."""
WHILE: Final = 1024
"""Messages for which the decision after a trial holds, before messages are counted again."""
LEAST_WAITING: Final = 0.1
"""Fraction of the seconds spent waiting for the network, below which no trial begins: the link is fast enough."""
LEAST_GAIN: Final = 0.9
"""Packed samples must take less than this fraction of plain samples' seconds, since they cost other processes time."""


class CompressionChoice:
    """Choice between packed and plain messages, for one sender or one reader. Not thread-safe: the owner locks."""

    def __init__(self) -> None:
        self.packs = False
        """True if the next message is to be packed."""
        self._plain = 0.0  # seconds that a sample took before the trial
        self._on_trial = False
        self._restart(0)

    def record_time(self, seconds: float, waited: float = 0.0) -> None:
        """Add seconds that a caller spent for a message; `waited` of these seconds passed waiting for the network."""
        self._seconds += seconds
        self._waited += waited

    def record_sent(self, samples: int) -> None:
        """Count a message that was sent, with its samples, and decide after `TRIAL` messages."""
        if self._skipped:
            self._skipped -= 1
            self._seconds = self._waited = 0.0
            return
        self._messages += 1
        self._samples += samples
        if self._messages == TRIAL:
            self._decide()

    def _decide(self) -> None:
        """Set `packs` from the seconds for each sample of the last `TRIAL` messages."""
        cost = self._seconds / max(1, self._samples)
        if self._on_trial:
            self._on_trial, self.packs = False, cost < LEAST_GAIN * self._plain
            self._restart(WHILE)
        elif self.packs:  # packed for WHILE messages: measure plain messages again
            self.packs = False
            self._restart(TRIAL)
        elif self._waited >= LEAST_WAITING * self._seconds > 0.0:
            self._plain, self._on_trial, self.packs = cost, True, True
            self._restart(TRIAL)
        else:
            self._restart(0)

    def _restart(self, messages: int) -> None:
        """Reset the counters, and skip the next `messages` messages."""
        self._skipped = messages
        self._messages = self._samples = 0
        self._seconds = self._waited = 0.0
