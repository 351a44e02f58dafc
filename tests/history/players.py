"""The processes of a trial: actors, and a learner that publishes, draws, checks every sample, and ends the run.

    python -m history.players actor ENDPOINT... --history FILE --name actor-0 --clients 5 --seed 7 --rate 6
    python -m history.players learner ENDPOINT --history FILE --every 5 --run NAME...

An actor has several clients that use every feature of a client. Processes record each action before it happens, and
each answer afterwards: after a SIGKILL, the servers hold at least the acknowledged and at most the recorded counts.
"""

import argparse
import json
import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import memoire
from memoire.client.client import Client
from memoire.errors import MemoireError
from memoire.limits import Limits
from memoire.nodes.supervision import LauncherLine
from memoire.reader.reader import Reader
from memoire.replay.rollouts import Rollouts

Event = dict[str, Any]


class Recorder:
    """Writer of events to a file, each in one write, so that recorded events survive a SIGKILL of this process.

    Args:
        by: Name of this process, such as "actor-3"; in each event.
    """

    def __init__(self, path: Path | str, by: str) -> None:
        self.by = by
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()

    def __call__(self, do: str, **facts: Any) -> float:
        """Record an event and return its time, by the clock that all processes of this machine share."""
        now = time.monotonic()
        line = json.dumps({"t": round(now, 6), "by": self.by, "do": do, **facts}, separators=(",", ":")) + "\n"
        with self._lock:
            os.write(self._file, line.encode())
        return now

    def close(self) -> None:
        os.close(self._file)


def read(folder: Path) -> list[Event]:
    """Return all events of all files in a folder, in the order of time."""
    events = []
    for path in sorted(folder.glob("*.jsonl")):
        *whole, rest = path.read_text(encoding="utf-8").split("\n")
        assert not rest, f"{path.name} ends in the middle of a line: {rest[:80]!r}"
        events += [json.loads(line) for line in whole]
    return sorted(events, key=lambda event: event["t"])


LIMITS = Limits.of(resend_after=0.2, resend_most=1.0, update_every=0.1)
"""Short intervals, so that clients repeat many requests."""
JOIN = 40.0
"""Seconds for a client to join while servers and proxies restart."""
UPDATE = 3.0
LAST = 30.0
"""Seconds for a client to deliver everything after the last fault."""
PUSH = 0.2
TOPIC = "policy"
STATS = (
    "pushed_caches", "accepted_caches", "rejected", "pushed_bytes", "received_bytes", "lost_bytes", "in_flight_bytes",
    "passed_steps", "faults",
)  # fmt: skip
OPERATIONS = {"episode": 9, "push": 5, "log": 4, "update": 2, "look": 2}


class Play:
    """One client, with the counts of its work."""

    storage = "caches"
    limits = LIMITS
    updates_last = True
    """True if the client reports to its servers before it leaves; else `close` delivers."""

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
        """Work until the run is finished or this process must end; then deliver everything and leave."""
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
        error = ""
        try:
            self.client.update(timeout)
        except MemoireError as why:
            error = repr(why)
        self.tell("updated", **facts, ok=not error, error=error, took=time.monotonic() - began, timeout=timeout)

    def look(self) -> None:
        self.see()
        stats = self.client.stats()
        self.tell("stats", **{name: getattr(stats, name) for name in STATS})

    def see(self) -> str:
        """Record and return the newest model's content."""
        newest = self.policy.newest()
        if newest is None:
            return ""
        self.tell("saw", content=str(newest.value)[:32], version=newest.version)
        return str(newest.value)


class RolloutPlay(Play):
    """A client that records rollouts in order: its entry t is number t, in any episode."""

    storage = "rollouts"

    def run(self) -> None:
        """Run as `Play` does, with a writer."""
        self.writer = self.client.writer(check=False)
        super().run()

    def episode(self) -> None:
        """Record an episode; steps wait for space if necessary."""
        length = self.rng.randrange(2, 30)
        self.tell("count", episodes=self.episodes + 1, steps=self.steps + length)
        for left in range(length, 0, -1):
            obs, action, reward = entry(self.tag, self.steps)
            self.writer.step(obs, action, reward, left == 1, False, entry(self.tag, self.steps + 1)[0])
            self.steps += 1
        self.episodes += 1

    def push(self) -> None:
        """Do nothing: fragments are sent when steps fill them and when episodes end."""


