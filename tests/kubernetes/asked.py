"""An inference node, and actors that request actions from it: programs of tests on a cluster, in memoire's own image.

    python3 asked.py node                    acts by the newest network of the demo's learner
    python3 asked.py actor --patience 2      records episodes whose actions come from the node

An actor prints a line of JSON about once a second, with the numbers of requests and of late answers, and the longest
time of an answer.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time

import numpy as np

import memoire
from memoire.errors import MemoireError
from memoire.nodes.http import NodePages
from memoire.rl.demo.qlearning import LearningSettings, Network

INPUTS = {"obs": (np.float32, (4,))}
OUTPUTS = {"action": np.int64, "value": np.float32}
STEPS = 20  # steps of an episode
PATIENCE = 120.0
"""Seconds for a client to connect, and for the first answer."""

stop = threading.Event()  # set by SIGTERM


def function(columns, network):
    values = network(columns["obs"])
    return {"action": values.argmax(1).astype(np.int64), "value": values.max(1)}


def load(content):
    network = Network((4, *LearningSettings().hidden, 2))
    network.load(content)
    return network


def compute():
    with (
        NodePages.from_environment() as pages,
        memoire.Inference(
            os.environ["MEMOIRE_LISTEN"], INPUTS, OUTPUTS, function, load, connect=os.environ["MEMOIRE_ENDPOINT"]
        ) as node,
    ):
        pages.show(node)
        stop.wait()


class Actor:
    """A client whose actions come from the inference node.

    Args:
        patience: Seconds for one answer.
    """

    def __init__(self, client, policy, patience):
        self.client, self.policy, self.patience = client, policy, patience
        self.writer = client.writer()
        self.random = np.random.default_rng()
        self.asked = self.late = 0
        self.longest = 0.0
        self.version = 0
        self.trouble = ""

    def episode(self):
        obs = self.random.normal(size=4).astype(np.float32)
        for step in range(STEPS):
            after = self.random.normal(size=4).astype(np.float32)
            self.writer.step(obs, self.action(obs), 1.0, step == STEPS - 1, False, after, model_version=self.version)
            obs = after

    def action(self, obs):
        began = time.monotonic()
        pending = self.policy.ask({"obs": obs[None]})
        self.asked += 1
        try:
            action = int(pending.result()["action"][0])
            self.version = pending.version
        except MemoireError as error:
            self.late += 1
            self.trouble = f"{type(error).__name__}: {error}"
            action = 0
        self.longest = max(self.longest, time.monotonic() - began)
        return action

    def tell(self):
        stats = self.client.stats()
        counts = {"episodes": stats.episodes, "steps": stats.steps, "caches": stats.pushed_caches}
        asked = {"asked": self.asked, "late": self.late, "longest": round(self.longest, 3), "version": self.version}
        print(json.dumps({"client": stats.client} | counts | asked | {"trouble": self.trouble}), flush=True)


def act(patience):
    nodes = [os.environ["MEMOIRE_INFERENCE"]]
    with (
        memoire.connect(os.environ["MEMOIRE_ENDPOINT"], timeout=PATIENCE, capacity=2000) as client,
        memoire.RemotePolicy(nodes, INPUTS, OUTPUTS, patience) as policy,
    ):
        with memoire.RemotePolicy(nodes, INPUTS, OUTPUTS, PATIENCE) as first:  # the cluster is starting
            first.act({"obs": np.zeros((1, 4), np.float32)})
        actor, reported_at = Actor(client, policy, patience), 0.0
        while not stop.wait(0.02):
            actor.episode()
            if time.monotonic() > reported_at + 1.0:
                reported_at = time.monotonic()
                actor.tell()
        with contextlib.suppress(MemoireError):
            client.update(20.0)
        actor.tell()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("role", choices=("node", "actor"))
    parser.add_argument("--patience", type=float, default=2.0, help="seconds for one answer")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    if args.role == "node":
        compute()
    else:
        act(args.patience)
    return 0


if __name__ == "__main__":
    sys.exit(main())
