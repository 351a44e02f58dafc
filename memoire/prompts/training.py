"""The calls of trainers: steps of groups, commits, and the way back to a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from memoire.arguments import model_version, whole
from memoire.errors import EpochOver, ParameterError
from memoire.suggestions import checked_names

from .step import Step
from .users import TableCalls

BALANCE = ("tokens", None)


class TrainerCalls(TableCalls):
    """Draws groups, commits and rewinds. One thread at a time."""

    @checked_names()
    def draw(
        self,
        step: int,
        groups: int,
        timeout: float | None = None,
        *,
        balance: str | None = "tokens",
        columns: Sequence[str] | None = None,
        replay: float = 0.0,
    ) -> Step:
        """Draw the groups of a step: those of this rank. The same step gives the same groups, also after a restart of
        the trainer or of servers, until it is committed and `keep` further steps are, too.

        Args:
            step: 0 or more, each once in the order of training.
            groups: Of all ranks together.
            balance: "tokens": ranks get as many groups each, and about as many tokens. None: one after the other.
            columns: Those that are fetched; None is all.
            replay: Share of the groups that is drawn from committed ones by their scores (`Table(replay_limit=...)`),
                as far as there are so many. With 1 a step waits for no new group once enough are committed.

        Raises:
            MemoireTimeout: not enough groups were ready in that time; says what is missing.
            EpochOver: none comes any more, since all epochs were finished.
            Refused: another trainer draws from this table (code "session"): see `rewind`.
        """
        if balance not in BALANCE:
            raise ParameterError("balance", balance, "'tokens' or None")
        if not 0.0 <= replay <= 1.0:
            raise ParameterError("replay", replay, "a share from 0 to 1")
        facts: dict[str, Any] = {"columns": columns, "by_tokens": balance == "tokens", "replay": float(replay)}
        step, groups = whole("step", step, 0), whole("groups", groups, 1, 65536)
        return self._trainer.draw(step, groups, self.schema, patience=self._patience(timeout), **facts)

    def groups(self, groups: int, first: int = 0, timeout: float | None = None, **options: Any) -> Iterator[Step]:
        """Steps of so many groups, from `first` on, until the finished epochs are over. See `draw` for the options."""
        step = first
        while True:
            try:
                drawn = self.draw(step, groups, timeout, **options)
            except EpochOver:
                return
            yield drawn
            step += 1

    def commit(self, step: int, timeout: float | None = None) -> int:
        """Everything that was drawn by steps up to this one is trained on, and in the trainer's checkpoint; returns the
        prompts that are committed by this call. Call it after the checkpoint was written, by any or all ranks.
        """
        return self._trainer.commit(whole("step", step, 0), self._patience(timeout))

    def rewind(self, step: int, timeout: float | None = None, *, version: int | None = None) -> int:
        """Go on behind the step of a checkpoint, -1 being before the first one; returns the first step to draw.

        Everything that was drawn up to that step is committed, also if the commit never left. Everything that was drawn
        later comes back once, in front of all others. A trainer that drew before is refused from now on.

        Args:
            version: Of the newest model from now on: that of the checkpoint.
        """
        newest = None if version is None else model_version(version, "version")
        self._trainer.rewind(whole("step", step, -1), newest, self._patience(timeout))
        return step + 1

    resume = rewind
