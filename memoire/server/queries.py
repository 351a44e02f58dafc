"""What a server knows of its runs, for whoever asks in its process: totals, accounts, clients, episodes, log lines.

Pure: it reads what the dispatcher holds, under its lock, and older lines from the state folder. Nothing is changed.
"""

from __future__ import annotations

import heapq
import itertools

import numpy as np

from memoire.accounting.account import Account, Totals
from memoire.accounting.logbook import MAX_FOUND_LINES, LineFilter, LogEntry
from memoire.accounting.merge import Rows, ServerAccounts, merge, totals_of_pages
from memoire.accounting.runs import Run, StateStore
from memoire.accounting.unsaved_changes import RunFacts
from memoire.arguments import whole
from memoire.errors import ParameterError
from memoire.wire import messages

from .dispatch import Dispatcher
from .stats import ClientStats, client_stats

KNOWN_RUNS = 20
"""Runs that an error names, the newest, if somebody asks for one that there is not."""


class Queries:
    """Answers questions about the runs of one server: totals, accounts, episodes, log lines. Thread-safe. Each call
    raises ParameterError if the server knows no run of that name.

    Args:
        store: The server's state folder; None if it has none.
    """

    def __init__(self, dispatcher: Dispatcher, store: StateStore | None) -> None:
        self._dispatcher, self._store = dispatcher, store

    def runs(self) -> list[RunFacts]:
        """All runs, the one that is counted last."""
        with self._dispatcher.lock:
            return self._dispatcher.runs.facts()

    def run(self, name: str | None) -> Run:
        """The run of this name; None is the one that is counted now. Under the dispatcher's lock."""
        run = self._dispatcher.runs.current if name is None else self._dispatcher.runs.named(name)
        if run is None:
            known = [facts.name for facts in self._dispatcher.runs.facts()]
            raise ParameterError("run", name, f"one of {', '.join(map(repr, known[-KNOWN_RUNS:]))}")
        return run

    # What was counted

    def totals(self, run: str | None) -> Totals:
        """Sums over all clients of a run, those included that drained servers have brought here."""
        with self._dispatcher.lock:
            chosen = self.run(run)
            if not chosen.kept.has_others:
                return chosen.ledger.totals()
        return totals_of_pages(self._dispatcher.pages(chosen))

    def accounts(self, run: str | None) -> ServerAccounts:
        """What was counted for a run, client by client."""
        with self._dispatcher.lock:
            chosen = self.run(run)
        rows = np.concatenate([merge(), *self._dispatcher.pages(chosen)])
        return self._accounts_of(chosen, rows)

    def account_page(self, run: str | None, after: bytes, seen: float, most: int) -> tuple[ServerAccounts, bool]:
        """At most so many accounts of a run, in the order of their keys, and whether there are more.

        Args:
            after: Key (`merge.key_of`) of the last row of the page before.
            seen: If that is less than half of `limits.client_timeout` ago, all accounts whose client was heard since
                then, and no others.
        """
        dispatcher = self._dispatcher
        with dispatcher.lock:
            chosen = self.run(run)
            live = chosen.live(dispatcher.home)
            if seen > dispatcher.now - dispatcher.limits.client_timeout / 2:  # none of these has left memory
                rows, more = live[live["last_seen"] >= seen], False
            else:
                rows, more = chosen.page(live, after, most)
            return self._accounts_of(chosen, rows), more

    def _accounts_of(self, run: Run, rows: Rows) -> ServerAccounts:
        dispatcher = self._dispatcher
        with dispatcher.lock:
            return ServerAccounts(
                run=run.name,
                rows=rows,
                finished=run.finished,
                durable=dispatcher.is_durable,
                runs=tuple(facts.name for facts in dispatcher.runs.facts()),
                epoch=dispatcher.epoch,
                time=dispatcher.now,
                inherited=run.inherited,
            )

    def clients(self, after: str, most: int | None) -> list[ClientStats]:
        """Clients that were heard lately whose id in hex is above `after`, in the order of their ids."""
        with self._dispatcher.lock:
            everybody = [*self._dispatcher.ledger, *self._dispatcher.ledger.guests]
            found = (account for account in everybody if account.client.hex() > after)
            accounts = heapq.nsmallest(len(everybody) if most is None else most, found, key=_id_of)
            return [client_stats(self._dispatcher, account) for account in accounts]

    def client_name(self, client: bytes) -> str:
        """See `Server.client_name`."""
        with self._dispatcher.lock:
            return self._dispatcher.client_names.of(client)

    # What clients told

    def episodes(self, most: int) -> list[tuple[str, messages.Ended]]:
        """The newest closed episodes, oldest first, each with its client's id in hex."""
        with self._dispatcher.lock:
            return [(client.hex(), ended) for client, ended in list(self._dispatcher.ledger.ended)[-most:]]

    def episodes_after(self, after: int, most: int) -> tuple[str, int, list[tuple[str, messages.Ended]]]:
        """Closed episodes with a number above `after`; see `Server.episodes_after`."""
        run, first, found = self._dispatcher.ended(whole("after", after, 0), whole("most", most, 0))
        return run, first, [(client.hex(), ended) for client, ended in found]

    def lines(self, after: int, most: int, run: str | None) -> list[LogEntry]:
        """The newest log lines in memory with an index above `after`, oldest first."""
        with self._dispatcher.lock:
            return self.run(run).logbook.recent(after, most)

    def search(self, wanted: LineFilter, run: str | None, *, most: int, newest_first: bool) -> list[LogEntry]:
        """Log lines that are wanted: of all that a state folder keeps, or without one of the newest in memory."""
        if not 1 <= most <= MAX_FOUND_LINES:
            raise ParameterError("most", most, f"from 1 to {MAX_FOUND_LINES}")
        with self._dispatcher.lock:
            found = self.run(run)
            lines = found.logbook.recent(0, MAX_FOUND_LINES)
        if self._store is not None:
            return list(self._store.search(found.name, wanted, most=most, newest_first=newest_first))
        chosen = filter(wanted.is_met_by, reversed(lines) if newest_first else lines)
        return [entry.escaped for entry in itertools.islice(chosen, most)]


def _id_of(account: Account) -> bytes:
    return account.client
