"""Everything that shapes sampling, in one frozen value: checked when it is made, sent as it is, applied as a whole.

Server, clients and memories agree on how samples are weighed and cut by holding equal `Parameters`; a change is a new
value, never a field that moves under somebody's feet.

Attributes that nobody reads are refused: whoever sets one means a setting, which is changed in another way.
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
from memoire.arguments import checked_fields, meant, one_of, refuse_unknown, says_instead, whole
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
"""Metadata of a field that a former version does not know: `field(default=0, metadata=ADDED)`. It is sent and saved
only if it is set, so that peers of both versions work together until then."""
MAX_STEPS = (1 << 16) - 1
"""Largest frame_stack and multi_step: beyond it a batch of windows would be a mistake, not a wish."""
MAX_SAMPLES = 2.0**53
"""Largest number of samples for each insert, and tolerance: up to here float64 counts one by one."""


class HasColumns(Protocol):
    """What `Parameters.check_for` reads of a schema: its names, its reward column and each column's shape."""

    @property
    def names(self) -> Iterable[str]:
        """Names of the columns."""

    @property
    def reward(self) -> str | None:
        """Name of the reward column."""

    def __getitem__(self, name: str, /) -> Any: ...


class SampleColumns(HasColumns, Protocol):
    """What `Parameters.making` reads of a schema beside that."""

    @property
    def states(self) -> Sequence[str]:
        """Names of the state columns."""

    @property
    def value(self) -> str | None:
        """Name of the value column."""


