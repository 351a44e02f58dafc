"""Helpers of pipelines: partial, prod and cached_property."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar, overload

from memoire.building import Held
from memoire.errors import NotSettable
from memoire.rl.pipeline import partial

__all__ = ["cached_property", "partial", "prod"]

T = TypeVar("T")


def prod(iterable: Iterable[Any]) -> Any:
    """Return the product of numbers; 1 for none."""
    return math.prod(iterable)


class cached_property(Generic[T]):  # noqa: N801  (the name of the pipeline's authors)
    """Property that is computed once for each object, and stored outside of the object's `__dict__`.

    The value is neither copied nor saved with the object. A value that refers to its own object is never freed.

    Args:
        function: Called with the object at the first access.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self._function = function
        self._values: dict[int, T] = {}
        self._lock = threading.RLock()
        self._name = getattr(function, "__name__", "property")

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[T]: ...

    @overload
    def __get__(self, instance: Any, owner: type) -> T: ...

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        with Held(self._lock):
            if id(instance) not in self._values:
                self._keep(instance, self._function(instance))
            return self._values[id(instance)]

    def __set__(self, instance: Any, value: T) -> None:
        raise NotSettable(type(instance).__name__, self._name, "Delete it to compute it again at the next use.")

    def __delete__(self, instance: Any) -> None:
        with Held(self._lock):
            self._values.pop(id(instance), None)

    def _keep(self, instance: Any, value: T) -> None:
        # Python reuses the id of a freed object, so the object's value is removed with the object.
        weakref.finalize(instance, self._values.pop, id(instance), None).atexit = False
        self._values[id(instance)] = value
