"""Agents and observers over real sockets: episodes, cancellation, several agents, lost results, killed processes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import CancelledError
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import memoire
import observer_child
from interrupts import everywhere
from memoire.errors import (
    Closed,
    EntryError,
    JobFailed,
    MemoireTimeout,
    ObserverLost,
    ParameterError,
    Refused,
    WrongType,
)
from memoire.nodes.http import NodePages
from memoire.replay.columns import Column
from memoire.replay.schema import Schema
from memoire.rl import Agent, Observer, StartStates
from memoire.rl.observer import fragment_of
from memoire.tables.rollouts import fragments
from memoire.wire import messages
from memoire.wire.frames import encode, parse
from netkit import dealer, until
from observer_child import ENTRIES, INPUTS, OUTPUTS, act

pytestmark = pytest.mark.slow

HERE = "tcp://127.0.0.1:0"
CHILD = Path(observer_child.__file__)
CLIENT = b"c" * 16


def count(start, ask, options):
    """Yield the steps of an episode, each after one request to the agent."""
    begin = 0.0 if start is None else float(start["obs"][0])
    for step in range(options.get("steps", 3)):
        obs = np.float32([begin + step, 1])
        answer = ask({"obs": obs})
        yield {"obs": obs, "action": answer["action"], "reward": answer["value"], "terminated": step == 2}
    return {"obs": np.float32([begin + step + 1, 1])}


@pytest.fixture
def open_agent(keep):
    def start(endpoint=HERE, function=act, inputs=INPUTS, outputs=OUTPUTS, entries=ENTRIES, **options):
        return keep(Agent(endpoint, inputs, outputs, function, entries, **options))

    return start


@pytest.fixture
def observe():
    """Yield a function that starts observers in threads and collects their exceptions in its `errors`."""
    observers, threads, errors = [], [], []

    def start(*agents, run_episode=count, **options):
        observer = Observer([agent.endpoint for agent in agents], run_episode, **options)

        def work():
            try:
                observer.run()
            except memoire.errors.MemoireError as error:
                errors.append(error)

        threads.append(threading.Thread(target=work))
        threads[-1].start()
        observers.append(observer)
        return observer

    start.errors = errors
    yield start
    for observer in observers:
        observer.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_an_episode_comes_back_with_its_entries_version_and_end(open_agent, observe):
    agent = open_agent()
    agent.update(2, version=5)
    observe(agent)
    episode = agent.run_episode(steps=3).result(20)
    np.testing.assert_array_equal(episode.columns["obs"], np.float32([[0, 1], [1, 1], [2, 1]]))
    np.testing.assert_array_equal(episode.columns["reward"], np.float32([2, 4, 6]))
    assert episode.columns["action"].tolist() == [7, 7, 7] and len(episode) == 3
    assert episode.terminated and episode.final["obs"].tolist() == [3, 1] and episode.version == 5
    assert episode.options == {"steps": 3} and np.isnan(episode.cost)
    jobs = agent.stats().jobs
    assert (jobs.done, jobs.open, jobs.leased, jobs.late) == (1, 0, 0, 0)
    assert agent.stats().rows == 3


@pytest.mark.parametrize("entries", [ENTRIES, ENTRIES | {"terminated": np.bool_}])
def test_an_episode_ends_as_its_last_entry_says_also_in_a_column_of_that_name(entries, open_agent, observe):
    agent = open_agent(entries=entries)
    observe(agent)
    assert [agent.run_episode(steps=steps).result(20).terminated for steps in (2, 3)] == [False, True]


def test_an_observer_whose_agent_has_gone_uses_no_core(open_agent, observe):
    """The renewal of the job's lease stays overdue, and must not end each wait of the observer at once."""
    begun, goes_on, used = threading.Event(), threading.Event(), []

    def long(start, ask, options):
        begun.set()
        assert goes_on.wait(20.0)
        before = time.process_time()
        time.sleep(1.0)
        used.append(time.process_time() - before)
        yield {"obs": np.float32([0, 1]), "action": np.int64(0), "reward": np.float32(0)}

    agent = open_agent(lease=0.3)
    observe(agent, run_episode=long)
    agent.run_episode(steps=1)
    assert begun.wait(20.0)
    agent.close()
    goes_on.set()
    until(lambda: used)
    assert used[0] < 0.3, used


