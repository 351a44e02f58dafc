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
    if not endpoint.isprintable():
        raise _wrong(ascii(endpoint)[1:81], action, "it has characters that cannot be printed")
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


def beside(endpoint: str) -> tuple[str, str]:
    """The data and notice addresses that belong to a request address: the next two ports, or .push and .pub.

    "tcp://*:5560" gives "tcp://*:5561" and "tcp://*:5562"; a free port gives free ports; ipc and inproc get suffixes.
    """
    check(endpoint, "bind")
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}.push", f"{endpoint}.pub"
    host, _, port = endpoint.rpartition(":")
    if port in ("0", "*", "!"):
        return f"{host}:0", f"{host}:0"
    if int(port) > 65533:
        raise EndpointError(endpoint, "bind", "the port must be 65533 at most: the next two are used, too")
    return f"{host}:{int(port) + 1}", f"{host}:{int(port) + 2}"


_ANY_HOST = re.compile(r"^tcp://(\*|0\.0\.0\.0|\[::\]|::):")


def page_seen_from(dialled: str, page: str) -> str:
    """The same of a node's pages, "http://HOST:PORT"."""
    scheme, _, place = page.partition("://")
    return f"{scheme}://{seen_from(dialled, f'tcp://{place}').partition('://')[2]}"


def seen_from(dialled: str, endpoint: str) -> str:
    """`endpoint` as whoever dialled `dialled` reaches it: a wildcard host is the host that answered the request."""
    if not _ANY_HOST.match(endpoint) or not dialled.startswith("tcp://"):
        return endpoint
    host = dialled.rpartition(":")[0]
    port = endpoint.rpartition(":")[2]
    return f"{host}:{port}"
