"""Do replies of real sizes come in pages, or are they refused by name, over real sockets with the usual limits?

Each line asks for more than one reply has room for: of the tail (512 KiB) or of the payload (256 MiB).
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from _kit import end, say, table

import memoire
from memoire.errors import Refused
from memoire.limits import Limits, MiB
from memoire.replay.memory import Memory
from memoire.wire import containers as pack
from memoire.wire import containers as unpack

HERE = "tcp://127.0.0.1:*"
COLUMNS = {"tokens": (np.int32, (None,)), "reward": np.float32}
CLIENTS, PARTITIONS, GROUPS, PROMPTS = 10_000, 45_000, 4096, 2000
LONGEST = 30.0
"""Seconds that one call may take."""


@contextmanager
def prompts(group: int, **limits: int) -> Iterator[tuple[Any, memoire.Prompts]]:
    """A table of prompts, as its own process and as another one has it."""
    columns = memoire.Table(COLUMNS, storage="prompts", group=group, byte_limit=2048 * MiB)
    with (
        memoire.Server(HERE, tables={"t": columns}, limits=Limits(**limits)) as server,
        memoire.Prompts(server.endpoint, "t", timeout=LONGEST) as far,
    ):
        yield server.prompts("t"), far


def answer(near: Any, size: int) -> None:
    """Answer all prompts that wait."""
    while near.counts()["waiting"]:
        for lease in near.lease(64):
            near.answers(lease, {i: {"tokens": np.zeros(size, np.int32), "reward": 1.0} for i in lease.missing}, 1)


def listed() -> str:
    """A list of prompts with long names."""
    with prompts(2) as (near, far):
        near.add(dict.fromkeys(range(PROMPTS), b"x"), "\u00e9" * 200)
        return f"{len(far.list(limit=PROMPTS)[0])} of {PROMPTS} prompts"


def drawn() -> str:
    """A step of many groups."""
    with prompts(16) as (near, far):
        for first in range(0, GROUPS, 512):
            near.add(dict.fromkeys(range(first, first + 512), b"x"), "d" * 100)
        answer(near, 1)
        return f"{len(far.draw(0, GROUPS).keys)} of {GROUPS} groups"


def long_group() -> str:
    """A group that is longer than a message."""
    with prompts(5, request_bytes=100 * MiB) as (near, far):
        near.add({0: b"x"}, "d")
        answer(near, 15 * MiB)
        return f"{far.draw(0, 1)['tokens'].lengths.sum() * 4 // MiB} of 300 MiB"


def leased() -> str:
    """Leases of more payloads than a message has room for."""
    with prompts(2) as (near, far):
        for index in range(1000):
            near.add({index: bytes(400_000)}, "d")
        found, calls = 0, 0
        while found < 1000:
            found, calls = found + len(far.lease(1000)), calls + 1
        return f"{found} of 1000 prompts by {calls} calls"


def sums() -> str:
    """A batch of more clients than their sums have room for."""
    with memoire.Server(HERE, {"obs": np.float32, "reward": np.float32}, cache_size=4) as server:
        pool = server._dispatcher.tables.first.pool
        memory = Memory(pool.schema, 8, pool.parameters, seed=1)
        memory.open()
        for step in range(8):
            memory.add(0, (np.float32(step), 1.0))
        memory.close(terminated=True)
        payload = pack.build(memory, now=0.0)
        for client in range(CLIENTS):
            pool.add((client + 1).to_bytes(16, "big"), 1, unpack.check(payload, pool.layout))
        with memoire.Reader(server.endpoint) as reader:
            for _ in range(3):
                batch = reader.get_batch(256, timeout=LONGEST)
            with_refusal = ""
            with memoire.Reader(server.endpoint, limits=Limits(message_bytes=4096)) as small:
                try:
                    small.get_batch(1024, timeout=LONGEST)
                except Refused as error:
                    with_refusal = f"; {error.code} for a reader of 4096 bytes"
            return f"3 batches of {len(batch.ids)} of {CLIENTS} clients{with_refusal}"


def partitions() -> str:
    """Keyed rows of many partitions."""
    import memoire.tq as tq

    with memoire.Server(HERE, {"obs": np.float32}) as server:
        rows = server._dispatcher.keyed_rows
        from memoire.tables.keyed.store import RowChange

        for number in range(PARTITIONS):
            rows.put(f"partition {number}", [RowChange("k", {}, {"x": b"1"})])
        client = tq.client.KeyedClient([server.endpoint])
        try:
            return f"{len(client.wait(client.rows(None)))} of {PARTITIONS} partitions"
        finally:
            client.close()


CASES: dict[str, tuple[Callable[[], str], str]] = {
    "list of 2,000 prompts, names of 400 bytes": (listed, "2000 of 2000 prompts"),
    "step of 4,096 groups of 16": (drawn, "4096 of 4096 groups"),
    "group of 300 MiB": (long_group, "300 of 300 MiB"),
    "leases of 1,000 prompts of 400 kB": (leased, "1000 of 1000 prompts"),
    "batches of 10,000 clients": (sums, "3 batches of 256 of 10000 clients; too_large"),
    "45,000 partitions": (partitions, "45000 of 45000 partitions"),
}


def main() -> int:
    rows, violations = [], []
    for name, (case, expected) in CASES.items():
        began = time.monotonic()
        try:
            found = case()
        except ModuleNotFoundError as error:
            found = f"not tried: {error.name} is not installed"
        except Exception as error:
            found = f"{type(error).__name__}: {str(error)[:200]}"
        if not found.startswith((expected, "not tried")):
            violations.append(f"{name}: {found}")
        rows.append([name, found, f"{time.monotonic() - began:.1f}"])
        say(*rows[-1])
    print(table(["asked for", "what came", "seconds"], rows))
    return end(violations)


if __name__ == "__main__":
    sys.exit(main())
