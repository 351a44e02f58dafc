"""Tests on each side of the bounds of node programs: goals, counts, addresses, sizes, options, signals."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading

import pytest

from memoire.errors import EndpointError, ParameterError
from memoire.nodes import local, roles
from memoire.nodes.launcher import MAX_FAILED_STARTS, MIN_PAUSE, MIN_UPTIME, Child, Launcher, Restarts
from memoire.nodes.local import LaunchOptions, Nodes, free_ports, program, seed_of
from memoire.nodes.settings import NotASize, size
from memoire.nodes.supervision import LINE, LauncherLine, SignalWatch, _inherited_line
from memoire.rl.demo import actor, demo


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "learner.py").write_text("")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "actor.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learner.py", ("learner.py",)),
        ("learner.py --lr 1e-3 --name 'a b'", ("learner.py", "--lr", "1e-3", "--name", "a b")),
        ("package.actor --x", ("package.actor", "--x")),
        ("memoire.rl.demo.actor", ("memoire.rl.demo.actor",)),
        ("-", ()),
    ],
)
def test_a_program_is_a_file_or_a_module_with_arguments(folder, text, words):
    assert program("LEARNER", text) == words


@pytest.mark.parametrize(
    "text", ["", "  ", "lerner.py", "no.such.module", "learner.py 'open", "--actors", "/no/such.py"]
)
def test_what_is_no_program_is_refused_by_its_place(folder, text):
    with pytest.raises(ParameterError, match="^ACTOR (must be a |.* cannot be split)"):
        program("ACTOR", text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"actors": 0, "learner": ("a",)}, "actors must be a whole number from 1, got 0"),
        ({"restarts": -1, "learner": ("a",)}, "restarts must be a whole number from 0, got -1"),
        ({"threads": 0, "learner": ("a",)}, "threads must be a whole number from 1, got 0"),
        ({}, "which starts no learner: give an ACTOR"),
        ({"actor": ("a",)}, "so no program creates a memoire.Server: give --env"),
    ],
)
def test_what_cannot_be_launched_is_refused(options, words):
    with pytest.raises(ParameterError) as caught:
        LaunchOptions(**options)
    assert words in str(caught.value)


def test_actors_alone_need_a_cluster_of_somebody():
    assert LaunchOptions(actor=("a",), endpoint="tcp://a:1", actors=2).names == ["actor-0", "actor-1"]
    assert LaunchOptions(actor=("a",), nodes=Nodes(tables="{}")).names == ["actor-0"]
    assert LaunchOptions(learner=("a",)).names == ["learner"] and LaunchOptions(learner=("a",)).is_embedded


def test_every_process_of_nearby_runs_has_a_seed_of_its_own():
    seeds = [seed_of(run, "learner", 0) for run in range(3)]
    seeds += [seed_of(run, "actor", rank) for run in range(3) for rank in range(900)]
    assert len(set(seeds)) == len(seeds)


def test_free_ports_are_a_row_that_nobody_listens_at():
    first = free_ports(0)
    assert first > 0 and free_ports(first) == first
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EndpointError, match=r"in use.*\. Give another --port \(0 finds 3 consecutive free ports\)"):
            free_ports(port)
    with pytest.raises(EndpointError):
        free_ports(65535)


@pytest.mark.parametrize(
    ("goal", "returns", "is_reached"),
    [
        (None, [500.0] * demo.EPISODES, False),
        (100.0, [], False),
        (100.0, [101.0] * (demo.EPISODES - 1), False),
        (100.0, [100.0] * demo.EPISODES, False),
        (100.0, [101.0] * demo.EPISODES, True),
    ],
)
def test_a_goal_is_reached_by_the_mean_of_all_newest_episodes(goal, returns, is_reached):
    progress = demo.ClusterProgress(goal=goal)
    progress.returns = returns
    assert progress.is_reached is is_reached


def test_the_rate_of_steps_follows_over_two_seconds():
    server = Child("server-0", (), {})
    progress = demo.ClusterProgress(goal=None)
    totals = {"episodes": 1, "accepted_caches": 2}
    rates = []
    for steps, seconds in [(100, 1.0), (300, 2.0), (300, 2.0), (900, 5.0)]:
        server.reports = {"totals": {"steps": steps, **totals}, "held_caches": 3, "recent": [], "clients": {}}
        server.reports["feedback"] = {}
        progress.take((server,), {}, seconds)
        rates.append(progress.step_rate)
    assert rates == [50.0, 125.0, 125.0, 200.0]
    assert (progress.episodes, progress.caches, progress.held_caches) == (1, 2, 3)


@pytest.mark.parametrize(
    ("servers", "proxies", "wrong"), [(2, 0, "--proxies"), (0, 1, "--servers"), (1, -1, "--proxies")]
)
def test_counts_that_make_no_cluster_are_refused(servers, proxies, wrong):
    local.check_counts(1, 0)
    local.check_counts(2, 1)
    with pytest.raises(ParameterError, match=wrong):
        local.check_counts(servers, proxies)


def test_an_actor_plays_as_its_command_says(monkeypatch):
    played = []
    monkeypatch.setattr(actor, "play", lambda *args, **named: played.append((args, named)) or 7)
    assert actor.main(["tcp://here:5560", "--seed", "5", "--num-envs", "3"]) == 7
    assert actor.main(["tcp://here:5560"]) == 7
    (one, named), (other, _) = played
    assert one[0] == "tcp://here:5560" and 5 in (*one, *named.values()) and 3 in (*one, *named.values())
    assert 0 in other or 0 in played[1][1].values()


def test_a_process_is_asked_to_end_only_when_somebody_asks():
    with LauncherLine() as tether:
        assert not tether.stopping and not tether.finishing


def test_the_line_of_a_launcher_is_taken_out_of_the_environment_and_waits(monkeypatch):
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    monkeypatch.setenv(LINE, str(theirs.detach()))
    with ours, _inherited_line() as line:
        assert line.getblocking() and not line.get_inheritable()
        assert _inherited_line() is None


LAUNCHED = """
from memoire.nodes import supervision
supervision._signal_with_parent = lambda number: False
with supervision.LauncherLine() as line:
    line.wait(60.0)
    print(line.stopping, line.finishing)
