"""Publishing of models to all servers under one version, in chunks: state of each server, and next chunk to send.
Pure: no lock, no socket, no clock.

    publish "policy"    version 3 to a, b and c
    a, b                accepted it                        they have it
    c                   restarted, or was away             it gets the newest model after its next HELLO

The newest model of each topic is kept for later servers, until another run begins: models belong to a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from memoire.errors import Closed, MemoireError, Refused, escape
from memoire.models.model import Model
from memoire.tables import calls
from memoire.wire import messages
from memoire.wire.frames import Answer, Message

from .directory import Directory, RemoteServer, RunChange

LEAST_STRETCH = 1 << 16
"""Bytes of the shortest chunk that is tried at a server that refuses requests as large as this reader's."""
NOT_NOW = frozenset({"run", "client", "closed"})
"""Codes of refusals after which a server gets the same model again, after a HELLO that is sent at once."""
LATER = frozenset({"busy", "disk"})
"""Codes of refusals after which a server gets the same model again after its next HELLO: the cause ends by itself."""


class _Transfer:
    """State of sending a model to one server."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.is_heard = False  # the server has replied to a chunk


class _Delivery:
    """State of one server's models by topic: in transfer, accepted, refused, postponed."""

    def __init__(self) -> None:
        self.transfers: dict[str, _Transfer] = {}  # in progress
        self.taken: dict[str, int] = {}  # newest version that the server accepted or refused
        self.wrong: dict[str, MemoireError] = {}  # why the server refused the newest version
        self.put_off: dict[str, Refused] = {}  # refusals for now; the reader sends these models again

    def forget(self) -> None:
        """Clear the state, because another run has begun."""
        self.transfers.clear()
        self.taken.clear()
        self.put_off.clear()


@dataclass(frozen=True, slots=True)
class Send:
    """Chunk of a model to send to a server; the caller passes the reply or error to `Publishing.receive_answer`."""

    server: RemoteServer
    transfer: _Transfer
    offset: int
    length: int

    @property
    def body(self) -> messages.Publish:
        """Body of the PUBLISH request."""
        model = self.transfer.model
        return messages.Publish(
            topic=model.topic,
            size=model.size,
            checksum=model.checksum,
            text=model.is_text,
            version=model.version,
            offset=self.offset,
        )

    @property
    def sent_bytes(self) -> int:
        """Bytes of the chunk: fewer than `length` at the end of the model."""
        return min(self.length, self.transfer.model.size - self.offset)

    @property
    def payload(self) -> memoryview | None:
        """Chunk to send; None at the end of the model."""
        chunk = memoryview(self.transfer.model.body)[self.offset : self.offset + self.length]
        return chunk if len(chunk) else None

    @property
    def payload_checksum(self) -> int | None:
        """XXH3 of the chunk if it is the whole model; else None."""
        model = self.transfer.model
        return model.checksum if 0 < model.size == self.sent_bytes else None


@dataclass(frozen=True, slots=True)
class PublishOrder:
    """One call of `publish`: the model with its version, the servers known then, and the time of the call."""

    model: Model
    there: tuple[RemoteServer, ...]
    began: float


