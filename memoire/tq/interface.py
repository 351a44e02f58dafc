"""The calls of TransferQueue's key-value interface, for one client of the process.

`init` in one process starts or finds the servers and puts their addresses into $MEMOIRE_TQ, which processes started
from there inherit; any other process is told by that variable, or by Ray where both use it.

`save` writes all rows into a folder, which `load` can read into any number of servers.

metadata.json                     what the caller gave, as JSON: it takes the place of the former one last
rows-1c9f0a6be2d05d2e.msgpack     the rows, named by the checksum of metadata.json; its first record has that once more
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from tensordict import TensorDict

from memoire import Server
from memoire.building import (
    CheckedFile,
    Fault,
    FileKind,
    Held,
    Record,
    checksum,
    lock_folder,
    no_fault,
    remove_abandoned_in,
    replace_file,
    sync,
)
from memoire.building import record_file as checked_file
from memoire.errors import DataError, ParameterError
from memoire.keyed import messages as keyed

from .client import KeyedClient, Parser, batch_of, columns_of, decoded, parsed, put_rows, single_row
from .metadata import KVBatchMeta

ADDRESSES = "MEMOIRE_TQ"
"""Environment variable with the servers' addresses, separated by commas; also their name in Ray's own store."""


P = ParamSpec("P")
T = TypeVar("T")
KIND: Final = FileKind(b"memoirtq", 2, "a checkpoint of memoire.tq")
METADATA: Final = "metadata.json"
ROWS_AT_ONCE: Final = 256
_ROWS: Final = re.compile(r"rows-[0-9a-f]{16}\.msgpack")
_FORMER_ROWS: Final = "rows.msgpack"
_LENGTH_BYTES: Final = 8


def save(client: KeyedClient, folder: Path, metadata: dict[str, Any] | None, *, at: Fault = no_fault) -> None:
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
            for block in _blocks(client):
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
    return folder / f"rows-{checksum(metadata):016x}.msgpack"


def _blocks(client: KeyedClient) -> Iterator[bytes]:
    for partition, rows in client.rows(None).items():
        for start in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[start : start + ROWS_AT_ONCE]
            found = zip(some, client.values(partition, [row.key for row in some]), strict=True)
            kept = [keyed.PutRow(row.key, row.tags, held.fields) for row, held in found if held.is_there]
            name = keyed.pack([partition])
            yield len(name).to_bytes(_LENGTH_BYTES, "little") + name + keyed.pack(kept)


def load(client: KeyedClient, folder: Path) -> None:
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
        client.reset()
        for record in records:
            client.put(*_unpacked(record))


def _unpacked(record: Record) -> tuple[str, list[keyed.PutRow]]:
    block = record.payload
    names = int.from_bytes(block[:_LENGTH_BYTES], "little") + _LENGTH_BYTES
    (partition,) = keyed.unpack_keys(block[_LENGTH_BYTES:names])
    return partition, keyed.unpack_puts(block[names:])


class _Process:
    """What this process has: its client, and the server that `init` has started because there was no address."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.client: KeyedClient | None = None
        self.told: Sequence[str] = ()  # the addresses that this process itself has told others
        self.server: Server | None = None

    def connect(self, addresses: Sequence[str]) -> KeyedClient:
        """Connect unless it is; with the lock."""
        if self.client is None:
            self.client = KeyedClient(addresses)
        return self.client


_here = _Process()


# ------------------------------------------------------------------------------------------------ begin and end


def init(conf: Any = None) -> Any:
    """Connect this process to memoire's servers; the first process that finds no address starts one.

    Args:
        conf: A mapping or an OmegaConf. conf["memoire"]["servers"] has the servers' addresses; what is for
            TransferQueue alone is ignored. Without them: $MEMOIRE_TQ, then what `init` of another process told Ray.

    Returns:
        The configuration with "memoire" in it, or `conf` itself if another process has begun before.

    Raises:
        ParameterError: conf names other servers than those that are known: rows would lie in two places.
    """
    with Held(_here.lock):
        known, given = _known_addresses(), _given_addresses(conf)
        _check_given(given, known)
        if _here.client is not None or (known and not given):
            _here.connect(known)
            return conf
        if not given:
            _here.server = _here.server or Server(
                "tcp://127.0.0.1:*", storage="keyed"
            )  # there if `init` was interrupted
            given = [_here.server.endpoint]
        _tell(given)
        _here.connect(given)
        return {**dict(conf or {}), "memoire": {"servers": given}}


def _check_given(given: Sequence[str], known: Sequence[str]) -> None:
    """Refuse other servers than this process, or the one that has begun, works with. Raises ParameterError."""
    in_use = known if _here.client is None else _here.client.servers
    is_free = _here.client is None and set(known) == set(_here.told)
    if given and in_use and not is_free and set(given) != set(in_use):
        whose = "this process works with: call tq.close() first" if _here.client else f"{ADDRESSES} or Ray says"
        raise ParameterError("memoire.servers", list(given), f"{list(in_use)}, which {whose}, or left out")