PLAYS = {play.storage: play for play in (Play, RolloutPlay)}


def entry(tag: int, number: int) -> tuple[np.ndarray, ...]:
    """Return an entry that `is_whole` can recognise."""
    obs = np.array([tag, number, (tag * 31 + number) % (1 << 20), 1], np.float32)
    return obs, np.int32(number), np.float32(number % 7)


PUBLISH_BATCHES = 0.3
PAUSE = 0.05
TAKEN = 64
"""Entries of rollouts that are taken at once."""
DRAINED = 2.0
"""Seconds for which takes go on after the last fault."""


def is_whole(batch: object) -> np.ndarray:
    """Return for each sample whether all its parts are of one entry, and its next state of the following entry. [B]"""
    obs, next_obs = np.asarray(batch["obs"]), np.asarray(batch["next_obs"])
    tag, number = obs[:, 0].astype(int), obs[:, 1].astype(int)
    fits = (obs[:, 2] == (tag * 31 + number) % (1 << 20)) & (obs[:, 3] == 1)
    fits &= np.asarray(batch["action"]) == number
    goes_on = np.asarray(batch["discount"]) > 0  # a terminal step has no next state
    return fits & (~goes_on | ((next_obs[:, 0] == tag) & (next_obs[:, 1] == number + 1)))


def publish(reader: Reader, record: Recorder, number: int, last: bool = False) -> bool:
    content = f"{number} last" if last else str(number)
    record("publish", number=number, last=last)
    try:
        version = reader.publish(TOPIC, content, timeout=2.0)
    except MemoireError as error:
        record("published", number=number, ok=False, error=repr(error))
        return False
    record("published", number=number, ok=True, version=version)
    return True


def draw(reader: Reader, record: Recorder) -> None:
    try:
        batch = reader.get_batch(16, timeout=0.1)
    except MemoireError as error:
        record("drew", samples=0, error=type(error).__name__)
        return
    obs = np.asarray(batch["obs"]).astype(int)
    newest: dict[int, int] = {}
    for tag, number in obs[:, :2].tolist():
        newest[tag] = max(newest.get(tag, 0), number)
    torn = int((~is_whole(batch)).sum())
    batch.update_priorities(np.full(len(obs), 0.5))
    record("drew", samples=len(obs), torn=torn, newest={str(tag): number for tag, number in newest.items()})


def torn_entries(rollouts: Rollouts) -> int:
    """Return the number of entries with a part of another one, or without their successor behind them."""
    obs, action = np.asarray(rollouts["obs"]).astype(int), np.asarray(rollouts["action"])
    tag, number = obs[:, 0], obs[:, 1]
    fits = (obs[:, 2] == (tag * 31 + number) % (1 << 20)) & (obs[:, 3] == 1) & (action == number)
    ends = np.cumsum(rollouts.lengths)
    after = np.append(obs[1:, :2], [[0, 0]], axis=0)  # [N, 2] tag and number of the following state
    after[ends - 1] = np.asarray(rollouts.final["obs"])[:, :2].astype(int)
    terminal = np.zeros(len(obs), bool)
    terminal[ends - 1] = rollouts.terminated  # a terminal step has no next state
    fits &= terminal | ((after[:, 0] == tag) & (after[:, 1] == number + 1))
    return int((~fits).sum())


def take(reader: Reader, record: Recorder) -> None:
    try:
        rollouts = reader.take(TAKEN, timeout=0.1)
    except MemoireError as error:
        record("took", samples=0, error=str(error))
        return
    entries: dict[int, list[int]] = {}
    for tag, number in np.asarray(rollouts["obs"]).astype(int)[:, :2].tolist():
        entries.setdefault(tag, []).append(number)
    facts = {"entries": {str(tag): numbers for tag, numbers in entries.items()}, "torn": torn_entries(rollouts)}
    record("took", samples=len(rollouts), **facts)