class Publishing:
    """Models that this reader publishes, and their state at each server. The owner locks calls of other threads.

    Args:
        directory: The reader's servers.
        stretch: Maximum bytes of a model in one message.
    """

    def __init__(self, directory: Directory, stretch: int) -> None:
        self.versions: dict[str, int] = {}
        """Newest version of each topic at any server."""
        self._directory, self._stretch = directory, stretch
        self._published: dict[str, Model] = {}  # newest model of each topic that this reader published in this run
        # A forgotten server's state stays while a chunk is in progress.
        self._deliveries: WeakKeyDictionary[RemoteServer, _Delivery] = WeakKeyDictionary()

    @property
    def has_published(self) -> bool:
        """True if this reader published a model in this run."""
        return bool(self._published)

    def _delivery(self, server: RemoteServer) -> _Delivery:
        if server not in self._deliveries:
            self._deliveries[server] = _Delivery()
        return self._deliveries[server]

    # Calls of the reader's thread; under the lock

    def publish(self, model: Model, now: float) -> tuple[PublishOrder, list[Send]]:
        """Give a model its version; return the order and the first chunks to send to each server."""
        topic = model.topic
        self.versions[topic] = self.versions.get(topic, 0) + 1
        model = self._published[topic] = replace(model, version=self.versions[topic])
        sends = []
        for server in self._directory.known_servers:
            self._delivery(server).wrong.pop(topic, None)
            sends += self._offer(server, topic)
        return PublishOrder(model, tuple(self._directory.present_servers), now), sends

    def observe(self, models: Mapping[str, int]) -> None:
        """Record the newest version of each topic at a server."""
        for topic, version in models.items():
            self.versions[topic] = max(version, self.versions.get(topic, 0))

    def missing_chunks(self, server: RemoteServer, has_restarted: bool) -> list[Send]:
        """Return chunks for a server that answers: of models that it lacks, or of all models after its restart."""
        if has_restarted:
            self._delivery(server).taken.clear()
        return [send for topic in self._published for send in self._offer(server, topic)]

    def enter_run(self, change: RunChange) -> None:
        """Enter another run: forget models of the former run."""
        if change.is_first:
            self._published.clear()
        for server in change.servers:
            self._delivery(server).forget()

    def _offer(self, server: RemoteServer, topic: str) -> list[Send]:
        """Return the first chunk of a topic's newest model for a server, unless the server has the model."""
        model, delivery = self._published.get(topic), self._delivery(server)
        if model is None or topic in delivery.transfers or delivery.taken.get(topic, 0) >= model.version:
            return []
        transfer = delivery.transfers[topic] = _Transfer(model)
        return [Send(server, transfer, 0, self._stretch)]

    def receive_answer(self, send: Send, answer: Answer) -> list[Send]:
        """Process the reply to a chunk; return the chunks to send next."""
        topic, delivery = send.transfer.model.topic, self._delivery(send.server)
        if isinstance(answer, Closed) or delivery.transfers.get(topic) is not send.transfer:
            return []  # another run has begun
        send.transfer.is_heard, send.server.is_away = True, False
        body = answer.body if isinstance(answer, Message) else None
        if isinstance(body, messages.Published) and not body.version and body.received > send.offset:
            return [replace(send, offset=body.received)]
        if isinstance(answer, Refused) and answer.code == "too_large" and send.sent_bytes > LEAST_STRETCH:
            return [replace(send, length=send.sent_bytes // 2)]
        del delivery.transfers[topic]
        if isinstance(answer, Refused) and answer.code in NOT_NOW | LATER:
            delivery.put_off[topic] = answer
            if answer.code in NOT_NOW:
                self._directory.ask_soon()
            return []
        if not (isinstance(answer, Refused) and answer.code == "missing" and send.offset):
            self._settle(delivery, send.transfer.model, answer)
        # A newer model may have been published meanwhile; or the server has restarted and lost the first chunks.
        return self._offer(send.server, topic)

    def _settle(self, delivery: _Delivery, model: Model, answer: Answer) -> None:
        delivery.taken[model.topic] = model.version
        delivery.put_off.pop(model.topic, None)
        if isinstance(answer, MemoireError):
            delivery.wrong[model.topic] = answer
            self._directory.ask_soon()  # the server's version is unknown if another learner published

    # Calls of `publish` while it waits; under the lock

    def is_taken(self, order: PublishOrder, now: float) -> bool:
        """Return True if all servers have accepted the model; silent ones are awaited for `LEFT_OUT_TIMEOUT`."""
        if not order.there:  # no server was known: the first one counts
            return any(self._has(server, order) for server in self._directory.known_servers)
        missing = self.undecided_servers(order)
        if len(missing) < len(order.there) and now >= order.began + calls.LEFT_OUT_TIMEOUT:
            return all(self._is_passed_over(server, order.model.topic) for server in missing)
        return not missing

    def undecided_servers(self, order: PublishOrder) -> list[RemoteServer]:
        """Return the servers of an order that are still listed, and have neither accepted nor refused the model."""
        topic = order.model.topic
        listed = [server for server in order.there if server.is_listed]
        return [server for server in listed if not self._has(server, order) and topic not in self._refusals(server)]

    def silent_servers(self, servers: Iterable[RemoteServer], topic: str) -> list[RemoteServer]:
        """Return the servers that have not replied to any chunk of a topic's model."""
        silent = []
        for server in servers:
            transfer = self._delivery(server).transfers.get(topic)
            if transfer is not None and not transfer.is_heard:
                silent.append(server)
        return silent

    def _is_passed_over(self, server: RemoteServer, topic: str) -> bool:
        """Return True if `publish` need not wait for a server, which is silent or has a failing disk."""
        refusal = self._delivery(server).put_off.get(topic)
        return bool(self.silent_servers([server], topic)) or (refusal is not None and refusal.code == "disk")

    def postponement_reasons(self, servers: Iterable[RemoteServer], topic: str) -> list[str]:
        """Return the reasons why servers refused a topic's model for now, a sentence each."""
        refusals = [(server.name, self._delivery(server).put_off.get(topic)) for server in servers]
        return [
            f"Server {name!r} refused the model for now ({why.code}): {escape(why.text)}."
            for name, why in refusals
            if why
        ]

    def refusal(self, order: PublishOrder) -> MemoireError | None:
        """Return an error with which a server refused the model; None if no server refused it."""
        servers = order.there or self._directory.known_servers
        reasons = (self._refusals(server).get(order.model.topic) for server in servers)
        return next((reason for reason in reasons if reason is not None), None)

    def _has(self, server: RemoteServer, order: PublishOrder) -> bool:
        return self._delivery(server).taken.get(order.model.topic, 0) >= order.model.version

    def _refusals(self, server: RemoteServer) -> dict[str, MemoireError]:
        return self._delivery(server).wrong
