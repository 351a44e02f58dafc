"""What a learner chooses about sampling, and the importance that corrects for it.

A sampler is a frozen setting that becomes fields of `Parameters`; the drawing itself is the engine's. `importance` is
the one place where chances become the numbers that are multiplied into a loss.

What a forked process finds: copies of memories and generators, from a moment in which none was being changed.

    a process, seed 7          SeedSequence(7)
      first child              SeedSequence(7, spawn_key=(0,))
      second child             SeedSequence(7, spawn_key=(1,))
        its first child        SeedSequence(7, spawn_key=(1, 0))

So workers draw different batches, and the same ones in the next run of a program that forks in the same order.
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

from memoire.arguments import checked_fields, renamed, says_instead
from memoire.errors import ParameterError, WrongType

from .parameters import NORMALIZATIONS, Normalize, Parameters


class Sampler(Protocol):
    """Anything that says which `Parameters` it stands for."""

    def fields(self) -> dict[str, Any]:
        """Fields of `Parameters`, for its `replace`."""
        ...


USUAL = Parameters(start="repeat")
"""What a `Buffer`, a server and its tables follow if nothing is said."""
_SHORT = ("multi_step", "frame_stack", "start")
"""Fields that have a keyword of their own, whose None says nothing."""


def fields_of(sampler: Sampler | None) -> dict[str, Any]:
    """Fields of `Parameters` that a sampler stands for; none of None.

    Raises:
        WrongType: it is no sampler.
    """
    fields = {} if sampler is None else getattr(sampler, "fields", None)
    if fields is None or isinstance(sampler, type):
        raise WrongType("sampler", "one such as Prioritized(0.6) or Uniform()", repr(sampler)[:80])
    return dict(fields() if callable(fields) else fields)


def changes_of(sampler: Sampler | None, discount: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Parameters` as callers give them: what is given by name wins over the sampler's; a None leaves a
    number or `start` as it is.

    Raises:
        WrongType: the sampler is none.
    """
    changes = fields_of(sampler)
    if discount is not None:
        changes["discount"] = discount
    return changes | {name: value for name, value in fields.items() if value is not None or name not in _SHORT}


def chosen(
    parameters: Parameters | None, sampler: Sampler | None, discount: Any, fields: Mapping[str, Any]
) -> Parameters:
    """What a memory or table follows that was given these: `parameters`, or else the usual ones, with the changes.

    Raises:
        WrongType, ParameterError: one of them is none, or out of its range.
    """
    if not isinstance(parameters, Parameters | None):
        raise WrongType("parameters", "memoire.Parameters or None", type(parameters).__name__)
    return (parameters or USUAL).replace(**changes_of(sampler, discount, fields))


@checked_fields
@says_instead("Make another one: Linear(NAME=...).")
@dataclass(frozen=True)
class Linear:
    """A number that goes from `start` to `end` in equal steps, one for each batch that is drawn, and stays there."""

    start: float
    end: float
    batches: int
    """Batches until it is there. At least 0."""


@checked_fields
@says_instead("Make another one: Uniform(NAME=...).")
@dataclass(frozen=True)
class Uniform:
    """Every entry is as likely as any other (an `init_w` or an episode's multiplier still counts); importance is 1."""

    stratified: bool = False
    """One sample from each of as many segments of equal probability as a draw has samples."""

    def fields(self) -> dict[str, Any]:
        """Fields of `Parameters`, for its `replace`."""
        chances = _fields("proportional", 0.0, self.stratified)
        return chances | _correction(0.0, "batch")


