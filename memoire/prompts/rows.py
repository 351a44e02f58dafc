"""Rows of prompts, answers and steps, the queue of prompts, the scores of groups, and the settings of a table. Pure.

prompt ("math", epoch 0, index 17)     leased to worker a1b2 until 512.0, lease 9
answers      0 whole   1 whole   2 two pieces   3 failed: too long          group=4
columns      tokens logprob reward | tokens logprob | tokens | -

`PromptQueue` sorts prompts by priority, then by age, and data sets by their shares:

    shares math 0.7, code 0.3      math 5 taken, code 2 taken      next: math (5+1)/0.7 = 8.6, code (2+1)/0.3 = 10: math

The cost of `pop` grows with the logarithm of the queue's size.

`score` gives the worth of a group of answers to a trainer as one number:

variance       variance of the rewards: 0 if all answers are equally good
learnability   p (1 - p) of the mean reward p
column:NAME    mean of a column
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
from memoire.building import MAX_SECONDS, hint, one_of, whole
from memoire.errors import NoSuchField, ParameterError

from .columns import Key, check_columns, mask_of

NO_STEP = -1
ROW_BYTES, ANSWER_BYTES, TAG_BYTES = 1024, 96, 96
"""Approximate bytes that a prompt, an answer and a tag take in memory, without their texts and values."""
RESTORED = "restored from a snapshot"
"""Session of a table after a snapshot was restored into it."""


class PromptState(enum.IntEnum):
    """State of a prompt. Each prompt has one state, so that the counts of the states add up to all prompts."""

    WAITING = 0
    LEASED = 1
    ANSWERED = 2
    """All answers were given, but a required column is missing."""
    READY = 3
    DRAWN = 4
    COMMITTED = 5
    DROPPED = 6


class AnswerRow(msgspec.Struct, array_like=True, gc=False):
    """One answer to a prompt. Columns are masks with a bit for each place in the schema."""

    columns: int = 0
    """Mask of the columns that were received."""
    amended: int = 0
    """Mask of the columns that did not come from a worker."""
    version: int = -1
    """Version of the model that made the oldest token; -1 before the first piece."""
    tokens: int = 0
    failed: str = ""
    """Reason why the answer failed and is not wanted any more; "" otherwise."""
    lease: int = 0
    """Number of the lease under which the pieces came."""
    pieces: int = 0
    is_whole: bool = False
    """True once the last piece came."""

    @property
    def is_settled(self) -> bool:
        """True if workers need not send more of the answer."""
        return self.is_whole or bool(self.failed)


def row_size(key: Key, group: int, tags: Mapping[str, str]) -> int:
    """Return the approximate bytes that a prompt takes, without payload and columns."""
    texts = sum(TAG_BYTES + getsizeof(name) + getsizeof(value) for name, value in tags.items())
    return ROW_BYTES + getsizeof(key[0]) + ANSWER_BYTES * group + texts


class PromptRow(msgspec.Struct, array_like=True, eq=False):
    """One prompt with its answers. The lock of the table's pool guards it."""

    dataset: str
    epoch: int
    index: int
    number: int
    """Position in the order in which prompts were added."""
    priority: float = 0.0
    is_evaluation: bool = False
    """True for a prompt that is answered but never drawn."""
    tags: dict[str, str] = {}
    size: int = 0
    """Size of the payload in bytes."""
    state: PromptState = PromptState.WAITING
    reason: str = ""
    """Reason why the prompt was dropped; "" otherwise."""
    step: int = NO_STEP
    """Number of the step that drew the prompt; -1 before."""
    attempts: int = 0
    """Number of leases so far."""
    lease: int = 0
    """Number of the current lease; 0 without a lease."""
    worker: bytes = b""
    until: float = math.inf
    """Time at which the lease ends."""
    leased_at: float = 0.0
    """Time at which the lease began."""
    given_up: Annotated[list[int], msgspec.Meta(max_length=65536)] = []
    """Places of the answers that the worker does not give under this lease."""
    order: int = 0
    """Position among the waiting, or among the ready prompts."""
    score: float = 0.0
    changed: int = 0
    """Number of the newest change of the prompt."""
    has_columns: bool = True
    """True while the columns of the answers are kept."""
    answers: list[AnswerRow] = []
    place: int = -1
    """Position among all groups that were ever kept for replay; -1 for other prompts."""
    counted: int = 0
    """Bytes of this row in the total of its table."""

    @property
    def key(self) -> Key:
        """Name of the prompt: data set, epoch and index."""
        return self.dataset, self.epoch, self.index

    @property
    def memory_bytes(self) -> int:
        """Approximate bytes that the prompt takes, without payload and columns."""
        reasons = sum(getsizeof(answer.failed) for answer in self.answers if answer.failed)
        return row_size(self.key, len(self.answers), self.tags) + reasons

    @property
    def missing(self) -> list[int]:
        """Places of the answers that workers still have to give."""
        return [i for i, answer in enumerate(self.answers) if not answer.is_settled]

    @property
    def is_settled(self) -> bool:
        """True if workers have no more answers to give. Missing answers are often the last ones."""
        return all(answer.is_settled for answer in reversed(self.answers))

    @property
    def version(self) -> int:
        """Version of the model that made the group's oldest token; 0 without answers."""
        return max(0, min((each.version for each in self.answers if each.is_whole), default=0))

    @property
    def tokens(self) -> int:
        """Number of tokens in all whole answers."""
        return sum(each.tokens for each in self.answers if each.is_whole)

    @property
    def group(self) -> list[int]:
        """Places of the answers that a trainer gets."""
        return [i for i, answer in enumerate(self.answers) if answer.is_whole and not answer.failed]

    def reset(self) -> None:
        """Forget every answer, so that all are given again."""
        self.answers = [AnswerRow() for _ in self.answers]
        self.attempts, self.given_up, self.has_columns, self.score = 0, [], True, 0.0


