"""What callers may pass: seconds, whole numbers, text, mappings; each is refused with an error that names it.

Settings that never change say so when somebody sets one, and what to write instead.

The name that was meant: for an argument, setting, column or table that is called like none there is.

A name is compared with those that are known by its spelling, and with what other libraries and papers call the same.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import itertools
import math
import numbers
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from types import NoneType
from typing import Annotated, Any, Literal, ParamSpec, Protocol, Self, TypeVar, get_args, get_origin, get_type_hints

from .errors import NoSuchField, NotSettable, ParameterError, UnknownName, WrongType

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


class Closes(Protocol):
    """What can be closed."""

    def close(self) -> object:
        """Give back what it holds."""


class ClosingContext:
    """Is closed at the end of its `with` block."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self: Closes, *_: object) -> None:
        self.close()


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
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
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
    is_number = isinstance(value, int | float) or (isinstance(value, numbers.Real) and hasattr(value, "dtype"))
    is_number = is_number and not isinstance(value, bool)
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


T = TypeVar("T")


def says_instead(instead: str) -> Callable[[type[T]], type[T]]:
    """For a frozen dataclass, above its own decorator: a sentence for whoever sets a field; NAME in it is the field."""

    def decorate(kind: type[T]) -> type[T]:
        def refuse(self: Any, name: str, value: Any) -> None:
            raise NotSettable(kind.__name__, name, f"It never changes. {instead.replace('NAME', name)}")

        kind.__setattr__ = refuse  # type: ignore[method-assign]
        return kind

    return decorate


P = ParamSpec("P")
R = TypeVar("R")

MAX_SUGGESTIONS = 2
ALIKE = 0.6
"""Share of characters from which on two names are alike."""
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "act": ("action",),
    "add_batch_size": ("num_envs",),
    "address": ("url", "endpoint"),
    "alpha": ("exponent", "sampler"),
    "beta": ("importance_exponent", "sampler"),
    "bootstrap": ("bootstrap_value",),
    "buffer_num": ("num_envs",),
    "buffer_size": ("capacity", "client_capacity"),
    "cache_size": ("parameters",),
    "done": ("terminated", "discount"),
    "dones": ("terminated", "discount"),
    "endpoint": ("url", "front"),
    "env_dict": ("schema",),
    "eps": ("priority_epsilon",),
    "epsilon": ("priority_epsilon",),
    "error_buffer": ("samples_per_insert_tolerance",),
    "gae_lambda": ("mix_lambda",),
    "gamma": ("discount", "discount_factor"),
    "host": ("url", "endpoint"),
    "idxes": ("ids",),
    "importance_exponent": ("beta", "sampler"),
    "index": ("ids",),
    "indexes": ("ids",),
    "indices": ("ids",),
    "keys": ("ids",),
    "lam": ("mix_lambda",),
    "lambda_": ("mix_lambda",),
    "learning_starts": ("min_size",),
    "lmbda": ("mix_lambda",),
    "max_length": ("capacity",),
    "max_size": ("capacity", "client_capacity"),
    "max_step": ("client_capacity", "capacity"),
    "min_length": ("min_size",),
    "min_size_to_sample": ("min_size",),
    "n": ("batch_size",),
    "n_envs": ("num_envs",),
    "next_observation": ("next_obs", "next_state"),
    "next_observations": ("next_obs", "next_state"),
    "n_step": ("multi_step",),
    "n_steps": ("multi_step",),
    "nstep": ("multi_step",),
    "num_samples": ("batch_size",),
    "num_stack": ("frame_stack",),
    "observation": ("obs", "state"),
    "observations": ("obs", "state"),
    "port": ("endpoint", "url"),
    "prefetch": ("ahead",),
    "prefetch_size": ("ahead",),
    "priorities": ("td_errors",),
    "priority": ("td_errors",),
    "priority_exponent": ("exponent", "sampler"),
    "replay_burn_in": ("burn_in",),
    "replay_sequence_length": ("sequence_length",),
    "reuse_cache": ("parameters",),
    "rew": ("reward",),
    "sample_batch_size": ("batch_size",),
    "sample_sequence_length": ("sequence_length",),
    "samples_per_insert": ("parameters",),
    "seq_len": ("sequence_length",),
    "sequence_len": ("sequence_length",),
    "server_address": ("url",),
    "signature": ("schema",),
    "size": ("capacity", "batch_size"),
    "slice_len": ("sequence_length",),
    "stack_num": ("frame_stack",),
    "states": ("obs", "state"),
    "td_error": ("td_errors",),
    "terminal": ("terminated", "discount"),
    "total_size": ("capacity",),
    "training_intensity": ("samples_per_insert",),
    "weight": ("importance",),
    "weight_norm": ("normalize",),
    "weights": ("importance",),
}
"""What others call it: the name here, the likeliest first."""
FORMER: dict[str, tuple[str, str]] = {
    "discount_factor": ("discount", ""),
    "full": ("on_full", ""),
    "length": ("rollout_length", ""),
    "when_full": ("on_full", ""),
    "state_dir": ("state", "Write state=FOLDER, and what else there is of it in memoire.State(FOLDER, ...)."),
    "snapshot_caches": ("state", "Write state=memoire.State(FOLDER, snapshot_caches=...)."),
    "snapshot_every": ("state", "Write state=memoire.State(FOLDER, snapshot_every=...)."),
    "discard_mismatched": ("state", "Write state=memoire.State(FOLDER, discard_mismatched=...)."),
    "push_endpoint": ("endpoint", "Write memoire.Endpoints(ENDPOINT, push=...) in place of ENDPOINT."),
    "pub_endpoint": ("endpoint", "Write memoire.Endpoints(ENDPOINT, publish=...) in place of ENDPOINT."),
    "context": ("process", "Write process=memoire.Process(context=...)."),
    "clock": ("process", "Write process=memoire.Process(clock=...)."),
    "tune_process": ("process", "Write process=memoire.Process(tune=...)."),
}
"""What it was called here before: the name now, and what to write where that does not say it."""

