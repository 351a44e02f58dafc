"""Snapshots of a server: an error that names the fault of the file, or tables that go on working.

1 byte   1: every checksum is corrected before the file is read; 2: a table of episodes, else of caches
"""

import json
import math
import struct
import tempfile
from pathlib import Path

import msgspec
import numpy as np

import make_vectors
from memoire.accounting.merge import merge
from memoire.disk import snapshot_file, snapshots
from memoire.disk.snapshots import restore
from memoire.errors import DataError, NotEnoughSamples, ParameterError, SchemaError, SnapshotMismatch
from memoire.limits import Limits
from memoire.replay.dataset import Episode, KeptEpisode
from memoire.replay.parameters import Parameters
from memoire.tables.caches.inspection import CacheRecord, ClientRecord
from memoire.tables.caches.pool import Pool
from memoire.tables.episodes import saving as episode_records
from memoire.tables.episodes.pool import EpisodePool
from memoire.tables.table import OpenTable, Table
from memoire.wire import _bytes
from memoire.wire.rows import ACCOUNT

REACHED = {"restored", "DataError", "SnapshotMismatch"}
IN_PLACE = 0.5
SCHEMA = make_vectors.SCHEMA
WINDOWS = Parameters(frame_stack=2, multi_step=2)
VECTORS = Path(__file__).parent.parent / "vectors"
LIMITS = Limits(message_bytes=1 << 20)
_FOLDER = tempfile.TemporaryDirectory(prefix="memoire-fuzz-")
PATH = Path(_FOLDER.name) / "memory.snapshot"
_HEAD, _SUM = struct.calcsize("<8sII16sQ"), 8
_RECORD = struct.Struct("<IIQQ")


def _table(storage: str) -> OpenTable:
    if storage == "episodes":
        settings = Table(SCHEMA, storage="episodes", capacity=64, byte_limit=1 << 16)
        return OpenTable("whole", settings, EpisodePool(SCHEMA, capacity=64, byte_limit=1 << 16, seed=0))
    settings = Table(SCHEMA, parameters=WINDOWS)
    return OpenTable("default", settings, Pool(SCHEMA, WINDOWS, seed=0, byte_limit=1 << 20))


def file_of(*records: snapshot_file.SnapshotRecord, storage: str = "caches", **about: object) -> bytes:
    """Return an input that holds a snapshot with these records."""
    header = snapshots.read_header([_table(storage)], server="home", run="run", models={"policy": 3})
    snapshot_file.write(PATH, msgspec.structs.replace(header, **about), records)
    return bytes([3 if storage == "episodes" else 1]) + PATH.read_bytes()


def _client(**changed: object) -> snapshot_file.SnapshotRecord:
    facts = {"id": b"c" * 16, "sequence": 3, "total_weight": 5.0, "positives": 3.0, "minimum": 0.5, "between": 2.0}
    return snapshot_file.SnapshotRecord(ClientRecord(**facts | changed))


def _episode(**changed: object) -> snapshot_file.SnapshotRecord:
    facts = {
        "init_w": np.ones(5, np.float32), "priority": np.ones(5), "learned": np.zeros(5, np.bool_), "born": np.ones(5),
        "model_version": np.zeros(5, np.int64),
    }  # fmt: skip
    columns = {"obs": np.zeros((5, 2), np.uint8), "action": np.zeros(5, np.int32), "reward": np.ones(5, np.float32)}
    final = {"obs": np.zeros(2, np.uint8)}
    episode = Episode(columns=columns, **facts, multiplier=1.0, terminated=True, final_state=final)
    body, payload = episode_records.pack(KeptEpisode(b"o" * 16, 7, episode), SCHEMA)
    return snapshot_file.SnapshotRecord(msgspec.structs.replace(body, **changed), 0, payload)


