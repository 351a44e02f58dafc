"""Samplers, their importance, and the seeds of random draws.

A sampler is a frozen setting that becomes fields of `Parameters`; the engine draws. `importance` is the only function
that turns probabilities into the factors of a loss.

A forked process gets copies of memories and generators, taken while no thread changes them, with seeds of its own:

    a process, seed 7          SeedSequence(7)
      first child              SeedSequence(7, spawn_key=(0,))
      second child             SeedSequence(7, spawn_key=(1,))
        its first child        SeedSequence(7, spawn_key=(1, 0))

Forked workers draw different batches, and the same batches in the next run of a program that forks in the same order.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from memoire.arguments import checked_fields, explain_assignment_error, renamed
from memoire.errors import ParameterError, WrongType

from .parameters import NORMALIZATIONS, Normalize, Parameters


class Sampler(Protocol):
    """Protocol of samplers: an object that returns its fields of `Parameters`."""

    def fields(self) -> dict[str, Any]:
        """Return fields of `Parameters`, for its `replace`."""
        ...


USUAL = Parameters(start="repeat")
"""Default parameters of a `Buffer`, a server and its tables."""
_SHORT = ("multi_step", "frame_stack", "start")
"""Fields with a keyword of their own, whose None leaves them unchanged."""


def fields_of(sampler: Sampler | None) -> dict[str, Any]:
    """Return the fields of `Parameters` that a sampler sets; {} for None.

    Raises:
        WrongType: the argument is not a sampler.
    """
    fields = {} if sampler is None else getattr(sampler, "fields", None)
    if fields is None or isinstance(sampler, type):
        raise WrongType("sampler", "a sampler such as Prioritized(0.6) or Uniform()", repr(sampler)[:80])
    return dict(fields() if callable(fields) else fields)


def changes_of(sampler: Sampler | None, discount: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Parameters` to change: fields by name take precedence over the sampler's. None leaves
    discount, `multi_step`, `frame_stack` and `start` unchanged.

    Raises:
        WrongType: `sampler` is not a sampler.
    """
    changes = fields_of(sampler)
    if discount is not None:
        changes["discount"] = discount
    return changes | {name: value for name, value in fields.items() if value is not None or name not in _SHORT}


def resolve_parameters(
    parameters: Parameters | None, sampler: Sampler | None, discount: Any, fields: Mapping[str, Any]
) -> Parameters:
    """Return the parameters of a new memory or table: `parameters`, or the default ones, with the changes.

    Raises:
        WrongType, ParameterError: an argument has the wrong type, or is out of its range.
    """
    if not isinstance(parameters, Parameters | None):
        raise WrongType("parameters", "memoire.Parameters or None", type(parameters).__name__)
    return (parameters or USUAL).replace(**changes_of(sampler, discount, fields))


@checked_fields
@explain_assignment_error("Make another one: Linear(NAME=...).")
@dataclass(frozen=True)
class Linear:
    """A number that changes from `start` to `end` in equal steps, one per drawn batch, and then stays at `end`.

    Example:
        beta = memoire.Linear(0.4, 1.0, batches=10_000)
        buffer = memoire.Buffer(schema, capacity=1000, sampler=memoire.Prioritized(0.6, beta=beta))
    """

    start: float
    end: float
    batches: int
    """Batches until `end` is reached. At least 0."""


@checked_fields
@explain_assignment_error("Make another one: Uniform(NAME=...).")
@dataclass(frozen=True)
class Uniform:
    """Sampler with equal priorities: probabilities differ only by `init_w` and episode multipliers; importance is 1.

    Example:
        buffer = memoire.Buffer(schema, capacity=1000, sampler=memoire.Uniform())
    """

    stratified: bool = False
    """True to draw one sample from each of equally probable segments, as many as a draw has samples."""

    def fields(self) -> dict[str, Any]:
        """Return fields of `Parameters`, for its `replace`."""
        chances = _fields("proportional", 0.0, self.stratified)
        return chances | _correction(0.0, "batch")


@checked_fields
@explain_assignment_error("Make another one: Prioritized(NAME=...).")
@dataclass(frozen=True)
class Prioritized:
    """Sampler with probabilities in proportion to priority ** exponent. Schaul et al., ICLR 2016, section 3.3.

    Raises ParameterError when made with a field outside its range.

    Example:
        buffer = memoire.Buffer(schema, capacity=1000, sampler=memoire.Prioritized(0.6, beta=0.4))
    """

    exponent: float = 0.6
    """alpha: 0 is uniform, 1 follows the priorities fully. At least 0."""
    beta: float | Linear = 0.4
    """Strength of the importance correction in [0, 1]; 1 corrects fully. A `Linear` changes it over time."""
    normalize: Normalize = "batch"
    """Divisor of the importance: the "batch"'s maximum, or the largest possible ("global")."""
    stratified: bool = False
    """True to draw one sample from each of equally probable segments, as many as a draw has samples."""

    def __post_init__(self) -> None:
        with renamed(**_FIELD_NAMES):
            Parameters().replace(**self.fields())

    def fields(self) -> dict[str, Any]:
        """Return fields of `Parameters`, for its `replace`."""
        chances = _fields("proportional", self.exponent, self.stratified)
        return chances | _correction(self.beta, self.normalize)