@checked_fields
@says_instead("Write replace(NAME=...), or configure(NAME=...) of a buffer, server or reader.")
@dataclass(frozen=True)
class Parameters:
    """How entries are weighed, and how samples are cut out of episodes.

    Raises:
        ParameterError: (a ValueError) a field is outside its range; names the field, the value and what is allowed.
    """

    priority_exponent: float = 0.6
    """alpha: weight = init_w * multiplier * priority ** alpha; 0 draws all entries alike. At least 0."""
    importance_exponent: float = 0.4
    """beta: importance = (population * probability) ** -beta; 1 corrects fully. In [0, 1]."""
    importance_final: float | None = None
    """beta after `importance_batches` batches, reached in equal steps; None keeps it as it is. In [0, 1]."""
    importance_batches: int = 0
    """Batches that whoever draws has drawn when beta has become `importance_final`. At least 0."""
    prioritization: Prioritization = "proportional"
    """Chances in proportion to weights, to rank ** -alpha of the weight ("rank"), or the heaviest first ("greedy")."""
    stratified: bool = False
    """Whether the samples of one draw come from as many segments of equal probability, one each, or independently."""
    priority_epsilon: float = 1e-6
    """Added to a learner's absolute TD errors, so that nothing becomes unreachable. At least 0."""
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
    """Entries at a sequence's begin that only warm a network's state up, but where an episode begins. Below
    sequence_length."""
    sequence_max_share: float = 0.9
    """eta: a sequence's priority is eta * maximum + (1 - eta) * mean of its entries' errors. In [0, 1]."""
    sequence_first: tuple[str, ...] = ()
    """Plain columns of which a sequence has its first entry's value only: what a network needs to go on from there."""
    cache_size: int = 256
    """Samples in one cache. At least 1."""
    rollout_length: int = 0
    """Entries of a fragment where rollouts are stored: writers cut there; 0 ships whole episodes. At least 0."""
    max_episode: int = 0
    """Most closed episodes a memory keeps; 0 is no limit."""
    reuse_cache: bool = False
    """Whether a server draws from its caches with replacement, or each sample once."""
    discount: tuple[float, ...] = (0.99,)
    """gamma per reward dimension (flattened in C order); one number counts for all. Each in [0, 1]."""
    reward_coeff: tuple[float, ...] = (1.0,)
    """Share of each reward dimension in the priority; one number counts for all. At least 0."""
    start: Start = "skip"
    """Windows that reach before the first entry: "skip" (weight 0), "repeat" the first frame, or "zero" frames."""
    prev: tuple[str, ...] | None = None
    """Columns that come with a sample's window; None is all of them."""
    next: tuple[str, ...] | None = None
    """Columns that come of the entry `multi_step` later; None is the state columns."""
    samples_per_insert: float = 1.0
    """Samples that a client's writer pushes for each entry it records, and what drawing is held to where there is a
    tolerance: there at least 2**-53. From 0 to 2**53; 0 pushes none."""
    samples_per_insert_tolerance: float | None = None
    """Samples by which drawing may run ahead of inserts * samples_per_insert, or stay behind: beyond it learners wait,
    or actors do. None limits neither. At least samples_per_insert, and 1; at most 2**53."""
    min_size: int = 0
    """Entries that can be drawn, over all clients, before anything is. At least 0."""
    max_times_sampled: int = 0
    """Draws after which an entry weighs 0, also within one draw; of a held sample too, with reuse_cache. 0 is any."""
    max_age: float | None = None
    """Seconds after which an entry weighs 0, and a held sample is passed over. Above 0; None is any."""
    max_model_lag: int | None = None
    """Versions that the model which made an entry may be behind the newest; older entries weigh 0, and their held
    samples are passed over. At least 0; None is any."""
    model_topic: str | None = None
    """Topic of the models that `max_model_lag` counts; None is the highest version of all topics."""
    normalize: Normalize = "batch"
    """What importance is divided by: the "batch"'s maximum, or the largest possible ("global")."""
    compression: Compression = "none"
    """How caches pack their state columns on the wire; "auto": by lz4 while that brings them there sooner."""

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
            raise ParameterError("multi_step", self.multi_step, "1 where sequences are drawn (sequence_length)")
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
        """Fields that limit what is drawn and how often, and that they can be met together."""
        put(self, "min_size", whole("min_size", self.min_size, 0, (1 << 53) - 1))
        put(self, "max_times_sampled", whole("max_times_sampled", self.max_times_sampled, 0, (1 << 32) - 1))
        if self.max_age is not None:
            put(self, "max_age", _real("max_age", self.max_age))
            if self.max_age == 0.0:
                raise ParameterError("max_age", self.max_age, "above 0, or None for any: each entry would be too old")
        if self.max_model_lag is not None:
            put(self, "max_model_lag", whole("max_model_lag", self.max_model_lag, 0, (1 << 53) - 1))
        if self.model_topic is not None and (
            type(self.model_topic) is not str or not 0 < len(self.model_topic) <= 256 or "\0" in self.model_topic
        ):
            raise ParameterError("model_topic", self.model_topic, "a topic of 1 to 256 characters, or None")
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
            expected = f"above 0, at least {1.0 / MAX_SAMPLES:g}, where there is a tolerance: nothing could be drawn"
            raise ParameterError("samples_per_insert", ratio, expected)
        if tolerance > MAX_SAMPLES:
            expected = f"at most {MAX_SAMPLES:g}, or None for no limit: more cannot be counted"
            raise ParameterError("samples_per_insert_tolerance", tolerance, expected)
        if tolerance < max(1.0, ratio):
            expected = f"at least {max(1.0, ratio):g}, what one sample or one insert moves it by"
            raise ParameterError("samples_per_insert_tolerance", tolerance, expected)

    def lag_in_words(self, newest: int) -> str:
        """Which entries `max_model_lag` leaves out of draws, as the rest of a sentence; "" if it leaves out none."""
        if self.max_model_lag is None or newest <= self.max_model_lag + 1:
            return ""
        return (
            f", and max_model_lag={self.max_model_lag} leaves out those of models before {newest - self.max_model_lag}"
        )

    def newest_model(self, versions: Mapping[str, int]) -> int:
        """The version that `max_model_lag` counts from, of the newest versions of all topics; 0 where there is none."""
        if self.model_topic is not None:
            return versions.get(self.model_topic, 0)
        return max(versions.values(), default=0)

    def beta(self, batches: int) -> float:
        """The importance exponent of whoever has drawn this many batches. Schaul et al., ICLR 2016, section 3.4.

        0 where samples are chosen greedily: what has no chance cannot be corrected by it.
        """
        if self.prioritization == "greedy":
            return 0.0
        if self.importance_final is None:
            return self.importance_exponent
        done = min(1.0, batches / self.importance_batches) if self.importance_batches else 1.0
        return self.importance_exponent + (self.importance_final - self.importance_exponent) * done

    def replace(self, **changes: Any) -> Parameters:
        """These parameters with some fields changed, checked anew. Unknown names raise UnknownName."""
        if not changes.keys() <= NAMES:
            refuse_unknown("Parameters", changes, NAMES)
        return dataclasses.replace(self, **changes)

    def check_for(self, schema: HasColumns) -> None:
        """Refuse what fits no memory of `schema`: vectors of another length than the reward, columns it does not have.

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
            expected = "0 for a schema with a column 'mask': a batch of sequences has its own. Rename the column"
            raise ParameterError("sequence_length", self.sequence_length, expected)

    def making(self, schema: SampleColumns) -> dict[str, Any]:
        """What samples of a memory of `schema` are made with, by name: values and weights that are finished are those
        of these fields. Two `Parameters` make equal samples of equal entries exactly if this is equal.
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
        if schema.value is not None:  # returns, and priorities that follow from them
            fields["reward_coeff"] = self.reward_coeff if len(self.reward_coeff) > 1 else self.reward_coeff * size
            fields["mix_lambda"] = self.mix_lambda
        return fields

    def to_wire(self) -> dict[str, Any]:
        """A dictionary of plain numbers, strings, lists and None that msgpack and JSON carry; `from_wire` reads it."""
        return {name: list(value) if type(value) is tuple else value for name, value in self._told}

    @functools.cached_property
    def _told(self) -> list[tuple[str, Any]]:
        """Names and values that `to_wire` gives."""
        known = sorted(dataclasses.fields(self), key=lambda field: field.name)  # the same bytes in every process
        values = [(field, getattr(self, field.name)) for field in known]
        return [(field.name, value) for field, value in values if field.metadata != ADDED or value != field.default]

    @functools.cached_property
    def fingerprint(self) -> int:
        """64 bits, never 0, of the values that are not defaults: equal parameters have equal ones, also under another
        version of memoire that knows more fields.
        """
        default = Parameters().to_wire()
        told = {name: value for name, value in self.to_wire().items() if value != default.get(name)}
        text = json.dumps(told, sort_keys=True)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") or 1

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> Self:
        """Parameters from what `to_wire` made, in a file, a snapshot or a message. A setting that a former version did
        not have (`ADDED`) may be missing, and has its default then; no other one may.

        Raises:
            UnknownName: a setting has a name that this version does not know; its value would be a default.
            ParameterError: a field is missing, or outside its range.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name, value in fields.items():
            if name not in known:
                raise UnknownName("Parameters", name, meant(name, known), tuple(known), _unknown(name, value, known))
        for name, field in known.items():
            if name not in fields and field.metadata != ADDED:
                expected = (
                    f"among the settings that were saved or sent (they are {', '.join(sorted(fields)) or 'none'})"
                )
                raise ParameterError(name, "nothing", expected)
        return cls(**fields)


NAMES = frozenset(field.name for field in dataclasses.fields(Parameters))
"""What the fields are called."""

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


def differing(schema: SampleColumns, told: Parameters, made: Parameters) -> dict[str, tuple[Any, Any]]:
    """Fields that make samples otherwise: name -> (value in `told`, value in `made`). Empty if samples are equal."""
    mine, theirs = told.making(schema), made.making(schema)
    found = {name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)}
    values = {name: (getattr(told, name), getattr(made, name)) for name in sorted(found)}
    return {name: pair for name, pair in values.items() if pair[0] != pair[1]}


def _unknown(name: str, value: object, known: Iterable[str]) -> str:
    """What to do about a setting of another version."""
    alike = " or ".join(map(repr, meant(name, known)))
    advice = f"This version has {alike}. " if alike else ""
    return f"Another version of memoire saved or sent it, as {value!r:.80}. {advice}Use the same version at both ends."


def reward_size(schema: HasColumns) -> int:
    """Dimensions of the schema's reward; 1 where it has none."""
    if schema.reward is None:
        return 1
    return math.prod(schema[schema.reward].shape)


