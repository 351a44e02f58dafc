"""Snapshots of a server: taken during work, ordered by a reader or by a timer, and restored into another cluster."""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from dispatchkit import arrive, cache_of, made_dispatcher
from fake_store import Disk, MemoryStore
from memoire.cli import main
from memoire.disk import snapshots as snapshot
from memoire.disk.snapshot_file import SnapshotFile
from memoire.errors import Closed, DataError, Refused, SnapshotMismatch
from memoire.keyed.messages import PutRow
from memoire.nodes import roles as snapshots
from memoire.prompts.columns import packed, raw_columns
from memoire.replay import sampling
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.sampling import Greedy, Linear, Prioritized, RankBased, Uniform
from memoire.server.io_snapshots import MEMORY, Archive
from memoire.server.settings import Process
from memoire.tables.registry import BUILT_IN
from memoire.tables.table import Table
from memoire.wire import containers, messages
from netkit import QUICK, SCHEMA, pool_in, record, server_of, table_in, until
from serverkit import server_options

pytestmark = pytest.mark.slow

SMALL = Parameters(cache_size=16)
WORKER = b"w" * 16


def serving(cluster, clients=3, caches=4, **options):
    """Return a server that holds caches of several clients with unequal weights."""
    server = cluster.server(**{"limits": QUICK, "parameters": SMALL} | options)
    for number in range(clients):
        client = cluster.client(server, limits=QUICK, seed=number)
        record(client, episodes=number + 1, value=number + 1)
        for _ in range(caches):
            assert client.push_cache()
        client.update()
    until(lambda: server.total_caches == clients * caches)
    return server


def test_three_servers_share_out_what_two_had(cluster, tmp_path):
    servers = [serving(cluster, clients=4) for _ in range(2)]
    for number, server in enumerate(servers):
        server.get_batch(10)
        server.snapshot(tmp_path / str(number))
    paths = [tmp_path / "0", tmp_path / "1"]
    others = [cluster.server(parameters=SMALL, limits=QUICK) for _ in range(3)]
    done = [other.restore(paths, part=(rank, 3)) for rank, other in enumerate(others)]
    assert sum(each.unused for each in done) == sum(server.stats().unused_samples for server in servers) == 492
    assert all(each.caches + each.elsewhere == sum(other.caches for other in done) for each in done)
    totals = [server.totals() for server in servers]
    with cluster.reader(others, limits=QUICK) as reader:
        assert reader.totals().totals.steps == sum(total.steps for total in totals)
        drawn = [reader.get_batch(41).ids for _ in range(12)]
    assert len(np.unique(np.concatenate(drawn))) <= 492
    until(lambda: sum(other.stats().unused_samples for other in others) == 0)


def test_an_orderly_end_leaves_the_last_quarter_of_its_time_to_the_state_folder(cluster, tmp_path, monkeypatch):
    server = cluster.server(state=tmp_path, snapshot_caches=True)
    until = []
    monkeypatch.setattr(Archive, "save", lambda archive, deadline: until.append(deadline))
    begun = time.monotonic()
    server.close(80.0)
    assert begun + 50.0 < until[0] < begun + 65.0


def test_what_cannot_be_written_is_said_of_the_server_that_cannot(cluster, tmp_path):
    good, bad = cluster.server(state=tmp_path / "s", name="good"), cluster.server(name="bad")
    with cluster.reader([good, bad], limits=QUICK) as reader:
        answers = reader.snapshot("one")
        assert answers["good"].state == "done" and "no state folder" in str(answers["bad"])
        for wrong in ("", "../a", "a/b", ".a", "-a", "a b", "x" * 101):  # a name is a file in the folder
            refused = reader.snapshot(wrong)["good"]
            assert "is not 1 to 100 letters" in str(refused) and refused.code == "parameters", wrong
        (tmp_path / "s" / "snapshots" / "dir.snapshot").mkdir()
        refused = reader.snapshot("dir")["good"]
        assert isinstance(refused, Refused) and refused.code == "failed"
        assert [path.name for path in (tmp_path / "s" / "snapshots").iterdir() if path.is_file()] == ["one.snapshot"]


