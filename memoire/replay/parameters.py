"""Parameters of sampling: one frozen value that is checked when made, sent unchanged and applied as a whole.

Server, clients and memories weight and cut samples alike if they hold equal `Parameters`. A change is a new value: no
field changes in place.

`StrictAttributes` rejects unknown attributes: setting one is usually an attempt to change a setting.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Protocol, Self, cast

import numpy as np

from memoire import _core
from memoire.arguments import checked_fields, explain_assignment_error, one_of, refuse_unknown, similar_names, whole
from memoire.errors import NotCopied, NotSettable, ParameterError, UnknownName

Start = Literal["skip", "repeat", "zero"]
Normalize = Literal["batch", "global"]
Compression = Literal["none", "zlib", "lz4", "auto"]
Prioritization = Literal["proportional", "rank", "greedy"]

STARTS = ("skip", "repeat", "zero")
NORMALIZATIONS = ("batch", "global")
COMPRESSIONS = ("none", "zlib", "lz4", "auto")
PRIORITIZATIONS = ("proportional", "rank", "greedy")
ADDED: Final = {"added": True}
"""Metadata of a field that older versions do not know: `field(default=0, metadata=ADDED)`. The field is sent and saved
only if it differs from the default, so that peers of both versions work together until then."""
MAX_STEPS = (1 << 16) - 1
"""Largest frame_stack and multi_step; a larger one is certainly a mistake."""
MAX_SAMPLES = 2.0**53
"""Largest samples_per_insert, and its tolerance: float64 counts up to this number exactly."""


class HasColumns(Protocol):
    """Protocol of a schema as `Parameters.check_for` reads it: names, reward column and each column's shape."""

    @property
    def names(self) -> Iterable[str]:
        """Names of all columns, in order."""

    @property
    def reward(self) -> str | None:
        """Name of the reward column."""

    def __getitem__(self, name: str, /) -> Any: ...


class SampleColumns(HasColumns, Protocol):
    """Protocol of a schema as `Parameters.content_settings` reads it."""

    @property
    def states(self) -> Sequence[str]:
        """Names of the state columns."""

    @property
    def value(self) -> str | None:
        """Name of the value column."""


