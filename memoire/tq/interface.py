"""Calls of TransferQueue's key-value interface, with one client for the process.

`init` in one process starts or finds the servers and sets their addresses in $MEMOIRE_TQ, which its child processes
inherit. Further processes need this variable, or get the addresses from Ray if they and `init` use the same cluster.

`save` writes all rows into a folder, which `load` can read into any number of servers:

    metadata.json                     the caller's metadata as JSON; replaced last
    rows-1c9f0a6be2d05d2e.msgpack     the rows, named by the checksum of metadata.json, which is also the first record
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

from .client import KeyedClient, Parser, batch_of, columns_of, decoded, parse_columns, put_rows, single_row
from .metadata import KVBatchMeta

ADDRESSES = "MEMOIRE_TQ"
"""Environment variable with the servers' addresses, separated by commas; also their name in Ray's own store."""


P = ParamSpec("P")
T = TypeVar("T")
KIND: Final = FileKind(b"memoirtq", 2, "a checkpoint of memoire.tq")
METADATA: Final = "metadata.json"
ROWS_PER_BLOCK: Final = 256
_ROWS: Final = re.compile(r"rows-[0-9a-f]{16}\.msgpack")
_FORMER_ROWS: Final = "rows.msgpack"
_LENGTH_BYTES: Final = 8


def save(client: KeyedClient, folder: Path, metadata: dict[str, Any] | None, *, at: Fault = no_fault) -> None:
    """Write every row to a folder. The former checkpoint stays until the new one is complete and on disk.

    Args:
        metadata: Caller's metadata, written as JSON.
        at: Called before each step, so that a test can let the step fail: see `replacing`.

    Raises:
        StateLocked: another process saves to this folder.
        OSError: a file cannot be written.
    """
    header = json.dumps({"storage_saved": True, "user_metadata": metadata or {}}, indent=2).encode()
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        sync(folder.parent)
    lock = lock_folder(folder, "the checkpoint folder", "process")
    try:
        rows = _rows_path(folder, header)
        with checked_file.writing(rows, KIND, at=at) as file:
            file.put(0, header)
            for block in _pack_blocks(client):
                file.put(1, block)
        replace_file(folder / METADATA, header, at=at)
        for other in folder.iterdir():
            if other != rows and _ROWS.fullmatch(other.name):
                at("remove")
                other.unlink()
        remove_abandoned_in(folder, ".msgpack")
    finally:
        lock.release()


def _rows_path(folder: Path, metadata: bytes) -> Path:
    return folder / f"rows-{checksum(metadata):016x}.msgpack"


def _pack_blocks(client: KeyedClient) -> Iterator[bytes]:
    for partition, rows in client.rows(None).items():
        for start in range(0, len(rows), ROWS_PER_BLOCK):
            block = rows[start : start + ROWS_PER_BLOCK]
            pairs = zip(block, client.values(partition, [row.key for row in block]), strict=True)
            existing = [keyed.PutRow(row.key, row.tags, values.fields) for row, values in pairs if values.is_there]
            name = keyed.pack([partition])
            yield len(name).to_bytes(_LENGTH_BYTES, "little") + name + keyed.pack(existing)


def load(client: KeyedClient, folder: Path) -> None:
    """Replace all rows of the servers by those of a checkpoint.

    Raises:
        FileNotFoundError: the folder, or a file of the checkpoint, does not exist.
        DataError: a file is damaged, of a former format or of another checkpoint. The servers keep their rows.
    """
    if not folder.exists():
        raise FileNotFoundError(f"Checkpoint directory not found: {folder}")
    if not (folder / METADATA).exists():
        raise FileNotFoundError(f"{METADATA} not found in {folder}")
    header = (folder / METADATA).read_bytes()
    path = _rows_path(folder, header)
    if not path.exists():
        if (folder / _FORMER_ROWS).exists():
            raise DataError(str(folder / _FORMER_ROWS), f"is not {KIND.name}, but has a former format")
        raise FileNotFoundError(f"{path.name} not found in {folder}: the file is missing, or {METADATA} was changed")
    with CheckedFile(path, KIND) as file:
        records = file.records()
        if next(records, None) != (0, header):
            raise DataError(str(path), f"belongs to another {METADATA}")
        client.reset()
        for record in records:
            client.put(*_unpack(record))


def _unpack(record: Record) -> tuple[str, list[keyed.PutRow]]:
    block = record.payload
    names = int.from_bytes(block[:_LENGTH_BYTES], "little") + _LENGTH_BYTES
    (partition,) = keyed.unpack_keys(block[_LENGTH_BYTES:names])
    return partition, keyed.unpack_puts(block[names:])


class _ProcessState:
    """State of this process: its client, and the server that `init` started for lack of an address."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.client: KeyedClient | None = None
        self.announced: Sequence[str] = ()  # addresses that this process has announced to others
        self.server: Server | None = None

    def connect(self, addresses: Sequence[str]) -> KeyedClient:
        """Return the client, and create it if needed. The caller holds the lock."""
        if self.client is None:
            self.client = KeyedClient(addresses)
        return self.client


