"""Where the nodes are, and how they are asked: plain HTTP, one short question each."""

from __future__ import annotations

import contextlib
import functools
import http.client
import queue
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from memoire.net.http import connect_before
from memoire.net.resolver import LookupResult, NameResolver, shared_names
from memoire.security.tokens import Tokens

RESOLVE_INTERVAL = 5.0
"""Seconds between two look-ups of a name."""
LOOKUP_TIMEOUT = 3.0
"""Seconds that a look-up of all names may take."""
MAX_NODES = 1024
MAX_ANSWER_BYTES = 16 << 20
"""Bytes of one page."""
MAX_TOTAL_PAGE_BYTES = 128 << 20


class NodeError(Exception):
    """A node did not answer, or not with what was asked for; says why."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text, status)
        self.text, self.status = text, status

    def __str__(self) -> str:
        return self.text


def ask(url: str, path: str, *, token: Tokens | str | None = None, timeout: float = 2.0, accept: str = "") -> bytes:
    """The body of a page; the first of the tokens is given.

    Args:
        timeout: Seconds for everything: to find and reach the node, and to have the whole answer.

    Raises:
        NodeError: nobody answers in time, or something else than 200.
    """
    given = token.first if isinstance(token, Tokens) else token
    headers = {"Accept": accept or "*/*"} | ({} if given is None else {"Authorization": f"Bearer {given}"})
    try:
        status, body = _get(url, path, headers, time.monotonic() + timeout)
    except TimeoutError:
        raise NodeError(f"{url} does not answer: {path} did not come as a whole within {timeout:g} s") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NodeError(f"{url} does not answer: {_words(error)}") from None
    if len(body) > MAX_ANSWER_BYTES:
        raise NodeError(f"{url}{path} answered with more than {MAX_ANSWER_BYTES} bytes")
    if status != 200:
        raise NodeError(f"{url}{path} answered {status}: {_reason(body)}", status)
    return body


class NodeQuestions:
    """Pages of one node, one after the other, within so many seconds in all.

    Args:
        timeout: Seconds that it has for one page.
        seconds: And for all of them.
        is_over: Asked before each page: whether nobody waits for them any more.
        max_bytes: Bytes that all pages may have together.
    """

    def __init__(
        self,
        url: str,
        token: Tokens | str | None,
        timeout: float,
        seconds: float,
        is_over: Callable[[], bool],
        *,
        max_bytes: int = MAX_TOTAL_PAGE_BYTES,
    ) -> None:
        self._url, self._token, self._timeout, self._seconds, self._is_over = url, token, timeout, seconds, is_over
        self._max_bytes = max_bytes
        self._deadline, self._bytes = time.monotonic() + seconds, 0

    def get(self, path: str) -> bytes:
        """The body of a page.

        Raises:
            NodeError: as `ask`; or all pages together took too long, or are too long.
        """
        left = self._deadline - time.monotonic()
        if left <= 0.0 or self._is_over():
            why = "the dashboard ends" if left > 0.0 else f"its pages took more than {self._seconds:g} s"
            raise NodeError(f"{self._url} was not asked for {path}: {why}")
        body = ask(self._url, path, token=self._token, timeout=min(self._timeout, left))
        self._bytes += len(body)
        if self._bytes > self._max_bytes:
            raise NodeError(f"{self._url} answered with more than {self._max_bytes} bytes in all")
        return body

    def json(self, path: str) -> dict[str, Any]:
        """The same, read."""
        told: dict[str, Any] = msgspec.json.decode(self.get(path))
        return told


def _get(url: str, path: str, headers: dict[str, str], deadline: float) -> tuple[int, bytes]:
    """Status and body of a page, up to a byte more than is taken."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80)
    with contextlib.closing(connection):
        connection.sock = connect_before(connection.host, connection.port, deadline)
        connection.request("GET", parts.path.rstrip("/") + path, headers=headers)
        with connection.getresponse() as answer:
            return answer.status, answer.read(MAX_ANSWER_BYTES + 1)


def _words(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or str(error) or type(error).__name__)


def _reason(body: bytes) -> str:
    try:
        said: Any = msgspec.json.decode(body)
        return str(said["error"])[:300]
    except (msgspec.DecodeError, KeyError, TypeError):
        return "it does not say why"


class NodeAddresses:
    """The nodes' addresses: those given, and those of names, looked up on threads of their own.

    Args:
        given: "http://..." or "dns:NAME:PORT".
        resolver: Looks names up; None is the one of this process.
    """

    def __init__(self, given: Iterable[str], resolver: NameResolver | None = None) -> None:
        given = tuple(given)
        self._fixed = [each.rstrip("/") for each in given if not each.startswith("dns:")]
        self._names = [each[4:] for each in given if each.startswith("dns:")]
        self._resolver = resolver or shared_names()
        self._found: dict[str, list[str]] = {}
        self.trouble: dict[str, str] = {}
        """Names that were not found, and why."""
        self._closed = threading.Event()

    def begin(self) -> None:
        """Look the names up again and again, until `close`."""
        if self._names:
            threading.Thread(target=self._run, name="memoire-dashboard-dns", daemon=True).start()

    def now(self) -> list[str]:
        """All of them, each once."""
        found = [url for name in self._names for url in self._found.get(name, [])]
        return list(dict.fromkeys([*self._fixed, *found]))[:MAX_NODES]

    def close(self) -> None:
        """Look nothing up any more."""
        self._closed.set()

    def look(self, timeout: float = LOOKUP_TIMEOUT) -> None:
        """Look all names up once, all at the same time; addresses found before stay if the name server is silent.

        Args:
            timeout: Seconds for all of them. A later answer counts at the next look.
        """
        deadline = time.monotonic() + timeout
        answers: queue.SimpleQueue[tuple[str, LookupResult]] = queue.SimpleQueue()
        for name in self._names:
            self._resolver.ask(name.rpartition(":")[0], functools.partial(_pass_on, answers, name))
        silent = dict.fromkeys(self._names, f"no answer from the name server within {timeout:g} s")
        with contextlib.suppress(queue.Empty):
            while silent:
                name, found = answers.get(timeout=max(0.0, deadline - time.monotonic()))
                silent.pop(name, None)
                self._take(name, found)
        self.trouble |= silent

    def _take(self, name: str, found: LookupResult) -> None:
        try:
            urls = _urls(found.addresses, int(name.rpartition(":")[2]))
        except ValueError:
            self.trouble[name] = f"dns:{name} has no port: give its number, as in dns:NAME:8080"
            return
        if found.trouble:
            self.trouble[name] = found.trouble
        else:
            self._found[name] = urls
            self.trouble.pop(name, None)

    def _run(self) -> None:
        while not self._closed.is_set():
            began = time.monotonic()
            self.look()
            self._closed.wait(max(0.1, RESOLVE_INTERVAL - (time.monotonic() - began)))


def _pass_on(answers: queue.SimpleQueue[tuple[str, LookupResult]], name: str, found: LookupResult) -> None:
    answers.put((name, found))


def _urls(addresses: Iterable[str], port: int) -> list[str]:
    return [f"http://[{each}]:{port}" if ":" in each else f"http://{each}:{port}" for each in sorted(addresses)]
