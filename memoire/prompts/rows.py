"""What a table keeps of a prompt: where it stands, who has it, and what came of each of its answers. Pure.

prompt ("math", epoch 0, index 17)     leased to worker a1b2 until 512.0, lease 9
answers      0 whole   1 whole   2 two pieces   3 failed: too long          group=4
columns      tokens logprob reward | tokens logprob | tokens | -
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from sys import getsizeof
from typing import Annotated, TypeAlias

import msgspec

Key: TypeAlias = tuple[str, int, int]
"""Data set, epoch and index: what names a prompt."""
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


class PromptRules(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for all prompts of a table; `memoire.Table` says what each means."""

    group: int = 8
    at_least: int = 8
    required: int = 0
    """Columns, a bit each."""
    drops_dead: bool = False
    max_model_lag: int | None = None
    on_stale: str = "drop"
    lease: float = 600.0
    attempts: int = 3
    keep: int = 2
    replay_limit: int = 0


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