@checked_fields
@says_instead("Make another one: Prioritized(NAME=...).")
@dataclass(frozen=True)
class Prioritized:
    """Entries are drawn in proportion to priority ** exponent. Schaul et al., ICLR 2016, section 3.3.

    Raises ParameterError when made with a field outside its range.
    """

    exponent: float = 0.6
    """alpha: 0 is uniform, 1 follows the priorities fully. At least 0."""
    beta: float | Linear = 0.4
    """How far importance corrects for the drawing: 1 fully; a number in [0, 1], or how it grows."""
    normalize: Normalize = "batch"
    """What importance is divided by: the "batch"'s maximum, or the largest possible ("global")."""
    stratified: bool = False
    """One sample from each of as many segments of equal probability as a draw has samples."""

    def __post_init__(self) -> None:
        with renamed(**_FIELD_NAMES):
            Parameters().replace(**self.fields())

    def fields(self) -> dict[str, Any]:
        """Fields of `Parameters`, for its `replace`."""
        chances = _fields("proportional", self.exponent, self.stratified)
        return chances | _correction(self.beta, self.normalize)


@checked_fields
@says_instead("Make another one: RankBased(NAME=...).")
@dataclass(frozen=True)
class RankBased:
    """Entries are drawn in proportion to rank ** -exponent, the rank being that of their weight among all entries.

    A few huge priorities change little here. Ranks are exact at each draw, and chances too: where the paper draws
    uniformly within segments whose ends it computes now and then, these segments are as the power law has them, for
    however many entries there are. Schaul et al., ICLR 2016, section 3.3 and appendix B.2.1.

    Each actor of a cluster ranks its own entries. Raises ParameterError when made with a field outside its range.
    """

    exponent: float = 0.7
    """alpha: 0 is uniform, 1 draws rank 1 twice as often as rank 2. At least 0."""
    beta: float | Linear = 0.5
    """How far importance corrects for the drawing: 1 fully; a number in [0, 1], or how it grows."""
    normalize: Normalize = "batch"
    """What importance is divided by: the "batch"'s maximum, or the largest possible ("global")."""
    stratified: bool = True
    """One sample from each of as many segments of equal probability as a draw has samples."""

    def __post_init__(self) -> None:
        with renamed(**_FIELD_NAMES):
            Parameters().replace(**self.fields())

    def fields(self) -> dict[str, Any]:
        """Fields of `Parameters`, for its `replace`."""
        chances = _fields("rank", self.exponent, self.stratified)
        return chances | _correction(self.beta, self.normalize)


@checked_fields
@says_instead("Make another one: Greedy(NAME=...).")
@dataclass(frozen=True)
class Greedy:
    """The entries with the largest weights, each once in a batch (where there are enough), new ones first; importance
    is 1.

    For comparison: noise keeps an entry on top, and what looked easy once is never seen again. Schaul et al., ICLR
    2016, section 3.2.
    """

    def fields(self) -> dict[str, Any]:
        """Fields of `Parameters`, for its `replace`."""
        return _fields("greedy", 1.0, False) | _correction(0.0, "batch")


class Annealing:
    """Counts the batches of whoever draws, and says each one's beta; begins anew when how beta goes is changed.

    Not thread-safe: the owner locks.
    """

    def __init__(self) -> None:
        self._course: tuple[float, float | None, int] | None = None
        self.batches = 0
        """Batches drawn on this course."""

    def state(self) -> dict[str, Any]:
        """How far it is: `course` and `batches`, as `go_on_from` takes them."""
        return {"course": self._course, "batches": self.batches}

    def go_on_from(self, course: Sequence[Any] | None, batches: int) -> None:
        """Continue a course: beta's begin, its end or None, the batches between them, and how many were drawn."""
        if course is not None:
            begin, end, length = course
            course = float(begin), None if end is None else float(end), int(length)
        self._course, self.batches = course, int(batches)

    def next(self, parameters: Parameters) -> float:
        """The importance exponent of the batch that is drawn now."""
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
"""What samplers call these fields of `Parameters`."""


def _fields(prioritization: str, exponent: float, stratified: bool) -> dict[str, Any]:
    return {"prioritization": prioritization, "priority_exponent": exponent, "stratified": stratified}


