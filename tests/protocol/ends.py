"""A client and a server as state machines over the product's own classes: events go in, messages come out.

    ClientEnd    Connection, Session, PushWindow, LineOutbox, RunCounts, Channel, PendingRequests      no socket, no thread
    ServerEnd    Dispatcher with its handlers, Runs, Ledger, Logbook, Committer; a disk in memory      no socket, no thread

The clock stands still. Decisions that take time in the product, such as sending a request again, are events that may
happen at any moment.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
from collections import Counter
from typing import Any, Final, NamedTuple

import numpy as np

from fake_store import Disk, MemoryStore
from memoire.accounting.merge import Rows, ServerAccounts
from memoire.cli.drain import clients_here
from memoire.client.io import Connection
from memoire.client.pushes import Pusher
from memoire.client.reports import MemorySums, report_of
from memoire.client.session import Session
from memoire.client.waiting import ClientLock
from memoire.limits import Limits
from memoire.net.channel import Channel, PendingRequests
from memoire.replay.columns import Column
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.server.dispatch import Dispatcher
from memoire.tables.caches.pool import Pool
from memoire.tables.registry import Reply
from memoire.tables.table import Table, Tables
from memoire.wire import containers, messages
from memoire.wire.frames import Message, MessageHeader, encode, name_hash, parse, reply
from memoire.wire.rows import ACCOUNT

ME: Final = b"a" * 16
"""The id of every client in its own messages. The numbers in `Sent` tell clients apart."""
CLIENTS: Final = (ME, b"b" * 16, b"c" * 16)
"""Client ids as servers see them."""
SERVERS: Final = ("alpha", "beta", "gamma")
HOMES: Final = tuple(map(name_hash, SERVERS))
SCHEMA: Final = Schema({"obs": Column(np.float32, (1,), "state"), "reward": Column(np.float32, (), "reward")})
LIMITS: Final = Limits()
SOON: Final = LIMITS.tuning.update_every + 0.01
"""Seconds within which an UPDATE with news is due. A refused UPDATE is due later, and heartbeats last."""
LATER: Final = 4.0
QUIET: Final = 2.0
"""Seconds of silence that the drain sees for each server."""
FIRST_RUN: Final = "one"


def _payload() -> Any:
    memory = Memory(SCHEMA, 4, Parameters(cache_size=2), seed=0)
    memory.open()
    memory.add(0, (np.zeros(1, np.float32), np.float32(1)))
    memory.close(terminated=True)
    return containers.build(memory, now=0.0)


PAYLOAD: Final = _payload()


class Contents:
    """Messages by number, without the id of their client."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self.messages: list[Message] = []

    def number(self, frames: list[Any]) -> int:
        """Return the number of a message of client `ME`."""
        key = bytes(frames[0])
        if key not in self._numbers:
            self._numbers[key] = len(self.messages)
            self.messages.append(parse(frames))
        return self._numbers[key]

    def frames(self, content: int, client: int = 0) -> list[Any]:
        """Return the frames of a message again, with the id of this client as servers see it."""
        header, body, payload = (getattr(self.messages[content], name) for name in ("header", "body", "payload"))
        facts = {name: getattr(header, name) for name in ("sequence", "run", "home", "table", "fingerprint")}
        return encode(body, client=CLIENTS[client], payload=payload, **facts)


CONTENTS: Final = Contents()
"""All messages of this process."""


class Sent(NamedTuple):
    """A message on its way from or to a client, by the number of its content."""

    client: int
    content: int


class Earliest(random.Random):
    """Random generator whose uniform draws are always the lower bound."""

    def uniform(self, a: float, b: float) -> float:
        return a


NEWS: Final = Sent(-1, -1)
"""Notice of news to all clients at home at a server. The notice arrives at once; the requests that follow may be late.
"""


