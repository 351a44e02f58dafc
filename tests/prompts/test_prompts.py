"""`memoire.Prompts` over sockets: producers, workers, trainers of several ranks, several servers and restarts."""

import contextlib
import functools
import itertools
import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import memoire
from interrupts import everywhere
from memoire.cli.drain import drain
from memoire.errors import EntryError, EpochOver, MemoireTimeout, NoSuchField, ParameterError, Refused
from memoire.limits import Limits
from memoire.prompts import messages as messages_of_prompt_worker
from memoire.prompts.book import MAX_CONSUMERS
from memoire.prompts.servers import max_step_groups
from memoire.prompts.worker import WorkerCalls
from memoire.replay.schema import RowSchema
from memoire.wire import messages
from netkit import in_thread, until
from readerkit import message

COLUMNS = {"tokens": (np.int32, (None,)), "reward": np.float32}
ANY = "tcp://127.0.0.1:*"


def table(**settings):
    return memoire.Table(COLUMNS, storage="prompts", **{"group": 2, "lease": 30.0, **settings})


def answer_all(prompts, count=1 << 20, version=0):
    """Answer at most `count` waiting prompts; return the number of answered prompts."""
    done = 0
    while done < count and prompts.counts()["waiting"]:
        for lease in prompts.lease(min(8, count - done)):
            size = lease.index + 1
            prompts.answers(
                lease, {i: {"tokens": np.full(size, lease.index), "reward": float(i)} for i in lease.missing}, version
            )
            done += 1
    return done


@contextlib.contextmanager
def prompts_of(*names, **settings):
    """Yield servers with a prompt table each, and a `memoire.Prompts` client of all these servers."""
    with contextlib.ExitStack() as opened:
        tables = {"t": table(**settings)}
        servers = [opened.enter_context(memoire.Server(ANY, tables=tables, name=name)) for name in names]
        urls = [each.endpoint for each in servers]
        yield servers, opened.enter_context(memoire.Prompts(urls, "t", timeout=10.0))


@pytest.fixture
def server():
    with memoire.Server(ANY, tables={"t": table()}) as prompt_server:
        yield prompt_server


@pytest.fixture
def prompts(server):
    with memoire.Prompts(server.endpoint, "t", timeout=10.0) as client:
        yield client


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (
            lambda prompts: prompts.lease(1, 0),
            ParameterError,
            "^seconds must be above 0, or None for the table's setting",
        ),
        (lambda prompts: prompts.renew(prompts.lease()[0], 0.0), ParameterError, "^seconds must be above 0"),
        (lambda prompts: prompts.draw(1, 2, replay=0.5), Refused, "replay=0.5, but replay_limit of this table is 0"),
        (
            lambda prompts: prompts.draw(0, 3),
            ParameterError,
            "^groups must be 2, as in the first draw of step 0, got 3",
        ),
        (
            lambda prompts: prompts.draw(0, 1),
            ParameterError,
            "^groups must be 2, as in the first draw of step 0, got 1",
        ),
        (
            lambda prompts: prompts.answer(prompts.lease()[0], 2, {"reward": 1.0}),
            Refused,
            "the index of an answer is 2; this prompt takes 0 to 1",
        ),
        (lambda prompts: prompts.draw(1, 2, columns=["logp"]), NoSuchField, "no 'logp'"),
    ],
)
def test_what_a_call_says_otherwise_than_its_table_is_refused_by_name(prompts, call, error, says):
    prompts.add(dict.fromkeys(range(8), ""), "d")
    answer_all(prompts, 6)
    first = prompts.draw(0, 2)
    with pytest.raises(error, match=says):
        call(prompts)
    assert prompts.draw(0, 2).keys == first.keys and len(prompts.draw(1, 2).keys) == 2