def test_many_observers_share_batches_and_every_episode_is_run_once(open_agent, observe):
    agent = open_agent(max_wait=0.02)
    observers = [observe(agent) for _ in range(4)]
    episodes = agent.collect(40, timeout=30)
    assert len({each.job for each in episodes}) == len(episodes) == 40
    until(lambda: sum(each.done for each in observers) == agent.stats().jobs.done == 40)
    stats = agent.stats()
    assert stats.rows == stats.batched_rows == 120 and sum(stats.batches.values()) < 120
    rollouts = agent.rollouts(episodes)
    assert len(rollouts) == 120 and rollouts.terminated.all()
    advantages, _ = rollouts.gae(np.zeros(120), np.zeros(40), 0.99)
    assert advantages.shape == (120,)


def test_ragged_columns_go_to_the_function_into_entries_and_starts_and_no_padding_travels(open_agent, observe):
    graph = {"gates": Column(np.int32, (None, 2), role="state"), "count": Column(np.int32, role="state")}
    outputs = {"logits": Column(np.float32, (None,)), "node": np.int32}
    entries = graph | {"mask": Column(np.bool_, (None,)), "node": np.int32, "reward": np.float32}

    def function(columns):
        assert columns["gates"].ndim == 3 and columns["gates"].shape[1] == columns["gates_length"].max()
        logits = [np.arange(length, dtype=np.float32) for length in columns["gates_length"]]
        return {"logits": logits, "node": columns["gates_length"].astype(np.int32) - 1}

    def shorten(start, ask, options):
        gates = start["gates"]
        while len(gates) > 1:
            state = {"gates": gates, "count": np.int32(len(gates))}
            answer = ask(state)
            assert answer["logits"].tolist() == list(range(len(gates))) and answer["node"] == len(gates) - 1
            mask = np.ones(len(gates), np.bool_)
            yield state | {"mask": mask, "node": answer["node"], "reward": 1.0, "terminated": len(gates) == 2}
            gates = gates[:-1]
        return {"gates": gates, "count": np.int32(1)}

    first = {"gates": np.arange(8, dtype=np.int32).reshape(4, 2), "count": np.int32(4)}
    starts = StartStates("one", graph, first, key=lambda state: len(state["gates"]), action=["node"])
    agent = open_agent(HERE, function, graph, outputs, entries, starts=[starts])
    observe(agent, run_episode=shorten)
    (episode,) = agent.collect(1, timeout=20)
    assert [len(value) for value in episode.columns["gates"]] == [4, 3, 2]
    assert episode.columns["mask"][1].tolist() == [True] * 3 and len(episode.final["gates"]) == 1
    assert (episode.start_cost, episode.cost) == (4.0, 1.0)
    assert agent.keep([episode], where=lambda each: each.cost <= each.start_cost) == 3
    assert starts.best.cost == 1
    assert [action for _, action in starts.lineage()] == [{}, *({"node": n} for n in (3, 2, 1))]
    rollouts = agent.rollouts([episode])
    (index, batch), *rest = memoire.rl.ragged_minibatches(rollouts, 8)
    assert not rest and batch["gates"].shape == (3, 4, 2) and sorted(batch["gates_length"]) == [2, 3, 4]
    assert batch["gates_length"].tolist() == (4 - index).tolist()


def test_collect_returns_when_enough_are_done_and_late_ones_count_for_the_next_call(open_agent, observe):
    agent, gate = open_agent(), threading.Event()

    def slow(start, ask, options):
        if not gate.is_set():
            gate.wait(20)
        yield from count(start, ask, options)

    observe(agent, run_episode=slow, name="slow")
    until(lambda: agent.stats().jobs.observers == 1)
    late = agent.run_episode(observer="slow")
    fast = observe(agent)
    until(lambda: agent.stats().jobs.leased == 1)
    done, waiting = agent.wait([late, agent.run_episode(observer=fast.id)], min_done=1, timeout=20)
    assert waiting == [late] and done[0].result().observer.hex() == fast.id
    first = agent.collect(3, min_done=1, timeout=20)
    gate.set()
    assert late.result(20).observer.hex() != fast.id
    more = agent.collect(3, timeout=20)
    jobs = [each.job for each in (*first, *more)]
    assert len(jobs) == len(set(jobs)) and len(first) >= 1 and len(more) == 3