class Requests(Channel):
    """Channel without a socket. `sent` keeps the numbers of its messages."""

    def __init__(self, numbers: Any) -> None:
        self.endpoint = "tcp://proxy:1"
        self.run = self.home = self.fingerprint = self.table = 0
        self.longest, self.refused, self.heard_at = LIMITS.tuning.request_bytes, Counter(), 0.0
        self.renewals = self.connections = 0
        self._client, self._limits, self._numbers = ME, LIMITS, numbers
        self._calls = PendingRequests(LIMITS.tuning.resend_after, LIMITS.tuning.resend_most, Earliest())
        self._introduces = self._is_unknown = False
        self._asked_at, self._is_blocked = 0.0, True  # `pump` can send everything
        self.sent: list[int] = []

    def pump(self) -> None:
        for call in self._calls.due_requests(0.0):
            self.sent.append(CONTENTS.number(list(call.frames[1:])))
            self._calls.sent(call, 0.0)

    def take(self, content: int) -> None:
        self._take([b"", *CONTENTS.frames(content)])

    def open(self) -> tuple[int, ...]:
        """Return the requests without an answer, which may be sent again at any moment."""
        self._calls.resend_lost(0.0, 0.0)
        calls = self._calls.due_requests(0.0)
        for call in calls:
            call.next_send = 1.0
        return tuple(CONTENTS.number(list(call.frames[1:])) for call in calls)


class Nothing:
    """Stand-in for the sockets, models and local memory that this client does not have."""

    is_kept = True

    def reconnect(self, *args: Any) -> bool:
        return False

    def versions(self) -> dict[str, int]:
        return {}

    def receive_versions(self, *args: Any) -> None:
        """Ignore a notice: the client subscribes to no model."""

    begin_run = accept_lower_versions = subscribe_all = set_newest_versions = configure = receive_versions

    def sums(self) -> MemorySums:
        return MemorySums()

    def choose_side(self, storage: str) -> Any:
        return self

    def usual_bytes(self, *args: Any) -> int:
        return 0


class Offline(Connection):
    """A client's connection without its thread and sockets."""

    def __init__(self, session: Session, waiting: ClientLock, numbers: Any) -> None:
        nothing: Any = Nothing()
        self._owner = None
        self._session, self._waiting, self._local, self._pushes = session, waiting, nothing, None  # type: ignore[assignment]
        self.former, self.data, self.topics = [], nothing, nothing
        self._renewals = self._connections = 0
        self.channel = Requests(numbers)

    def tell(self) -> None:
        self._send_update()


class CachePusher(Pusher):
    """Pusher of caches that are all the same."""

    def push(self) -> None:
        def body(since: int, number: int, pushed: int) -> messages.Cache:
            return messages.Cache(since=since, number=number, pushed_bytes=pushed)

        self.enqueue(PAYLOAD, 1, body, list)


class ClientFacts(NamedTuple):
    """Facts about a client in one state, for the rules and the search."""

    is_met: bool
    home: int  # hash of the home server's name
    is_due: bool
    """True if the client has news and may send an UPDATE."""
    may_speak: bool
    """True if the client may send an UPDATE at all."""
    can_push: bool
    open: tuple[int, ...]  # requests without an answer
    begun: int
    """Episodes that began, each of one step and one line."""
    acked: tuple[int, int]
    """Episodes and steps that a home has acknowledged."""
    acked_line: int
    """The newest acknowledged line; all lines before it are acknowledged, too."""
    is_leaving: bool
    is_delivered: bool
    pushed: tuple[tuple[tuple[int, int, int], int], ...]
    """Pushed caches by run, home and start of the account."""
    in_flight: int
    epoch: int