def test_every_prompt_is_trained_on_once_and_the_last_step_is_shorter(prompts):
    assert prompts.add({i: f"p{i}" for i in range(7)}, "d") == 7
    assert prompts.add({3: "again", 7: "new"}, "d") == 1
    prompts.finish("d")
    assert answer_all(prompts) == 8
    steps = []
    for step in prompts.groups(3):
        steps.append(step)
        prompts.commit(step.step)
    assert [len(step.keys) for step in steps] == [3, 3, 2]
    assert sorted(key[2] for step in steps for key in step.keys) == list(range(8))
    assert prompts.counts()["committed"] == 8
    with pytest.raises(EpochOver, match="no group for step 3"):
        prompts.draw(3, 3)
    with pytest.raises(Refused, match="epoch 0 of data set 'd' is finished"):
        prompts.add({9: ""}, "d")


def test_a_step_has_its_answers_packed_and_padded(prompts):
    prompts.add({0: "", 2: ""}, "d")
    answer_all(prompts)
    step = prompts.draw(0, 2)
    assert step["tokens"].lengths.tolist() == [1, 1, 3, 3] and step["reward"].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert step.group.tolist() == [0, 0, 1, 1] and step.answer.tolist() == [0, 1, 0, 1] and step.tokens == 8
    packed = step.packed()
    assert packed["tokens"].tolist() == [0, 0, 2, 2, 2, 2, 2, 2] and packed.starts.tolist() == [0, 1, 2, 5, 8]
    assert packed.positions.tolist() == [0, 0, 0, 1, 2, 0, 1, 2] and packed.segment.tolist() == [0, 1, 2, 2, 2, 3, 3, 3]
    padded = step.padded()
    assert padded["tokens"].shape == (4, 3) and padded["is_token"].sum() == 8
    assert "tokens" in step and "logprob" not in step
    with pytest.raises(NoSuchField):
        step["logprob"]


def test_waits_end_at_their_timeouts_and_say_why(prompts):
    with pytest.raises(MemoireTimeout, match="No prompt was added yet"):
        prompts.lease(timeout=0.05)
    prompts.add({0: "", 1: ""}, "d")
    lease = prompts.lease()[0]
    with pytest.raises(MemoireTimeout, match=r"0 of 1 groups ready: 1 leased, the oldest by worker \w+ .*, 1 waiting"):
        prompts.draw(0, 1, timeout=0.05)
    prompts.answers(lease, {i: {"tokens": [1]} for i in lease.missing})
    with pytest.raises(MemoireTimeout, match=r"1 answered without all required columns \(tokens, reward\)"):
        prompts.draw(0, 1, timeout=0.05)
    assert prompts.amend(lease.key, 0, {"reward": 1.0}) and prompts.amend(lease.key, 1, {"reward": 0.0})
    assert prompts.draw(0, 1).keys == [lease.key]
    assert not prompts.amend(lease.key, 0, {"reward": 9.0})


def test_a_lost_lease_comes_back_and_one_that_ended_is_anothers(server):
    session = {"table": "t", "timeout": 10.0}
    with memoire.Prompts(server.endpoint, **session) as one, memoire.Prompts(server.endpoint, **session) as other:
        one.add({0: "payload"}, "d")
        lease = one.lease(seconds=0.05)[0]
        assert lease.payload == b"payload" and lease.missing == (0, 1)
        one.answer(lease, 0, {"tokens": [1], "reward": 1.0})
        again = other.lease(timeout=5.0)[0]
        assert again.key == lease.key and again.missing == (1,) and again.number > lease.number
        assert not one.renew(lease) and other.renew(again)
        assert one.answer(lease, 1, {"tokens": [2], "reward": 0.0})  # the first answer counts
        assert not other.answer(again, 1, {"tokens": [3], "reward": 0.0})
        assert one.draw(0, 1)["tokens"].values.tolist() == [1, 2] and one.figures()["late"] == 1


