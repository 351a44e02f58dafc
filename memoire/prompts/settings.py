"""What a table of prompts is asked for, beside the settings of every table.

What a group of answers is worth to a trainer, as one number. Pure.

variance       of the rewards: 0 where all answers are as good as each other, so that none is better than the mean
learnability   p (1 - p) of the mean reward p
column:NAME    the mean of a column
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from memoire import Parameters, Schema
from memoire.building import FOR_EVER, hint, one_of, whole
from memoire.errors import NoSuchField, ParameterError

from .columns import check_columns, mask_of

BY_REWARD: Final = ("variance", "learnability")
PREFIX: Final = "column:"


def check_score(score: str | None, schema: Schema) -> None:
    """Refuse a score that this schema cannot have. Raises ParameterError."""
    if score is None:
        return
    if not (score in BY_REWARD or str(score).startswith(PREFIX)):
        raise ParameterError(
            "score", score, f"None, 'variance', 'learnability' or 'column:NAME'{hint(score, BY_REWARD)}"
        )
    name = column_of(score)
    if name not in schema or schema[name].is_ragged:
        raise ParameterError("score", score, f"a schema with a plain column {name!r}; it has {', '.join(schema.names)}")


def column_of(score: str) -> str:
    """The column that a score is made of."""
    return score.removeprefix(PREFIX) if score.startswith(PREFIX) else "reward"


def scorer(score: str | None) -> Callable[[NDArray[np.float64]], float]:
    """Returns what makes one number of a column [A, *F] of a group's A answers."""
    if score == "variance":
        return lambda values: float(np.var(values.reshape(len(values), -1).sum(axis=1)))
    if score == "learnability":
        return lambda values: max(0.0, float(values.mean() * (1.0 - values.mean())))
    return lambda values: abs(float(values.mean()))


ON_STALE: Final = ("drop", "wait", "pace")
MAX_GROUP: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSettings:
    """Settings of `memoire.Table` with storage="prompts".

    Args:
        group: Answers to each prompt.
        at_least: Answers with which a group may be handed out when the others have failed; None: all of them.
        required: Columns that each answer has to have before its group is ready; None: all of the schema.
        score: What a ready group is worth: "variance" or "learnability" of the column "reward", or "column:NAME", its
            mean. None gives every group 1.
        drop_dead: Drop ready groups with a score of 0: no answer of theirs is better than the others.
        on_stale: What becomes of a group whose oldest token is more than `max_model_lag` models old when it is to be
            drawn: "drop"; "wait": it is answered again, and the draw waits; "pace": likewise dropped, but a prompt is
            leased only while what comes of it can still be trained on.
        lease: Seconds that a worker has for a prompt, unless it asks for others or renews them.
        attempts: Leases of a prompt, after which answers that are missing have failed.
        keep: Commits for which the columns of committed groups stay, so that a rewind needs no new answers.
        replay_limit: Committed groups that stay beyond that, to be replayed.
    """

    group: int = 8
    at_least: int | None = None
    required: Sequence[str] | None = None
    score: str | None = None
    drop_dead: bool = False
    on_stale: str = "drop"
    lease: float = 600.0
    attempts: int = 3
    keep: int = 2
    replay_limit: int = 0

    def check(self, schema: Schema, parameters: Parameters) -> None:
        """Refuse settings that are out of range or do not fit. Raises ParameterError."""
        check_columns(schema)
        whole("group", self.group, 1, MAX_GROUP)
        whole("at_least", self.group if self.at_least is None else self.at_least, 1, self.group)
        whole("attempts", self.attempts, 1)
        whole("keep", self.keep, 0)
        whole("replay_limit", self.replay_limit, 0, 1 << 24)
        if not 0.0 < self.lease <= FOR_EVER:
            raise ParameterError("lease", self.lease, "seconds above 0")
        if self.on_stale not in ON_STALE:
            raise ParameterError("on_stale", self.on_stale, one_of(self.on_stale, ON_STALE))
        if self.on_stale != "drop" and parameters.max_model_lag is None:
            raise ParameterError("on_stale", self.on_stale, "'drop' without max_model_lag, which says what is too old")
        if self.drop_dead and self.score is None:
            raise ParameterError("drop_dead", self.drop_dead, "False without a score, such as score='variance'")
        check_score(self.score, schema)
        self._required_mask(schema)

    def _required_mask(self, schema: Schema) -> int:
        names = schema.names if self.required is None else self.required
        if isinstance(names, str):
            raise ParameterError("required", names, "a list of columns")
        try:
            return mask_of(schema, names)
        except NoSuchField as error:
            raise ParameterError("required", list(names), f"columns of the schema: {error}") from None

    def making(self, schema: Schema) -> dict[str, Any]:
        """What states and scores of groups follow from: plain values, by name."""
        return {
            "group": self.group,
            "at_least": self.group if self.at_least is None else self.at_least,
            "required": sorted(schema.names if self.required is None else self.required),
            "score": self.score,
            "drop_dead": self.drop_dead,
        }

    def rules(self, schema: Schema, parameters: Parameters) -> PromptRules:
        """What holds for the prompts of a table."""
        at_least, mask = self.group if self.at_least is None else self.at_least, self._required_mask(schema)
        facts: dict[str, Any] = {"required_mask": mask, "max_model_lag": parameters.max_model_lag}
        return PromptRules(**asdict(self) | {"at_least": at_least, **facts})


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRules(PromptSettings):
    """What holds for all prompts of a table: its settings, and what the schema and the parameters make of them."""

    at_least: int = 8
    required_mask: int = 0
    """Columns, a bit each."""
    max_model_lag: int | None = None
