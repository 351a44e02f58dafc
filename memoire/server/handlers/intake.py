"""Caches and episodes that clients push: checked, held, and counted whether they are taken or not. Pure."""

from __future__ import annotations

from typing import Any

from memoire.accounting.account import Account
from memoire.accounting.ledger import Ledger
from memoire.accounting.runs import Run
from memoire.errors import ProtocolError
from memoire.pool.tables import OpenTable
from memoire.server.state import ServerState
from memoire.wire import messages
from memoire.wire.frames import MessageHeader
from memoire.wire.identity import NO_CLIENT

Pushed = messages.Cache | messages.Episode


class IntakeHandler:
    """Takes what arrives in three steps, of which the first, which takes longest, needs no lock.

    check ──▶ accept            ProtocolError from either of them ──▶ reject
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def check(self, header: MessageHeader, body: Pushed, payload: Any) -> tuple[OpenTable, Any]:
        """The table that something is for, and what the table's pool can hold of it. Needs no lock.

        Raises:
            ProtocolError: it cannot be taken, and why.
        """
        if header.client == NO_CLIENT:
            raise ProtocolError("client", "a cache needs a client id")
        self._run_of(header)
        table = self._state.tables.numbered(header.table)
        table.check_fingerprint(header.fingerprint)
        if table.pushes is None:
            raise ProtocolError("table", table.kind.no_pushes)
        return table, table.pushes.check(body, payload, limits=self._state.limits, checksum=header.payload_checksum)

    def accept(self, now: float, header: MessageHeader, body: Pushed, table: OpenTable, held: Any) -> None:
        """Hold what was checked, and count it for its client.

        Raises:
            ProtocolError: another run has begun since it was checked, the pool is closed to it, or too many accounts
                are opened at once.
        """
        run = self._run_of(header)
        assert table.pushes is not None
        table.pushes.add(header.client, header.sequence, held)
        ledger = self._state.ledger_of(table.number, run)
        account = self._count(run, ledger, now, header, body, table.number)
        if account is not None:
            ledger.accepted(account, header.payload_bytes, held.samples)

    def reject(self, now: float, header: MessageHeader, body: Pushed, code: str) -> None:
        """Count for its client what was not taken, in the run that it was for, if that is known here.

        Raises:
            ProtocolError: (code "busy") too many accounts are opened at once.
        """
        run = self._state.runs.find(header.run)
        if header.client == NO_CLIENT or run is None:
            return
        ledger = self._state.ledger_of(header.table, run)
        account = self._count(run, ledger, now, header, body)
        if account is not None:
            ledger.rejected(account, code)

    def _run_of(self, header: MessageHeader) -> Run:
        """The run that is counted now. Raises ProtocolError if something was made for another one."""
        run = self._state.runs.current
        if header.run and header.run != run.number:
            raise ProtocolError("run", f"a cache of another run; this server counts {run.name!r}")
        return run

    def _count(
        self, run: Run, ledger: Ledger, now: float, header: MessageHeader, body: Pushed, table: int = 0
    ) -> Account | None:
        account = ledger.arrived(
            header.client, header.payload_bytes, now, body.number, body.pushed_bytes, body.since, table
        )
        if account is not None and ledger is run.ledger:
            self._state.committer.touch(run.name, account)
        return account
