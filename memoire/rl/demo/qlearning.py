"""Double Q-learning with a small network in plain NumPy, for the demo's learner and actors.

With this module, the demo needs no deep learning framework. The module opens no socket: batches are mappings of arrays,
as `Buffer.sample` and `Server.batches` return them, and weights are one flat float32 vector.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Float32Array: TypeAlias = NDArray[np.float32]
Batch: TypeAlias = Mapping[str, NDArray[np.generic]]
BATCH_COLUMNS = ("obs", "next_obs", "action", "reward", "discount", "importance")
"""Columns of a batch that `DoubleQ.learn` reads."""


class Network:
    """Multilayer perceptron with ReLU: observations [B, inputs] to one value per action [B, outputs].

    All weights are in one flat array, `vector`, and the layers are views of it: an optimizer step, a model and a copy
    for the target network each take one array operation.

        sizes (4, 64, 2):   [ 4 x 64 weights | 64 biases | 64 x 2 weights | 2 biases ]
    """

    def __init__(self, sizes: Sequence[int], seed: int | None = None) -> None:
        """Create weights, uniform within 1/sqrt(fan-in), and zero biases. `sizes` are widths from inputs to outputs."""
        self.sizes = tuple(int(size) for size in sizes)
        shapes = [(rows, columns) for rows, columns in zip(self.sizes[:-1], self.sizes[1:], strict=True)]
        self.vector: Float32Array = np.zeros(sum((rows + 1) * columns for rows, columns in shapes), np.float32)
        self.layers = _views(self.vector, shapes)
        random = np.random.default_rng(seed)
        for weights, _ in self.layers:
            bound = weights.shape[0] ** -0.5
            weights[...] = random.uniform(-bound, bound, weights.shape)

    def __call__(self, observations: NDArray[np.generic]) -> Float32Array:
        """Return values [B, outputs] of `observations` [B, *] of any real dtype; axes after the first are flattened."""
        return self.activations(observations)[-1]

    def activations(self, observations: NDArray[np.generic]) -> list[Float32Array]:
        """Return the input as float32 [B, inputs] and the output of each layer, for `gradient`."""
        outputs: list[Float32Array] = [
            np.ascontiguousarray(observations.reshape(len(observations), -1), dtype=np.float32)
        ]
        for depth, (weights, biases) in enumerate(self.layers, start=1):
            output = outputs[-1] @ weights
            output += biases
            if depth < len(self.layers):
                np.maximum(output, 0.0, out=output)
            outputs.append(output)
        return outputs

    def gradient(self, activations: list[Float32Array], slope: Float32Array) -> Float32Array:
        """Return the flat gradient of a loss by `vector`; `slope` [B, outputs] is the loss's gradient by the output."""
        flat = np.empty_like(self.vector)
        gradients = _views(flat, [weights.shape for weights, _ in self.layers])
        for depth in reversed(range(len(self.layers))):
            inputs = activations[depth]
            np.matmul(inputs.T, slope, out=gradients[depth][0])
            np.sum(slope, axis=0, out=gradients[depth][1])
            if depth:  # the ReLU's gradient is 1 at positive outputs, else 0
                slope = slope @ self.layers[depth][0].T
                slope *= inputs > 0.0
        return flat

    def to_bytes(self) -> bytes:
        """Return the weights as little-endian float32, in the order of `vector`."""
        return self.vector.astype("<f4", copy=False).tobytes()

    def load(self, weights: bytes) -> None:
        """Load weights from `to_bytes` of a network of the same sizes; raise ValueError for another length."""
        if len(weights) != self.vector.nbytes:
            raise ValueError(
                f"a network of sizes {self.sizes} has {self.vector.nbytes} bytes of weights, got {len(weights)}. "
                f"The model may belong to another environment."
            )
        self.vector[...] = np.frombuffer(weights, "<f4")


def _views(vector: Float32Array, shapes: Sequence[tuple[int, int]]) -> list[tuple[Float32Array, Float32Array]]:
    layers, start = [], 0
    for rows, columns in shapes:
        middle, end = start + rows * columns, start + (rows + 1) * columns
        layers.append((vector[start:middle].reshape(rows, columns), vector[middle:end]))
        start = end
    return layers


class Adam:
    """Optimizer of a flat vector, in place (Kingma and Ba, Adam, ICLR 2015, algorithm 1)."""

    def __init__(self, vector: Float32Array, rate: float) -> None:
        self.vector, self.rate = vector, rate
        self.mean = np.zeros_like(vector)
        self.square = np.zeros_like(vector)
        self.steps = 0

    def step(self, gradient: Float32Array) -> None:
        """Update the vector once; `gradient` has the vector's shape and is not changed."""
        self.steps += 1
        self.mean += 0.1 * (gradient - self.mean)
        self.square += 0.001 * (gradient * gradient - self.square)
        rate = self.rate * (1.0 - 0.999**self.steps) ** 0.5 / (1.0 - 0.9**self.steps)
        self.vector -= rate * self.mean / (np.sqrt(self.square) + 1e-8)


