"""Models to all servers under one version, in stretches: which server has which model, and what to send it next. Pure:
no lock, no socket, no clock.

    publish "policy"    version 3 to a, b and c
    a, b                took it                            they have it
    c                   restarted, or was away             it gets the newest when it says HELLO again

The newest model of each topic is kept for that, until another run begins: models belong to a run.
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
"""Bytes of the shortest stretch that is tried at a server that takes shorter requests than this reader sends."""
NOT_NOW = frozenset({"run", "client", "closed"})
"""Refusals after which a server is offered the same model again: it has to be met first, at once."""
LATER = frozenset({"busy", "disk"})
"""The same, after one more HELLO: they end by themselves, but not at once."""


class _Transfer:
    """A model on its way to one server."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.is_heard = False  # the server said something about it


class _Delivery:
    """What one server has of what was published here, by topic."""

    def __init__(self) -> None:
        self.transfers: dict[str, _Transfer] = {}  # on their way
        self.taken: dict[str, int] = {}  # newest version that it was given and answered
        self.wrong: dict[str, MemoireError] = {}  # why it did not take the newest one
        self.put_off: dict[str, Refused] = {}  # why it could not take it the last time; it is asked again

    def forget(self) -> None:
        """It knows nothing of what was published: another run has begun."""
        self.transfers.clear()
        self.taken.clear()
        self.put_off.clear()


@dataclass(frozen=True, slots=True)
class Send:
    """A stretch of a model to send to a server; what ends it goes to `Publishing.answered`."""

    server: RemoteServer
    transfer: _Transfer
    offset: int
    length: int

    @property
    def body(self) -> messages.Publish:
        """The facts of the model."""
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
        """Bytes of the stretch: fewer than `length` at the end of a body."""
        return min(self.length, self.transfer.model.size - self.offset)

    @property
    def payload(self) -> memoryview | None:
        """The stretch itself; None where nothing is left of the body."""
        chunk = memoryview(self.transfer.model.body)[self.offset : self.offset + self.length]
        return chunk if len(chunk) else None

    @property
    def payload_checksum(self) -> int | None:
        """XXH3 of the stretch, if it is known: it is the whole body."""
        model = self.transfer.model
        return model.checksum if 0 < model.size == self.sent_bytes else None


@dataclass(frozen=True, slots=True)
class PublishOrder:
    """One call of `publish`: the model with its version, and the servers that were there then."""

    model: Model
    there: tuple[RemoteServer, ...]
    began: float


