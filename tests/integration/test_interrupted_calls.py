"""Tests of interrupted calls of a server, reader, client or policy, as by Ctrl+C: all threads go on."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memoire
from interrupts import everywhere
from memoire.limits import Limits
from netkit import QUICK, Cluster, in_thread, server_of

SCHEMA = memoire.Schema({"obs": memoire.Column("float32", (2,), "state"), "action": "int64", "reward": "float32"})
KINDS: dict[str, dict[str, Any]] = {
    "caches": {"cache_size": 8, "reuse_cache": True},
    "episodes": {"storage": "episodes", "capacity": 1000, "samples_per_insert": 1e9, "min_size": 4},
    "rollouts": {"storage": "rollouts", "capacity": 100_000, "rollout_length": 8},
}
TABLES = {f"{where}-{kind}": memoire.Table(SCHEMA, **KINDS[kind]) for kind in KINDS for where in ("near", "far")}
"""Near tables, from which the server draws, and far tables for readers, which prefetch batches of their own."""
ENDS = 20.0
"""Seconds in which a call of another thread ends."""


class Run:
    """A server with a table of each storage, an actor and a reader of each, and an inference node with a policy."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        options = {"context": cluster.context, "seed": 1, "state": folder / "state"}
        self.server = cluster.keep(server_of(cluster.address(), tables=TABLES, **options))
        self.actors = {name: cluster.client(self.server, table=name, limits=QUICK) for name in TABLES}
        self.writers = {name: actor.writer() for name, actor in self.actors.items()}
        far = [name for name in TABLES if "far" in name]
        self.readers = {name: cluster.reader([self.server], table=name, limits=QUICK) for name in far}
        self.client = self.actors["near-caches"]
        self.model = self.client.model("policy")
        self.server.publish("policy", b"first")
        self.model.wait(ENDS)
        columns = {"obs": (np.float32, (2,))}, {"action": np.int64}
        act = lambda columns, weights=None: {"action": np.arange(len(columns["obs"]))}  # noqa: E731
        self.node = cluster.keep(memoire.Inference("tcp://127.0.0.1:0", *columns, act))
        self.node.update(None, 1)
        self.policy = cluster.keep(memoire.RemotePolicy([self.node.endpoint], *columns, limits=Limits()))
        self.record(200)
        self.batch = self.server.table("near-caches").get_batch(4, ENDS)

    def record(self, steps: int) -> None:
        """Record episodes of four steps in all tables, and more where entries are drawn once."""
        for name, writer in self.writers.items():
            for step in range(20 * steps if "rollouts" in name else steps):
                obs, is_last = np.full(2, step, np.float32), step % 4 == 3
                writer.step(obs, 0, 1.0, is_last, False, obs + 1)
                if is_last:
                    writer.reset(obs + 1)
        for actor in self.actors.values():
            actor.update(ENDS)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    cluster = Cluster()
    try:
        yield Run(cluster, tmp_path_factory.mktemp("interrupted"))
    finally:
        in_thread(cluster.close)[0].join(ENDS)


CALLS: dict[str, Callable[[Run], Any]] = {
    "get_batch of caches": lambda run: run.server.table("near-caches").get_batch(4, ENDS),
    "get_batch of episodes": lambda run: run.server.table("near-episodes").get_batch(4, ENDS),
    "take": lambda run: run.server.table("near-rollouts").take(1, ENDS),
    "publish": lambda run: run.server.publish("policy", b"more"),
    "update_priorities": lambda run: run.batch.update_priorities(np.ones(4)),
    "configure": lambda run: run.server.table("near-caches").configure(min_size=2),
    "a server's stats": lambda run: run.server.stats(),
    "accounts": lambda run: run.server.accounts(),
    "search": lambda run: run.server.search(""),
    "a reader's get_batch of caches": lambda run: run.readers["far-caches"].get_batch(4, ENDS),
    "a reader's get_batch of episodes": lambda run: run.readers["far-episodes"].get_batch(4, ENDS),
    "a reader's take": lambda run: run.readers["far-rollouts"].take(1, ENDS),
    "a reader's publish": lambda run: run.readers["far-caches"].publish("other", b"more", ENDS),
    "a reader's update_priorities": lambda run: (
        run.readers["far-caches"].get_batch(4, ENDS).update_priorities(np.ones(4))
    ),
    "a reader's stats": lambda run: run.readers["far-caches"].stats(),
    "newest": lambda run: run.model.newest(),
    "wait": lambda run: run.model.wait(ENDS),
    "update": lambda run: run.client.update(ENDS),
    "a client's stats": lambda run: run.client.stats(),
    "act": lambda run: run.policy.act({"obs": np.zeros((1, 2), np.float32)}),
    "wait_version": lambda run: run.node.wait_version(1, ENDS),
}

LONG = {"a server's stats": 67, "accounts": 17}
"""Stride of interrupted lines in calls of many lines."""


@pytest.mark.parametrize("opcodes", [False, True] if "INTERRUPTED_OPCODES" in os.environ else [False])
@pytest.mark.parametrize("name", CALLS)
def test_after_a_call_that_is_interrupted_other_threads_and_this_one_go_on(run: Run, name: str, opcodes: bool) -> None:
    """INTERRUPTED_OPCODES, if set, is the stride of the interrupted opcodes."""
    call = CALLS[name]
    for interrupted in everywhere(opcodes, LONG.get(name, 1)):
        place = interrupted(lambda: call(run))
        thread, box = in_thread(call, run)
        thread.join(ENDS)
        assert "value" in box, f"interrupted at {place}, another thread's call has {box.get('error', 'no end')!r}"
        call(run)