MEANWHILE = {
    "another run begins": (lambda dispatcher, _: dispatcher.begin_run("next"), Refused, "another run than 'run' began"),
    "the server ends": (lambda _, is_closing: is_closing.set(), Closed, "this server is closed"),
}


@pytest.mark.parametrize("what", MEANWHILE)
def test_a_snapshot_is_given_up_for_what_happens_meanwhile_and_the_former_file_stays(tmp_path, what):
    happen, error, says = MEANWHILE[what]
    dispatcher, is_closing = made_dispatcher(), threading.Event()
    arrive(dispatcher, cache_of())
    options = server_options(process=Process(clock=lambda: happen(dispatcher, is_closing) or 1000.0))
    (tmp_path / "a").write_bytes(b"former")
    with pytest.raises(error, match=says):
        Archive(dispatcher, MemoryStore(Disk(tmp_path)), options, is_closing).take(tmp_path / "a")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"former")]


def test_the_timer_keeps_what_a_killed_server_held(cluster, tmp_path):
    server = serving(cluster, state=tmp_path, snapshot_every=0.05)
    file, half = tmp_path / MEMORY, tmp_path / f".{MEMORY}.{'0' * 32}.draft"
    until(lambda: file.exists() and snapshot.describe_file(file)["tables"][0]["caches"] == 12)
    kept = file.read_bytes()
    server.get_batch(50)
    server.close(100.0)
    file.write_bytes(kept)  # the folder looks as after a kill
    half.write_bytes(b"half of the next one")
    again = cluster.server(state=tmp_path, parameters=SMALL, snapshot_every=1000.0)
    assert again.stats().unused_samples == 192 and not half.exists()
    again.get_batch(100)
    again.close(100.0)
    third = cluster.server(state=tmp_path, parameters=SMALL, snapshot_every=1000.0)
    assert third.stats().unused_samples == 92


def test_a_restart_restores_no_file_again(cluster, tmp_path, capsys):
    serving(cluster).snapshot(tmp_path / "a")
    first = cluster.server(state=tmp_path / "s", parameters=SMALL)
    snapshots.restore_snapshots(first, [str(tmp_path / "a")], None, configure=False, skip_damaged=False)
    first.publish("other", b"x")  # data saved with the setting, or later
    first.close()
    again = cluster.server(state=tmp_path / "s", parameters=SMALL)
    snapshots.restore_snapshots(again, [str(tmp_path / "a")], None, configure=False, skip_damaged=False)
    assert again.stats().held_caches == 0
    assert "restored nothing; 1 of the files were restored here before" in capsys.readouterr().err


def test_a_timer_that_cannot_write_says_so_and_tries_again(cluster, tmp_path):
    server = serving(cluster, clients=1, state=tmp_path, snapshot_every=0.02)
    until(lambda: server.stats().snapshots)

    def is_in_the_way():
        (tmp_path / MEMORY).unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):  # the timer wrote the file first
            (tmp_path / MEMORY).mkdir()
        return (tmp_path / MEMORY).is_dir()

    until(is_in_the_way)
    assert "no snapshot could be written" in until(lambda: server.stats().snapshot_trouble)
    (tmp_path / MEMORY).rmdir()
    until(lambda: not server.stats().snapshot_trouble)


KILLED = """
    import sys, threading
    import numpy as np
    from memoire import Server, connect
    from netkit import QUICK, SCHEMA, record
    from memoire.replay.parameters import Parameters
    with Server("tcp://127.0.0.1:0", SCHEMA, parameters=Parameters(cache_size=64), limits=QUICK) as server:
        client = connect(server.endpoint, limits=QUICK)
        record(client)
        threading.Thread(target=lambda: [client.push_cache() for _ in range(10**9)], daemon=True).start()
        for number in range(10**9):
            server.snapshot(sys.argv[1])
            print(number, flush=True)
"""


@pytest.mark.processes
def test_a_kill_under_load_leaves_a_whole_file(tmp_path):
    path = tmp_path / "a"
    for extra in range(2):
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(KILLED), str(path)], env=environment(), stdout=subprocess.PIPE
        )
        with child:
            for _ in range(5 * extra + 1):
                assert child.stdout.readline()
            child.send_signal(signal.SIGKILL)
        with SnapshotFile(path) as file:
            assert not file.verify() and file.end.complete