def test_long_answers_come_in_pieces_and_old_groups_are_known_by_the_oldest(prompts):
    prompts.add({0: ""}, "d")
    lease = prompts.lease()[0]
    prompts.answer(lease, 0, {"tokens": [1, 2]}, version=3, last=False)
    prompts.answer(lease, 0, {"tokens": [3], "reward": 1.0}, version=5)
    huge = np.arange(500_000)
    prompts.answer(lease, 1, {"tokens": huge, "reward": 0.0}, version=4)  # larger than one request may be
    step = prompts.draw(0, 1)
    assert step["tokens"][0].tolist() == [1, 2, 3] and (step["tokens"][1] == huge).all()
    assert step.version.tolist() == [3, 4]
    with pytest.raises(EntryError, match="reward"):
        prompts.answer(lease, 0, {"reward": "good"})


def test_ranks_draw_disjoint_parts_and_the_same_again_after_a_restart(server):
    with memoire.Prompts(server.endpoint, "t", timeout=10.0) as giver:
        giver.add(dict.fromkeys(range(16), ""), "d")
        answer_all(giver)
    ranks = [memoire.Prompts(server.endpoint, "t", rank=(i, 2), session="life 1", timeout=10.0) for i in range(2)]
    parts = [rank.draw(0, 8) for rank in ranks]
    drawn = [index for part in parts for _, _, index in part.keys]
    assert sorted(drawn) == list(range(8)) and [len(part.keys) for part in parts] == [4, 4]
    assert parts[0].rank_tokens == parts[1].rank_tokens == (parts[0].tokens, parts[1].tokens)
    again = memoire.Prompts(server.endpoint, "t", rank=(1, 2), session="life 1", timeout=10.0)
    with pytest.raises(ParameterError, match="^groups must be 8, as in the first draw of step 0, got 16"):
        again.draw(0, 16)
    assert again.draw(0, 8).keys == parts[1].keys
    with pytest.raises(MemoireTimeout, match="Rank 0 has not drawn step 1 yet"):
        again.draw(1, 8, timeout=0.05)
    for each in (*ranks, again):
        each.close()
    with pytest.raises(ParameterError, match="session"):
        memoire.Prompts(server.endpoint, "t", rank=(0, 2))


def test_a_rewind_brings_back_what_came_after_and_ends_the_former_session(server):
    one, two = (memoire.Prompts(server.endpoint, "t", timeout=10.0) for _ in range(2))
    one.add(dict.fromkeys(range(8), ""), "d")
    one.finish("d")
    answer_all(one)
    keys = [one.draw(step, 2).keys for step in range(3)]
    one.commit(0)
    assert two.resume(1) == 2  # resume(1) commits step 1; step 2 comes back
    counts = two.counts()
    assert (counts["committed"], counts["drawn"], counts["ready"]) == (4, 0, 4)
    assert two.draw(2, 2).keys == keys[2]
    with pytest.raises(Refused, match=r"session .* ended: session .* has rewound"):
        one.draw(2, 2)
    with pytest.raises(Refused, match="session"):
        one.commit(2)
    assert two.rewind(-1, version=0) == 0
    assert two.counts()["ready"] == 8 and two.draw(0, 2).keys == keys[0]
    one.close()
    two.close()


@pytest.mark.slow
def test_a_server_that_was_killed_and_started_again_knows_all_that_it_acknowledged(tmp_path):
    address = f"ipc://{tmp_path}/server"
    server = memoire.Server(address, tables={"t": table()}, state=tmp_path / "state", name="s")
    with memoire.Prompts(address, "t", timeout=20.0) as prompts:
        prompts.add({i: f"p{i}" for i in range(6)}, "d", tags={"level": "hard"})
        answer_all(prompts, 4)
        lease = prompts.lease()[0]
        prompts.answer(lease, 0, {"tokens": [1, 2]}, last=False)
        drawn = prompts.draw(0, 2).keys
        prompts.commit(0)
        further = prompts.draw(1, 1).keys
        before = prompts.list()[0]
        server.close()
        with memoire.Server(address, tables={"t": table()}, state=tmp_path / "state", name="s"):
            after = {each.key: each for each in prompts.list()[0]}
            assert {each.key: each.state for each in before} == {key: each.state for key, each in after.items()}
            assert all(each.tags == {"level": "hard"} for each in after.values())
            assert prompts.draw(1, 1).keys == further and drawn != further
            assert prompts.payload(("d", 0, 3)) == b"p3"
            prompts.answer(lease, 0, {"tokens": [3], "reward": 1.0}, piece=1)
            prompts.answer(lease, 1, {"tokens": [4], "reward": 1.0})
            assert prompts.fetch([lease.key])[lease.key]["tokens"][0].tolist() == [1, 2, 3]


