"""Handle of one table of a server, for a learner in the server's process."""

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
from memoire.tables.base import DeliversOnce, DrawsBatches, DrawsEpisodes, HasCalls, Release, ShowsSamples, TakeRequest
from memoire.tables.calls import Request, Transport
from memoire.tables.draws import MAX_BATCH
from memoire.tables.inspection import Distribution, FreshnessMonitor, InspectedSample
from memoire.tables.registry import Reply
from memoire.tables.table import OpenTable
from memoire.wire import messages
from memoire.wire.frames import Answer, Message, MessageHeader
from memoire.wire.receivers import ReplyLimits

from .dispatch import Dispatcher
from .stats import TableStats, table_stats

WAIT_INTERVAL = 0.1
"""Seconds between two reports of a waiting draw to the rate limiter."""
T = TypeVar("T")
ADVICE = "Are actors running, and do they reach this server?"


class TableHandle(StrictAttributes):
    """One table of a `Server`, as from `server.table("demo")`. All methods may be called from any thread.

    Args:
        check_open: Raises an error if the server is closed.
        is_over: Returns True if the run is finished or the server closed.
        where: Returns the name of the server for errors.
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
        self._counts_lock = threading.Lock()  # guards `_batches`, `_missed` and `_waited`
        self._batches = self._missed = 0
        self._waited = 0.0
        self._freshness = FreshnessMonitor()
        self._guard()

    @property
    def name(self) -> str:
        """Name of the table at the server."""
        return self._table.name

    @property
    def schema(self) -> Schema:
        """Columns of an entry of the table."""
        return self._table.schema

    @property
    def parameters(self) -> Parameters:
        """Present parameters of the table's sampling."""
        return self._table.parameters

    @checked_names()
    def get_batch(
        self, batch_size: int, timeout: float | None = None, *, out: Mapping[str, Any] | Batch | None = None
    ) -> Batch:
        """Draw a batch of this table's samples, as if from all clients' memories at once.

        All or nothing: a batch that cannot be filled takes no sample. Safe from several threads; the GIL is released
        while samples are copied. docs/sampling.md explains the weights of clients.

        Args:
            batch_size: Samples to draw, B, at least 1.
            timeout: Seconds to wait for enough samples; None does not wait.
            out: Arrays of the caller (by name, or an earlier batch) to fill, instead of new ones.

        Returns:
            Batch of arrays [B, ...], which belong to the caller.

        Raises:
            ParameterError, WrongType: a value of `out` is not a fitting array; no sample was taken.
            NotEnoughSamples: the table holds fewer samples, also after `timeout`.
            Closed: the server was closed, also from another thread while waiting.
        """
        size = whole("batch_size", batch_size, 1, MAX_BATCH)
        if not isinstance(out, Mapping | None):
            raise WrongType("out", "arrays by their names in a batch", type(out).__name__)
        pool = self._table.draws or self._table.require(DrawsBatches)
        patience = seconds(timeout, 0.0)
        drawn = self._counted(lambda: self._in_band(size, patience, lambda wait: pool.get(size, timeout=wait, out=out)))
        if self._freshness.is_due(time.monotonic()):
            self._freshness.record_batch(drawn.gathered, drawn.importance, drawn.left_out, self._newest_model())
        batch = drawn.batch(self.schema, self.update_priorities)
        return batch if out is None else batch.copy_into(out)

    @checked_names()
    def sample_episodes(
        self, count: int, timeout: float | None = None, *, group: str | None = None, group_size: int | None = None
    ) -> EpisodeBatch:
        """Draw whole episodes of a table that stores episodes, or groups of episodes: see `Buffer.sample_episodes`.

        Each entry of the episodes counts as a drawn sample. With `samples_per_insert_tolerance` a draw begins within
        the band and may exceed it; the next draw waits until the ratio is in the band again.

        Args:
            timeout: Seconds to wait for an episode; None does not wait.

        Raises:
            ParameterError: an argument is out of its range, or this table does not store episodes.
            NotEnoughSamples: no episode, or no complete group, came within `timeout`.
        """
        draws, patience = self._table.require(DrawsEpisodes), seconds(timeout, 0.0)
        draw = functools.partial(
            draws.sample_episodes, count, self.update_priorities, group=group, group_size=group_size
        )
        batch = self._counted(lambda: self._in_band(1, patience, lambda wait: draw(timeout=wait)))
        self._table.limiter.record_draw(int(batch["mask"].sum()) - 1)
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
        """Take the oldest entries of a table that stores rollouts, in order of arrival, once for all learners.

        All or nothing: if too few entries come, none is taken. Entries whose model is too old (`max_model_lag`) are
        skipped, counted, and never taken. docs/on-policy.md explains how actors are paced.

        Args:
            steps: Entries, at least 1 and at most the table's capacity.
            timeout: Seconds to wait for the entries; None does not wait.
            exact: True splits the last fragment to return exactly `steps` entries; the next take begins with the
                rest. False takes the last fragment whole.
            min_clients: Number of clients of which the table must hold entries before any is taken.
            release: Time at which actors may record as many entries again: "now", or "publish" for the next
                published model, so that actors make no step with a model whose entries were already taken.

        Raises:
            ParameterError: an argument is out of its range, or this table stores no rollouts.
            NotEnoughSamples: too few entries came within `timeout`; the error says what was missing.
            Closed: the server was closed, also from another thread while waiting.
        """
        pool, wanted = self._table.require(DeliversOnce), TakeRequest(steps, exact, min_clients, release)
        patience = seconds(timeout, 0.0)
        taken = self._counted(
            lambda: self._in_stretches(
                functools.partial(pool.take, wanted), steps, patience, time.monotonic() + patience
            )
        )
        if self._freshness.is_due(time.monotonic()):
            self._freshness.record_rollouts(taken.age, taken.model_version, self._newest_model())
        return taken

    def _counted(self, draw: Callable[[], T]) -> T:
        """Call `draw` and return its result; count the batch or the failure, and the seconds waited."""
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
            with Held(self._counts_lock):
                self._waited += waited
                self._batches += batches
                self._missed += missed
        return drawn

    def _in_band(self, size: int, timeout: float, draw: Callable[[float], T]) -> T:
        """Call `draw` with the remaining seconds to wait for at least `size` samples, and return its result. Draw as
        soon as there are enough samples and the rate limiter admits the draw.
        """
        limiter = self._table.limiter
        if not limiter.is_active:
            drawn = draw(timeout)
            limiter.record_draw(size)
            return drawn
        deadline = time.monotonic() + timeout
        if reason := limiter.take(size, timeout):
            old = self._table.parameters.lag_in_words(self._newest_model())
            raise NotEnoughSamples(size, 0, 0, 0, timeout, reason + old)
        try:
            return self._in_stretches(draw, size, timeout, deadline)
        except BaseException:
            limiter.record_draw(-size)
            raise

    def _in_stretches(self, draw: Callable[[float], T], size: int, timeout: float, deadline: float) -> T:
        """Call `draw` in short intervals until it gets `size` samples or the deadline passes; return its result.
        Between the intervals, report the waiting learner to the rate limiter, so that actors may record again.
        """
        limiter, waiter = self._table.limiter, object()
        try:
            while True:
                remaining = deadline - time.monotonic()
                try:
                    return draw(max(0.0, min(remaining, WAIT_INTERVAL)))
                except NotEnoughSamples as short:
                    if remaining <= WAIT_INTERVAL:
                        facts = short.wanted, short.unused, short.caches, short.clients, timeout, short.reason
                        raise NotEnoughSamples(*facts) from None
                limiter.report_wait(waiter, size)
        finally:
            limiter.report_wait(waiter, 0)

    @checked_names()
    def batches(self, batch_size: int, timeout: float = 30.0, *, ahead: int = 0) -> Iterator[Batch]:
        """Yield batches of this table until the run is over or the server closed.

        Args:
            timeout: Maximum seconds that each batch waits for its samples.
            ahead: Batches that a thread of its own draws ahead while the learner works, after the first one; 0 draws
                each batch on request. A batch is as old as its draw. Batches that the learner never requests are lost.

        Raises:
            MemoireTimeout: a batch's samples did not come within `timeout`.
        """
        what, draw = f"batch of {batch_size}", functools.partial(self.get_batch, batch_size)

        def drawn(is_over: Callable[[], bool]) -> Iterator[Batch]:
            return batches_until_over(draw, is_over, what, timeout, self._where(), lambda: ADVICE)

        return drawn_ahead(drawn, self._is_over, ahead)

    @checked_names()
    def update_priorities(self, ids: Any, td_errors: Any) -> PriorityUpdate:
        """Set priorities of entries of this server, and send TD errors of other entries to the clients that own them.
        Returns at once. The owners apply the TD errors after their next message and report the result: see `stats`.

        Args:
            ids: Ids of a batch, [B].
            td_errors: Finite TD errors, [B].
        """
        self._check_open()
        return self._dispatcher.apply_td_errors(ids, td_errors)

    @checked_names(NAMES)
    def configure(
        self,
        *,
        sampler: Sampler | None = None,
        discount: float | Sequence[float] | None = None,
        discard_mismatched: bool = False,
        **fields: Any,
    ) -> Parameters:
        """Change this table's parameters at the server and, after their next message, at its clients; data stays. Takes
        the arguments of `Buffer.configure`.

        Args:
            discard_mismatched: Drop held caches whose samples were made with other values, such as another discount.
                Without it such caches make the call fail, since a learner would train on them.

        Raises:
            ParameterError: a value is out of its range, or the table holds caches made with another value; nothing
                was changed.
        """
        self._check_open()
        changes = changes_of(sampler, discount, fields)
        return self._dispatcher.configure(self._table, changes, discard_mismatched=discard_mismatched)

    def limit_bytes(self, byte_limit: int) -> int:
        """Limit the bytes of this table, independent of the other tables; return the number of dropped caches."""
        self._check_open()
        gone = self._dispatcher.tables.limit_bytes(self._table, byte_limit)
        self._dispatcher.set_client_byte_limit(None)  # the clients' shares have changed
        return gone

    def calls(self, **options: Any) -> Any:
        """Return the calls that only this kind of table has, without a network, such as those of `memoire.Prompts`.

        Args:
            options: Options of these calls; for prompts `rank` and `session`, as in `memoire.Prompts`.

        Raises:
            ParameterError: this kind of table has no calls of its own.
        """
        transport = DirectTransport(self._dispatcher, self._table, self._check_open)
        return self._table.require(HasCalls).calls(transport, **options)

    def distribution(self) -> Distribution:
        """Return how weights and ages of held samples are distributed. Reads some tens of thousands of samples, which
        takes milliseconds; changes nothing.
        """
        return self._table.pool.distribution()

    def peek(self, of: tuple[bytes, int] | None = None) -> InspectedSample | None:
        """Return a copy of one held sample, chosen as in a draw; the table keeps the sample.

        None if the table is empty, or the sample is too large to inspect.

        Args:
            of: Client and number of an entry, as in `InspectedSample`; the result is None if the entry is not held.
        """
        pool = self._table.pool
        peeked = pool.peek(of) if isinstance(pool, ShowsSamples) else None
        return None if peeked is None else peeked.display_sample(self.schema, self._newest_model())

    def _newest_model(self) -> int:
        """Return the version of the newest model of the table's topic, or of any topic if it has none; 0: no model."""
        return self._table.parameters.newest_model(self._dispatcher.models.versions())

    def stats(self) -> TableStats:
        """Return all figures of the table at this moment."""
        with Held(self._counts_lock):
            counted = self._batches, self._missed, self._waited
        return table_stats(self._dispatcher, self._table, *counted, self._freshness.newest)

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
    """Yield batches of several tables until the run is over: see `Server.batches`.

    Args:
        table: Returns a table's handle by its name.
        batch_size: Samples of each table in a batch, by its name.
        where: Name of the server for errors.
    """
    sizes = sizes_of(batch_size)
    mixer = Mixer(sizes, {name: table(name).get_batch for name in sizes})

    def advice() -> str:
        return f"Table {mixer.lacking!r} has too few samples. {ADVICE}"

    def drawn(is_over: Callable[[], bool]) -> Iterator[MixedBatch]:
        return batches_until_over(mixer.get, is_over, f"batch of {sizes}", timeout, where, advice)

    return drawn_ahead(drawn, is_over, ahead)