def test_late_episodes_of_older_weights_than_max_lag_allows_are_counted_and_replaced(open_agent, observe):
    agent = open_agent(max_lag=0)
    agent.update(1, version=1)
    gate = threading.Event()

    def held(start, ask, options):
        yield from count(start, ask, options)
        if options["hold"]:
            gate.wait(20)

    observers = [observe(agent, run_episode=held) for _ in range(2)]
    until(lambda: agent.stats().jobs.observers == 2)
    with pytest.raises(MemoireTimeout, match="0 of 2 episodes are done, 2 are running"):
        agent.collect(2, timeout=0.0, hold=True)
    until(lambda: agent.stats().rows == 6)
    agent.update(1)
    gate.set()
    until(lambda: sum(each.done for each in observers) == 2)
    episodes = agent.collect(2, timeout=20, hold=False)
    assert [each.version for each in episodes] == [2, 2] and agent.version == 2
    until(lambda: agent.stats().jobs.late == 2)
    assert agent.stats().jobs.done == 4


def test_an_episode_whose_call_was_interrupted_is_left_to_no_observer(open_agent):
    agent = open_agent()
    for interrupted in everywhere():
        begun = []
        interrupted(lambda begun=begun: begun.append(agent.run_episode()))
        until(lambda begun=begun: agent.stats().jobs.open == len(begun))
        for each in begun:
            each.cancel()
        until(lambda: not agent.stats().jobs.open)


def test_cancelling_reaches_a_running_observer_with_its_next_message(open_agent, observe):
    agent, began, go_on = open_agent(), threading.Event(), threading.Event()

    def endless(start, ask, options):
        for step in range(1_000_000):
            answer = ask({"obs": np.zeros(2, np.float32)})
            began.set()
            yield {"obs": np.zeros(2, np.float32), "action": answer["action"], "reward": 0.0}
            assert step == 0 or not go_on.is_set()

    observer = observe(agent, run_episode=endless)
    future = agent.run_episode()
    assert began.wait(20)
    assert future.cancel() and future.cancelled()
    until(lambda: observer.cancelled == 1)
    with pytest.raises(CancelledError):
        future.result(0)
    assert agent.stats().jobs.cancelled == 1 and agent.stats().refused.get("cancelled", 0) <= 1
    assert not agent.run_episode().done()


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"obs": np.zeros(3, np.float32), "action": 1, "reward": 0.0}, "obs"),
        ({"obs": np.zeros(2, np.float32), "action": 1}, "reward"),
        ({"obs": np.float32([np.nan, 0]), "action": 1, "reward": 0.0}, "NaN or infinity"),
        (None, "at least one"),
    ],
)
def test_entries_that_do_not_fit_are_an_error_that_names_them(open_agent, observe, entry, text):
    def wrong(start, ask, options):
        if entry is not None:
            yield entry

    agent = open_agent()
    observe(agent, run_episode=wrong)
    with pytest.raises(JobFailed, match=text):
        agent.run_episode().result(20)


def test_collect_begins_failed_episodes_again_and_gives_up_when_all_fail(open_agent, observe):
    agent = open_agent()

    def fails(start, ask, options):
        raise ValueError("always")
        yield

    observe(agent, run_episode=fails)
    with pytest.raises(JobFailed, match="always"):
        agent.collect(4, timeout=20)


def test_starts_are_drawn_from_each_origin_in_turn_also_after_a_restart(open_agent, observe):
    def origin(number):
        first = {"obs": np.float32([10.0 * number, 0])}
        return StartStates(f"origin {number}", {"obs": (np.float32, (2,))}, first, key=lambda state: 0.0)

    agent = open_agent(starts=[origin(0), origin(1), origin(2)])
    observe(agent)
    episodes = agent.collect(4, timeout=20)
    assert sorted(each.columns["obs"][0, 0] for each in episodes) == [0, 0, 10, 20]
    again = open_agent(starts=[origin(0), origin(1), origin(2)])
    again.restore(agent.arrays())
    observe(again)
    assert [each.columns["obs"][0, 0] for each in again.collect(1, timeout=20)] == [10]
    own = agent.run_episode(start={"obs": np.float32([50, 0])}).result(20)
    assert own.columns["obs"][0, 0] == 50 and own.source is None