def _correction(beta: float | Linear, normalize: Normalize) -> dict[str, Any]:
    """How importance corrects; a constant beta also ends a former schedule."""
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
    """(population * probability) ** -beta over a divisor: what a loss is multiplied by.

    Schaul et al., Prioritized Experience Replay, ICLR 2016, section 3.4: P(i) = `probability`, N = `population`.

    Args:
        probability: Chance of each sample in one draw, [B] in (0, 1]. (A cluster's, times N_k / N_c: docs/sampling.md.)
        population: Entries that could have been drawn.
        beta: How far to correct, in [0, 1].
        normalize: "batch" divides by the batch's maximum; "global" by the largest importance there can be.
        smallest: "global": the least chance that any entry has.

    Returns:
        (importance, divisor): float32 [B] in (0, 1] ("global": up to rounding), and what it was divided by.

    Raises:
        ParameterError: a chance or the population is not above 0 or not finite, or `smallest` is missing.
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
        raise ParameterError("smallest", smallest, "the least chance of any entry, above 0")
    else:
        divisor = float((population * smallest) ** -beta)
    return (undivided / divisor).astype(np.float32), divisor


# Seeds, and copies in forked processes

_held_for_fork: list[Any] = []


class _Child(threading.local):
    """Which child of this process a thread is about to fork."""

    number = 0


_child = _Child()
_children = itertools.count()  # of this process
_path: tuple[int, ...] = ()  # this process among the children of the first one, then of its child, and so on


class ForkedCopy(Protocol):
    """An object that a forked process gets a copy of."""

    def held(self) -> Any:
        """A context in which no other thread changes it."""

    def reseed(self, seeds: np.random.SeedSequence) -> None:
        """Draw from now on by these seeds."""


_seeds: weakref.WeakKeyDictionary[ForkedCopy, tuple[np.random.SeedSequence, int]] = weakref.WeakKeyDictionary()
"""The seeds of each one in this process, and how long `_path` was when it got them."""


def seed_here(copied: ForkedCopy, seed: int | np.random.SeedSequence | None) -> None:
    """Have it draw by this seed, and its copies in processes that are forked from this one by seeds of their own.

    It is held while a process is forked, as long as it lives.

    Args:
        seed: None takes entropy from the system.
    """
    seeds = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
    _seeds[copied] = seeds, len(_path)
    copied.reseed(seeds)


class ForkedGenerator(np.random.Generator):
    """A `numpy.random.Generator` whose copy in a forked process draws other numbers: a child's, see above.

    Args:
        seed: As of `numpy.random.default_rng`; None takes entropy from the system.
    """

    def __init__(self, seed: int | np.random.SeedSequence | None = None) -> None:
        super().__init__(np.random.PCG64())
        seed_here(self, seed)

    def held(self) -> Any:
        """A context in which no other thread draws."""
        return self.bit_generator.lock

    def reseed(self, seeds: np.random.SeedSequence) -> None:
        """Draw from now on as `numpy.random.default_rng(seeds)`."""
        self.bit_generator.state = np.random.PCG64(seeds).state

    def __reduce__(self) -> Any:
        seeds = _seeds[self][0]
        return _copied, (type(self), seeds.entropy, seeds.spawn_key, self.bit_generator.state)


def _copied(kind: type[ForkedGenerator], entropy: Any, spawn_key: tuple[int, ...], state: Any) -> ForkedGenerator:
    """A generator out of its pickle or copy, which goes on where that one was."""
    made = kind(np.random.SeedSequence(entropy, spawn_key=spawn_key))
    made.bit_generator.state = state
    return made


def _before_fork() -> None:
    # A child gets a copy of everything from a moment in which nothing was being changed; and no lock that a thread
    # holds which the child does not have.
    _child.number = next(_children)
    # Memories first: a thread that holds one may draw from a generator, and none holds a generator and waits for one.
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
