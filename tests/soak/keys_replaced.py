"""Is anything that was counted lost while every key of a cluster is replaced under load, and nothing is restarted?

Fifty clients record episodes, push caches and log lines through two proxies. Meanwhile the key of every role is
replaced, over and over, as docs/operations.md says: the new one is authorized, taken up by moving a file, and the old
one revoked. At the end the server must have every episode, step and line exactly once, and every cache is accounted.
"""

import argparse
import sys
import threading
import time
from pathlib import Path

import numpy as np
from _kit import end, folder, say, table

from memoire.client.client import connect
from memoire.errors import MemoireError
from memoire.limits import Limits
from memoire.proxy.proxy import Proxy
from memoire.replay.columns import Column
from memoire.replay.schema import Schema
from memoire.security import keys as keypairs
from memoire.security import provision as key_writer
from memoire.security import roles as permissions
from memoire.security.keys import Keys
from memoire.server.server import Server

SCHEMA = Schema({"obs": Column(np.float32, (16,), "state"), "reward": Column(np.float32, (), "reward")})
QUICK = Limits(update_every=0.2, resend_after=0.5, resend_most=2.0)
TAKEN_UP = 4.0
"""Seconds that every process has to have looked at its folder again, and to have made its sockets anew."""


class Actor(threading.Thread):
    """One client under load, until it is told to end."""

    def __init__(self, endpoint: str, keys: Path, number: int, over: threading.Event) -> None:
        super().__init__(daemon=True)
        self.client = connect(endpoint, keys=keys, timeout=120.0, limits=QUICK, capacity=200, seed=number)
        self.number, self.over = number, over
        self.episodes = self.lines = self.pushed = 0
        self.trouble: list[str] = []

    def run(self) -> None:
        memory = self.client.memory
        while not self.over.wait(0.2):
            memory.open()
            for step in range(20):
                memory.add(0, (np.full(16, step, np.float32), np.float32(1.0)))
            memory.close(terminated=True)
            self.client.on_entries(20)
            self.client.on_episode(0, 20, 20.0)
            self.episodes += 1
            try:
                self.client.log(f"{self.number} {self.lines}")
                self.lines += 1
                self.pushed += self.client.push_cache(0.0)
            except MemoireError as error:
                self.trouble.append(f"client {self.number}: {error}")


def replace(keys: Path, role: str) -> None:
    """Give a role a new key, and take the old one away."""
    former, new = Keys(keys / role).own, keypairs.make(role)
    for node in ("server", "proxy"):
        key_writer.authorize(keys / node, new)
    for other in permissions.ROLES:
        if role in ("server", "proxy"):  # whoever dials it expects one of both, until the old one is gone
            known = [key for key in Keys(keys / other).servers if key.role != role or key.public == former.public]
            _write(keys / other / "server.pub", "".join(key.text() for key in (*known, new)))
    time.sleep(TAKEN_UP)
    _write(keys / role / "own.key", new.text(secret=True))
    time.sleep(TAKEN_UP)
    for node in ("server", "proxy"):
        key_writer.revoke(keys / node, former.fingerprint)
    time.sleep(TAKEN_UP)


def _write(path: Path, text: str) -> None:
    draft = path.with_name("new")
    draft.write_text(text)
    draft.chmod(0o600)
    draft.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--times", type=int, default=3, help="that each role's key is replaced")
    given = parser.parse_args()
    violations: list[str] = []
    with folder() as where:
        keys = where / "keys"
        key_writer.write_cluster(keys)
        over = threading.Event()
        with Server("tcp://127.0.0.1:0", SCHEMA, keys=keys, limits=QUICK, state_dir=where / "state") as server:
            proxies = [Proxy("tcp://127.0.0.1:0", [server.endpoint], keys=keys, limits=QUICK) for _ in range(2)]
            actors = [Actor(proxies[n % 2].endpoint, keys, n, over) for n in range(given.clients)]
            for actor in actors:
                actor.start()
            for turn in range(given.times):
                for role in ("actor", "proxy", "server"):
                    replace(keys, role)
                    say(f"{role} {turn + 1}: {server.total_episodes} episodes, {server.total_caches} caches")
            over.set()
            for actor in actors:
                actor.join(60.0)
                violations += actor.trouble[:3]
                actor.client.update(120.0)
                if not actor.client.close(120.0):
                    violations.append(f"client {actor.number} could not tell all")
            totals, lines = server.totals(), server.stats().log_lines
            security_now = server.stats().security.refused
            for proxy in proxies:
                proxy.close()
        counted = sum(actor.episodes for actor in actors), sum(actor.lines for actor in actors)
        pushed = sum(actor.pushed for actor in actors)
    if (totals.episodes, totals.steps, lines) != (counted[0], 20 * counted[0], counted[1]):
        violations.append(f"counted {counted}, the server has {totals.episodes}, {totals.steps} steps, {lines} lines")
    if totals.pushed_caches != pushed:
        violations.append(f"{pushed} caches were pushed, and {totals.pushed_caches} are accounted")
    head = ["clients", "keys replaced", "episodes", "lines", "caches pushed", "accepted", "lost", "refused"]
    refused = sum(security_now.values())
    row = [given.clients, 3 * given.times, counted[0], counted[1], pushed, totals.accepted_caches]
    print(table(head, [[*row, totals.lost_caches, refused]]))
    return end(violations)


if __name__ == "__main__":
    sys.exit(main())