def test_pages_of_an_agent_are_those_of_its_node_with_jobs_and_start_states(open_agent, observe):
    def key(columns):
        return -float(columns["obs"][0])

    starts = StartStates("line", {"obs": (np.float32, (2,))}, {"obs": np.zeros(2, np.float32)}, key)
    agent = open_agent(starts=[starts], name="teacher")
    observe(agent)
    agent.keep(agent.collect(1, timeout=100.0))
    with NodePages("127.0.0.1:0", agent) as pages, NodePages(None) as later:
        later.show(agent)
        open_page = lambda page: urllib.request.urlopen(f"{pages.url}/{page}", timeout=100.0).read()  # noqa: E731
        bodies = {page: open_page(page) for page in ("status", "readyz", "metrics")}
    status = json.loads(bodies["status"])
    assert status["role"] == "inference" and status["endpoints"]["request"] == agent.endpoint
    assert status["stats"]["jobs"]["done"] == 1 and json.loads(bodies["readyz"])["ready"]
    row = {"name": "line", "kept": 4, "draws": 1, "best": -3.0, "first": 0.0}
    assert status["stats"]["starts"] == [row | {"lineage": [[0.0, 0], [-1.0, 1], [-2.0, 2], [-3.0, 3]]}]
    assert b'memoire_starts_best_cost{origin="line"} -3.0' in bodies["metrics"]


def test_an_observer_goes_to_another_agent_when_its_own_is_gone_and_returns(open_agent, observe):
    agents = {agent.endpoint: agent for agent in (open_agent(), open_agent())}
    observer = observe(*agents.values())
    own, other = (agents[url] for url in observer.urls)
    assert own.run_episode().result(20) and other.stats().jobs.observers == 0
    until(lambda: observer.done == 1)  # the agent has acknowledged the result
    endpoint = own.endpoint
    own.close()
    assert len(other.run_episode().result(20)) == 3
    until(lambda: observer.done == 2)
    again = open_agent(endpoint)
    assert len(again.run_episode().result(20)) == 3
    until(lambda: observer.done == 3)


def test_a_closing_agent_ends_its_futures(open_agent, observe):
    agent = open_agent()
    future = agent.run_episode()
    agent.close()
    with pytest.raises(Closed):
        future.result(20)
    with pytest.raises(Closed):
        agent.collect(1)


def test_an_inference_node_gives_no_jobs_and_says_so(observe):
    with memoire.Inference(HERE, INPUTS, OUTPUTS, act) as node, Observer(node.endpoint, count) as observer:
        with pytest.raises(Refused, match="Give observers the address of an"):
            observer.run(timeout=20)


def test_wrong_arguments_are_refused_by_name(open_agent):
    with pytest.raises(WrongType, match="run_episode"):
        Observer("tcp://127.0.0.1:1", 3)
    agent = open_agent()
    with pytest.raises(ParameterError, match="start"):
        agent.run_episode(start={"obs": np.zeros(2, np.float32)})
    with pytest.raises(ParameterError, match="min_done"):
        agent.collect(2, min_done=3)


# ------------------------------------------------------------------------------------- processes, resends and damage


@pytest.fixture
def child():
    """Yield a function that starts `observer_child` as a process."""
    processes = []

    def start(*arguments):
        command = [sys.executable, str(CHILD), *arguments]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait(20)
        process.stdout.close()


def test_the_job_of_a_killed_observer_is_run_by_another_one_once(open_agent, observe, child):
    agent = open_agent()
    process = child("run", agent.endpoint)
    future = agent.run_episode(steps=50, pause=0.1)
    assert process.stdout.readline() == "began\n"
    process.kill()
    observer = observe(agent, run_episode=count)
    assert len(future.result(20)) == 50
    until(lambda: observer.done == 1)
    jobs = agent.stats().jobs
    assert (jobs.done, jobs.expired, jobs.lost, jobs.late) == (1, 1, 0, 0)


def test_an_observer_that_was_stopped_for_longer_than_its_lease_learns_that_its_job_is_over(open_agent, observe, child):
    agent = open_agent(lease=1.0)
    process = child("run", agent.endpoint)
    future = agent.run_episode(steps=5, pause=0.1)
    assert process.stdout.readline() == "began\n"
    os.kill(process.pid, signal.SIGSTOP)
    observer = observe(agent)
    assert future.result(20).observer.hex() == observer.id
    observer.close()
    os.kill(process.pid, signal.SIGCONT)
    assert len(agent.run_episode(steps=1).result(20)) == 1
    assert agent.stats().jobs.done == 2 and agent.stats().jobs.lost == 0


def test_without_a_further_attempt_a_killed_observer_ends_its_job(open_agent, child):
    agent = open_agent(attempts=1)
    process = child("run", agent.endpoint)
    future = agent.run_episode(steps=50, pause=0.1)
    assert process.stdout.readline() == "began\n"
    process.kill()
    with pytest.raises(ObserverLost):
        future.result(20)


