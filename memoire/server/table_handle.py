"""One table of a server, as a learner in the server's process uses it."""

from __future__ import annotations

import functools
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from memoire._core import Held
from memoire.arguments import checked_names, seconds, whole
from memoire.errors import Closed, MemoireTimeout, NotEnoughSamples, Refused, WrongType
from memoire.replay.batch import Batch, PriorityUpdate
from memoire.replay.episodes import EpisodeBatch
from memoire.replay.mixing import MixedBatch, Mixer, batches_until_over, drawn_ahead, sizes_of
from memoire.replay.parameters import NAMES, Parameters, StrictAttributes
from memoire.replay.rollouts import Rollouts
from memoire.replay.sampling import Sampler, changes_of
from memoire.replay.schema import Schema
from memoire.tables.base import DrawsBatches, DrawsEpisodes, HandsOutOnce, HasCalls, Release, ShowsSamples, TakeRequest
from memoire.tables.calls import Request, Transport
from memoire.tables.draws import MAX_BATCH
from memoire.tables.inspection import Distribution, FreshnessMonitor, InspectedSample
from memoire.tables.registry import Reply
from memoire.tables.table import OpenTable
from memoire.wire import messages
from memoire.wire.frames import Answer, Message, MessageHeader
from memoire.wire.receivers import Receiver

from .dispatch import Dispatcher
from .stats import TableStats, table_stats

WAIT_INTERVAL = 0.1
"""Seconds after which a draw that waits for samples says so again."""
T = TypeVar("T")
ADVICE = "Are actors running, and do they reach this server?"