@pytest.mark.slow
def test_a_drain_waits_until_the_prompts_of_the_server_that_leaves_are_committed():
    with prompts_of("old", "new") as ((old, new), _):
        with memoire.Prompts(old.endpoint, "t", timeout=10.0) as alone:
            alone.add(dict.fromkeys(range(4), ""), "d")
            alone.add({9: ""}, "e", evaluation=True)
            advice = "5 remain: keep workers and trainers running, and drain again"
            with pytest.raises(MemoireTimeout, match=advice):
                drain(old.endpoint, [new.endpoint], timeout=3.0, say=lambda line: None)
            assert answer_all(alone) == 5
            lines = []
            thread, box = in_thread(lambda: drain(old.endpoint, [new.endpoint], timeout=100.0, say=lines.append))
            until(lambda: lines and "has 4 prompts" in lines[-1])
            alone.draw(0, 4)
            assert thread.is_alive()
            alone.commit(0)
            thread.join(100.0)
        assert "error" not in box and lines[-1] == "old may be stopped, and taken off its proxies' lists"
        with memoire.Prompts([old.endpoint, new.endpoint], "t", timeout=10.0) as both:
            both.add(dict.fromkeys(range(10, 14), ""), "d")
            assert [each.table("t").calls().counts()["waiting"] for each in (old, new)] == [0, 4]


@pytest.mark.slow
def test_several_servers_share_prompts_and_each_is_trained_on_once():
    with prompts_of("s0", "s1", "s2") as (servers, prompts):
        assert [prompts.add(dict.fromkeys(range(40), ""), "d") for _ in range(2)] == [40, 0]
        prompts.finish("d")
        held = [each.table("t").calls().counts()["waiting"] for each in servers]
        assert sum(held) == 40 and min(held) > 0
        worker = threading.Thread(target=answer_all, args=(prompts,))
        worker.start()
        trained = [key for step in prompts.groups(6) for key in (step.keys, prompts.commit(step.step))[0]]
        worker.join()
        assert sorted(index for _, _, index in trained) == list(range(40))
        assert prompts.counts()["committed"] == 40


def test_a_committed_step_of_which_a_server_has_no_group_is_drawn_again_until_its_columns_go():
    with prompts_of("s0", "s1", keep=1) as (_, prompts):
        prompts.add(dict.fromkeys(range(8), ""), "d")
        answer_all(prompts)
        for step in range(3):
            drawn = prompts.draw(step, 1)  # a group of one server
            prompts.commit(step)
            assert prompts.draw(step, 1).keys == drawn.keys
        with pytest.raises(Refused, match="groups of step 0 are gone: all steps up to 2 are committed"):
            prompts.draw(0, 1)


@pytest.mark.slow
def test_a_server_that_is_drained_gets_no_new_prompts_and_those_that_it_has_are_trained_on():
    added = 0
    with prompts_of("n0", "n1") as ((_, other), prompts), memoire.Reader([other.endpoint], table="t") as reader:

        def there():
            return other.stats().tables["t"].own.given

        def add_elsewhere():
            """Add sixteen prompts; return True if server n1 received no prompt."""
            nonlocal added
            before = there()
            added += prompts.add(dict.fromkeys(range(added, added + 16), ""), "d")
            return there() == before

        assert not add_elsewhere()
        reader.tell("n1", messages.Control(drain=True), 10.0)
        until(add_elsewhere)
        assert add_elsewhere()
        answer_all(prompts)
        prompts.finish("d")
        trained = [key[2] for step in prompts.groups(8) for key in step.keys]
        assert sorted(trained) == list(range(added))
        prompts.commit(added)
        assert other.stats().tables["t"].own.committed == there() > 0


