"""What a table keeps of a prompt, and what a table of prompts is asked for. Pure.

prompt ("math", epoch 0, index 17)     leased to worker a1b2 until 512.0, lease 9
answers      0 whole   1 whole   2 two pieces   3 failed: too long          group=4
columns      tokens logprob reward | tokens logprob | tokens | -

Prompts in the order in which they leave: by priority, then by age, and data sets by their shares.

    shares math 0.7, code 0.3      math 5 taken, code 2 taken      next: math (5+1)/0.7 = 8.6, code (2+1)/0.3 = 10: math

The cost of `pop` grows with the logarithm of what is inside.

What a group of answers is worth to a trainer, as one number (`score`):

variance       of the rewards: 0 where all answers are as good as each other, so that none is better than the mean
learnability   p (1 - p) of the mean reward p
column:NAME    the mean of a column
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from sys import getsizeof
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from memoire import Parameters, Schema
from memoire.building import FOR_EVER, hint, one_of, whole
from memoire.errors import NoSuchField, ParameterError

from .columns import Key, check_columns, mask_of

NO_STEP = -1
ROW_BYTES, ANSWER_BYTES, TAG_BYTES = 1024, 96, 96
"""Bytes that a prompt, an answer and a tag take in memory, about, without their texts and values."""
RESTORED = "restored from a snapshot"
"""The session of a table that a snapshot was put into."""


class PromptState(enum.IntEnum):
    """Where a prompt stands. Each prompt is in one of these states, so that their counts add up to all prompts."""

    WAITING = 0
    LEASED = 1
    ANSWERED = 2
    """All answers are there, but a required column is missing."""
    READY = 3
    DRAWN = 4
    COMMITTED = 5
    DROPPED = 6


class AnswerRow(msgspec.Struct, array_like=True, gc=False):
    """One answer to a prompt. Columns go by their places in the schema, a bit each."""

    columns: int = 0
    """That are there."""
    amended: int = 0
    """Those of them that did not come from a worker."""
    version: int = -1
    """Of the model that made its oldest token; -1: nothing came yet."""
    tokens: int = 0
    failed: str = ""
    """Why there is none, and none is wanted any more."""
    lease: int = 0
    """Under which its pieces came."""
    pieces: int = 0
    is_whole: bool = False
    """Whether its last piece came."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing more is wanted of workers."""
        return self.is_whole or bool(self.failed)


def row_size(key: Key, group: int, tags: Mapping[str, str]) -> int:
    """Bytes that a prompt takes, without payload and columns, about."""
    texts = sum(TAG_BYTES + getsizeof(name) + getsizeof(value) for name, value in tags.items())
    return ROW_BYTES + getsizeof(key[0]) + ANSWER_BYTES * group + texts


class PromptRow(msgspec.Struct, array_like=True, eq=False):
    """One prompt. It belongs to the lock of its table's pool."""

    dataset: str
    epoch: int
    index: int
    number: int
    """In which order it was given."""
    priority: float = 0.0
    is_evaluation: bool = False
    """It is answered, but never drawn."""
    tags: dict[str, str] = {}
    size: int = 0
    """Bytes of the payload."""
    state: PromptState = PromptState.WAITING
    reason: str = ""
    """Why it was dropped."""
    step: int = NO_STEP
    """By which it was drawn."""
    attempts: int = 0
    """Leases that have begun."""
    lease: int = 0
    """Number of the lease that it is under; 0: none."""
    worker: bytes = b""
    until: float = math.inf
    """When the lease ends."""
    leased_at: float = 0.0
    """When it began."""
    given_up: Annotated[list[int], msgspec.Meta(max_length=65536)] = []
    """Answers that the worker does not give under this lease."""
    order: int = 0
    """Place among those that wait, or that are ready."""
    score: float = 0.0
    changed: int = 0
    """Number of its newest change."""
    has_columns: bool = True
    """Whether the columns of its answers are kept."""
    answers: list[AnswerRow] = []
    place: int = -1
    """Among all groups that were ever kept for replay; -1: it is not one of them."""
    counted: int = 0
    """Bytes that it counts for."""

    @property
    def key(self) -> Key:
        """Its name."""
        return self.dataset, self.epoch, self.index

    @property
    def memory_bytes(self) -> int:
        """That it takes, without payload and columns, about."""
        reasons = sum(getsizeof(answer.failed) for answer in self.answers if answer.failed)
        return row_size(self.key, len(self.answers), self.tags) + reasons

    @property
    def missing(self) -> list[int]:
        """Answers that workers still have to give."""
        return [i for i, answer in enumerate(self.answers) if not answer.is_settled]

    @property
    def is_settled(self) -> bool:
        """Whether workers have nothing more to give. What is missing is often at the end."""
        return all(answer.is_settled for answer in reversed(self.answers))

    @property
    def version(self) -> int:
        """Of the model that made the group's oldest token; 0 if nothing came."""
        return max(0, min((each.version for each in self.answers if each.is_whole), default=0))

    @property
    def tokens(self) -> int:
        """Of all answers that are there."""
        return sum(each.tokens for each in self.answers if each.is_whole)

    @property
    def group(self) -> list[int]:
        """The answers that a trainer gets."""
        return [i for i, answer in enumerate(self.answers) if answer.is_whole and not answer.failed]

    def reset(self) -> None:
        """Forget every answer: all are to be given again."""
        self.answers = [AnswerRow() for _ in self.answers]
        self.attempts, self.given_up, self.has_columns, self.score = 0, [], True, 0.0


