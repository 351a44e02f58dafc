"""How long until a peer that vanished without a word is noticed, and a service that moved is found?

In a network of its own, a server's address is cut: no packet goes in or out, and nobody is told. The client waits for
an answer, or has nothing to say. The last rows have a name that leads to another server at once, or when the first one
has vanished; the client follows it by itself.
"""

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
from _kit import CANNOT, end, say, table

import memoire
from history import network
from memoire.limits import Limits
from memoire.net import addresses as resolver
from memoire.net.addresses import NameResolver
from memoire.net.channel import Channel
from memoire.net.context import shared_context
from memoire.net.poller import Poller

SCHEMA = memoire.Schema({"obs": memoire.Column(np.float32, (4,), "state")})
PORT = 5560


@contextlib.contextmanager
def served(*hosts: str) -> Iterator[list[memoire.Server]]:
    """A server at each of these addresses."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                memoire.Server(
                    f"tcp://{host}:{PORT}",
                    SCHEMA,
                    name="home",
                    push_endpoint=f"tcp://{host}:{PORT + 1}",
                    pub_endpoint=f"tcp://{host}:{PORT + 2}",
                )
            )
            for host in hosts
        ]


def until(condition: Callable[[], object], most: float) -> float:
    """Seconds until the condition came true; infinity when it did not."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > most:
            return float("inf")
        time.sleep(0.02)
    return time.monotonic() - began


def idle(addresses: network.Addresses) -> float:
    """A connection on which nothing was on its way."""
    doors = Poller()
    with served(addresses["a"]) as (server,):
        channel = Channel(
            doors, shared_context(), server.endpoint, client=bytes(16), limits=Limits(), rng=random.Random(1)
        )

        def turned(condition: Callable[[], bool]) -> Callable[[], bool]:
            def once() -> bool:
                channel.turn(doors.wait(time.monotonic()))
                return condition()

            return once

        until(turned(lambda: not channel.is_down), 10.0)
        addresses.cut("a")
        seconds = until(turned(lambda: channel.is_down), 40.0)
        addresses.mend("a")
        doors.close()
    return seconds


def busy(addresses: network.Addresses) -> float:
    """A client that goes on telling."""
    with served(addresses["a"]) as (server,), memoire.connect(server.endpoint) as client:
        client.update()
        addresses.cut("a")

        def is_down() -> bool:
            client.on_entries(1)
            return client._io.channel.is_down

        seconds = until(is_down, 40.0)
        addresses.mend("a")
        recovered = until(lambda: not client._io.channel.is_down, 20.0)
        say(f"after it was mended: {recovered:.1f} s")
        client.update(20.0)
    return seconds


def moved(addresses: network.Addresses, dies: bool) -> float:
    """A name whose server dies, or vanishes, while another one stands where the name leads then."""
    book = {"service": [addresses["a"]]}
    resolver._names = NameResolver(lambda host: book[host])
    with served(addresses["a"], addresses["b"]) as (first, second), memoire.connect(f"tcp://service:{PORT}") as client:
        client.on_entries(1)
        client.update()
        book["service"] = [addresses["b"]]
        if dies:
            first.close(0.0)
        else:
            addresses.cut("a")
        client.on_entries(1)
        seconds = until(lambda: second.total_steps == 2, 60.0)
        addresses.mend("a")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, help="not used: each row takes as long as it takes")
    parser.parse_args()
    trouble = network.own()
    if trouble:
        print(f"Not here: {trouble}.")
        return CANNOT
    addresses = network.Addresses(["a", "b"])
    rows: list[tuple[str, Callable[[], float], float]] = [
        ("the server vanishes, nothing is on its way", lambda: idle(addresses), 20.0),
        ("the server vanishes, the client is telling", lambda: busy(addresses), 20.0),
        ("the server dies, its name leads to another one", lambda: moved(addresses, True), 5.0),
        ("the server vanishes, its name leads to another one", lambda: moved(addresses, False), 25.0),
    ]
    found = []
    for what, measure, most in rows:
        say(what)
        found.append((what, measure(), most))
    print(table(["what happens", "noticed after", "promised"], [(w, f"{s:.1f} s", f"{m:.0f} s") for w, s, m in found]))
    return end(
        [f"{what}: {seconds:.1f} s, promised are {most:.0f} s" for what, seconds, most in found if seconds > most]
    )


if __name__ == "__main__":
    sys.exit(main())