@pytest.mark.slow
def test_a_snapshot_goes_into_another_number_of_servers(tmp_path):
    with memoire.Server(ANY, tables={"t": table()}, state=tmp_path / "one", name="s") as server:
        prompts = server.table("t").calls()
        prompts.add({i: f"p{i}" for i in range(20)}, "d")
        answer_all(prompts, 12)
        for step in range(3):
            prompts.draw(step, 2)
        prompts.commit(0)
        path = server.snapshot(tmp_path / "all.snapshot").path
    with prompts_of("n0", "n1") as (servers, prompts):
        for place, each in enumerate(servers):
            each.restore([path], part=(place, 2))
        with pytest.raises(Refused, match="restored from a snapshot"):
            prompts.draw(1, 2)
        assert prompts.resume(0) == 1
        counts = prompts.counts()
        assert (counts["committed"], counts["ready"], counts["waiting"]) == (2, 10, 8)
        answer_all(prompts)
        prompts.finish("d")
        assert sum(len(step.keys) for step in prompts.groups(4, first=1)) == 18
        assert prompts.payload(("d", 0, 19)) == b"p19"


def test_data_sets_are_leased_and_drawn_in_their_shares(prompts):
    for dataset in ("math", "code"):
        prompts.add(dict.fromkeys(range(20), ""), dataset)
    prompts.shares({"math": 0.75, "code": 0.25})
    leases = prompts.lease(16)
    assert Counter(lease.dataset for lease in leases) == {"math": 12, "code": 4}
    prompts.answer_all([(lease, dict.fromkeys((0, 1), {"tokens": [1], "reward": 1.0})) for lease in leases])
    assert Counter(dataset for dataset, _, _ in prompts.draw(0, 8).keys) == {"math": 6, "code": 2}
    prompts.shares({"code": 1.0})  # workers lease other data sets after "code" is empty
    assert {lease.dataset for lease in prompts.lease(16)} == {"code"}


def test_prompts_are_cancelled_and_put_in_front_while_workers_run(prompts):
    prompts.add(dict.fromkeys(range(6), ""), "d")
    (first,) = prompts.lease(1)
    assert prompts.prioritise([("d", 0, 5), ("d", 0, 77)], 1.0) == 1
    (urgent,) = prompts.lease(1)
    assert (first.index, urgent.index) == (0, 5)
    assert prompts.cancel([first.key, ("d", 0, 1)]) == 2 and prompts.cancel([first.key]) == 0
    assert not prompts.renew(first) and prompts.renew(urgent)
    assert prompts.answers(first, dict.fromkeys((0, 1), {"tokens": [1], "reward": 1.0})) == [False, False]
    rows, _ = prompts.list(state="dropped")
    assert {(row.key[2], row.reason) for row in rows} == {(0, "cancelled"), (1, "cancelled")}
    assert sum(prompts.counts().values()) == 6 and prompts.figures()["late"] == 2


def test_answers_to_several_prompts_travel_together_and_one_that_is_refused_spoils_no_other():
    one = {"tokens": [1, 2, 3], "reward": 1.0}
    with prompts_of("a", "b") as (_, prompts):
        prompts.add(dict.fromkeys(range(40), ""), "d")
        leases = [*prompts.lease(3), *prompts.lease(3)]
        assert len({lease.server for lease in leases}) == 2
        answers = [(lease, {0: one, 1: one}) for lease in leases]
        assert prompts.answer_all(answers) == [[True, True]] * len(leases) == prompts.answer_all(answers, piece=0)
        assert prompts.counts()["ready"] == len(leases)
        good, bad, last = prompts.lease(3)  # one server leases all three prompts
        with pytest.raises(Refused, match="the index of an answer is 2; this prompt takes 0 to 1"):
            prompts.answer_all([(good, {0: one, 1: one}), (bad, {2: one}), (last, {0: one, 1: one})])
        assert prompts.fetch([good.key])[good.key]["answer"] == [0, 1]
        assert prompts.counts()["ready"] == len(leases) + 1
        assert prompts.answer_all([(last, {0: one, 1: one}), (good, {0: one})], piece=0) == [[True, True], [True]]