"""


def test_a_child_whose_launcher_died_before_it_began_ends():
    """The child ends even if another process holds the launcher's end of the line."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        options = {"env": os.environ | {LINE: str(theirs.fileno())}, "pass_fds": [theirs.fileno()], "timeout": 100}
        done = subprocess.run([sys.executable, "-c", LAUNCHED], capture_output=True, text=True, **options)
    assert (done.stdout, done.returncode) == ("True False\n", 0), done.stderr


def test_a_launcher_that_ends_closes_what_it_opened():
    with Launcher() as launcher:
        child = launcher.start("child", "this")
        assert launcher._selector.get_map() and child.line.fileno() >= 0
    assert launcher._selector.get_map() is None
    assert child.line.fileno() == -1 and child.process.stdout.closed and child.process.poll() is not None
    assert "Zen of Python" in " ".join(child.tail) or child.process.returncode < 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0), ("4096", 4096), ("17B", 17), ("1GiB", 1 << 30), ("1Gi", 1 << 30), ("1 GiB", 1 << 30),
        ("1gib", 1 << 30), ("500MB", 500_000_000), ("64k", 64_000), ("64Ki", 65536), ("1.5GiB", 3 << 29),
        ("0.5KiB", 512), ("2TB", 2 * 10**12), ("  3MiB ", 3 << 20), ("1.0", 1), ("0.001kB", 1), ("1e6", 1_000_000), ("2.5e3", 2500),
    ],
)  # fmt: skip
def test_a_size_is_a_number_with_a_unit(text, expected):
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.5", "1.25 B", "1PiB", "1 GiBs", "0x10", "1iB", "1,5GB", "٣GB"])
def test_what_is_no_size_is_refused_with_examples(text):
    with pytest.raises(NotASize, match="a size in bytes, such as 1GiB, 500MB or 4096, got "):
        size(text)