def close() -> None:
    """Disconnect this process, and end the server that its `init` has started."""
    with Held(_here.lock):
        if _here.client is not None:
            _here.client.close()
        if _here.server is not None:
            _here.server.close()
            _tell([])
        _here.client = _here.server = None


def get_client() -> KeyedClient:
    """The client of this process. Raises AssertionError before `init`."""
    if _here.client is None:
        raise AssertionError("Please initialize the TransferQueue first by calling `tq.init()`!")
    return _here.client


def get_metrics_endpoint() -> str | None:
    """HOST:PORT of the first server's pages, whose /metrics are for Prometheus; None if it has none."""
    if _here.client is None and not _known_addresses():
        return None
    client = _ready()
    return client.pages()


def _ready() -> KeyedClient:
    with Held(_here.lock):
        if _here.client is None and not (known := _known_addresses()):
            raise AssertionError("TransferQueueController has not been initialized yet. Please call init() first.")
        return _here.client or _here.connect(known)


def _given_addresses(conf: Any) -> list[str]:
    ours = (conf or {}).get("memoire") or {}
    servers = ours.get("servers") or []
    if not isinstance(servers, str) and not all(isinstance(each, str) for each in servers):
        raise ParameterError("memoire.servers", servers, "addresses such as tcp://memoire:5560")
    return [servers] if isinstance(servers, str) else list(servers)


def _known_addresses() -> list[str]:
    said = os.environ.get(ADDRESSES) or _ray_says()
    return [each for each in said.split(",") if each]


def _tell(addresses: Sequence[str]) -> None:
    """Let processes that begin later know; none: forget."""
    _here.told, said = addresses, ",".join(addresses)
    os.environ[ADDRESSES] = said
    if (store := _ray_store()) is not None:
        store._internal_kv_put(ADDRESSES.encode(), said.encode(), overwrite=True)


def _ray_says() -> str:
    store = _ray_store()
    return "" if store is None else (store._internal_kv_get(ADDRESSES.encode()) or b"").decode()


