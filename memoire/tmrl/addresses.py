"""Where a server is: what `server_ip` says, and why an address elsewhere needs keys."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import memoire.tmrl.config.config_constants as cfg
from memoire.building import Keys, is_loopback
from memoire.errors import ParameterError, WrongType

_log = logging.getLogger(__name__)


ORDER: Final = "Arguments have the order of TMRL before 0.7: give them by name."


def port_of(
    port: int | None, server_port: int | None, *, security: str | None, password: str, keys: Any, role: str
) -> Any:
    """The port of what TMRL 0.7 calls port, server_port, security and password; None if none is given.

    Raises:
        ParameterError: two ports differ, or TLS is asked for and there are no keys.
    """
    if port is not None and server_port is not None and port != server_port:
        raise ParameterError("server_port", server_port, f"the same as port={port}, or left out")
    has_keys = Keys.of(keys, role) is not None
    if security is not None and not has_keys:
        expected = (
            f'None, or "TLS" with keys, which encrypt here: keys="keys/{role}". `memoire keys new keys` makes them'
        )
        raise ParameterError("security", security, expected)
    if password and not has_keys:
        _log.warning(
            "the password is not used: keys say here who may connect. Without keys the server is reached from its own "
            'machine only. `memoire keys new keys` makes keys; give keys="keys/%s"', role,
        )  # fmt: skip
    return server_port if port is None else port


def check_paths(**paths: Any) -> None:
    """Raise WrongType if one of these is no path: TMRL 0.7 has other arguments in their places."""
    for name, path in paths.items():
        if not isinstance(path, str | Path | None):
            raise WrongType(name, "a path, or None", type(path).__name__, ORDER)


def urls_of(server_ip: str | Sequence[str] | None, default: str, **options: Any) -> list[str]:
    """The addresses of one server or several; see `url_of`."""
    given = server_ip if isinstance(server_ip, Sequence) and not isinstance(server_ip, str) else [server_ip]
    if not given:
        raise ParameterError("server_ip", given, "an address, or a list of at least one")
    return [url_of(each, default, **options) for each in given]


def url_of(server_ip: str | None, default: str, *, role: str, keys: Any, port: int | None, insecure: bool) -> str:
    """The address of a server.

    Args:
        server_ip: A name, an address or a URL; None takes `default`.
        role: Of the process that connects, as its keys know it.
        keys: Its keys folder; None takes $MEMOIRE_KEYS.
        port: For requests; None takes the configured one.
        insecure: Whether an address elsewhere may do without keys.

    Raises:
        ParameterError: the server is elsewhere, and there are no keys.
        WrongType: it is no text.
    """
    said = default if server_ip is None else server_ip
    if not isinstance(said, str):
        raise WrongType("server_ip", "a name, an address, a URL, or a list of these", type(said).__name__, ORDER)
    if "://" in said:
        url, host = said, said.partition("://")[2].rpartition(":")[0]
    else:
        host = f"[{said}]" if said.count(":") > 1 and not said.startswith("[") else said
        url = f"tcp://{host}:{cfg.PORT_TRAINER if port is None else port}"
    if url.startswith("tcp://") and not (is_loopback(host) or insecure or Keys.of(keys, role) is not None):
        expected = (
            f'this machine (127.0.0.1), or an address elsewhere with keys: server_ip="{said}", keys="keys/{role}". '
            f'`memoire keys new keys` makes them. In a network that you trust: server_ip="{said}", insecure=True'
        )
        raise ParameterError("server_ip", said, expected)
    return url