_ALWAYS = "That is always on: each observation is stored once, also the last one of an episode."
_DRAW = "Give it to each draw: sample(batch_size) of a buffer, get_batch(batch_size) of a server."
_RATE = "Write samples_per_insert=, samples_per_insert_tolerance= and min_size= (docs/rate.md)."
_TORCH = "Write batch.to(device) for tensors, or memoire.torch.batches(source, batch_size, device=...)."
INSTEAD: dict[str, tuple[str, str]] = {
    "alpha": ("sampler", "Write sampler=memoire.Prioritized(alpha)."),
    "batch_size": ("schema", _DRAW),
    "beta": ("sampler", "Write sampler=memoire.Prioritized(0.6, beta=...)."),
    "device": ("schema", _TORCH),
    "handle_timeout_termination": ("schema", _ALWAYS),
    "mmap_prefix": ("capacity", "Write buffer.save(path), and later Buffer.load(path)."),
    "next_of": ("schema", _ALWAYS),
    "optimize_memory_usage": ("schema", _ALWAYS),
    "pin_memory": ("schema", _TORCH),
    "rate_limiter": ("schema", _RATE),
    "remover": ("schema", "There is no choice: the oldest entries leave."),
    "save_only_last_obs": ("schema", _ALWAYS),
    "stack_compress": ("schema", _ALWAYS),
}
"""What others call it: a parameter that whatever takes the advice has, and what to write instead."""
_INSTEAD_OF_DRAWS = {
    "alpha": "The sampler has it: configure(sampler=memoire.Prioritized(alpha)).",
    "beta": "The sampler has it: memoire.Prioritized(0.6, beta=...), and memoire.Linear where it grows.",
    "gamma": "The memory has it: give it as discount=, or change it with configure(discount=...).",
    "multi_step": "The memory has it: change it with configure(multi_step=...).",
    "n_step": "The memory has it: change it with configure(multi_step=...).",
}
"""The same for a draw, which is given a batch_size."""


def meant(name: object, known: Iterable[str]) -> tuple[str, ...]:
    """Those of the known names that somebody who wrote this one may have meant, the likeliest first."""
    if not isinstance(name, str):
        return ()
    names = list(known)
    plain = name.lstrip("-").replace("-", "_").lower()
    former = FORMER.get(plain, ("", ""))[0]
    usual = [each for each in names if former and each.lstrip("-").replace("-", "_") == former]
    usual = usual or [each for each in ELSEWHERE.get(name.lower(), ()) if each in names][:1]
    by_lower = {each.lower(): each for each in names}
    alike = difflib.get_close_matches(name.lower(), by_lower, MAX_SUGGESTIONS, ALIKE)
    return tuple(dict.fromkeys([*usual, *(by_lower[each] for each in alike)]))[:MAX_SUGGESTIONS]


def instead(name: str, known: Collection[str]) -> str:
    """What to write in place of an argument that there is none of here; "" where a name says it, or nobody can tell."""
    if "batch_size" in known and name in _INSTEAD_OF_DRAWS:
        return _INSTEAD_OF_DRAWS[name]
    if list(known) == ["columns"]:
        return f"Give a mapping: Schema({{{name!r}: ...}})."
    needs, advice = FORMER.get(name) or INSTEAD.get(name.lower(), ("", ""))
    return advice if needs in known else ""


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
            raise UnknownName(what, name, meant(name, names), names, instead(name, names))


def no_field(what: str, name: object, known: Iterable[str]) -> NoSuchField:
    """What to raise where `what` has nothing of this name."""
    names = tuple(known)
    return NoSuchField(what, repr(name)[:80], meant(name, names), names)


