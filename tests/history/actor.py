"""A process with several clients that do everything an actor does, and write down what they did and were told.

    python -m history.actor ENDPOINT... --history FILE --name actor-0 --clients 5 --seed 7 --rate 6

A client's history says what it is about to count before it counts it: after a SIGKILL, what the servers hold lies
between what they acknowledged and that.
"""

import argparse
import random
import sys
import threading
import time

import numpy as np

import memoire
from memoire.client.client import Client
from memoire.errors import MemoireError
from memoire.limits import Limits
from memoire.nodes.supervision import LauncherLine

from .plants import plant
from .record import Recorder

LIMITS = Limits(resend_after=0.2, resend_most=1.0, update_every=0.1)
"""Impatient, so that much is sent twice."""
JOIN = 40.0
"""Seconds that a client has to get in, while servers and proxies go down and up."""
UPDATE = 3.0
LAST = 30.0
"""Seconds that a client has to deliver everything, once all is healed."""
PUSH = 0.2
TOPIC = "policy"
OPERATIONS = {"episode": 9, "push": 5, "log": 4, "update": 2, "look": 2}


class Play:
    """One client and what it did so far."""

    storage = "caches"
    limits = LIMITS
    updates_last = True
    """Whether it waits for its servers before it leaves; else leaving has to."""

    def __init__(self, record: Recorder, endpoint: str, seed: str, rate: float, stop: threading.Event) -> None:
        self.record, self.rate, self.stop = record, rate, stop
        self.rng = random.Random(seed)
        self.episodes = self.steps = self.lines = self.operations = 0
        self.tag = self.rng.randrange(1 << 16)
        began = time.monotonic()
        self.client: Client = memoire.connect(
            endpoint, seed=self.rng.randrange(1 << 30), capacity=1000, timeout=JOIN, limits=self.limits
        )
        self.id = self.client.client_id.hex()
        facts = {"home": self.client.home, "tag": self.tag, "storage": self.storage}
        self.tell("join", took=time.monotonic() - began, **facts)
        self.policy = self.client.model(TOPIC)

    def tell(self, do: str, **facts: object) -> float:
        return self.record(do, client=self.id, **facts)

    def run(self) -> None:
        """Work until the run is finished, or this process has to end; then deliver everything and leave."""
        chosen = list(OPERATIONS), list(OPERATIONS.values())
        while not (self.client.finished or self.stop.is_set()):
            getattr(self, self.rng.choices(*chosen)[0])()
            self.stop.wait(self.rng.expovariate(self.rate))
        if self.client.finished:
            self.await_last_model()
        if self.updates_last:
            self.update(LAST)
        self.look()
        began = time.monotonic()
        delivered = self.client.close(LAST)
        facts = {"episodes": self.episodes, "steps": self.steps, "lines": self.lines}
        self.tell("left", delivered=delivered, finished=not self.stop.is_set(), took=time.monotonic() - began, **facts)

    def await_last_model(self) -> None:
        deadline = time.monotonic() + LAST
        while not self.see().endswith("last") and time.monotonic() < deadline:
            try:
                self.policy.wait(1.0, after=self.policy.version)
            except MemoireError:
                continue

    def episode(self) -> None:
        """Record an episode: entry t holds its client's tag, t, and a number that follows from both."""
        length = self.rng.randrange(2, 30)
        self.tell("count", episodes=self.episodes + 1, steps=self.steps + length)
        memory, first = self.client.memory, self.steps
        memory.open()
        for number in range(first, first + length):
            memory.add(0, entry(self.tag, number))
        memory.close(terminated=True)
        self.client.on_entries(length)
        self.steps += length
        self.client.on_episode(0, length, 1.0)
        self.episodes += 1

    def push(self) -> None:
        """Push a cache."""
        began = time.monotonic()
        pushed = self.client.push_cache(timeout=PUSH)
        self.tell("push", ok=pushed, reason=self.client.push_reason, took=time.monotonic() - began, timeout=PUSH)

    def log(self) -> None:
        self.lines += 1
        began = self.tell("log", number=self.lines)
        taken = self.client.log(f"{self.id} {self.lines}")
        self.tell("logged", number=self.lines, ok=taken is not False, took=time.monotonic() - began, timeout=1.0)

    def update(self, timeout: float = UPDATE) -> None:
        self.operations += 1
        facts = {"op": self.operations, "episodes": self.episodes, "steps": self.steps, "lines": self.lines}
        began = self.tell("update", **facts)
        try:
            self.client.update(timeout)
        except MemoireError as error:
            self.tell("updated", **facts, ok=False, error=repr(error), took=time.monotonic() - began, timeout=timeout)
        else:
            self.tell("updated", **facts, ok=True, took=time.monotonic() - began, timeout=timeout)

    def look(self) -> None:
        self.see()
        stats = self.client.stats()
        self.tell(
            "stats",
            home=stats.home,
            pushed_caches=stats.pushed_caches,
            accepted_caches=stats.accepted_caches,
            rejected=stats.rejected,
            pushed=stats.pushed_bytes,
            received=stats.received_bytes,
            lost=stats.lost_bytes,
            in_flight=stats.in_flight_bytes,
            passed=stats.passed_steps,
            faults=stats.faults,
            refused=stats.refused,
        )

    def see(self) -> str:
        """The newest model's content, written down."""
        newest = self.policy.newest()
        if newest is None:
            return ""
        self.tell("saw", content=str(newest.value)[:32], version=newest.version)
        return str(newest.value)


class RolloutPlay(Play):
    """One that records rollouts, in order: entry t of its client is number t, whatever episodes they are in."""

    storage = "rollouts"

    def run(self) -> None:
        """The same, by a writer."""
        self.writer = self.client.writer(check=False)
        super().run()

    def episode(self) -> None:
        """Record an episode, and wait for room where there is none."""
        length = self.rng.randrange(2, 30)
        self.tell("count", episodes=self.episodes + 1, steps=self.steps + length)
        for left in range(length, 0, -1):
            obs, action, reward = entry(self.tag, self.steps)
            self.writer.step(obs, action, reward, left == 1, False, entry(self.tag, self.steps + 1)[0])
            self.steps += 1
        self.episodes += 1

    def push(self) -> None:
        """Nothing: fragments are sent at the steps that fill them, and where episodes end."""


PLAYS = {play.storage: play for play in (Play, RolloutPlay)}


def entry(tag: int, number: int) -> tuple[np.ndarray, ...]:
    """What `learner.is_whole` can recognise."""
    obs = np.array([tag, number, (tag * 31 + number) % (1 << 20), 1], np.float32)
    return obs, np.int32(number), np.float32(number % 7)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoints", nargs="+")
    parser.add_argument("--history", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--storage", choices=PLAYS, required=True)
    given = parser.parse_args()
    plant()
    record, stop = Recorder(given.history, given.name), threading.Event()
    failed = []

    def play(number: int) -> None:
        try:
            endpoint = given.endpoints[number % len(given.endpoints)]
            PLAYS[given.storage](record, endpoint, f"{given.seed}/{number}", given.rate, stop).run()
        except Exception as error:
            failed.append(error)
            record("failed", error=repr(error))
            raise

    with LauncherLine() as tether:
        threads = [threading.Thread(target=play, args=(number,), daemon=True) for number in range(given.clients)]
        for each in threads:
            each.start()
        tether.ready()
        while any(each.is_alive() for each in threads):
            if not stop.is_set() and not tether.wait(0.2):
                stop.set()
            elif stop.is_set():
                threads[0].join(0.2)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
