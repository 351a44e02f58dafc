"""The demo learns, its counts add up, it leaves nothing behind; and its learner computes what its papers say."""

import contextlib
import dataclasses
import importlib.util
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

import memoire
from memoire.cluster import demo, local
from memoire.cluster.actor import Player
from memoire.cluster.launch import ONE_THREAD
from memoire.cluster.qlearning import Adam, DoubleQ, Network, Settings, act

pytestmark = pytest.mark.processes

# ------------------------------------------------------------------------------------------------- the arithmetic


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.integers(1, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_the_gradient_is_what_small_changes_of_the_weights_do(widths: list[int], rows: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    network = Network(widths, seed)
    network.vector[...] = random.normal(size=network.vector.shape)
    observations = random.normal(size=(rows, widths[0])).astype(np.float32)
    slope = random.normal(size=(rows, widths[-1])).astype(np.float32)
    gradient = network.gradient(network.activations(observations), slope)

    def loss(vector: np.ndarray) -> tuple[float, list[np.ndarray]]:
        """The same network in float64, layer by layer, and which ReLUs are open."""
        output, start, signs = observations.astype(np.float64), 0, []
        for depth, (size, width) in enumerate(zip(widths[:-1], widths[1:], strict=True), start=1):
            weights = vector[start : start + size * width].reshape(size, width)
            output = output @ weights + vector[start + size * width : start + (size + 1) * width]
            if depth < len(widths) - 1:
                signs.append(output > 0)
                output = np.maximum(output, 0.0)
            start += (size + 1) * width
        return float((output * slope).sum()), signs

    np.testing.assert_allclose(network(observations), network.activations(observations)[-1])
    for place in range(len(network.vector)):
        step = np.zeros(len(network.vector))
        step[place] = 1e-6
        (above, one), (below, other) = loss(network.vector + step), loss(network.vector - step)
        if all((a == b).all() for a, b in zip(one, other, strict=True)):  # no kink between them
            assert gradient[place] == pytest.approx((above - below) / 2e-6, rel=1e-3, abs=1e-3)


def test_adam_takes_the_steps_of_its_paper() -> None:
    vector = np.array([1.0, -2.0, 3.0], np.float32)
    adam = Adam(vector, 0.1)
    expected, mean, square = vector.astype(np.float64), np.zeros(3), np.zeros(3)
    for number in range(1, 20):
        gradient = np.array([np.sin(number), 1.0, -0.1 * number], np.float32)
        adam.step(gradient)
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        expected -= 0.1 * (mean / (1 - 0.9**number)) / (np.sqrt(square / (1 - 0.999**number)) + 1e-8)
    np.testing.assert_allclose(vector, expected, rtol=1e-4)


def test_weights_travel_as_bytes_and_fit_only_the_same_sizes() -> None:
    one, other = Network((4, 8, 2), 1), Network((4, 8, 2), 2)
    other.load(one.to_bytes())
    np.testing.assert_array_equal(one.vector, other.vector)
    np.testing.assert_array_equal(one.layers[1][0], other.layers[1][0])
    before = other.vector.copy()
    with pytest.raises(ValueError, match="another environment"):
        other.load(Network((4, 9, 2)).to_bytes())
    np.testing.assert_array_equal(other.vector, before)


def batch_of(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "obs": random.normal(size=(rows, 3)),
        "next_obs": random.normal(size=(rows, 3)),
        "action": random.integers(2, size=rows),
        "reward": random.normal(size=rows).astype(np.float32),
        "discount": random.choice([0.0, 0.9], rows).astype(np.float32),
        "importance": random.random(rows).astype(np.float32),
    }


def test_the_network_chooses_and_the_target_judges() -> None:
    learner = DoubleQ(3, 2, settings=Settings(reward_scale=0.5), seed=0)
    learner.target.vector[...] = Network(learner.network.sizes, 9).vector
    batch = batch_of(6)
    value, judged = learner.network(batch["obs"]), learner.target(batch["next_obs"])
    chosen = learner.network(batch["next_obs"]).argmax(axis=1)
    expected = [
        value[row, batch["action"][row]]
        - (0.5 * batch["reward"][row] + batch["discount"][row] * judged[row, chosen[row]])
        for row in range(6)
    ]
    np.testing.assert_allclose(learner.learn(batch), np.array(expected) / 0.5, rtol=1e-4, atol=1e-5)


def test_a_batch_is_learned_in_minibatches_and_every_error_comes_back_in_its_place() -> None:
    learner = DoubleQ(3, 2, settings=Settings(minibatch_size=4, rate=0.0), seed=0)
    batch = batch_of(10)
    errors = learner.learn(batch)
    assert learner.steps == 3
    np.testing.assert_allclose(
        errors[4:8], learner.learn({name: column[4:8] for name, column in batch.items()}), rtol=1e-5
    )


def test_samples_without_importance_change_nothing() -> None:
    one, other = DoubleQ(3, 2, seed=0), DoubleQ(3, 2, seed=0)
    first, second = batch_of(8, 0), batch_of(8, 1)
    for batch in (first, second):
        batch["importance"][4:] = 0.0
    for name in ("obs", "reward", "action"):
        second[name][:4] = first[name][:4]
    second["next_obs"][:4], second["discount"][:4] = first["next_obs"][:4], first["discount"][:4]
    second["importance"][:4] = first["importance"][:4]
    one.learn(first)
    other.learn(second)
    np.testing.assert_allclose(one.network.vector, other.network.vector, rtol=1e-4, atol=1e-7)


def test_actions_are_the_best_known_ones_but_for_a_share_of_random_ones() -> None:
    network, random = Network((3, 4), 0), np.random.default_rng(0)
    observations = random.normal(size=(4000, 3)).astype(np.float32)
    best = network(observations).argmax(axis=1)
    np.testing.assert_array_equal(act(network, observations, 0.0, random), best)
    assert (act(network, observations, 0.4, random) != best).mean() == pytest.approx(0.4 * 3 / 4, abs=0.04)


# --------------------------------------------------------------------------------------------- targets at the end


class Corridor(gymnasium.Env[np.ndarray, int]):
    """Four rooms in a row, whatever one does; a reward of 1 in each. Behind the last one is the end, or the first again.

    With gamma 0.5: an end is worth nothing, so that the rooms are worth 1.875, 1.75, 1.5 and 1; without one every room is
    worth 2, however often the walk is cut off in between.
    """

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, has_end: bool) -> None:
        self.has_end, self.steps = has_end, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.room(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        is_end = self.has_end and self.steps == 4
        return self.room(), 1.0, is_end, not self.has_end and self.steps == 7, {}

    def room(self) -> np.ndarray:
        return np.eye(4, dtype=np.float32)[self.steps % 4]


def corridors(has_end: bool) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: Corridor(has_end)] * 3, autoreset_mode=AutoresetMode.SAME_STEP)


