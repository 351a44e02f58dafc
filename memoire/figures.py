"""Figures: what is counted, declared once on the field that holds it, and how parts add up. Pure.

    held_bytes: Annotated[int, gauge("held_bytes", "Size", "Bytes of what is held.", docs="choose.md")]
                │                   │             │       └ the sentence of a scrape, of docs/metrics.md and of pages
                │                   │             └ the title of columns on pages and in `memoire top`
                │                   └ the metric is memoire_held_bytes, its unit bytes
                └ the field of the stats, of /status and of the dashboard's API

A property with such a return type is a figure that is derived from others. `catalogue` finds all figures of a class,
also in the dataclasses that it holds, and `total` adds up several objects of a class. Modules that an actor loads
import these names for type checkers alone; annotations are evaluated here, when somebody reads the catalogue.

Durations by kind, in buckets: cheap to count, and enough for quantiles of many servers together.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Kind: TypeAlias = Literal["", "counter", "gauge", "histogram"]
T = TypeVar("T")

MAX_LABELS: Final = 64
"""Values of one label that are shown, if users name them (topics, scalars, tables): the first ones by name."""


@dataclass(frozen=True)
class Figure:
    """What a field counts. `counter`, `gauge`, `histogram` and `shown` make it."""

    kind: Kind = ""
    name: str = ""
    """Of the metric, without "memoire_" and "_total"; "" if a scrape does not show it."""
    title: str = ""
    help: str = ""
    """What it means: sentences."""
    unit: str = ""
    """bytes, s, share, count, ago (a moment), or "" of a number."""
    formula: str = ""
    docs: str = ""
    """The page of docs/ that says more."""
    adds: str = "sum"
    """How the parts of several tables, servers or lives become one: sum, max, min, all, any, join, last (the first that
    is known is taken), or "weighed by FIELD".
    """
    label: str = ""
    """Of a mapping: what its keys are. Of a text or a part: the label whose value it is."""
    part: str = ""
    """The value of the label that this field stands for, of a metric that several fields make up."""
    curve: bool = False
    """Whether the dashboard keeps its history."""
    of: str = ""
    """"cluster": the metric of a whole cluster, which takes the place of that of a node."""

    def __call__(self, part: str, title: str = "", help_: str = "", **changes: Any) -> Figure:
        """The part of this metric that a field is."""
        return replace(self, part=part, title=title or part.capitalize(), help=help_ or self.help, **changes)

    @property
    def full_name(self) -> str:
        """Of the metric, as a scrape shows it."""
        return f"memoire_{self.name}" + "_total" * (self.kind == "counter")


def counter(name: str, title: str, help_: str, **more: Any) -> Figure:
    """A number that only grows, in one life of what counts it; see `Figure` for what may be said beside."""
    return Figure("counter", name, title, help_, **{"unit": _unit(name)} | more)


def gauge(name: str, title: str, help_: str, **more: Any) -> Figure:
    """A number that rises and falls; see `Figure` for what may be said beside."""
    return Figure("gauge", name, title, help_, **{"unit": _unit(name)} | more)


def histogram(name: str, title: str, help_: str, **more: Any) -> Figure:
    """Durations in buckets: a `Timing`, or a mapping of several."""
    return Figure("histogram", name, title, help_, **{"unit": _unit(name)} | more)


def shown(title: str, help_: str, **more: Any) -> Figure:
    """A figure of pages and of the API that no scrape shows."""
    return Figure("", "", title, help_, **more)


def adding(how: str) -> Figure:
    """A field that is no figure by itself, and how its parts add up."""
    return Figure(adds=how)


UPTIME: Final = Figure("gauge", "uptime_seconds", "Up for", "Seconds since the node was started.", "s", adds="min")
FAULTS: Final = Figure(
    "counter", "faults", "Faults",
    "Turns of the node's threads that failed. A fault is a bug of memoire; the node's log has it.", docs="errors.md",
)  # fmt: skip
REFUSED: Final = Figure("counter", "refused", "Refused messages", "Messages that were refused, by code.", label="code")
DROPPED_REPLIES: Final = Figure(
    "counter", "dropped_replies", "Replies dropped",
    "Replies dropped because their connection had no room for too long. Clients ask again.",
)  # fmt: skip
MODEL_VERSION: Final = Figure(
    "gauge", "model_version", "Models", "Newest version of each topic.", label="topic", adds="max"
)
MODEL_BYTES: Final = Figure("gauge", "model_bytes", "Models kept", "Bytes of models that are kept.", "bytes")
HOLDER_BYTES: Final = Figure(
    "gauge", "holder_bytes", "Held for peers", "Bytes that are held for peers, by holder.", "bytes", label="holder"
)
BUDGET_BYTES: Final = Figure(
    "gauge", "budget_bytes", "Budget",
    "Bytes that all holders may have together, with those that some have of their own.", "bytes",
)  # fmt: skip


def _unit(name: str) -> str:
    return next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")


_UNITS: Final = {"_bytes": "bytes", "_seconds": "s", "_ratio": "share"}


@dataclass(frozen=True)
class Group:
    """How the figures of a field that holds other objects are named and told apart."""

    label: str = ""
    """Of a mapping or tuple of objects: the label that tells them apart, or several with spaces between."""
    key: str = ""
    """The fields of each object of a tuple that are its values of the labels; "" of a mapping."""
    prefix: str = ""
    """Before the names of its metrics."""
    words: tuple[str, str] = ("", "")
    """Words of its sentences, and those in their place."""
    own: bool = False
    """Whether only figures of each object itself are shown that say of whom (`Figure.of`)."""


def by(label: str, key: str = "", *, own: bool = False) -> Group:
    """A mapping of objects, or a tuple of objects that have this key; `own` is as of `Group`."""
    return Group(label, key, own=own)


def within(prefix: str, *words: str) -> Group:
    """An object whose metrics have a prefix, and whose sentences have other words."""
    return Group(prefix=prefix, words=typing.cast("tuple[str, str]", words or ("", "")))


@functools.cache
def fields_of(kind: type) -> Mapping[str, tuple[Any, tuple[Any, ...]]]:
    """Each field, and each property that is a figure: its type, and what is declared beside it."""
    names = {each.name for each in dataclasses.fields(kind)}
    hints = {name: hint for name, hint in _hints(kind).items() if name in names}
    for name in dir(kind):
        found = getattr(kind, name)
        if isinstance(found, property) and "Annotated" in str(found.fget.__annotations__.get("return", "")):
            hints[name] = _hints(found.fget)["return"]
    return {name: _parted(hint) for name, hint in hints.items()}


def _hints(of: Any) -> dict[str, Any]:
    return typing.get_type_hints(of, localns=_words(), include_extras=True)


@functools.cache
def _words() -> dict[str, Any]:
    """What declarations are made of, for modules that import it for type checkers alone."""
    makers = {each.__name__: each for each in (counter, gauge, histogram, shown, adding, by, within)}
    return makers | {name: each for name, each in globals().items() if isinstance(each, Figure)}


def _parted(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    if typing.get_origin(hint) is Annotated:
        return hint.__origin__, hint.__metadata__
    return hint, ()


@functools.cache
def figures_of(kind: type) -> Mapping[str, Figure]:
    """The figure of each field that is one, by the field's name; not those of objects within.

    The unit of a whole number is "count", if none is declared.
    """
    found: dict[str, Figure] = {}
    for name, (hint, told) in fields_of(kind).items():
        is_whole = int in (hint, *typing.get_args(hint)) and float not in typing.get_args(hint)
        for figure in [each for each in told if isinstance(each, Figure)][:1]:
            found[name] = replace(figure, unit="count") if is_whole and not figure.unit else figure
    return found


def figure_of(kind: type, name: str) -> Figure:
    """The figure of a field of another class, for one that holds the same."""
    return figures_of(kind)[name]


def class_within(hint: Any) -> type | None:
    """The dataclass that a field holds, alone or several of it; None of another field."""
    for each in (hint, *typing.get_args(hint)):
        if isinstance(each, type) and dataclasses.is_dataclass(each):
            return each
        if each is not hint and isinstance(each, types.UnionType) and (found := class_within(each)):
            return found
    return None


# ------------------------------------------------------------------------------------------------------------ catalogue


@dataclass(frozen=True)
class Source:
    """Where values of a metric are: names of fields, one within the other, and the labels of those that are many."""

    figure: Figure
    path: tuple[tuple[str, Group], ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of its labels."""
        of_groups = tuple(label for _, group in self.path for label in group.label.split())
        return (*of_groups, self.figure.label) if self.figure.label else of_groups

    def values(self, stats: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
        """The values that an object has now, each with its labels: a number, or a `Timing`."""
        yield from self._values(stats, 0, ())

    def _values(self, found: Any, depth: int, labels: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        if found is None:
            return
        if depth == len(self.path):
            yield from _leaves(self.figure, found, labels)
            return
        name, group = self.path[depth]
        inner = getattr(found, name)
        if inner is not None and group.label:
            for own, each in _told_apart(group, inner)[:MAX_LABELS]:
                yield from self._values(each, depth + 1, (*labels, *own))
        else:
            yield from self._values(inner, depth + 1, labels)


def _told_apart(group: Group, inner: Any) -> list[tuple[tuple[str, ...], Any]]:
    """The objects of a mapping or tuple, each with its values of the labels."""
    if group.key:
        return [(tuple(str(getattr(each, key)) for key in group.key.split()), each) for each in inner]
    return [((str(name),), inner[name]) for name in sorted(inner)]


def _leaves(figure: Figure, value: Any, labels: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if figure.part:
        pairs: Iterable[tuple[tuple[str, ...], Any]] = [((*labels, figure.part), value)]
    elif isinstance(value, Mapping):
        pairs = [((*labels, key), each) for key, each in sorted(value.items())[:MAX_LABELS]]
    elif figure.label:
        pairs = [((*labels, str(value)), 1)]
    else:
        pairs = [(labels, value)]
    for names, each in pairs:
        if figure.kind != "histogram":
            each = _number(each)
        if each is not None:
            yield names, each


def _number(value: Any) -> float | int | None:
    """A metric of a value: of a text whether there is any, of durations their seconds, of a list its length."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool | str):
        return float(bool(value))
    if isinstance(value, int | float):
        return value
    if hasattr(value, "seconds"):
        return typing.cast(float, value.seconds)
    return len(value)


@functools.cache
def catalogue(kind: type, of: str = "") -> Mapping[str, tuple[Source, ...]]:
    """All metrics of a class, by name, in the order of its fields: where their values are. `of` is as of `Figure`."""
    found: dict[str, list[Source]] = {}
    for source in _sources(kind, (), Group(prefix=f"{of}_" if of else ""), of):
        found.setdefault(source.figure.name, []).append(source)
    for name, sources in found.items():
        assert len({(each.figure.kind, each.labels) for each in sources}) == 1, f"parts of {name} differ"
    return {name: tuple(sources) for name, sources in found.items()}


def _sources(kind: type, path: tuple[tuple[str, Group], ...], outer: Group, of: str) -> Iterator[Source]:
    for name, (hint, told) in fields_of(kind).items():
        group = next((each for each in told if isinstance(each, Group)), Group())
        here = (*path, (name, group))
        figures = [each for each in told if isinstance(each, Figure) and each.name and each.of in ("", of)]
        for figure in [each for each in figures if each.of] or ([] if outer.own else figures):
            text = figure.help.replace(*outer.words) if outer.words[0] else figure.help
            yield Source(replace(figure, name=outer.prefix + figure.name, help=text), here)
        inner = class_within(hint)
        if inner is not None and not outer.own and (group.label or _is_one(hint, inner)):
            words = group.words if group.words[0] else outer.words
            inside = Group(prefix=outer.prefix + group.prefix, words=words, own=group.own)
            yield from _sources(inner, here, inside, of)


def _is_one(hint: Any, inner: type) -> bool:
    return hint is inner or (
        inner in typing.get_args(hint) and typing.get_origin(hint) in (types.UnionType, typing.Union)
    )


# --------------------------------------------------------------------------------------------------------- parts add up


def total(kind: type[T], parts: Iterable[Mapping[str, Any] | T]) -> T:
    """Several objects of a class as one, or what their JSON was decoded to: each field as its figure says.

    A part of an older version may lack a field: it adds nothing. A field that no part knows has its default.
    """
    return kind(**summed(kind, parts))


def summed(kind: type, parts: Iterable[Any]) -> dict[str, Any]:
    """The same, by names of fields."""
    known = [part if isinstance(part, Mapping) else _shallow(part) for part in parts]
    declared = figures_of(kind)
    found: dict[str, Any] = {}
    for each in dataclasses.fields(kind):
        hint = fields_of(kind)[each.name][0]
        told = [part for part in known if part.get(each.name) is not None]
        if told or not _has_default(each):
            found[each.name] = _one(hint, declared.get(each.name, _FIRST), each.name, told)
    return found


_FIRST: Final = Figure(adds="last")


def _shallow(part: Any) -> dict[str, Any]:
    return {each.name: getattr(part, each.name) for each in dataclasses.fields(part)}


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _one(hint: Any, figure: Figure, name: str, told: Sequence[Mapping[str, Any]]) -> Any:
    values = [part[name] for part in told]
    inner = class_within(hint)
    if typing.get_origin(hint) in (dict, Mapping):
        keys = dict.fromkeys(key for value in values for key in value)
        of_key = {key: [{"": value[key]} for value in values if key in value] for key in keys}
        of_value = typing.get_args(hint)[1]
        return {key: _one(of_value, figure, "", held) for key, held in of_key.items()}
    if inner is not None and _is_one(hint, inner):
        return total(inner, values) if values else None
    if figure.adds.startswith("weighed by "):
        weights = [part.get(figure.adds.removeprefix("weighed by ")) or 0 for part in told]
        weight = sum(weights)
        return sum(value * each for value, each in zip(values, weights, strict=True)) / weight if weight else None
    if not values:  # 0, "" or False, or None where that is allowed
        return hint() if hint in (int, float, str, bool) else () if typing.get_origin(hint) is tuple else None
    return HOW[figure.adds](values)


def _sum(values: Sequence[Any]) -> Any:
    """Of tuples place by place: a shorter one has nothing at the end."""
    if any(isinstance(value, list | tuple) for value in values):
        longest = max(map(len, values))
        return tuple(sum(value[at] for value in values if at < len(value)) for at in range(longest))
    return sum(values)


HOW: Final[Mapping[str, Callable[[Sequence[Any]], Any]]] = {
    "sum": _sum,
    "max": lambda values: max(values, default=None),
    "min": lambda values: min(values, default=None),
    "all": lambda values: bool(values) and all(values),
    "any": lambda values: next((value for value in values if value), values[0] if values else None),
    "last": lambda values: values[0] if values else None,
    "join": lambda values: [each for value in values for each in value],
}
"""By what `Figure.adds` says: values of parts, as one."""


# ------------------------------------------------------------------------------------------------------------ durations

BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Seconds: upper ends of the buckets of a duration; one more has no end."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of one kind."""

    seconds: Annotated[float, adding("sum")]
    """In all."""
    counts: Annotated[tuple[int, ...], adding("sum")]
    """In each bucket: up to each of `bounds`, and beyond."""

    @property
    def bounds(self) -> tuple[float, ...]:
        """Upper ends of the buckets, in seconds."""
        return BOUNDS

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.counts)


class Timings:
    """Durations by kind. One thread adds; any thread reads."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self._seconds = dict.fromkeys(kinds, 0.0)
        self._counts = {kind: [0] * (len(BOUNDS) + 1) for kind in self._seconds}

    def saw(self, kind: str, seconds: float) -> None:
        """Count a duration."""
        self._seconds[kind] += seconds
        self._counts[kind][bisect.bisect_left(BOUNDS, seconds)] += 1

    def saw_all(self, kind: str, seconds: NDArray[np.float64]) -> None:
        """Count many durations, [N]."""
        self._seconds[kind] += float(seconds.sum())
        found = np.bincount(np.searchsorted(BOUNDS, seconds), minlength=len(BOUNDS) + 1)
        self._counts[kind] = [mine + new for mine, new in zip(self._counts[kind], found.tolist(), strict=True)]

    def now(self) -> dict[str, Timing]:
        """What was counted so far."""
        return {kind: Timing(seconds, tuple(self._counts[kind])) for kind, seconds in self._seconds.items()}