def checked_names(
    also: Collection[str] | Callable[[Mapping[str, Any]], Collection[str]] = (), called: str = ""
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function refuse an argument by a name that it does not have, and say which one was meant.

    Args:
        also: Names that it takes beside those in its signature; or what says them of the keywords that are given.
        called: What the error calls it; by default its own name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        usual = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        known = frozenset(each.name for each in signature.parameters.values() if each.kind in usual) - {"self", "cls"}
        what = called or function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def call(*arguments: P.args, **options: P.kwargs) -> R:
            if options and not options.keys() <= known:
                refuse_unknown(what, options, known.union(also(options) if callable(also) else also))
            return function(*arguments, **options)

        return call

    return decorate


def checked_fields(kind: type[T]) -> type[T]:
    """The same for a dataclass."""
    setattr(kind, "__init__", checked_names(called=kind.__name__)(kind.__init__))  # noqa: B010  (not a plain method)
    return kind


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a setting is beside its type and default, in the `Annotated` of a dataclass's field; the text below the
    field says what it means. From them follow the check of the keyword, the file of settings, the environment, the
    flag, and docs/settings.md.
    """

    low: float = 0.0
    high: float = math.inf
    above: float | None = None
    """What a number has to be above."""
    unit: Literal["", "s", "bytes"] = ""
    """Bytes may be said as text, such as 4GiB."""
    choices: tuple[str, ...] = ()
    show: str = ""
    """What stands for its value in the help: FILE."""
    flag: str = ""
    """Its name on the command line, where it is another one: state-dir."""
    short: str = ""
    """A second flag, of one letter: -f."""
    place: bool = False
    """Whether the command line has it by its place, without a flag."""
    several: Literal["", "append", "*", "+"] = ""
    """Of a tuple: the flag takes one value and may be repeated ("append"), or any number of values, or at least one."""
    group: str = ""
    """Of those with the same one, the command line has one at most."""
    needed: bool = False
    """Whether the command line has to have one of the group."""


NUMBER = Setting()
SECONDS = Setting(unit="s", high=FOR_EVER)
BYTES = Setting(unit="bytes")


@dataclass(frozen=True)
class Declared:
    """A setting as a class declares it."""

    name: str
    kind: Any
    """Its type, without None."""
    is_optional: bool
    default: Any
    is_required: bool
    setting: Setting
    owner: type[Any]

    @property
    def help(self) -> str:
        """The text below the field; "" where there is no source."""
        for kind in self.owner.__mro__:
            if text := _texts_in(kind.__module__).get(kind.__name__, {}).get(self.name):
                return text
        return ""

    def check(self, value: Any) -> None:
        """Refuse a value that is none of it. Raises ParameterError, WrongType."""
        said, kind = self.setting, self.kind
        if value is None and self.is_optional:
            return
        if said.choices:
            if value not in said.choices:
                raise ParameterError(self.name, value, one_of(value, said.choices))
        elif kind is int:
            low = -(2**63) if said.low == -math.inf else int(said.low)
            whole(self.name, value, low, 2**62 if said.high == math.inf else int(said.high))
        elif kind is float:
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or not said.low <= value <= said.high or (said.above is not None and value <= said.above):
                least = f" from {said.low:g}" if said.above is None else f" above {said.above:g}"
                least = "" if said.low == -math.inf else least
                most = "" if said.high == math.inf else f" to {said.high:g}"
                raise ParameterError(self.name, value, f"a finite number{least}{most}")
        elif kind is bool and not isinstance(value, bool):
            raise ParameterError(self.name, value, "True or False")


@functools.cache
def _texts_in(module: str) -> dict[str, dict[str, str]]:
    """The texts below the fields of each class of a module."""
    try:
        made = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):
        return {}
    return {each.name: dict(_texts_of(each)) for each in ast.walk(made) if isinstance(each, ast.ClassDef)}


def _texts_of(made: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, text in itertools.pairwise(made.body):
        is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if is_field and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            yield ast.unparse(field.target), " ".join(str(text.value.value).split())  # type: ignore[attr-defined]


@functools.cache
def declared(kind: type[Any]) -> dict[str, Declared]:
    """The settings that a dataclass declares, by name, in their order."""
    hints, found = get_type_hints(kind, include_extras=True), {}
    for each in (one for one in fields(kind) if get_origin(hints[one.name]) is Annotated):
        hint, said = get_args(hints[each.name])[:2]
        is_optional = NoneType in get_args(hint)
        one = next(one for one in get_args(hint) if one is not NoneType) if is_optional else hint
        default, is_required = (None, True) if each.default is MISSING else (each.default, False)
        found[each.name] = Declared(each.name, one, is_optional, default, is_required, said, kind)
    return found


def check_settings(values: Any) -> None:
    """Refuse a value that is none of its setting, in a dataclass that declares them. Raises ParameterError."""
    for each in declared(type(values)).values():  # type: ignore[arg-type]
        each.check(getattr(values, each.name))
