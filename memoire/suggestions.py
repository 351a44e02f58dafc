"""The name that was meant: for an argument, setting, column or table that is called like none there is.

A name is compared with those that are known by its spelling, and with what other libraries and papers call the same.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from .errors import NoSuchField, UnknownName

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

MAX_SUGGESTIONS = 2
ALIKE = 0.6
"""Share of characters from which on two names are alike."""
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "address": ("url", "endpoint"),
    "alpha": ("exponent", "priority_exponent", "sampler"),
    "beta": ("importance_exponent", "sampler"),
    "buffer_size": ("capacity", "max_step"),
    "cache_size": ("parameters",),
    "discount_factor": ("discount",),
    "done": ("terminated", "discount"),
    "dones": ("terminated", "discount"),
    "endpoint": ("url", "front"),
    "gae_lambda": ("mix_lambda",),
    "gamma": ("discount", "discount_factor"),
    "host": ("url", "endpoint"),
    "idxes": ("ids",),
    "importance_exponent": ("beta", "sampler"),
    "indices": ("ids",),
    "lam": ("mix_lambda",),
    "lambda_": ("mix_lambda",),
    "max_size": ("capacity",),
    "observation": ("obs", "state"),
    "observations": ("obs", "state"),
    "next_observation": ("next_obs", "next_state"),
    "next_observations": ("next_obs", "next_state"),
    "n_step": ("multi_step",),
    "num_stack": ("frame_stack",),
    "priority_exponent": ("exponent", "sampler"),
    "reuse_cache": ("parameters",),
    "samples_per_insert": ("parameters",),
    "seq_len": ("sequence_length",),
    "size": ("capacity",),
    "states": ("obs", "state"),
    "terminal": ("terminated", "discount"),
    "weight": ("importance",),
    "weights": ("importance",),
}
"""What others call it: the name here, the likeliest first."""


def meant(name: object, known: Iterable[str]) -> tuple[str, ...]:
    """Those of the known names that somebody who wrote this one may have meant, the likeliest first."""
    if not isinstance(name, str):
        return ()
    names = list(known)
    usual = [each for each in ELSEWHERE.get(name.lower(), ()) if each in names][:1]
    by_lower = {each.lower(): each for each in names}
    alike = difflib.get_close_matches(name.lower(), by_lower, MAX_SUGGESTIONS, ALIKE)
    return tuple(dict.fromkeys([*usual, *(by_lower[each] for each in alike)]))[:MAX_SUGGESTIONS]


def hint(name: object, known: Iterable[str]) -> str:
    """What to put behind a list of allowed names: which one was meant; "" where nobody can tell."""
    found = meant(name, known)
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""


def one_of(name: object, known: Iterable[str]) -> str:
    """What a name had to be: "one of 'skip', 'block' (did you mean 'skip'?)"."""
    names = list(known)
    return f"one of {', '.join(map(repr, names))}{hint(name, names)}"


def refuse_unknown(what: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise UnknownName for the first given name that is not known to `what`; nothing where all are."""
    names = tuple(sorted(known))
    for name in given:
        if name not in names:
            raise UnknownName(what, name, meant(name, names), names)


def no_field(what: str, name: object, known: Iterable[str]) -> NoSuchField:
    """What to raise where `what` has nothing of this name."""
    names = tuple(known)
    return NoSuchField(what, repr(name)[:80], meant(name, names), names)


def checked_names(also: Collection[str] = (), called: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function refuse an argument by a name that it does not have, and say which one was meant.

    Args:
        also: Names that it takes beside those in its signature.
        called: What the error calls it; by default its own name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        usual = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        known = frozenset(each.name for each in signature.parameters.values() if each.kind in usual) - {"self", "cls"}
        known |= frozenset(also)
        what = called or function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def call(*arguments: P.args, **options: P.kwargs) -> R:
            if not options.keys() <= known:
                refuse_unknown(what, options, known)
            return function(*arguments, **options)

        return call

    return decorate


def checked_fields(kind: type[T]) -> type[T]:
    """The same for a dataclass."""
    setattr(kind, "__init__", checked_names(called=kind.__name__)(kind.__init__))  # noqa: B010  (not a plain method)
    return kind
