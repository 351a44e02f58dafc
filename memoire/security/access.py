"""Access to a node: tokens from a file that may change, limits on guesses, and addresses that other machines reach.

A token file holds one token on each line. A node accepts any of its tokens; a client sends the first. Tokens can be
replaced without an interruption: first add the new token below the old one at the node, then replace the old one at the
clients, then remove the old one at the node.

Loopback addresses, Unix sockets and sockets within the process are local to this machine. A host name other than
"localhost" counts as reachable by other machines. No name is looked up.
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
"""Least and greatest number of characters of a token in a file."""
MAX_TOKENS = 16
MAX_FILE_BYTES = MAX_TOKENS * (MAX_LENGTH + 2)
EXPECTED = f"a file with a token on each line: {MIN_LENGTH} to {MAX_LENGTH} printable ASCII characters without blanks"

MAX_WRONG_TOKENS = 10
"""Wrong tokens that one address may send in a row; then one more token every `PENALTY_INTERVAL` seconds."""
PENALTY_INTERVAL = 3.0
MAX_WRONG_OF_PROXY, PENALTY_OF_PROXY = 100, 0.3
"""Limits on wrong tokens of a trusted reverse proxy, over all addresses in the proxy's requests together."""
MAX_ADDRESSES = 1024
"""Guessing addresses that are remembered; the one with the oldest mistake is forgotten first: it may guess more."""


class Tokens:
    """Accepted tokens: those of a file, which is checked for changes at each use, or given ones.

    If the file is missing or malformed, no token is accepted until the file is repaired; an error is logged once. Safe
    to use from several threads.

    Raises:
        ParameterError: the file cannot be read or is malformed at the construction.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, given: tuple[str, ...] = ()) -> None:
        self._path, self._tokens = None if path is None else os.path.abspath(path), given
        self._seen: object = None
        self._lock = threading.Lock()
        if self._path is not None:
            self._seen = _state(self._path)
            self._tokens = read_tokens(self._path)

    @classmethod
    def from_setting(cls, tokens: Self | str | None) -> Self | None:
        """Return tokens as they are, a text as the only token, and None as None.

        Raises:
            ParameterError: the text is empty.
        """
        if tokens == "":
            raise ParameterError("token", tokens, "some characters, or None to ask for no token")
        return cls(given=(tokens,)) if isinstance(tokens, str) else tokens

    def accepted(self) -> tuple[str, ...]:
        """Return all tokens that are accepted now."""
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
                    _log.error("no token is accepted until the file is repaired: %s", error)
            return self._tokens

    @property
    def first(self) -> str | None:
        """Token that a client sends; None while the file is missing or malformed."""
        return next(iter(self.accepted()), None)

    def holds(self, text: str) -> bool:
        """Return True if a token is accepted. The time of the comparison does not depend on the correct characters."""
        candidate = text.encode("utf-8", "replace") or b"nothing is no token"
        return sum([hmac.compare_digest(candidate, token.encode()) for token in self.accepted()]) > 0

    def __repr__(self) -> str:
        return f"Tokens({self._path!r})"  # the text never shows the tokens


def read_tokens(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the tokens in a file.

    Raises:
        ParameterError: the file cannot be read, or is malformed.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ParameterError("token file", os.fspath(path), f"{EXPECTED}: {error}") from None
    return read_lines(text, os.fspath(path))


def read_lines(text: str, where: str) -> tuple[str, ...]:
    """Return the tokens in the text of a file; `where` names the file in errors.

    Raises:
        ParameterError: there are no tokens, or a line is not a token.
    """
    tokens = tuple(line.strip() for line in text.splitlines() if line.strip())
    are_good = all(
        MIN_LENGTH <= len(token) <= MAX_LENGTH and token.isascii() and token.isprintable() and " " not in token
        for token in tokens
    )
    if not 1 <= len(tokens) <= MAX_TOKENS or not are_good:
        raise ParameterError("token file", where, EXPECTED)
    return tokens


def _state(path: str | os.PathLike[str]) -> object:
    """Return a value that changes when the file, or a link to it, does."""
    try:
        status = os.stat(path)
    except OSError as error:
        return error.errno
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class WrongTokens:
    """Counter of wrong tokens by address: some mistakes are free, and each further one costs time.

    An IPv6 address counts as its network of 64 bits. Safe to use from several threads.

    Args:
        clock: Function that returns monotonic seconds.
        most: Wrong tokens that an address may send in a row.
        penalty: Seconds of waiting for each further one.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        most: int = MAX_WRONG_TOKENS,
        penalty: float = PENALTY_INTERVAL,
    ) -> None:
        self._clock, self._most, self._penalty = clock, most, penalty
        self._forgiven: dict[str, float] = {}  # end of the penalties by address; the oldest mistake comes first
        self._lock = threading.Lock()

    def wait(self, address: str) -> float:
        """Return the seconds that this address has to wait before its next attempt; 0 if it may try now."""
        remaining = self._forgiven.get(mistake_counter_name(address), 0.0) - self._clock()
        return max(0.0, remaining - (self._most - 1) * self._penalty)

    def count_wrong(self, address: str) -> None:
        """Count a wrong token of an address."""
        network, now = mistake_counter_name(address), self._clock()
        with self._lock:
            self._forgiven[network] = max(self._forgiven.pop(network, 0.0), now) + self._penalty
            if len(self._forgiven) > MAX_ADDRESSES:
                del self._forgiven[next(iter(self._forgiven))]


