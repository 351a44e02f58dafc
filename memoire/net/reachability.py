"""Why nobody answers at an address, as a sentence for people: this asks the network."""

from __future__ import annotations

import os
import socket

from . import resolver

PROBE = 0.2
"""Seconds that an explanation of a fault may wait for the network."""


def why_unreachable(
    endpoint: str, address: str = "", *, known: resolver.NameResolver | None = None, probe: bool = True
) -> str:
    """What a person can do about an address that did not answer.

    Waits at most `PROBE` seconds for a name server, and as long for a connection.

    Args:
        address: Where the endpoint's name led, if it led anywhere.
        known: Look-ups of names; the process's own by default.
        probe: Try to connect.
    """
    if endpoint.startswith("tcp://"):
        host = endpoint[len("tcp://") :].rpartition(":")[0].strip("[]")
        trouble = "" if address else (known or resolver.shared_names()).trouble(host, PROBE if probe else 0.0)
        if trouble:
            return f"The name {host!r} {trouble}: correct it, or wait for the service."
        found = _probe(address or endpoint) if probe else ""
        unknown = "Is a memoire server or proxy running there, and is the port open to here?"
        return f"{found or unknown} Try `memoire doctor {endpoint}`."
    path = endpoint[len("ipc://") :]
    if endpoint.startswith("ipc://") and not os.path.exists(path):
        return f"There is no socket file {path!r}: start the relay or server first, and share its folder."
    return "Is a server running there? An inproc:// address works only inside one process and one context."


def _probe(address: str) -> str:
    """What a connection attempt to a numeric address says, as a sentence; "" where that is nothing new."""
    host, _, port = address[len("tcp://") :].rpartition(":")
    host = host.strip("[]")
    if not resolver.is_numeric(host) or not port.isdigit():
        return ""
    try:
        socket.create_connection((host, int(port)), PROBE).close()
    except ConnectionRefusedError:
        return f"The machine is there, but nothing listens at {address}: start memoire's server or proxy there."
    except TimeoutError:
        return f"Nothing comes back from {address}: it is gone, or a firewall or NetworkPolicy drops it."
    except OSError as error:
        return f"There is no way to {address}: {error.strerror or error}."
    return f"Something accepts connections at {address}. Is it a memoire server or proxy?"