PARAMETERS: dict[str, Any] = {"multi_step": 3, "discount": 0.5}
SMALL = Settings(hidden=(32,), rate=3e-3, minibatch_size=64, batch_size=64, reward_scale=1.0, decay=1500)


@contextlib.contextmanager
def in_process(envs: SyncVectorEnv, steps: int) -> Iterator[Iterator[memoire.Batch]]:
    """Batches from a Buffer in this process."""
    buffer = memoire.Buffer(memoire.Schema.from_env(envs), capacity=2000, seed=0, **PARAMETERS)
    player = Player(envs, buffer.writer(envs), Network((4, 2), 0), epsilon=1.0, seed=0)

    def batches() -> Iterator[memoire.Batch]:
        for _ in range(40):
            player.step()
        for _ in range(steps):
            player.step()
            yield buffer.sample(64)

    yield batches()


@contextlib.contextmanager
def over_the_network(envs: SyncVectorEnv, steps: int) -> Iterator[Iterator[memoire.Batch]]:
    """Batches from a server, of caches that a client pushed."""
    with (
        memoire.Server("tcp://127.0.0.1:0", memoire.Schema.from_env(envs), seed=0, **PARAMETERS) as server,
        memoire.connect(server.endpoint, seed=0, capacity=2000) as client,
    ):
        server.configure(samples_per_insert=64 / 3, cache_size=64)
        client.update(100.0)
        player = Player(envs, client.writer(envs), Network((4, 2), 0), epsilon=1.0, seed=0)

        def batches() -> Iterator[memoire.Batch]:
            for _ in range(40):
                player.step()
            for _ in range(steps):
                player.step()
                yield server.get_batch(64, timeout=100.0)

        yield batches()


