"""A small actor-critic in NumPy, with gradients by hand: what tests without torch learn by."""

import numpy as np

from memoire.rl import weights
from memoire.rl.demo.qlearning import Adam


class NumpyActorCritic:
    """Two perceptrons of one hidden tanh layer, trained by the clipped objective of PPO."""

    def __init__(self, inputs, actions, hidden=64, rate=3e-3, seed=0):
        random = np.random.default_rng(seed)
        forms = {}
        for name, last in (("policy", actions), ("value", 1)):
            forms |= {f"{name}.0.weight": (hidden, inputs), f"{name}.0.bias": (hidden,)}
            forms |= {f"{name}.1.weight": (last, hidden), f"{name}.1.bias": (last,)}
        self.flat = np.zeros(sum(int(np.prod(form)) for form in forms.values()), np.float32)
        self.arrays = self.views(self.flat, forms)
        self.forms = forms
        for name, array in self.arrays.items():
            if name.endswith("weight"):
                size = 0.01 if name == "policy.1.weight" else array.shape[1] ** -0.5
                array[...] = random.standard_normal(array.shape) * size
        self.adam, self.random = Adam(self.flat, rate), random

    @staticmethod
    def views(flat, forms):
        parts = np.split(flat, np.cumsum([int(np.prod(form)) for form in forms.values()])[:-1])
        return {name: part.reshape(form) for (name, form), part in zip(forms.items(), parts, strict=True)}

    def body(self):
        return weights.pack(self.arrays)

    def forward(self, name, obs):
        hidden = np.tanh(obs @ self.arrays[f"{name}.0.weight"].T + self.arrays[f"{name}.0.bias"])
        return hidden, hidden @ self.arrays[f"{name}.1.weight"].T + self.arrays[f"{name}.1.bias"]

    def backward(self, into, name, obs, hidden, slope):
        into[f"{name}.1.weight"][...], into[f"{name}.1.bias"][...] = slope.T @ hidden, slope.sum(0)
        inner = (slope @ self.arrays[f"{name}.1.weight"]) * (1 - hidden**2)
        into[f"{name}.0.weight"][...], into[f"{name}.0.bias"][...] = inner.T @ obs, inner.sum(0)

    def update(self, rollouts, epochs=8, size=128):
        values = self.forward("value", rollouts["obs"])[1][:, 0]
        final = self.forward("value", rollouts.final["obs"])[1][:, 0]
        advantages, returns = rollouts.gae(values, final, lam=0.9)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        for index in rollouts.minibatches(size, epochs, self.random):
            self.step(rollouts["obs"][index], rollouts["action"][index], rollouts["logp"][index],
                      advantages[index], returns[index])  # fmt: skip

    def step(self, obs, action, logp, advantage, returns):
        gradient = np.zeros_like(self.flat)
        into, rows = self.views(gradient, self.forms), np.arange(len(obs))
        hidden, logits = self.forward("policy", obs)
        chance = np.exp(logits - logits.max(1, keepdims=True))
        chance /= chance.sum(1, keepdims=True)
        ratio = np.exp(np.log(chance[rows, action]) - logp)
        is_clipped = ((advantage > 0) & (ratio > 1.2)) | ((advantage < 0) & (ratio < 0.8))
        slope = chance * (ratio * advantage * ~is_clipped)[:, None]
        slope[rows, action] -= ratio * advantage * ~is_clipped
        self.backward(into, "policy", obs, hidden, (slope / len(obs)).astype(np.float32))
        hidden, value = self.forward("value", obs)
        self.backward(into, "value", obs, hidden, 0.05 * (value - returns[:, None]) / len(obs))
        gradient *= min(1.0, 0.5 / (float(np.sqrt(gradient @ gradient)) + 1e-8))
        self.adam.step(gradient)