def test_only_the_client_that_is_a_consumer_moves_its_cursor_and_there_are_not_many(server, prompts):
    prompts.add(dict.fromkeys(range(3), ""), "d")
    _, cursor = prompts.list(consumer="reward", limit=1)
    prompts.list(since=cursor, consumer="reward", limit=1)
    with memoire.Prompts(server.endpoint, "t", timeout=10.0) as other:
        with pytest.raises(Refused, match=r"session.*another client is the consumer 'reward'"):
            other.list(since=dict.fromkeys(cursor, 2**60), consumer="reward")
        assert [each.key[2] for each in prompts.list(consumer="reward")[0]] == [1, 2]
        assert [each.key[2] for each in other.list(consumer="reward")[0]] == [1, 2]  # as after a restart
        with pytest.raises(Refused, match="session"):
            prompts.list(since=cursor, consumer="reward")
        with pytest.raises(Refused, match=r"cursors of 256 consumers; forget one with forget_consumer"):
            for number in range(MAX_CONSUMERS):
                other.list(consumer=f"c{number}", limit=1)
        prompts.forget_consumer("reward")
        prompts.forget_consumer("nobody")
        assert len(other.list(consumer=f"c{number}")[0]) == 3
        with pytest.raises(Refused, match="256 consumers"):
            prompts.list(consumer="reward")


def test_listeners_go_on_where_they_were(prompts):
    prompts.add(dict.fromkeys(range(3), ""), "d", tags={"level": "hard"})
    prompts.add({9: ""}, "d", evaluation=True)
    rows, cursor = prompts.list(consumer="reward model")
    assert len(rows) == 4 and {each.state for each in rows} == {"waiting"}
    assert prompts.list(since=cursor, consumer="reward model")[0] == []
    answer_all(prompts, 1)
    changed, _ = prompts.list("ready", consumer="reward model")
    assert [each.key for each in changed] == [("d", 0, 0)] and changed[0].columns == (("tokens", "reward"),) * 2
    assert len(prompts.list(tags={"level": "hard"})[0]) == 3
    answer_all(prompts)
    prompts.finish("d")
    assert sum(len(step.keys) for step in prompts.groups(8)) == 3  # the fourth prompt is for evaluation
    assert prompts.fetch([("d", 0, 9)])["d", 0, 9]["reward"].tolist() == [0.0, 1.0]


def test_dead_groups_are_dropped_and_informative_ones_replayed():
    settings = {"score": "variance", "drop_dead": True, "replay_limit": 8, "keep": 0}
    with memoire.Server(ANY, tables={"t": table(**settings)}) as server:
        prompts = server.table("t").calls()
        prompts.add(dict.fromkeys(range(12), ""), "d")
        for lease in prompts.lease(12):
            rewards = (1.0, 1.0) if lease.index % 3 == 0 else (0.0, 1.0)
            prompts.answers(lease, {i: {"tokens": [1], "reward": rewards[i]} for i in lease.missing})
        assert prompts.counts()["dropped"] == 4 and server.stats().tables["t"].own.dead == 4
        first = prompts.draw(0, 4)
        prompts.commit(0)
        step = prompts.draw(1, 4, replay=0.5)
        assert step.is_replayed.tolist() == [False, False, True, True]
        assert {key for key, old in zip(step.keys, step.is_replayed, strict=True) if old} <= set(first.keys)
        assert step.weights.max() == 1.0 and step.update_scores([0.5] * 4) == 4
        assert prompts.counts()["drawn"] == 2