def command(capsys, *words):
    """Return the exit status of a command, and its output."""
    status = main.main([*map(str, words)])
    return status, "".join(capsys.readouterr())


def test_the_commands_order_show_and_refuse(cluster, tmp_path, capsys):
    server = serving(cluster, state=tmp_path / "s", name="one")
    file = tmp_path / "s" / "snapshots" / "now.snapshot"
    status, output = command(capsys, "snapshot", server.endpoint, "--to", "now")
    assert status == 0 and f"one: {file}: 12 caches of 192 samples" in output
    status, output = command(capsys, "snapshot", "--show", file, "--json", "--check")
    assert status == 0 and '"unused": 192' in output
    for wrong in ([], [server.endpoint], ["--show", file, "--to", "x"]):
        status, output = command(capsys, "snapshot", *wrong)
        assert status == 1 and "Give either ENDPOINT and --to NAME" in output
    starts = ("server", "--endpoint", "tcp://127.0.0.1:0", "--schema", SCHEMA.to_json(), "--http", "off", "--restore")
    file.write_bytes(file.read_bytes()[:-50])
    status, output = command(capsys, *starts, file)
    assert status == 1 and "an unknown number of caches" in output and "--skip-damaged" in output, output
    status, output = command(capsys, *starts, file, "--part", "3/2")
    assert status == 1 and "K/N for the K-th of N servers" in output
    status, output = command(capsys, "snapshot", "--show", file)
    assert status == 3 and "The file is damaged: its end is damaged or cut off." in output


@pytest.mark.processes
def test_the_process_of_a_server_takes_its_part_and_the_files_parameters(cluster, tmp_path):
    serving(cluster, parameters=SMALL.replace(frame_stack=2)).snapshot(tmp_path / "a")
    mine = cluster.server(limits=QUICK)
    here = mine.restore([tmp_path / "a"], part=(0, 2), configure=True)
    words = ["server", "--endpoint", "tcp://127.0.0.1:0", "--schema", SCHEMA.to_json(), "--http", "off"]
    with subprocess.Popen(
        [sys.executable, "-m", "memoire", *words, "--restore", str(tmp_path / "a"), "--part", "2/2"],
        env=environment(), stderr=subprocess.PIPE, text=True, stdout=subprocess.DEVNULL,
    ) as child:  # fmt: skip
        line = child.stderr.readline()
        child.terminate()
    assert f"restored {12 - here.caches} caches" in line.replace("nothing", "0 caches"), line


def environment():
    tests = Path(__file__).parents[1]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests), str(tests / "support")])}


def test_a_start_refuses_what_was_made_with_another_discount_and_keeps_the_file(cluster, tmp_path, caplog):
    state = {"state": tmp_path, "name": "s", "snapshot_caches": True, "cache_size": 16, "parameters": None}
    server = serving(cluster, clients=1, discount=0.5, multi_step=3, **state)
    server.configure(discount=0.25, discard_mismatched=True)
    client = cluster.client(server, limits=QUICK)
    record(client)
    assert client.push_cache()
    until(lambda: server.stats().held_caches == 1)
    server.close(100.0)
    kept = (tmp_path / MEMORY).read_bytes()
    for _ in range(2):
        with pytest.raises(SnapshotMismatch, match=r"discount=\(0.25,\), multi_step=3, .*\(0.99,\), multi_step=1"):
            cluster.server(limits=QUICK, **state)
        assert (tmp_path / MEMORY).read_bytes() == kept
    again = cluster.server(limits=QUICK, discount=0.5, multi_step=3, **state)
    assert again.parameters.discount == (0.25,), "a refused start changes nothing"
    assert set(again.get_batch(8)["discount"].tolist()) <= {0.0, 0.25**3}
    again.close(100.0)
    other = cluster.server(limits=QUICK, discard_mismatched=True, **state)
    assert other.stats().held_caches == 0 and "refused (parameters)" in caplog.text


