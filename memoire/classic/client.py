"""The page's `ReplayMemoryClient` over `client.Client`, and the `rem` that records its episodes."""

from __future__ import annotations

import threading
from typing import Any

from memoire import Client, Memory
from memoire.building import ClosingContext, Held, StrictAttributes, whole
from memoire.errors import ForkedError, MemoireError

from .fields import seven_roots
from .memory import ReplayMemory, uuid_of


class ClientMemory(ReplayMemory):
    """A client's `rem`: its memory of the moment, which `sync_sizes` replaces, with every closed episode counted."""

    __slots__ = ("_client",)

    def __init__(self, client: Client) -> None:
        self._settle(client.schema, client.uuid, client.client_id)
        self._client = client

    @property
    def memory(self) -> Memory:
        """The engine that the client holds now."""
        return self._client.memory

    def close_episode(self, *flags: Any, lane: int = 0, **ending: Any) -> None:
        """As of `ReplayMemory`; the client counts the episode."""
        length, earned = self.memory.open_length(lane), self.memory.open_return(lane)
        super().close_episode(*flags, lane=lane, **ending)
        self._client.on_entries(length)
        self._client.on_episode(lane, length, earned)


class ReplayMemoryClient(ClosingContext, StrictAttributes):
    """The actor's side: a local memory, from which caches are drawn and pushed to the server.

    Args:
        sub_endpoint: Where the server publishes.
        req_endpoint: Where a request worker, or a proxy in front of several, answers.
        push_endpoint: Where a pull worker, or a proxy in front of several, takes caches.
        input_uuid: What log lines call this client: a number below 2**32, or an IPv4 address as text. 0 draws one.
        timeout: Seconds that this and each later call may wait for the server, unless it is told otherwise.
        context: ZeroMQ context; None is the process's own. inproc:// addresses do not cross contexts.
        seed: Makes draws repeatable.
        options: Whatever else `client.Client` takes.

    Sizes and every parameter come from the server. Methods are safe to call from several threads; a client does not
    survive a fork.

    Raises:
        MemoireTimeout: (a TimeoutError) nobody answered at req_endpoint.
        SchemaError: the server stores other columns than the seven fields.
    """

    def __init__(
        self,
        sub_endpoint: str,
        req_endpoint: str,
        push_endpoint: str,
        input_uuid: int | str = 0,
        *,
        timeout: float = 10.0,
        context: Any = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        self._client: Client = Client(
            req_endpoint,
            push=push_endpoint,
            subscribe=sub_endpoint,
            input_uuid=uuid_of(input_uuid),
            live=False,
            timeout=timeout,
            context=context,
            seed=seed,
            **options,
        )
        try:
            seven_roots(self._client.schema, req_endpoint)
            self._rem = ClientMemory(self._client)
        except BaseException:
            self._client.close(timeout=0)
            raise
        self._subscriptions: dict[str, Any] = {}
        self._lock = threading.Lock()  # of _subscriptions
        self.push_failure = ""
        """Why the last `push_cache` returned -1; "" after one that returned 0."""
        self._guard()

    @property
    def rem(self) -> ReplayMemory:
        """The local memory."""
        return self._rem

    @property
    def client(self) -> Client:
        """The client itself, for whatever the page has no word for."""
        return self._client

    def sync_sizes(self, max_step: int, *, timeout: float | None = None) -> None:
        """Fetch sizes and every parameter again, and start a new local memory of `max_step` entries, whatever the
        server's `max_step` is.

        What the old one held is gone; totals go on. Returns when the server has answered.

        Raises:
            MemoireTimeout: nobody answered; the memory stays as it was.
        """
        self._client.sync(whole("max_step", max_step, 1), timeout, overrides=True)

    def update_counter(self, *, timeout: float | None = None) -> None:
        """Bring the server's totals up to date: to be called after each episode. Returns when the server has them.

        Raises:
            MemoireTimeout: nobody answered. The totals are cumulative, so that the next call makes up for it.
        """
        self._client.update(timeout=timeout)

    def push_cache(self, *, timeout: float | None = None) -> int:
        """Draw cache_size samples of the local memory, with replacement, in proportion to weight, and push them.

        Args:
            timeout: Seconds to wait for room where too many bytes are on their way.

        Returns:
            0, or -1 when nothing was pushed; `push_failure` says why. Never an exception for the state of the memory,
            the network or the server.
        """
        try:
            pushed = self._client.push_cache(timeout)
            self.push_failure = "" if pushed else self._client.push_reason
        except ForkedError:
            raise
        except MemoireError as problem:
            self.push_failure = str(problem)
        return -1 if self.push_failure else 0

    def write_log(self, log_message: str, *, timeout: float | None = None) -> None:
        """Have a line written to the server's log file. Lines are kept until the server has them.

        Waits only where very many are kept (the server is away for long), at most `timeout` seconds (None:
        `limits.log_timeout`); then the line is dropped, counted and warned of.
        """
        self._client.log(log_message, timeout)

    def sub_bytes(self, topic: str, *, timeout: float | None = None) -> bytes | str:
        """The next message of a topic, of any size, as the type it was published as.

        The first call subscribes and gets the newest message, if there was one; later ones get every further message in
        order, except where this client was too slow.

        Args:
            timeout: Seconds to wait; None waits for ever.

        Raises:
            MemoireTimeout: nothing came.
            Closed: the client was closed while this call waited.
        """
        self._client._check_open()  # before the lock: in a forked process nobody would give it back
        with Held(self._lock):
            subscription = self._subscriptions.get(topic)
            if subscription is None:
                subscription = self._subscriptions[topic] = self._client.subscribe(topic)
        return subscription.receive(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Send what is still to be sent, for as long as `timeout` allows, and leave. Further calls do nothing."""
        self._client.close(timeout)