@checked_fields
@explain_assignment_error("Write replace(NAME=...), or configure(NAME=...) of a buffer, server or reader.")
@dataclass(frozen=True)
class Parameters:
    """Settings of entries' weights, and of the samples cut from episodes.

    Example:
        parameters = memoire.Parameters(multi_step=3, discount=0.99)
        memory = memoire.Memory(schema, 1000, parameters)

    Raises:
        ParameterError: (a ValueError) a field is outside its range; it names the field, the value and the range.
    """

    priority_exponent: float = 0.6
    """alpha: weight = init_w * multiplier * priority ** alpha; 0 draws all entries alike. At least 0."""
    importance_exponent: float = 0.4
    """beta: importance = (population * probability) ** -beta; 1 corrects fully. In [0, 1]."""
    importance_final: float | None = None
    """beta after `importance_batches` batches, reached in equal steps; None keeps beta constant. In [0, 1]."""
    importance_batches: int = 0
    """Number of drawn batches after which beta is `importance_final`. At least 0."""
    prioritization: Prioritization = "proportional"
    """Probabilities in proportion to weights, or to rank ** -alpha ("rank"), or largest weights first ("greedy")."""
    stratified: bool = False
    """True to draw one sample from each of equally probable segments, as many as a draw has samples."""
    priority_epsilon: float = 1e-6
    """Number added to a learner's absolute TD errors, so that every entry can be drawn. At least 0."""
    mix_lambda: float = 1.0
    """lambda of the TD(lambda) return: 1 sums all rewards, 0 looks one step ahead. In [0, 1]."""
    frame_stack: int = 1
    """Consecutive states in a sample's window. At least 1."""
    multi_step: int = 1
    """Entries between a sample's newest state and its next state. At least 1."""
    sequence_length: int = 0
    """Entries of a sequence, for recurrent networks; 0 draws transitions. Needs multi_step 1."""
    sequence_overlap: int = 0
    """Entries that a sequence shares with the next one of its episode. Below sequence_length."""
    burn_in: int = 0
    """Entries at a sequence's start that only warm up a network's state, except at an episode's start. Below
    sequence_length."""
    sequence_max_share: float = 0.9
    """eta: a sequence's priority is eta * maximum + (1 - eta) * mean of its entries' errors. In [0, 1]."""
    sequence_first: tuple[str, ...] = ()
    """Plain columns of which a sequence has its first entry's value only, such as a network's recurrent state."""
    cache_size: int = 256
    """Samples in one cache. At least 1."""
    rollout_length: int = 0
    """Entries of a fragment if rollouts are stored: writers cut at this length; 0 sends whole episodes. At least 0."""
    max_episode: int = 0
    """Largest number of closed episodes in a memory; 0 is no limit."""
    reuse_cache: bool = False
    """True if a server draws from its caches with replacement; False draws each sample once."""
    discount: tuple[float, ...] = (0.99,)
    """gamma per reward dimension (flattened in C order); one number applies to all. Each in [0, 1]."""
    reward_coeff: tuple[float, ...] = (1.0,)
    """Share of each reward dimension in the priority; one number applies to all. At least 0."""
    start: Start = "skip"
    """Windows that begin before the first entry: "skip" (weight 0), "repeat" the first frame, or "zero" frames."""
    prev: tuple[str, ...] | None = None
    """Columns of a sample's window; None is all columns."""
    next: tuple[str, ...] | None = None
    """Columns of the entry `multi_step` later; None is the state columns."""
    samples_per_insert: float = 1.0
    """Samples that a client's writer pushes for each recorded entry; with a tolerance, also the target ratio of draws
    to inserts, then at least 2**-53. From 0 to 2**53; 0 pushes none."""
    samples_per_insert_tolerance: float | None = None
    """Samples by which draws may run ahead of inserts * samples_per_insert, or stay behind. Beyond it learners wait, or
    actors do. None limits neither. At least samples_per_insert, and 1; at most 2**53."""
    min_size: int = 0
    """Entries of all clients that must be drawable before the first draw. At least 0."""
    max_times_sampled: int = 0
    """Draws after which an entry weighs 0, also within one draw, and with reuse_cache of a held sample. 0: no limit."""
    max_age: float | None = None
    """Seconds after which an entry weighs 0 and its held samples are skipped. Above 0; None is no limit."""
    max_model_lag: int | None = None
    """Largest number of versions between an entry's model and the newest model. Older entries weigh 0, and their held
    samples are skipped. At least 0; None is no limit."""
    model_topic: str | None = None
    """Topic of the models that `max_model_lag` counts; None takes the highest version of all topics."""
    normalize: Normalize = "batch"
    """Divisor of the importance: the "batch"'s maximum, or the largest possible ("global")."""
    compression: Compression = "none"
    """Compression of caches' state columns in messages; "auto" uses lz4 while it shortens the transfer."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "priority_exponent", _real("priority_exponent", self.priority_exponent))
        put(self, "importance_exponent", _real("importance_exponent", self.importance_exponent, high=1.0))
        if self.importance_final is not None:
            put(self, "importance_final", _real("importance_final", self.importance_final, high=1.0))
        put(self, "importance_batches", whole("importance_batches", self.importance_batches, 0, (1 << 53) - 1))
        put(self, "prioritization", _one_of("prioritization", self.prioritization, PRIORITIZATIONS))
        put(self, "stratified", _truth("stratified", self.stratified))
        put(self, "priority_epsilon", _real("priority_epsilon", self.priority_epsilon))
        put(self, "mix_lambda", _real("mix_lambda", self.mix_lambda, high=1.0))
        put(self, "frame_stack", whole("frame_stack", self.frame_stack, 1, MAX_STEPS))
        put(self, "multi_step", whole("multi_step", self.multi_step, 1, MAX_STEPS))
        put(self, "sequence_length", whole("sequence_length", self.sequence_length, 0, MAX_STEPS))
        for name in ("sequence_overlap", "burn_in"):
            put(self, name, whole(name, getattr(self, name), 0, max(0, self.sequence_length - 1)))
        put(self, "sequence_max_share", _real("sequence_max_share", self.sequence_max_share, high=1.0))
        put(self, "sequence_first", _columns("sequence_first", self.sequence_first) or ())
        if self.sequence_length and self.multi_step != 1:
            raise ParameterError("multi_step", self.multi_step, "1 if sequences are drawn (sequence_length above 0)")
        put(self, "cache_size", whole("cache_size", self.cache_size, 1, (1 << 31) - 1))
        put(self, "rollout_length", whole("rollout_length", self.rollout_length, 0, (1 << 31) - 1))
        put(self, "max_episode", whole("max_episode", self.max_episode, 0, (1 << 62)))
        put(self, "reuse_cache", _truth("reuse_cache", self.reuse_cache))
        put(self, "discount", _reals("discount", self.discount, high=1.0))
        put(self, "reward_coeff", _reals("reward_coeff", self.reward_coeff))
        put(self, "start", _one_of("start", self.start, STARTS))
        put(self, "prev", _columns("prev", self.prev))
        put(self, "next", _columns("next", self.next))
        put(self, "samples_per_insert", _real("samples_per_insert", self.samples_per_insert))
        self._check_rates(put)
        put(self, "normalize", _one_of("normalize", self.normalize, NORMALIZATIONS))
        put(self, "compression", _one_of("compression", self.compression, COMPRESSIONS))

    def _check_rates(self, put: Callable[[Any, str, Any], None]) -> None:
        """Check the fields that limit the number of draws, alone and together."""
        put(self, "min_size", whole("min_size", self.min_size, 0, (1 << 53) - 1))
        put(self, "max_times_sampled", whole("max_times_sampled", self.max_times_sampled, 0, (1 << 32) - 1))
        if self.max_age is not None:
            put(self, "max_age", _real("max_age", self.max_age))
            if self.max_age == 0.0:
                raise ParameterError("max_age", self.max_age, "above 0, or None for no limit: 0 excludes every entry")
        if self.max_model_lag is not None:
            put(self, "max_model_lag", whole("max_model_lag", self.max_model_lag, 0, (1 << 53) - 1))
        if self.model_topic is not None and (
            type(self.model_topic) is not str or not 0 < len(self.model_topic) <= 256 or "\0" in self.model_topic
        ):
            raise ParameterError("model_topic", self.model_topic, "None or a topic of 1 to 256 characters")
        ratio = self.samples_per_insert
        if ratio > MAX_SAMPLES:
            raise ParameterError("samples_per_insert", ratio, f"at most {MAX_SAMPLES:g}: more cannot be counted")
        if 0 < self.max_times_sampled < ratio:
            expected = f"at most max_times_sampled, {self.max_times_sampled}: no entry may be drawn more often"
            raise ParameterError("samples_per_insert", ratio, expected)
        if self.samples_per_insert_tolerance is None:
            return
        tolerance = _real("samples_per_insert_tolerance", self.samples_per_insert_tolerance)
        put(self, "samples_per_insert_tolerance", tolerance)
        if ratio < 1.0 / MAX_SAMPLES:
            expected = f"at least {1.0 / MAX_SAMPLES:g} if a tolerance is set: no sample could be drawn otherwise"
            raise ParameterError("samples_per_insert", ratio, expected)
        if tolerance > MAX_SAMPLES:
            expected = f"at most {MAX_SAMPLES:g} (float64 counts no further), or None for no limit"
            raise ParameterError("samples_per_insert_tolerance", tolerance, expected)
        if tolerance < max(1.0, ratio):
            expected = f"at least {max(1.0, ratio):g}: one sample or one insert changes the surplus by that much"
            raise ParameterError("samples_per_insert_tolerance", tolerance, expected)

    def lag_in_words(self, newest: int) -> str:
        """Return the end of a sentence about entries that `max_model_lag` excludes; "" if it excludes none."""
        if self.max_model_lag is None or newest <= self.max_model_lag + 1:
            return ""
        return (
            f", and max_model_lag={self.max_model_lag} excludes entries of models before {newest - self.max_model_lag}"
        )

    def newest_model(self, versions: Mapping[str, int]) -> int:
        """Return the version that `max_model_lag` counts from, given each topic's newest version; 0 without topics."""
        if self.model_topic is not None:
            return versions.get(self.model_topic, 0)
        return max(versions.values(), default=0)

    def beta(self, batches: int) -> float:
        """Return the importance exponent after this many drawn batches. Schaul et al., ICLR 2016, section 3.4.

        The exponent is 0 for greedy draws: importance cannot correct for entries with probability 0.
        """
        if self.prioritization == "greedy":
            return 0.0
        if self.importance_final is None:
            return self.importance_exponent
        done = min(1.0, batches / self.importance_batches) if self.importance_batches else 1.0
        return self.importance_exponent + (self.importance_final - self.importance_exponent) * done

    def replace(self, **changes: Any) -> Parameters:
        """Return these parameters with some fields changed and checked. Raises UnknownName for an unknown field."""
        if not changes.keys() <= NAMES:
            refuse_unknown("Parameters", changes, NAMES)
        return dataclasses.replace(self, **changes)

    def check_for(self, schema: HasColumns) -> None:
        """Raise if a field does not fit `schema`: a vector of another length than the reward, or an unknown column.

        Raises:
            ParameterError: names the parameter, its value and what the schema allows.
        """
        size = reward_size(schema)
        for name in ("discount", "reward_coeff"):
            value = getattr(self, name)
            if len(value) not in (1, size):
                allowed = "1 number" if size == 1 else f"1 or {size} numbers, as the reward has {size} dimensions"
                raise ParameterError(name, value, allowed)
        known = tuple(schema.names)
        for name in ("prev", "next"):
            for column in getattr(self, name) or ():
                if column not in known:
                    raise ParameterError(name, getattr(self, name), f"columns of the schema ({', '.join(known)})")
        if not all(name in known and schema[name].role == "plain" for name in self.sequence_first):
            plain = ", ".join(name for name in known if schema[name].role == "plain")
            raise ParameterError("sequence_first", self.sequence_first, f"plain columns of the schema ({plain})")
        if self.sequence_length and any(name.partition(".")[0] == "mask" for name in known):
            raise ParameterError.with_text(
                "The schema has a column 'mask', a name that batches of sequences use. Rename the column."
            )

    def content_settings(self, schema: SampleColumns) -> dict[str, Any]:
        """Return the settings that determine samples of a memory of `schema`, by name, with defaults resolved. Two
        `Parameters` make equal samples of equal entries exactly if these are equal.
        """
        size = reward_size(schema)
        fields = {name: getattr(self, name) for name in _MAKING}
        fields["discount"] = self.discount if len(self.discount) > 1 else self.discount * size
        fields["prev"] = tuple(name for name in schema.names if self.prev is None or name in self.prev)
        if self.sequence_length:
            fields |= {name: getattr(self, name) for name in _MAKING_SEQUENCES}
        else:
            next = schema.states if self.next is None else self.next
            fields["next"] = tuple(name for name in schema.names if name in next)
        if self.frame_stack > 1:
            fields["start"] = self.start
        if schema.value is not None:  # returns depend on values, and priorities on returns
            fields["reward_coeff"] = self.reward_coeff if len(self.reward_coeff) > 1 else self.reward_coeff * size
            fields["mix_lambda"] = self.mix_lambda
        return fields

    def to_wire(self) -> dict[str, Any]:
        """Return a dictionary of numbers, strings, lists and None that msgpack and JSON carry, for `from_wire`."""
        return {name: list(value) if type(value) is tuple else value for name, value in self._wire_items}

    @functools.cached_property
    def _wire_items(self) -> list[tuple[str, Any]]:
        """Names and values for `to_wire`."""
        known = sorted(dataclasses.fields(self), key=lambda field: field.name)  # equal bytes in each process
        values = [(field, getattr(self, field.name)) for field in known]
        return [(field.name, value) for field, value in values if field.metadata != ADDED or value != field.default]

    @functools.cached_property
    def fingerprint(self) -> int:
        """64-bit hash, never 0, of the values that are not defaults. Equal parameters have equal hashes, also in a
        version of memoire with more fields.
        """
        default = Parameters().to_wire()
        changed = {name: value for name, value in self.to_wire().items() if value != default.get(name)}
        text = json.dumps(changed, sort_keys=True)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") or 1

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> Self:
        """Return the parameters of a dictionary of `to_wire`, from a file, a snapshot or a message. Fields that older
        versions do not have (`ADDED`) may be missing and get their default; all other fields are required.

        Raises:
            UnknownName: a field is unknown to this version, so its value would be ignored.
            ParameterError: a field is missing, or outside its range.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name, value in fields.items():
            if name not in known:
                raise UnknownName(
                    "Parameters", name, similar_names(name, known), tuple(known), _unknown(name, value, known)
                )
        for name, field in known.items():
            if name not in fields and field.metadata != ADDED:
                raise ParameterError.with_text(
                    f"The saved or sent settings lack {name}; they have {', '.join(sorted(fields)) or 'none'}."
                )
        return cls(**fields)


NAMES = frozenset(field.name for field in dataclasses.fields(Parameters))
"""Names of all fields."""

_MAKING = (
    "discount",
    "frame_stack",
    "multi_step",
    "prioritization",
    "priority_epsilon",
    "priority_exponent",
    "sequence_length",
)
_MAKING_SEQUENCES = ("sequence_overlap", "burn_in", "sequence_first", "sequence_max_share")


def differing_fields(schema: SampleColumns, first: Parameters, second: Parameters) -> dict[str, tuple[Any, Any]]:
    """Return fields that change samples: name -> (value in `first`, value in `second`). Empty if samples are equal."""
    one, two = first.content_settings(schema), second.content_settings(schema)
    names = {name for name in one.keys() | two.keys() if one.get(name) != two.get(name)}
    values = {name: (getattr(first, name), getattr(second, name)) for name in sorted(names)}
    return {name: pair for name, pair in values.items() if pair[0] != pair[1]}


def _unknown(name: str, value: object, known: Iterable[str]) -> str:
    """Return advice for a setting of another version."""
    alike = " or ".join(map(repr, similar_names(name, known)))
    advice = f"This version has {alike}. " if alike else ""
    return f"Another version of memoire saved or sent it, as {value!r:.80}. {advice}Use the same version at both ends."


def reward_size(schema: HasColumns) -> int:
    """Return the number of reward dimensions; 1 without a reward column."""
    if schema.reward is None:
        return 1
    return math.prod(schema[schema.reward].shape)


def _real(name: str, value: object, *, high: float = math.inf) -> float:
    """Return `value` as a finite float in [0, high]. Raises ParameterError, also for bools."""
    expected = "a finite number of at least 0" if high == math.inf else f"a number in [0, {high:g}]"
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ParameterError(name, value, expected)
    try:
        number = float(value)
    except OverflowError:
        raise ParameterError(name, f"a whole number of {int(value).bit_length()} bits", expected) from None
    if not math.isfinite(number) or not 0.0 <= number <= high:
        raise ParameterError(name, value, expected)
    return number


def _reals(name: str, value: object, *, high: float = math.inf) -> tuple[float, ...]:
    """Return a number, or a sequence or array of numbers, as a tuple of at least one finite float in [0, high]."""
    if isinstance(value, np.ndarray):
        value = value.ravel().tolist()
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        value = (value,)
    numbers = tuple(_real(name, each, high=high) for each in value)
    if not numbers:
        raise ParameterError(name, value, "one number, or one for each reward dimension")
    return numbers


def _truth(name: str, value: object) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise ParameterError(name, value, "True or False")
    return bool(value)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ParameterError(name, value, one_of(value, allowed))
    return value


def _columns(name: str, value: object) -> tuple[str, ...] | None:
    """Return names of columns as a tuple, or None. Raises ParameterError for repeated names."""
    expected = "None or a sequence of different column names"
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ParameterError(name, value, expected)
    names = tuple(cast("Iterable[str]", value))
    if not all(isinstance(each, str) for each in names) or len(set(names)) != len(names):
        raise ParameterError(name, value, expected)
    return names


class StrictAttributes(_core.Guarded):
    """Base class that rejects unknown public attributes once the constructor has called `_guard`.

    Attributes whose names begin with "_" are not checked.
    """

    _PARAMETERS: ClassVar[str] = ""
    """Sentence about how to change parameters of sampling, if the class has no `configure`."""
    _COPY: ClassVar[str] = ""
    """Sentence about the alternative to copying or pickling of an object that allows no copy."""
    _OWN_NAMES: ClassVar[Mapping[str, str]] = {}
    """The class's own names of parameters, by their names in `Parameters`."""
    _is_guarded = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._COPY:
            raise NotCopied(type(self).__name__, self._COPY)
        return super().__reduce_ex__(protocol)

    def _guard(self) -> None:
        """Reject unknown attributes from now on, but not those of a subclass outside of memoire."""
        self._is_guarded = type(self).__module__.partition(".")[0] == __name__.partition(".")[0]

    def _check_public(self, name: str) -> None:
        known = getattr(type(self), name, None)
        is_taken = not self._is_guarded or known is not None or name in getattr(self, "__dict__", ())
        if not is_taken or (isinstance(known, property) and known.fset is None):
            raise NotSettable(type(self).__name__, name, advice(type(self), name))