UNBOUNDED = ReplyLimits(*[1 << 53] * 3)
"""Limits of a receiver in this process, whose replies are not sent over a network."""


class DirectTransport(Transport):
    """`Transport` to one server in this process. Replies wait for the disk as over a network."""

    def __init__(self, dispatcher: Dispatcher, table: OpenTable, check_open: Callable[[], None]) -> None:
        self.limits = dispatcher.limits
        self._dispatcher, self._table, self._check_open = dispatcher, table, check_open
        self._client, self._numbers = secrets.token_bytes(16), itertools.count(1)
        dispatcher.receivers.register(self._client, UNBOUNDED)  # replies stay in this process

    def table(self, deadline: float) -> tuple[str, Schema]:
        """Return the name and schema of the table."""
        return self._table.name, self._table.schema

    def servers(self) -> Sequence[str]:
        """Return the name of the server."""
        return [self._dispatcher.name]

    def addresses_text(self) -> str:
        """Return the name of the table and server for errors."""
        return f"table {self._table.name!r} of this server"

    def pause(self, seconds: float) -> None:
        """Sleep. Raises Closed if the server is closed."""
        time.sleep(seconds)
        self._check_open()

    def ask(self, requests: Mapping[Any, Request], deadline: float) -> dict[Any, Answer]:
        """Send requests to the server; return the answers."""
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
            return MemoireTimeout(
                "disk", self.addresses_text(), patience, "The state folder has not saved the change yet."
            )
        if isinstance(box[0].body, messages.Refusal):
            return Refused(self.addresses_text(), box[0].body.code, box[0].body.text)
        return Message(header, box[0].body, box[0].payload)
