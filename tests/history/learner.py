"""The learner of a trial: publishes numbered models, draws batches and looks at every sample, and ends the run.

python -m history.learner ENDPOINT --history FILE
"""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from memoire.errors import MemoireError
from memoire.nodes.supervision import LauncherLine
from memoire.reader.reader import Reader
from memoire.replay.rollouts import Rollouts

from .actor import LAST, LIMITS, TOPIC
from .plants import plant
from .record import Recorder

PUBLISH_BATCHES = 0.3
PAUSE = 0.05
TAKEN = 64
"""Entries of rollouts that are taken at once."""
DRAINED = 2.0
"""Seconds for which takes go on after the last fault."""


def is_whole(batch: object) -> np.ndarray:
    """For each sample whether all its parts are of one entry, and its next state of the entry after it. [B]"""
    obs, next_obs = np.asarray(batch["obs"]), np.asarray(batch["next_obs"])
    tag, number = obs[:, 0].astype(int), obs[:, 1].astype(int)
    fits = (obs[:, 2] == (tag * 31 + number) % (1 << 20)) & (obs[:, 3] == 1)
    fits &= np.asarray(batch["action"]) == number
    goes_on = np.asarray(batch["discount"]) > 0  # where an episode terminated, nobody recorded a state after it
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
    """Entries of which a part is of another one, or which are not where they were recorded: one behind the other."""
    obs, action = np.asarray(rollouts["obs"]).astype(int), np.asarray(rollouts["action"])
    tag, number = obs[:, 0], obs[:, 1]
    fits = (obs[:, 2] == (tag * 31 + number) % (1 << 20)) & (obs[:, 3] == 1) & (action == number)
    ends = np.cumsum(rollouts.lengths)
    after = np.append(obs[1:, :2], [[0, 0]], axis=0)  # [N, 2] tag and number of the state that follows
    after[ends - 1] = np.asarray(rollouts.final["obs"])[:, :2].astype(int)
    terminal = np.zeros(len(obs), bool)
    terminal[ends - 1] = rollouts.terminated  # nobody recorded a state after it
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
    """Take what was held at this moment, and more: what came before is handed out before what comes now."""
    until = time.monotonic() + DRAINED
    while time.monotonic() < until:
        take(reader, record)


USES = {"caches": draw, "rollouts": take}


def begin_run(reader: Reader, record: Recorder, name: str) -> None:
    """Begin it everywhere, however often servers are killed meanwhile."""
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


class Line(Protocol):
    """By whom the learner is told to finish, or to end."""

    stopping: bool

    def wait(self, seconds: float) -> bool:
        """Wait so long; False once it is to finish or to end."""


def learn(
    line: Line, reader: Reader, record: Recorder, runs: Sequence[str], every: float, storage: str, pause: float = PAUSE
) -> None:
    """Publish, and use what comes, until the line says that it is over; then end the run.

    Args:
        runs: To begin, one after the other.
        every: Seconds for each of them.
        storage: Of the servers' table.
        pause: Seconds between two uses of what came.
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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("--history", required=True)
    parser.add_argument("--run", action="append", default=[], help="runs to begin, one after the other")
    parser.add_argument("--every", type=float, default=0.0, help="seconds for each run")
    parser.add_argument("--storage", choices=USES, required=True)
    given = parser.parse_args()
    plant()
    record = Recorder(given.history, "learner-0")
    with LauncherLine() as tether, Reader([given.endpoint], timeout=LAST, seed=0, limits=LIMITS) as reader:
        tether.ready()
        learn(tether, reader, record, given.run, given.every, given.storage)
    return 0


if __name__ == "__main__":
    sys.exit(main())