def never_copied(kind: str, instead: str) -> Callable[[Any], Any]:
    """Return the `__reduce__` of a class that cannot be copied, whose error says what to do instead."""

    def refuse(self: Any) -> Any:
        raise NotCopied(kind, instead)

    return refuse


def advice(kind: type[StrictAttributes], name: str) -> str:
    """Return advice on how to change a setting that was set as an attribute."""
    ways = _ways(kind)
    if name in ways:
        return ways[name]
    names = similar_names(name, ways)
    return f"Did you mean {names[0]}? {ways[names[0]]}" if names else "There is no setting of this name."


def _ways(kind: type[StrictAttributes]) -> dict[str, str]:
    """Return a sentence on how to change each setting of a class, by its name."""
    ways_of_constructor = {name: f"Pass it to the constructor: {kind.__name__}({name}=...)." for name in _named(kind)}
    has_configure = hasattr(kind, "configure")
    usual = "Write configure(NAME=...)." if has_configure else kind._PARAMETERS
    names = [kind._OWN_NAMES.get(name, name) for name in _named(Parameters)] if usual else []
    ways = ways_of_constructor | {name: usual.replace("NAME", name) for name in names}
    for call in ("configure", "configure_limits"):
        names_of_call = _named(getattr(kind, call)) if hasattr(kind, call) else []
        ways |= {name: f"Write {call}({name}=...)." for name in names_of_call if name not in ("self", "timeout")}
    return ways


