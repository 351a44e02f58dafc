"""Short runs of every target of tests/fuzz with hostile input, and inputs that such runs have found.

Long runs are `make soak SOAK=fuzz_inputs`.
"""

import json
import random
from dataclasses import replace

import msgspec
import pytest

from fuzz import engine, snapshot_file, state_file
from memoire.disk import records, snapshots
from memoire.disk.snapshot_file import SnapshotRecord
from memoire.disk.state_folder import Store
from memoire.errors import DataError, ParameterError, SchemaError, StateCorrupt
from memoire.nodes.roles import parameters_from, read_tables
from memoire.replay.schema import Schema
from memoire.tables.caches.inspection import ClientRecord
from memoire.tables.episodes.saving import EpisodeRecord

ROUNDS = {
    "wire_message": 4000,
    "container": 1500,
    "schema_text": 300,
    "model_body": 400,
    "table_file": 400,
    "settings_file": 60,
    "key_file": 800,
    "log_line": 400,
    "http_request": 800,
    "model_transfer": 250,
    "minari_data": 400,
    "dispatcher": 80,
    "prompts": 150,
    "snapshot_file": 150,
    "state_file": 40,
    "buffer_file": 150,
}


def test_every_target_is_tried():
    assert set(ROUNDS) == set(engine.TARGETS)


@pytest.mark.parametrize("name", engine.TARGETS)
def test_nothing_but_what_is_promised_comes_of_hostile_bytes(name):
    verdicts = engine.hunt(name, ROUNDS[name])
    missing = engine.load(name).REACHED - verdicts.keys()
    assert not missing, f"this run came to {dict(verdicts)} only: it no longer shows what happens behind that"


def test_a_finding_says_how_to_try_it_again(monkeypatch):
    def one(data):
        raise IndexError(len(data))

    monkeypatch.setattr(engine.load("log_line"), "one", one)
    with pytest.raises(engine.Finding, match="IndexError") as finding:
        engine.hunt("log_line", 0)
    call = str(finding.value).partition("again: ")[2]
    with pytest.raises(IndexError):
        eval(call, {"fuzz": __import__("fuzz.engine")})


@pytest.mark.parametrize("seed", range(3))
def test_mutation_changes_bytes_and_keeps_to_its_bound(seed):
    rng = random.Random(seed)
    data = rng.randbytes(400)
    inputs = [engine.mutate(data, rng, [data]) for _ in range(300)]
    assert all(len(each) <= engine.MAX_BYTES for each in inputs) and sum(each != data for each in inputs) > 280
    assert all(len(engine.mutate(data, rng, [data], in_place=1.0)) == len(data) for _ in range(100))


# Inputs that runs have found


def schema_of(*columns):
    return json.dumps({"columns": columns})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (schema_of(["obs", "<f4", [10**4000] * 8, "state"]), "an axis of more than"),
        (schema_of(["obs", "<f4", [0, 10**10], "state"]), "an axis of more than"),
        (schema_of([".".join("o" * 2000), "<f4", [], "state"]), "1999 levels deep"),
        ("[" * 100_000, "not the JSON form"),
    ],
)
def test_a_schema_that_is_too_much_is_a_schema_error(text, words):
    with pytest.raises(SchemaError, match=words):
        Schema.from_json(text)


@pytest.mark.parametrize(
    "text", ['{"a": ' + "[" * 100_000, '{"a": ' + "9" * 5000 + "}", '{"a": {"discount": ' + "9" * 400]
)
def test_a_file_of_tables_that_is_too_deep_or_has_too_long_numbers_is_named(tmp_path, text):
    path = tmp_path / "tables.json"
    path.write_text(text)
    with pytest.raises(ParameterError, match="tables.json"):
        read_tables(str(path))


def test_a_parameter_too_large_for_a_float_is_refused():
    with pytest.raises(ParameterError, match="a whole number of 1329 bits"):
        parameters_from({"priority_exponent": 10**400})


@pytest.mark.parametrize(
    "body",
    [
        ClientRecord(id=b"c" * 16, positives=1e300),
        ClientRecord(id=b"c" * 16, total_weight=float("nan")),
        ClientRecord(id=b"short"),
        EpisodeRecord(owner=b"o" * 16, number=2**63, length=1),
        EpisodeRecord(owner=b"o" * 16, number=-1, length=1),
    ],
)
def test_a_record_of_a_snapshot_that_says_what_cannot_be_is_damage(tmp_path, body):
    path = tmp_path / "x.snapshot"
    path.write_bytes(snapshot_file.file_of(SnapshotRecord(body))[1:])
    assert "cannot be read" in snapshots.describe_file(path, check=True)["damage"]


def test_a_snapshot_of_no_schema_is_named(tmp_path):
    path = tmp_path / "x.snapshot"
    table = snapshot_file.snapshot_file.TableAbout(name="default", storage="caches", schema="[" * 50_000, parameters={})
    path.write_bytes(snapshot_file.file_of(tables=[table])[1:])
    with pytest.raises(DataError, match="with an invalid schema"):
        snapshots.describe_file(path)


def test_a_database_that_names_files_elsewhere_is_refused(tmp_path):
    """A database from elsewhere must not make its reader append to other files or remove them."""
    victim = tmp_path / "victim.00000001.log"
    victim.write_text("precious")
    rows = state_file._template()
    place = next(i for i, (kind, _, _) in enumerate(rows) if kind == records.SEGMENT)
    segment = msgspec.msgpack.decode(rows[place][2], type=records.LogSegment)
    for name in ("../../victim.00000001.log", "/" + "x" * 10, str(victim), "log\0.00000001.log"):
        body = msgspec.msgpack.encode(replace(segment, name=name))
        assert state_file.one(bytes([place]) + body) == "refused"
        with pytest.raises(StateCorrupt, match="is not a valid name"):
            Store(state_file.FOLDER, None)
    assert victim.read_text() == "precious"
