"""Which inference node a client asks: its own by rendezvous hash, the next one while that is away. Pure.

order of client 7:  b ▶ c ▶ a        b is down: c is asked; b answers again: b is asked
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

PROBE_INTERVAL = 0.5
"""Seconds between two looks whether a silent node answers again."""


def rendezvous(client: bytes, urls: Sequence[str]) -> list[str]:
    """Addresses in the order in which this client asks them: of many clients, each address is first for as many."""

    def weight(url: str) -> bytes:
        return hashlib.blake2b(url.encode(), key=client, digest_size=8).digest()

    return sorted(dict.fromkeys(urls), key=weight)


class NodeChoice:
    """The nodes of one client, and which of them were silent when they were asked."""

    def __init__(self, client: bytes, urls: Sequence[str]) -> None:
        self.order = rendezvous(client, urls)
        self.moves = 0
        """How often a request went on to another node."""
        self._probe_at: dict[str, float] = {}  # silent nodes, and when to look again

    def pick(self, is_down: Callable[[str], bool]) -> str:
        """The node to ask now: the first that is neither down nor silent; the first of all where none is."""
        for url in self.order:
            if url not in self._probe_at and not is_down(url):
                return url
        return self.order[0]

    @property
    def undisturbed(self) -> str:
        """The first node of all, while none was silent; "" otherwise."""
        return "" if self._probe_at else self.order[0]

    def silent(self, url: str, now: float) -> None:
        """A node did not answer in time."""
        self._probe_at.setdefault(url, now)

    def answered(self, url: str) -> None:
        """A node has answered: it is asked again."""
        self._probe_at.pop(url, None)

    def next_time(self) -> float:
        """When `probes` has something to do."""
        return min(self._probe_at.values(), default=float("inf"))

    def probes(self, now: float) -> list[str]:
        """Silent nodes to say HELLO to now."""
        due = [url for url, at in self._probe_at.items() if at <= now]
        for url in due:
            self._probe_at[url] = now + PROBE_INTERVAL
        return due
