"""Where a writer's episodes stand, so that a writer of another process goes on in them: `Buffer.writer(resume=True)`.

Entries of open episodes are in the memory, and saved with it. A writer knows besides in which observation each one was
left, its return so far, who is being reset, and what tells of a reset that was forgotten.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .schema import Schema
from .steps import AUTORESET, ResetCheck


@dataclass(frozen=True)
class WriterState:
    """What a writer of N members knows, R the shape of the reward."""

    first_lane: int
    num_envs: int | None
    """None: a single environment."""
    autoreset: str
    longest: int
    is_shared: bool
    """Whether `longest` is a share of the capacity, and not given."""
    clock: int
    """Steps recorded."""
    began: NDArray[np.int64]
    """[N] clock when the episodes began."""
    opened: NDArray[np.int64]
    """[N] clock when the memory's episodes began: later where a part was cut off."""
    returns: NDArray[np.float64]
    """[N, *R]"""
    pending: NDArray[np.bool_] | None
    """[N] whose next step is their reset."""
    left: list[Any]
    """[N] observations in which the last steps ended, nested as the schema is; None where that is unknown."""
    is_apart: bool
    """Whether members step apart."""
    is_owned: bool
    """Whether `left` is an array of its own, which a reset does not write over."""
    env_id: Any
    starts: dict[str, Any] | None
    """Of `ResetCheck`."""

    @property
    def lanes(self) -> int:
        """N."""
        return len(self.began)

    @property
    def lengths(self) -> list[int]:
        """[N] entries of the memory's open episodes."""
        return [int(length) for length in self.clock - self.opened]

    def __str__(self) -> str:
        return "a single environment" if self.num_envs is None else f"num_envs={self.num_envs} in mode {self.autoreset}"

    def told(self, schema: Schema, root: str) -> dict[str, Any]:
        """As JSON carries it."""
        facts = {name: getattr(self, name) for name in _FACTS}
        arrays = {name: getattr(self, name).tolist() for name in ("began", "opened", "returns")}
        pending = None if self.pending is None else self.pending.tolist()
        left = [None if each is None else _packed(schema.flatten(root, each)) for each in self.left]
        return facts | arrays | {"pending": pending, "left": left}

    @classmethod
    def of(cls, told: Mapping[str, Any], schema: Schema, root: str, length_of: Callable[[int], int]) -> WriterState:
        """Out of what `told` gave, checked.

        Args:
            length_of: Entries of the open episode of a lane, which is one of the memory's.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: it cannot be so.
        """
        facts = {name: told[name] for name in _FACTS}
        count = 1 if facts["num_envs"] is None else facts["num_envs"]
        numbers = [facts["first_lane"], count, facts["longest"], facts["clock"]]
        if any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers) or facts["longest"] < 1:
            raise ValueError("a number that cannot be")
        if any(type(facts[name]) is not bool for name in ("is_shared", "is_apart", "is_owned")):
            raise ValueError("a fact that cannot be")
        if facts["autoreset"] not in AUTORESET or not len(told["began"]) == len(told["left"]) == count >= 1:
            raise ValueError("other members than there are")
        if facts["env_id"] is not None and type(facts["env_id"]) is not int:
            raise ValueError("an id that cannot be")
        if facts["starts"] is not None:
            check = ResetCheck()
            check.go_on_from(facts["starts"])
            if any(not 0 <= member < count for member in check.awaited):
                raise ValueError("the end of a member that is not there")
        made = cls(
            **facts,
            began=np.array(told["began"], np.int64).reshape(count),
            opened=np.array(told["opened"], np.int64).reshape(count),
            returns=np.array(told["returns"], np.float64).reshape(count, *schema.reward_shape),
            pending=None if told["pending"] is None else np.array(told["pending"], np.bool_).reshape(count),
            left=[None if each is None else _unpacked(schema, root, each) for each in told["left"]],
        )
        if (made.began > made.opened).any() or (made.opened > made.clock).any():
            raise ValueError("episodes that begin later than now")
        if made.lengths != [length_of(made.first_lane + member) for member in range(count)]:
            raise ValueError("other episodes than the open ones")
        return made


_FACTS = (
    "first_lane", "num_envs", "autoreset", "longest", "is_shared", "clock", "is_apart", "is_owned", "env_id", "starts",
)  # fmt: skip


def _packed(leaves: list[Any]) -> list[str]:
    return [base64.b64encode(np.ascontiguousarray(leaf).tobytes()).decode() for leaf in leaves]


def _unpacked(schema: Schema, root: str, parts: list[str]) -> Any:
    leaves = {}
    for name, part in zip(schema.leaves(root), parts, strict=True):
        column = schema[name]
        flat = np.frombuffer(base64.b64decode(part, validate=True), column.dtype)
        rows = len(flat) // max(1, prod(column.element)) if column.is_ragged else 0
        leaves[name] = flat.reshape((rows, *column.element) if column.is_ragged else column.shape).copy()
    return schema.nest(root, leaves)
