"""What acts: a small protocol, and a perceptron in NumPy that loads what a learner publishes. No torch here.

A body that `MlpPolicy` loads has these arrays, L layers of weights [outputs, inputs] and biases [outputs] each:

    policy.0.weight policy.0.bias ... policy.L-1.*    observation to logits, or to the means of a Gaussian
    value.0.weight  value.0.bias  ... value.L-1.*     observation to its value; may be left out
    log_std                                           [A] of a Gaussian: then actions are in a Box
    observations.mean .variance .count                how observations are normalized; may be left out

Between two layers is tanh. `memoire.rl.ActorCritic` has just these names.

What is in a table of rollouts, and which of it a policy is given and returns.

Running mean and variance of observations and returns, merged from parts: the same on every collector.

A learner merges what its rollouts hold and publishes the result with its weights. Collectors only apply it, so that a
policy sees the same numbers everywhere. Nobody has to agree on the order of parts.
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
"""Column for the discounted sum of an episode's rewards so far: rewards are scaled by its spread."""
VERSION: Final = "version"
"""What policies call the version of the model that acted."""
KNOWN: Final = ("obs", "reward", "terminated", "truncated")
"""Columns of what the environment returns."""
MEMORY: Final = "memory"
"""Column for what a recurrent policy remembers before an entry: zeros where an episode begins."""


def rollout_schema(env: Any, extra: Mapping[str, Any] | None = None, *, discounted: bool = False) -> Schema:
    """The schema of a table that a `Collector` fills: what the environment has, and logp [] beside it.

    Args:
        env: An environment or vector environment, or anything with its two spaces.
        extra: More columns that the policy returns; one called memory is what a recurrent policy remembers.
        discounted: Whether to store the discounted sums by which rewards are scaled.

    Raises:
        SchemaError: one of the columns has a name that policies return something else by.
    """
    columns: dict[str, Any] = {"logp": np.float32} | dict(extra or {})
    schema = Schema.from_env(env, columns | ({DISCOUNTED: np.float32} if discounted else {}))
    made_by_policies(schema)
    return schema


def made_by_policies(schema: Schema) -> list[str]:
    """Names of what neither the environment nor the collector knows: action, logp and others.

    Raises:
        SchemaError: one of them is what a policy returns beside its columns.
    """
    if VERSION in schema.roots:
        raise SchemaError(f"column {VERSION!r}: policies return their model's version by this name. Choose another.")
    return [root for root in schema.roots if root not in (*KNOWN, schema.qvest, DISCOUNTED)]


def policy_rows(schema: Schema) -> tuple[RowSchema, RowSchema]:
    """Rows that a policy is given and returns, an inference node for instance, for each entry of such a table.

    It is given the observation, and what a recurrent policy remembers. The memory that it returns is the next one.
    """
    given = [root for root in ("obs", MEMORY) if root in schema.roots]
    return _rows(schema, given), _rows(schema, made_by_policies(schema))


def observations_of(inputs: RowSchema, columns: Mapping[str, Any]) -> Any:
    """The observations [B, *F] of rows that a policy is given, nested as the environment has them."""
    return inputs.nest("obs", {leaf: columns[leaf] for leaf in inputs.leaves("obs")})


def _rows(schema: Schema, roots: Sequence[str]) -> RowSchema:
    return RowSchema({root: schema.nest(root, {leaf: schema[leaf] for leaf in schema.leaves(root)}) for root in roots})


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


Float32Array = NDArray[np.float32]
Layers = list[tuple[Float32Array, Float32Array]]
TOPIC: Final = "policy"
"""Topic of the models, unless another one is given."""
ADVICE: Final = "Publish a memoire.rl.ActorCritic.mlp, or give the collector a policy of your own."
HALF_LOG_2PI: Final = 0.5 * math.log(2.0 * math.pi)


