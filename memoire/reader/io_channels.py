"""The reader's sockets: one channel for each of its addresses.

Asks servers what the sides of kinds of tables want, and waits until all that a call wants is there.
"""

from __future__ import annotations

import functools
import logging
import math
import random
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from memoire._core import Held
from memoire.errors import AuthError, Closed, MemoireError, MemoireTimeout, NotEnoughSamples
from memoire.limits import Limits
from memoire.net.channel import Channel
from memoire.net.poller import Poller
from memoire.net.sockets import Context, shared_context
from memoire.net.thread import NodeLock, Worker
from memoire.security.keys import Keys
from memoire.tables import registry
from memoire.tables.far import FarRequest, FarServer, FarServers, FarSide
from memoire.tables.rollouts.queue import TakeRequest
from memoire.wire import messages
from memoire.wire.frames import Answer, Buffer, MessageHeader

from .directory import Address

Finish = Callable[[Answer], None]


class Channels:
    """The channels by address. Those that ask, turn or close belong to the reader's thread.

    Args:
        reader_id: 16 bytes, the reader's own.
        numbers: Of requests: one counter for all messages of the reader.
        rng: Of pauses.
    """

    def __init__(
        self, doors: Poller, *, reader_id: bytes, numbers: Iterator[int], rng: random.Random, limits: Limits
    ) -> None:
        self.of: dict[Address, Channel] = {}
        """The channel of each address."""
        self._doors, self._reader_id, self._numbers, self._rng, self._limits = doors, reader_id, numbers, rng, limits

    def open(self, addresses: Sequence[Address], keys: Keys | None, context: Context | None) -> None:
        """Connect to these addresses; before the thread begins.

        Raises:
            EndpointError: one of them is malformed.
            KeyFileError: the keys cannot be used.
        """
        shared = context or shared_context()
        self.of |= {address: self._channel(address.endpoint, keys, shared) for address in addresses}

    def _channel(self, endpoint: str, keys: Keys | None, context: Context) -> Channel:
        return Channel(
            self._doors,
            context,
            endpoint,
            client=self._reader_id,
            limits=self._limits,
            rng=self._rng,
            numbers=self._numbers,
            keys=keys,
        )

    # From any thread

    @property
    def where(self) -> str:
        """The addresses, as errors name them."""
        return ", ".join(address.endpoint for address in self.of)

    def trouble(self, *, probe: bool = True) -> str:
        """Why the first address may not answer and what to do. Tries to connect, which takes 0.2 s at most."""
        return next(iter(self.of.values())).trouble(probe=probe)

    @property
    def denied(self) -> AuthError | None:
        """Why nobody can answer: every address that is not away does not let this process in."""
        found = [channel.denied for channel in self.of.values()]
        return found[0] if all(found) else None

    @property
    def denied_for_good(self) -> AuthError | None:
        """The same, once it has been so for a while."""
        found = [channel.denied_for_good for channel in self.of.values()]
        return found[0] if all(found) else None

    @property
    def resends(self) -> int:
        """Requests that were sent again."""
        return sum(channel.resends for channel in self.of.values())

    # Inside of the thread

    def ask(
        self,
        server: FarServer,
        body: messages.Body,
        finish: Finish,
        deadline: float = float("inf"),
        *,
        payload: Buffer | None = None,
        payload_checksum: int | None = None,
        sequence: int | None = None,
        run: int | None = None,
    ) -> None:
        """Send a request to one server; `finish` gets its reply, or the error that ends it. See `Channel.ask`.

        Args:
            run: Hash of the run that it is about; 0 is whichever the server counts, None the one that its address does.
        """
        channel = self.of[server.address]
        channel.ask(
            body,
            finish,
            deadline,
            payload=payload,
            payload_checksum=payload_checksum,
            home=server.home,
            sequence=sequence,
            run=run,
        )

    def greet(self, address: Address, hello: messages.Hello, finish: Finish, deadline: float) -> None:
        """Send HELLO to any server there: behind a proxy another one answers where the former one is away."""
        self.of[address].ask(hello, finish, deadline, home=0)

    def learn(self, address: Address, header: MessageHeader, told: messages.Welcome) -> None:
        """Take the facts that stand in the headers of all requests there."""
        self.of[address].learned(header, told)

    def next_time(self) -> float:
        """When a turn has something to do."""
        return min(channel.next_time() for channel in self.of.values())

    def turn(self, ready: dict[object, int]) -> None:
        """Take what came, send what is due."""
        for channel in self.of.values():
            channel.turn(ready)

    def down(self) -> list[Address]:
        """Addresses that surely have no connection now."""
        return [address for address, channel in self.of.items() if channel.is_down]

    def close(self) -> None:
        """End every open request. The sockets are closed by the doors."""
        for channel in self.of.values():
            channel.close(Closed("this reader"))


