"""Where the nodes are, and how they are asked: plain HTTP, one short question each."""

from __future__ import annotations

import http.client
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from memoire.cluster.tokens import Tokens

LOOK_UP_EVERY = 5.0
"""Seconds between two look-ups of a name."""
MOST_NODES = 1024
MOST_ANSWER_BYTES = 64 << 20


class NodeError(Exception):
    """A node did not answer, or not with what was asked for; says why."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text, status)
        self.text, self.status = text, status

    def __str__(self) -> str:
        return self.text


def ask(url: str, path: str, *, token: Tokens | str | None = None, timeout: float = 2.0, accept: str = "") -> bytes:
    """The body of a page; the first of the tokens is given.

    Raises:
        NodeError: nobody answers, or something else than 200 or 503 (of a node that is not ready).
    """
    parts = urllib.parse.urlsplit(url)
    given = token.first if isinstance(token, Tokens) else token
    headers = {"Accept": accept or "*/*"} | ({} if given is None else {"Authorization": f"Bearer {given}"})
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout)
    try:
        connection.request("GET", parts.path.rstrip("/") + path, headers=headers)
        answer = connection.getresponse()
        body = answer.read(MOST_ANSWER_BYTES + 1)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NodeError(f"{url} does not answer: {_words(error)}") from None
    finally:
        connection.close()
    if len(body) > MOST_ANSWER_BYTES:
        raise NodeError(f"{url}{path} answered with more than {MOST_ANSWER_BYTES} bytes")
    if answer.status != 200:
        raise NodeError(f"{url}{path} answered {answer.status}: {_reason(body)}", answer.status)
    return body


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "nothing came in time"
    return str(getattr(error, "strerror", None) or str(error) or type(error).__name__)


def _reason(body: bytes) -> str:
    try:
        said: Any = msgspec.json.decode(body)
        return str(said["error"])[:300]
    except (msgspec.DecodeError, KeyError, TypeError):
        return "it does not say why"


class Addresses:
    """The nodes' addresses: those given, and those of names, looked up on a thread of their own.

    Args:
        given: "http://..." or "dns:NAME:PORT".
        look_up: Addresses of a name and port; for tests.
    """

    def __init__(self, given: Iterable[str], look_up: Callable[[str, int], list[str]] | None = None) -> None:
        self._fixed = [each.rstrip("/") for each in given if not each.startswith("dns:")]
        self._names = [each[4:] for each in given if each.startswith("dns:")]
        self._look_up = look_up or _look_up
        self._found: dict[str, list[str]] = {}
        self.trouble: dict[str, str] = {}
        """Names that were not found, and why."""
        self._closed = threading.Event()
        if self._names:
            threading.Thread(target=self._run, name="memoire-dashboard-dns", daemon=True).start()

    def now(self) -> list[str]:
        """All of them, each once."""
        found = [url for name in self._names for url in self._found.get(name, [])]
        return list(dict.fromkeys([*self._fixed, *found]))[:MOST_NODES]

    def close(self) -> None:
        """Look nothing up any more."""
        self._closed.set()

    def look(self) -> None:
        """Look all names up once; who was found before stays when the name server does not answer."""
        for name in self._names:
            host, _, port = name.rpartition(":")
            try:
                self._found[name] = self._look_up(host, int(port))
                self.trouble.pop(name, None)
            except (OSError, ValueError) as error:
                self.trouble[name] = _words(error)

    def _run(self) -> None:
        while not self._closed.is_set():
            began = time.monotonic()
            self.look()
            self._closed.wait(max(0.1, LOOK_UP_EVERY - (time.monotonic() - began)))


def _look_up(host: str, port: int) -> list[str]:
    found = sorted({each[4][0] for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})
    return [f"http://[{address}]:{port}" if ":" in str(address) else f"http://{address}:{port}" for address in found]
