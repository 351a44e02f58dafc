"""What an address of memoire's looks like, and what somebody meant who wrote another one. Nothing is looked up here.

tcp://HOST:PORT between machines, ipc://PATH on one machine, inproc://NAME inside of one process.
"""

from __future__ import annotations

import re
from typing import Any

from memoire.errors import EndpointError

TRANSPORTS = ("tcp", "ipc", "inproc")
USUAL_PORT = 5560
LISTENER = "'tcp://127.0.0.1:5560', or 'tcp://*:5560' for other machines"
PEER = "the address of a memoire server, proxy or relay, such as 'tcp://proxy:5560' or 'ipc:///run/memoire/relay'"
ANYWHERE = ("*", "0.0.0.0", "::", "[::]")  # noqa: S104  (compared, not bound)
"""Hosts that mean every address of a machine: somebody may listen there, and nobody can connect there."""
_HOST = re.compile(r"\[[^\[\]]+\]|[^\s:/]+")


def check(endpoint: Any, action: str) -> str:
    """An address that may be one, as it was given.

    Args:
        action: What is to be done with it: "bind" or "connect to".

    Raises:
        EndpointError: it is none; says what is wrong, and which one was probably meant.
    """
    if not isinstance(endpoint, str):
        shown = f"{endpoint!r}"[:80]
        raise _wrong(shown, action, f"an address is text, not of type {type(endpoint).__name__}")
    transport, separator, place = endpoint.partition("://")
    if not separator:
        raise _wrong(endpoint, action, "the transport in front is missing", _with_transport(endpoint, action))
    if transport not in TRANSPORTS:
        instead = _with_transport(place.partition("/")[0], action) if place else ""
        raise _wrong(endpoint, action, "the transport must be tcp://, ipc:// or inproc://", instead)
    if not place:
        raise _wrong(endpoint, action, "there is nothing behind the transport")
    if transport == "tcp":
        _check_tcp(endpoint, place, action)
    return endpoint


def _check_tcp(endpoint: str, place: str, action: str) -> None:
    """Refuse what has no host or port, or one that cannot be used so."""
    host, separator, port = place.rpartition(":")
    if not separator or host.count("[") != host.count("]"):
        raise _wrong(endpoint, action, "it has no port", f"'tcp://{place.strip('/')}:{USUAL_PORT}'")
    if port.partition("/")[0] != port:
        number, _, rest = port.partition("/")
        raise _wrong(
            endpoint, action, f"nothing may come behind the port, not even {'/' + rest!r}", f"'tcp://{host}:{number}'"
        )
    if not host:
        raise _wrong(endpoint, action, "it names no host", f"'tcp://{_host_of(action)}:{port}'")
    if action == "bind":
        if port not in ("*", "!") and not (port.isdigit() and int(port) < 65536):
            raise _wrong(endpoint, action, "the port must be a number from 1 to 65535, or 0 for a free one")
    elif not (port.isdigit() and 0 < int(port) < 65536):
        raise _wrong(endpoint, action, "the port must be a number from 1 to 65535")
    elif host in ANYWHERE:
        reason = f"the host {host!r} is only for those who listen"
        raise _wrong(
            endpoint, action, reason, f"the name of the machine that listens, such as 'tcp://localhost:{port}'"
        )


def _with_transport(place: str, action: str) -> str:
    """What somebody meant who left the transport out; "" where nobody can tell."""
    if place.startswith(("/", "./", "../")):
        return repr(f"ipc://{place}")
    host, separator, port = place.rpartition(":")
    if not separator:
        host, port = place, str(USUAL_PORT)
    if not _HOST.fullmatch(host) or (not port.isdigit() and port != "*"):
        return ""
    return repr(f"tcp://{_host_of(action) if action != 'bind' and host in ANYWHERE else host}:{port}")


def _host_of(action: str) -> str:
    return "127.0.0.1" if action == "bind" else "localhost"


def _wrong(endpoint: str, action: str, reason: str, instead: str = "") -> EndpointError:
    return EndpointError(endpoint, action, reason, instead or (LISTENER if action == "bind" else PEER))
