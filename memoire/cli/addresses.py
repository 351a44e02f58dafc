"""One address for every command: that for requests and that of a node's pages lead to each other, by asking the node.

    tcp://proxy:5560   ── HELLO ──▶  http://proxy:8080, http://server-0:8080, ...   for top, logs, dashboard
    http://proxy:8080  ── GET /status ──▶  tcp://proxy:5560                         for totals, run, doctor, ...

The page of a proxy, given alone to top, logs or dashboard, leads to those of its servers by both ways in turn.

What was asked, and what came of it, goes to standard error.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from memoire.errors import AuthError, EndpointError, MemoireError, ParameterError
from memoire.nodes.supervision import note

ASK_TIMEOUT = 5.0
"""Seconds that a node has to answer."""
MAX_STATUS_BYTES = 16 << 20
REQUESTS = ("tcp://", "ipc://")
PAGES = ("http://",)
Say = Callable[[str], object]


def pages_of(addresses: Sequence[str], keys: str | None = None, *, say: Say = note) -> list[str]:
    """Where the pages of nodes are: each address as it is, or what the node at an address for requests says of itself,
    and of all servers behind it. The page of a proxy that is given alone is asked for its servers, too.

    Args:
        keys: This process' keys folder; None is that of $MEMOIRE_KEYS, if it is set.

    Raises:
        EndpointError: nobody answers there, or no node there shows pages.
    """
    if len(addresses) == 1 and (behind := _behind(addresses[0], keys, say)):
        return behind
    found: dict[str, None] = {}
    for address in addresses:
        if not address.startswith(REQUESTS):
            found[address] = None
            continue
        pages = _asked(address, keys)
        say(f"asked {address} for pages: {', '.join(pages)}")
        found |= dict.fromkeys(pages)
    return list(found)


def endpoint_of(address: str, *, say: Say = note) -> str:
    """The address for requests: as it is, or as the page of a node says.

    Raises:
        EndpointError: nobody answers there, or it is no server, proxy or relay.
    """
    if not address.startswith(PAGES):
        return address
    endpoint = _endpoint(address)
    say(f"asked {address} for its address: {endpoint}")
    return endpoint


def _behind(page: str, keys: str | None, say: Say) -> list[str]:
    """Pages of a proxy and of its servers; [] where a page is of another node, or does not answer."""
    place = urllib.parse.urlsplit(page if "://" in page else f"http://{page}")
    if place.scheme != "http" or page.startswith("dns:"):
        return []
    try:
        facts = _facts(f"http://{place.netloc}")
    except MemoireError:
        return []  # whoever reads the page says why
    if facts.get("role") not in ("proxy", "relay"):
        return []
    try:
        pages = _asked(_requests(place.geturl(), facts), keys)
    except EndpointError as error:
        say(f"only {page} is looked at, and no server behind it: {error}")
        return []
    say(f"asked {page} for pages: {', '.join(pages)}")
    return pages


def _asked(address: str, keys: str | None) -> list[str]:
    from memoire.net.addresses import page_seen_from
    from memoire.security.keys import Keys
    from memoire.wire import messages

    from . import doctor

    own = Keys.of(keys, "learner")
    hello = messages.Hello(role="pages", host=socket.gethostname()[:256], pid=os.getpid())
    try:
        with doctor.asking(address, ASK_TIMEOUT, own) as asker:
            answer = asker.ask(hello)[0].body
    except doctor.StepFailed as sick:
        if isinstance(sick.__cause__, AuthError):
            raise sick.__cause__ from None
        raise EndpointError(address, "ask", sick.found, f"an address that answers. {sick.advice.rstrip('.')}") from sick
    pages = answer.pages if isinstance(answer, messages.Welcome) else []
    if not pages:
        instead = "the address of its pages (--http), or start it with --http 127.0.0.1:8080"
        raise EndpointError(address, "find the pages of", "no node there shows any", instead)
    return [page_seen_from(address, page) for page in pages]


def _endpoint(address: str) -> str:
    return _requests(address, _facts(address))


def _requests(address: str, facts: Mapping[str, Any]) -> str:
    """The address for requests of the node whose page said these facts."""
    from memoire.net.addresses import seen_from

    endpoint = facts.get("endpoints", {}).get("request", "")
    if not isinstance(endpoint, str) or not endpoint:
        raise EndpointError(address, "find requests at", "that is no server, proxy or relay", "another node")
    return seen_from(f"tcp://{urllib.parse.urlsplit(address).netloc}", endpoint)


def _facts(address: str) -> Mapping[str, Any]:
    """What a node's page says of it."""
    place = urllib.parse.urlsplit(address)
    if place.port is None or not place.hostname:
        raise ParameterError("ADDRESS", address, "http://HOST:PORT of a node's pages, or its tcp:// address")
    try:
        status, facts = _status(place.hostname, place.port)
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = str(error) or "no answer in time"
        raise EndpointError(address, "ask", reason, "an address that answers, such as tcp://proxy:5560") from error
    if status != http.client.OK:
        raise EndpointError(address, "ask", f"it answers with status {status}", "the tcp:// address of this node")
    return facts if isinstance(facts, dict) else {}


def _status(host: str, port: int) -> tuple[int, Any]:
    from memoire.net.addresses import connect_before

    connection = http.client.HTTPConnection(host, port)
    connection.sock = connect_before(host, port, time.monotonic() + ASK_TIMEOUT)
    try:
        connection.request("GET", "/status?clients=no")
        answer = connection.getresponse()
        body = answer.read(MAX_STATUS_BYTES)
        return answer.status, json.loads(body) if answer.status == http.client.OK else None
    finally:
        connection.close()
