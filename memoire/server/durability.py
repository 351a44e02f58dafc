"""What a server has to save, and what waits until it is on disk.

    handlers     touch(account)  add_lines(...)           what has changed
                 after(ticket)   hold(reply)              what waits for it
    the store    collect() ─────▶ one group, saved in one transaction ─────▶ saved(), and the group's tickets may go

Without a state folder nothing is kept and nothing waits. Pure: the store's thread is elsewhere, and the dispatcher's
lock is held.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

from memoire.accounting.account import Account
from memoire.accounting.merge import Rows
from memoire.accounting.runs import LogEntry, RunFacts, Runs, SavedGroup, StateStore, Ticket, UnsavedChanges
from memoire.errors import ProtocolError
from memoire.models.model import Model
from memoire.tables.registry import Reply
from memoire.tables.table import OpenTable
from memoire.wire import messages
from memoire.wire.frames import MessageHeader


class HeldReply:
    """A reply that waits for the disk: it is sent as it is, or refused, once."""

    def __init__(self, reply: Reply, send: Callable[[Reply], None]) -> None:
        self._reply, self._send = reply, send
        self._is_sent = False

    def __call__(self) -> None:
        """The changes that the reply acknowledges are on disk."""
        self._end(self._reply)

    def refuse(self, reply: Reply) -> None:
        """Nothing can be saved now: send this refusal, which says why, in place of the reply."""
        self._end(reply)

    def _end(self, reply: Reply) -> None:
        if not self._is_sent:
            self._is_sent = True
            self._send(reply)


class Committer:
    """What is to be saved by a server's store, and the replies that wait for it. Runs go by their names.

    Args:
        store: The state folder; None saves nothing, and every reply goes at once.
    """

    def __init__(self, store: StateStore | None) -> None:
        self._store = store
        self._journal = None if store is None else UnsavedChanges()
        self._saving: list[Ticket] = []  # of the group that is being saved

    @property
    def is_durable(self) -> bool:
        """Whether what is acknowledged is on disk."""
        return self._journal is not None

    # What has changed

    def touch(self, run: str, account: Account) -> None:
        """The account is to be saved."""
        if self._journal is not None:
            self._journal.touch(run, account)

    def add_lines(self, run: str, entries: Sequence[LogEntry]) -> None:
        """These log lines are to be saved."""
        if self._journal is not None:
            self._journal.lines(run, entries)

    def add_run(self, facts: RunFacts) -> None:
        """A run that began, or changed, is to be saved."""
        if self._journal is not None:
            self._journal.run(facts)

    def add_model(self, run: str, model: Model) -> None:
        """The model is to be saved."""
        if self._journal is not None:
            self._journal.model(run, model)

    def add_inherited(self, run: str, rows: Rows) -> None:
        """Accounts of other servers are to be saved: [C] rows of `rows.ACCOUNT`."""
        if self._journal is not None:
            self._journal.inherit(run, rows.tobytes())

    def add_setting(self, name: str, text: str) -> None:
        """A text that the server wants to find again is to be saved."""
        if self._journal is not None:
            self._journal.setting(name, text)

    # What waits for it

    def is_saved(self, run: str, client: bytes) -> bool:
        """Whether nothing of this client's account has to be saved."""
        return self._journal is None or self._journal.is_saved(run, client)

    def is_run_saved(self, run: str) -> bool:
        """Whether nothing of this run has to be saved."""
        return self._journal is None or not self._journal.has(run)

    def after(self, ticket: Ticket) -> None:
        """Call this when everything up to now is saved: at once if nothing is ever saved."""
        if self._journal is None or self._store is None:
            ticket()
        else:
            self._journal.after(ticket)
            self._store.wake()

    def check_room(self, body: messages.Body) -> None:
        """Refuse a request whose reply would wait for a disk that fails, before it changes anything.

        Raises:
            ProtocolError: (code "disk") it says what is wrong with the disk, where, and what to do.
        """
        if self._store is not None and not self._store.is_healthy and body.is_saved_first:
            raise ProtocolError("disk", self._store.trouble)

    def hold(self, header: MessageHeader, reply: Reply, send: Callable[[Reply], None]) -> Reply | None:
        """What to send now in answer to a request: None if the reply has to wait. Then `send` is called later.

        While the disk fails, the reply says why nothing is acknowledged, and the client asks again.
        """
        if self._journal is None or self._store is None or not reply.until_saved:
            return reply
        if not self._store.is_healthy:
            return self._refusal()
        held = HeldReply(reply, send)
        self._journal.wait((header.client, header.sequence), held)
        self._store.wake()
        return None

    def refusals(self) -> list[Ticket]:
        """The disk begins to fail: tickets that refuse each reply that waits for it."""
        assert self._journal is not None
        refusal, waiting = self._refusal(), (*self._saving, *self._journal.tickets)
        return [functools.partial(held.refuse, refusal) for held in waiting if isinstance(held, HeldReply)]

    def _refusal(self) -> Reply:
        assert self._store is not None
        return Reply(messages.Refused(code="disk", text=self._store.trouble[:1000]))

    # What the store asks

    def collect(self, runs: Runs, tables: Iterable[OpenTable] = ()) -> SavedGroup | None:
        """What is to be saved next; `saved` is called when it is.

        Tickets are taken before tables' rows: what a reply tells of these had happened by then.
        """
        assert self._journal is not None
        for run in runs:
            run.kept.taken()
        group = self._journal.take()
        taken = {table.name: table.rows.take_changes() for table in tables if table.rows is not None}
        if changed := {name: rows for name, rows in taken.items() if rows}:
            group = group or SavedGroup()
            group.rows = changed
        self._saving = [] if group is None else group.tickets
        return group

    def saved(self, runs: Runs) -> None:
        """The group that was collected last is on disk."""
        assert self._journal is not None
        self._saving = []
        self._journal.saved()
        for run in runs:
            run.kept.saved()
