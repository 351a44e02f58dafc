"""Tokens that people and programs have to know: from a file that may change, and how often anybody may guess them.

A file holds one token on each line. Whoever is asked lets in with any of them; whoever asks gives the first. So a token
is changed without a moment in which somebody is kept out: add the new one below the old one where it is asked for, put
it into the place of the old one where it is given, then take the old one away.

Which addresses somebody on another machine can reach, and what is said about those that ask for nothing.

Loopback addresses, Unix sockets and sockets within the process are this machine's; a name other than "localhost" may
be anybody's, and is taken as such. Nothing is looked up.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

from memoire.errors import InsecureWarning, ParameterError

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


@dataclass(frozen=True, slots=True)
class Security:
    """Who may come to a node, and who was sent away; for whoever watches."""

    keys: bool
    """Whether only peers with a key are let in over TCP."""
    open: tuple[str, ...]
    """Addresses that other machines can reach, where everybody is let in."""
    refused: dict[str, int]
    """Connections and messages that were refused for who they came from, by `net.curve_server.REASONS`."""
    hung_up: int = 0
    """Connections that ended before they had shown a key: probes of the port, processes that ended. Nobody refused
    them."""


def is_loopback(host: str) -> bool:
    """Whether a host as it stands in an address ("localhost", "127.0.0.1", "[::1]") is this machine by itself."""
    host = host.strip("[]").partition("%")[0].lower()
    if host == "localhost":
        return True
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def is_local(address: str) -> bool:
    """Whether only this machine reaches what listens at "tcp://HOST:PORT", "http://HOST:PORT", "HOST:PORT",
    "ipc://PATH" or "inproc://NAME".
    """
    scheme, separator, place = address.partition("://")
    if not separator:
        place = scheme
    elif scheme not in ("tcp", "http", "https"):
        return True
    return is_loopback(place.partition("/")[0].rpartition(":")[0])


def reachable(addresses: Iterable[str]) -> list[str]:
    """Those of the addresses that other machines can reach."""
    return [address for address in addresses if not is_local(address)]


def refuse(option: str, address: str, *, guard: str) -> None:
    """Refuse to listen there for everybody.

    Args:
        option: Which setting named the address.
        guard: What would ask those who come who they are.

    Raises:
        ParameterError: other machines can reach the address.
    """
    if not is_local(address):
        expected = f"an address of this machine only, such as 127.0.0.1, or {guard}, or --insecure: everybody may come"
        raise ParameterError(option, address, expected)


def warn(what: str, addresses: Iterable[str], *, guard: str, may: str = "push, draw and publish") -> None:
    """Say with an `InsecureWarning` which of these addresses everybody can reach; nothing where there is none.

    It points at the line that called into memoire.

    Args:
        what: Who listens there.
        guard: What would ask those who come who they are.
        may: What they may do.
    """
    if found := reachable(addresses):
        text = (
            f"{what} listens at {', '.join(found)} for everybody who can reach it: whoever comes may {may}. "
            f"Give it {guard}, or an address of this machine only (127.0.0.1)."
        )
        warnings.warn(text, InsecureWarning, stacklevel=_level_outside())


def _level_outside() -> int:
    """How many calls up the first function outside of this package is, counted as by who calls `warnings.warn` here."""
    level, frame, ours = 0, sys._getframe(1), __name__.partition(".")[0]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == ours:
        level, frame = level + 1, frame.f_back
    return level + 1
