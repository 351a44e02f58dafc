"""What has been counted: pages of a run's accounts, and accounts that drained servers bring here. Pure."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any

from memoire import arguments
from memoire.accounting.ledger import SILENCE_TIMEOUT
from memoire.accounting.merge import PAGE_ROWS, Rows, merge
from memoire.accounting.runs import Run
from memoire.errors import ParameterError, ProtocolError
from memoire.pool.desk import Reply
from memoire.server.state import ServerState
from memoire.wire import messages
from memoire.wire.frames import MessageHeader, encoded_bytes
from memoire.wire.rows import ACCOUNT, unpack_accounts

MAX_RUNS = 1024
"""Names of runs that one reply tells, the newest."""
MAX_FORMER_RUNS = 1 << 14
"""Runs of other servers that are kept beside those that were counted here."""
MAX_ACCOUNT_READINGS = 4
"""Readings of accounts, in pages, that go on at the same time. A further one ends the oldest, whose next pages show the
accounts as they are then: each still once, since pages follow their keys.
"""


class AccountsHandler:
    """Shows accounts, and keeps those of other servers.

    Args:
        max_runs: Names of runs that one reply tells.
        max_former_runs: Runs that are kept, those of other servers included.
        page_rows: Accounts in a page.
    """

    def __init__(
        self,
        state: ServerState,
        *,
        max_runs: int = MAX_RUNS,
        max_former_runs: int = MAX_FORMER_RUNS,
        page_rows: int = PAGE_ROWS,
    ) -> None:
        self._state = state
        self._max_runs, self._max_former_runs, self._page_rows = max_runs, max_former_runs, page_rows
        # Accounts in memory when somebody began to read them, by reader and run.
        self._readings: OrderedDict[tuple[bytes, str], Rows] = OrderedDict()

    def page(self, now: float, header: MessageHeader, body: messages.Ledger, _: Any) -> Reply:
        """A page of a run's accounts, and what there is to say of the run."""
        state = self._state
        run = state.runs.named(body.run) if body.run else state.run
        if run is None:
            raise ProtocolError("run", f"this server knows no run {body.run!r}")
        tail = state.receivers.of(header.client).tail_bytes
        rows, more = self._read(header.client, run, body.after, max(1, tail // 2 // ACCOUNT.itemsize))
        pools = [table.pool.stats() for table in state.tables if run is state.run]
        return Reply(
            messages.Accounts(
                run_name=run.name,
                epoch=state.epoch,
                finished=run.finished,
                durable=state.committer.is_durable,
                runs=_newest([facts.name for facts in state.runs.facts()][-self._max_runs :], tail // 4),
                accounts=rows.tobytes(),
                more=more,
                time=max(0.0, now),
                applied=sum(pool.applied for pool in pools),
                stale=sum(pool.stale for pool in pools),
                guests=state.ledger.guests_since(now - SILENCE_TIMEOUT),
                prompts=sum(table.pool.unfinished for table in state.tables),
            )
        )

    def _read(self, reader: bytes, run: Run, after: bytes, most: int) -> tuple[Rows, bool]:
        """The rows after this key, as the accounts were when the reader began, and whether there are more."""
        key = reader, run.name
        live = self._readings.get(key)
        if not after or live is None:
            live = self._readings[key] = run.live(self._state.home)
        rows, more = run.page(live, after, min(most, self._page_rows))
        if not more:
            del self._readings[key]
        while len(self._readings) > MAX_ACCOUNT_READINGS:
            self._readings.popitem(last=False)
        return rows, more

    def ended(self, after: int, most: int) -> tuple[str, int, list[tuple[bytes, messages.Ended]]]:
        """Closed episodes of the run that is counted now: its name, the number of the first one, and at most so many of
        those that are still kept and have a number above `after`.
        """
        ledger = self._state.ledger
        kept, count = ledger.ended, ledger.ended_count
        first = max(count - len(kept), after if after <= count else 0) + 1
        begin = first - 1 - (count - len(kept))
        return self._state.run.name, first, list(itertools.islice(kept, begin, begin + most))

    def bring(self, now: float, _: MessageHeader, body: messages.Inherit, payload: Any) -> Reply:
        """Keep what a drained server has counted."""
        rows = merge(unpack_accounts(body.accounts))
        run = self.inherit(body.run_name, body.finished, rows, now)
        return Reply(messages.Taken(samples=len(rows), finished=run.finished), until_saved=True)

    def inherit(self, name: str, finished: bool, rows: Rows, now: float) -> Run:
        """Keep accounts of other servers for a run, as `merge` gives them; returns the run.

        Raises:
            ProtocolError: the run's name is invalid, or too many runs are kept.
        """
        run = self._state.runs.named(name) or self._former(name, finished, now)
        run.inherit(rows)
        self._state.committer.add_inherited(run.name, rows)
        return run

    def _former(self, name: str, finished: bool, now: float) -> Run:
        """A run that was counted elsewhere, and is kept here."""
        try:
            arguments.name("run", name)
        except ParameterError as error:
            raise ProtocolError("parameters", str(error)) from error
        if len(self._state.runs.facts()) >= self._max_former_runs:
            raise ProtocolError("busy", f"{self._max_former_runs} runs are kept here already")
        run = self._state.runs.keep(name, finished, now)
        self._state.committer.add_run(run.facts)
        return run


def _newest(names: list[str], size: int) -> list[str]:
    """The last names that have so many bytes together."""
    first = len(names)
    while first and (size := size - encoded_bytes(names[first - 1])) >= 0:
        first -= 1
    return names[first:]
