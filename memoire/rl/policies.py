"""Policy protocols, a NumPy perceptron that loads published models, and running moments. Needs no torch.

A body that `MlpPolicy` loads has these arrays, L layers of weights [outputs, inputs] and biases [outputs] each:

    policy.0.weight policy.0.bias ... policy.L-1.*    observation to logits, or to the means of a Gaussian
    value.0.weight  value.0.bias  ... value.L-1.*     observation to its value; may be left out
    log_std                                           [A] of a Gaussian: then actions are in a Box
    observations.mean .variance .count                how observations are normalized; may be left out

Between two layers is tanh. `memoire.rl.ActorCritic` publishes arrays of these names.

`policy_rows` says which columns of a table of rollouts a policy receives, and which it returns.

`Moments` are the running mean and variance of observations and returns. A learner merges the moments of its rollouts
and publishes them with its weights; collectors only apply them, so that a policy sees the same numbers everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from memoire import Schema
from memoire.building import ForkedGenerator, RowSchema
from memoire.errors import ParameterError, SchemaError, WrongModel

from . import weights
from .codec import leaves_of

DISCOUNTED: Final = "discounted"
"""Column for the discounted sum of an episode's rewards so far. Rewards are scaled by its standard deviation."""
VERSION: Final = "version"
"""Key of a policy's result that holds the version of the model that acted."""
KNOWN: Final = ("obs", "reward", "terminated", "truncated")
"""Columns that the environment returns."""
MEMORY: Final = "memory"
"""Column for the memory of a recurrent policy before an entry; zeros at the start of an episode."""


def rollout_schema(env: Any, extra: Mapping[str, Any] | None = None, *, discounted: bool = False) -> Schema:
    """Return the schema of a table that a `Collector` fills: the environment's columns, logp [] and `extra`.

    Args:
        env: An environment or vector environment, or another object with its two spaces.
        extra: More columns that the policy returns; "memory" holds the memory of a recurrent policy.
        discounted: Whether to store the discounted sums by which rewards are scaled.

    Raises:
        SchemaError: a column is called "version", by which policies return the model's version.
    """
    columns: dict[str, Any] = {"logp": np.float32} | dict(extra or {})
    schema = Schema.from_env(env, columns | ({DISCOUNTED: np.float32} if discounted else {}))
    made_by_policies(schema)
    return schema


def made_by_policies(schema: Schema) -> list[str]:
    """Return the columns that only the policy can fill: action, logp and further columns.

    Raises:
        SchemaError: a column is called "version", by which policies return the model's version.
    """
    if VERSION in schema.roots:
        raise SchemaError(f"column {VERSION!r}: policies return their model's version by this name. Choose another.")
    return [root for root in schema.roots if root not in (*KNOWN, schema.qvest, DISCOUNTED)]


def policy_rows(schema: Schema) -> tuple[RowSchema, RowSchema]:
    """Return the rows that a policy receives and those that it returns, for each entry of a table of this schema.

    A policy receives the observation and, if recurrent, its memory. The policy returns the memory of the next entry.
    """
    inputs = [root for root in ("obs", MEMORY) if root in schema.roots]
    return _rows(schema, inputs), _rows(schema, made_by_policies(schema))


def observations_of(inputs: RowSchema, columns: Mapping[str, Any]) -> Any:
    """Return the observations [B, *F] in a policy's input rows, nested as in the environment."""
    return inputs.nest("obs", {leaf: columns[leaf] for leaf in inputs.leaves("obs")})


def _rows(schema: Schema, roots: Sequence[str]) -> RowSchema:
    return RowSchema({root: schema.nest(root, {leaf: schema[leaf] for leaf in schema.leaves(root)}) for root in roots})


EPSILON: Final = 1e-8
"""Constant added to variances, so that a constant column can be divided by its standard deviation."""
CLIP: Final = 10.0
"""Largest absolute normalized value, in standard deviations."""
NAMES: Final = ("mean", "variance", "count")