WRAPPED = {"capacity": 613}  # 40 episodes of 20 entries exceed this capacity
DRAWN = {
    "": {},
    "uniform": {"sampler": Uniform()},
    "ranks": {"sampler": RankBased(0.7)},
    "greedy": {"sampler": Greedy()},
    "beta grows": {"sampler": Prioritized(0.6, beta=Linear(0.4, 1.0, 50))},
    "new models": {"max_model_lag": 3},
    "in a band": {"samples_per_insert": 2.0, "samples_per_insert_tolerance": 900.0, "min_size": 1},
    "n-step": {"multi_step": 3, "discount": 0.9, "frame_stack": 2},
}  # fmt: skip
PROMPTS = {"schema": {"tokens": (np.int32, (None,)), "reward": np.float32}, "group": 2, "score": "column:reward"}
SETTINGS = {
    "caches": DRAWN
    | {"drawn again": {"reuse_cache": True}, "drawn three times": {"reuse_cache": True, "max_times_sampled": 3}},
    "episodes": {name: WRAPPED | each for name, each in DRAWN.items()}
    | {
        "stratified": WRAPPED | {"sampler": Uniform(stratified=True)},
        "sequences": WRAPPED | {"sequence_length": 4, "sequence_overlap": 2, "burn_in": 1},
        "drawn 50 times": WRAPPED | {"max_times_sampled": 50},
        "as many as bytes allow": {"byte_limit": 80_000},
    },
    "rollouts": {
        "": {"capacity": 4000},
        "oldest leave": {"capacity": 500, "on_full": "drop_oldest"},
        "new models": {"capacity": 4000, "max_model_lag": 3},
    },
    "prompts": {
        "": PROMPTS, "replay": PROMPTS | {"replay_limit": 6}, "pace": PROMPTS | {"max_model_lag": 1, "on_stale": "pace"},
    },
    "keyed": {"": {"schema": None}},
}  # fmt: skip
KINDS = {
    f"{storage}, {name}" if name else storage: each | {"storage": storage}
    for storage in BUILT_IN
    for name, each in SETTINGS[storage].items()
}


def test_every_sampler_is_among_the_settings_that_are_saved():
    kinds = {each for each in vars(sampling).values() if hasattr(each, "fields")} - {sampling.Sampler, Parameters}
    for storage in ("caches", "episodes"):
        assert {type(each.get("sampler")) for each in SETTINGS[storage].values()} >= kinds


def entries_of(number, length=20):
    """Return the columns of an episode, and the version of the model that made its entries."""
    rng = np.random.default_rng(number)
    columns = [rng.random((length, 4), np.float32), np.full(length, number, np.int32), rng.random(length, np.float32)]
    return columns, 1 + number % 8


def fill(server, numbers):
    """Fill a server's table for these numbers, without a network and equally in each call."""
    table, pool = table_in(server), pool_in(server)
    if table.storage == "keyed":
        for number in numbers:
            change = PutRow(f"k{number}", {"t": bytes([number])}, {"x": bytes(number)}, made=1000 - number)
            pool.put("ab"[number % 2], [change])
        pool.remove("a", ["k2"])
        pool.put("c", [])
        return
    if table.storage == "prompts":
        with pool.locked() as prompts:
            prompts.book.set_shares({"a": 0.7, "b": 0.3})
            for number in numbers:
                prompts.add([("ab"[number % 2], 0, number)], [b"prompt"], priority=number % 3)
        return
    for number in numbers:
        columns, version = entries_of(number)
        client = bytes([1 + number % 2]) * 16
        if table.storage == "caches":
            memory = Memory(SCHEMA, 400, table.parameters, seed=number)
            memory.open()
            numbered = memory.extend(0, columns, model_version=version)
            memory.close(terminated=True)
            memory.update_priorities(numbered, np.arange(20.0))
            payload = containers.build(memory, 16, now=1.0)
            pool.add(client, number + 1, pool.check(messages.Cache(), payload))
        else:
            facts = np.ones(20, np.float32), np.zeros(20, np.float32), np.full(20, version)

            def copy(name, target, columns=columns):
                target[:] = columns[SCHEMA.names.index(name)].reshape(-1).view(np.uint8)

            payload = containers.pack_episode(SCHEMA, copy, *facts, now=1.0)
            pool.add(client, number + 1, pool.check(messages.EpisodePush(terminated=True), payload))
        table.limiter.report_inserts(client, 20 * (number + 1), number + 1)