_state = _ProcessState()


# ------------------------------------------------------------------------------------------------ begin and end


def init(conf: Any = None) -> Any:
    """Connect this process to memoire's servers; start a server if no address is configured or announced.

    Args:
        conf: A mapping or an OmegaConf. conf["memoire"]["servers"] has the servers' addresses; settings of
            TransferQueue are ignored. Without addresses: those in $MEMOIRE_TQ, then those that another process's `init`
            announced by Ray.

    Returns:
        The configuration with "memoire" in it, or `conf` itself if another process has announced addresses.

    Raises:
        ParameterError: conf names other servers than the announced ones, so that rows would be in two places.
    """
    with Held(_state.lock):
        announced, configured = _announced_addresses(), _configured_addresses(conf)
        _check_configured(configured, announced)
        if _state.client is not None or (announced and not configured):
            _state.connect(announced)
            return conf
        if not configured:
            # The server exists already if a former `init` was interrupted.
            _state.server = _state.server or Server("tcp://127.0.0.1:*", storage="keyed")
            configured = [_state.server.endpoint]
        _announce(configured)
        _state.connect(configured)
        return {**dict(conf or {}), "memoire": {"servers": configured}}


def _check_configured(configured: Sequence[str], announced: Sequence[str]) -> None:
    in_use = announced if _state.client is None else _state.client.servers
    is_free = _state.client is None and set(announced) == set(_state.announced)
    if configured and in_use and not is_free and set(configured) != set(in_use):
        owner = "this process uses (call tq.close() first)" if _state.client else f"are set in {ADDRESSES} or Ray"
        raise ParameterError("memoire.servers", list(configured), f"{list(in_use)}, which {owner}, or left out")


def close() -> None:
    """Disconnect this process, and close the server that its `init` has started."""
    with Held(_state.lock):
        if _state.client is not None:
            _state.client.close()
        if _state.server is not None:
            _state.server.close()
            _announce([])
        _state.client = _state.server = None


def get_client() -> KeyedClient:
    """Return the client of this process. Raises AssertionError before `init`."""
    if _state.client is None:
        raise AssertionError("Please initialize the TransferQueue first by calling `tq.init()`!")
    return _state.client


def get_metrics_endpoint() -> str | None:
    """Return HOST:PORT of the first server's pages, whose /metrics are for Prometheus; None without pages."""
    if _state.client is None and not _announced_addresses():
        return None
    client = _connected_client()
    return client.pages()


def _connected_client() -> KeyedClient:
    with Held(_state.lock):
        if _state.client is None and not (announced := _announced_addresses()):
            raise AssertionError("TransferQueueController has not been initialized yet. Please call init() first.")
        return _state.client or _state.connect(announced)


def _configured_addresses(conf: Any) -> list[str]:
    settings = (conf or {}).get("memoire") or {}
    servers = settings.get("servers") or []
    if not isinstance(servers, str) and not all(isinstance(each, str) for each in servers):
        raise ParameterError("memoire.servers", servers, "addresses such as tcp://memoire:5560")
    return [servers] if isinstance(servers, str) else list(servers)


def _announced_addresses() -> list[str]:
    text = os.environ.get(ADDRESSES) or _ray_addresses()
    return [each for each in text.split(",") if each]


def _announce(addresses: Sequence[str]) -> None:
    """Announce addresses to processes that start later, by environment variable and Ray; [] withdraws them."""
    _state.announced, text = addresses, ",".join(addresses)
    os.environ[ADDRESSES] = text
    if (store := _ray_store()) is not None:
        store._internal_kv_put(ADDRESSES.encode(), text.encode(), overwrite=True)


def _ray_addresses() -> str:
    store = _ray_store()
    return "" if store is None else (store._internal_kv_get(ADDRESSES.encode()) or b"").decode()


def _ray_store() -> Any:
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
    """Write one row; its other fields and tags stay.

    Args:
        fields: Values by name: tensors, and values of JSON's or NumPy's types. A TensorDict has a batch of one.
        data_parser: Function that changes the columns before they are stored: takes a dict of columns and returns it.

    Raises:
        ValueError: neither fields nor a tag are given, or a field is a nested tensor, which is a batch.
        NotPlain: a value could only be pickled.
        Refused: the server is full.
    """
    client = _connected_client()
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
    """Write rows; their other fields and tags stay.

    Args:
        fields: Batch with one row for each key.
        tags: Tags of each key.
        data_parser: See `kv_put`.

    Returns:
        The keys with all their tags, and the fields that all of them have.

    Raises:
        ValueError: neither fields nor tags are given, a key is repeated, or keys, fields, tags or columns differ in
            length.
        NotPlain: a value could only be pickled.
        Refused: a server is full; rows of other servers may be written.
    """
    client = _connected_client()
    return _put(client, keys, partition_id, fields, tags, data_parser)