@checked_fields
@explain_assignment_error("Make another one: RankBased(NAME=...).")
@dataclass(frozen=True)
class RankBased:
    """Sampler with probabilities in proportion to rank ** -exponent; entries are ranked by weight.

    Outliers among the priorities have little effect. Ranks and probabilities are exact at each draw. The paper draws
    uniformly within segments whose bounds it computes now and then; these segments follow the power law exactly, for
    any number of entries. Schaul et al., ICLR 2016, section 3.3 and appendix B.2.1.

    Each actor of a cluster ranks its own entries. Raises ParameterError when made with a field outside its range.

    Example:
        buffer = memoire.Buffer(schema, capacity=1000, sampler=memoire.RankBased(0.7))
    """

    exponent: float = 0.7
    """alpha: 0 is uniform, 1 draws rank 1 twice as often as rank 2. At least 0."""
    beta: float | Linear = 0.5
    """Strength of the importance correction in [0, 1]; 1 corrects fully. A `Linear` changes it over time."""
    normalize: Normalize = "batch"
    """Divisor of the importance: the "batch"'s maximum, or the largest possible ("global")."""
    stratified: bool = True
    """True to draw one sample from each of equally probable segments, as many as a draw has samples."""

    def __post_init__(self) -> None:
        with renamed(**_FIELD_NAMES):
            Parameters().replace(**self.fields())

    def fields(self) -> dict[str, Any]:
        """Return fields of `Parameters`, for its `replace`."""
        chances = _fields("rank", self.exponent, self.stratified)
        return chances | _correction(self.beta, self.normalize)


@checked_fields
@explain_assignment_error("Make another one: Greedy(NAME=...).")
@dataclass(frozen=True)
class Greedy:
    """Sampler of the largest weights, each once per batch if there are enough, new entries first; importance is 1.

    For comparison only: noise keeps an entry on top, and an entry with a low first error is never drawn again. Schaul
    et al., ICLR 2016, section 3.2.

    Example:
        buffer = memoire.Buffer(schema, capacity=1000, sampler=memoire.Greedy())
    """

    def fields(self) -> dict[str, Any]:
        """Return fields of `Parameters`, for its `replace`."""
        return _fields("greedy", 1.0, False) | _correction(0.0, "batch")


class Annealing:
    """Counter of drawn batches that returns the beta of each; it restarts if beta's schedule changes.

    Not thread-safe: the owner locks.
    """

    def __init__(self) -> None:
        self._course: tuple[float, float | None, int] | None = None
        self.batches = 0
        """Batches drawn on this schedule."""

    def state(self) -> dict[str, Any]:
        """Return the progress: `course` and `batches`, as `restore_state` takes them."""
        return {"course": self._course, "batches": self.batches}

    def restore_state(self, course: Sequence[Any] | None, batches: int) -> None:
        """Continue a schedule: beta's start, its end or None, the batches between, and the batches drawn so far."""
        if course is not None:
            begin, end, length = course
            course = float(begin), None if end is None else float(end), int(length)
        self._course, self.batches = course, int(batches)

    def next(self, parameters: Parameters) -> float:
        """Count a batch, and return its importance exponent."""
        course = (parameters.importance_exponent, parameters.importance_final, parameters.importance_batches)
        if course != self._course:
            self._course, self.batches = course, 0
        self.batches += 1
        return parameters.beta(self.batches - 1)


_FIELD_NAMES = {
    "priority_exponent": "exponent",
    "importance_exponent": "beta",
    "importance_final": "beta.end",
    "importance_batches": "beta.batches",
}
"""Samplers' names of these fields of `Parameters`."""


def _fields(prioritization: str, exponent: float, stratified: bool) -> dict[str, Any]:
    return {"prioritization": prioritization, "priority_exponent": exponent, "stratified": stratified}


def _correction(beta: float | Linear, normalize: Normalize) -> dict[str, Any]:
    """Return the fields of the importance correction; a constant beta also ends a former schedule."""
    grows = beta if isinstance(beta, Linear) else Linear(beta, beta, 0)
    return {
        "importance_exponent": grows.start,
        "importance_final": grows.end if isinstance(beta, Linear) else None,
        "importance_batches": grows.batches,
        "normalize": normalize,
    }