_log = logging.getLogger(__name__)


class Sides:
    """Carries what the sides of kinds of tables decide; one wait serves all.

    Args:
        of: The sides, by kind of table.
        versions: Newest version of each model's topic. Called under the lock.
    """

    def __init__(
        self,
        of: Mapping[str, FarSide],
        directory: FarServers,
        worker: Worker,
        channels: Channels,
        monitor: NodeLock,
        versions: Callable[[], Mapping[str, int]],
    ) -> None:
        self.of = of
        """The sides, by kind of table."""
        self._directory, self._worker, self._channels = directory, worker, channels
        self._monitor, self._versions = monitor, versions
        self._one_call = threading.Lock()  # held for as long as a call waits: one after the other

    def offering(self, capability: type) -> FarSide:
        """The side of the kind of table that can do this."""
        return next(side for storage, side in self.of.items() if registry.offers(storage, capability))

    def take(self, side: FarSide, wanted: TakeRequest, patience: float) -> list[Any]:
        """What a call wants, oldest first, as soon as all is there. See `Reader.take`."""
        deadline = self._monitor.now() + patience
        with Held.within(self._one_call, patience) as is_mine:
            if not is_mine:
                raise NotEnoughSamples(wanted.steps, 0, 0, 0, patience, "another thread's take of this reader waits")
            return self._take(side, wanted, patience, self._monitor.left(deadline))

    def _take(self, side: FarSide, wanted: TakeRequest, patience: float, left: float) -> list[Any]:
        taken: list[Any] = []

        def is_whole() -> bool:
            taken.extend(side.take(self._versions()))
            return bool(taken)

        with self._monitor.changed:
            side.want(wanted)
        self._worker.wake()
        try:
            if not self._monitor.wait(is_whole, left):
                raise self._shortage(side, wanted, patience)
        finally:
            with self._monitor.changed:
                side.want(None)
        return taken

    def _shortage(self, side: FarSide, wanted: TakeRequest, patience: float) -> MemoireError:
        channels = self._channels
        if not self._directory.there:
            return channels.denied or MemoireTimeout(side.CALLED, channels.where, patience, channels.trouble())
        with self._monitor.changed:
            entries, parts, clients, why = side.why_not()
        return NotEnoughSamples(wanted.steps, entries, parts, clients, patience, why)

    # Inside of the thread

    def next_time(self) -> float:
        """When a turn has something to do."""
        with self._monitor.changed:
            now = self._monitor.now()
            return min((side.next_time(now) for side in self.of.values()), default=math.inf)

    def turn(self) -> None:
        """Ask what is to be asked."""
        for side in self.of.values():
            with self._monitor.changed:
                requests = side.begin(self._monitor.now())
            for request in requests:
                # Without a deadline: what a server hands out it keeps for this request alone, until the next one.
                self._channels.ask(request.server, request.body, functools.partial(self._answered, side, request))

    def _answered(self, side: FarSide, request: FarRequest, answer: Answer) -> None:
        if isinstance(answer, Closed):
            return
        now, was_away = self._monitor.now(), request.server.is_away
        came = side.read(answer, now)
        with self._monitor.changed:
            side.answered(request, answer, came, now)
            self._monitor.changed.notify_all()
        if was_away:
            _log.info("server %s is back", request.server.name)
        self.turn()

    def late(self, now: float, down: Collection[object]) -> list[FarServer]:
        """Servers that no call waits for any longer; `down` are addresses that surely have no connection."""
        return [server for side in self.of.values() for server in side.late(now, down)]

    def leave_out(self, server: FarServer) -> None:
        """It did not answer in time."""
        with self._monitor.changed:
            for side in self.of.values():
                side.leave_out(server)

    def forget(self, server: FarServer) -> None:
        """It is on no list any more."""
        with self._monitor.changed:
            for side in self.of.values():
                side.forget(server)

    def clear(self) -> None:
        """Another run is counted. Under the lock."""
        for side in self.of.values():
            side.clear()
