"""What a learner chooses about sampling, and the importance that corrects for it.

A sampler is a frozen setting that becomes fields of `Parameters`; the drawing itself is the engine's. `importance` is
the one place where chances become the numbers that are multiplied into a loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import ParameterError
from .parameters import NORMALIZATIONS, Normalize, Parameters


class Sampler(Protocol):
    """Anything that says which `Parameters` it stands for."""

    def fields(self) -> dict[str, Any]:
        """Fields of `Parameters`, for its `replace`."""
        ...


@dataclass(frozen=True)
class Uniform:
    """Every entry is as likely as any other (an `init_w` or an episode's multiplier still counts); importance is 1."""

    def fields(self) -> dict[str, Any]:
        """Fields of `Parameters`, for its `replace`."""
        return {"priority_exponent": 0.0, "importance_exponent": 0.0, "normalize": "batch"}


@dataclass(frozen=True)
class Prioritized:
    """Entries are drawn in proportion to priority ** exponent. Schaul et al., ICLR 2016, section 3.3.

    Raises ParameterError when made with a field outside its range.
    """

    exponent: float = 0.6
    """alpha: 0 is uniform, 1 follows the priorities fully. At least 0."""
    beta: float = 0.4
    """How far importance corrects for the drawing: 1 fully. In [0, 1]."""
    normalize: Normalize = "batch"
    """What importance is divided by: the "batch"'s maximum, or the largest possible ("global")."""

    def __post_init__(self) -> None:
        Parameters().replace(**self.fields())

    def fields(self) -> dict[str, Any]:
        """Fields of `Parameters`, for its `replace`."""
        return {
            "priority_exponent": self.exponent,
            "importance_exponent": self.beta,
            "normalize": self.normalize,
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
        probability: Chance of each sample in one draw, [B] in (0, 1]. (A cluster's, times N_k / N_c: DESIGN 4.)
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
