"""Proxy: one stable address between many clients and several servers. A relay is a proxy on a Unix socket.

    clients ──requests──▶ ROUTER ┐                   ┌ DEALER ──▶ server a
            ──caches────▶ PULL   ├─ by header.home ──┤ PUSH                      one queue per server, in bytes:
            ◀──notices─── PUB    ┘                   ├ DEALER ──▶ server b       the oldest are lost (and counted)
                                                     └ PUSH

Every message names its home server, so that the proxy keeps no state of clients. The proxy never waits for a server: if
a server is away, its queue overflows, its clients retry, and other clients are not affected. The proxy caches models
and hands them out. Behind a proxy may be another proxy, whose WELCOME names all servers that it reaches.
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
from memoire.limits import CONTAINER, QUEUE_BYTES, Limits, MemoryLimits, Reservation
from memoire.net import addresses, process, sockets
from memoire.net.curve_server import Gate
from memoire.net.poller import ALL_BYTES
from memoire.net.sockets import Context, shared_context
from memoire.net.thread import END_TIMEOUT, Node, close_at_exit
from memoire.security.access import Security
from memoire.security.keys import Keys, KeysLike

from .io import WAITING_REQUESTS, ProxyThread, QueueSizes
from .router import BackStats

if TYPE_CHECKING:
    from memoire.figures import DROPPED_REPLIES, FAULTS, MODEL_BYTES, MODEL_VERSION, REFUSED, UPTIME, by, counter

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProxyStats:
    """Frozen figures of a proxy, for monitoring."""

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
    homeless: Annotated[int, counter("proxy_homeless", "Homeless", "Messages for servers unknown to the proxy.")]
    dropped_replies: Annotated[int, DROPPED_REPLIES]
    refused: Annotated[dict[str, int], REFUSED]
    models: Annotated[dict[str, int], MODEL_VERSION]
    model_bytes: Annotated[int, MODEL_BYTES]
    descriptors: int
    """Number of open file descriptors of the process."""
    most_descriptors: int
    """Maximum number of file descriptors of the process."""
    security: Security
    """Access rules of the proxy, and its rejections."""
    faults: Annotated[int, FAULTS]
    # fmt: on


class Proxy(Node):
    """Node that forwards messages between clients and servers.

    Args:
        front: Address for requests; the ports for caches and notices follow, as for a server. "ipc:///run/relay" makes
            a relay.
        servers: Addresses of servers or of other proxies. The proxy resolves and connects them in the background, and
            starts without waiting for them.
        push_front, pub_front: Addresses for caches and notices, if they do not follow `front`.
        queue_bytes: Bytes of caches that wait for each server. None is 256 MiB; in a container with a memory limit,
            at most a share of half of the limit.
        name: Name on pages and in logs. None takes $MEMOIRE_NAME, in a Pod of Kubernetes the name of the Pod, and else
            a part of the proxy's id.
        keys: Keys folder of this process or of a cluster, for both sides: see docs/operations.md. None takes
            $MEMOIRE_KEYS; if that is not set either, the proxy accepts every client.
        tune_process: Tune this process for nodes, once per process: see docs/operations.md.

    Raises:
        EndpointError: an address is in use or malformed.
        KeyFileError: the keys cannot be used.
        ParameterError: the container has too little memory for `queue_bytes` or `model_bytes`.

    Example:
        with memoire.Proxy("tcp://*:5570", ["tcp://server-0:5560", "tcp://server-1:5560"]) as proxy:
            proxy.wait_closed()
    """

    CALLED = "this proxy"
    ROLE = "proxy"
    _container: ClassVar[MemoryLimits] = CONTAINER
    """Container whose memory limit bounds the reservations."""
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
        keys: KeysLike = None,
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
        self._gate = Gate(context, Keys.from_setting(keys, "proxy"))
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
        if trouble := process.limit_advice(self._limits.tuning.expected_clients):
            _log.warning("proxy %s: %s", self.name, trouble)
        self._thread.worker.start()
        close_at_exit(self)

    def _share_out(self, limits: Limits, servers: int, queue_bytes: int | None) -> QueueSizes:
        """Reserve memory for the queues of this many servers, and for replies. Raise ParameterError."""
        usual = self._reserved.default("queue_bytes", (2 * servers + 1) * QUEUE_BYTES) // (2 * servers + 1)
        caches = usual if queue_bytes is None else whole("queue_bytes", queue_bytes, 0)
        queues = QueueSizes(caches, min(usual, limits.tuning.request_bytes * WAITING_REQUESTS), min(usual, ALL_BYTES))
        self._reserved.reserve("queue_bytes", caches, queues.for_servers(servers))
        return queues

    @property
    def keys(self) -> Keys | None:
        """Keys of this process; None if every client is accepted."""
        return self._gate.keys

    @property
    def endpoint(self) -> str:
        """Bound address for requests; clients connect to this address."""
        return self._endpoints.request

    @property
    def push_endpoint(self) -> str:
        """Bound address for caches and episodes."""
        return self._endpoints.push

    @property
    def pub_endpoint(self) -> str:
        """Bound address for notices, which clients subscribe to."""
        return self._endpoints.publish

    def show_pages(self, address: str) -> None:
        """Announce the address of the pages about this proxy, "http://HOST:PORT", to clients."""
        self._thread.router.pages = (checked_name("address", address),)

    def set_servers(self, servers: Sequence[str]) -> None:
        """Replace the list of servers. The proxy connects new addresses. Clients of removed addresses are told to ask
        for another home server, to which they report everything again. Callable from any thread.

        A removed server keeps its counts: read the totals together with that server, or drain it before (`memoire
        drain`). A removed server that no longer answers may have log lines that it did not acknowledge; clients log
        these lines again elsewhere.

        Raises:
            EndpointError: an address is malformed, or the list is empty; nothing was changed.
            ParameterError: the container has too little memory for the queues of this many servers.
        """
        if self._closing.is_set():
            raise Closed("this proxy")
        servers = _checked(servers)
        self._reserved.reserve("queue_bytes", self._queues.caches, self._queues.for_servers(len(servers)))
        self._thread.forward_to(servers)

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of the servers that have answered so far."""
        return self._thread.router.servers

    def stats(self) -> ProxyStats:
        """Return the current figures of the proxy."""
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
            dropped_replies=thread.front.reply_queues.dropped,
            refused=dict(counts.refused),
            models=thread.cache.store.versions(),
            model_bytes=thread.cache.store.bytes,
            descriptors=process.open_descriptors(),
            most_descriptors=process.max_descriptors(),
            security=self._gate.security(),
            faults=thread.worker.errors,
        )

    def liveness(self) -> list[str]:
        """Return the problems that only a restart repairs, a sentence each: a dead or stuck thread."""
        return self._thread.worker.problem()

    def readiness(self) -> list[str]:
        """Return the reasons, a sentence each, why new clients must not connect now; empty if the proxy is ready.

        A single absent server among several is no reason, because that would also turn the other servers' clients away.
        """
        if self._closing.is_set():
            return ["closing: this proxy is about to end"]
        backs = list(self._thread.router.backs)
        reasons = [f"denied: {why}" for why in dict.fromkeys(back.denial_reason for back in backs) if why]
        if not any(back.names for back in backs):
            return [f"starting: none of {', '.join(back.endpoint for back in backs)} has answered yet", *reasons]
        if all(back.is_away for back in backs):
            return [f"away: none of {', '.join(back.endpoint for back in backs)} answers", *reasons]
        trouble = process.shared_guard().problem()
        return [*self._gate.problem(), *([trouble] if trouble else [])]

    @property
    def closed(self) -> bool:
        """True after `close` was called."""
        return self._closing.is_set()

    def wait_closed(self, timeout: float | None = None) -> bool:
        """Wait until another thread closes the proxy. Return False if `timeout` seconds passed first."""
        return self._closing.wait(seconds(timeout))

    def close(self, timeout: float | None = None) -> None:
        """End the thread and close every socket within `timeout` seconds. Callable repeatedly and from any thread."""
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
    """Return the valid addresses of a list without duplicates."""
    if isinstance(servers, str) or not servers:
        example = repr([servers] if isinstance(servers, str) else ["tcp://server-0:5560"])
        raise EndpointError(str(servers), "connect to", "a proxy needs a list of at least one server", example)
    for endpoint in servers:
        addresses.check(endpoint, "connect to")
    return list(dict.fromkeys(servers))
