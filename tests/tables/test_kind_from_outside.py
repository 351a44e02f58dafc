"""Kind of table from outside memoire: `support/stack_kind.py`, a stack of the best episodes.

Processes of their own fill, draw, save, restore, show and count the table, since a declaration stays in its process: by
one call, or by the metadata of an installed package.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
PROGRAM = '''
import contextlib, json, sys
from memoire.wire import types
way, folder = sys.argv[1:]
known = types.find(129)
if way == "call":
    from memoire.kinds import add
    from stack_kind import KIND
    add(add(KIND))
import msgspec
import numpy as np
import memoire
from memoire.client.client import connect
from memoire.dashboard.collect.counters import NodeAnswer, NodeState
from memoire.dashboard.collect.overview import tables_of
from memoire.errors import ParameterError
from memoire.limits import Limits
from memoire.cli.main import parser
from memoire.nodes.metrics import families, kind_figures
from memoire.nodes.roles import read_table
from memoire.nodes.roles import read_tables
from memoire.proxy.proxy import Proxy

SCHEMA = {"obs": np.float32, "action": np.int64, "reward": np.float32}
wrong = []
for settings in ({"keep": 0}, {"kep": 1}, {"cache_limit": 5}):
    try:
        memoire.Table(SCHEMA, storage="stack", **settings)
    except (ParameterError, TypeError) as error:
        wrong.append(str(error))

words = ["server", "--schema", json.dumps({"best": 1}), "--storage", "stack", "--set", "keep=2"]
given = parser().parse_args(words)
text = json.dumps({"best": {"storage": "stack", "keep": 5, "schema": json.loads(memoire.Schema(SCHEMA).to_json())}})
kept = [given.storage, read_table(given.set, given.storage)["keep"], read_tables(text)["best"].own.keep]
with memoire.Server("tcp://127.0.0.1:*", SCHEMA, storage="stack", keep=3) as alone:
    kept.append(alone.table("default").stats().storage)


def serve():
    tables = {"plain": memoire.Table(SCHEMA), "best": memoire.Table(SCHEMA, storage="stack", keep=2)}
    return memoire.Server(
        "tcp://127.0.0.1:*", tables=tables, state=memoire.State(folder, snapshot_caches=True), name="one"
    )


def far(endpoint):
    """What a learner far away does."""
    from stack_kind import BestEpisodes

    with contextlib.closing(BestEpisodes(endpoint, "best")) as found:
        return [score for score, payload in found.best(2) if payload]


def refusals(server):
    """What is said of tables that hold something else."""
    from stack_kind import BestEpisodes

    for call in (
        lambda: BestEpisodes(server.endpoint, "plain"),
        lambda: server.table("plain").calls(),
        lambda: server.table("best").get_batch(4),
    ):
        try:
            call()
        except ParameterError as error:
            yield str(error)


server = serve()
proxy = Proxy("tcp://127.0.0.1:*", [server.endpoint])
client = connect(proxy.endpoint, table="best", capacity=100, limits=Limits.of(update_every=0.02), timeout=20.0)
writer = client.writer()
for reward in (1.0, 5.0, 3.0):
    writer.reset(np.float32(0))
    for step in range(4):
        writer.step(np.float32(0), 0, reward, step == 3, False, np.float32(0), {})
client.close(20.0)
near = [score for score, _ in server.table("best").calls().best(5)]
there = [far(server.endpoint), far(proxy.endpoint)]
status = json.loads(msgspec.json.encode({"stats": server.stats()}))
node = NodeState("http://a:1", 0.0)
node.apply(NodeAnswer("http://a:1", 1.0, status={"role": "server", "ready": True, **status}))
rows = {row.name: [row.holds, row.unit, row.room, row.is_taken, row.held_caches] for row in tables_of([node])}
own = next(kind_figures(server.stats()))
metrics = {sample.name: [sample.labels, sample.value] for family in families(own) for sample in family.samples}
spread = server.table("best").distribution().held
taken = str(server.snapshot(f"{folder}/own.snapshot").episodes)
proxy.close()
server.close()
server = serve()
again = [far(server.endpoint), str(server.restore([f"{folder}/own.snapshot"])), far(server.endpoint)]
wrong += refusals(server)
server.close()
print(json.dumps({
    "known": known and known.name, "near": near, "far": there, "own": status["stats"]["tables"]["best"]["own"],
    "rows": rows, "metrics": metrics, "spread": spread, "taken": taken, "again": again, "wrong": wrong, "kept": kept,
}))
'''


def run(tmp_path: Path, way: str) -> dict:
    path = [str(ROOT), str(SUPPORT)]
    if way == "entry point":
        metadata = tmp_path / "stack_kind-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stack_kind\nVersion: 1.0\n", encoding="utf-8")
        (metadata / "entry_points.txt").write_text("[memoire.tables]\nstack = stack_kind:KIND\n", encoding="utf-8")
        path.append(str(tmp_path))
    state = tmp_path / "state"
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, way, str(state)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True, text=True, timeout=100.0, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["call", "entry point"])
def test_a_kind_from_outside_is_taken_in_handed_out_saved_shown_and_counted(tmp_path: Path, way: str) -> None:
    results = run(tmp_path, way)
    best = [20.0, 12.0]
    assert results["known"] == ("BEST" if way == "entry point" else None), "a proxy finds its types by the entry point"
    assert results["near"] == [20.0, 12.0] and results["far"] == [best, best]
    assert results["own"] == {"replaced": 1, "best": 20.0}
    assert results["rows"]["best"] == ["episodes", "entries", "episodes", False, 2]
    assert results["metrics"]["memoire_stack_replaced_total"] == [{"table": "best"}, 1]
    assert results["metrics"]["memoire_stack_best"] == [{"table": "best"}, 20.0]
    assert results["spread"] == 8 and results["taken"] == "2"
    assert results["again"] == [best, "nothing, 2 known", best]
    assert results["kept"] == ["stack", 2, 5, "stack"]
    keep, kep, room, elsewhere, calls, batch = results["wrong"]
    assert "keep must be a whole number from 1 to 1000000, got 0" in keep and "Did you mean 'keep'" in kep
    assert "cache_limit must be 0 with storage='stack', because capacity limits the number of episodes" in room
    assert (
        "best(most) needs a table with storage='stack', but table 'plain' has storage='caches': use memoire.connect"
        in elsewhere
    )
    assert "'stack' to use a table's own calls; for this table call get_batch(batch_size), got 'caches'" in calls
    expected = "storage must be 'caches' or 'episodes' to draw batches; for this table call best(most), got 'stack'"
    assert expected in batch


def test_no_file_of_the_package_names_that_kind() -> None:
    for path in (ROOT / "memoire").rglob("*.py"):
        assert not {"stack_kind", "StackPool", "PUSH_BEST"} & set(path.read_text(encoding="utf-8").split("."))
