"""Figures: declarations of counters, gauges and histograms on the fields of stats, and rules to add them up.

    held_bytes: Annotated[int, gauge("held_bytes", "Size", "Bytes held by the table.", docs="tables.md")]
                │                   │             │       └ the sentence of a scrape, of docs/metrics.md and of pages
                │                   │             └ the title of columns on pages and in `memoire top`
                │                   └ the metric is memoire_held_bytes, its unit bytes
                └ the field of the stats, of /status and of the dashboard's API

A property with such a return type is a figure that is derived from other figures. `catalogue` lists all figures of a
class, also figures in dataclasses that its fields hold, and `total` adds up several objects of a class. Modules that an
actor loads import these names only for type checkers; `fields_of` evaluates their annotations at the first read of the
catalogue.

`Timings` counts durations by kind in buckets. Buckets are cheap to count, and those of many servers can be added up to
estimate quantiles.
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
"""Values of one label that a scrape shows at most, if users choose them (topics, scalars, tables), in order of name."""


@dataclass(frozen=True)
class Figure:
    """Declaration of a figure beside a field. `counter`, `gauge`, `histogram` and `shown` create it."""

    kind: Kind = ""
    name: str = ""
    """Name of the metric, without "memoire_" and "_total"; "" if a scrape does not show the figure."""
    title: str = ""
    help: str = ""
    """Description of the figure in sentences."""
    unit: str = ""
    """Unit: bytes, s, share, count, ago (for a point in time), or "" for a plain number."""
    formula: str = ""
    docs: str = ""
    """Page of docs/ that explains the figure."""
    adds: str = "sum"
    """Rule that combines the values of several tables, servers or lives: sum, max, min, all, any, join, last (the first
    known value), or "weighed by FIELD".
    """
    label: str = ""
    """Name of the label. The label's values are the keys of a mapping, the text of a field, or `part`."""
    part: str = ""
    """Value of the label for this field, if several fields together are one metric."""
    curve: bool = False
    """True if the dashboard records the figure over time."""
    of: str = ""
    """Scope: "cluster" marks a metric of a whole cluster, which replaces the metric of a single node."""

    def __call__(self, part: str, title: str = "", help_: str = "", **changes: Any) -> Figure:
        """Return the figure of a field that is one part of this metric."""
        return replace(self, part=part, title=title or part.capitalize(), help=help_ or self.help, **changes)

    @property
    def full_name(self) -> str:
        """Name of the metric in a scrape."""
        return f"memoire_{self.name}" + "_total" * (self.kind == "counter")


def counter(name: str, title: str, help_: str, **more: Any) -> Figure:
    """Return the figure of a number that only grows while its process lives. `more` are fields of `Figure`."""
    return Figure("counter", name, title, help_, **{"unit": _unit(name)} | more)


def gauge(name: str, title: str, help_: str, **more: Any) -> Figure:
    """Return the figure of a number that rises and falls. `more` are fields of `Figure`."""
    return Figure("gauge", name, title, help_, **{"unit": _unit(name)} | more)


def histogram(name: str, title: str, help_: str, **more: Any) -> Figure:
    """Return the figure of durations in buckets: a `Timing`, or a mapping of several."""
    return Figure("histogram", name, title, help_, **{"unit": _unit(name)} | more)


def shown(title: str, help_: str, **more: Any) -> Figure:
    """Return a figure that pages and the API show, but no scrape."""
    return Figure("", "", title, help_, **more)


def adding(how: str) -> Figure:
    """Return the rule to add up a field that neither pages nor scrapes show."""
    return Figure(adds=how)


UPTIME: Final = Figure("gauge", "uptime_seconds", "Up for", "Seconds since the node was started.", "s", adds="min")
FAULTS: Final = Figure(
    "counter", "faults", "Faults",
    "Failed turns of the node's threads. Each fault is a bug of memoire; the node's log has the error.",
    docs="errors.md",
)  # fmt: skip
REFUSED: Final = Figure("counter", "refused", "Refused messages", "Messages that were refused, by code.", label="code")
DROPPED_REPLIES: Final = Figure(
    "counter", "dropped_replies", "Replies dropped",
    "Replies dropped because their connection had no room for too long. Clients ask again.",
)  # fmt: skip
MODEL_VERSION: Final = Figure(
    "gauge", "model_version", "Models", "Newest version of each topic.", label="topic", adds="max"
)
MODEL_BYTES: Final = Figure("gauge", "model_bytes", "Models kept", "Bytes of kept models.", "bytes")
HOLDER_BYTES: Final = Figure(
    "gauge", "holder_bytes", "Held for peers", "Bytes held for peers, by holder.", "bytes", label="holder"
)
BUDGET_BYTES: Final = Figure(
    "gauge", "budget_bytes", "Budget",
    "Bytes that all holders together may use, private shares included.", "bytes",
)  # fmt: skip


def _unit(name: str) -> str:
    return next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")


