"""Actors in processes of their own: one is killed, one is stopped, and the others go on at once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import memoire
import policy_child

CHILD = Path(policy_child.__file__)
ACTORS = 4


def function(columns):
    return {"value": columns["obs"].sum(1)}


@pytest.fixture
def start():
    made = []

    def begin(*urls, rows=1):
        words = [sys.executable, str(CHILD), str(rows), *urls]
        made.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        return made[-1]

    yield begin
    for child in made:
        child.kill()
        child.wait(10)
        child.stdout.close()


def answers(child, count):
    """Read so many answers of a child; every one is right."""
    found = {child.stdout.readline() for _ in range(count)}
    assert found == {"answer\n"}, found


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_others_go_on_when_an_actor_ends_or_stops(start, end):
    with memoire.Inference("tcp://127.0.0.1:0", policy_child.INPUTS, policy_child.OUTPUTS, function) as node:
        children = [start(node.endpoint) for _ in range(ACTORS)]
        for child in children:
            answers(child, 20)
        os.kill(children[0].pid, end)
        for child in children[1:]:
            answers(child, 200)
        deadline = time.monotonic() + 10.0
        while node.stats().clients >= ACTORS:
            assert time.monotonic() < deadline
            answers(children[1], 1)
        for child in children[1:]:
            answers(child, 100)
        stats = node.stats()
        assert stats.failures == stats.faults == 0 and stats.refused == {}
        assert stats.batches["everyone"] > 0


def test_actors_move_when_their_node_is_killed_and_come_back(start):
    words = [sys.executable, "-c", NODE]
    nodes, urls = [], []
    try:
        for _ in range(2):
            nodes.append(subprocess.Popen([*words, "tcp://127.0.0.1:0"], stdout=subprocess.PIPE, text=True))
            urls.append(nodes[-1].stdout.readline().strip())
        with memoire.RemotePolicy(urls, policy_child.INPUTS, policy_child.OUTPUTS, 20.0) as policy:
            obs = {"obs": np.float32([[1, 2]])}
            assert policy.act(obs)["value"][0] == 3
            own = urls.index(policy.urls[0])
            nodes[own].kill()
            nodes[own].wait(10)
            child = start(*urls)
            began = time.monotonic()
            assert policy.act(obs)["value"][0] == 3 and time.monotonic() - began < 5.0
            answers(child, 20)
            nodes[own].stdout.close()
            nodes[own] = subprocess.Popen([*words, urls[own]], stdout=subprocess.PIPE, text=True)
            assert nodes[own].stdout.readline().strip() == urls[own]
            nodes[1 - own].send_signal(signal.SIGSTOP)
            assert policy.act(obs)["value"][0] == 3
    finally:
        for node in nodes:
            node.kill()
            node.wait(10)
            node.stdout.close()


NODE = """
import sys, numpy as np, memoire
function = lambda columns: {"value": columns["obs"].sum(1)}
inputs, outputs = {"obs": (np.float32, (2,))}, {"value": np.float32}
with memoire.Inference(sys.argv[1], inputs, outputs, function) as node:
    print(node.endpoint, flush=True)
    node.wait(60)
"""
