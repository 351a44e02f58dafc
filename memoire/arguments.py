"""Checks of arguments and settings, whose errors name the argument, its value and the expected values.

- Checks of seconds, whole numbers, text and mappings.
- Suggestions for an unknown argument, setting, column or table. Suggestions compare spellings, and know the names that
  other libraries and papers use for the same thing.
- `Setting`, the declaration of a setting in a dataclass.
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

MAX_SECONDS = 1e9
"""Seconds, about 31 years: the timeout of a wait without a limit. A lock cannot wait much longer."""
MAX_SCALARS = 64
"""Names of figures that one client or learner may report at most."""


def seconds(timeout: float | None, default: float = MAX_SECONDS, name: str = "timeout") -> float:
    """Return the seconds of a timeout argument, from 0 to `MAX_SECONDS`; None means `default`.

    Raises:
        WrongType, ParameterError: The timeout is not a number.
    """
    if timeout is None:
        return min(default, MAX_SECONDS)
    try:
        duration = float(timeout)
    except (TypeError, ValueError, OverflowError):
        raise WrongType(name, "a number of seconds or None", _shown(timeout)) from None
    if math.isnan(duration):
        raise ParameterError(name, timeout, "a number of seconds or None")
    return min(max(duration, 0.0), MAX_SECONDS)


class Closes(Protocol):
    """Type of objects that have a method `close()`."""

    def close(self) -> object:
        """Release the resources of the object."""


class ClosingContext:
    """Base class of context managers: the end of the `with` block calls `close()`."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self: Closes, *_: object) -> None:
        self.close()


@contextmanager
def renamed(**names: str) -> Iterator[None]:
    """Translate parameter names in errors that the `with` block raises: `renamed(inner="outer")` reports "outer"."""
    try:
        yield
    except ParameterError as error:
        if isinstance(error, UnknownName) or error.sentence is not None or error.name not in names:
            raise
        raise ParameterError(names[error.name], error.value, error.expected) from None


def whole(name: str, value: Any, low: int, high: int = 2**62) -> int:
    """Return the value of an argument as an int.

    Raises:
        ParameterError: The value is not a whole number, or is outside of [low, high].
    """
    if type(value) is int and low <= value <= high:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
        raise ParameterError(name, value, f"a whole number from {low}" + (f" to {high}" if high < 2**62 else ""))
    return int(value)


MAX_VERSION = 2**53 - 1
"""Highest version of a model."""


def model_version(value: Any, name: str = "model_version") -> int:
    """Return the version of a model, from 1 to `MAX_VERSION`; 0 means that the version is unknown.

    Raises:
        ParameterError: The value is not a whole number, or is out of range.
    """
    return whole(name, value, 0, MAX_VERSION)


def finite(name: str, value: Any, low: float = -math.inf) -> float:
    """Return the value of an argument as a finite float of at least `low`.

    Raises:
        ParameterError: The value is not a number, not finite or below `low`.
    """
    is_number = isinstance(value, int | float) or (isinstance(value, numbers.Real) and hasattr(value, "dtype"))
    is_number = is_number and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < low:
        raise ParameterError(name, value, "a finite number" + (f" of at least {low:g}" if low > -math.inf else ""))
    return float(value)


def text(name: str, value: Any) -> str:
    """Return a text argument that UTF-8 can encode.

    UTF-8 cannot encode lone surrogates, which Python uses for undecodable file names.

    Raises:
        WrongType: The value is not a str.
        ParameterError: The value contains a lone surrogate.
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
"""Maximal number of characters in the name of a run or of a table."""


def is_name(value: str, most: int = MAX_NAME) -> bool:
    """Return True if text can be a name: 1 to `most` characters, all of them printable."""
    return 0 < len(value) <= most and value.isprintable()


def name(what: str, value: Any) -> str:
    """Return a name, such as the name of a run: printable text of 1 to 256 characters.

    Args:
        what: Name of the argument, for the error.

    Raises:
        ParameterError: The value is not such a name.
    """
    if not isinstance(value, str) or not is_name(value):
        raise ParameterError(
            what, value[:80] if isinstance(value, str) else value, f"printable text of 1 to {MAX_NAME} characters"
        )
    return value


def table_name(value: Any) -> str:
    """Return the name of a table, at most 256 characters; "" is the first table of a server.

    Raises:
        WrongType, ParameterError: The value is not such a name.
    """
    return "" if text("table", value) == "" else name("table", value)


NAME_OF_PROCESS = r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}"
"""Pattern for the name of a process. Log lines, labels and addresses contain the name without escapes."""


def process_name(value: Any, surroundings: Mapping[str, str] = os.environ) -> str:
    """Return the name that logs and pages show instead of the id of a client, reader or proxy; "" if it has no name.

    Args:
        value: Argument of the caller. None means $MEMOIRE_NAME, or else the name of the Pod in Kubernetes.

    Raises:
        ParameterError: The value does not match `NAME_OF_PROCESS`.
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
    """Return an argument that has to be a mapping, such as a dict.

    Raises:
        WrongType: The value is not a mapping.
    """
    if not isinstance(value, Mapping):
        raise WrongType(name, "a mapping from names", _shown(value))
    return value