@pytest.mark.parametrize("source", [in_process, over_the_network])
@pytest.mark.parametrize(("has_end", "values"), [(True, [1.875, 1.75, 1.5, 1.0]), (False, [2.0, 2.0, 2.0, 2.0])])
def test_an_end_is_worth_nothing_and_a_cut_changes_nothing(source: Any, has_end: bool, values: list[float]) -> None:
    envs = corridors(has_end)
    learner = DoubleQ(4, 2, settings=SMALL, seed=0)
    with source(envs, 1200) as batches:
        for batch in batches:
            batch.update_priorities(learner.learn(batch))
    envs.close()
    found = learner.network(np.eye(4, dtype=np.float32))
    np.testing.assert_allclose(found, np.repeat(np.array(values)[:, None], 2, axis=1), atol=0.06)


@pytest.mark.slow
def test_the_demo_s_learner_solves_cartpole_from_a_plain_buffer_too() -> None:
    """The same goal, the same learner and player, without any network between them."""
    script = Path(__file__).with_name("learn_alone.py")
    one_thread = {**os.environ, **dict.fromkeys(ONE_THREAD, "1")}
    done = subprocess.run(
        [sys.executable, script, "0"], env=one_thread, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(done.stdout.split()[1]) > 195.0


# ------------------------------------------------------------------------------------------------------- progress


def report(recent: list[list[float]], clients: dict[str, dict[str, int]], **totals: int) -> dict[str, Any]:
    return {
        "totals": {"steps": 0, "episodes": 0, "accepted_caches": 0} | totals,
        "held_caches": 2,
        "recent": recent,
        "clients": clients,
    }


@dataclasses.dataclass
class Said:
    reports: dict[str, Any]


def progress_of(*reports: dict[str, Any], learner: dict[str, Any] | None = None, seconds: float = 4.0) -> demo.Progress:
    made = demo.Progress(goal=195.0)
    made.take(tuple(Said(one) for one in reports), learner or {}, seconds)  # type: ignore[arg-type]
    return made


def counts(steps: int, episodes: int, caches: int) -> dict[str, int]:
    return {"steps": steps, "episodes": episodes, "caches": caches}


def test_the_newest_episodes_of_all_servers_are_taken_together() -> None:
    one = report([[float(number), 100.0, 9] for number in range(0, 40, 2)], {})
    other = report([[float(number), 300.0, 9] for number in range(1, 40, 2)], {})
    made = progress_of(one, other)
    assert made.mean_return == 200.0
    assert made.is_reached
    assert not progress_of(one).is_reached
    assert not progress_of(report([[1.0, 500.0, 500]] * 19, {})).is_reached, "19 episodes are not 20"


def test_progress_before_anything_was_reported() -> None:
    made = progress_of({})
    assert (made.mean_return, made.is_reached) == (None, False)
    assert dict(made.figures())["learner waits"] == "-"
    assert demo.summary(made)[-1].split() == ["cluster", "0", "0", "0"]


def test_counts_that_do_not_add_up_are_found() -> None:
    fine = progress_of(
        report([], {"a": counts(5, 1, 2), "b": counts(7, 2, 3)}, steps=12, episodes=3, accepted_caches=5)
    )
    assert demo.differences(fine, {"a": counts(5, 1, 9), "b": counts(7, 2, 9)}) == []
    assert demo.differences(fine, {"a": counts(6, 1, 2)}) == ["actor a made 6 steps, but the servers have 5"]
    assert demo.differences(fine, {"c": counts(0, 1, 2)}) == ["actor c made 1 episodes, but the servers have 0"]
    wrong = progress_of(report([], {"a": counts(5, 1, 2)}, steps=6, episodes=1, accepted_caches=2))
    assert demo.differences(wrong, {}) == ["6 steps in all, but the clients have 5"]


def test_a_client_that_moved_is_merged() -> None:
    tables = [{"a": counts(5, 1, 2)}, {"a": counts(9, 2, 3)}]
    assert demo.merged(tables) == {"a": counts(9, 2, 5)}


LEARNER = {"batches": 9, "batch_rate": 3.0, "age": 0.25, "waiting": 0.5, "version": 7}


def test_lines_come_every_two_seconds_and_say_everything() -> None:
    written: list[str] = []
    lines = demo.Lines(written.append)
    for seconds in (0.5, 1.0, 2.4, 2.6, 4.0, 4.7):
        lines.show(progress_of(report([], {}, steps=4000), learner=LEARNER, seconds=seconds))
    assert [line.split()[1] for line in written] == ["0.5", "2.6", "4.7"]
    for words in ("steps 4,000 (", "caches 0 (2 held)", "batches 9 (3/s)", "sample age 0.25 s", "learner waits 50 %",
                  "return of the last 20 -", "model version 7"):  # fmt: skip
        assert words in written[0]


def test_a_terminal_gets_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    panel = demo.Panel("the title")
    panel.show(progress_of(report([], {}, steps=4000), learner=LEARNER))
    panel.close()
    said = capsys.readouterr().out
    assert "the title" in said
    assert "learner waits" in said
    assert "50 %" in said


# --------------------------------------------------------------------------------------------- the demo, as it runs


@contextlib.contextmanager
def running(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """`memoire demo` as a process; killed at the end, and its children with it."""
    command = [sys.executable, "-u", "-m", "memoire", "demo", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def finish(*arguments: str, timeout: float) -> tuple[int, str]:
    """Exit status and output of a demo that ends by itself."""
    with running(*arguments) as process:
        said, _ = process.communicate(timeout=timeout)
    return process.returncode, said


SUMMARY = re.compile(r"solved CartPole-v1 in ([0-9.]+) s: the last 20 episodes returned ([0-9.]+) on average")


@pytest.mark.slow
def test_the_demo_learns_to_balance_the_pole() -> None:
    status, said = finish("--seed", "0", "--seconds", "100", timeout=115)
    assert status == 0, said
    found = SUMMARY.search(said)
    assert found is not None, said
    assert float(found[2]) > 195.0
    assert "what the actors counted is what the servers counted, and sums to the cluster's totals" in said
    totals = [line.split() for line in said.splitlines() if re.match(r"  ([0-9a-f]{32}|cluster) ", line)]
    columns = np.array([[int(number.replace(",", "")) for number in row[1:]] for row in totals])
    assert len(columns) == 3, "two actors, and the sum"
    np.testing.assert_array_equal(columns[:-1].sum(axis=0), columns[-1])
    assert (columns > 0).all()


@pytest.mark.slow
def test_several_servers_and_proxies_make_one_cluster() -> None:
    arguments = ("--servers", "2", "--proxies", "2", "--actors", "3", "--num-envs", "2", "--goal", "30", "--seed", "3")
    status, said = finish(*arguments, "--seconds", "100", timeout=115)
    assert status == 0, said
    assert "solved CartPole-v1" in said
    assert "what the actors counted is what the servers counted, and sums to the cluster's totals" in said


@pytest.mark.slow
def test_a_goal_that_is_not_reached_in_time_is_admitted() -> None:
    for seconds in ("6", "25"):  # more on a machine so busy that six of them are over before the first episode
        status, said = finish("--seconds", seconds, "--goal", "1000", "--actors", "1", timeout=100)
        assert status == 1, said
        if re.search(r"episodes [1-9]", said):
            break
    assert "not solved: after" in said
    assert "the goal is 1000" in said
    assert "what the actors counted is what the servers counted" in said


def children(parent: int) -> dict[int, str]:
    """Process ids and command lines of a process' children."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
    return found


def survivors(pids: dict[int, str], seconds: float) -> dict[int, str]:
    """Those processes that still run after that time."""
    deadline = time.monotonic() + seconds
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            watch = os.pidfd_open(pid)
            try:
                select.select([watch], [], [], max(0.0, deadline - time.monotonic()))
            finally:
                os.close(watch)
    return {pid: words for pid, words in pids.items() if state(pid) not in ("", "Z")}


def state(pid: int) -> str:
    """One letter; "" when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@contextlib.contextmanager
def playing() -> Iterator[tuple["subprocess.Popen[str]", dict[int, str]]]:
    """A demo whose actors have made steps, and its children."""
    with running("--keep", "--goal", "1000") as process:
        assert process.stdout is not None
        said = ""
        while not re.search(r"steps [1-9]", said):
            line = process.stdout.readline()
            assert line, f"the demo ended by itself: {said}"
            said += line
        found = children(process.pid)
        has_board = all(importlib.util.find_spec(module) for module in local.DASHBOARD_NEEDS)
        assert len(found) == 5 + has_board, f"{found}: {said}"
        yield process, found


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_no_process_is_left_however_the_demo_ends(number: signal.Signals, status: int) -> None:
    with playing() as (process, pids):
        process.send_signal(number)
        said, _ = process.communicate(timeout=100)
        assert process.returncode == status, said
        assert survivors(pids, 20.0) == {}
    if number == signal.SIGINT:
        assert "not solved" in said
        assert "what the actors counted is what the servers counted" in said


def awaited(process: "subprocess.Popen[str]", done: Callable[[str], bool]) -> str:
    """The first line that the demo prints for which this holds."""
    assert process.stdout is not None
    said = ""
    while line := process.stdout.readline():
        said += line
        if done(line):
            return line
    raise AssertionError(f"the demo ended by itself: {said}")


def caches(line: str) -> int:
    """Caches that the servers have accepted, as a line of the demo says; -1 in others."""
    found = re.search(r"caches ([0-9,]+) ", line)
    return int(found[1].replace(",", "")) if found else -1


@pytest.mark.slow
@pytest.mark.parametrize(
    "roles", [{" proxy ": "proxy-0", ".actor ": "actor-"}, {" server ": "server-0", ".learner ": "learner"}]
)
def test_processes_that_die_are_started_again_and_the_demo_goes_on(roles: dict[str, str]) -> None:
    with playing() as (process, pids):
        for role in roles:
            os.kill(next(pid for pid, words in pids.items() if role in words), signal.SIGKILL)
        waiting = set(roles.values())
        while waiting:
            line = awaited(process, lambda line: "was killed by signal 9; it is started again in 0.5 s" in line)
            waiting = {name for name in waiting if f"memoire: {name}" not in line}
        before = caches(awaited(process, lambda line: caches(line) >= 0))
        awaited(process, lambda line: caches(line) >= before + 20)
        found = children(process.pid)
        assert len(found) == len(pids) and all(any(role in words for words in found.values()) for role in roles)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=100)
        assert "counts do not add up" not in rest
        assert survivors(pids | found, 60.0) == {}