def drawn(server, batches):
    """Return everything that some draws yield, except ages."""
    results = []
    for _ in range(batches):
        if table_in(server).storage == "prompts":
            with pool_in(server).locked() as prompts:
                results.append(led(prompts))
            continue
        if table_in(server).storage == "keyed":
            rows = [(name, key, row.made, row.tags, row.fields) for name, key, row in pool_in(server).walk(None, 0)]
            pool_in(server).put("b", [PutRow("k3", {}, {"y": b"1"}), PutRow(f"later {len(rows)}", {}, {})])
            results.append([str(rows), str(sorted(pool_in(server).partitions(None)))])
            continue
        if table_in(server).storage == "rollouts":
            taken = server.table(server.tables[0]).take(30)
            results.append([taken["obs"], taken["action"], taken.lengths])
            continue
        batch = server.get_batch(16)
        if table_in(server).storage == "episodes":
            batch.update_priorities(np.linspace(0.5, 9.0, 16))
            results.append(server.table(server.tables[0]).sample_episodes(2)["obs"][:])
        ids = batch.ids["number"] if table_in(server).storage == "episodes" else batch.ids
        results.append([ids, batch.importance, *(batch[name] for name in ("obs", "action", "reward", "discount"))])
    return results


def led(prompts):
    """Lease and answer some prompts, train a step on ready groups; return the leased and drawn prompts as text."""
    having = [row.lease for row in prompts.leases.held().get(WORKER, ())]
    rows, why = prompts.lease(WORKER, 0.0, count=3, seconds=60.0, having=having)
    for row in rows:
        values = {"tokens": np.arange(3, dtype=np.int32), "reward": np.float32(1 + row.number % 5)}
        for index in row.missing:
            columns = packed(prompts.schema, raw_columns(prompts.schema, values))
            prompts.answer(row, row.lease, index, columns, version=prompts.book.facts.newest_model)
            prompts.update_state(row)
    step = prompts.draw(number := prompts.book.facts.committed + 1, 2, "s", wanted=2, replay=0.5)
    if step is not None:
        prompts.commit(number, "s")
    trained = None if step is None else (step.keys, step.replayed, step.importance)
    return [str([row.key for row in rows]), why, str(trained)]


def begun(kind, folder=None):
    """Return a filled server after some draws, its options, and the results of these draws."""
    options = {"cache_size": 16, "seed": 5, "schema": SCHEMA, "name": "s"} | KINDS[kind]
    kept = {} if folder is None else {"state": folder, "snapshot_caches": True}
    server = server_of(None, **options | kept)
    server.publish("policy", b"x", version=8)
    pool_in(server).saw_model(8)  # the pool sees the saved model
    fill(server, range(40))
    return server, options | kept, drawn(server, 5)


@functools.cache
def uninterrupted(kind):
    server, _, results = begun(kind)
    with server:
        return results + drawn(server, 8), table_in(server).limiter.state()


def restarted(server, options, folder):
    server.close(20.0)
    return server_of(None, **options)


def restored(server, options, folder):
    server.snapshot(folder / "a.snapshot")
    server.close()
    again = server_of(None, **{name: value for name, value in options.items() if name not in ("seed", "state")})
    again.restore([folder / "a.snapshot"])
    if table_in(again).storage == "prompts":
        with pool_in(again).locked() as prompts:  # the trainer decides which steps are committed
            session = prompts.book.facts.former.pop()
            prompts.rewind(prompts.book.facts.committed, session)
    return again