@pytest.mark.slow
def test_replay_fills_up_what_fresh_groups_lack_and_a_step_of_replayed_ones_alone_goes_on(tmp_path):
    settings = {"score": "variance", "replay_limit": 8, "keep": 0}
    tables = {"t": table(**settings)}
    with memoire.Server(ANY, tables=tables, state=tmp_path) as server:
        prompts = server.table("t").calls(session="s")
        prompts.add(dict.fromkeys(range(8), ""), "d")
        answer_all(prompts, 5)
        with pytest.raises(MemoireTimeout, match="5 of 6 groups ready"):
            prompts.draw(0, 6, timeout=0.1, replay=0.5)  # before the first commit, no group can be replayed
        assert len(prompts.draw(0, 4, replay=0.5).keys) == 4
        prompts.commit(0)
        with pytest.raises(MemoireTimeout, match=r"1 of 2 groups ready \(2 more are replayed\)"):
            prompts.draw(1, 4, timeout=0.1, replay=0.5)
        step = prompts.draw(1, 4, replay=0.75)
        assert sorted(step.is_replayed.tolist()) == [False, True, True, True]
        alone = prompts.draw(2, 4, replay=1.0)
        assert alone.is_replayed.all() and len(set(alone.keys)) == 4
    with memoire.Server(ANY, tables=tables, state=tmp_path) as server:
        prompts = server.table("t").calls(session="s")
        assert prompts.draw(2, 4, replay=1.0).keys == alone.keys and prompts.draw(1, 4).keys == step.keys
        prompts.finish("d")
        answer_all(prompts)
        assert len(prompts.draw(3, 8, replay=0.5).keys) == 7  # 3 fresh groups and 4 replayed groups
        with pytest.raises(EpochOver):
            prompts.draw(4, 4, replay=1.0)


@given(st.integers(0, 9), st.integers(0, 9), st.floats(0, 1), st.integers(1, 20))
def test_a_server_can_give_the_largest_number_of_groups_that_its_ready_ones_allow(ready, replayable, replay, groups):
    allowed = [n for n in range(groups + 1) if n - min(round(replay * n), replayable) <= ready]
    assert max_step_groups(ready, replayable, replay, groups) == allowed[-1] and allowed == list(range(len(allowed)))


@pytest.mark.parametrize("on_stale", ["drop", "wait", "pace"])
def test_groups_that_are_too_old_are_not_handed_out(on_stale):
    with memoire.Server(ANY, tables={"t": table(max_model_lag=1, on_stale=on_stale)}) as server:
        prompts = server.table("t").calls()
        prompts.add(dict.fromkeys(range(4), ""), "d")
        if on_stale == "pace":
            with pytest.raises(MemoireTimeout, match="waits for the first draw"):
                prompts.lease(timeout=0.05)
            with pytest.raises(MemoireTimeout):
                prompts.draw(0, 1, timeout=0.05)
            assert answer_all(prompts, 2, version=1) == 2
            with pytest.raises(MemoireTimeout, match="2 groups are leased or ready"):
                prompts.lease(timeout=0.05)  # one group for each of (1 + max_model_lag) steps
            return
        answer_all(prompts, version=1)
        prompts.saw_model(3)
        with pytest.raises(MemoireTimeout, match="4 were too old"):
            prompts.draw(0, 4, timeout=0.05)
        counts = prompts.counts()
        assert (counts["dropped"], counts["waiting"]) == ((4, 0) if on_stale == "drop" else (0, 4))
        with pytest.raises(MemoireTimeout, match="a lease needs model 2"):
            prompts.lease(version=1, timeout=0.05)


def test_settings_that_do_not_fit_are_refused_by_name(server):
    for settings, word in (
        ({"at_least": 3}, "at_least"), ({"required": ["logp"]}, "required"), ({"score": "best"}, "score"),
        ({"on_stale": "wait"}, "on_stale"), ({"drop_dead": True}, "drop_dead"), ({"lease": 0.0}, "lease"),
        ({"min_size": 5}, "min_size"),
    ):  # fmt: skip
        with pytest.raises(ParameterError, match=word):
            table(**settings)
    with pytest.raises(ParameterError, match="it is a setting of storage='prompts'"):
        memoire.Table({"obs": np.float32, "reward": np.float32}, group=8)
    with memoire.Server(ANY, {"obs": np.float32}) as other:
        with pytest.raises(ParameterError, match="table 'default' has storage='caches': use memoire.connect"):
            memoire.Prompts(other.endpoint, timeout=10.0)
        with pytest.raises(ParameterError, match="storage"):
            other.table("default").calls()