def _real(name: str, value: object, *, high: float = math.inf) -> float:
    """`value` as a finite float in [0, high]; bools are no numbers here."""
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
    """A number, or a sequence or array of them, as a tuple of at least one finite float in [0, high]."""
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
    """Names of columns as a tuple without repeats, or None."""
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
    """Takes no public attributes but its own, once its constructor has called `_guard`.

    Attributes whose names begin with "_" are not looked at.
    """

    _PARAMETERS: ClassVar[str] = ""
    """How parameters of sampling are changed, where `configure` is not the way: a sentence."""
    _COPY: ClassVar[str] = ""
    """What to do in place of copying or pickling one, where that is not possible: a sentence."""
    _OWN_NAMES: ClassVar[Mapping[str, str]] = {}
    """Parameters that it calls otherwise: the name here, and its own."""
    _is_guarded = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._COPY:
            raise NotCopied(type(self).__name__, self._COPY)
        return super().__reduce_ex__(protocol)

    def _guard(self) -> None:
        """From now on unknown attributes are refused, but those of a user's own subclass."""
        self._is_guarded = type(self).__module__.partition(".")[0] == __name__.partition(".")[0]

    def _check_public(self, name: str) -> None:
        known = getattr(type(self), name, None)
        is_taken = not self._is_guarded or known is not None or name in getattr(self, "__dict__", ())
        if not is_taken or (isinstance(known, property) and known.fset is None):
            raise NotSettable(type(self).__name__, name, advice(type(self), name))


