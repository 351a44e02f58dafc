"""What callers may pass: seconds, whole numbers, text, mappings; each is refused with an error that names it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from .errors import ParameterError, UnknownName, WrongType

FOR_EVER = 1e9
"""Seconds: longer than anything runs, and not more than a lock can wait."""
MAX_SCALARS = 64
"""Names under which one client or learner may show figures."""


def seconds(timeout: float | None, default: float = FOR_EVER, name: str = "timeout") -> float:
    """Seconds that a caller wants to wait: at least 0, and not more than `FOR_EVER`; None is `default`.

    Raises:
        WrongType, ParameterError: it is no number.
    """
    if timeout is None:
        return min(default, FOR_EVER)
    try:
        given = float(timeout)
    except (TypeError, ValueError, OverflowError):
        raise WrongType(name, "a number of seconds or None", _shown(timeout)) from None
    if math.isnan(given):
        raise ParameterError(name, timeout, "a number of seconds or None")
    return min(max(given, 0.0), FOR_EVER)


@contextmanager
def renamed(**names: str) -> Iterator[None]:
    """Have what is wrong with a parameter said by the name that the caller knows it by."""
    try:
        yield
    except ParameterError as error:
        if isinstance(error, UnknownName) or error.name not in names:
            raise
        raise ParameterError(names[error.name], error.value, error.expected) from None


def whole(name: str, value: Any, low: int, high: int = 2**62) -> int:
    """A whole number in [low, high].

    Raises:
        ParameterError: it is none, or outside.
    """
    if type(value) is int and low <= value <= high:
        return value
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise ParameterError(name, value, f"a whole number from {low}" + (f" to {high}" if high < 2**62 else ""))
    return int(value)


MAX_VERSION = 2**53 - 1
"""The highest version that a model can have."""


def model_version(value: Any, name: str = "model_version") -> int:
    """The version of a model, from 1; 0 is unknown.

    Raises:
        ParameterError: it is no whole number, or outside.
    """
    return whole(name, value, 0, MAX_VERSION)


def finite(name: str, value: Any, low: float = -math.inf) -> float:
    """A finite number of at least `low`.

    Raises:
        ParameterError: it is none.
    """
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < low:
        raise ParameterError(name, value, "a finite number" + (f" of at least {low:g}" if low > -math.inf else ""))
    return float(value)


def text(name: str, value: Any) -> str:
    """Text that can be sent and saved: UTF-8 has no form of a lone surrogate, such as those of undecodable file names.

    Raises:
        WrongType: it is no str.
        ParameterError: it has a lone surrogate.
    """
    if not isinstance(value, str):
        raise WrongType(name, "text", _shown(value))
    try:
        value.encode()
    except UnicodeEncodeError as error:
        expected = f"text that UTF-8 can encode: the character at {error.start} is a lone surrogate"
        raise ParameterError(name, value[:80], expected) from None
    return value


MAX_NAME = 256
"""Characters that the name of a run or of a table has at most."""


def is_name(value: str, most: int = MAX_NAME) -> bool:
    """Whether text can be a name: 1 to `most` characters, all of them seen, none of them changing how others look."""
    return 0 < len(value) <= most and value.isprintable()


def name(what: str, value: Any) -> str:
    """A name, such as a run's: printable text of 1 to 256 characters.

    Raises:
        ParameterError: it is none; `what` says of what.
    """
    if not isinstance(value, str) or not is_name(value):
        raise ParameterError(
            what, value[:80] if isinstance(value, str) else value, f"printable text of 1 to {MAX_NAME} characters"
        )
    return value


def table_name(value: Any) -> str:
    """The name of a table, at most 256 characters; "" is a server's first.

    Raises:
        WrongType, ParameterError: it is none.
    """
    return "" if text("table", value) == "" else name("table", value)


NAME_OF_PROCESS = r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}"
"""What a Pod, a host or a person calls a process: it stands in log lines, labels and addresses as it is."""


def process_name(value: Any, surroundings: Mapping[str, str] = os.environ) -> str:
    """The name that people see in place of the id of a client, reader or proxy; "" if nobody gave one.

    Args:
        value: As the caller gave it. None takes $MEMOIRE_NAME, and in a Pod of Kubernetes the name of the Pod.

    Raises:
        ParameterError: it is no such name.
    """
    what = "name"
    if value is None:
        what, value = "$MEMOIRE_NAME", surroundings.get("MEMOIRE_NAME", "")
        if not value and "KUBERNETES_SERVICE_HOST" in surroundings:
            what, value = "$HOSTNAME", surroundings.get("HOSTNAME", "")
    if value != "" and (not isinstance(value, str) or not re.fullmatch(NAME_OF_PROCESS, value)):
        expected = "1 to 253 letters, digits, dots, hyphens and underscores, first a letter or digit"
        raise ParameterError(what, value[:80] if isinstance(value, str) else value, expected)
    return str(value)


def mapping(name: str, value: Any) -> Mapping[Any, Any]:
    """A mapping, such as a dict.

    Raises:
        WrongType: it is something else.
    """
    if not isinstance(value, Mapping):
        raise WrongType(name, "a mapping from names", _shown(value))
    return value


def scalars(values: Any, present: Mapping[str, float]) -> dict[str, float]:
    """Figures by name: those `present`, and `values` in their place: finite numbers, under names of at most 256
    characters, `MAX_SCALARS` in all.

    Raises:
        WrongType, ParameterError: says which one is wrong.
    """
    checked = {}
    for name, value in mapping("values", values).items():
        shown = text("scalars", str(name))
        try:
            checked[shown] = float(value)
        except (TypeError, ValueError, OverflowError):
            raise WrongType(f"scalars[{name!r}]", "a number", repr(value)[:80]) from None
    wrong = [name for name, value in checked.items() if not math.isfinite(value) or len(name) > 256]
    if wrong:
        expected = "a finite number, under a name of at most 256 characters"
        raise ParameterError(f"scalars[{wrong[0]!r}]", checked[wrong[0]], expected)
    merged = dict(present) | checked
    if len(merged) > MAX_SCALARS:
        raise ParameterError("scalars", len(merged), f"at most {MAX_SCALARS} names")
    return merged


def _shown(value: Any) -> str:
    return f"{repr(value)[:80]} ({type(value).__name__})"
