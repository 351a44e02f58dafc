"""Tokens that people and programs have to know: from a file that may change, and how often anybody may guess them.

A file holds one token on each line. Whoever is asked lets in with any of them; whoever asks gives the first. So a token
is changed without a moment in which somebody is kept out: add the new one below the old one where it is asked for, put
it into the place of the old one where it is given, then take the old one away.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Self

from memoire.errors import ParameterError

_log = logging.getLogger(__name__)

MIN_LENGTH, MAX_LENGTH = 16, 256
"""Characters of a token in a file."""
MAX_TOKENS = 16
MAX_FILE_BYTES = MAX_TOKENS * (MAX_LENGTH + 2)
EXPECTED = f"a file with a token on each line: {MIN_LENGTH} to {MAX_LENGTH} printable ASCII characters without blanks"

MAX_WRONG_TOKENS = 10
"""Wrong tokens that one address may give in a row; then one more every `PENALTY_INTERVAL` seconds."""
PENALTY_INTERVAL = 3.0
MAX_WRONG_OF_PROXY, PENALTY_OF_PROXY = 100, 0.3
"""The same for a reverse proxy that is believed whose requests it passes on: for all addresses that it names."""
MAX_ADDRESSES = 1024
"""Addresses of guessers that are remembered. The one that was wrong longest ago leaves first: it may guess more."""


class Tokens:
    """Tokens that let in: those of a file, which is looked at again each time, or a given one.

    A file that is gone, or holds anything but tokens, lets nobody in until it is mended; that is logged once. Safe to
    use from several threads.

    Raises:
        ParameterError: the file cannot be read, or holds no tokens, to begin with.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, given: tuple[str, ...] = ()) -> None:
        self._path, self._tokens = None if path is None else os.path.abspath(path), given
        self._seen: object = None
        self._lock = threading.Lock()
        if self._path is not None:
            self._seen = _state(self._path)
            self._tokens = read_tokens(self._path)

    @classmethod
    def of(cls, given: Self | str | None) -> Self | None:
        """What was given: tokens as they are, a text as the only token, None as None.

        Raises:
            ParameterError: the text is empty, which everybody knows.
        """
        if given == "":
            raise ParameterError("token", given, "some characters, or None, which asks for nothing")
        return cls(given=(given,)) if isinstance(given, str) else given

    def now(self) -> tuple[str, ...]:
        """All that let in at this moment."""
        if self._path is None:
            return self._tokens
        with self._lock:
            seen = _state(self._path)
            if seen != self._seen:
                self._seen = seen
                try:
                    self._tokens = read_tokens(self._path)
                except ParameterError as error:
                    self._tokens = ()
                    _log.error("nobody is let in by token until this is mended: %s", error)
            return self._tokens

    @property
    def first(self) -> str | None:
        """What to give to whoever asks; None where there is none just now."""
        return next(iter(self.now()), None)

    def holds(self, text: str) -> bool:
        """Whether this is one of them; how long that takes says nothing about how much of it is right."""
        said = text.encode("utf-8", "replace") or b"nothing is no token"
        return sum([hmac.compare_digest(said, token.encode()) for token in self.now()]) > 0

    def __repr__(self) -> str:
        return f"Tokens({self._path!r})"  # never the tokens themselves


def read_tokens(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The tokens in a file.

    Raises:
        ParameterError: it cannot be read, or there is anything else in it.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ParameterError("token file", os.fspath(path), f"{EXPECTED}: {error}") from None
    return read_lines(text, os.fspath(path))


def read_lines(text: str, where: str) -> tuple[str, ...]:
    """The tokens in a file's text; `where` names it in what is said.

    Raises:
        ParameterError: there are none, or there is anything else in it.
    """
    found = tuple(line.strip() for line in text.splitlines() if line.strip())
    are_good = all(
        MIN_LENGTH <= len(token) <= MAX_LENGTH and token.isascii() and token.isprintable() and " " not in token
        for token in found
    )
    if not 1 <= len(found) <= MAX_TOKENS or not are_good:
        raise ParameterError("token file", where, EXPECTED)
    return found


def _state(path: str | os.PathLike[str]) -> object:
    """What changes when the file, or a link on the way to it, does."""
    try:
        found = os.stat(path)
    except OSError as error:
        return error.errno
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class WrongTokens:
    """Who has given wrong tokens lately: some mistakes are free, and after them each costs time.

    An address of IPv6 stands for its network of 64 bits. Safe to use from several threads.

    Args:
        clock: Seconds.
        most: Wrong tokens that an address may give in a row.
        penalty: Seconds that each further one costs.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        most: int = MAX_WRONG_TOKENS,
        penalty: float = PENALTY_INTERVAL,
    ) -> None:
        self._clock, self._most, self._penalty = clock, most, penalty
        self._forgiven: dict[str, float] = {}  # address: when its last mistake is; the oldest mistake comes first
        self._lock = threading.Lock()

    def wait(self, address: str) -> float:
        """Seconds that this address has to wait before it may try again; 0 now."""
        left = self._forgiven.get(network_of(address), 0.0) - self._clock()
        return max(0.0, left - (self._most - 1) * self._penalty)

    def wrong(self, address: str) -> None:
        """Count a mistake."""
        network, now = network_of(address), self._clock()
        with self._lock:
            self._forgiven[network] = max(self._forgiven.pop(network, 0.0), now) + self._penalty
            if len(self._forgiven) > MAX_ADDRESSES:
                del self._forgiven[next(iter(self._forgiven))]


def network_of(address: str) -> str:
    """What stands for an address where guesses are counted."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]  # a proxy may call it what it likes
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)


def bearer(authorization: str) -> str:
    """The token in an Authorization header; "" where there is none."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
