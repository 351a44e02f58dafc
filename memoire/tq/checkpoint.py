"""All rows in a folder and back: it can be read into any number of servers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from memoire.errors import ProtocolError
from memoire.wire import keyed

from .client import KeyedClient, Row, Stored, Values, encoded

METADATA, ROWS = "metadata.json", "rows.msgpack"
ROWS_AT_ONCE = 256
_LENGTH_BYTES = 8


async def save(client: KeyedClient, folder: Path, metadata: dict[str, Any] | None) -> None:
    """Write every row below a folder, which is replaced as a whole when all is written. Raises OSError."""
    new, former = folder.with_name(f"{folder.name}.tmp"), folder.with_name(f"{folder.name}.old")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        with open(new / ROWS, "wb") as file:
            async for block in _blocks(client):
                file.write(len(block).to_bytes(_LENGTH_BYTES, "little") + block)
        (new / METADATA).write_text(json.dumps({"storage_saved": True, "user_metadata": metadata or {}}, indent=2))
        shutil.rmtree(former, ignore_errors=True)
        if folder.exists():
            folder.rename(former)
        new.rename(folder)
        shutil.rmtree(former, ignore_errors=True)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        if former.exists() and not folder.exists():
            former.rename(folder)
        raise


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
        ProtocolError: a file is damaged. Rows before the damage are there.
    """
    former = folder.with_name(f"{folder.name}.old")
    if not folder.exists() and former.exists():  # a save was cut off between its two renames
        former.rename(folder)
    if not folder.exists():
        raise FileNotFoundError(f"Checkpoint directory not found: {folder}")
    for name in (METADATA, ROWS):
        if not (folder / name).exists():
            raise FileNotFoundError(f"{name} not found in {folder}")
    await client.reset()
    for partition, rows in _read(folder / ROWS):
        await client.put(partition, [Row(row.key, row.tags, row.fields) for row in rows])


def _read(path: Path) -> Iterator[tuple[str, list[keyed.PutRow]]]:
    with open(path, "rb") as file:
        while head := file.read(_LENGTH_BYTES):
            size = int.from_bytes(head, "little")
            block = file.read(size)
            if len(head) < _LENGTH_BYTES or len(block) < size:
                raise ProtocolError("payload", f"{path} ends in the middle of its rows; take another checkpoint")
            names = int.from_bytes(block[:_LENGTH_BYTES], "little") + _LENGTH_BYTES
            (partition,) = keyed.unpack_keys(block[_LENGTH_BYTES:names])
            yield partition, keyed.unpack_puts(block[names:])
