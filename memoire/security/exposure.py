"""Which addresses somebody on another machine can reach, and what is said about those that ask for nothing.

Loopback addresses, Unix sockets and sockets within the process are this machine's; a name other than "localhost" may
be anybody's, and is taken as such. Nothing is looked up.
"""

from __future__ import annotations

import ipaddress
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from memoire.errors import InsecureWarning, ParameterError


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
