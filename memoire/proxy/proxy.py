"""The proxy: one stable address between many clients and several servers. A relay is the same, on a Unix socket.

    clients ──requests──▶ ROUTER ┐                   ┌ DEALER ──▶ server a
            ──caches────▶ PULL   ├─ by header.home ──┤ PUSH                      one queue for each back, in bytes:
            ◀──notices─── PUB    ┘                   ├ DEALER ──▶ server b       the oldest are lost (and counted)
                                                     └ PUSH

Every message names its home, so the proxy keeps nothing about clients. It never waits for a server: while one is
away, its queue fills and overflows, clients send their requests again, and everybody else goes on. Models are kept
here and handed out from here. Behind a proxy may be another one: its WELCOME names all servers that it reaches.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from memoire.arguments import checked_names, process_name, seconds, whole
from memoire.arguments import name as checked_name
from memoire.errors import Closed, EndpointError
from memoire.limits import CONTAINER, QUEUE_BYTES, Container, Limits, Reservation
from memoire.net import addresses, process, sockets
from memoire.net.curve_server import Gate
from memoire.net.poller import ALL_BYTES
from memoire.net.sockets import Context, shared_context
from memoire.net.thread import END_TIMEOUT, Node, close_at_exit
from memoire.security.access import Security
from memoire.security.keys import Given, Keys

from .io import WAITING_REQUESTS, ProxyThread, QueueSizes
from .router import BackStats

if TYPE_CHECKING:
    from memoire.figures import DROPPED_REPLIES, FAULTS, MODEL_BYTES, MODEL_VERSION, REFUSED, UPTIME, by, counter

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProxyStats:
    """A proxy at one moment; for whoever watches."""

    # fmt: off
    name: str
    endpoint: str
    uptime: Annotated[float, UPTIME]
    backs: Annotated[tuple[BackStats, ...], by("back", "endpoint")]
    requests: Annotated[int, counter("proxy_requests", "Requests", "Requests forwarded to servers, or answered by the "
        "proxy.")]
    replies: Annotated[int, counter("proxy_replies", "Replies", "Replies forwarded to clients.")]
    caches: Annotated[int, counter("proxy_caches", "Caches", "Caches forwarded to servers, or put into a queue for "
        "them.")]
    cache_bytes: Annotated[int, counter("proxy_cache_bytes", "Bytes of caches", "Bytes of these caches.")]
    homeless: Annotated[int, counter("proxy_homeless", "Homeless", "Messages for a server that is not known here.")]
    dropped_replies: Annotated[int, DROPPED_REPLIES]
    refused: Annotated[dict[str, int], REFUSED]
    models: Annotated[dict[str, int], MODEL_VERSION]
    model_bytes: Annotated[int, MODEL_BYTES]
    descriptors: int
    """File descriptors that the process has open."""
    most_descriptors: int
    """How many it may have."""
    security: Security
    """Who may come, and who was sent away."""
    faults: Annotated[int, FAULTS]
    # fmt: on


class Proxy(Node):
    """Forwards between clients and servers; see the module.

    Args:
        front: Address for requests; caches and notices are beside it, as a server's are. "ipc:///run/relay" makes a
            relay.
        servers: Addresses of servers or of other proxies. They are resolved and connected to in the background, up or
            not.
        push_front, pub_front: Addresses for caches and notices, if they are not beside `front`.
        queue_bytes: Bytes of caches that wait for each server. None is 256 MiB; in a container with a memory limit,
            at most a share of half of that.
        name: What people call it on pages and in logs. None takes $MEMOIRE_NAME, in a Pod of Kubernetes the name of
            the Pod, and else a part of its id.
        keys: This process' keys folder (or a cluster's), for both sides: see docs/operations.md. None takes
            $MEMOIRE_KEYS, and without it lets everybody in.
        tune_process: Let this process be tuned for nodes, the first time that one asks for it: see docs/operations.md.

    Raises:
        EndpointError: an address is in use or malformed.
        KeyFileError: the keys cannot be used.
        ParameterError: its container has less memory than `queue_bytes` or `model_bytes` make.
    """

    CALLED = "this proxy"
    ROLE = "proxy"
    _container: ClassVar[Container] = CONTAINER
    """That in which its memory is reserved."""
    _PARAMETERS = "Parameters are the server's: write configure(NAME=...) of a server or reader."
    CLOSED_AT_EXIT = 1

    @checked_names()
    def __init__(
        self,
        front: str,
        servers: Sequence[str],
        *,
        push_front: str | None = None,
        pub_front: str | None = None,
        queue_bytes: int | None = None,
        name: str | None = None,
        context: Context | None = None,
        limits: Limits | None = None,
        keys: Given = None,
        tune_process: bool = True,
    ) -> None:
        servers = _checked(servers)
        if tune_process:
            process.tune()
        self._reserved = Reservation(self._container)

        def queue(limits: Limits) -> Limits:
            self._queues = self._share_out(limits, len(servers), queue_bytes)
            return limits

        self._limits = self._reserved.limits(limits or Limits(), queue, model_bytes=1)
        context = context or shared_context()
        self._gate = Gate(context, Keys.of(keys, "proxy"))
        self._pid = os.getpid()
        self._closing = threading.Event()
        self._close_lock = threading.Lock()
        client = secrets.token_bytes(16)
        self.name = process_name(name) or f"proxy-{client.hex()[:8]}"
        try:
            self._thread = ProxyThread(
                (front, push_front, pub_front),
                servers,
                gate=self._gate,
                client=client,
                name=self.name,
                queues=self._queues,
                rng=random.Random(secrets.randbits(64)),
                limits=self._limits,
                context=context,
                owner=self,
            )
        except BaseException:
            self._gate.close()
            self._reserved.release()
            raise
        self._endpoints = self._thread.front.endpoints
        if trouble := process.too_few(self._limits.tuning.expected_clients):
            _log.warning("proxy %s: %s", self.name, trouble)
        self._thread.worker.start()
        close_at_exit(self)

    def _share_out(self, limits: Limits, servers: int, queue_bytes: int | None) -> QueueSizes:
        """Reserve what may wait for so many servers, and of replies. Raises ParameterError."""
        usual = self._reserved.default("queue_bytes", (2 * servers + 1) * QUEUE_BYTES) // (2 * servers + 1)
        caches = usual if queue_bytes is None else whole("queue_bytes", queue_bytes, 0)
        queues = QueueSizes(caches, min(usual, limits.tuning.request_bytes * WAITING_REQUESTS), min(usual, ALL_BYTES))
        self._reserved.reserve("queue_bytes", caches, queues.of(servers))
        return queues

    @property
    def keys(self) -> Keys | None:
        """Of this process; None where everybody is let in."""
        return self._gate.keys

    @property
    def endpoint(self) -> str:
        """Address for requests, as bound: what clients connect to."""
        return self._endpoints.request

    @property
    def push_endpoint(self) -> str:
        """Address for caches, as bound."""
        return self._endpoints.push

    @property
    def pub_endpoint(self) -> str:
        """Address for notices, as bound."""
        return self._endpoints.publish

    def show_pages(self, address: str) -> None:
        """Tell whoever asks that the pages about this proxy are at "http://HOST:PORT"."""
        self._thread.router.pages = (checked_name("address", address),)

    def set_servers(self, servers: Sequence[str]) -> None:
        """From now on forward to these addresses. Those that are new are connected to; the clients of those that are
        not in the list any more are told to ask for another home, where they tell everything anew. From any thread.

        A server that is taken off keeps what it has counted: read the totals with it, or drain it before (`memoire
        drain`). One that does not answer when it is taken off may have log lines of which its clients never heard:
        these are then logged elsewhere again.

        Raises:
            EndpointError: an address is none, or there is none in the list; nothing was changed.
            ParameterError: the memory of the container has no room for the queues of so many servers.
        """
        if self._closing.is_set():
            raise Closed("this proxy")
        servers = _checked(servers)
        self._reserved.reserve("queue_bytes", self._queues.caches, self._queues.of(len(servers)))
        self._thread.forward_to(servers)

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of the servers that answered so far."""
        return self._thread.router.servers

    def stats(self) -> ProxyStats:
        """All figures at this moment."""
        thread, counts = self._thread, self._thread.counts
        return ProxyStats(
            name=self.name,
            endpoint=self.endpoint,
            uptime=time.monotonic() - thread.started,
            backs=tuple(back.stats() for back in thread.router.backs),
            requests=counts.requests,
            replies=counts.replies,
            caches=counts.caches,
            cache_bytes=counts.cache_bytes,
            homeless=counts.homeless,
            dropped_replies=thread.front.lanes.dropped,
            refused=dict(counts.refused),
            models=thread.cache.store.versions(),
            model_bytes=thread.cache.store.bytes,
            descriptors=process.used(),
            most_descriptors=process.limit(),
            security=self._gate.security(),
            faults=thread.worker.errors,
        )

    def liveness(self) -> list[str]:
        """What only a restart can mend, a sentence each: its thread died or is stuck. Empty while all is well."""
        return self._thread.worker.trouble()

    def readiness(self) -> list[str]:
        """Why this proxy should get no new clients just now, a sentence each; empty when it should.

        One server of several that is away is no reason: the others' clients would be turned away with its own.
        """
        if self._closing.is_set():
            return ["closing: this proxy is about to end"]
        backs = list(self._thread.router.backs)
        whys = [f"denied: {why}" for why in dict.fromkeys(back.denied for back in backs) if why]
        if not any(back.names for back in backs):
            return [f"starting: none of {', '.join(back.endpoint for back in backs)} has answered yet", *whys]
        if all(back.is_away for back in backs):
            return [f"away: none of {', '.join(back.endpoint for back in backs)} answers", *whys]
        trouble = process.shared_guard().trouble()
        return [*self._gate.trouble(), *([trouble] if trouble else [])]

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing.is_set()

    def wait_closed(self, timeout: float | None = None) -> bool:
        """Wait until somebody closes the proxy; False when `timeout` seconds passed first."""
        return self._closing.wait(seconds(timeout))

    def close(self, timeout: float | None = None) -> None:
        """End the thread and close every socket within `timeout` seconds. May be called again, and from any thread."""
        patience = seconds(timeout, self._limits.close_timeout)
        self._closing.set()
        with self._closer(time.monotonic() + patience) as is_mine:
            if not is_mine:
                return
            if not self._thread.worker.stop(max(END_TIMEOUT, patience), linger=min(patience, 1.0)):
                _log.warning("proxy %s: its thread did not end in time", self.name)
            self._gate.close()
            self._reserved.release()
            sockets.wait_unbound((self.endpoint, self.push_endpoint, self.pub_endpoint), patience)

    def __repr__(self) -> str:
        return f"<memoire.Proxy {self.name!r} at {self.endpoint}>"


def _checked(servers: Sequence[str]) -> list[str]:
    """The addresses of a list, each once."""
    if isinstance(servers, str) or not servers:
        given = repr([servers] if isinstance(servers, str) else ["tcp://server-0:5560"])
        raise EndpointError(str(servers), "connect to", "a proxy needs a list of at least one server", given)
    for endpoint in servers:
        addresses.check(endpoint, "connect to")
    return list(dict.fromkeys(servers))