_UNITS: Final = {"_bytes": "bytes", "_seconds": "s", "_ratio": "share"}


@dataclass(frozen=True)
class Group:
    """Names and labels for the figures of a field that holds other objects."""

    label: str = ""
    """Label that distinguishes the objects of a mapping or tuple, or several labels separated by spaces."""
    key: str = ""
    """Fields of each object in a tuple that hold the values of the labels; "" for a mapping."""
    prefix: str = ""
    """Prefix of the names of the metrics."""
    words: tuple[str, str] = ("", "")
    """Words in the descriptions, and their replacement."""
    own: bool = False
    """True if only figures with a scope (`Figure.of`) of the objects themselves are shown."""


def by(label: str, key: str = "", *, own: bool = False) -> Group:
    """Return the group of a mapping of objects, or of a tuple of objects with the field `key`; `own` as in `Group`."""
    return Group(label, key, own=own)


def within(prefix: str, *words: str) -> Group:
    """Return the group of an object whose metrics get a prefix, and whose descriptions get other words."""
    return Group(prefix=prefix, words=typing.cast("tuple[str, str]", words or ("", "")))


@functools.cache
def fields_of(kind: type) -> Mapping[str, tuple[Any, tuple[Any, ...]]]:
    """Map each field, and each property that is a figure, to its type and the declarations beside the type."""
    names = {each.name for each in dataclasses.fields(kind)}
    hints = {name: hint for name, hint in _hints(kind).items() if name in names}
    for name in dir(kind):
        member = getattr(kind, name)
        if isinstance(member, property) and "Annotated" in str(member.fget.__annotations__.get("return", "")):
            hints[name] = _hints(member.fget)["return"]
    return {name: _parted(hint) for name, hint in hints.items()}


def _hints(of: Any) -> dict[str, Any]:
    return typing.get_type_hints(of, localns=_words(), include_extras=True)


@functools.cache
def _words() -> dict[str, Any]:
    """Return the names in declarations, for modules that import them only for type checkers."""
    makers = {each.__name__: each for each in (counter, gauge, histogram, shown, adding, by, within)}
    return makers | {name: each for name, each in globals().items() if isinstance(each, Figure)}