def test_an_observer_leaves_a_killed_agent_in_the_middle_of_an_episode(open_agent, observe, child):
    killed = child("agent", "tcp://127.0.0.1:*")
    url = killed.stdout.readline().strip()
    agent = open_agent()
    observers = [observe(agent, SimpleNamespace(endpoint=url), run_episode=observer_child.steps) for _ in range(8)]
    until(lambda: any(observer.urls[0] == url for observer in observers))
    killed.kill()
    assert len(agent.collect(16, timeout=30, steps=2)) == 16
    until(lambda: agent.stats().jobs.observers == 8)


def test_an_idle_observer_takes_less_than_a_hundredth_of_a_processor(open_agent, child):
    spent = float(child("idle", open_agent().endpoint).stdout.readline())
    assert spent < 0.01 * observer_child.IDLE


def asked(endpoint, *requests, client=CLIENT):
    """Yield the replies to these requests, which are sent one by one: (body, sequence, payload, fingerprint)."""
    with dealer(endpoint) as socket:
        for body, sequence, payload, fingerprint in requests:
            frames = encode(body, client=client, sequence=sequence, payload=payload, fingerprint=fingerprint)
            socket.send_multipart([b"", *frames])
            assert socket.poll(20_000)
            yield parse(socket.recv_multipart()[1:])


def result(number, **changed):
    schema = Schema(ENTRIES)
    entry = {"obs": np.zeros(2, np.float32), "action": 1, "reward": 1.0}
    rows, payload = fragments.packed([fragment_of(schema, [entry], [3])], schema, now=0.0, wall=0.0)
    facts = {"job": number, "fragments": rows} | changed
    return messages.Result(**facts), payload, schema.fingerprint


def test_a_value_that_does_not_fit_is_refused_with_its_column_and_its_place():
    schema, entry = Schema(ENTRIES), {"obs": np.zeros(2, np.float32), "action": 1, "reward": 1.0}
    state = next(iter(schema.states))
    with pytest.raises(EntryError, match=f"{state!r} .*in the final state"):
        fragment_of(schema, [entry], [3], {state: np.zeros(7, np.float32)})
    with pytest.raises(EntryError, match=repr(state)) as caught:
        fragment_of(schema, [entry | {state: np.zeros(7, np.float32)}], [3])
    assert "final state" not in str(caught.value)


def test_a_result_that_comes_twice_counts_once_and_has_the_same_answer(open_agent):
    agent = open_agent()
    future = agent.run_episode()
    (job,) = asked(agent.endpoint, (messages.WorkRequest(patience=9.0), 1, None, 0))
    body, payload, schema = result(job.body.number)
    wrong = result(job.body.number, fragments=[])
    sent = [(body, 2, payload, schema + 1), (wrong[0], 3, payload, schema), (body, 4, payload, schema)]
    sent += [(body, 4, payload, schema), (body, 5, payload, schema)]
    answers = [answer.body for answer in asked(agent.endpoint, *sent)]
    assert [getattr(answer, "code", None) for answer in answers] == ["schema", "container", None, None, None]
    assert [(answer.samples, answer.lost) for answer in answers[2:]] == [(1, 0), (1, 0), (0, 1)]
    assert future.result(20).version == 3 and future.result(20).observer == CLIENT
    assert agent.stats().jobs.done == agent.stats().jobs.late == 1 and agent.stats().faults == 0


def test_a_question_for_work_that_comes_twice_gets_one_job(open_agent):
    agent = open_agent()
    for _ in range(2):
        agent.run_episode()
    work = messages.WorkRequest(patience=9.0)
    first, again, same = asked(agent.endpoint, *((work, sequence, None, 0) for sequence in (1, 1, 2)))
    assert first.body == again.body == same.body and agent.stats().jobs.leased == 1
    going_on = messages.WorkRequest(patience=0.0, job=first.body.number)
    other = messages.WorkRequest(patience=0.0, job=first.body.number + 1)
    answers = [each.body for each in asked(agent.endpoint, (going_on, 3, None, 0), (other, 4, None, 0))]
    assert [answer.cancelled for answer in answers] == [False, True]


def test_nobody_finishes_the_job_of_others(open_agent):
    agent = open_agent()
    future = agent.run_episode()
    (job,) = asked(agent.endpoint, (messages.WorkRequest(patience=9.0), 1, None, 0))
    body, payload, schema = result(job.body.number)
    (refused,) = asked(agent.endpoint, (body, 1, payload, schema), client=b"d" * 16)
    assert refused.body.code == "owner"
    assert not future.done()
