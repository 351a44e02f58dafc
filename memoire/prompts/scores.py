"""What a group of answers is worth to a trainer, as one number. Pure.

variance       of the rewards: 0 where all answers are as good as each other, so that none is better than the mean
learnability   p (1 - p) of the mean reward p
column:NAME    the mean of a column
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from memoire.errors import ParameterError
from memoire.replay.schema import Schema
from memoire.suggestions import hint

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
