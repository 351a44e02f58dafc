"""Classes of which some arguments are given now and the others later: how a pipeline says what it is made of."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from memoire.errors import WrongType

MAX_SHOWN = 60
"""Characters of a value that an error shows."""


class Partial(functools.partial[Any]):
    """A callable with some of its arguments. Calling it gives the others; what is wrong with them names all."""

    __slots__ = ()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """What the class makes of all arguments.

        Raises:
            WrongType: there are too many arguments, or too few, or an unknown one.
        """
        try:
            return super().__call__(*args, **kwargs)
        except TypeError as error:
            given = {**self.keywords, **kwargs}
            _check(self.func, (*self.args, *args), given, is_complete=True, cause=error)
            raise


def partial(func: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """A class, or any callable, with some of its arguments; the others are given when it is called.

    A keyword's value may be `partial(None, ...)`: it is completed by the default that `func` has for this keyword.
    A partial can be pickled if its callable and arguments can.

    Raises:
        WrongType: `func` takes no such arguments.
    """
    if func is None:
        return Partial(_Unnamed, *args, **kwargs)
    if not callable(func):
        raise WrongType("func", "a class or another callable", type(func).__name__)
    for name, value in kwargs.items():
        if isinstance(value, Partial) and value.func is _Unnamed:
            kwargs[name] = partial(_default_of(func, name), *value.args, **value.keywords)
    _check(func, args, kwargs, is_complete=False)
    return Partial(func, *args, **kwargs)


class _Unnamed:
    """What stands for a class that the outer partial names."""


def _default_of(func: Callable[..., Any], name: str) -> Callable[..., Any]:
    """What a callable has by default for an argument: a class that another partial completes."""
    parameter = inspect.signature(func).parameters.get(name)
    if parameter is None or not callable(parameter.default):
        raise WrongType(name, f"a partial of a class, since {_name(func)} has no class as its default", "partial(None)")
    default: Callable[..., Any] = parameter.default
    return default


def _check(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_complete: bool,
    cause: Exception | None = None,
) -> None:
    """Refuse arguments that the callable does not take; whatever its signature cannot say is left to the call."""
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):
        return
    try:
        (signature.bind if is_complete else signature.bind_partial)(*args, **kwargs)
    except TypeError as error:
        received = ", ".join([*map(_shown, args), *(f"{name}={_shown(value)}" for name, value in kwargs.items())])
        expected = f"given arguments as in {_name(func)}{signature} ({error})"
        raise WrongType(_name(func), expected, f"({received})", "Nothing was made.") from cause


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__qualname__", type(func).__qualname__)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
