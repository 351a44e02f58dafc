"""Programs of a trial on a cluster, in memoire's own image: light actors and a learner that report all they do.

    python3 played.py actor --rate 5        episodes a second, of 20 steps each
    python3 played.py learner --rate 10     batches a second

Each program prints a report, a line of JSON, about once a second. An actor also announces a limit of its counts NOTICE
seconds before it may reach more. If it is lost with its node, its counts lie between the confirmed ones and this limit.
An actor that ends in order repeats its last report, so that a reader cannot miss it.
"""

import argparse
import collections
import contextlib
import json
import os
import signal
import threading
import time

import numpy as np

import memoire
from memoire.errors import MemoireError

STEPS = 20  # steps of an episode
NOTICE = 10.0
"""Seconds between the announcement of a limit and its use, so that the line is read by then."""
LAST_REPORTS = 6.0
"""Seconds for which the last report is repeated."""
PATIENCE = 300.0
"""Seconds to connect, and for the last counts to be confirmed, while the cluster is broken."""

stop = threading.Event()  # set by SIGTERM


def say(**facts):
    print(json.dumps(facts), flush=True)


class Actor:
    """A client that plays at a steady rate, reports its counts in a thread, and stays below the announced limit."""

    def __init__(self, client, rate):
        self.client, self.rate = client, rate
        self.size = int(np.prod(client.schema["obs"].shape))
        self.writer = client.writer()
        self.episodes = 0
        self.confirmed = (0, 0)
        """Episodes and steps that the cluster has confirmed."""
        self.announced = collections.deque()
        """(time, episodes) of each announced limit."""

    def play(self):
        """Play episodes until SIGTERM or the end of the run."""
        threading.Thread(target=self.tell, daemon=True).start()
        allowed = 0
        while not (stop.wait(1.0 / self.rate) or self.client.finished):
            now = time.monotonic()
            while self.announced and self.announced[0][0] <= now - NOTICE:
                allowed = self.announced.popleft()[1]
            if self.episodes < allowed:
                self.episode()

    def episode(self):
        obs = np.zeros(self.size, np.float32)
        self.episodes += 1
        for step in range(STEPS):
            after = np.full(self.size, step + 1, np.float32)
            self.writer.step(obs, step % 2, 1.0, step == STEPS - 1, False, after)
            obs = after

    def tell(self):
        """Report counts, limit and confirmed counts once a second. Runs in a thread."""
        while True:
            most = int(self.episodes + (2.0 * NOTICE + 2.0) * self.rate)
            self.announced.append((time.monotonic(), most))
            say(**self.words(), most=[most, most * STEPS])
            before = self.client.stats()
            with contextlib.suppress(MemoireError):
                self.client.update(timeout=1.0)
                self.confirmed = before.episodes, before.steps
            time.sleep(1.0)

    def words(self):
        stats = self.client.stats()
        return {
            "client": stats.client,
            "pod": os.uname().nodename,
            "did": [stats.episodes, stats.steps],
            "confirmed": self.confirmed,
            "caches": stats.pushed_caches,
            "settled": stats.accepted_caches + sum(stats.rejected.values()) + stats.lost_caches,
            "lost": stats.lost_caches,
        }

    def end(self):
        """Wait until everything is confirmed and settled, and print the last report several times."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with contextlib.suppress(MemoireError):
                self.client.update(timeout=2.0)
                words = self.words()
                if words["caches"] == words["settled"]:
                    break
                time.sleep(0.2)
        until = time.monotonic() + LAST_REPORTS
        while time.monotonic() < until:
            say(**self.words(), last=True)
            time.sleep(0.5)


def act(rate):
    with memoire.connect(os.environ["MEMOIRE_ENDPOINT"], timeout=PATIENCE, capacity=2000) as client:
        actor = Actor(client, rate)
        actor.play()
        actor.end()


def learn(rate):
    """Take batches at a steady rate, and report the longest wait for one."""
    with memoire.Reader([os.environ["MEMOIRE_ENDPOINT"]], timeout=PATIENCE) as reader:
        reported_at, longest, requested_at = 0.0, 0.0, time.monotonic()
        for batches, batch in enumerate(reader.batches(32, timeout=PATIENCE), 1):
            now = time.monotonic()
            longest = max(longest, now - requested_at)
            batch.update_priorities(np.ones(len(batch.ids)))
            if now > reported_at + 1.0:
                stats = reader.stats()
                say(reader=stats.reader, batches=batches, longest=round(longest, 2), at=time.time(), away=stats.away)
                reported_at, longest = now, 0.0
            if stop.wait(1.0 / rate):
                break
            requested_at = time.monotonic()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("role", choices=("actor", "learner"))
    parser.add_argument("--rate", type=float, required=True)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    {"actor": act, "learner": learn}[args.role](args.rate)


if __name__ == "__main__":
    main()
