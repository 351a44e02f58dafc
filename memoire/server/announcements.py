"""What subscribers are to be told: models that are new, and that clients should ask soon. Pure; from any thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from memoire.models.model import Model


class Announcements:
    """Filled by those who publish, emptied by the thread that tells subscribers."""

    def __init__(self) -> None:
        self._models: deque[Model] = deque()
        self._has_news = False
        self.wake: Callable[[], None] = lambda: None
        """Has the thread that tells subscribers take its turn; set by that thread's owner."""

    def __bool__(self) -> bool:
        return self._has_news or bool(self._models)

    def add_model(self, model: Model) -> None:
        """A model is new: its topic's subscribers get it or fetch it."""
        self._models.append(model)
        self.wake()

    def add_news(self) -> None:
        """All clients should send an UPDATE soon."""
        self._has_news = True
        self.wake()

    def next_model(self) -> Model | None:
        """The oldest model that is not yet announced, which counts as announced by that; None if all are."""
        return self._models.popleft() if self._models else None

    def take_news(self) -> bool:
        """Whether clients should ask; they count as told by that."""
        if not self._has_news:
            return False
        self._has_news = False  # before they are told: what comes meanwhile is told again
        return True
