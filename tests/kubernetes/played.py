"""Programs of a trial on a cluster, from memoire's own image: actors and a learner that are light, and say all they do.

    python3 played.py actor --rate 5        episodes a second, of 20 steps each
    python3 played.py learner --rate 10     batches a second

Each says on a line of JSON what it has done, about once a second. An actor also says what it may do at most before its
words of NOTICE seconds from now count: after it was lost with its node, what it did lies between what it was
told is counted, and that. One that ends in order says its last words several times, until somebody must have read them.
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

STEPS = 20
"""Steps of an episode."""
NOTICE = 10.0
"""Seconds from the word that an actor may do something until it does: a line is read by then."""
GOODBYE = 6.0
"""Seconds for which the last words are repeated."""
PATIENCE = 300.0
"""Seconds to get in, and for the last words to be taken, while the cluster is broken."""

stop = threading.Event()
"""Set by SIGTERM."""


def say(**facts):
    print(json.dumps(facts), flush=True)


class Actor:
    """One client that plays at a steady rate, tells its counts beside that, and never does what it has not announced."""

    def __init__(self, client, rate):
        self.client, self.rate = client, rate
        self.size = int(np.prod(client.schema["obs"].shape))
        self.writer = client.writer()
        self.episodes = 0
        self.confirmed = (0, 0)
        """Episodes and steps that the cluster said it has."""
        self.announced = collections.deque()
        """(time, episodes) of each line that named a limit."""

    def play(self):
        """Episodes until SIGTERM or the end of the run."""
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
        """Thread: what is done, what may be done, and what the cluster has of it, once a second."""
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
        """Have everything counted and settled, and say the last words."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with contextlib.suppress(MemoireError):
                self.client.update(timeout=2.0)
                words = self.words()
                if words["caches"] == words["settled"]:
                    break
                time.sleep(0.2)
        until = time.monotonic() + GOODBYE
        while time.monotonic() < until:
            say(**self.words(), last=True)
            time.sleep(0.5)


def act(rate):
    with memoire.connect(os.environ["MEMOIRE_ENDPOINT"], timeout=PATIENCE, capacity=2000) as client:
        actor = Actor(client, rate)
        actor.play()
        actor.end()


def learn(rate):
    """Batches at a steady rate; says how long it had to wait for one at most."""
    with memoire.Reader([os.environ["MEMOIRE_ENDPOINT"]], timeout=PATIENCE) as reader:
        said, longest, asked = 0.0, 0.0, time.monotonic()
        for batches, batch in enumerate(reader.batches(32, timeout=PATIENCE), 1):
            now = time.monotonic()
            longest = max(longest, now - asked)
            batch.update_priorities(np.ones(len(batch.ids)))
            if now > said + 1.0:
                stats = reader.stats()
                say(reader=stats.reader, batches=batches, longest=round(longest, 2), at=time.time(), away=stats.away)
                said, longest = now, 0.0
            if stop.wait(1.0 / rate):
                break
            asked = time.monotonic()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("role", choices=("actor", "learner"))
    parser.add_argument("--rate", type=float, required=True)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    {"actor": act, "learner": learn}[given.role](given.rate)


if __name__ == "__main__":
    main()