class Moments:
    """Running count, mean and variance of the merged values. Without values the mean is 0 and the variance 1.

    Args:
        shape: Shape F of one value.

    Attributes:
        mean, variance: float64 [*F].
        count: Number of merged values.

    Example:
        moments = Moments((3,))
        moments.merge(Moments.from_values(observations))
        inputs = moments.normalize(observations)
    """

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.mean: NDArray[np.float64] = np.zeros(shape)
        self.variance: NDArray[np.float64] = np.ones(shape)
        self.count = 0.0

    @classmethod
    def from_values(cls, values: NDArray[Any]) -> Self:
        """Return the moments of values [N, *F]."""
        moments = cls(values.shape[1:])
        if len(values):
            exact = np.asarray(values, np.float64)
            moments.mean, moments.variance, moments.count = exact.mean(0), exact.var(0), float(len(exact))
        return moments

    @classmethod
    def read(cls, arrays: Mapping[str, NDArray[Any]], prefix: str) -> Self | None:
        """Return the moments among a body's arrays "PREFIX.mean", "PREFIX.variance" and "PREFIX.count", or None.

        Raises:
            WrongModel: an array is missing, or their shapes do not fit each other.
        """
        statistics = {name: arrays[f"{prefix}.{name}"] for name in NAMES if f"{prefix}.{name}" in arrays}
        if not statistics:
            return None
        forms = {name: statistics[name].shape for name in statistics}
        if len(statistics) < len(NAMES) or forms["mean"] != forms["variance"] or forms["count"] != ():
            raise WrongModel("this model", f"has statistics of {prefix}: {forms}", "Publish mean, variance, count.")
        moments = cls(forms["mean"])
        mean, variance = statistics["mean"], statistics["variance"]
        moments.mean, moments.variance = np.asarray(mean, np.float64), np.asarray(variance, np.float64)
        moments.count = float(statistics["count"])
        return moments

    def arrays(self, prefix: str) -> dict[str, NDArray[Any]]:
        """Return the arrays that `read` reads: float64 [*F], [*F] and []."""
        values = (self.mean, self.variance, np.float64(self.count))
        return {f"{prefix}.{name}": np.asarray(value) for name, value in zip(NAMES, values, strict=True)}

    def merge(self, other: Moments) -> None:
        """Merge the values of another `Moments` into these.

        Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979.

        Raises:
            ParameterError: the other values have another shape.
        """
        if other.mean.shape != self.mean.shape:
            raise ParameterError("other", f"shape {other.mean.shape}", f"of shape {self.mean.shape}")
        total = self.count + other.count
        if not other.count:
            return
        if not self.count:
            self.mean, self.variance, self.count = other.mean.copy(), other.variance.copy(), other.count
            return
        share, difference = other.count / total, other.mean - self.mean
        self.variance = self.variance + share * (other.variance - self.variance) + share * (1.0 - share) * difference**2
        self.mean, self.count = self.mean + share * difference, total

    def normalize(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """Return values [N, *F] in standard deviations from the mean: float32 [N, *F] in [-CLIP, CLIP]."""
        spread = np.sqrt(self.variance + EPSILON).astype(np.float32)
        deviations = (np.asarray(values, np.float32) - self.mean.astype(np.float32)) / spread
        clipped: NDArray[np.float32] = np.clip(deviations, -CLIP, CLIP)
        return clipped

    def scale(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """Return values [N] over their standard deviation: float32 [N] in [-CLIP, CLIP]. The mean is not subtracted."""
        scaled = np.asarray(values, np.float32) / np.float32(np.sqrt(self.variance + EPSILON))
        clipped: NDArray[np.float32] = np.clip(scaled, -CLIP, CLIP)
        return clipped


Float32Array = NDArray[np.float32]
Layers = list[tuple[Float32Array, Float32Array]]
TOPIC: Final = "policy"
"""Default topic of the models."""
ADVICE: Final = "Publish a memoire.rl.ActorCritic.mlp, or give the collector a policy of your own."
HALF_LOG_2PI: Final = 0.5 * math.log(2.0 * math.pi)


@runtime_checkable
class Policy(Protocol):
    """Policy of N environments at once."""

    def act(self, observations: Any) -> Mapping[str, Any]:
        """Act, and return columns [N, ...]: "action", its log probability "logp", other table columns, and "version".

        Most learners need "value". "version" is a number: the version of the model that acted. If the table has a
        column memory, the policy also receives `memory=` [N, *M], which is zero at the start of an episode, and returns
        the next memory by this name.

        Args:
            observations: [N, *F], or dicts and tuples of such arrays, as environments return them.
        """
        ...


@runtime_checkable
class AsyncPolicy(Protocol):
    """Policy that computes elsewhere, while its caller steps other environments."""

    def ask(self, observations: Any, *, min_version: int = 0) -> Any:
        """Return at once a handle whose `result(timeout)` waits for the columns of `act`, or raises MemoireTimeout.

        Args:
            observations: [N, *F]; `memory=` may follow, as in `Policy.act`.
            min_version: Lowest version of the model that may act.
        """
        ...


@runtime_checkable
class LoadsModels(Protocol):
    """Policy that acts by models which its caller fetches."""

    def load(self, body: bytes, version: int) -> None:
        """Act by this published model from now on. If it does not fit, raise WrongModel and keep the former one."""
        ...


class MlpPolicy:
    """Policy that samples actions from a perceptron with published weights.

    Args:
        body: A published model; None waits for `load`.
        version: Version of that model.
        seed: Seed of the samples; None takes entropy from the system.

    Attributes:
        version: Version of the model that acts; 0 before the first model.
    """

    def __init__(self, body: bytes | None = None, version: int = 0, *, seed: int | None = None) -> None:
        self.version = 0
        self._random = ForkedGenerator(seed)
        self._policy: Layers = []
        self._value: Layers = []
        self._log_std: Float32Array | None = None
        self._moments: Moments | None = None
        if body is not None:
            self.load(body, version)

    def load(self, body: bytes, version: int) -> None:
        """Act by this model from now on, with this version.

        Raises:
            WrongModel: arrays of the model are missing or do not fit each other; the former model stays.
        """
        arrays = weights.unpack(body, f"model version {version}")
        policy, value = _layers(arrays, "policy"), _layers(arrays, "value")
        log_std, moments = arrays.get("log_std"), Moments.read(arrays, "observations")
        _check(policy, value, log_std, moments)
        self._policy, self._value, self._moments = policy, value, moments
        self._log_std = None if log_std is None else np.asarray(log_std, np.float32)
        self.version = version

    def act(self, observations: Any, *, is_greedy: bool = False) -> dict[str, Any]:
        """Return the columns of `Policy` for observations [N, *F].

        "action" is int64 [N], or float32 [N, A] in a Box, not clipped to it. "logp" and "value" are float32 [N]; models
        without a value network give no "value".

        Args:
            is_greedy: Take the most probable action in place of a sample.

        Raises:
            ParameterError: no model was loaded, or the observations have another size.
        """
        inputs = self._inputs(observations)
        outputs = _forward(self._policy, inputs)
        draw = self._discrete if self._log_std is None else self._continuous
        action, logp = draw(outputs, is_greedy)
        columns: dict[str, Any] = {"action": action, "logp": logp, "version": self.version}
        if self._value:
            columns["value"] = _forward(self._value, inputs)[:, 0]
        return columns

    def _inputs(self, observations: Any) -> Float32Array:
        if not self._policy:
            raise ParameterError.with_text("The policy has no model yet: call policy.load(body, version) first.")
        inputs, size = flat(observations), self._policy[0][0].shape[1]
        if inputs.shape[1] != size:
            raise ParameterError.with_text(
                f"The observations have {inputs.shape[1]} numbers each; the model takes {size}."
            )
        return inputs if self._moments is None else self._moments.normalize(inputs)

    def _discrete(self, logits: Float32Array, is_greedy: bool) -> tuple[NDArray[np.int64], Float32Array]:
        shifted = logits - logits.max(1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        # The largest of logs plus Gumbel noise is a sample of the softmax.
        noise = 0.0 if is_greedy else self._random.gumbel(size=logs.shape)
        action: NDArray[np.int64] = (logs + noise).argmax(1)
        return action, logs[np.arange(len(action)), action]

    def _continuous(self, means: Float32Array, is_greedy: bool) -> tuple[Float32Array, Float32Array]:
        log_std = self._log_std
        assert log_std is not None
        noise = np.zeros_like(means) if is_greedy else self._random.standard_normal(means.shape, np.float32)
        logs = -0.5 * noise**2 - log_std - np.float32(HALF_LOG_2PI)
        return means + noise * np.exp(log_std), logs.sum(1, dtype=np.float32)


def flat(observations: Any) -> Float32Array:
    """Flatten observations [N, *F] to float32 [N, I]; the parts of dicts and tuples stand side by side, in order."""
    parts = [np.asarray(leaf) for leaf in leaves_of(observations)]
    rows = [np.ascontiguousarray(part.reshape(len(part), -1), np.float32) for part in parts]
    return rows[0] if len(rows) == 1 else np.concatenate(rows, 1)


def _forward(layers: Layers, inputs: Float32Array) -> Float32Array:
    """Pass inputs [N, I] through all layers; return outputs [N, O]. Tanh follows each layer but the last."""
    outputs = inputs
    for depth, (weight, bias) in enumerate(layers, start=1):
        outputs = outputs @ weight.T + bias
        if depth < len(layers):
            outputs = np.tanh(outputs)
    return outputs


def _layers(arrays: Mapping[str, NDArray[Any]], prefix: str) -> Layers:
    """Return (weight, bias) of each layer under a name; [] without layers. Raises WrongModel if shapes do not fit."""
    layers: Layers = []
    while (weight := arrays.get(f"{prefix}.{len(layers)}.weight")) is not None:
        bias = arrays.get(f"{prefix}.{len(layers)}.bias")
        inputs = layers[-1][0].shape[0] if layers else weight.shape[-1] if weight.ndim else 0
        if bias is None or weight.ndim != 2 or bias.shape != weight.shape[:1] or weight.shape[1] != inputs:
            problem = f"has layer {len(layers)} of {prefix!r} in shapes that do not fit"
            raise WrongModel("this model", problem, ADVICE)
        layers.append((np.asarray(weight, np.float32), np.asarray(bias, np.float32)))
    return layers


def _check(policy: Layers, value: Layers, log_std: NDArray[Any] | None, moments: Moments | None) -> None:
    """Raise WrongModel if the parts of a model do not fit each other."""
    problem = ""
    if not policy:
        problem = "has no 'policy.0.weight'"
    elif value and (value[0][0].shape[1] != policy[0][0].shape[1] or value[-1][0].shape[0] != 1):
        problem = "has a value network that does not fit its policy"
    elif log_std is not None and log_std.shape != policy[-1][1].shape:
        problem = f"has log_std of shape {log_std.shape} for {len(policy[-1][1])} means"
    elif moments is not None and moments.mean.shape != (policy[0][0].shape[1],):
        problem = f"has statistics of shape {moments.mean.shape} for {policy[0][0].shape[1]} inputs"
    if problem:
        raise WrongModel("this model", problem, ADVICE)