def test_limits_take_sizes_where_they_are_bytes_and_numbers_elsewhere():
    assert roles.read_limits(["model_bytes=2GiB", "new_clients=7"]).model_bytes == 2 << 30
    with pytest.raises(ParameterError, match=r"--limit must be a size in bytes.* after the =, got 'model_b"):
        roles.read_limits(["model_bytes=tons"])
    with pytest.raises(ParameterError, match="--limit must be a number after the ="):
        roles.read_limits(["new_clients=1GiB"])


def test_the_first_signal_is_kept_and_wakes_whoever_waits():
    watch = SignalWatch((signal.SIGTERM, signal.SIGHUP))
    try:
        assert watch.first is None and not select.select([watch], [], [], 0.0)[0]
        os.kill(os.getpid(), signal.SIGHUP)
        assert select.select([watch], [], [], 60.0)[0]
        watch.drain()
        assert not select.select([watch], [], [], 0.0)[0]
        os.kill(os.getpid(), signal.SIGTERM)  # one signal for the group and one for the leader
        assert (watch.first, watch.is_urgent) == (signal.SIGHUP, False)
        watch.forget()
        assert watch.first is None
    finally:
        watch.close()


def test_another_signal_later_is_urgent():
    again = []
    watch = SignalWatch((signal.SIGTERM,), on_repeat=again.append, repeat_after=-1.0)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (watch.is_urgent, again) == (False, [])
        os.kill(os.getpid(), signal.SIGTERM)
        assert (watch.is_urgent, again) == (True, [signal.SIGTERM])
    finally:
        watch.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_go_back_to_whoever_had_them(number):
    before, wakeup = signal.getsignal(number), signal.set_wakeup_fd(-1)
    watch = SignalWatch((signal.SIGTERM,), wakes=(signal.SIGUSR1,))
    assert signal.getsignal(number) is not before
    threading.Thread(target=watch.wake).start()
    assert select.select([watch], [], [], 60.0)[0]
    watch.close()
    watch.wake()  # no thread waits for the wake
    assert signal.getsignal(number) is before and signal.set_wakeup_fd(wakeup) == -1


def worked(seconds: float = 0.0) -> Restarts:
    restarts = Restarts()
    restarts.ready(0.0)
    restarts.ready(seconds)  # a second call changes nothing
    return restarts


def test_a_process_that_never_worked_is_started_again_only_if_it_was_killed() -> None:
    restarts = Restarts()
    assert restarts.died(1.0) is None
    assert restarts.due is None
    assert not restarts.is_due(1e9)
    restarts = Restarts()
    assert restarts.died(1.0, is_killed=True) == MIN_PAUSE
    assert restarts.died(2.0) is None, "it ended by itself then"


@pytest.mark.parametrize(("seconds", "pause"), [(MIN_UPTIME, MIN_PAUSE), (MIN_UPTIME - 0.01, 2 * MIN_PAUSE)])
def test_a_while_of_work_makes_former_deaths_forgotten(seconds: float, pause: float) -> None:
    restarts = worked()
    restarts.died(0.0)
    restarts.started()
    restarts.ready(100.0)
    assert restarts.died(100.0 + seconds) == pause


LIVES = {
    "starts that come to nothing": (
        9,
        [(0.0, 0.0), *[(None, float(n)) for n in range(1, MAX_FAILED_STARTS + 1)]],
        None,
    ),
    "ends soon after each start": (3, [(10.0 * n, 10.0 * n + 1.0) for n in range(4)], None),
    "a minute of work each time": (1, [(100.0 * n, 100.0 * n + MIN_UPTIME) for n in range(5)], MIN_PAUSE),
}
"""Limit of deaths in a row, times of readiness and death of each life, and the pause after the last death."""


@pytest.mark.parametrize(("most", "lives", "last"), LIVES.values(), ids=LIVES)
def test_a_process_is_given_up_when_its_starts_come_to_nothing(most, lives, last) -> None:
    restarts, pauses = Restarts(most=most), []
    for ready, died in lives:
        if ready is not None:
            restarts.ready(ready)
        pauses.append(restarts.died(died))
    assert None not in pauses[:-1] and pauses[-1] == last