def kv_batch_get(keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None) -> TensorDict:
    """Return the fields that all of these rows have; unknown keys are left out.

    Args:
        select_fields: Names of fields to return; None returns all common fields.

    Returns:
        A batch of the rows, in the order of the keys. Numbers are stacked [n]; other tensors become a nested tensor,
        jagged if their shapes allow it; other values become a NonTensorStack.

    Raises:
        ValueError: none of the keys exists, or the rows have no field in common yet.
    """
    client = _connected_client()
    names = _keys(keys)
    selected = [select_fields] if isinstance(select_fields, str) else select_fields
    existing = [row for row in client.values(partition_id, names, selected or ()) if row.is_there]
    if not existing:
        raise ValueError("keys or partition were not found!")
    if not set.intersection(*(set(row.names) for row in existing)):
        raise ValueError("Some fields are not ready in all the requested keys!")
    rows = [decoded(row.fields) for row in existing]
    shared = set.intersection(*map(set, rows))
    return batch_of({name: [row[name] for row in rows] for name in shared}, len(rows))


def kv_batch_get_by_meta(meta: KVBatchMeta, select_fields: list[str] | str | None = None) -> TensorDict:
    """Return rows as `kv_batch_get`. Raises ValueError, too, if `meta` lacks a partition or one of `select_fields`."""
    partition, fields = _partition_and_fields(meta, select_fields)
    return kv_batch_get(meta.keys, partition, fields)


def kv_list(partition_id: str | None = None) -> dict[str, dict[str, Any]]:
    """Return tags by partition and key, of one partition or of all, in the order in which rows were created."""
    client = _connected_client()
    partitions = client.rows(partition_id)
    return {name: {row.key: decoded(row.tags) for row in rows} for name, rows in partitions.items()}


def kv_clear(keys: list[str] | str, partition_id: str) -> None:
    """Delete rows; unknown keys are ignored. Raises ValueError for an empty list."""
    client = _connected_client()
    client.clear(partition_id, _keys(keys))


def _to_async(call: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    @functools.wraps(call)
    async def run(*args: P.args, **options: P.kwargs) -> T:
        return await asyncio.to_thread(call, *args, **options)

    run.__name__ = run.__qualname__ = f"async_{call.__name__}"
    return run


async_kv_put = _to_async(kv_put)
async_kv_batch_put = _to_async(kv_batch_put)
async_kv_batch_get = _to_async(kv_batch_get)
async_kv_batch_get_by_meta = _to_async(kv_batch_get_by_meta)
async_kv_list = _to_async(kv_list)
async_kv_clear = _to_async(kv_clear)


# -------------------------------------------------------------------------------------------------- checkpoints


def save_checkpoint(
    checkpoint_dir: str | Path, *, include_storage: bool = True, metadata: dict[str, Any] | None = None
) -> None:
    """Write all rows of all servers to a folder.

    The former checkpoint stays until the new one is on disk. All other files of the folder are not touched.

    Args:
        include_storage: Ignored: rows are always written with their values.
        metadata: Caller's metadata, written as JSON.

    Raises:
        RuntimeError: `init` was not called.
        StateLocked: another process saves to this folder.
        OSError: a file could not be written.
    """
    client = _initialized()
    save(client, Path(checkpoint_dir), metadata)


def load_checkpoint(checkpoint_dir: str | Path) -> None:
    """Replace all rows by those of a checkpoint, at any number of servers.

    Raises:
        RuntimeError: `init` was not called.
        FileNotFoundError: the folder, or a file of the checkpoint, does not exist.
        DataError: the checkpoint is damaged, or has a former format. The servers keep their rows.
    """
    client = _initialized()
    load(client, Path(checkpoint_dir))


def _initialized() -> KeyedClient:
    if _state.client is None:
        raise RuntimeError("TransferQueue is not initialized. Call tq.init() first.")
    return _state.client


# ---------------------------------------------------------------------------- shared by calls and async calls


def _keys(keys: list[str] | str) -> list[str]:
    names = [keys] if isinstance(keys, str) else list(keys)
    if not names:
        raise ValueError("Received an empty list as keys.")
    return names


def _partition_and_fields(meta: KVBatchMeta, select_fields: list[str] | str | None) -> tuple[str, list[str] | None]:
    if meta.partition_id is None:
        raise ValueError("Must provide partition_id in the input KVBatchMeta.")
    if select_fields is None:
        return meta.partition_id, meta.fields
    selected = [select_fields] if isinstance(select_fields, str) else select_fields
    if any(name not in (meta.fields or ()) for name in selected):
        raise ValueError(
            f"Some fields assigned in select_fields not found in the metadata. Assigned: {selected}; "
            f"Fields in KVBatchMeta: {meta.fields}."
        )
    return meta.partition_id, selected


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
        columns = columns_of(fields) if parser is None else parse_columns(fields, parser)
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
