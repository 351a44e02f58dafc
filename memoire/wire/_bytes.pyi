"""What reads bytes: the checksum of messages, the shape of msgpack, and packed counts."""

from collections.abc import Sequence
from typing import Any

__pyx_capi__: dict[str, object]
"""C functions that other compiled modules call, by name."""

def checksum(data: Any, seed: int = 0) -> int: ...
def copied(data: Any) -> tuple[bytes, int]: ...
def checksums(data: Any, seed: int = 0) -> list[int]: ...
def header_checksum(frame: Any) -> int: ...
def write_header(
    magic: bytes,
    version: int,
    type: int,
    table: int,
    client: bytes,
    run: int,
    home: int,
    sequence: int,
    fingerprint: int,
    payload: Any,
    payload_checksum: int | None,
    tail: bytes,
) -> bytes: ...
def read_header(
    frame: Any, magic: bytes, version: int, most: int
) -> tuple[int, int, bytes, int, int, int, int, int, int] | None: ...
def read_message(
    frame: Any, payload: Any, magic: bytes, version: int, most: int, most_payload: int
) -> tuple[tuple[int, int, bytes, int, int, int, int, int, int], bytes] | None: ...
def is_plain_msgpack(data: Any) -> bool: ...
def pack_counts(counts: Sequence[int]) -> bytes: ...
def unpack_counts(packed: Any, number: int) -> tuple[list[int], int]: ...
