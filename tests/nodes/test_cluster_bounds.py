"""Processes of a cluster at their bounds: when a goal is reached, which counts make a cluster, what is closed at the end."""

import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from memoire.cli import doctor
from memoire.errors import ParameterError
from memoire.nodes import local as local_cluster
from memoire.nodes.http import REQUEST_TIMEOUT, NodePages
from memoire.nodes.launcher import Child, Launcher
from memoire.nodes.pages import Page
from memoire.nodes.supervision import LINE, LauncherLine, _inherited_line
from memoire.rl.demo import actor, demo


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
    ("servers", "proxies", "wrong"),
    [(1, 0, ""), (1, 1, ""), (2, 1, ""), (2, 0, "--proxies"), (0, 1, "--servers"), (1, -1, "--proxies")],
)
def test_counts_that_make_no_cluster_are_refused(servers, proxies, wrong):
    if not wrong:
        local_cluster.check_counts(servers, proxies)
    else:
        with pytest.raises(ParameterError, match=wrong):
            local_cluster.check_counts(servers, proxies)


@pytest.mark.parametrize("place", ["", ":5560", "*:5560", "host:", "host:words", "host:0", "host:65536"])
def test_an_address_without_a_host_or_port_is_told_how_one_looks(place):
    with pytest.raises(doctor.StepFailed, match="names no host and port"):
        doctor._dial_tcp(f"tcp://{place}", place, 1.0, print)


def test_an_actor_plays_as_its_command_says(monkeypatch):
    played = []
    monkeypatch.setattr(actor, "play", lambda *given, **named: played.append((given, named)) or 7)
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
import sys
from memoire.nodes import supervision
supervision._signal_with_parent = lambda number: sys.argv[1] == "True"
with supervision.LauncherLine() as line:
    line.wait(60.0)
    print(line.stopping, line.finishing)
"""


@pytest.mark.parametrize(("launcher_lives", "words"), [(True, "False True"), (False, "True False")])
def test_a_child_whose_launcher_died_before_it_began_ends(launcher_lives, words):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b'{"order": "finish"}\n' if launcher_lives else b"")
        done = subprocess.run(
            [sys.executable, "-c", LAUNCHED, str(launcher_lives)],
            env={**os.environ, LINE: str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
    assert (done.stdout.strip(), done.returncode) == (words, 0), done.stderr


def test_a_launcher_that_ends_closes_what_it_opened():
    with Launcher() as launcher:
        child = launcher.start("child", "this")
        assert launcher._selector.get_map() and child.line.fileno() >= 0
    assert launcher._selector.get_map() is None
    assert child.line.fileno() == -1 and child.process.stdout.closed and child.process.poll() is not None
    assert "Zen of Python" in " ".join(child.tail) or child.process.returncode < 0


def test_what_a_child_printed_last_is_kept():
    with Launcher() as launcher:
        child = launcher.start("child", "this")
        deadline = time.monotonic() + 60.0
        while launcher.pump(0.1) is not None and child.process.poll() is None and time.monotonic() < deadline:
            pass
        for _ in range(3):
            launcher.pump(0.1)
        assert any("Zen of Python" in line for line in child.tail)


def test_pages_end_their_threads_at_once():
    before = set(threading.enumerate())
    pages = NodePages("127.0.0.1:0", pages={"/livez": lambda query: Page(200, b"yes")})
    began = time.monotonic()
    pages.close()
    assert not set(threading.enumerate()) - before and time.monotonic() - began < REQUEST_TIMEOUT


def test_bytes_are_received_as_they_come():
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            for piece in (b"ab", b"c"):
                theirs.sendall(piece)
            assert doctor._receive(ours, 3, bytearray()) == b"abc"
            assert doctor._receive(ours, 2, bytearray(b"xy")) == b"xy"
        with pytest.raises(EOFError):
            doctor._receive(ours, 1, bytearray())
