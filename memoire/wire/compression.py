"""How blocks of frames are compressed: the codecs of this process, and what they make of a block.

A peer offers the codecs it has in HELLO, and is told in WELCOME which of them its home has too.

Whether compressing frames pays, found by trying (`Parameters(compression="auto")`). Pure: others measure seconds.

    plain ──▶ somebody waits for the network ──▶ packed, on trial ──▶ less time for a sample ──▶ packed for a while
      ▲                                                └─▶ not less ──▶ plain for a while ──┐              │
      └─────────────────────────────────────────────────────────────────────────────────────┴──────────────┘

What is compared is what a caller has of it: the seconds for which it was kept, over the samples that went. So the link,
the data and the processor count as they are, and nothing is estimated. The first messages after a change are not
counted: what the other way has put on the link delays them.
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
"""Bytes of frames that a server packs at most when it answers a draw: other readers wait meanwhile."""


def may_pack(layout: ContainerLayout, form: BlockSpec, size: int) -> bool:
    """Whether a block holds frames, of a size that whoever makes such a container has the time for."""
    is_frames = form.extent is RowCount.PER_FRAME and form.part not in LENGTHS
    return is_frames and (layout.kind not in (ContainerKind.DRAWN, ContainerKind.DRAWN_SEQUENCES) or size <= MAX_PACKED)


def pack_block(packed: dict[int, tuple[int, bytes]], block: int, raw: Payload, codec: int) -> None:
    """Compress a block, unless it would not get smaller."""
    data = _COMPRESS[codec](raw) if raw.nbytes else b""
    if len(data) < raw.nbytes:
        packed[block] = (codec, data)


def codecs() -> list[str]:
    """Names of the compressions that this process has."""
    return ["zlib", "lz4"] if _lz4 is not None else ["zlib"]


def _find_lz4() -> Any:
    """lz4.block, or None where the [lz4] extra is not installed."""
    try:
        return import_module("lz4.block")
    except ImportError:
        return None


_lz4: Any = _find_lz4()


def codec_of(name: str) -> int:
    """The number that a compression has on the wire. ParameterError: this process does not have it."""
    if name not in ("none", *codecs()):
        raise ParameterError("compression", name, f"one of none, {', '.join(codecs())}, which are available here")
    return CODECS[name]


def unpack_block(codec: int, stored: bytes, raw: int) -> bytes:
    """Bytes of a packed block; `raw` was compared with the schema before, and nothing larger is ever allocated."""
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
        raise ProtocolError("codec", f"a zlib block is not the one stream of {raw} bytes that its table says")
    return data


def _unpack_lz4(stored: bytes, raw: int) -> bytes:
    if _lz4 is None:
        raise ProtocolError("codec", "an lz4 block, but lz4 is not installed here: pip install memoire-rl[lz4]")
    try:
        data: bytes = _lz4.decompress(stored, uncompressed_size=raw)
    except (_lz4.LZ4BlockError, ValueError, MemoryError, OverflowError) as error:
        raise ProtocolError("codec", f"an lz4 block is damaged: {error}") from None
    if len(data) != raw:
        raise ProtocolError("codec", f"an lz4 block unpacks to {len(data)} bytes, its table says {raw}")
    return data


_COMPRESS: Final[dict[int, Callable[[Payload], bytes]]] = {
    1: lambda raw: zlib.compress(raw.data, 1),
    2: lambda raw: _lz4.compress(raw, store_size=False),
}


TRIAL: Final = 8
"""Messages that are counted before anything is decided."""
WHILE: Final = 1024
"""Messages for which a decision holds."""
LEAST_WAITING: Final = 0.1
"""Share of the seconds that were spent waiting, below which there is nothing to win: the link carries all."""
LEAST_GAIN: Final = 0.9
"""Packed messages have to take less than this share of the plain ones' seconds: they cost others a processor, too."""


class CompressionChoice:
    """Of one sender, or of one reader that has servers pack for it. Not thread-safe: the owner locks."""

    def __init__(self) -> None:
        self.packs = False
        """Whether to pack the next message."""
        self._plain = 0.0  # seconds that a sample took before the trial
        self._on_trial = False
        self._rest(0)

    def spend(self, seconds: float, waited: float = 0.0) -> None:
        """A caller was kept for so long, by packing and waiting; of it, it waited for the network."""
        self._seconds += seconds
        self._waited += waited

    def carried(self, samples: int) -> None:
        """With that, a message of so many samples went."""
        if self._skipped:
            self._skipped -= 1
            self._seconds = self._waited = 0.0
            return
        self._messages += 1
        self._samples += samples
        if self._messages == TRIAL:
            self._decide()

    def _decide(self) -> None:
        """So many messages went this way."""
        cost = self._seconds / max(1, self._samples)
        if self._on_trial:
            self._on_trial, self.packs = False, cost < LEAST_GAIN * self._plain
            self._rest(WHILE)
        elif self.packs:  # for long enough: is it still slow without?
            self.packs = False
            self._rest(TRIAL)
        elif self._waited >= LEAST_WAITING * self._seconds > 0.0:
            self._plain, self._on_trial, self.packs = cost, True, True
            self._rest(TRIAL)
        else:
            self._rest(0)

    def _rest(self, messages: int) -> None:
        """Count from so many messages on."""
        self._skipped = messages
        self._messages = self._samples = 0
        self._seconds = self._waited = 0.0