def scalars(values: Any, present: Mapping[str, float]) -> dict[str, float]:
    """Return the figures `present` by name, updated with `values`.

    Values are finite numbers, names have at most 256 characters, and there are at most `MAX_SCALARS` figures.

    Raises:
        WrongType, ParameterError: A value or name is wrong; the error names the figure.
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


def explain_assignment_error(instead: str) -> Callable[[type[T]], type[T]]:
    """Decorate a frozen dataclass: assigning to a field raises an error that ends with `instead`.

    NAME in the sentence `instead` stands for the field. The decorator goes above that of the dataclass.
    """

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
"""Minimal share of equal characters in two similar names."""
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
"""memoire's names for the names that other libraries use, the likeliest first."""
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
"""Former names of arguments and settings, with the name of today, and advice if the name alone is not enough."""

_ALWAYS = "This is always on: memoire stores each observation once, also the last one of an episode."
_DRAW = "Give it to each draw: sample(batch_size) of a buffer, get_batch(batch_size) of a server."
_RATE = "Write samples_per_insert=, samples_per_insert_tolerance= and min_size= (docs/tables.md)."
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
    "remover": ("schema", "memoire always removes the oldest entries."),
    "save_only_last_obs": ("schema", _ALWAYS),
    "stack_compress": ("schema", _ALWAYS),
}
"""Advice by the names that other libraries use: a parameter of the calls that the advice fits, and the advice."""
_INSTEAD_OF_DRAWS = {
    "alpha": "Set it in the sampler: configure(sampler=memoire.Prioritized(alpha)).",
    "beta": "Set it in the sampler: memoire.Prioritized(0.6, beta=...), with memoire.Linear if it grows.",
    "gamma": "Set it in the memory: pass discount= when you create it, or change it with configure(discount=...).",
    "multi_step": "Set it in the memory: configure(multi_step=...).",
    "n_step": "Set it in the memory: configure(multi_step=...).",
}
"""Advice for arguments of calls that draw a batch, which have an argument `batch_size`."""


def similar_names(name: object, known: Iterable[str]) -> tuple[str, ...]:
    """Return known names that resemble an unknown name, the likeliest first."""
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


def unknown_advice(name: str, known: Collection[str]) -> str:
    """Return advice for an unknown argument, or "" if there is none."""
    if "batch_size" in known and name in _INSTEAD_OF_DRAWS:
        return _INSTEAD_OF_DRAWS[name]
    if list(known) == ["columns"]:
        return f"Give a mapping: Schema({{{name!r}: ...}})."
    needs, advice = FORMER.get(name) or INSTEAD.get(name.lower(), ("", ""))
    return advice if needs in known else ""


def hint(name: object, known: Iterable[str]) -> str:
    """Return " (did you mean ...?)" for an unknown name, or "" if no known name resembles it."""
    names = similar_names(name, known)
    return f" (did you mean {' or '.join(map(repr, names))}?)" if names else ""


def one_of(name: object, known: Iterable[str]) -> str:
    """Return the expected names as text, such as "one of 'skip', 'block' (did you mean 'skip'?)"."""
    names = list(known)
    return f"one of {', '.join(map(repr, names))}{hint(name, names)}"


