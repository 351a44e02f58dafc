"""A cache there and back: what `memoire doctor --roundtrip` does once an address answers.

    this process ──HELLO, cache──▶ proxies ──▶ its home, table ROUNDTRIP ──▶ proxies ──DRAW──▶ this process

Every server has that table beside its own, so that no learner ever meets what is pushed here. Its clients are probes:
a server counts them apart, and no total, list or metric of a run has them.
"""

import secrets
import time
from collections.abc import Callable

import numpy as np

from memoire.client.client import Client, connect
from memoire.reader.reader import Reader
from memoire.security.keyfolder import Given
from memoire.wire.identity import ROUNDTRIP

ENTRIES = 16
BATCH = 64
"""Samples of a draw: others may be making the same journey, and every one of theirs may be drawn as well."""


class Stuck(Exception):
    """The trial cache did not arrive: the message says how far it came, and what to look at."""

    def __init__(self, found: str, advice: str) -> None:
        super().__init__(found, advice)
        self.found, self.advice = found, advice


def travel(endpoint: str, *, timeout: float = 5.0, keys: Given = None, say: Callable[[str], object] = print) -> None:
    """Push a cache to the server that `endpoint` leads to, draw from all of them until it comes back, and compare.

    Args:
        timeout: Seconds for each part of the journey.
        say: Takes each line of the findings.

    Raises:
        Stuck: it did not arrive, or not come back, or not as it was.
        MemoireError: the other side refused, or did not answer.
    """
    marks = np.frombuffer(secrets.token_bytes(8 * ENTRIES), np.int64)
    with connect(endpoint, table=ROUNDTRIP, timeout=timeout, capacity=ENTRIES, keys=keys) as client:
        _push(client, marks, timeout)
        say(f"ok   a cache of {ENTRIES} entries is at its home {client.home!r}")
        with Reader([endpoint], table=ROUNDTRIP, timeout=timeout, ahead=1, keys=keys) as reader:
            drawn = _draw(reader, client.client_id, timeout)
        if not drawn or any(marks[number] != mark for number, mark in drawn):
            raise Stuck(
                "what was drawn is not what was pushed" if drawn else f"it was not drawn within {timeout:g} s",
                "Is every server behind this address one of this cluster, and of this release? Their logs say more.",
            )
        say(f"ok   {len(drawn)} samples of it came back as they were")
    say(f"     no total, list or metric of the run has it: servers count it apart (client {client.client_id.hex()})")


def _push(client: Client, marks: np.ndarray, timeout: float) -> None:
    """Record an entry for each mark, without counting them, and have a cache of them arrive."""
    client.memory.open()
    for mark in marks:
        client.memory.add(0, (mark,))
    client.memory.close(terminated=True)
    pushed = client.push_cache(timeout)
    deadline = time.monotonic() + timeout
    while pushed and (stats := client.stats()).accepted_caches + sum(stats.rejected.values()) == 0:
        if (left := deadline - time.monotonic()) <= 0.0:
            break
        client.update(left)
    stats = client.stats()
    if not pushed or stats.accepted_caches == 0:
        reason = client.push_reason or ", ".join(stats.rejected) or f"nobody has acknowledged it within {timeout:g} s"
        advice = "Caches take the port after the one for requests: is it open, and does the server's log say more?"
        raise Stuck(f"a cache did not arrive: {reason}", advice)


def _draw(reader: Reader, client: bytes, timeout: float) -> list[tuple[int, int]]:
    """(number, mark) of every sample of this client in a batch that has some; none where there was none in time."""
    owner, deadline = np.frombuffer(client, "<u8"), time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0.0:
        batch = reader.get_batch(BATCH, left)
        mine = (batch.ids["client"] == owner).all(axis=1)
        if mine.any():
            return list(zip(batch.ids["number"][mine].tolist(), batch["state"][mine].tolist(), strict=True))
    return []