@runtime_checkable
class Policy(Protocol):
    """What acts for N environments at once."""

    def act(self, observations: Any) -> Mapping[str, Any]:
        """Columns [N, ...] by name: "action", its log probability "logp", often "value", and what else a table stores;
        and "version": a number, of the model that acted.

        If the table has a column memory, it is given `memory=` [N, *M], too: what a recurrent policy remembers, zeros
        where an episode begins. It returns the next one by this name.

        Args:
            observations: [N, *F], or dicts and tuples of such arrays, as environments return them.
        """
        ...


@runtime_checkable
class Asks(Protocol):
    """A policy that computes elsewhere, while its caller steps other environments."""

    def ask(self, observations: Any, *, min_version: int = 0) -> Any:
        """An object at once, whose `result(timeout)` waits for what `act` would return, and raises MemoireTimeout.

        Args:
            observations: [N, *F]; and `memory=`, as of `Policy.act`.
            min_version: The model that acts must be this one or a newer one.
        """
        ...


@runtime_checkable
class LoadsModels(Protocol):
    """A policy that acts by models which somebody fetches for it."""

    def load(self, body: bytes, version: int) -> None:
        """Act by this published model from now on. Raises WrongModel: it does not fit, and nothing was changed."""
        ...


class MlpPolicy:
    """Samples actions from a perceptron whose weights were published.

    Args:
        body: A published model; None waits for `load`.
        version: Of that model.
        seed: Of the samples; None takes entropy from the system.

    Attributes:
        version: Of the model that acts; 0 is none.
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
        """Act by this model from now on.

        Raises:
            WrongModel: it holds other arrays; the former model acts on.
        """
        arrays = weights.unpack(body, f"model version {version}")
        policy, value = _layers(arrays, "policy"), _layers(arrays, "value")
        log_std, moments = arrays.get("log_std"), Moments.read(arrays, "observations")
        _check(policy, value, log_std, moments)
        self._policy, self._value, self._moments = policy, value, moments
        self._log_std = None if log_std is None else np.asarray(log_std, np.float32)
        self.version = version

    def act(self, observations: Any, *, is_greedy: bool = False) -> dict[str, Any]:
        """Sampled actions for observations [N, *F]: "action" int64 [N], or float32 [N, A] in a Box, not clipped to it;
        "logp" float32 [N], "value" float32 [N] if the model has it, and "version".

        Args:
            is_greedy: Take the most probable action in place of a sample.

        Raises:
            ParameterError: no model was loaded, or the observations have another size.
        """
        inputs = self._inputs(observations)
        outputs = _forward(self._policy, inputs)
        draw = self._discrete if self._log_std is None else self._continuous
        action, logp = draw(outputs, is_greedy)
        found: dict[str, Any] = {"action": action, "logp": logp, "version": self.version}
        if self._value:
            found["value"] = _forward(self._value, inputs)[:, 0]
        return found

    def _inputs(self, observations: Any) -> Float32Array:
        if not self._policy:
            raise ParameterError("policy", "no model", "loaded first: policy.load(body, version)")
        inputs, wanted = flat(observations), self._policy[0][0].shape[1]
        if inputs.shape[1] != wanted:
            raise ParameterError("observations", f"{inputs.shape[1]} numbers each", f"of {wanted} numbers each")
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
    """Observations [N, *F] as float32 [N, I]: each flattened; the parts of dicts and tuples side by side, in order."""
    parts = [np.asarray(leaf) for leaf in leaves_of(observations)]
    made = [np.ascontiguousarray(part.reshape(len(part), -1), np.float32) for part in parts]
    return made[0] if len(made) == 1 else np.concatenate(made, 1)


def _forward(layers: Layers, inputs: Float32Array) -> Float32Array:
    """[N, I] through all layers to [N, O], tanh between two of them."""
    outputs = inputs
    for depth, (weight, bias) in enumerate(layers, start=1):
        outputs = outputs @ weight.T + bias
        if depth < len(layers):
            outputs = np.tanh(outputs)
    return outputs


def _layers(arrays: Mapping[str, NDArray[Any]], prefix: str) -> Layers:
    """(weight, bias) of each layer under a name, from the first one on; [] if there is none."""
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
    """Refuse parts that do not fit each other."""
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
