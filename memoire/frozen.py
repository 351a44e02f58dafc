"""Settings that never change say so when somebody sets one, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .errors import NotSettable

T = TypeVar("T")


def says_instead(instead: str) -> Callable[[type[T]], type[T]]:
    """For a frozen dataclass, above its own decorator: a sentence for whoever sets a field; NAME in it is the field."""

    def decorate(kind: type[T]) -> type[T]:
        def refuse(self: Any, name: str, value: Any) -> None:
            raise NotSettable(kind.__name__, name, f"It never changes. {instead.replace('NAME', name)}")

        kind.__setattr__ = refuse  # type: ignore[method-assign]
        return kind

    return decorate
