"""All rows in a folder and back: it can be read into any number of servers.

metadata.json                     what the caller gave, as JSON: it takes the place of the former one last
rows-1c9f0a6be2d05d2e.msgpack     the rows, named by the checksum of metadata.json; its first record has that once more
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from memoire.errors import DataError
from memoire.replay.replacement import Fault, no_fault, remove_abandoned_in, replace_file, sync
from memoire.storage import checked_file
from memoire.storage.checked_file import CheckedFile, FileKind, Record
from memoire.storage.folder_lock import lock_folder
from memoire.wire import _bytes, keyed

from .client import KeyedClient, Row, Stored, Values, encoded

KIND: Final = FileKind(b"memoirtq", 2, "a checkpoint of memoire.tq")
METADATA: Final = "metadata.json"
ROWS_AT_ONCE: Final = 256
_ROWS: Final = re.compile(r"rows-[0-9a-f]{16}\.msgpack")
_FORMER_ROWS: Final = "rows.msgpack"
_LENGTH_BYTES: Final = 8


async def save(client: KeyedClient, folder: Path, metadata: dict[str, Any] | None, *, at: Fault = no_fault) -> None:
    """Write every row to a folder. The checkpoint that it has stays until the new one is whole and on disk.

    Args:
        at: Called before each step, so that a test may let it fail: see `replacing`.

    Raises:
        StateLocked: another process saves to this folder.
        OSError: it cannot be written.
    """
    told = json.dumps({"storage_saved": True, "user_metadata": metadata or {}}, indent=2).encode()
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        sync(folder.parent)
    lock = lock_folder(folder, "the checkpoint folder", "process")
    try:
        rows = _rows(folder, told)
        with checked_file.writing(rows, KIND, at=at) as file:
            file.put(0, told)
            async for block in _blocks(client):
                file.put(1, block)
        replace_file(folder / METADATA, told, at=at)
        for other in folder.iterdir():
            if other != rows and _ROWS.fullmatch(other.name):
                at("remove")
                other.unlink()
        remove_abandoned_in(folder, ".msgpack")
    finally:
        lock.release()


def _rows(folder: Path, metadata: bytes) -> Path:
    return folder / f"rows-{_bytes.checksum(metadata):016x}.msgpack"


async def _blocks(client: KeyedClient) -> Any:
    for partition, rows in (await client.rows(None)).items():
        for start in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[start : start + ROWS_AT_ONCE]
            values = await client.values(partition, [row.key for row in some], ())
            yield _block(partition, some, values)


def _block(partition: str, rows: Sequence[Stored], values: Sequence[Values | None]) -> bytes:
    kept = [
        keyed.PutRow(row.key, encoded(row.tags), encoded(held.values), [])
        for row, held in zip(rows, values, strict=True)
        if held is not None
    ]
    name = keyed.pack([partition])
    return len(name).to_bytes(_LENGTH_BYTES, "little") + name + keyed.pack(kept)


async def load(client: KeyedClient, folder: Path) -> None:
    """Put the rows of a folder in the place of all that servers hold.

    Raises:
        FileNotFoundError: there is no checkpoint, or a file of it is missing.
        DataError: a file is damaged, of a former form or of another checkpoint. Servers hold what they held.
    """
    if not folder.exists():
        raise FileNotFoundError(f"Checkpoint directory not found: {folder}")
    if not (folder / METADATA).exists():
        raise FileNotFoundError(f"{METADATA} not found in {folder}")
    told = (folder / METADATA).read_bytes()
    path = _rows(folder, told)
    if not path.exists():
        if (folder / _FORMER_ROWS).exists():
            raise DataError(str(folder / _FORMER_ROWS), f"is not {KIND.name}, but of a former form")
        raise FileNotFoundError(f"{path.name} not found in {folder}: it is missing, or {METADATA} was changed")
    with CheckedFile(path, KIND) as file:
        records = file.records()
        if next(records, None) != (0, told):
            raise DataError(str(path), f"belongs to another {METADATA}")
        await client.reset()
        for record in records:
            partition, rows = _unpacked(record)
            await client.put(partition, [Row(row.key, row.tags, row.fields) for row in rows])


def _unpacked(record: Record) -> tuple[str, list[keyed.PutRow]]:
    block = record.payload
    names = int.from_bytes(block[:_LENGTH_BYTES], "little") + _LENGTH_BYTES
    (partition,) = keyed.unpack_keys(block[_LENGTH_BYTES:names])
    return partition, keyed.unpack_puts(block[names:])