FORMS = {"restart": restarted, "snapshot": restored}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_server_draws_what_it_would_have_drawn(tmp_path, kind, form):
    """A second restart draws the same, too, and a server with a seed does not repeat its first draws."""
    server, options, results = begun(kind, tmp_path / "state" if form == "restart" else None)
    for _ in range(2):
        server = FORMS[form](server, options, tmp_path)
        results += drawn(server, 4)
    counts = table_in(server).limiter.state()
    server.close(20.0)
    expected = uninterrupted(kind)
    for one, other in zip(expected[0], results, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert counts == expected[1]


@pytest.mark.parametrize("storage", ["caches", "episodes"])
def test_only_the_heir_of_a_whole_file_draws_with_the_generator_of_the_file(tmp_path, storage):
    """A server with a seed, with contents of its own, or with a part of the file uses another generator."""
    server, options, _ = begun(storage)
    server.snapshot(tmp_path / "a")
    del options["seed"]

    def draws(part=(0, 1), own=(), **more):
        with server_of(None, **options | more) as again:
            fill(again, own)
            again.restore([tmp_path / "a"], part=part)
            return [array.tobytes() for array in drawn(again, 1)[-1][1:]]

    with server:
        expected = [array.tobytes() for array in drawn(server, 1)[-1][1:]]
    assert draws() == expected
    assert draws(seed=7) == draws(seed=7) != expected
    assert len({tuple(draws(own=[98, 99])), tuple(draws(own=[98, 99])), tuple(expected)}) == 3
    assert len({tuple(draws(part=(0, 2))), tuple(draws(part=(0, 2)))}) == 2


OTHER_STARTS = {
    "another schema": {"schema": {"obs": (np.float32, (3,))}},
    "another table": {"schema": None, "tables": {"elsewhere": Table(SCHEMA, parameters=SMALL)}, "parameters": None},
    "another storage": {"storage": "episodes"},
    "another discount": {"parameters": None, "cache_size": 16, "discount": 0.5},
    "another run": {"run": "other"},
    "another run and schema": {"run": "other", "schema": {"obs": (np.float32, (3,))}},
    "another run, nothing is saved": {"run": "other", "snapshot_caches": False},
    "another run, a timer": {"run": "other", "snapshot_caches": False, "snapshot_every": 0.01},
}  # fmt: skip
STATE = {"name": "s", "snapshot_caches": True}


@pytest.mark.parametrize("other", OTHER_STARTS.values(), ids=list(OTHER_STARTS))
def test_a_snapshot_that_a_start_does_not_hold_again_stays_and_is_named(cluster, tmp_path, caplog, other):
    state = {"state": tmp_path, "limits": QUICK, "parameters": SMALL} | STATE
    serving(cluster, run="one", **state).close(100.0)
    kept, options = (tmp_path / MEMORY).read_bytes(), {**state, **other}
    try:
        wrong = cluster.server(**options)
    except SnapshotMismatch:
        assert (tmp_path / MEMORY).read_bytes() == kept
    else:
        (missing,) = wrong.stats().missing
        assert f"{tmp_path / MEMORY} stays" in missing and missing in caplog.text
        assert "is of run 'one', and this server counts 'other'" in missing and wrong.stats().held_caches == 0
        until(lambda: "snapshot_every" not in other or wrong.stats().snapshots)
        wrong.close(100.0)
        if options["snapshot_caches"] or "snapshot_every" in other:  # room for a file of the other run
            (aside,) = (tmp_path / "snapshots").iterdir()
            assert aside.read_bytes() == kept and f"was moved to {aside}" in caplog.text
            aside.replace(tmp_path / MEMORY)
    assert (tmp_path / MEMORY).read_bytes() == kept
    again = cluster.server(run="one", **state)
    assert (again.stats().held_caches, again.stats().missing) == (12, ())


@pytest.mark.parametrize("is_discarded", [False, True])
def test_a_snapshot_that_is_damaged_or_gone_is_named_at_the_start(cluster, tmp_path, is_discarded):
    state = {"state": tmp_path, "limits": QUICK, "parameters": SMALL, "discard_mismatched": is_discarded} | STATE
    serving(cluster, **state).close(100.0)
    good = (tmp_path / MEMORY).read_bytes()
    for place in (0, 30, len(good) // 2, len(good) - 1):
        bad = good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
        (tmp_path / MEMORY).write_bytes(bad)
        if is_discarded:
            shutil.copytree(tmp_path, copy := tmp_path.with_name(f"copy-{place}"))
            server = cluster.server(**state | {"state": copy})
            assert str(copy / MEMORY) in " ".join(server.stats().missing)
            continue
        with pytest.raises(DataError, match=r"fits, use discard_mismatched=True \(--discard-mismatched\)") as raised:
            cluster.server(**state)
        assert str(tmp_path / MEMORY) in str(raised.value) and (tmp_path / MEMORY).read_bytes() == bad
    (tmp_path / MEMORY).unlink()
    server = cluster.server(**state)
    assert server.stats().missing == (f"{tmp_path / MEMORY} is gone: the tables' content at the last close is lost",)