@dataclass(frozen=True)
class LearningSettings:
    """Hyperparameters of the demo, chosen to balance CartPole-v1 within seconds for any seed."""

    hidden: tuple[int, ...] = (128, 128)
    """Widths of the hidden layers."""
    rate: float = 1e-3
    """Adam's step size at the start; falls linearly to a tenth over `decay` steps."""
    decay: int = 10_000
    """Gradient steps after which the step size no longer falls."""
    batch_size: int = 512
    """Number of samples in a batch."""
    minibatch_size: int = 128
    """Number of samples in a gradient step."""
    target_every: int = 50
    """Gradient steps between two copies of the network to the target network."""
    reward_scale: float = 0.01
    """Factor of rewards: 1 - gamma of the demo, so that values are means of rewards, near 1. Far larger values would
    take many steps of `rate` to reach."""
    clip: float = 10.0
    """Maximum norm of a gradient; a longer gradient is scaled down to this norm."""


class DoubleQ:
    """Double Q-learner: the network chooses the next action, and a target network evaluates it.

    van Hasselt, Guez and Silver, Deep Reinforcement Learning with Double Q-learning, AAAI 2016; the importance
    weights and the priorities as in Schaul et al., Prioritized Experience Replay, ICLR 2016.
    """

    def __init__(
        self, inputs: int, actions: int, *, settings: LearningSettings = LearningSettings(), seed: int | None = None
    ) -> None:
        self.settings = settings
        self.network = Network((inputs, *settings.hidden, actions), seed)
        self.target = Network(self.network.sizes, seed)
        self.optimizer = Adam(self.network.vector, settings.rate)
        self.steps = 0

    def learn(self, batch: Batch) -> Float32Array:
        """Take a gradient step on each minibatch, and return each sample's TD error [B] for `update_priorities`.

        The batch has obs and next_obs [B, *], action [B] (whole numbers), reward [B] (summed over the window),
        discount [B] (gamma ** steps, 0 after termination) and importance [B]. Loss: Huber (slope at most 1) of the TD
        error, weighted by importance, averaged over the minibatch. Errors have the scale of the unscaled rewards,
        comparable with the priority 1 of new entries, which would otherwise outweigh all other entries for long.
        """
        size = self.settings.minibatch_size
        parts = [
            self._step({name: np.asarray(batch[name])[start : start + size] for name in BATCH_COLUMNS})
            for start in range(0, len(batch["reward"]), size)
        ]
        return np.concatenate(parts) / np.float32(self.settings.reward_scale)

    def _step(self, batch: Batch) -> Float32Array:
        """Take one gradient step, and return TD errors [B] in scaled rewards."""
        error, activations, action = self._errors(batch)
        importance = np.asarray(batch["importance"], np.float32)
        slope = np.zeros_like(activations[-1])
        slope[np.arange(len(error)), action] = np.clip(error, -1.0, 1.0) * importance / np.float32(len(error))
        gradient = self.network.gradient(activations, slope)
        norm = float(np.sqrt(np.dot(gradient, gradient)))
        if norm > self.settings.clip:
            gradient *= self.settings.clip / norm
        self.optimizer.rate = self.settings.rate * max(0.1, 1.0 - 0.9 * self.steps / self.settings.decay)
        self.optimizer.step(gradient)
        self.steps += 1
        if self.steps % self.settings.target_every == 0:
            self.target.vector[...] = self.network.vector
        return error

    def _errors(self, batch: Batch) -> tuple[Float32Array, list[Float32Array], NDArray[np.intp]]:
        """Return TD errors Q(obs, action) - target [B], the network's activations, and the actions as indices."""
        action = np.asarray(batch["action"]).reshape(-1).astype(np.intp)
        rows = np.arange(len(action))
        best_action = self.network(batch["next_obs"]).argmax(axis=1)
        next_value = self.target(batch["next_obs"])[rows, best_action]
        reward = np.asarray(batch["reward"], np.float32).reshape(-1) * np.float32(self.settings.reward_scale)
        discount = np.asarray(batch["discount"], np.float32).reshape(-1)
        activations = self.network.activations(batch["obs"])
        error: Float32Array = activations[-1][rows, action] - (reward + discount * next_value)
        return error, activations, action


def act(
    network: Network, observations: NDArray[np.generic], epsilon: float, random: np.random.Generator
) -> NDArray[np.int64]:
    """Return actions int64 [B] for `observations` [B, *]: greedy, or uniformly random with probability `epsilon`."""
    actions: NDArray[np.int64] = network(observations).argmax(axis=1)
    exploring = random.random(len(actions)) < epsilon
    if exploring.any():
        actions[exploring] = random.integers(network.sizes[-1], size=int(exploring.sum()))
    return actions
