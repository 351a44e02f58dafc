"""Is a model ever damaged, or older than the one before, when its publisher, proxy or server is killed on the way?

A learner publishes bodies of 10 MB as fast as it can to a durable server, and actors take them through a proxy. One after
the other is killed (SIGKILL) at random moments and started again. Each body has its SHA-256 in it, and every actor looks
at each one that comes.
"""

import argparse
import hashlib
import random
import sys
import time
from typing import Any

import numpy as np
from _cluster import Command, Peers, wait_for
from _kit import end, folder, say, table

from history.ports import block
from memoire.client.client import connect
from memoire.errors import MemoireError
from memoire.limits import MiB
from memoire.reader.reader import Reader
from memoire.replay.columns import Column
from memoire.replay.schema import Schema

SCHEMA = Schema({"obs": Column(np.float32, (4,), "state"), "reward": Column(np.float32, (), "reward")})


def actors(first: int, count: int, pipe: Any, endpoint: str) -> None:
    """Clients that look at every model that comes; asked, they say what they saw."""
    clients = [connect(endpoint, timeout=60.0, capacity=1000) for _ in range(count)]
    models = [client.model("policy") for client in clients]
    seen = [0] * count
    taken = damaged = backwards = 0
    pipe.send("here")
    while True:
        for place, model in enumerate(models):
            newest = model.newest()
            if newest is not None and newest.version != seen[place]:
                taken += 1
                damaged += hashlib.sha256(newest.body[32:]).digest() != newest.body[:32]
                backwards += newest.version < seen[place]
                seen[place] = newest.version
        if pipe.poll(0.005):
            pipe.recv()
            refused = sum(sum(client.stats().refused.values()) for client in clients)
            pipe.send((taken, damaged, backwards, min(seen), refused))


def publish(learner: Reader, number: int, size: int) -> int:
    content = np.random.default_rng(number).bytes(size)
    return learner.publish("policy", hashlib.sha256(content).digest() + content, 30.0)


def learner(first: int, count: int, pipe: Any, endpoint: str, size: int) -> None:
    """Publishes for ever."""
    number = time.monotonic_ns() & 0xFFFFFFFF
    while True:
        try:
            with Reader([endpoint], timeout=30.0) as reader:
                while True:
                    number += 1
                    publish(reader, number, size)
        except MemoireError:
            continue


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.0, help="of it all; by default two for each kill")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--actors", type=int, default=20)
    parser.add_argument("--size", type=int, default=10 * MiB)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    pause = (given.seconds or 2.0 * given.kills) / given.kills
    front, back = (f"tcp://127.0.0.1:{block(3)}" for _ in range(2))
    with folder() as place:
        server_of = ["--endpoint", back, "--schema", SCHEMA.to_json(), "--name", "home", "--state-dir", str(place)]
        server, proxy = Command("server", *server_of), Command("proxy", "--endpoint", front, back)
        crowd = publisher = None
        try:
            crowd = Peers(actors, given.actors, 5, front)
            crowd.answers()
            publisher = Peers(learner, 1, 1, back, given.size)
            kills = {"learner": 0, "proxy": 0, "server": 0}
            for number in range(given.kills):
                time.sleep(pause * rng.uniform(0.5, 1.5))
                who = list(kills)[number % 3]
                kills[who] += 1
                say(f"kill {number + 1}: the {who}")
                if who == "learner":
                    publisher.end()
                    publisher = Peers(learner, 1, 1, back, given.size)
                elif who == "proxy":
                    proxy.kill()
                    proxy = Command("proxy", "--endpoint", front, back)
                else:
                    server.kill()
                    server = Command("server", *server_of)
            publisher.end()
            with Reader([back], timeout=30.0) as last:
                version = publish(last, 0, given.size)
            crowded = crowd
            took = wait_for(lambda: min(said[3] for said in crowded.ask("?")) >= version, 60.0, "the last model")
            said = crowd.ask("?")
        finally:
            for peers in (crowd, publisher):
                if peers is not None:
                    peers.end()
            proxy.end()
            server.end()
    taken, damaged, backwards, _, refused = (sum(each[column] for each in said) for column in range(5))
    rows = [
        ["kills of learner, proxy, server", ", ".join(map(str, kills.values()))],
        ["versions published", version],
        [f"models taken by {given.actors} actors", taken],
        ["messages refused on the way", refused],
        ["damaged bodies", damaged],
        ["steps to an older version", backwards],
        ["all have the last one after", f"{took:.2f} s"],
    ]
    print(table(["", f"bodies of {given.size / MiB:g} MiB"], rows))
    wrong = [f"{damaged} damaged bodies"] * bool(damaged) + [f"{backwards} steps backwards"] * bool(backwards)
    return end(wrong + [f"the last model came after {took:.0f} s"] * (took > 20.0))


if __name__ == "__main__":
    sys.exit(main())
