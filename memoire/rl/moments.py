"""Running mean and variance of observations and returns, merged from parts: the same on every collector.

A learner merges what its rollouts hold and publishes the result with its weights. Collectors only apply it, so that a
policy sees the same numbers everywhere. Nobody has to agree on the order of parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from memoire.errors import ParameterError, WrongModel

EPSILON: Final = 1e-8
"""Added to variances, so that a constant can be divided by its spread."""
CLIP: Final = 10.0
"""Largest size of a normalized number, in standard deviations."""
NAMES: Final = ("mean", "variance", "count")


class Moments:
    """Count, mean and variance of what was merged so far; before that mean 0 and variance 1.

    Args:
        shape: F, of one value.

    Attributes:
        mean, variance: float64 [*F].
        count: Values that were merged.
    """

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.mean: NDArray[np.float64] = np.zeros(shape)
        self.variance: NDArray[np.float64] = np.ones(shape)
        self.count = 0.0

    @classmethod
    def of(cls, values: NDArray[Any]) -> Self:
        """Those of values [N, *F]."""
        made = cls(values.shape[1:])
        if len(values):
            exact = np.asarray(values, np.float64)
            made.mean, made.variance, made.count = exact.mean(0), exact.var(0), float(len(exact))
        return made

    @classmethod
    def read(cls, arrays: Mapping[str, NDArray[Any]], prefix: str) -> Self | None:
        """Those [*F] among the arrays of a body, named "PREFIX.mean" and so on; None if they are not there.

        Raises:
            WrongModel: only some of them are there, or they do not fit each other.
        """
        found = {name: arrays[f"{prefix}.{name}"] for name in NAMES if f"{prefix}.{name}" in arrays}
        if not found:
            return None
        forms = {name: found[name].shape for name in found}
        if len(found) < len(NAMES) or forms["mean"] != forms["variance"] or forms["count"] != ():
            raise WrongModel("this model", f"has statistics of {prefix} as {forms}", "Publish mean, variance, count.")
        made = cls(forms["mean"])
        made.mean, made.variance = np.asarray(found["mean"], np.float64), np.asarray(found["variance"], np.float64)
        made.count = float(found["count"])
        return made

    def arrays(self, prefix: str) -> dict[str, NDArray[Any]]:
        """What `read` reads: float64 [*F], [*F] and []."""
        values = (self.mean, self.variance, np.float64(self.count))
        return {f"{prefix}.{name}": np.asarray(value) for name, value in zip(NAMES, values, strict=True)}

    def merge(self, other: Moments) -> None:
        """Take in what another one has seen.

        Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979.

        Raises:
            ParameterError: it is of values of another shape.
        """
        if other.mean.shape != self.mean.shape:
            raise ParameterError("other", f"shape {other.mean.shape}", f"of shape {self.mean.shape}")
        total = self.count + other.count
        if not other.count:
            return
        if not self.count:
            self.mean, self.variance, self.count = other.mean.copy(), other.variance.copy(), other.count
            return
        part, apart = other.count / total, other.mean - self.mean
        self.variance = self.variance + part * (other.variance - self.variance) + part * (1.0 - part) * apart**2
        self.mean, self.count = self.mean + part * apart, total

    def normalize(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """float32 [N, *F]: how many standard deviations values [N, *F] lie from the mean, at most `CLIP`."""
        spread = np.sqrt(self.variance + EPSILON).astype(np.float32)
        found = (np.asarray(values, np.float32) - self.mean.astype(np.float32)) / spread
        clipped: NDArray[np.float32] = np.clip(found, -CLIP, CLIP)
        return clipped

    def scale(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """float32 [N]: values [N] over their standard deviation, at most `CLIP`; the mean stays, and so does zero."""
        scaled = np.asarray(values, np.float32) / np.float32(np.sqrt(self.variance + EPSILON))
        clipped: NDArray[np.float32] = np.clip(scaled, -CLIP, CLIP)
        return clipped