class TableHandle(StrictAttributes):
    """One table of a `Server`: `server.table("demo")`. All methods may be called from any thread.

    Args:
        check_open: Raises where the server is closed.
        is_over: Whether the run is finished, or the server closed.
        where: What errors call the server.
    """

    _COPY = "Ask each server for its tables: server.table(name)."

    def __init__(
        self,
        dispatcher: Dispatcher,
        table: OpenTable,
        check_open: Callable[[], None],
        is_over: Callable[[], bool],
        where: Callable[[], str],
    ) -> None:
        self._dispatcher, self._table = dispatcher, table
        self._check_open, self._is_over, self._where = check_open, is_over, where
        self._counting = threading.Lock()  # guards the three below
        self._batches = self._missed = 0
        self._waited = 0.0
        self._looks = FreshnessMonitor()
        self._guard()

    @property
    def name(self) -> str:
        """The table's."""
        return self._table.name

    @property
    def schema(self) -> Schema:
        """What an entry of it is."""
        return self._table.schema

    @property
    def parameters(self) -> Parameters:
        """Everything that shapes its sampling, as it is now."""
        return self._table.parameters

    @checked_names()
    def get_batch(
        self, batch_size: int, timeout: float | None = None, *, out: Mapping[str, Any] | Batch | None = None
    ) -> Batch:
        """Draw a batch of this table's samples, as if from all clients' memories at once.

        All or nothing: a batch that cannot be filled takes no sample. Safe from several threads; the GIL is released
        while samples are copied. docs/sampling.md says how clients are weighed.

        Args:
            batch_size: Samples to draw, B, at least 1.
            timeout: Seconds to wait for enough samples; None does not wait.
            out: Arrays of the caller (by name, or an earlier batch) that are filled in place of new ones.

        Returns:
            Arrays [B, ...], which belong to the caller.

        Raises:
            ParameterError, WrongType: an array of `out` does not fit, or it is none; no sample was taken.
            NotEnoughSamples: fewer are held, also after `timeout`.
            Closed: the server was closed, also from another thread while waiting.
        """
        size = whole("batch_size", batch_size, 1, MAX_BATCH)
        if not isinstance(out, Mapping | None):
            raise WrongType("out", "arrays by their names in a batch", type(out).__name__)
        pool = self._table.draws or self._table.offered(DrawsBatches)
        patience = seconds(timeout, 0.0)
        drawn = self._counted(lambda: self._in_band(size, patience, lambda left: pool.get(size, timeout=left, out=out)))
        if self._looks.is_due(time.monotonic()):
            self._looks.saw(drawn.gathered, drawn.importance, drawn.left_out, self._newest_model())
        batch = drawn.batch(self.schema, self.update_priorities)
        return batch if out is None else batch.copy_into(out)

    @checked_names()
    def sample_episodes(
        self, count: int, timeout: float | None = None, *, group: str | None = None, group_size: int | None = None
    ) -> EpisodeBatch:
        """Draw whole episodes of a table that stores them, or groups of them: see `Buffer.sample_episodes`.

        Each entry of them is a sample drawn. With `samples_per_insert_tolerance` a draw begins within the band, and the
        next waits until it is there again.

        Args:
            timeout: Seconds to wait until there are any; None does not wait.

        Raises:
            ParameterError: an argument is out of its range, or this table holds caches.
            NotEnoughSamples: no episode, or no complete group, came in that time.
        """
        draws, patience = self._table.offered(DrawsEpisodes), seconds(timeout, 0.0)
        draw = functools.partial(
            draws.sample_episodes, count, self.update_priorities, group=group, group_size=group_size
        )
        batch = self._counted(lambda: self._in_band(1, patience, lambda left: draw(timeout=left)))
        self._table.limiter.drew(int(batch["mask"].sum()) - 1)
        return batch

    @checked_names()
    def take(
        self,
        steps: int,
        timeout: float | None = None,
        *,
        exact: bool = True,
        min_clients: int = 0,
        release: Release = "now",
    ) -> Rollouts:
        """The oldest entries of a table that stores rollouts, in order of arrival: nobody gets them again.

        All of them or none. Entries whose model is too old (`max_model_lag`) are passed over, counted, and never handed
        out. docs/on-policy.md says how actors are paced.

        Args:
            steps: Entries, at least 1 and at most the table's capacity.
            timeout: Seconds to wait until they are there; None does not wait.
            exact: Split the last fragment so that there are just `steps` entries: its rest is first in the next take.
                Without it the last fragment is taken whole.
            min_clients: Clients of which entries have to be held before anything is taken.
            release: When actors may record as many again: "now", or with the next model that is published ("publish"),
                so that they make no step with a model whose entries were taken already.

        Raises:
            ParameterError: an argument is out of its range, or this table stores no rollouts.
            NotEnoughSamples: too few entries came in that time; it says what was missing.
            Closed: the server was closed, also from another thread while waiting.
        """
        pool, wanted = self._table.offered(HandsOutOnce), TakeRequest(steps, exact, min_clients, release)
        patience = seconds(timeout, 0.0)
        taken = self._counted(
            lambda: self._in_stretches(
                functools.partial(pool.take, wanted), steps, patience, time.monotonic() + patience
            )
        )
        if self._looks.is_due(time.monotonic()):
            self._looks.took(taken.age, taken.model_version, self._newest_model())
        return taken

    def _counted(self, draw: Callable[[], T]) -> T:
        """What `draw` returns, counted, and how long it waited."""
        self._check_open()
        began, batches, missed = time.monotonic(), 0, 0
        try:
            drawn = draw()
            batches = 1
        except NotEnoughSamples:
            missed = 1
            raise
        except Closed:
            self._check_open()
            raise Closed("this server") from None
        finally:
            waited = time.monotonic() - began
            with Held(self._counting):
                self._waited += waited
                self._batches += batches
                self._missed += missed
        return drawn

    def _in_band(self, size: int, timeout: float, draw: Callable[[float], T]) -> T:
        """What `draw` returns of at least `size` samples, called with the seconds to wait: as soon as there are enough,
        and as they may be drawn beside what is recorded.
        """
        limiter = self._table.limiter
        if not limiter.is_active:
            drawn = draw(timeout)
            limiter.drew(size)
            return drawn
        deadline = time.monotonic() + timeout
        if reason := limiter.take(size, timeout):
            old = self._table.parameters.lag_in_words(self._newest_model())
            raise NotEnoughSamples(size, 0, 0, 0, timeout, reason + old)
        try:
            return self._in_stretches(draw, size, timeout, deadline)
        except BaseException:
            limiter.drew(-size)
            raise

    def _in_stretches(self, draw: Callable[[float], T], size: int, timeout: float, deadline: float) -> T:
        """What `draw` returns, called with the seconds to wait until it has `size` samples, or until the deadline.
        Meanwhile actors that have no room, or were told to wait, hear that a learner waits for them.
        """
        limiter, who = self._table.limiter, object()
        try:
            while True:
                left = deadline - time.monotonic()
                try:
                    return draw(max(0.0, min(left, WAIT_INTERVAL)))
                except NotEnoughSamples as short:
                    if left <= WAIT_INTERVAL:
                        facts = short.wanted, short.unused, short.caches, short.clients, timeout, short.reason
                        raise NotEnoughSamples(*facts) from None
                limiter.wants(who, size)
        finally:
            limiter.wants(who, 0)

    @checked_names()
    def batches(self, batch_size: int, timeout: float = 30.0, *, ahead: int = 0) -> Iterator[Batch]:
        """Batches of this table until the run is over or the server closed.

        Args:
            timeout: Seconds that each waits for its samples at most.
            ahead: Batches that are drawn on a thread of their own while the learner works on one, from the first one
                on; 0 draws each when it is asked for. They are as old as that. Those that nobody fetches are lost.

        Raises:
            MemoireTimeout: not enough samples came in that time.
        """
        what, draw = f"batch of {batch_size}", functools.partial(self.get_batch, batch_size)

        def drawn(is_over: Callable[[], bool]) -> Iterator[Batch]:
            return batches_until_over(draw, is_over, what, timeout, self._where(), lambda: ADVICE)

        return drawn_ahead(drawn, self._is_over, ahead)

    @checked_names()
    def update_priorities(self, ids: Any, td_errors: Any) -> PriorityUpdate:
        """Set priorities of entries that are here, and hand TD errors of others on to the clients that own them;
        returns at once. The owners apply them with their next message and report applied and stale: see `stats`.

        Args:
            ids: Of a batch, [B].
            td_errors: Finite, [B].
        """
        self._check_open()
        return self._dispatcher.hand_on(ids, td_errors)

    @checked_names(NAMES)
    def configure(
        self,
        *,
        sampler: Sampler | None = None,
        discount: float | Sequence[float] | None = None,
        discard_mismatched: bool = False,
        **fields: Any,
    ) -> Parameters:
        """Change this table's parameters here and, with their next message, at its clients; their data stays. Takes
        what `Buffer.configure` takes.

        Args:
            discard_mismatched: Drop caches that are held if their samples were made with other values, such as another
                discount. Without it they are a reason to refuse: a learner would train on them.

        Raises:
            ParameterError: a value is out of its range, or caches are held that were made with another one; nothing
                was changed.
        """
        self._check_open()
        changes = changes_of(sampler, discount, fields)
        return self._dispatcher.configure(self._table, changes, discard_mismatched=discard_mismatched)

    def limit(self, byte_limit: int) -> int:
        """Hold at most so many bytes in this table from now on, whatever the others hold; returns how many caches had
        to go.
        """
        self._check_open()
        gone = self._dispatcher.tables.limit(self._table, byte_limit)
        self._dispatcher.grant(None)  # its clients' shares are others now
        return gone

    def calls(self, **options: Any) -> Any:
        """The calls that this kind of table has of its own, without a network: of prompts those of `memoire.Prompts`.

        Args:
            options: Of these calls: of prompts `rank` and `session`, as of `memoire.Prompts`.

        Raises:
            ParameterError: it has none.
        """
        way = DirectTransport(self._dispatcher, self._table, self._check_open)
        return self._table.offered(HasCalls).calls(way, **options)

    def distribution(self) -> Distribution:
        """How weights and ages of what is held are spread. Some tens of thousands of samples are looked at for it,
        which takes milliseconds; nothing is changed.
        """
        return self._table.pool.distribution()

    def peek(self, of: tuple[bytes, int] | None = None) -> InspectedSample | None:
        """A copy of one held sample, as likely as in a draw, to be looked at: nothing is taken by that.

        None where nothing is held, or the sample is too large to be looked at.

        Args:
            of: Client and number of the entry that is wanted, as `InspectedSample` names them; None if it
                is not held.
        """
        pool = self._table.pool
        peeked = pool.peek(of) if isinstance(pool, ShowsSamples) else None
        return None if peeked is None else peeked.specimen(self.schema, self._newest_model())

    def _newest_model(self) -> int:
        """Version of the newest model of the table's topic, or of any if it has none; 0: there is none."""
        return self._table.parameters.newest_model(self._dispatcher.models.versions())

    def stats(self) -> TableStats:
        """All figures at this moment."""
        with Held(self._counting):
            counted = self._batches, self._missed, self._waited
        return table_stats(self._dispatcher, self._table, *counted, self._looks.newest)

    def __repr__(self) -> str:
        return f"<table {self.name!r} of {self._where()}>"