def refuse_unknown(what: str, options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise UnknownName for the first name in `options` that `what` does not know."""
    names = tuple(sorted(known))
    for name in options:
        if name not in names:
            raise UnknownName(what, name, similar_names(name, names), names, unknown_advice(name, names))


def no_such_field_error(what: str, name: object, known: Iterable[str]) -> NoSuchField:
    """Return the error for a field that `what` does not have."""
    names = tuple(known)
    return NoSuchField(what, repr(name)[:80], similar_names(name, names), names)


def checked_names(
    also: Collection[str] | Callable[[Mapping[str, Any]], Collection[str]] = (), called: str = ""
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function: an unknown keyword argument raises UnknownName, with a suggestion.

    Args:
        also: Further keyword arguments beside those in the signature, or a function from the keywords to these names.
        called: Name of the function in the error; by default its own.
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
    """Decorate a dataclass: an unknown keyword argument raises UnknownName, with a suggestion."""
    setattr(kind, "__init__", checked_names(called=kind.__name__)(kind.__init__))  # noqa: B010  (not a plain method)
    return kind


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Bounds, unit and command-line form of a setting.

    A setting is a field of a dataclass with type `Annotated[type, Setting(...)]`, a default and a docstring. memoire
    makes from it the check of the keyword argument, the key in settings files, the environment variable, the flag and
    the row in docs/settings.md.
    """

    low: float = 0.0
    high: float = math.inf
    above: float | None = None
    """Number that the value has to exceed; None if `low` is the bound."""
    unit: Literal["", "s", "bytes"] = ""
    """Unit of the value. Bytes may also be given as text, such as 4GiB."""
    choices: tuple[str, ...] = ()
    show: str = ""
    """Placeholder of the value in `--help`, such as FILE."""
    flag: str = ""
    """Name of the flag if it differs from the setting's name, such as state-dir."""
    short: str = ""
    """Second flag of one letter, such as -f."""
    place: bool = False
    """True if the setting is a positional argument of the command."""
    several: Literal["", "append", "*", "+"] = ""
    """Form of a tuple: a flag with one value that may be repeated ("append"), with any number of values ("*"), or with
    at least one ("+")."""
    group: str = ""
    """Name of a group of settings. The command line may set at most one setting of a group."""
    needed: bool = False
    """True if the command line has to set one setting of the group."""


NUMBER = Setting()
SECONDS = Setting(unit="s", high=MAX_SECONDS)
BYTES = Setting(unit="bytes")


@dataclass(frozen=True)
class Declared:
    """Setting of a dataclass: its name, type, default and `Setting`."""

    name: str
    kind: Any
    """Type of the value, without None."""
    is_optional: bool
    default: Any
    is_required: bool
    setting: Setting
    owner: type[Any]

    @property
    def help(self) -> str:
        """Docstring of the field; "" if the source code is not available."""
        for kind in self.owner.__mro__:
            if text := _texts_in(kind.__module__).get(kind.__name__, {}).get(self.name):
                return text
        return ""

    def check(self, value: Any) -> None:
        """Raise ParameterError or WrongType if a value is not allowed for the setting."""
        bounds, kind = self.setting, self.kind
        if value is None and self.is_optional:
            return
        if bounds.choices:
            if value not in bounds.choices:
                raise ParameterError(self.name, value, one_of(value, bounds.choices))
        elif kind is int:
            low = -(2**63) if bounds.low == -math.inf else int(bounds.low)
            whole(self.name, value, low, 2**62 if bounds.high == math.inf else int(bounds.high))
        elif kind is float:
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if (
                not is_number
                or not bounds.low <= value <= bounds.high
                or (bounds.above is not None and value <= bounds.above)
            ):
                least = f" from {bounds.low:g}" if bounds.above is None else f" above {bounds.above:g}"
                least = "" if bounds.low == -math.inf else least
                most = "" if bounds.high == math.inf else f" to {bounds.high:g}"
                raise ParameterError(self.name, value, f"a finite number{least}{most}")
        elif kind is bool and not isinstance(value, bool):
            raise ParameterError(self.name, value, "True or False")


@functools.cache
def _texts_in(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of the fields of each class in a module, by class and field."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):
        return {}
    return {each.name: dict(_texts_of(each)) for each in ast.walk(tree) if isinstance(each, ast.ClassDef)}


def _texts_of(definition: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, text in itertools.pairwise(definition.body):
        is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if is_field and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            yield ast.unparse(field.target), " ".join(str(text.value.value).split())  # type: ignore[attr-defined]


@functools.cache
def declared(kind: type[Any]) -> dict[str, Declared]:
    """Return the settings that a dataclass declares, by name, in the order of its fields."""
    hints, settings = get_type_hints(kind, include_extras=True), {}
    for each in (one for one in fields(kind) if get_origin(hints[one.name]) is Annotated):
        hint, setting = get_args(hints[each.name])[:2]
        is_optional = NoneType in get_args(hint)
        one = next(one for one in get_args(hint) if one is not NoneType) if is_optional else hint
        default, is_required = (None, True) if each.default is MISSING else (each.default, False)
        settings[each.name] = Declared(each.name, one, is_optional, default, is_required, setting, kind)
    return settings


def check_settings(values: Any) -> None:
    """Raise ParameterError if a field of a dataclass has a value that its setting does not allow."""
    for each in declared(type(values)).values():  # type: ignore[arg-type]
        each.check(getattr(values, each.name))
