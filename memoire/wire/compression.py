"""How blocks of frames are compressed: the codecs of this process, and what they make of a block.

A peer offers the codecs it has in HELLO, and is told in WELCOME which of them its home has too.
"""

import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from memoire.errors import ParameterError, ProtocolError

from .layout import ContainerLayout
from .parts import LENGTHS, BlockSpec, ContainerKind, Payload, RowCount

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