class Publishing:
    """What was published here, and which server has it. The owner locks whatever other threads ask: see each method.

    Args:
        directory: Which servers are there.
        stretch: Bytes of a model that go into one message.
    """

    def __init__(self, directory: Directory, stretch: int) -> None:
        self.versions: dict[str, int] = {}
        """Newest version of each topic at any server."""
        self._directory, self._stretch = directory, stretch
        self._published: dict[str, Model] = {}  # newest of each topic that was published here, in this run
        # One that was forgotten has its own for as long as something is on its way to it.
        self._deliveries: WeakKeyDictionary[RemoteServer, _Delivery] = WeakKeyDictionary()

    @property
    def is_used(self) -> bool:
        """Whether anything was published here in this run."""
        return bool(self._published)

    def _delivery(self, server: RemoteServer) -> _Delivery:
        if server not in self._deliveries:
            self._deliveries[server] = _Delivery()
        return self._deliveries[server]

    # What the reader's thread does; under the lock

    def publish(self, made: Model, now: float) -> tuple[PublishOrder, list[Send]]:
        """Give a model its version, and begin to send it to every server."""
        topic = made.topic
        self.versions[topic] = self.versions.get(topic, 0) + 1
        model = self._published[topic] = replace(made, version=self.versions[topic])
        sends = []
        for server in self._directory.known:
            self._delivery(server).wrong.pop(topic, None)
            sends += self._offer(server, topic)
        return PublishOrder(model, tuple(self._directory.there), now), sends

    def observe(self, models: Mapping[str, int]) -> None:
        """A server names the newest version of each topic that it has."""
        for topic, version in models.items():
            self.versions[topic] = max(version, self.versions.get(topic, 0))

    def met(self, server: RemoteServer, has_restarted: bool) -> list[Send]:
        """A server answers. Send it the published models that it lacks, or all of them after a restart."""
        if has_restarted:
            self._delivery(server).taken.clear()
        return [send for topic in self._published for send in self._offer(server, topic)]

    def enter(self, change: RunChange) -> None:
        """Another run is counted: models of the former one are not published in it."""
        if change.is_first:
            self._published.clear()
        for server in change.servers:
            self._delivery(server).forget()

    def _offer(self, server: RemoteServer, topic: str) -> list[Send]:
        """Begin to send a server the newest model of a topic that was published here, unless it has it."""
        model, delivery = self._published.get(topic), self._delivery(server)
        if model is None or topic in delivery.transfers or delivery.taken.get(topic, 0) >= model.version:
            return []
        transfer = delivery.transfers[topic] = _Transfer(model)
        return [Send(server, transfer, 0, self._stretch)]

    def answered(self, send: Send, answer: Answer) -> list[Send]:
        """A stretch was taken or refused; what to send next."""
        topic, delivery = send.transfer.model.topic, self._delivery(send.server)
        if isinstance(answer, Closed) or delivery.transfers.get(topic) is not send.transfer:
            return []  # or another run has begun
        send.transfer.is_heard, send.server.is_away = True, False
        said = answer.body if isinstance(answer, Message) else None
        if isinstance(said, messages.Published) and not said.version and said.received > send.offset:
            return [replace(send, offset=said.received)]
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
        # A newer one may have been published meanwhile; or the server has restarted and forgot the beginning.
        return self._offer(send.server, topic)

    def _settle(self, delivery: _Delivery, model: Model, answer: Answer) -> None:
        delivery.taken[model.topic] = model.version
        delivery.put_off.pop(model.topic, None)
        if isinstance(answer, MemoireError):
            delivery.wrong[model.topic] = answer
            self._directory.ask_soon()  # at its version, where somebody else published

    # What the call of `publish` asks while it waits; under the lock

    def is_taken(self, order: PublishOrder, now: float) -> bool:
        """Whether all servers that answer have it: a host that is gone says no goodbye."""
        if not order.there:  # nobody was: the first server that comes
            return any(self._has(server, order) for server in self._directory.known)
        missing = self.missing(order)
        if len(missing) < len(order.there) and now >= order.began + calls.LEFT_OUT_TIMEOUT:
            return all(self._is_passed_over(server, order.model.topic) for server in missing)
        return not missing

    def missing(self, order: PublishOrder) -> list[RemoteServer]:
        """Servers that were there, are still listed, and have neither taken nor refused it."""
        topic = order.model.topic
        listed = [server for server in order.there if server.is_listed]
        return [server for server in listed if not self._has(server, order) and topic not in self._wrong(server)]

    def silent(self, servers: Iterable[RemoteServer], topic: str) -> list[RemoteServer]:
        """Those of them to which a model is on its way, and that have not said a word about it."""
        found = []
        for server in servers:
            transfer = self._delivery(server).transfers.get(topic)
            if transfer is not None and not transfer.is_heard:
                found.append(server)
        return found

    def _is_passed_over(self, server: RemoteServer, topic: str) -> bool:
        """Whether others need not wait for this server: it says nothing, or its disk fails. It gets the model later."""
        refusal = self._delivery(server).put_off.get(topic)
        return bool(self.silent([server], topic)) or (refusal is not None and refusal.code == "disk")

    def put_off(self, servers: Iterable[RemoteServer], topic: str) -> list[str]:
        """Why those of them that refused a model for now did so, a sentence each."""
        told = [(server.name, self._delivery(server).put_off.get(topic)) for server in servers]
        return [f"Server {name!r} refused it for now ({why.code}): {escape(why.text)}." for name, why in told if why]

    def refusal(self, order: PublishOrder) -> MemoireError | None:
        """Why a server did not take it; None if none said so."""
        servers = order.there or self._directory.known
        reasons = (self._wrong(server).get(order.model.topic) for server in servers)
        return next((reason for reason in reasons if reason is not None), None)

    def _has(self, server: RemoteServer, order: PublishOrder) -> bool:
        return self._delivery(server).taken.get(order.model.topic, 0) >= order.model.version

    def _wrong(self, server: RemoteServer) -> dict[str, MemoireError]:
        return self._delivery(server).wrong
