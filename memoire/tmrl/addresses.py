"""Server addresses: URLs from `server_ip`, and the rule that other machines need keys."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import memoire.tmrl.config.config_constants as cfg
from memoire.building import Keys, is_loopback
from memoire.errors import ParameterError, WrongType

_log = logging.getLogger(__name__)


ADVICE: Final = "Arguments have the order of TMRL before 0.7: give them by name."


def port_of(
    port: int | None, server_port: int | None, *, security: str | None, password: str, keys: Any, role: str
) -> Any:
    """Return the port from TMRL 0.7's arguments port, server_port, security and password; None without one.

    Raises:
        ParameterError: the ports of two arguments differ, or `security` is set without keys.
    """
    if port is not None and server_port is not None and port != server_port:
        raise ParameterError("server_port", server_port, f"the same as port={port}, or left out")
    has_keys = Keys.from_setting(keys, role) is not None
    if security is not None and not has_keys:
        expected = (
            f'None, or "TLS" with keys, which encrypt: keys="keys/{role}". Run `memoire keys new keys` to make keys'
        )
        raise ParameterError("security", security, expected)
    if password and not has_keys:
        _log.warning(
            "the password is not used, since memoire authenticates by keys. Without keys only this machine can "
            'reach the server. Run `memoire keys new keys`, and pass keys="keys/%s"', role,
        )  # fmt: skip
    return server_port if port is None else port


def check_paths(**paths: Any) -> None:
    """Raise WrongType if a value is not a path, since TMRL 0.7 has other arguments at these positions."""
    for name, path in paths.items():
        if not isinstance(path, str | Path | None):
            raise WrongType(name, "a path or None", type(path).__name__, ADVICE)


def urls_of(server_ip: str | Sequence[str] | None, default: str, **options: Any) -> list[str]:
    """Return the URLs of one server or several; see `url_of`."""
    addresses = server_ip if isinstance(server_ip, Sequence) and not isinstance(server_ip, str) else [server_ip]
    if not addresses:
        raise ParameterError("server_ip", addresses, "an address, or a list of at least one")
    return [url_of(each, default, **options) for each in addresses]


def url_of(server_ip: str | None, default: str, *, role: str, keys: Any, port: int | None, insecure: bool) -> str:
    """Return the URL of a server.

    Args:
        server_ip: A name, an address or a URL; None takes `default`.
        role: Role of the process that connects, as in its keys.
        keys: Folder of its keys; None takes $MEMOIRE_KEYS.
        port: Port for requests; None takes the configured one.
        insecure: True allows a server on another machine without keys.

    Raises:
        ParameterError: the server is on another machine, and there are no keys.
        WrongType: `server_ip` is not a text.
    """
    address = default if server_ip is None else server_ip
    if not isinstance(address, str):
        raise WrongType("server_ip", "a name, an address, a URL, or a list of these", type(address).__name__, ADVICE)
    if "://" in address:
        url, host = address, address.partition("://")[2].rpartition(":")[0]
    else:
        host = f"[{address}]" if address.count(":") > 1 and not address.startswith("[") else address
        url = f"tcp://{host}:{cfg.PORT_TRAINER if port is None else port}"
    if url.startswith("tcp://") and not (is_loopback(host) or insecure or Keys.from_setting(keys, role) is not None):
        expected = (
            f'this machine (127.0.0.1), or another machine with keys: server_ip="{address}", keys="keys/{role}". '
            f'Run `memoire keys new keys` for keys. On a network that you trust: server_ip="{address}", insecure=True'
        )
        raise ParameterError("server_ip", address, expected)
    return url
