"""What a server answers: every request to its reply, with ledger, log, models, parameters and feedback behind it.

No socket: `answer` takes a parsed message and returns a body and a payload, so that a duplicate, a stranger or an
impossible number is tested without a network. Every request may come any number of times. Thread-safe.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from memoire import arguments
from memoire.accounting.account import Account, sums_of
from memoire.accounting.journal import Group, Journal
from memoire.accounting.ledger import Ledger
from memoire.accounting.logbook import Entry, Logbook
from memoire.accounting.merge import Rows, merge
from memoire.accounting.runs import Past, Run, Runs
from memoire.errors import MemoireError, ParameterError, ProtocolError, WrongType
from memoire.limits import Limits
from memoire.models.model import SMALL_BYTES, Assembly, Model, ModelStore, StaleVersion, chunk_of, make
from memoire.pool.tables import OpenTable, Tables
from memoire.replay.batch import ID, td_errors_for
from memoire.replay.limiter import NO_LIMIT, ClusterSurplus
from memoire.replay.parameters import Parameters
from memoire.security.throttle import TokenBuckets
from memoire.version import SOFTWARE
from memoire.wire import compression, messages, pack, unpack
from memoire.wire.frames import Header, Message
from memoire.wire.identity import NO_CLIENT, name_hash
from memoire.wire.refusals import CODES
from memoire.wire.rows import unpack_accounts, unpack_counts

from .learners import Learners

_log = logging.getLogger(__name__)

DEFAULT_RUN = "default"
"""Name of the run of a server that was never given one."""
MOST_UPLOADS = 16
MOST_READERS = 64
KEPT_REPLIES = 64
FEEDBACK_SAMPLES = 1 << 16
"""Samples of feedback that wait for one client; the oldest are lost (and counted) beyond."""
FEEDBACK_PER_REPLY = 1 << 14
MOST_RUNS = 1024
"""Names of runs that one reply tells, the newest."""
MOST_FORMER = 1 << 14
"""Runs of other servers that are kept beside those that were counted here."""
FEW_LEFT = 0.25
"""Part of the newcomers that may come at once; while fewer are left, the server warns and is not ready."""
WARN_INTERVAL = 60.0
"""Seconds between two warnings of that."""
CROWD = 1 << 16
"""Accounts in memory beyond which silent ones leave it sooner."""
MOST_OWNERS = 1 << 14
"""Client ids without an account, of readers and such, that are known to belong to a key."""
MOST_READINGS = 4
"""Readings of accounts, in pages, that go on at the same time; a further one ends the oldest, which is read anew."""


class Reply(NamedTuple):
    """Body and payload of an answer, and the header's fields that differ from the request's."""

    body: messages.Body
    payload: Any = None
    changed: Mapping[str, int] = {}
    until_saved: bool = False
    """Whether it must not leave before what it says is on disk, where a store saves it."""


@dataclass(slots=True)
class _Waiting:
    """Feedback for one client: pieces of (number of the piece, entry numbers [n], TD errors [n])."""

    pieces: deque[tuple[int, NDArray[np.int64], NDArray[np.float32]]] = field(default_factory=deque)
    number: int = 0


class _Chosen(msgspec.Struct, frozen=True):
    """What a former life was given, and with what it ended."""

    given: dict[str, Any]
    now: dict[str, Any]
    version: int


class Dispatcher:
    """The state of one server, and the answers that follow from it.

    Args:
        tables: What it keeps; each with schema, parameters and pool of its own.
        endpoints: Where clients connect to; read at each HELLO, since workers may be added.
        on_lines: Called with log lines that are new, in order.
        on_model: Called when a model is new.
        on_news: Called when clients should ask soon: the run is over, or another one, or parameters are new.
        past: What was saved in former lives. With it, the three above are called when what they tell is on disk.
        on_change: Called when something is to be saved that somebody waits for; only with `past`.
        clock: Seconds since 1970.
        epoch: Number of this life, above those of all former ones; a `past` has its own.
    """

    def __init__(
        self,
        *,
        tables: Tables,
        run: str | None,
        name: str,
        limits: Limits,
        endpoints: Callable[[], messages.Endpoints] = messages.Endpoints,
        on_lines: Callable[[list[Entry]], None] = lambda lines: None,
        on_model: Callable[[Model], None] = lambda model: None,
        on_news: Callable[[], None] = lambda: None,
        past: Past | None = None,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float],
        epoch: int,
    ) -> None:
        if run is not None:
            arguments.name("run", run)
        self.tables, self.limits = tables, limits
        self.name, self.home = name, name_hash(name)
        self.epoch = past.epoch if past else epoch
        self.journal = Journal() if past else None
        """What is to be saved; None where nothing is."""
        self._credit_limit = limits.credit
        self.models = ModelStore(limits.model_bytes)
        self.leaving = False
        """Whether clients are sent elsewhere: this server is being drained."""
        # Clients of each table that are silent for too long, and when they were counted.
        self._silent: Counter[int] = Counter()
        self._shared_at = 0.0
        self._shared_ledger: Ledger | None = None  # of which run
        # Accounts in memory when somebody began to read them, by reader and run.
        self._readings: OrderedDict[tuple[bytes, str], Rows] = OrderedDict()
        self._warned_at = float("-inf")
        self._told: set[bytes] = set()  # clients that have said that they know that the run is over
        self.learners = Learners()
        self.refused: Counter[str] = Counter()
        """Messages that were refused, by code."""
        self._owners: OrderedDict[bytes, str] = OrderedDict()  # of client ids without an account, as in accounts
        self.feedback_lost = 0
        """Priorities whose client is not known here, or that waited too long for it."""
        self.feedback_given = 0
        self.lock = threading.RLock()  # everything above and below, except the pools, which have their own
        self._granting = threading.Lock()  # one at a time of the requests that must not be granted twice
        self._waiting: dict[bytes, _Waiting] = {}
        self._unsaved: list[Model] = []  # published since a group was taken to be saved
        self._uploads: OrderedDict[tuple[bytes, str], Assembly] = OrderedDict()
        # The newest replies to each client's requests that would change something if they were granted twice.
        self._given: OrderedDict[tuple[bytes, messages.Type, int], OrderedDict[int, Reply]] = OrderedDict()
        self._endpoints, self._on_lines, self._on_model, self._clock = endpoints, on_lines, on_model, clock
        self._on_news, self._on_change = on_news, on_change
        self.newcomers = TokenBuckets(limits.new_clients, limits.new_clients_rate)
        """Accounts that may be opened now, by the owner of their key."""
        self.runs = Runs(
            self._go_on(past, run),
            clock(),
            past,
            epoch=self.epoch,
            home=self.home,
            may_open=self.newcomers.take,
            forget=self._forget,
        )
        self._restore(past)
        self._answers: dict[type[messages.Body], Callable[[Header, Any, Any], Reply]] = {
            messages.Hello: self._hello,
            messages.Update: self._update,
            messages.Fetch: self._fetch,
            messages.Publish: self._once(self._publish, KEPT_REPLIES),
            messages.Sums: self._sums,
            messages.Draw: self._once(
                self._draw, messages.DRAWS_IN_FLIGHT
            ),  # batches: only as many as can be on their way
            messages.Feedback: self._once(self._feedback, KEPT_REPLIES),
            messages.Control: self._once(self._control, KEPT_REPLIES),  # one sent again must not undo a later one
            messages.Ledger: self._page,
            messages.Inherit: self._inherit,
        }

    # ---------------------------------------------------------------------------------- what is counted and saved

    @property
    def run_name(self) -> str:
        """Name of the run that is counted now."""
        return self.runs.current.name

    @property
    def run(self) -> int:
        """Its number, as headers say it."""
        return self.runs.current.number

    @property
    def ledger(self) -> Ledger:
        """Its accounts."""
        return self.runs.current.ledger

    @property
    def logbook(self) -> Logbook:
        """Its log lines."""
        return self.runs.current.logbook

    @property
    def finished(self) -> bool:
        """Whether it is over."""
        return self.runs.current.finished

    @property
    def now(self) -> float:
        """Seconds since 1970, by the clock that was passed in."""
        return max(0.0, self._clock())

    @property
    def is_durable(self) -> bool:
        """Whether what is acknowledged is on disk."""
        return self.journal is not None

    def _go_on(self, past: Past | None, given: str | None) -> str:
        """The run to count: the one that was counted last, unless another is given now than was given then."""
        if past is None:
            return DEFAULT_RUN if given is None else given
        counted = next((facts.name for facts in past.runs() if not facts.ended), None)
        if given is None:
            return counted or DEFAULT_RUN
        if counted is not None and past.settings().get("run") == given:
            return counted
        if self.journal is not None:
            self.journal.setting("run", given)
        return given

    def _restore(self, past: Past | None) -> None:
        """Parameters, models and facts of the former life; and what is new of this one is to be saved."""
        if past is None or self.journal is None:
            return
        run = self.runs.current
        for model in past.models(run.name):
            self.models.put(model)
        for table in self.tables:
            given, saved = table.settings.parameters.to_wire(), past.settings().get(table.key)
            chosen = _Chosen(given, given, 1) if saved is None else _chosen(table.key, saved)
            if chosen.given == given:
                table.take_parameters(Parameters.from_wire(chosen.now), chosen.version)
            else:
                table.take_parameters(table.parameters, chosen.version + 1)
            self._save_parameters(table)
        self._tell_models()
        for facts in self.runs.facts():
            self.journal.run(facts)

    def _save_parameters(self, table: OpenTable) -> None:
        if self.journal is not None:
            given = table.settings.parameters.to_wire()
            chosen = _Chosen(given, table.parameters.to_wire(), table.parameters_version)
            self.journal.setting(table.key, msgspec.json.encode(chosen).decode())

    def _touch(self, run: Run, account: Account) -> None:
        """The account is to be saved. Under the lock."""
        if self.journal is not None:
            self.journal.touch(run.name, account)

    def _is_saved(self, run: Run, client: bytes) -> bool:
        return self.journal is None or self.journal.is_saved(run.name, client)

    def _after(self, ticket: Callable[[], None]) -> None:
        """Call this when all that was said so far is saved: at once where nothing is. Under the lock."""
        if self.journal is None:
            ticket()
        else:
            self.journal.after(ticket)
            self._on_change()

    def when_saved(self, header: Header, ticket: Callable[[], None]) -> None:
        """Call this, which sends a reply that has to wait, when all that was said so far is saved."""
        assert self.journal is not None
        with self.lock:
            self.journal.wait((header.client, header.sequence), ticket)
        self._on_change()

    def collect(self) -> Group | None:
        """What is to be saved next; `saved` is called when it is."""
        assert self.journal is not None
        with self.lock:
            self._unsaved = []
            for run in self.runs:
                run.kept.taken()
            return self.journal.take()

    def saved(self) -> None:
        """The group that was collected last is on disk."""
        assert self.journal is not None
        with self.lock:
            self.journal.saved()
            for run in self.runs:
                run.kept.saved()

    def begin_run(self, name: str) -> None:
        """Count this run from now on, from zero or where it ended; the former one stays readable, with its caches gone.

        Raises:
            ParameterError: that is no name.
        """
        arguments.name("run", name)
        with self.lock:
            if name == self.run_name:
                return
            former = self.runs.begin(name, self._clock())
            if self.journal is not None:
                self.journal.run(former.facts)
                self.journal.run(self.runs.current.facts)
            for table in self.tables:
                table.pool.clear()
                table.limiter.reset()
            self.models.renew()
            self._uploads.clear()
            for client in list(self._waiting):
                self._give_up_feedback(former, client)
            self._told.clear()
            self._after(self._on_news)

    def _finish(self, is_finished: bool) -> None:
        with self.lock:
            run = self.runs.current
            if run.finished != is_finished:
                run.finished = is_finished
                self._told.clear()
                if self.journal is not None:
                    self.journal.run(run.facts)
                self._after(self._on_news)

    def finish(self) -> None:
        """The run is over: clients hear of it in their next reply."""
        self._finish(True)

    def resume(self) -> None:
        """The run goes on, although it was declared over."""
        self._finish(False)

    def drain(self) -> None:
        """Send all clients elsewhere: they hear of it in their next reply, when all that they said is acknowledged.

        New ones are taken only where nobody else takes them. A restart ends it.
        """
        with self.lock:
            self.leaving = True
            self._after(self._on_news)

    # ------------------------------------------------------------------------------------------------- requests

    def answer(self, message: Message) -> Reply:
        """The reply to a request; REFUSED where it cannot be granted. Never raises for what a peer sent."""
        header = message.header
        answer = self._answers.get(type(message.body))
        try:
            if answer is None:
                raise ProtocolError("unexpected", f"{header.type.name} is no request")
            if header.client == NO_CLIENT:
                raise ProtocolError("client", "a request needs a client id")
            if header.run not in (0, self.run) and not isinstance(message.body, messages.Update | messages.Hello):
                raise self._wrong_run()
            return answer(header, message.body, message.payload)
        except ProtocolError as error:
            return self.refuse(error)

    def answer_with(self, body: type[messages.Body], answer: Callable[[Header, Any, Any], Reply]) -> None:
        """Have requests of this kind answered elsewhere, by what may raise ProtocolError. Before the first request."""
        self._answers[body] = answer

    def _wrong_run(self) -> ProtocolError:
        return ProtocolError("run", f"this server counts run {self.run_name!r}; say HELLO again")

    def refuse(self, error: ProtocolError) -> Reply:
        """Count a refusal and say it."""
        with self.lock:
            self.refused[error.code if error.code in CODES else "other"] += 1
        return Reply(messages.Refused(code=error.code, text=error.detail[:1000]))

    def own(self, client: bytes, principal: str) -> None:
        """Bind a client id to who uses it first, for as long as it is known here.

        Args:
            principal: Role and name of the key that a message came by; "" where it came by none.

        Raises:
            ProtocolError: (code "owner") it belongs to another key.
        """
        if not principal or client == NO_CLIENT:
            return
        with self.lock:
            account = self.ledger.find(client)
            owner = self._owners.get(client, "") if account is None else account.owner
            if owner == principal:
                return
            if owner:
                raise ProtocolError("owner", f"client {client.hex()[:8]} belongs to the key {owner}, not {principal}")
            if account is not None:
                account.owner = principal
                self._touch(self.runs.current, account)
            else:
                self._owners[client] = principal
                while len(self._owners) > MOST_OWNERS:
                    self._owners.popitem(last=False)

    def _once(self, grant: Callable[[Header, Any, Any], Reply], kept: int) -> Callable[[Header, Any, Any], Reply]:
        """Grant each number once; a resend gets the reply that was given, and one older than those kept is refused."""

        def answer(header: Header, body: Any, payload: Any) -> Reply:
            key, number = (header.client, header.type, header.table), header.sequence
            with self._granting:
                given = self._given.setdefault(key, OrderedDict())
                self._given.move_to_end(key)
                while len(self._given) > MOST_READERS:
                    self._given.popitem(last=False)
                if number in given:
                    return given[number]
                if len(given) == kept and number < min(given):
                    raise ProtocolError("missing", f"request {number} was overtaken by {min(given)}")
                reply = given[number] = grant(header, body, payload)
                while len(given) > kept:
                    del given[min(given)]
                return reply

        return answer

    # ------------------------------------------------------------------------------------------------ clients

    def _hello(self, header: Header, body: messages.Hello, _: Any) -> Reply:
        table, since = self.tables.named(body.table), 0
        with self.lock:
            is_saved = True
            if body.role == "actor":
                since = self._meet(header.client, body, table)
                table.limiter.met(header.client, body.inserted, header.sequence)
                is_saved = self._is_saved(self.runs.current, header.client)
            elif body.role == "reader":
                self.learners.met(header.client, body, self._clock(), table.name)
            codecs = [codec for codec in body.codecs if codec in compression.codecs()]
            welcome = messages.Welcome(
                schema=table.schema.to_json(),
                parameters=table.parameters.to_wire(),
                parameters_version=table.parameters_version,
                max_step=table.max_step,
                storage=table.storage,
                table=table.number,
                table_name=table.name,
                run_name=self.run_name,
                home_name=self.name,
                epoch=self.epoch,
                servers=[self.name],
                endpoints=self._endpoints(),
                credit=self.credit(table),
                models=self.models.versions(),
                codecs=codecs,
                limits=self._stated_limits(table),
                finished=self.finished,
                software=SOFTWARE,
                since=since,
                durable=self.is_durable,
                leaving=[self.name] if self.leaving else [],
                granted_steps=self._granted(table, header.client)[0] if body.role == "actor" else NO_LIMIT,
            )
            names = {"run": self.run, "home": self.home, "fingerprint": table.fingerprint, "table": table.number}
        return Reply(welcome, None, names, until_saved=not is_saved)

    def _meet(self, client: bytes, body: messages.Hello, table: OpenTable) -> int:
        """Remember what a client says of itself; since when its account is open, or would be. Under the lock."""
        account = self.ledger.greet(client, self._clock(), table.number)
        account.owner = account.owner or self._owners.pop(client, "")
        account.host = body.host
        if (account.label, account.table) != (body.label, table.number):
            account.label = body.label
            self.ledger.move(account, table.number)
            if self.ledger.is_counted(account):
                self._touch(self.runs.current, account)
        return account.since

    def fold(self) -> None:
        """Let accounts leave memory whose clients are gone, or silent for long, once they are on disk where there is
        one; and former runs that nobody asks for. Cost: a look at each account in memory.
        """
        now, limits = self.now, self.limits
        if (trouble := self.trouble()) and now > self._warned_at + WARN_INTERVAL:
            self._warned_at = now
            _log.warning("server %s: %s", self.name, trouble)
        with self.lock:
            for run in self.runs:
                silent = limits.client_timeout if len(run.ledger) > CROWD else limits.account_timeout
                for account in list(run.ledger):
                    patience = limits.client_timeout if account.report.leaving else silent
                    if account.last_seen < now - patience:
                        self._give_up_feedback(run, account.client)
                        if self._is_saved(run, account.client):
                            run.ledger.fold(account)
                run.ledger.expire(now - limits.client_timeout)
            self.runs.rest(lambda run: self.journal is None or not self.journal.has(run.name))

    def trouble(self) -> str:
        """Why new clients may soon have to wait, as a sentence; "" while they need not."""
        with self.lock:
            left = self.newcomers.least(self.now)
        if left > FEW_LEFT * self.newcomers.burst:
            return ""
        return (
            f"clients: {left:.0f} new ones of {self.newcomers.burst} may still come at once with the same key; further "
            f"ones have to wait, and {self.newcomers.rate:g} may come a second (new_clients, new_clients_rate)"
        )

    def _forget(self, client: bytes) -> None:
        """Drop what is in memory of a client that left the ledger of a run. Under the lock."""
        if client not in self.ledger:
            self._told.discard(client)
            for table in self.tables:
                table.limiter.left(client)

    def _stated_limits(self, table: OpenTable) -> dict[str, int]:
        names = ("message_bytes", "request_bytes", "tail_bytes", "model_bytes", "model_chunk")
        entries = {"episode_entries": table.pool.capacity} if table.storage == "episodes" else {}
        return {name: getattr(self.limits, name) for name in names} | entries

    def credit(self, table: OpenTable) -> int:
        """Bytes that each client of a table may have on the way: its limit, or where that is less its share of what the
        table holds, or of what all together may have on the way.
        """
        sharers = self._sharers()
        together = self.limits.on_way_bytes // max(1, sum(sharers.values()))
        return max(1, min(self._credit_limit, together, table.pool.byte_limit // max(1, sharers[table.number])))

    def grant(self, credit: int | None) -> None:
        """Let each client have at most this many bytes on the way from now on, or its share of what is held now."""
        with self.lock:
            self._credit_limit = self._credit_limit if credit is None else credit
            self._after(self._on_news)

    def _sharers(self) -> Counter[int]:
        """Clients of each table that may push: neither gone nor silent for too long, as counted once a second. Under
        the lock.
        """
        now, ledger = self._clock(), self.ledger
        if ledger is not self._shared_ledger or not self._shared_at <= now < self._shared_at + 1.0:
            self._shared_ledger, self._shared_at = ledger, now
            since = now - self.limits.client_timeout
            everybody = (*ledger, *ledger.guests)
            silent = (each.table for each in everybody if each.last_seen < since and not each.report.leaving)
            self._silent = Counter(silent)
        return ledger.present - self._silent

    def _update(self, header: Header, body: messages.Update, _: Any) -> Reply:
        table, now = self.tables.numbered(header.table), self._clock()
        with self.lock:
            run = self.runs.find(header.run)
            if run is None:
                raise self._wrong_run()
            before = sums_of(run.ledger.find(header.client))
            account = run.ledger.report(header.client, header.sequence, body, now, table.number)
            taken = run.logbook.take(header.client, body.lines, account.lines_through, now)
            if taken:
                account.lines_through = taken[-1].line.number
                if self.journal is not None:
                    self.journal.lines(run.name, taken)
                self._after(functools.partial(self._on_lines, taken))
            is_counted = run.ledger.is_counted(account)
            if is_counted and before != sums_of(account):
                self._touch(run, account)
            feedback = None
            if run is self.runs.current:
                # Pieces are numbered from 1 at each start.
                feedback = self._feedback_for(table, account, body.feedback_through if body.epoch == self.epoch else 0)
                if account.report.leaving:
                    self._give_up_feedback(run, header.client)
            reply = Reply(self._updated(table, run, account, body), until_saved=not self._is_saved(run, header.client))
        if run is self.runs.current and is_counted:
            table.pool.sums(header.client, header.sequence, body.total_weight, body.positives, body.minimum)
            table.limiter.reported(header.client, body.steps - body.passed_steps, header.sequence)
            if account.report.leaving:
                table.pool.goodbye(header.client)
                table.limiter.left(header.client)
        changed: dict[str, Any] = {}
        if run is self.runs.current and table.limiter.is_active and not account.report.leaving:
            with self.lock:
                changed["granted_steps"], changed["wait"] = self._granted(table, header.client)
        if feedback is not None:
            changed["feedback_through"] = feedback[0]
        if not changed:
            return reply
        payload = None if feedback is None else feedback[1]
        return reply._replace(body=msgspec.structs.replace(reply.body, **changed), payload=payload)

    def _granted(self, table: OpenTable, client: bytes) -> tuple[int, str]:
        """How many entries a client may have recorded before it has to ask again, and why not more. Under the lock."""
        return table.limiter.grant(client, self._sharers()[table.number])

    def untold(self, within: float) -> int:
        """Clients heard from in the last `within` seconds that have not said that they know that the run is over."""
        since = self._clock() - within
        with self.lock:
            if not self.finished:
                return 0
            return sum(
                account.last_seen >= since and not account.report.leaving and account.client not in self._told
                for account in (*self.ledger, *self.ledger.guests)
            )

    def _updated(self, table: OpenTable, run: Run, account: Account, body: messages.Update) -> messages.Updated:
        if self.finished and run is self.runs.current and (body.finished or body.leaving):
            self._told.add(account.client)
        is_older = body.parameters_version != table.parameters_version
        return messages.Updated(
            epoch=self.epoch,
            durable=self.is_durable,
            episodes=account.report.episodes,
            steps=account.report.steps,
            lines_through=account.lines_through,
            ended_through=account.ended_through,
            caches=account.accepted_caches,
            received_bytes=account.received_bytes,
            rejected=dict(account.rejected),
            lost=account.lost_caches,
            lost_bytes=account.lost_bytes,
            credit=self.credit(table),
            parameters_version=table.parameters_version,
            parameters=table.parameters.to_wire() if is_older else None,
            models=self.models.versions(),
            run_name=self.run_name,
            finished=self.finished,
            time=self.now,
            leaving=self.leaving,
        )

    # ------------------------------------------------------------------------------------------------ caches

    def arrived(self, header: Header, body: messages.Cache | messages.Episode, payload: Any) -> int:
        """Check a cache or episode and hold it; returns its samples. A refused one is counted for its client.

        Raises:
            ProtocolError: it was not taken, and why.
        """
        client, size = header.client, header.payload_bytes
        try:
            table = self._table_of(header)
            held = table.pool.check(body, payload, limits=self.limits, checksum=header.payload_checksum)
            with self.lock:
                self._check_run(header)  # another one may have begun meanwhile
                table.pool.add(client, header.sequence, held)
                run = self.runs.current
                account = self._arrived(run, client, size, body, table.number)
                if account is not None:
                    run.ledger.accepted(account, size, held.samples)
        except ProtocolError as error:
            with self.lock:
                self.refused[error.code] += 1
                named = self.runs.find(header.run)
                if client != NO_CLIENT and named is not None:
                    account = self._arrived(named, client, size, body)
                    if account is not None:
                        named.ledger.rejected(account, error.code)
            raise
        return int(held.samples)

    def _arrived(
        self, run: Run, client: bytes, size: int, body: messages.Cache | messages.Episode, table: int = 0
    ) -> Account | None:
        now = self._clock()
        account = run.ledger.arrived(client, size, now, body.number, body.pushed_bytes, body.since, table)
        if account is not None:
            self._touch(run, account)
        return account

    def _table_of(self, header: Header) -> OpenTable:
        """The table that something pushed is for, which fits it by all that its header says."""
        if header.client == NO_CLIENT:
            raise ProtocolError("client", "a cache needs a client id")
        self._check_run(header)
        table = self.tables.numbered(header.table)
        table.check_fingerprint(header.fingerprint)
        return table

    def _check_run(self, header: Header) -> None:
        if header.run and header.run != self.runs.current.number:
            raise ProtocolError("run", f"a cache of another run; this server counts {self.run_name!r}")

    # ------------------------------------------------------------------------------------------------ models

    def publish(self, topic: str, content: bytes | bytearray | memoryview | str, version: int = 0) -> Model:
        """Store a new version and tell everyone."""
        if not isinstance(content, (str, bytes, bytearray, memoryview)):
            raise WrongType("content", "bytes or str", type(content).__name__, "serialize it first.")
        size = len(content)
        if size > self.limits.model_bytes:
            allowed = f"at most {self.limits.model_bytes} bytes (limits.model_bytes)"
            raise ParameterError("content", f"{size} bytes", allowed)
        made = make(topic, content, 0)  # hashed here: nobody else has to wait for that
        with self.lock:
            model = self.models.number(made, version)
            self._published(model)
        return model

    def _published(self, model: Model) -> None:
        """Save a model that is new, then have it here and tell everyone: nobody may have a version that a restart would
        forget. Under the lock.
        """
        if self.journal is None:
            self._show([model])
            return
        self.journal.model(self.run_name, model)
        if not self._unsaved:
            self._unsaved = []
            self._after(functools.partial(self._show, self._unsaved))
        self._unsaved.append(model)
        while len(self._unsaved) > 1 and sum(kept.size for kept in self._unsaved) > SMALL_BYTES:
            del self._unsaved[0]  # published faster than the disk takes it: passed over, as by a slow client

    def _show(self, models: list[Model]) -> None:
        with self.lock:
            for model in models:
                if self.models.put(model):
                    self._on_model(model)
            self._tell_models()

    def _tell_models(self) -> None:
        """Have the tables know how old their entries' models are."""
        versions = self.models.versions()
        for table in self.tables:
            table.pool.saw_model(table.parameters.newest_model(versions))

    def _publish(self, header: Header, body: messages.Publish, payload: Any) -> Reply:
        with self.lock:
            if self.models.is_numbered(body.topic, body.version, body.sha256):  # again, by who cannot know that
                self._uploads.pop((header.client, body.topic), None)
                return Reply(
                    messages.Published(topic=body.topic, received=body.size, version=body.version), until_saved=True
                )
            assembly = self._upload(header.client, body)
            whole = assembly.add(body.offset, memoryview(b"" if payload is None else payload).cast("B"))
            if whole is None:
                return Reply(messages.Published(topic=body.topic, received=assembly.offset))
            del self._uploads[header.client, body.topic]
            try:
                model = self.models.number(whole, body.version)
            except (StaleVersion, ValueError) as error:
                raise ProtocolError("topic", str(error)) from error
            self._published(model)
        return Reply(messages.Published(topic=body.topic, received=body.size, version=model.version), until_saved=True)

    def _upload(self, client: bytes, body: messages.Publish) -> Assembly:
        key = (client, body.topic)
        assembly = self._uploads.get(key)
        if assembly is None or assembly.digest != body.sha256:
            if body.offset:
                raise ProtocolError("missing", f"a stretch at {body.offset} of a model whose beginning is not here")
            assembly = Assembly(body.topic, 0, body.size, body.sha256, body.text, byte_limit=self.limits.model_bytes)
            self._uploads[key] = assembly
        self._uploads.move_to_end(key)
        while len(self._uploads) > MOST_UPLOADS or (
            len(self._uploads) > 1 and sum(kept.offset for kept in self._uploads.values()) > self.limits.model_bytes
        ):
            self._uploads.popitem(last=False)  # begun and not gone on with: its publisher begins again, if it is there
        return assembly

    def _fetch(self, header: Header, body: messages.Fetch, _: Any) -> Reply:
        with self.lock:
            model = self.models.serve(body.topic, body.version)
            newest = self.models.version(body.topic)
        if model is None and 0 < body.version < newest:  # overtaken while it was asked for: nothing is wrong
            text = f"version {body.version} of topic {body.topic!r} has made room for {newest}"
            return Reply(messages.Refused(code="missing", text=text))
        return Reply(*chunk_of(model, body, self.limits, home=self.home, epoch=self.epoch))

    # ------------------------------------------------------------------------------------------------ learners

    def configure(self, table: OpenTable, changes: Mapping[str, Any]) -> Parameters:
        """Change a table's parameters for everyone; its clients hear of it in the reply to their next UPDATE."""
        with self.lock:
            parameters = table.parameters.replace(**changes)
            if parameters != table.parameters:
                table.take_parameters(parameters, table.parameters_version + 1)
                self._save_parameters(table)
                self._after(self._on_news)
            return parameters

    def _control(self, header: Header, body: messages.Control, _: Any) -> Reply:
        table = self.tables.numbered(header.table)
        try:
            if body.parameters:
                self.configure(table, body.parameters)
            if body.run:
                self.begin_run(body.run)
        except (MemoireError, TypeError) as error:
            raise ProtocolError("parameters", str(error)) from error
        if body.finish:
            self.finish()
        if body.drain:
            self.drain()
        taken = messages.Taken(parameters_version=table.parameters_version, finished=self.finished)
        return Reply(taken, until_saved=True)

    def hand_on(self, ids: NDArray[Any], td_errors: Any) -> int:
        """Set priorities by TD errors of samples whose entries are here, and keep the others for their owners, who
        fetch them with their next UPDATE; returns how many were lost.

        Args:
            ids: `ID` [B], as a batch has them.
            td_errors: [B], finite.
        """
        ids = np.asarray(ids)
        errors = td_errors_for(ids, td_errors)
        owners, group = np.unique(ids["client"], axis=0, return_inverse=True)
        order = np.argsort(group.ravel(), kind="stable")
        bounds = np.searchsorted(group.ravel()[order], np.arange(len(owners) + 1))
        lost = 0
        with self.lock:
            for owner, start, end in zip(owners, bounds[:-1], bounds[1:], strict=True):
                rows = order[start:end]
                lost += self._hand(owner.astype("<u8").tobytes(), ids["number"][rows].astype(np.int64), errors[rows])
            self.feedback_given += len(ids)
            self.feedback_lost += lost
        return lost

    def _hand(self, client: bytes, numbers: NDArray[np.int64], errors: NDArray[np.float32]) -> int:
        """Set priorities of entries that are here, or keep TD errors for their owner; returns how many were lost."""
        for table in self.tables:
            if client == table.pool.owner and table.pool.apply(client, numbers, errors) is not None:
                return 0
        return self._keep(client, numbers, errors)

    def _keep(self, client: bytes, numbers: NDArray[np.int64], errors: NDArray[np.float32]) -> int:
        account = self.ledger.find(client)
        if account is None or account.report.leaving or not self.ledger.is_counted(account):
            return len(numbers)
        waiting = self._waiting.setdefault(client, _Waiting())
        waiting.number += 1
        waiting.pieces.append((waiting.number, numbers, errors))
        account.waiting_feedback += len(numbers)
        lost = 0
        while account.waiting_feedback - lost > FEEDBACK_SAMPLES and len(waiting.pieces) > 1:
            lost += len(waiting.pieces.popleft()[1])
        if lost:
            self.ledger.lost_feedback(account, lost)
            self._touch(self.runs.current, account)
        return lost

    def _give_up_feedback(self, run: Run, client: bytes) -> None:
        """Count as lost what waits for a client that will not fetch it any more. Under the lock."""
        if self._waiting.pop(client, None) is None:
            return
        account = run.ledger.find(client)
        if account is not None and account.waiting_feedback:
            self.feedback_lost += account.waiting_feedback
            run.ledger.lost_feedback(account, account.waiting_feedback)
            self._touch(run, account)

    def _feedback_for(self, table: OpenTable, account: Account, through: int) -> tuple[int, Any] | None:
        """Number and container of what the client has not applied yet."""
        client = account.client
        waiting = self._waiting.get(client)
        if waiting is None:
            return None
        while waiting.pieces and waiting.pieces[0][0] <= through:
            account.waiting_feedback -= len(waiting.pieces.popleft()[1])
        chosen: list[tuple[int, NDArray[np.int64], NDArray[np.float32]]] = []
        samples = 0
        for piece in waiting.pieces:
            samples += len(piece[1])
            if chosen and samples > FEEDBACK_PER_REPLY:
                break
            chosen.append(piece)
        if not chosen:
            return None
        numbers = np.concatenate([piece[1] for piece in chosen])
        errors = np.concatenate([piece[2] for piece in chosen])
        ids = np.empty(len(numbers), ID)
        ids["client"] = np.frombuffer(client, "<u8")
        ids["number"] = numbers
        return chosen[-1][0], pack.pack_feedback(table.schema, ids, errors, now=self._clock())

    def _feedback(self, header: Header, body: messages.Feedback, payload: Any) -> Reply:
        table, samples, lost = self.tables.numbered(header.table), 0, 0
        with self.lock:
            for client, (numbers, errors) in unpack.read_feedback(payload, table.schema, self.limits).items():
                samples += len(numbers)
                lost += self._hand(client, numbers.astype(np.int64), errors.astype(np.float32))
            self.feedback_given += samples
            self.feedback_lost += lost
        return Reply(messages.Taken(samples=samples - lost, lost=lost, parameters_version=table.parameters_version))

    # ----------------------------------------------------------------------------------------------- accounts

    def pages(self, run: Run) -> Iterator[Rows]:
        """Every account of a run that is here, in pages: the server's own, and those that it inherited. A client that
        is counted while they are read may be in them as it was before.
        """
        with self.lock:
            live = run.live(self.home)
        pages = run.pages(live)
        while True:
            with self.lock:
                rows = next(pages, None)
            if rows is None:
                return
            yield rows

    def ended(self, after: int, most: int) -> tuple[str, int, list[tuple[bytes, messages.Ended]]]:
        """Closed episodes of the run that is counted now: its name, the number of the first one, and at most so many of
        those that are still kept and have a number above `after`.
        """
        with self.lock:
            kept, count = self.ledger.ended, self.ledger.ended_count
            first = max(count - len(kept), after if after <= count else 0) + 1
            begin = first - 1 - (count - len(kept))
            return self.run_name, first, list(itertools.islice(kept, begin, begin + most))

    def _page(self, header: Header, body: messages.Ledger, _: Any) -> Reply:
        with self.lock:
            run = self.runs.named(body.run) if body.run else self.runs.current
            if run is None:
                raise ProtocolError("run", f"this server knows no run {body.run!r}")
            key = (header.client, run.name)
            live = self._readings.get(key)
            if not body.after or live is None:
                live = self._readings[key] = run.live(self.home)
            rows, more = run.page(live, body.after)
            if not more:
                del self._readings[key]
            while len(self._readings) > MOST_READINGS:
                self._readings.popitem(last=False)
            pools = [table.pool.stats() for table in self.tables if run is self.runs.current]
            accounts = messages.Accounts(
                run_name=run.name,
                epoch=self.epoch,
                finished=run.finished,
                durable=self.is_durable,
                runs=[facts.name for facts in self.runs.facts()][-MOST_RUNS:],
                accounts=rows.tobytes(),
                more=more,
                time=self.now,
                applied=sum(pool.applied for pool in pools),
                stale=sum(pool.stale for pool in pools),
            )
        return Reply(accounts)

    def _inherit(self, header: Header, body: messages.Inherit, _: Any) -> Reply:
        rows = merge(unpack_accounts(body.accounts))
        run = self.inherit(body.run_name, body.finished, rows)
        return Reply(messages.Taken(samples=len(rows), finished=run.finished), until_saved=True)

    def inherit(self, name: str, finished: bool, rows: Rows) -> Run:
        """Keep accounts of other servers for a run, as `merge` gives them; returns the run.

        Raises:
            ProtocolError: the run's name is none, or too many runs are kept.
        """
        with self.lock:
            run = self.runs.named(name) or self._former(name, finished)
            run.inherit(rows)
            if self.journal is not None:
                self.journal.inherit(run.name, rows.tobytes())
            return run

    def _former(self, name: str, finished: bool) -> Run:
        """A run that was counted elsewhere, and is kept here. Under the lock."""
        try:
            arguments.name("run", name)
        except ParameterError as error:
            raise ProtocolError("parameters", str(error)) from error
        if len(self.runs.facts()) >= MOST_FORMER:
            raise ProtocolError("busy", f"{MOST_FORMER} runs are kept here already")
        run = self.runs.keep(name, finished, self._clock())
        if self.journal is not None:
            self.journal.run(run.facts)
        return run

    # ------------------------------------------------------------------------------------------------ readers

    def _sums(self, header: Header, body: messages.Sums, _: Any) -> Reply:
        table = self._drawn_from(header)
        rows = table.pool.reserve(header.client, body.reserve, body.elsewhere, (body.part, body.of))
        standing = _stands(table, header.client, body)
        return Reply(
            messages.Summed(epoch=self.epoch, clients=rows.tobytes(), finished=self.finished, standing=standing)
        )

    def _draw(self, header: Header, body: messages.Draw, _: Any) -> Reply:
        table = self._drawn_from(header)
        payload = table.pool.draw_counts(
            header.client,
            unpack_counts(body.counts),
            now=self._clock(),
            compression=self._compression(table, header.client),
        )
        rows = table.pool.reserve(header.client, body.reserve, body.elsewhere, (body.part, body.of))
        if payload is not None:
            table.limiter.drew(pack.samples_of(payload), has_band=body.band is not None)
        standing = _stands(table, header.client, body)
        drawn = messages.Drawn(epoch=self.epoch, clients=rows.tobytes(), finished=self.finished, standing=standing)
        return Reply(drawn, payload)

    def _compression(self, table: OpenTable, reader: bytes) -> str:
        """How frames travel to a reader: by lz4 where the parameters say so and both have it. zlib is for actors:
        a server that packed every batch by it would do little else.
        """
        if table.parameters.compression != "lz4" or "lz4" not in compression.codecs():
            return "none"
        with self.lock:
            return "lz4" if self.learners.has(reader, "lz4") else "none"

    def _drawn_from(self, header: Header) -> OpenTable:
        table = self.tables.numbered(header.table)
        if header.fingerprint:
            table.check_fingerprint(header.fingerprint)
        return table


def _stands(table: OpenTable, reader: bytes, body: messages.Sums | messages.Draw) -> messages.Standing | None:
    """How a table's drawing stands beside its recording, after what a reader has told of it."""
    table.limiter.wants(reader, body.wanted)
    if body.band is not None:
        table.limiter.told(ClusterSurplus(*msgspec.structs.astuple(body.band)))
    standing = table.limiter.standing()
    return None if standing is None else messages.Standing(*standing)


def _chosen(key: str, saved: str) -> _Chosen:
    """What a former life was given. Raises ParameterError."""
    try:
        return msgspec.json.decode(saved, type=_Chosen)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ParameterError(key, saved[:80], f"what a server saves of a table: {error}") from error