def drain(reader: Reader, record: Recorder) -> None:
    """Take all entries that were held at this moment, and later ones: servers hand entries out in order."""
    until = time.monotonic() + DRAINED
    while time.monotonic() < until:
        take(reader, record)


USES = {"caches": draw, "rollouts": take}


def begin_run(reader: Reader, record: Recorder, name: str) -> None:
    """Begin a run on all servers, in spite of kills."""
    deadline = time.monotonic() + LAST
    while True:
        record("run", name=name)
        try:
            reader.begin_run(name, timeout=2.0)
        except MemoireError as error:
            record("begun", name=name, ok=False, error=repr(error))
            if time.monotonic() > deadline:
                raise
        else:
            record("begun", name=name, ok=True)
            return


def ask_totals(reader: Reader, record: Recorder, runs: Sequence[str], seconds: float) -> None:
    """Record the totals of each run that a remote reader receives from all servers."""
    for run in runs:
        until = time.monotonic() + seconds
        while (answer := reader.totals(run, seconds)).missing and time.monotonic() < until:
            time.sleep(1.0)  # a proxy retries a disconnected server every few seconds
        totals = {"episodes": answer.totals.episodes, "steps": answer.totals.steps}
        record("totals", run=run, missing=sorted(answer.missing), **totals)


def learn(
    line: Any, reader: Reader, record: Recorder, runs: Sequence[str], every: float, storage: str, pause: float = PAUSE
) -> None:
    """Publish models and use samples until the line ends the trial; then end the run.

    Args:
        line: Source of orders: `wait(seconds)` returns False for an order, and `stopping` is True if it is to end.
        runs: Runs to begin, one after the other.
        every: Seconds for each run.
        storage: Storage of the servers' table.
        pause: Seconds between two draws or takes.
    """
    number, due, began = 0, 0.0, time.monotonic()
    left = list(enumerate(runs, start=1))
    while line.wait(pause):
        if left and time.monotonic() >= began + left[0][0] * every:
            begin_run(reader, record, left.pop(0)[1])
        if time.monotonic() >= due:
            due = time.monotonic() + PUBLISH_BATCHES
            number += 1
            publish(reader, record, number)
        USES[storage](reader, record)
    if line.stopping:
        return
    if storage == "rollouts":
        drain(reader, record)
    for _, name in left:
        begin_run(reader, record, name)
    deadline = time.monotonic() + LAST
    while time.monotonic() < deadline:
        number += 1
        if publish(reader, record, number, last=True):
            break
    reader.finish(LAST)
    record("finished")


def act(args: argparse.Namespace) -> int:
    record, stop = Recorder(args.history, args.name), threading.Event()
    failed = []

    def play(number: int) -> None:
        try:
            endpoint = args.endpoints[number % len(args.endpoints)]
            Play(record, endpoint, f"{args.seed}/{number}", args.rate, stop).run()
        except Exception as error:
            failed.append(error)
            record("failed", error=repr(error))
            raise

    with LauncherLine() as tether:
        threads = [threading.Thread(target=play, args=(number,), daemon=True) for number in range(args.clients)]
        for each in threads:
            each.start()
        tether.ready()
        while any(each.is_alive() for each in threads):
            if not stop.is_set() and not tether.wait(0.2):
                stop.set()
            elif stop.is_set():
                threads[0].join(0.2)
    return 1 if failed else 0


def lead(args: argparse.Namespace) -> int:
    record = Recorder(args.history, "learner-0")
    with LauncherLine() as tether, Reader(args.endpoints, timeout=LAST, seed=0, limits=LIMITS) as reader:
        tether.ready()
        learn(tether, reader, record, args.run, args.every, "caches")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("actor", "learner"))
    parser.add_argument("endpoints", nargs="+")
    parser.add_argument("--history", required=True)
    parser.add_argument("--name")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--seed", default="")
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--run", action="append", default=[], help="runs to begin, one after the other")
    parser.add_argument("--every", type=float, default=0.0, help="seconds for each run")
    args = parser.parse_args()
    return act(args) if args.role == "actor" else lead(args)


if __name__ == "__main__":
    sys.exit(main())