def never_copied(kind: str, instead: str) -> Callable[[Any], Any]:
    """The `__reduce__` of a class that has reasons of its own."""

    def refuse(self: Any) -> Any:
        raise NotCopied(kind, instead)

    return refuse


def advice(kind: type[StrictAttributes], name: str) -> str:
    """What to write instead of setting an attribute."""
    ways = _ways(kind)
    if name in ways:
        return ways[name]
    found = meant(name, ways)
    return f"Did you mean {found[0]}? {ways[found[0]]}" if found else "There is no such setting."


def _ways(kind: type[StrictAttributes]) -> dict[str, str]:
    """How each setting of a class is changed."""
    made = {name: f"It is given when one is made: {kind.__name__}({name}=...)." for name in _named(kind)}
    has_configure = hasattr(kind, "configure")
    usual = "Write configure(NAME=...)." if has_configure else kind._PARAMETERS
    names = [kind._OWN_NAMES.get(name, name) for name in _named(Parameters)] if usual else []
    ways = made | {name: usual.replace("NAME", name) for name in names}
    for call in ("configure", "configure_limits"):
        found = _named(getattr(kind, call)) if hasattr(kind, call) else []
        ways |= {name: f"Write {call}({name}=...)." for name in found if name not in ("self", "timeout")}
    return ways


def _named(call: Any) -> list[str]:
    """Names of what a call may be given."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [each.name for each in inspect.signature(call).parameters.values() if each.kind in kinds]


def check_size(parameters: Parameters, capacity: int) -> None:
    """Refuse a least number of entries that there is no room for; capacity 0 is not known.

    Raises:
        ParameterError: nothing would ever be drawn.
    """
    if 0 < capacity < parameters.min_size:
        expected = f"at most the capacity, {capacity} entries: nothing would ever be drawn"
        raise ParameterError("min_size", parameters.min_size, expected)


def check_batch(parameters: Parameters, samples: int) -> None:
    """Refuse a batch size that would wait for ever: recording would stop before there are enough entries for it.

    Raises:
        ParameterError: the tolerance is too small for it.
    """
    tolerance, ratio = parameters.samples_per_insert_tolerance, parameters.samples_per_insert
    if tolerance is not None and samples > 2.0 * tolerance - ratio:
        most = max(0, math.floor(2.0 * tolerance - ratio))
        expected = (
            f"at most {most} with samples_per_insert_tolerance {tolerance:g} and {ratio:g} samples per insert: actors "
            f"would wait before a larger batch could be drawn. Set a tolerance of at least {(samples + ratio) / 2:g}"
        )
        raise ParameterError("batch_size", samples, expected)