def test_the_terminal_shows_how_prompts_stand(server, prompts, capsys):
    from memoire.cli.main import main

    prompts.add(dict.fromkeys(range(3), ""), "d")
    prompts.lease()
    assert main(["prompts", server.endpoint]) == 0
    shown = capsys.readouterr().out
    assert f"table 't' at {server.name}: 3 prompts" in shown
    assert [line.split() for line in shown.splitlines()[1:3]] == [["waiting", "2"], ["leased", "1"]]


# --- Leases of a worker: the server is a Python object, and the test sets the clock

SCHEMA = RowSchema({"reward": np.float32})


class OneServer:
    """Server stub that leases prompts without end, for 30 seconds each, and takes every answer."""

    limits = Limits()

    def __init__(self):
        self.time, self.numbers, self.having = 0.0, itertools.count(1), ()

    def table(self, deadline):
        return "t", SCHEMA

    def servers(self):
        return ["a"]

    def now(self):
        return self.time

    def ask(self, requests, deadline):
        return {name: message(self.reply(request.body)) for name, request in requests.items()}

    def reply(self, body):
        if body.call == "lease":
            self.having = body.leases
            number = next(self.numbers)
            leased = messages_of_prompt_worker.LeasedPrompt("d", 0, number, number, 30.0, [0, 1], False, {}, 0)
            return messages_of_prompt_worker.Prompted(leases=[leased])
        flags = [1] * len(body.leases) if body.call in ("renew", "release") else [0] * len(body.pieces)
        return messages_of_prompt_worker.Prompted(flags=bytes(flags))


def working():
    """Return a server stub and a worker's calls to the stub."""
    server = OneServer()
    return server, WorkerCalls(server, (0, 1), 1.0, "")


def lease(worker):
    (leased,) = worker.lease()
    return leased


def answer(worker, leased, *indexes):
    worker.answers(leased, {index: {"reward": 1.0} for index in indexes}, 1)


@pytest.mark.parametrize("is_renewed", [False, True])
def test_a_lease_is_listed_until_its_last_answer_comes_each_by_itself_or_all_together(is_renewed):
    server, worker = working()
    first = lease(worker)
    if is_renewed:
        assert worker.renew(first)
    answer(worker, first, 0)
    second = lease(worker)
    assert list(server.having) == [first.number]
    answer(worker, first, 1)
    answer(worker, second, 0, 1)
    lease(worker)
    assert list(server.having) == []


def test_an_answer_that_failed_for_good_is_not_wanted_and_one_that_may_come_again_is():
    server, worker = working()
    first, second = lease(worker), lease(worker)
    for leased, is_again in ((first, False), (second, True)):
        answer(worker, leased, 0)
        worker.fail(leased, 1, "too long", again=is_again)
    lease(worker)
    assert list(server.having) == [second.number]


CALLS_PROMPT_WORKER = {
    "lease": lambda worker, leased: lease(worker),
    "answer": lambda worker, leased: answer(worker, leased, 0, 1),
    "fail": lambda worker, leased: worker.fail(leased, 0, "too long", again=False),
    "renew": lambda worker, leased: worker.renew(leased, 20.0),
    "release": lambda worker, leased: worker.release(leased),
}


@pytest.mark.parametrize("call", CALLS_PROMPT_WORKER)
def test_after_a_call_that_is_interrupted_others_go_on_and_no_lease_is_listed_for_good(call):
    for interrupted in everywhere():
        server, worker = working()
        leased = lease(worker)
        place = interrupted(functools.partial(CALLS_PROMPT_WORKER[call], worker, leased))
        thread, box = in_thread(lease, worker)
        thread.join(20.0)
        assert "value" in box, f"interrupted at {place}: {box.get('error', 'no end')!r}"
        CALLS_PROMPT_WORKER[call](worker, leased)
        server.time += 60.0
        lease(worker)
        assert list(server.having) == [], place