def mistake_counter_name(address: str) -> str:
    """Return the name under which the mistakes of an address are counted."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]  # a proxy may send any text
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return str(ip.ipv4_mapped)
        return str(ipaddress.ip_network((ip, 64), strict=False))
    return str(ip)


def bearer(authorization: str) -> str:
    """Return the token in an Authorization header; "" if it has none."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


@dataclass(frozen=True, slots=True)
class Security:
    """Access to a node: who may connect, and what was refused, for monitoring."""

    keys: bool
    """True if only peers with a key may connect over TCP."""
    open: tuple[str, ...]
    """Addresses that other machines reach, and that need no key or token."""
    refused: dict[str, int]
    """Number of connections and messages that were refused because of their sender, by `net.curve_server.REASONS`."""
    hung_up: int = 0
    """Number of connections that ended before they sent a key, such as probes of the port or ended processes.
    Connections of this kind were not refused."""


def is_loopback(host: str) -> bool:
    """Return True if the host of an address ("localhost", "127.0.0.1", "[::1]") is a loopback one."""
    host = host.strip("[]").partition("%")[0].lower()
    if host == "localhost":
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback


def is_local(address: str) -> bool:
    """Return True if only this machine reaches an address "tcp://HOST:PORT", "http://HOST:PORT", "HOST:PORT",
    "ipc://PATH" or "inproc://NAME".
    """
    scheme, separator, place = address.partition("://")
    if not separator:
        place = scheme
    elif scheme not in ("tcp", "http", "https"):
        return True
    return is_loopback(place.partition("/")[0].rpartition(":")[0])


def reachable(addresses: Iterable[str]) -> list[str]:
    """Return the addresses that other machines can reach."""
    return [address for address in addresses if not is_local(address)]


def refuse(option: str, address: str, *, guard: str) -> None:
    """Raise ParameterError if other machines can reach an address without a guard.

    Args:
        option: Name of the setting with the address.
        guard: Setting that would restrict access, for the message.

    Raises:
        ParameterError: other machines can reach the address.
    """
    if not is_local(address):
        expected = f"an address of this machine only, such as 127.0.0.1, or {guard}, or --insecure for open access"
        raise ParameterError(option, address, expected)


def warn(what: str, addresses: Iterable[str], *, guard: str, may: str = "push, draw and publish") -> None:
    """Warn with an `InsecureWarning` of the addresses that other machines can reach; do nothing if there are none.

    The warning points at the line that called into memoire.

    Args:
        what: Name of the node that listens at the addresses.
        guard: Setting that would restrict access, for the message.
        may: Permitted actions of every client, for the message.
    """
    if open_addresses := reachable(addresses):
        text = (
            f"{what} listens at {', '.join(open_addresses)}, which other machines can reach: every client may {may}. "
            f"Give it {guard}, or an address of this machine only (127.0.0.1)."
        )
        warnings.warn(text, InsecureWarning, stacklevel=_level_outside())


def _level_outside() -> int:
    """Return the `stacklevel` of the first function outside of this package, for `warnings.warn` in the caller."""
    level, frame, ours = 0, sys._getframe(1), __name__.partition(".")[0]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == ours:
        level, frame = level + 1, frame.f_back
    return level + 1
