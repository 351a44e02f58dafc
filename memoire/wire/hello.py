"""HELLO as the side that says it sees it: when the next one is due, and what its answer is. Pure: time is passed in.

HELLO ──▶ open ──▶ WELCOME, or an error ──▶ HELLO again when it is due
"""

from __future__ import annotations

from typing import NamedTuple

from memoire.errors import MemoireError, Refused

from . import messages
from .frames import Answer, MessageHeader


class HelloSchedule:
    """When the next HELLO to one address is due: one at a time."""

    def __init__(self, due: float = 0.0) -> None:
        self.is_open = False
        """Whether one is on its way that has no answer yet."""
        self.due = due
        """When the next one is due, unless one is open then; infinity: not by itself."""

    def next_time(self) -> float:
        """When `is_due` becomes true by itself."""
        return float("inf") if self.is_open else self.due

    def is_due(self, now: float) -> bool:
        """Whether one is to be sent now."""
        return now >= self.next_time()

    def begin(self, due: float = float("inf")) -> None:
        """One is sent, and the next one is due then."""
        self.is_open, self.due = True, due

    def answered(self) -> None:
        """It has its answer, or the error that ends it."""
        self.is_open = False

    def hurry(self) -> None:
        """Something may have changed: the next one is due at once, or as soon as the one that is open has ended."""
        self.due = 0.0


class HelloAnswer(NamedTuple):
    """The answer to a HELLO that was taken."""

    header: MessageHeader
    told: messages.Welcome


def welcome_of(answer: Answer, endpoint: str) -> HelloAnswer:
    """What a HELLO was answered.

    Args:
        endpoint: Of whoever answered, for errors.

    Raises:
        MemoireError: it was refused, or not answered, or by something else than WELCOME.
    """
    if isinstance(answer, MemoireError):
        raise answer
    if not isinstance(answer.body, messages.Welcome):
        raise Refused(endpoint, "unexpected", f"HELLO was answered by {answer.type.name}")
    return HelloAnswer(answer.header, answer.body)
