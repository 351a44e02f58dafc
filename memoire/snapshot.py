"""Held caches in one file, so that a server that is stopped on purpose has them again when it comes back.

Optional and never trusted: a file of another schema or form is ignored, and of a damaged one the caches before the
damage count. Written beside the old file and renamed, so that there is always a whole one.

    head     magic, form, schema fingerprint, checksum of these
    cache    client, sequence, used samples, bytes, checksum of these and the payload; payload        (each)
    end      the same with 16 zero bytes as client and the number of caches as sequence
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from . import _core
from .statefile import sync

_log = logging.getLogger(__name__)

_MAGIC: Final = b"memcache"
_FORM: Final = 1
_HEAD: Final = struct.Struct("<8sIQQ")
_CACHE: Final = struct.Struct("<16sQQQQ")
_NOBODY: Final = bytes(16)


class SavedCache(NamedTuple):
    """A held cache as it is saved."""

    client: bytes
    sequence: int
    used: int
    """Samples of it that were drawn already."""
    payload: bytes | bytearray | memoryview


def is_digest(body: bytes, sha256: bytes) -> bool:
    """Whether this is the SHA-256 of the body."""
    return hashlib.sha256(body).digest() == sha256


def write(path: Path, fingerprint: int, caches: Iterable[SavedCache], at: Callable[[str], None]) -> int:
    """Save caches under this path; returns how many. The former file stays until the new one is whole."""
    made = path.with_name(path.name + ".new")
    count = 0
    with made.open("wb") as file:
        file.write(_head(fingerprint))
        for cache in caches:
            payload = memoryview(cache.payload).cast("B")
            file.write(_record(cache.client, cache.sequence, cache.used, payload))
            file.write(payload)
            count += 1
        file.write(_record(_NOBODY, count, 0, memoryview(b"")))
    sync(made)
    at("before caches")
    made.replace(path)
    sync(path.parent)
    at("after caches")
    return count


def read(path: Path, fingerprint: int, byte_limit: int) -> Iterator[SavedCache]:
    """The caches of a file in the order in which they were saved, up to the first that is damaged; none if it is not
    there, or of another schema.
    """
    try:
        with path.open("rb") as file:
            yield from _read(file, fingerprint, byte_limit)
    except FileNotFoundError:
        return
    except (ValueError, OSError) as error:
        _log.warning("%s: %s; the caches before that are held again, the rest is ignored", path, error)


def _read(file: BinaryIO, fingerprint: int, byte_limit: int) -> Iterator[SavedCache]:
    head = file.read(_HEAD.size)
    if head != _head(fingerprint):
        raise ValueError("it is no snapshot of this schema by this version of memoire")
    count = 0
    while True:
        record = file.read(_CACHE.size)
        if len(record) < _CACHE.size:
            raise ValueError(f"it ends after {count} caches without saying so")
        client, sequence, used, size, check = _CACHE.unpack(record)
        if size > byte_limit:
            raise ValueError(f"cache {count + 1} would have {size} bytes, {byte_limit} are allowed")
        payload = file.read(size)
        if len(payload) < size or _check(record[:-8], payload) != check:
            raise ValueError(f"cache {count + 1} is damaged")
        if client == _NOBODY:
            if sequence != count:
                raise ValueError(f"it has {count} of {sequence} caches")
            return
        count += 1
        yield SavedCache(client, sequence, used, payload)


def _head(fingerprint: int) -> bytes:
    facts = struct.pack("<8sIQ", _MAGIC, _FORM, fingerprint)
    return facts + struct.pack("<Q", _core.checksum(facts))


def _record(client: bytes, sequence: int, used: int, payload: memoryview) -> bytes:
    facts = struct.pack("<16sQQQ", client, sequence, used, len(payload))
    return facts + struct.pack("<Q", _check(facts, payload))


def _check(facts: bytes, payload: bytes | memoryview) -> int:
    return _core.checksum(payload, _core.checksum(facts))