def _named(call: Any) -> list[str]:
    """Return the names of a call's parameters."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [each.name for each in inspect.signature(call).parameters.values() if each.kind in kinds]


def check_size(parameters: Parameters, capacity: int) -> None:
    """Raise if `min_size` is above the capacity; capacity 0 means that it is unknown.

    Raises:
        ParameterError: no entry could ever be drawn.
    """
    if 0 < capacity < parameters.min_size:
        expected = f"at most the capacity, {capacity} entries: no entry could ever be drawn"
        raise ParameterError("min_size", parameters.min_size, expected)


def check_batch(parameters: Parameters, samples: int) -> None:
    """Raise if a batch of this size could never be drawn: recording would stop before enough entries exist.

    Raises:
        ParameterError: the tolerance is too small for the batch.
    """
    tolerance, ratio = parameters.samples_per_insert_tolerance, parameters.samples_per_insert
    if tolerance is not None and samples > 2.0 * tolerance - ratio:
        most = max(0, math.floor(2.0 * tolerance - ratio))
        expected = (
            f"at most {most} with samples_per_insert_tolerance {tolerance:g} and {ratio:g} samples per insert: actors "
            f"would wait before a larger batch could be drawn. Set a tolerance of at least {(samples + ratio) / 2:g}"
        )
        raise ParameterError("batch_size", samples, expected)
