"""Which accounts stay in memory: those of clients that are gone, or silent for long, leave it. Pure."""

from __future__ import annotations

from memoire.accounting.runs import Run
from memoire.server.state import ServerState

from .feedback import FeedbackHandler

FEW_LEFT = 0.25
"""Part of the newcomers that may come at once; while fewer are left, the server warns and is not ready."""
WARN_INTERVAL = 60.0
"""Seconds between two warnings of that."""
CROWD = 1 << 16
"""Accounts in memory beyond which silent ones leave it sooner."""


class AccountFolder:
    """Frees memory: moves out of it the accounts of clients that have left, and runs that nobody asks for any more.
    Also warns when too many new clients come.
    """

    def __init__(self, state: ServerState, feedback: FeedbackHandler, *, crowd: int = CROWD) -> None:
        self._state, self._feedback, self._crowd = state, feedback, crowd
        self._warned_at = float("-inf")

    def fold(self, now: float) -> None:
        """Let accounts leave memory whose clients are gone, or silent for long, once they are on disk if anything is;
        and former runs that nobody asks for. Cost: a look at each account in memory.
        """
        committer, runs = self._state.committer, self._state.runs
        for run in runs:
            self._fold_run(run, now)
        self._fold_probes(now)
        runs.rest(lambda run: committer.is_run_saved(run.name))

    def _fold_run(self, run: Run, now: float) -> None:
        limits, committer = self._state.limits, self._state.committer
        silent = limits.client_timeout if len(run.ledger) > self._crowd else limits.account_timeout
        for account in list(run.ledger):
            patience = limits.client_timeout if account.report.leaving else silent
            if account.last_seen < now - patience:
                self._feedback.give_up(run, account.client)
                if committer.is_saved(run.name, account.client):
                    run.ledger.fold(account)
        run.ledger.expire(now - limits.client_timeout)

    def _fold_probes(self, now: float) -> None:
        """Forget who made a round trip and is gone, or silent: only their sums stay."""
        probes, since = self._state.probes, now - self._state.limits.client_timeout
        for account in list(probes):
            if account.last_seen < since:
                probes.fold(account)
        probes.expire(since)

    def trouble(self, now: float) -> str:
        """Why new clients may soon have to wait, as a sentence; "" while they need not."""
        newcomers = self._state.newcomers
        left = newcomers.least(now)
        if left > FEW_LEFT * newcomers.burst:
            return ""
        return (
            f"clients: {left:.0f} new ones of {newcomers.burst} may still come at once with the same key; further "
            f"ones have to wait, and {newcomers.rate:g} may come a second (new_clients, new_clients_rate)"
        )

    def warning(self, now: float) -> str:
        """The trouble if the log is to have it now, which is every `WARN_INTERVAL` seconds at most; "" otherwise."""
        trouble = self.trouble(now)
        if not trouble or now <= self._warned_at + WARN_INTERVAL:
            return ""
        self._warned_at = now
        return trouble
