"""The demo's learner: reads batches over the network, learns, tells priorities, and publishes the network.

    python -m memoire.rl.demo.learner tcp://proxy:5560 --actions 2

Written like a learner of your own would be: a `Reader`, a loop over its batches, `update_priorities`, `publish`.
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
"""Batches between two versions of the network: with actors 40 batches behind, the pole is balanced for half as long."""
SAVE_INTERVAL = 5.0
"""Seconds between two times that the network is saved, where there is a file for it."""
REPORT_INTERVAL = 0.25
"""Seconds between two reports to the launcher."""
STARVED_TIMEOUT = 120.0
"""Seconds without a batch after which the learner gives up, unless it is told otherwise."""


class LearnerMeter:
    """What a launcher shows of the learner: counts since the start, and shares of the time since the last report.

    Args:
        clock: Seconds, of which only differences count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.batches = 0
        self.samples = 0
        self._age = self._error = self._waited = 0.0
        self._since = clock()
        self._taken = 0

    def took(self, age: float, error: float, waited: float, samples: int) -> None:
        """Count a batch: mean age of its samples in seconds, mean size of its errors, seconds waited for it."""
        self.batches += 1
        self.samples += samples
        self._taken += 1
        self._age += age
        self._error += error
        self._waited += waited

    def reading(self) -> dict[str, float]:
        """All figures; begins the next stretch."""
        now = self._clock()
        span, taken = now - self._since, max(1, self._taken)
        facts = {
            "batches": self.batches,
            "samples": self.samples,
            "batch_rate": self._taken / span if span else 0.0,
            "waiting": self._waited / span if span else 0.0,
            "age": self._age / taken,
            "error": self._error / taken,
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
    """Learn until the launcher says that it is enough, then end the run for everybody; the exit status.

    Args:
        patience: Seconds to wait for the cluster, and for each batch.
        checkpoint: File that keeps the network over a restart.
    """
    with (
        LauncherLine() as tether,
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
        tether.ready(reader=reader.stats().reader)
        threading.Thread(target=_end, args=(tether, reader), name="memoire-end", daemon=True).start()
        asked_at = time.monotonic()
        with contextlib.suppress(Closed):  # the launcher may be gone at any moment
            for batch in reader.batches(learner.settings.batch_size, timeout=patience):
                now = time.monotonic()
                errors = learner.learn(batch)
                batch.update_priorities(errors)
                meter.took(float(batch["age"].mean()), float(np.abs(errors).mean()), now - asked_at, len(errors))
                if meter.batches % PUBLISH_BATCHES == 0:
                    # A cluster that is away for a moment gets the newest network when it is back.
                    with contextlib.suppress(MemoireTimeout):
                        version = reader.publish(POLICY, learner.network.to_bytes())
                if now >= report_at:
                    reading = meter.reading()
                    reader.scalars({"td_error": reading["error"], "batches_per_second": reading["batch_rate"]})
                    tether.report(version=version, **reading)
                    report_at = now + REPORT_INTERVAL
                if checkpoint is not None and now >= saved_at + SAVE_INTERVAL:
                    weights.save(checkpoint, {POLICY: learner.network.vector})
                    saved_at = now
                asked_at = time.monotonic()
        tether.report(version=version, **meter.reading())
        if checkpoint is not None:
            weights.save(checkpoint, {POLICY: learner.network.vector})
    return 0


def _end(tether: LauncherLine, reader: Reader) -> None:
    """Thread: once the launcher says so, end the run, or at least this reader; either ends the loop over batches."""
    while tether.wait(60.0):
        pass
    try:
        if tether.finishing:
            reader.finish()
        else:
            reader.close()
    except MemoireError as error:
        print(f"the run could not be ended: {error}", file=sys.stderr)
        reader.close()


def main(arguments: list[str] | None = None) -> int:
    """Run a learner from the command line."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m memoire.rl.demo.learner", description=about)
    parser.add_argument("endpoint", help="address of a server or proxy")
    parser.add_argument("--actions", type=int, required=True, help="number of actions of the environment")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--patience", type=float, default=STARVED_TIMEOUT, metavar="SECONDS", help="for the cluster, and for each batch"
    )
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="keeps the network over a restart")
    parser.add_argument("--keys", metavar="FOLDER", help="keys of this process (default: $MEMOIRE_KEYS)")
    return learn(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