class StepRow(msgspec.Struct, array_like=True):
    """The groups of one step, fixed."""

    step: int
    keys: list[Key] = []
    replayed: list[Key] = []
    importance: list[float] = []
    """Of each replayed group."""
    wanted: int = 0
    is_closed: bool = False
    """Whether no more groups come to it."""


class PromptQueue:
    """Holds prompts, each once. Entries of those that were taken out stay in the heaps until they come up.

    Args:
        shares: Of each data set, above 0; empty: one order for all data sets.
    """

    def __init__(self, shares: Mapping[str, float] | None = None) -> None:
        self.shares: dict[str, float] = dict(shares or {})
        self._taken: dict[str, int] = {}
        self._inside: dict[Key, tuple[float, int, PromptRow]] = {}
        self._heaps: dict[str, list[tuple[float, int, Key]]] = {}

    def __len__(self) -> int:
        return len(self._inside)

    def __contains__(self, row: PromptRow) -> bool:
        return row.key in self._inside

    @property
    def turns(self) -> dict[str, int]:
        """Prompts that were taken of each data set since they have their shares; none if they have no shares."""
        return dict(self._taken) if self.shares else {}

    @turns.setter
    def turns(self, turns: Mapping[str, int]) -> None:
        self._taken = dict(turns)

    def rows(self) -> Iterator[PromptRow]:
        """All that are inside, in no order."""
        return (row for _, _, row in self._inside.values())

    def push(self, row: PromptRow) -> None:
        """Put one in, or to its new place."""
        place = -row.priority, row.order
        self._inside[row.key] = (*place, row)
        heap = self._heaps.setdefault(row.dataset if self.shares else "", [])
        heapq.heappush(heap, (*place, row.key))
        if len(heap) > 64 + 4 * len(self._inside):
            self._rebuild()

    def discard(self, row: PromptRow) -> None:
        """Take one out, if it is inside."""
        self._inside.pop(row.key, None)

    def first(self) -> PromptRow | None:
        """The next one, which stays inside; None if there is none."""
        dataset = self._next_dataset()
        return None if dataset is None else self._inside[self._heaps[dataset][0][2]][2]

    def pop(self) -> PromptRow | None:
        """Take the next one out; None if there is none."""
        dataset = self._next_dataset()
        if dataset is None:
            return None
        _, _, key = heapq.heappop(self._heaps[dataset])
        self._taken[dataset] = self._taken.get(dataset, 0) + 1
        return self._inside.pop(key)[2]

    def _next_dataset(self) -> str | None:
        """The data set whose turn it is; what was taken out before left its heap."""
        found = [(self._turn_of(dataset), dataset) for dataset in self._heaps if self._first(dataset) is not None]
        return min(found)[1] if found else None

    def undo(self, row: PromptRow) -> None:
        """One that was popped does not count in its data set's share."""
        dataset = row.dataset if self.shares else ""
        self._taken[dataset] = max(0, self._taken.get(dataset, 0) - 1)

    def share_out(self, shares: Mapping[str, float]) -> None:
        """Let data sets leave in these shares from now on; a data set without one leaves when the others are empty."""
        self.shares, self._taken = dict(shares), {}
        self._rebuild()

    def _turn_of(self, dataset: str) -> float:
        share = self.shares.get(dataset, 0.0) if self.shares else 1.0
        return (self._taken.get(dataset, 0) + 1) / share if share > 0.0 else float("inf")

    def _first(self, dataset: str) -> Key | None:
        """The next one of a data set; what was taken out before leaves the heap."""
        heap = self._heaps[dataset]
        while heap:
            place, order, key = heap[0]
            inside = self._inside.get(key)
            if inside is not None and inside[:2] == (place, order):
                return key
            heapq.heappop(heap)
        return None

    def _rebuild(self) -> None:
        self._heaps = {}
        for place, order, row in self._inside.values():
            self._heaps.setdefault(row.dataset if self.shares else "", []).append((place, order, row.key))
        for heap in self._heaps.values():
            heapq.heapify(heap)


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