def _parted(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    if typing.get_origin(hint) is Annotated:
        return hint.__origin__, hint.__metadata__
    return hint, ()


@functools.cache
def figures_of(kind: type) -> Mapping[str, Figure]:
    """Return the figures of a class by field, without those of objects that its fields hold.

    The unit of a whole number is "count", if no other unit is declared.
    """
    figures: dict[str, Figure] = {}
    for name, (hint, declarations) in fields_of(kind).items():
        is_whole = int in (hint, *typing.get_args(hint)) and float not in typing.get_args(hint)
        for figure in [each for each in declarations if isinstance(each, Figure)][:1]:
            figures[name] = replace(figure, unit="count") if is_whole and not figure.unit else figure
    return figures


def figure_of(kind: type, name: str) -> Figure:
    """Return the figure of a field, to declare it for a field of another class."""
    return figures_of(kind)[name]


def class_within(hint: Any) -> type | None:
    """Return the dataclass in the type of a field, also inside a container; None if the field holds no dataclass."""
    for each in (hint, *typing.get_args(hint)):
        if isinstance(each, type) and dataclasses.is_dataclass(each):
            return each
        if each is not hint and isinstance(each, types.UnionType) and (inner := class_within(each)):
            return inner
    return None


# ------------------------------------------------------------------------------------------------------------ catalogue


@dataclass(frozen=True)
class MetricSource:
    """Path to the values of a metric in stats: fields, one inside the other, with the groups that label them."""

    figure: Figure
    path: tuple[tuple[str, Group], ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the metric's labels."""
        of_groups = tuple(label for _, group in self.path for label in group.label.split())
        return (*of_groups, self.figure.label) if self.figure.label else of_groups

    def values(self, stats: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Yield the current values in an object of stats: the values of the labels, and a number or `Timing`."""
        yield from self._values(stats, 0, ())

    def _values(self, value: Any, depth: int, labels: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        if value is None:
            return
        if depth == len(self.path):
            yield from _leaves(self.figure, value, labels)
            return
        name, group = self.path[depth]
        inner = getattr(value, name)
        if inner is not None and group.label:
            for own, each in _labelled(group, inner)[:MAX_LABELS]:
                yield from self._values(each, depth + 1, (*labels, *own))
        else:
            yield from self._values(inner, depth + 1, labels)


def _labelled(group: Group, inner: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Return the objects of a mapping or tuple, each after the values of its labels."""
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
    """Return the number that a scrape shows: 1 for a text, the sum of durations in seconds, the length of a list."""
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
def catalogue(kind: type, of: str = "") -> Mapping[str, tuple[MetricSource, ...]]:
    """Map the name of each metric in a class to its sources, in the order of the fields; `of` as in `Figure`."""
    by_name: dict[str, list[MetricSource]] = {}
    for source in _sources(kind, (), Group(prefix=f"{of}_" if of else ""), of):
        by_name.setdefault(source.figure.name, []).append(source)
    for name, sources in by_name.items():
        assert len({(each.figure.kind, each.labels) for each in sources}) == 1, f"parts of {name} differ"
    return {name: tuple(sources) for name, sources in by_name.items()}


def _sources(kind: type, path: tuple[tuple[str, Group], ...], outer: Group, of: str) -> Iterator[MetricSource]:
    for name, (hint, declarations) in fields_of(kind).items():
        group = next((each for each in declarations if isinstance(each, Group)), Group())
        here = (*path, (name, group))
        figures = [each for each in declarations if isinstance(each, Figure) and each.name and each.of in ("", of)]
        for figure in [each for each in figures if each.of] or ([] if outer.own else figures):
            text = figure.help.replace(*outer.words) if outer.words[0] else figure.help
            yield MetricSource(replace(figure, name=outer.prefix + figure.name, help=text), here)
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
    """Combine several objects of a class, or mappings decoded from their JSON, into one: each field by its rule.

    A part from an older version may lack a field and then adds nothing to it. A field that all parts lack has its
    default.
    """
    return kind(**summed_fields(kind, parts))


def summed_fields(kind: type, parts: Iterable[Any]) -> dict[str, Any]:
    """Return the fields of `total` by name."""
    known = [part if isinstance(part, Mapping) else _shallow(part) for part in parts]
    declared = figures_of(kind)
    combined: dict[str, Any] = {}
    for each in dataclasses.fields(kind):
        hint = fields_of(kind)[each.name][0]
        having = [part for part in known if part.get(each.name) is not None]
        if having or not _has_default(each):
            combined[each.name] = _combine(hint, declared.get(each.name, _FIRST), each.name, having)
    return combined


_FIRST: Final = Figure(adds="last")


def _shallow(part: Any) -> dict[str, Any]:
    return {each.name: getattr(part, each.name) for each in dataclasses.fields(part)}


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _combine(hint: Any, figure: Figure, name: str, parts: Sequence[Mapping[str, Any]]) -> Any:
    values = [part[name] for part in parts]
    inner = class_within(hint)
    if typing.get_origin(hint) in (dict, Mapping):
        keys = dict.fromkeys(key for value in values for key in value)
        of_key = {key: [{"": value[key]} for value in values if key in value] for key in keys}
        of_value = typing.get_args(hint)[1]
        return {key: _combine(of_value, figure, "", held) for key, held in of_key.items()}
    if inner is not None and _is_one(hint, inner):
        return total(inner, values) if values else None
    if figure.adds.startswith("weighed by "):
        weights = [part.get(figure.adds.removeprefix("weighed by ")) or 0 for part in parts]
        weight = sum(weights)
        return sum(value * each for value, each in zip(values, weights, strict=True)) / weight if weight else None
    if not values:  # the value is 0, "", False, or an allowed None
        return hint() if hint in (int, float, str, bool) else () if typing.get_origin(hint) is tuple else None
    return HOW[figure.adds](values)


def _sum(values: Sequence[Any]) -> Any:
    """Add numbers, or add tuples element by element; a shorter tuple counts as if it ended with zeros."""
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
"""Functions that combine the values of parts, by `Figure.adds`."""


# ------------------------------------------------------------------------------------------------------------ durations

BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper bounds of the buckets of durations, in seconds; a further bucket has no bound."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Sum and histogram of the durations of one kind."""

    seconds: Annotated[float, adding("sum")]
    """Sum of all durations, in seconds."""
    counts: Annotated[tuple[int, ...], adding("sum")]
    """Number of durations in each bucket: up to each of `bounds`, and above the last."""

    @property
    def bounds(self) -> tuple[float, ...]:
        """Upper bounds of the buckets, in seconds."""
        return BOUNDS

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self.counts)


class Timings:
    """Counters of durations by kind. One thread adds; any thread reads."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self._seconds = dict.fromkeys(kinds, 0.0)
        self._counts = {kind: [0] * (len(BOUNDS) + 1) for kind in self._seconds}

    def record(self, kind: str, seconds: float) -> None:
        """Count a duration."""
        self._seconds[kind] += seconds
        self._counts[kind][bisect.bisect_left(BOUNDS, seconds)] += 1

    def record_many(self, kind: str, seconds: NDArray[np.float64]) -> None:
        """Count many durations, [N]."""
        self._seconds[kind] += float(seconds.sum())
        new_counts = np.bincount(np.searchsorted(BOUNDS, seconds), minlength=len(BOUNDS) + 1)
        self._counts[kind] = [old + new for old, new in zip(self._counts[kind], new_counts.tolist(), strict=True)]

    def durations(self) -> dict[str, Timing]:
        """Return the durations counted so far, by kind."""
        return {kind: Timing(seconds, tuple(self._counts[kind])) for kind, seconds in self._seconds.items()}
