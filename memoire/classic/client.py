"""Classic client over `client.Client`: `ReplayMemoryClient`, and its local memory `rem`."""

from __future__ import annotations

import threading
from typing import Any

from memoire import Client, Memory
from memoire.building import ClosingContext, Held, StrictAttributes, whole
from memoire.errors import ForkedError, MemoireError

from .fields import seven_roots
from .memory import ReplayMemory, uuid_of


class ClientMemory(ReplayMemory):
    """Local memory of a client, which counts every closed episode. `sync_sizes` replaces the engine's memory."""

    __slots__ = ("_client",)

    def __init__(self, client: Client) -> None:
        self._set_up(client.schema, client.uuid, client.client_id)
        self._client = client

    @property
    def memory(self) -> Memory:
        """Memory of the engine that the client holds now."""
        return self._client.memory

    def close_episode(self, *flags: Any, lane: int = 0, **ending: Any) -> None:
        """Close the open episode as `ReplayMemory` does, and count the episode for the server."""
        length, episode_return = self.memory.open_length(lane), self.memory.open_return(lane)
        super().close_episode(*flags, lane=lane, **ending)
        self._client.on_entries(length)
        self._client.on_episode(lane, length, episode_return)


class ReplayMemoryClient(ClosingContext, StrictAttributes):
    """Actor's client: a local memory, from which caches are drawn and pushed to the server.

    Example:
        client = memoire.ReplayMemoryClient("tcp://server:5562", "tcp://server:5560", "tcp://server:5561")
        client.rem.new_episode()

    Args:
        sub_endpoint: Address at which the server publishes.
        req_endpoint: Address of a request worker, or of a proxy in front of several.
        push_endpoint: Address of a pull worker for caches, or of a proxy in front of several.
        input_uuid: Label of this client in log lines: a number below 2**32, or an IPv4 address as text. 0 draws one.
        timeout: Seconds that this call and later calls without their own timeout may wait for the server.
        context: ZeroMQ context; None is the process's own. inproc:// addresses do not cross contexts.
        seed: Makes draws repeatable.
        options: Further arguments of `client.Client`.

    Sizes and every parameter come from the server. Methods are safe to call from several threads; a client does not
    survive a fork.

    Raises:
        MemoireTimeout: (a TimeoutError) no server answered at req_endpoint.
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
        self._lock = threading.Lock()  # guards _subscriptions
        self.push_failure = ""
        """Reason why the last `push_cache` returned -1; "" after one that returned 0."""
        self._guard()

    @property
    def rem(self) -> ReplayMemory:
        """Local memory of the client."""
        return self._rem

    @property
    def client(self) -> Client:
        """Underlying client, for functions that the classic API lacks."""
        return self._client

    def sync_sizes(self, max_step: int, *, timeout: float | None = None) -> None:
        """Fetch sizes and all parameters again, and begin an empty local memory of `max_step` entries.

        The given `max_step` replaces the server's. Entries of the old memory are discarded; totals are kept. Returns
        when the server has answered.

        Raises:
            MemoireTimeout: no server answered; the memory is not changed.
        """
        self._client.sync(whole("max_step", max_step, 1), timeout, overrides=True)

    def update_counter(self, *, timeout: float | None = None) -> None:
        """Report this client's totals to the server; to be called after each episode. Returns when the server has them.

        Raises:
            MemoireTimeout: no server answered. Totals are cumulative, so the next call reports them in full.
        """
        self._client.update(timeout=timeout)

    def push_cache(self, *, timeout: float | None = None) -> int:
        """Draw cache_size samples from the local memory, with replacement and in proportion to weight, and push them.

        Args:
            timeout: Seconds to wait for room if too many bytes wait to be sent.

        Returns:
            0, or -1 if nothing was pushed; `push_failure` says why. The state of the memory, the network or the server
            raises no exception.
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
        """Send a line to the server's log file. Lines are kept until the server has them.

        Waits only if very many lines are kept (the server is away for long), at most `timeout` seconds (None:
        `limits.log_timeout`); then the line is dropped, counted, and a warning is logged.
        """
        self._client.log(log_message, timeout)

    def sub_bytes(self, topic: str, *, timeout: float | None = None) -> bytes | str:
        """Return the next message of a topic, of any size, in the type in which it was published.

        The first call subscribes and returns the newest message, if there was one. Later calls return the following
        messages in order; a client that is too slow misses some.

        Args:
            timeout: Seconds to wait; None waits without limit.

        Raises:
            MemoireTimeout: no message arrived.
            Closed: the client was closed while this call waited.
        """
        self._client._check_open()  # a forked process would never release the lock
        with Held(self._lock):
            subscription = self._subscriptions.get(topic)
            if subscription is None:
                subscription = self._subscriptions[topic] = self._client.subscribe(topic)
        return subscription.receive(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Send waiting messages for at most `timeout` seconds, and disconnect. Further calls do nothing."""
        self._client.close(timeout)
