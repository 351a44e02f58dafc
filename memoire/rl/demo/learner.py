"""Learner of the demo: reads batches over the network, learns, updates priorities, and publishes its network.

    python -m memoire.rl.demo.learner tcp://proxy:5560 --actions 2

The program is an example of your own learners: a `Reader`, a loop over its batches, `update_priorities`, `publish`.
"""

import argparse
import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from memoire import Reader
from memoire.errors import Closed, MemoireError, MemoireTimeout
from memoire.launching import LauncherLine
from memoire.nodes.http import NodePages
from memoire.rl import weights

from .actor import POLICY
from .qlearning import DoubleQ

PUBLISH_BATCHES = 5
"""Batches between two published versions: if actors lag 40 batches, they balance the pole for half as long."""
SAVE_INTERVAL = 5.0
"""Seconds between two checkpoints of the network."""
REPORT_INTERVAL = 0.25
"""Seconds between two reports to the launcher."""
STARVED_TIMEOUT = 120.0
"""Default of the seconds without a batch after which the learner gives up."""


class LearnerMeter:
    """Figures of the learner for its launcher: counts since the start, and rates since the last report.

    Args:
        clock: Function that returns a monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.batches = 0
        self.samples = 0
        self._age = self._error = self._waited = 0.0
        self._since = clock()
        self._taken = 0

    def add(self, age: float, error: float, waited: float, samples: int) -> None:
        """Record a batch: mean age of its samples in seconds, mean absolute error, seconds waited, samples."""
        self.batches += 1
        self.samples += samples
        self._taken += 1
        self._age += age
        self._error += error
        self._waited += waited

    def read_and_reset(self) -> dict[str, float]:
        """Return all figures, and reset those since the last report."""
        now = self._clock()
        span, count = now - self._since, max(1, self._taken)
        facts = {
            "batches": self.batches,
            "samples": self.samples,
            "batch_rate": self._taken / span if span else 0.0,
            "waiting": self._waited / span if span else 0.0,
            "age": self._age / count,
            "error": self._error / count,
        }
        self._since, self._taken, self._age, self._error, self._waited = now, 0, 0.0, 0.0, 0.0
        return facts


def learn(
    endpoint: str,
    actions: int,
    *,
    seed: int,
    patience: float = STARVED_TIMEOUT,
    checkpoint: Path | None = None,
    keys: str | None = None,
) -> int:
    """Learn until the launcher ends the run, and return the exit status 0.

    Args:
        patience: Seconds to wait for the cluster, and for each batch.
        checkpoint: File for the network, which a restarted learner loads.
    """
    with (
        LauncherLine() as line,
        NodePages.from_environment() as pages,
        Reader([endpoint], seed=seed, keys=keys, timeout=patience) as reader,
    ):
        pages.show(reader)
        inputs = math.prod(reader.schema["obs"].shape)
        learner, meter = DoubleQ(inputs, actions, seed=seed), LearnerMeter()
        if checkpoint is not None and checkpoint.exists():
            learner.network.load(weights.load(checkpoint)[POLICY].tobytes())
        version = reader.publish(POLICY, learner.network.to_bytes())
        report_at = saved_at = time.monotonic()
        line.ready(reader=reader.stats().reader)
        threading.Thread(target=_end_run, args=(line, reader), name="memoire-end", daemon=True).start()
        asked_at = time.monotonic()
        with contextlib.suppress(Closed):  # the thread may close the reader at any time
            for batch in reader.batches(learner.settings.batch_size, timeout=patience):
                now = time.monotonic()
                errors = learner.learn(batch)
                batch.update_priorities(errors)
                meter.add(float(batch["age"].mean()), float(np.abs(errors).mean()), now - asked_at, len(errors))
                if meter.batches % PUBLISH_BATCHES == 0:
                    # After an outage, the cluster gets the next version.
                    with contextlib.suppress(MemoireTimeout):
                        version = reader.publish(POLICY, learner.network.to_bytes())
                if now >= report_at:
                    reading = meter.read_and_reset()
                    reader.scalars({"td_error": reading["error"], "batches_per_second": reading["batch_rate"]})
                    line.report(version=version, **reading)
                    report_at = now + REPORT_INTERVAL
                if checkpoint is not None and now >= saved_at + SAVE_INTERVAL:
                    weights.save(checkpoint, {POLICY: learner.network.vector})
                    saved_at = now
                asked_at = time.monotonic()
        line.report(version=version, **meter.read_and_reset())
        if checkpoint is not None:
            weights.save(checkpoint, {POLICY: learner.network.vector})
    return 0


def _end_run(line: LauncherLine, reader: Reader) -> None:
    """Wait for the launcher, then finish the run or close the reader, which ends the loop over batches (a thread)."""
    while line.wait(60.0):
        pass
    try:
        if line.finishing:
            reader.finish()
        else:
            reader.close()
    except MemoireError as error:
        print(f"the run could not be finished: {error}", file=sys.stderr)
        reader.close()


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, run a learner, and return the exit status."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m memoire.rl.demo.learner", description=about)
    parser.add_argument("endpoint", help="address of a server or proxy")
    parser.add_argument("--actions", type=int, required=True, help="number of actions of the environment")
    parser.add_argument("--seed", type=int, default=0, help="seed of the network and of the draws")
    text = "wait for the cluster, and for each batch"
    parser.add_argument("--patience", type=float, default=STARVED_TIMEOUT, metavar="SECONDS", help=text)
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="file for the network, loaded after a restart")
    parser.add_argument("--keys", metavar="FOLDER", help="keys of this process (default: $MEMOIRE_KEYS)")
    return learn(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