class ClientEnd:
    """One client, driven by events."""

    def __init__(self) -> None:
        numbers = itertools.count(1)
        self.session = Session(ME, "tcp://proxy:1", table="", label=1, limits=LIMITS, rng=Earliest(), now=0.0)
        self.waiting = ClientLock(1.0)
        self.io = Offline(self.session, self.waiting, numbers)
        self.pusher = CachePusher(
            self.session, self.waiting, numbers, on_full="skip", block_timeout=0.0, clock=lambda: 0.0
        )
        self.waiting.wake = Nothing().sums  # type: ignore[assignment]
        self.pushed: dict[tuple[int, int, int], int] = {}
        self.ticket = 0
        self.last_update: messages.Update | None = None
        """The UPDATE that the client sent last."""
        self.accepted = 0
        self.io.hello()

    def take(self, event: tuple[Any, ...]) -> list[Sent]:
        """Apply one event: ("work",), ("push",), ("tell",), ("leave",) or ("answer", content)."""
        kind, *args = event
        getattr(self, f"_{kind}")(*args)
        sent, self.io.channel.sent = self.io.channel.sent, []  # type: ignore[attr-defined]
        while self.pusher.queue:
            sent.append(CONTENTS.number(self.pusher.queue.popleft()))
        return [Sent(0, content) for content in sent]

    def _begin(self) -> None:
        """Do nothing: the client sends its first messages by itself."""

    def _work(self) -> None:
        self.pusher.count(1)
        self.pusher.count_episode(1, 1.0)
        self.session.outbox.add("line", 1, 0.0)

    def _push(self) -> None:
        session = self.session
        key = session.run, session.home, session.welcome.since
        self.pusher.push()
        self.pushed[key] = session.window.pushed_caches

    def _tell(self) -> None:
        self.last_update = self._report()
        self.io.tell()

    def _news(self) -> None:
        self.session.schedule.schedule_after_news(0.0)

    def _leave(self) -> None:
        self.session.is_leaving = True
        self.ticket = self.session.schedule.add_waiting_call(self.session.outbox.newest)

    def _answer(self, content: int) -> None:
        self.io.channel.take(content)  # type: ignore[attr-defined]

    def check(self) -> None:
        """Raise AssertionError if the client's counts do not add up, or if its number of accepted caches fell."""
        self.session.windows.check_invariants()
        accepted = self.session.windows.sums().accepted_caches
        assert accepted >= self.accepted, f"a client knew of {self.accepted} accepted caches, and of {accepted} now"
        self.accepted = accepted

    def shortened(self, history: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the history unchanged: a client has no shorter one."""
        return history

    def facts(self) -> ClientFacts:
        session, schedule = self.session, self.session.schedule
        due, acked, sums = session.update_due(), session.counts.acknowledged, session.windows.sums()
        oldest = session.outbox.oldest
        return ClientFacts(
            is_met=session.has_welcome,
            home=session.home,
            is_due=self._is_due(due),
            may_speak=due < float("inf"),
            can_push=session.has_welcome and not session.is_between and session.window.has_room(PAYLOAD.nbytes),
            open=self.io.channel.open(),  # type: ignore[attr-defined]
            begun=session.counts.episodes,
            acked=(acked.episodes, acked.steps),
            acked_line=session.outbox.newest if oldest == float("inf") else int(oldest) - 1,
            is_leaving=session.is_leaving,
            is_delivered=bool(self.ticket) and schedule.answered >= self.ticket and not session.has_remainder,
            pushed=tuple(sorted(self.pushed.items())),
            in_flight=sums.in_flight_caches,
            epoch=session.welcome.epoch if session.has_welcome else 0,
        )  # fmt: skip

    def _is_due(self, due: float) -> bool:
        """Return True if a caller waits for an UPDATE, or if it would differ from the newest one. The product repeats
        an UPDATE while a cache is on its way; the search does not.
        """
        if due == 0.0:
            return True
        is_soon = due < SOON or (due < LATER and not self.io.channel.open())  # type: ignore[attr-defined]
        return is_soon and self._report() != self.last_update

    def _report(self) -> messages.Update | None:
        return None if not self.session.has_welcome else report_of(self.session, MemorySums(), {})


class RunRows(NamedTuple):
    """A server's counts for one client and run."""

    episodes: int
    steps: int


class AccountFacts(NamedTuple):
    """One account in a server's memory."""

    run: int
    client: int
    since: int
    pushed: int


class ServerFacts(NamedTuple):
    """Facts about a server in one state, for the rules and the search."""

    memory: tuple[tuple[str, int, RunRows], ...]
    """Counts in memory by run and client, inherited ones included."""
    disk: tuple[tuple[str, int, RunRows], ...]
    """Counts on disk by run and client, as after a restart."""
    lines: tuple[tuple[int, int], ...]
    """Client and number of each line on disk, in order."""
    accounts: tuple[AccountFacts, ...]
    can_collect: bool
    can_write: bool
    can_say: bool
    open: frozenset[tuple[int, int]]
    """Client and sequence number of each unanswered request."""
    run: str
    leaving: bool
    finished: bool
    epoch: int
    guests: int
    rows: tuple[tuple[str, bytes], ...]
    """Packed accounts of each run, inherited ones included."""


class FrugalDisk(Disk):
    """Disk that keeps no history of its transactions."""

    def save(self, group: Any) -> None:
        super().save(group)
        self.saved.clear()

    def copied(self) -> FrugalDisk:
        twin = FrugalDisk()
        twin.__dict__ |= self.__dict__
        twin.lines = {run: list(lines) for run, lines in self.lines.items()}
        twin.runs, twin.texts, twin.accounts = dict(self.runs), dict(self.texts), dict(self.accounts)
        twin.words = copy.deepcopy(self.words)
        return twin


DISKS: Final[list[tuple[int, FrugalDisk]]] = []
"""Saved disks of reborn servers, each with the number of the server's life."""


@functools.cache
def tables(server: int) -> Tables:
    """Return a server's tables. The tables' content does not change any decision in a world."""
    table = Table(SCHEMA, parameters=Parameters(cache_size=2))
    return Tables({"default": table}, lambda name, table: Pool(table.schema, table.parameters, seed=0))


class ServerEnd:
    """One server and its disk. Without `is_durable` the server has no disk, and a kill erases all its state."""

    def __init__(self, index: int, is_durable: bool) -> None:
        self.index, self.is_durable = index, is_durable
        self.disk = FrugalDisk()
        self.life = 0
        self.is_reborn = True
        self._start()

    def _start(self) -> None:
        self.life += 1
        store: Any = MemoryStore(self.disk, SERVERS[self.index]) if self.is_durable else None
        self.sent: list[Sent] = []
        self.group: Any = None
        self.is_written = False
        self.unanswered: set[tuple[int, int]] = set()
        self.dispatcher = Dispatcher(
            tables=tables(self.index), run=FIRST_RUN, name=SERVERS[self.index], limits=LIMITS, store=store, clock=lambda: 0.0, epoch=self.life,
            on_news=self._news,
        )  # fmt: skip

    def take(self, event: tuple[Any, ...]) -> list[Sent]:
        """Apply one event: ("ask", client, content), ("cache", client, content), ("collect",), ("write",), ("said",),
        ("kill",), ("run", name), ("finish",), ("drain",) or ("inherit", run, rows).
        """
        kind, *args = event
        self.is_reborn = kind in ("kill", "wake")
        getattr(self, f"_{kind}")(*args)
        sent, self.sent = self.sent, []
        return sent

    def check(self) -> None:
        """Raise AssertionError if accounts and their sums disagree."""
        for run in self.dispatcher.runs:
            run.ledger.check_invariants()

    def shortened(self, history: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the shortest history: for a server that has just begun, waking from a copy of its disk."""
        if not self.is_reborn:
            return history
        DISKS.append((self.life, self.disk.copied()))
        return (("wake", len(DISKS) - 1),)

    def _wake(self, disk: int) -> None:
        life, kept = DISKS[disk]
        self.life, self.disk = life - 1, kept.copied()
        self.disk.epoch -= 1
        self._start()

    def _begin(self) -> None:
        """Do nothing: `_start` has begun the server."""

    def _ask(self, client: int, content: int) -> None:
        message = parse(CONTENTS.frames(content, client))
        self.unanswered.add((client, message.header.sequence))
        self.dispatcher.send(
            message.header, self.dispatcher.answer(message), functools.partial(self._reply, client, message.header)
        )

    def _reply(self, client: int, header: MessageHeader, answer: Reply) -> None:
        self.unanswered.discard((client, header.sequence))
        mine = {"client": ME, **answer.changed}
        frames = reply(header, answer.body, payload=answer.payload, **mine)  # type: ignore[arg-type]
        self.sent.append(Sent(client, CONTENTS.number(frames)))

    def _cache(self, client: int, content: int) -> None:
        message = parse(CONTENTS.frames(content, client))
        try:
            self.dispatcher.accept_push(message.header, message.body, message.payload)  # type: ignore[arg-type]
        except Exception as error:
            if not hasattr(error, "code"):
                raise

    def _collect(self) -> None:
        self.group = self.dispatcher.collect()
        self.is_written = False

    def _write(self) -> None:
        self.disk.save(self.group)
        self.is_written = True

    def _said(self) -> None:
        group, self.group, self.is_written = self.group, None, False
        self.dispatcher.mark_saved()
        for ticket in group.tickets:
            ticket()

    def _news(self) -> None:
        self.sent.append(NEWS)

    def _kill(self) -> None:
        self._start()
        self.sent.append(NEWS)  # connections end and come back

    def _run(self, name: str) -> None:
        self.dispatcher.begin_run(name)

    def _finish(self) -> None:
        self.dispatcher.finish()

    def _drain(self) -> None:
        self.dispatcher.drain()

    def _inherit(self, run: str, rows: bytes) -> None:
        self.dispatcher.store_inherited(run, False, np.frombuffer(rows, ACCOUNT))

    def rows(self) -> dict[str, Rows]:
        """Return all accounts of each run, inherited ones included."""
        return {run.name: np.concatenate(list(self.dispatcher.pages(run))) for run in self.dispatcher.runs}

    def _on_disk(self) -> dict[str, Rows]:
        reader = MemoryStore(self.disk, SERVERS[self.index])
        self.disk.epoch -= 1
        return {run: reader.accounts(run).rows(b"", 100) for run in sorted({run for run, _ in self.disk.accounts})}

    def facts(self) -> ServerFacts:
        dispatcher, rows = self.dispatcher, self.rows()
        return ServerFacts(
            memory=_merged(rows),
            disk=_merged(self._on_disk() if self.is_durable else rows),
            lines=tuple(
                (CLIENTS.index(entry.client), entry.line.number)
                for entries in (self.disk.lines.values() if self.is_durable else self._lines())
                for entry in entries
            ),
            accounts=tuple(self._accounts()),
            can_collect=self.is_durable and self.group is None,
            can_write=self.group is not None and not self.is_written,
            can_say=self.group is not None and self.is_written,
            open=frozenset(self.unanswered),
            run=dispatcher.run_name,
            leaving=dispatcher.is_draining,
            finished=dispatcher.finished,
            epoch=dispatcher.epoch,
            guests=len(dispatcher.ledger.guests),
            rows=tuple(sorted((run, rows.tobytes()) for run, rows in self.rows().items())),
        )  # fmt: skip

    def _lines(self) -> list[list[Any]]:
        return [run.logbook.recent() for run in self.dispatcher.runs]

    def _accounts(self) -> list[AccountFacts]:
        return [
            AccountFacts(run.number, CLIENTS.index(each.client), each.since, each.pushed_caches)
            for run in self.dispatcher.runs
            for each in run.ledger
        ]


def here(mine: ServerFacts, home: int, others: list[ServerFacts]) -> bool:
    """Return True if clients are still at home at a server that is drained, by the product's own rule. All servers have
    been quiet for two seconds: messages on their way arrive later.
    """

    def accounts_of(facts: ServerFacts) -> ServerAccounts:
        rows = np.frombuffer(dict(facts.rows).get(facts.run, b""), ACCOUNT)
        return ServerAccounts(facts.run, rows, facts.finished, True, (facts.run,), facts.epoch, QUIET)

    return mine.guests > 0 or bool(clients_here(accounts_of(mine), home, [accounts_of(other) for other in others]))


def _merged(rows: dict[str, Rows]) -> tuple[tuple[str, int, RunRows], ...]:
    counts_by_owner: dict[tuple[str, int], RunRows] = {}
    for run, accounts in rows.items():
        for row in accounts:
            key = run, CLIENTS.index(row["client"].tobytes())
            former = counts_by_owner.get(key, RunRows(0, 0))
            counts_by_owner[key] = RunRows(max(former[0], int(row["episodes"])), max(former[1], int(row["steps"])))
    return tuple((run, client, counts) for (run, client), counts in sorted(counts_by_owner.items()))
