"""What an end does next, remembered. A state of an end is the shortest list of events that leads there, and is reached
again by replaying them: the product's objects need not be copied, and each step of the product's code runs once however
many worlds share it.

    state 17 of a client = begin, answer 3, work      + tell  ──▶ state 25, and message 9
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from .ends import Sent

Event = tuple[Any, ...]

MAX_LIVE: Final = 1000
"""Ends that are kept as they are, for the next event in their state."""


class Broken(NamedTuple):
    """Something does not hold after an event."""

    what: str


class End(Protocol):
    """A machine of `ends`."""

    def take(self, event: Event) -> list[Sent]:
        """One event; the messages that it sends."""

    def check(self) -> None:
        """Raise AssertionError if what it has counted does not add up."""

    def shortened(self, history: tuple[Event, ...]) -> tuple[Event, ...]:
        """A shorter way to the state that it is in, if it knows one."""

    def facts(self) -> Any:
        """What is asked about its state."""

    def name(self) -> bytes:
        """The same for states that nobody can tell apart."""


class Replays:
    """All states of one kind of end that were met, by number; 0 is the one before everything."""

    def __init__(self, make: Callable[[], End], rename: Callable[[Event], Event] = lambda event: event) -> None:
        self._make, self._rename = make, rename
        self._histories: list[tuple[Event, ...]] = []
        self._numbers: dict[bytes, int] = {}
        self._steps: dict[tuple[int, Event], tuple[int, tuple[Sent, ...]] | Broken] = {}
        self._mirrors: dict[int, int] = {}
        self._live: dict[int, End] = {}  # ends that are in a state and have not been driven further
        self.facts: list[Any] = []
        """By state."""
        self.ran = 0
        """Events that the product's code handled, replayed ones included."""
        self._met((), make())

    def _met(self, history: tuple[Event, ...], end: End) -> int:
        name = end.name()
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
        self.ran += len(history)
        return end

    def step(self, state: int, event: Event) -> tuple[int, tuple[Sent, ...]] | Broken:
        """The state after an event, and the messages that it sends; or what does not hold then."""
        found = self._steps.get((state, event))
        if found is None:
            found = self._steps[state, event] = self._step(state, event)
        return found

    def _step(self, state: int, event: Event) -> tuple[int, tuple[Sent, ...]] | Broken:
        end, history = self._at(state), self._histories[state]
        self.ran += 1
        try:
            sent = tuple(end.take(event))
            end.check()
        except AssertionError as error:
            return Broken(str(error) or "what the product checks of itself does not hold")
        return self._met((*history, event), end), sent

    def mirror(self, state: int) -> int:
        """The state in which the two clients have changed places."""
        found = self._mirrors.get(state)
        if found is None:
            history = tuple(map(self._rename, self._histories[state]))
            found = self._met(history, self._replayed(history))
            self._mirrors[state], self._mirrors[found] = found, state
        return found

    def __len__(self) -> int:
        return len(self._histories)