def _ray_store() -> Any:
    """Ray's key-value store, if this process has Ray and is part of a cluster."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    return importlib.import_module("ray.experimental.internal_kv")


# --------------------------------------------------------------------------------------------------------- keys


def kv_put(
    key: str,
    partition_id: str,
    fields: TensorDict | Mapping[str, Any] | None = None,
    tag: dict[str, Any] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """Write one row: fields and tags that it has stay, unless they are named here.

    Args:
        fields: Values by name: tensors, and anything that JSON or NumPy has. A TensorDict has a batch of one.
        data_parser: Called with the columns as a dict before they are stored; returns it, changed.

    Raises:
        ValueError: neither fields nor a tag, or a nested tensor, which is a batch.
        NotPlain: a value could only be pickled.
        Refused: the server is full.
    """
    client = _ready()
    if fields is None and tag is None:
        raise ValueError("Please provide at least one parameter of fields or tag.")
    batch = None if fields is None else single_row(fields)
    return _put(client, [key], partition_id, batch, None if tag is None else [tag], data_parser)


def kv_batch_put(
    keys: list[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: list[dict[str, Any]] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """Write rows: fields and tags that they have stay, unless they are named here.

    Args:
        fields: Batch of as many rows as there are keys.
        tags: Of each key.
        data_parser: See `kv_put`.

    Returns:
        The keys with all their tags, and the fields that all of them have.

    Raises:
        ValueError: neither fields nor tags, a key is repeated, or lengths differ, those of columns too.
        NotPlain: a value could only be pickled.
        Refused: a server is full; rows of other servers may be written.
    """
    client = _ready()
    return _put(client, keys, partition_id, fields, tags, data_parser)


def kv_batch_get(keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None) -> TensorDict:
    """Fields that all of these rows have; keys that do not exist are left out.

    Args:
        select_fields: These of them; None takes all.

    Returns:
        A batch of the rows, in the order of the keys. Numbers are stacked [n]; other tensors become a nested tensor,
        jagged if their shapes allow it; what is no tensor comes as a NonTensorStack.

    Raises:
        ValueError: none of the keys exists, or the rows have no field in common yet.
    """
    client = _ready()
    names = _keys(keys)
    chosen = [select_fields] if isinstance(select_fields, str) else select_fields
    found = [row for row in client.values(partition_id, names, chosen or ()) if row.is_there]
    if not found:
        raise ValueError("keys or partition were not found!")
    if not set.intersection(*(set(row.names) for row in found)):
        raise ValueError("Some fields are not ready in all the requested keys!")
    rows = [decoded(row.fields) for row in found]
    shared = set.intersection(*map(set, rows))
    return batch_of({name: [row[name] for row in rows] for name in shared}, len(rows))


def kv_batch_get_by_meta(meta: KVBatchMeta, select_fields: list[str] | str | None = None) -> TensorDict:
    """The rows that a batch names; see `kv_batch_get`. Raises ValueError too if `select_fields` has others than it."""
    partition, fields = _of_meta(meta, select_fields)
    return kv_batch_get(meta.keys, partition, fields)


def kv_list(partition_id: str | None = None) -> dict[str, dict[str, Any]]:
    """Tags by partition and key, of one partition or of all, in the order in which rows were made."""
    client = _ready()
    found = client.rows(partition_id)
    return {name: {row.key: decoded(row.tags) for row in rows} for name, rows in found.items()}


def kv_clear(keys: list[str] | str, partition_id: str) -> None:
    """Take rows away; keys that do not exist are ignored. Raises ValueError for an empty list."""
    client = _ready()
    client.clear(partition_id, _keys(keys))


def _awaited(call: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """The same call for an event loop: it waits in a thread."""

    @functools.wraps(call)
    async def awaited(*args: P.args, **options: P.kwargs) -> T:
        return await asyncio.to_thread(call, *args, **options)

    awaited.__name__ = awaited.__qualname__ = f"async_{call.__name__}"
    return awaited


async_kv_put = _awaited(kv_put)
async_kv_batch_put = _awaited(kv_batch_put)
async_kv_batch_get = _awaited(kv_batch_get)
async_kv_batch_get_by_meta = _awaited(kv_batch_get_by_meta)
async_kv_list = _awaited(kv_list)
async_kv_clear = _awaited(kv_clear)


# -------------------------------------------------------------------------------------------------- checkpoints


def save_checkpoint(
    checkpoint_dir: str | Path, *, include_storage: bool = True, metadata: dict[str, Any] | None = None
) -> None:
    """Write all rows of all servers to a folder. The checkpoint that it has stays until the new one is on disk; other
    files in it stay.

    Args:
        include_storage: Ignored: rows are always written with their values.
        metadata: Written beside them, as JSON.

    Raises:
        RuntimeError: `init` was not called.
        StateLocked: another process saves to this folder.
        OSError: a file could not be written.
    """
    client = _initialized()
    save(client, Path(checkpoint_dir), metadata)


def load_checkpoint(checkpoint_dir: str | Path) -> None:
    """Put the rows of a checkpoint in the place of all rows, at any number of servers.

    Raises:
        RuntimeError: `init` was not called.
        FileNotFoundError: there is no checkpoint, or a file of it is missing.
        DataError: it is damaged, or of a former form. Servers hold what they held.
    """
    client = _initialized()
    load(client, Path(checkpoint_dir))


def _initialized() -> KeyedClient:
    if _here.client is None:
        raise RuntimeError("TransferQueue is not initialized. Call tq.init() first.")
    return _here.client


# ------------------------------------------------------------------------------- what both forms of a call share


def _keys(keys: list[str] | str) -> list[str]:
    made = [keys] if isinstance(keys, str) else list(keys)
    if not made:
        raise ValueError("Received an empty list as keys.")
    return made


def _of_meta(meta: KVBatchMeta, select_fields: list[str] | str | None) -> tuple[str, list[str] | None]:
    if meta.partition_id is None:
        raise ValueError("Must provide partition_id in the input KVBatchMeta.")
    if select_fields is None:
        return meta.partition_id, meta.fields
    chosen = [select_fields] if isinstance(select_fields, str) else select_fields
    if any(name not in (meta.fields or ()) for name in chosen):
        raise ValueError(
            f"Some fields assigned in select_fields not found in the metadata. Assigned: {chosen}; "
            f"Fields in KVBatchMeta: {meta.fields}."
        )
    return meta.partition_id, chosen


def _put(
    client: KeyedClient,
    keys: list[str],
    partition: str,
    fields: TensorDict | None,
    tags: list[dict[str, Any]] | None,
    parser: Parser | None,
) -> KVBatchMeta:
    _check_put(keys, fields, tags)
    columns: dict[str, list[Any]] = {}
    if fields is not None:
        columns = columns_of(fields) if parser is None else parsed(fields, parser)
    return _meta(partition, client.put(partition, put_rows(keys, tags or [{}] * len(keys), columns)))


def _check_put(keys: list[str], fields: TensorDict | None, tags: list[dict[str, Any]] | None) -> None:
    if fields is None and tags is None:
        raise ValueError("Please provide at least one parameter of `fields` or `tags`.")
    if fields is not None and fields.batch_size[0] != len(keys):
        raise ValueError(
            f"`keys` with length {len(keys)} does not match the `fields` TensorDict with batch_size "
            f"{fields.batch_size[0]}"
        )
    _keys(keys)
    if tags is not None and len(tags) != len(keys):
        raise ValueError(f"keys with length {len(keys)} does not match length of tags {len(tags)}")
    if len(set(keys)) != len(keys):
        raise ValueError("Got duplicated keys.")


def _meta(partition: str, rows: Sequence[keyed.RowFacts]) -> KVBatchMeta:
    shared = set.intersection(*(set(row.fields) for row in rows))
    return KVBatchMeta(
        keys=[row.key for row in rows],
        tags=[decoded(row.tags) for row in rows],
        partition_id=partition,
        fields=sorted(shared),
        extra_info={},
    )