class StepRow(msgspec.Struct, array_like=True):
    """Groups of one step, fixed by its draw."""

    step: int
    keys: list[Key] = []
    replayed: list[Key] = []
    importance: list[float] = []
    """Importance of each replayed group."""
    wanted: int = 0
    is_closed: bool = False
    """True once no more groups are added to the step."""


class PromptQueue:
    """Priority queue of prompts, each held once. Heap entries of removed prompts stay until they come up.

    Args:
        shares: Positive share of each data set; empty sorts all data sets together.
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
    def taken_counts(self) -> dict[str, int]:
        """Prompts taken from each data set since the shares were set; empty without shares."""
        return dict(self._taken) if self.shares else {}

    @taken_counts.setter
    def taken_counts(self, turns: Mapping[str, int]) -> None:
        self._taken = dict(turns)

    def rows(self) -> Iterator[PromptRow]:
        """Yield all prompts of the queue, in no order."""
        return (row for _, _, row in self._inside.values())

    def push(self, row: PromptRow) -> None:
        """Add a prompt, or move it to its new place."""
        place = -row.priority, row.order
        self._inside[row.key] = (*place, row)
        heap = self._heaps.setdefault(row.dataset if self.shares else "", [])
        heapq.heappush(heap, (*place, row.key))
        if len(heap) > 64 + 4 * len(self._inside):
            self._rebuild()

    def discard(self, row: PromptRow) -> None:
        """Remove a prompt if the queue holds it."""
        self._inside.pop(row.key, None)

    def first(self) -> PromptRow | None:
        """Return the next prompt without removing it; None if the queue is empty."""
        dataset = self._next_dataset()
        return None if dataset is None else self._inside[self._heaps[dataset][0][2]][2]

    def pop(self) -> PromptRow | None:
        """Remove and return the next prompt; None if the queue is empty."""
        dataset = self._next_dataset()
        if dataset is None:
            return None
        _, _, key = heapq.heappop(self._heaps[dataset])
        self._taken[dataset] = self._taken.get(dataset, 0) + 1
        return self._inside.pop(key)[2]

    def _next_dataset(self) -> str | None:
        """Return the data set whose turn is next; drop entries of removed prompts from the heaps."""
        turns = [(self._turn_of(dataset), dataset) for dataset in self._heaps if self._first(dataset) is not None]
        return min(turns)[1] if turns else None

    def uncount_taken(self, row: PromptRow) -> None:
        """Take a popped prompt out of the count of its data set's share."""
        dataset = row.dataset if self.shares else ""
        self._taken[dataset] = max(0, self._taken.get(dataset, 0) - 1)

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Set the shares of data sets; a data set without a share comes after all other data sets."""
        self.shares, self._taken = dict(shares), {}
        self._rebuild()

    def _turn_of(self, dataset: str) -> float:
        share = self.shares.get(dataset, 0.0) if self.shares else 1.0
        return (self._taken.get(dataset, 0) + 1) / share if share > 0.0 else float("inf")

    def _first(self, dataset: str) -> Key | None:
        """Return the next key of a data set; drop entries of removed prompts from its heap."""
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
    """Raise ParameterError if a schema does not have the column of a score."""
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
    """Return the name of the column from which a score is computed."""
    return score.removeprefix(PREFIX) if score.startswith(PREFIX) else "reward"


def scorer(score: str | None) -> Callable[[NDArray[np.float64]], float]:
    """Return a function that scores a column [A, *F] of a group's A answers as one number."""
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
        at_least: Whole answers with which a group is ready if the other answers have failed; None requires all answers.
        required: Columns that each answer must have before its group is ready; None requires all of the schema.
        score: Worth of a ready group: "variance" or "learnability" of the column "reward", or "column:NAME", its
            mean. None scores every group 1.
        drop_dead: Drop ready groups with a score of 0, whose answers are all equally good.
        on_stale: Treatment of a group whose oldest token is more than `max_model_lag` models old at its draw: "drop"
            drops it; "wait" has it answered again, and the draw waits; "pace" drops it too, but leases a prompt only
            while its answers can still be trained on.
        lease: Seconds that a worker has for a prompt, unless it asks for another time or renews the lease.
        attempts: Leases of a prompt after which missing answers have failed.
        keep: Commits for which the columns of committed groups are kept, so that a rewind needs no new answers.
        replay_limit: Committed groups that are kept beyond that for replay.
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
        """Raise ParameterError for settings that are out of range or do not fit the schema."""
        check_columns(schema)
        whole("group", self.group, 1, MAX_GROUP)
        whole("at_least", self.group if self.at_least is None else self.at_least, 1, self.group)
        whole("attempts", self.attempts, 1)
        whole("keep", self.keep, 0)
        whole("replay_limit", self.replay_limit, 0, 1 << 24)
        if not 0.0 < self.lease <= MAX_SECONDS:
            raise ParameterError("lease", self.lease, "seconds above 0")
        if self.on_stale not in ON_STALE:
            raise ParameterError("on_stale", self.on_stale, one_of(self.on_stale, ON_STALE))
        if self.on_stale != "drop" and parameters.max_model_lag is None:
            raise ParameterError("on_stale", self.on_stale, "'drop' unless max_model_lag is set")
        if self.drop_dead and self.score is None:
            raise ParameterError("drop_dead", self.drop_dead, "False unless a score is set, such as score='variance'")
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

    def content_settings(self, schema: Schema) -> dict[str, Any]:
        """Return the settings from which states and scores of groups follow, as plain values by name."""
        return {
            "group": self.group,
            "at_least": self.group if self.at_least is None else self.at_least,
            "required": sorted(schema.names if self.required is None else self.required),
            "score": self.score,
            "drop_dead": self.drop_dead,
        }

    def rules(self, schema: Schema, parameters: Parameters) -> PromptRules:
        """Return the rules for the prompts of a table."""
        at_least, mask = self.group if self.at_least is None else self.at_least, self._required_mask(schema)
        facts: dict[str, Any] = {"required_mask": mask, "max_model_lag": parameters.max_model_lag}
        return PromptRules(**asdict(self) | {"at_least": at_least, **facts})


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRules(PromptSettings):
    """Rules for all prompts of a table: its settings, with values that follow from the schema and the parameters."""

    at_least: int = 8
    required_mask: int = 0
    """Mask of the required columns."""
    max_model_lag: int | None = None