def mixed_batches(
    table: Callable[[str], TableHandle],
    batch_size: Mapping[str, int],
    timeout: float,
    ahead: int,
    is_over: Callable[[], bool],
    where: str,
) -> Iterator[MixedBatch]:
    """Batches of several tables until the run is over: see `Server.batches`.

    Args:
        table: Finds a table by its name.
        batch_size: Samples of each table in a batch, by its name.
        where: What errors call the server.
    """
    sizes = sizes_of(batch_size)
    mixer = Mixer(sizes, {name: table(name).get_batch for name in sizes})

    def advice() -> str:
        return f"Table {mixer.lacking!r} has too few. {ADVICE}"

    def drawn(is_over: Callable[[], bool]) -> Iterator[MixedBatch]:
        return batches_until_over(mixer.get, is_over, f"batch of {sizes}", timeout, where, advice)

    return drawn_ahead(drawn, is_over, ahead)


UNBOUNDED = Receiver(*[1 << 53] * 3)
"""What a user in this process takes: replies do not leave it."""


class DirectTransport(Transport):
    """A `Transport` to one server, in its process. Replies wait for the disk here, too."""

    def __init__(self, dispatcher: Dispatcher, table: OpenTable, check_open: Callable[[], None]) -> None:
        self.limits = dispatcher.limits
        self._dispatcher, self._table, self._check_open = dispatcher, table, check_open
        self._client, self._numbers = secrets.token_bytes(16), itertools.count(1)
        dispatcher.receivers.register(self._client, UNBOUNDED)  # its replies stay in this process

    def table(self, deadline: float) -> tuple[str, Schema]:
        """Name and columns of the table."""
        return self._table.name, self._table.schema

    def servers(self) -> Sequence[str]:
        """The only one."""
        return [self._dispatcher.name]

    def where(self) -> str:
        """What errors call it."""
        return f"table {self._table.name!r} of this server"

    def pause(self, seconds: float) -> None:
        """Wait so long. Raises Closed."""
        time.sleep(seconds)
        self._check_open()

    def ask(self, requests: Mapping[Any, Request], deadline: float) -> dict[Any, Answer]:
        """The answer of the server."""
        self._check_open()
        return {key: self._ask(request, deadline) for key, request in requests.items()}

    def _ask(self, request: Request, deadline: float) -> Answer:
        number, is_there, box = next(self._numbers), threading.Event(), list[Reply]()
        size = len(request.payload or b"")
        header = MessageHeader(request.body.type, self._table.number, self._client, 0, 0, number, 0, size, 0)

        def send(reply: Reply) -> None:
            box.append(reply)
            is_there.set()

        try:
            reply = self._dispatcher.answer(Message(header, request.body, request.payload))
        except Closed:
            self._check_open()
            raise
        self._dispatcher.send(header, reply, send)
        patience = max(0.0, deadline - time.monotonic()) + 1.0
        if not is_there.wait(patience):
            self._check_open()
            return MemoireTimeout("disk", self.where(), patience, "The state folder has not saved it yet.")
        if isinstance(box[0].body, messages.Refused):
            return Refused(self.where(), box[0].body.code, box[0].body.text)
        return Message(header, box[0].body, box[0].payload)