def seeds() -> list[bytes]:
    payload = (VECTORS / "cache.payload").read_bytes()
    rows = np.zeros(2, ACCOUNT)
    rows["client"], rows["steps"] = [[1, 2], [3, 4]], 100
    cache = snapshot_file.SnapshotRecord(CacheRecord(samples=3, used=1, age=2.0), 0, payload)
    accounts = snapshot_file.SnapshotRecord(snapshot_file.AccountsRecord(run="run"), 0, rows.tobytes())
    deep = json.dumps({"columns": []}).encode()
    return [
        file_of(accounts, _client(), cache, cache),
        file_of(_episode(), _episode(number=12), storage="episodes"),
        file_of(_episode(number=2**64 - 1), storage="episodes"),
        file_of(_episode(number=-(2**63), multiplier=1e308, closed=math.nan), storage="episodes"),
        file_of(_client(total_weight=math.nan, positives=1e300, minimum=-1.0, between=math.inf, sequence=2**64 - 1), cache),
        file_of(_client(positives=1e300, between=math.nan, sequence=-1), cache),
        file_of(_client(id=b""), cache),
        file_of(models={"policy": 2**64 - 1, "\0": -5}),
        file_of(taken=math.nan), file_of(taken=-math.inf),
        file_of(snapshot_file.SnapshotRecord(snapshot_file.AccountsRecord(run="\0" * 300), 0, rows.tobytes())),
        file_of(tables=[snapshot_file.TableAbout(name="default", storage="caches", schema="[" * 50_000, parameters={})]),
        file_of(tables=[snapshot_file.TableAbout(name="default", storage="caches", schema=deep.decode(), parameters={})]),
        file_of(tables=[snapshot_file.TableAbout(name="default", storage="caches", schema=SCHEMA.to_json(), parameters=_deep())]),
    ]  # fmt: skip


def _deep() -> dict[str, object]:
    nested: dict[str, object] = {}
    for _ in range(900):
        nested = {"a": nested}
    return nested


def repair(data: bytes) -> bytes:
    """Return the same file with every checksum corrected, as far as its lengths lead."""
    repaired = bytearray(data)
    if len(repaired) < _HEAD + _SUM:
        return data
    chain = _bytes.checksum(repaired[:_HEAD])
    struct.pack_into("<Q", repaired, _HEAD, chain)
    at = _HEAD + _SUM
    while at + _RECORD.size + _SUM <= len(repaired):
        kind, tag, size, check = _RECORD.unpack_from(repaired, at)
        begin = at + _RECORD.size + _SUM
        is_last = begin == len(repaired)
        if not is_last:
            if begin + size > len(repaired):
                break
            check = _bytes.checksum(repaired[begin : begin + size])
        facts = _RECORD.pack(kind, tag, size, check)
        chain = _bytes.checksum(facts, chain)
        repaired[at:begin] = facts + chain.to_bytes(_SUM, "little")
        at = begin if is_last else begin + size
    return bytes(repaired)


def one(data: bytes) -> str:
    """Read the facts of a snapshot, and restore it into a new server's tables."""
    flags = data[0] if data else 0
    PATH.write_bytes(repair(data[1:]) if flags & 1 else data[1:])
    table = _table("episodes" if flags & 2 else "caches")
    inherited = []
    try:
        snapshots.describe_file(PATH, check=True)
        snapshots.read_headers([PATH])
        done = restore(
            [PATH], [table], skip_damaged=True, limits=LIMITS, now=100.0,
            inherit=lambda run, finished, rows: inherited.append(merge(rows)),
        )  # fmt: skip
    except (DataError, SnapshotMismatch, SchemaError, ParameterError) as error:
        str(error)
        return type(error).__name__
    str(done)
    try:
        pooled = table.pool.get(1)
    except NotEnoughSamples:
        pass
    else:
        assert np.isfinite(pooled.importance).all()
    table.pool.reserve(b"r" * 16, 5).tobytes()
    list(table.pool.records())
    return "restored" if done.caches or done.episodes or done.accounts else "empty"
