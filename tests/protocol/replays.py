"""States of a client or server, each stored as the shortest list of events that leads to it.

Replaying the events restores a state, so the product's objects need not be copied. Each step of the product's code runs
once for all states of a world that share it.

    state 17 of a client = begin, answer 3, work      + tell  ──▶ state 25, and message 9
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from .canonical import name_of
from .ends import ClientEnd, Sent, ServerEnd

Event = tuple[Any, ...]
End = ClientEnd | ServerEnd

MAX_LIVE: Final = 1000
"""Live objects kept for the next event in their state."""


class Broken(NamedTuple):
    """A rule that is broken after an event."""

    what: str


class Replays:
    """States of one client or server by number; state 0 is the beginning."""

    def __init__(self, make: Callable[[], End]) -> None:
        self._make = make
        self._histories: list[tuple[Event, ...]] = []
        self._numbers: dict[bytes, int] = {}
        self._steps: dict[tuple[int, Event], tuple[int, tuple[Sent, ...]] | Broken] = {}
        self._live: dict[int, End] = {}
        """Objects by their present state."""
        self.facts: list[Any] = []
        """Facts by number of the state."""
        self._met((), make())

    def _met(self, history: tuple[Event, ...], end: End) -> int:
        name = name_of(end)
        number = self._numbers.setdefault(name, len(self._histories))
        if number == len(self._histories):
            self._histories.append(end.shortened(history))
            self.facts.append(end.facts())
            self._keep(number, end)
        return number

    def _keep(self, state: int, end: End) -> None:
        self._live[state] = end
        if len(self._live) > MAX_LIVE:
            del self._live[next(iter(self._live))]

    def _at(self, state: int) -> End:
        end = self._live.pop(state, None)
        return self._replayed(self._histories[state]) if end is None else end

    def _replayed(self, history: tuple[Event, ...]) -> End:
        end = self._make()
        for event in history:
            end.take(event)
        return end

    def step(self, state: int, event: Event) -> tuple[int, tuple[Sent, ...]] | Broken:
        """Return the state after an event and the messages that it sends, or the broken rule."""
        outcome = self._steps.get((state, event))
        if outcome is None:
            outcome = self._steps[state, event] = self._step(state, event)
        return outcome

    def _step(self, state: int, event: Event) -> tuple[int, tuple[Sent, ...]] | Broken:
        end, history = self._at(state), self._histories[state]
        try:
            sent = tuple(end.take(event))
            end.check()
        except AssertionError as error:
            return Broken(str(error) or "what the product checks of itself does not hold")
        return self._met((*history, event), end), sent

    def __len__(self) -> int:
        return len(self._histories)