def importance(
    probability: ArrayLike,
    population: float,
    beta: float,
    normalize: Normalize = "batch",
    smallest: float | None = None,
) -> tuple[NDArray[np.float32], float]:
    """Return (population * probability) ** -beta over a divisor: the factor of each sample's loss.

    Schaul et al., Prioritized Experience Replay, ICLR 2016, section 3.4: P(i) = `probability`, N = `population`.

    Args:
        probability: Probability of each sample in one draw, [B] in (0, 1]. (In a cluster times N_k / N_c:
            docs/sampling.md.)
        population: Number of entries that can be drawn.
        beta: Strength of the correction, in [0, 1].
        normalize: "batch" divides by the batch's maximum; "global" by the largest possible importance.
        smallest: Smallest probability of any entry, for "global".

    Returns:
        (importance, divisor): float32 [B] in (0, 1] ("global": up to rounding), and the divisor.

    Raises:
        ParameterError: a probability or the population is not above 0 or not finite, or `smallest` is missing.
    """
    chances = np.asarray(probability, np.float64)
    if not (chances > 0.0).all() or not np.isfinite(chances).all():
        raise ParameterError("probability", chances, "above 0 and finite, for every sample")
    if not 0.0 < population < np.inf:
        raise ParameterError("population", population, "above 0 and finite")
    if normalize not in NORMALIZATIONS:
        raise ParameterError("normalize", normalize, "one of " + ", ".join(map(repr, NORMALIZATIONS)))
    undivided = (population * chances) ** -beta
    if normalize == "batch":
        divisor = float(undivided.max(initial=0.0)) or 1.0
    elif smallest is None or not 0.0 < smallest < np.inf:
        raise ParameterError("smallest", smallest, "the smallest probability of any entry, above 0")
    else:
        divisor = float((population * smallest) ** -beta)
    return (undivided / divisor).astype(np.float32), divisor


# Seeds, and copies in forked processes

_held_for_fork: list[Any] = []


class _Child(threading.local):
    """Number of the child that a thread is about to fork, among this process's children."""

    number = 0


_child = _Child()
_children = itertools.count()  # children of this process
_path: tuple[int, ...] = ()  # child numbers from the first process down to this one


class ForkedCopy(Protocol):
    """Protocol of objects that are copied when the process forks."""

    def held(self) -> Any:
        """Return a context in which no other thread changes the object."""

    def reseed(self, seeds: np.random.SeedSequence) -> None:
        """Restart the random numbers from these seeds."""


_seeds: weakref.WeakKeyDictionary[ForkedCopy, tuple[np.random.SeedSequence, int]] = weakref.WeakKeyDictionary()
"""Seeds of each object in this process, and the length of `_path` when it was seeded."""


def seed_here(copied: ForkedCopy, seed: int | np.random.SeedSequence | None) -> None:
    """Seed an object, and reseed its copies in forked processes with seeds of their own.

    The object is held during each fork of the process, as long as it lives.

    Args:
        seed: Seed of the random numbers; None takes entropy from the system.
    """
    seeds = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
    _seeds[copied] = seeds, len(_path)
    copied.reseed(seeds)


class ForkedGenerator(np.random.Generator):
    """A `numpy.random.Generator` whose copy in a forked process draws other numbers, by the child's seeds.

    Args:
        seed: Seed as of `numpy.random.default_rng`; None takes entropy from the system.
    """

    def __init__(self, seed: int | np.random.SeedSequence | None = None) -> None:
        super().__init__(np.random.PCG64())
        seed_here(self, seed)

    def held(self) -> Any:
        """Return a context in which no other thread draws."""
        return self.bit_generator.lock

    def reseed(self, seeds: np.random.SeedSequence) -> None:
        """Restart the random numbers as `numpy.random.default_rng(seeds)`."""
        self.bit_generator.state = np.random.PCG64(seeds).state

    def __reduce__(self) -> Any:
        seeds = _seeds[self][0]
        return _copied, (type(self), seeds.entropy, seeds.spawn_key, self.bit_generator.state)


def _copied(kind: type[ForkedGenerator], entropy: Any, spawn_key: tuple[int, ...], state: Any) -> ForkedGenerator:
    """Make a generator from its pickle or copy, in the same state."""
    generator = kind(np.random.SeedSequence(entropy, spawn_key=spawn_key))
    generator.bit_generator.state = state
    return generator


def _before_fork() -> None:
    # The child copies all memory while nothing is being changed, and no lock is held by a thread that the child lacks.
    _child.number = next(_children)
    # Memories come first: a thread that holds a memory may draw from a generator; no thread does the opposite.
    for copied in sorted(_seeds, key=lambda each: isinstance(each, ForkedGenerator)):
        moment = copied.held()
        moment.__enter__()
        _held_for_fork.append(moment)


def _after_fork() -> None:
    while _held_for_fork:
        _held_for_fork.pop().__exit__(None, None, None)


def _after_in_child() -> None:
    global _children, _path
    _after_fork()
    _children, _path = itertools.count(), (*_path, _child.number)
    for copied, (seeds, length) in list(_seeds.items()):
        copied.reseed(np.random.SeedSequence(seeds.entropy, spawn_key=(*seeds.spawn_key, *_path[length:])))


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_in_child)
