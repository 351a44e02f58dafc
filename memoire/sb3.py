"""Stable-Baselines3 algorithms on memoire's replay: `pip install 'memoire-rl[sb3]'`.

    model = DQN("MlpPolicy", env, replay_buffer_class=memoire.sb3.ReplayBuffer,
                replay_buffer_kwargs={"sampler": memoire.Prioritized(0.6), "multi_step": 3, "discount": 0.99})

Any off-policy algorithm trains from it. `memoire.sb3.DQN` also multiplies importance into its loss and reports its TD
errors, which an algorithm has to do for prioritized replay to be right.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import stable_baselines3
import torch
from stable_baselines3.common.buffers import BaseBuffer
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from torch.nn import functional

from memoire.replay.batch import Batch
from memoire.replay.buffer import Buffer
from memoire.replay.sampling import Sampler, Uniform
from memoire.replay.schema import Schema

from .errors import ParameterError
from .torch import TorchBatch


class ReplayBuffer(BaseBuffer):
    """What an algorithm takes as `replay_buffer_class`: entries go into a `Buffer`, or to a cluster.

    Args:
        buffer_size, observation_space, action_space, device, n_envs: As Stable-Baselines3 gives them.
        optimize_memory_usage: Taken and ignored: a frame is stored once in any case.
        handle_timeout_termination: Whether an episode that was cut off has a value behind it; it should.
        sampler: How entries are chosen; None draws uniformly.
        multi_step, discount: Rewards of so many steps are summed; `discount` has to be the algorithm's gamma.
        seed: Of the draws.
        writer: In place of a buffer: where entries go, such as `client.writer(num_envs=n, autoreset="disabled")`.
        source: With it, who draws: a `Server` or `Reader`, whose `get_batch` is called.
        timeout: Seconds that `source` waits for samples.
        parameters: Further fields of `Parameters`.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: Any,
        action_space: Any,
        device: Any = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        sampler: Sampler | None = None,
        multi_step: int = 1,
        discount: float = 0.99,
        seed: int | None = None,
        writer: Any = None,
        source: Any = None,
        timeout: float = 30.0,
        **parameters: Any,
    ) -> None:
        super().__init__(buffer_size, observation_space, action_space, device, n_envs=n_envs)
        if (writer is None) != (source is None):
            raise ParameterError("source", source, "given together with `writer`, or neither of both")
        self._timeouts = handle_timeout_termination
        self._timeout = timeout
        self._added = 0
        self.batch: Batch | None = None
        """The newest batch: with its importance, and `update_priorities`."""
        self.memory: Buffer | None = None
        """The buffer, unless a cluster is used."""
        self._writer = writer
        self.source = source
        """Who draws, where a cluster is used: a `Server` or `Reader`."""
        if writer is None:
            _refuse_sequences(parameters.get("sequence_length", 0))
            spaces = SimpleNamespace(observation_space=observation_space, action_space=action_space)
            self.memory = Buffer(
                schema_of(spaces),
                buffer_size,
                sampler=Uniform() if sampler is None else sampler,
                multi_step=multi_step,
                discount=discount,
                seed=seed,
                **parameters,
            )
            self._writer = self.memory.writer(num_envs=n_envs, autoreset="disabled")

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: list[dict[str, Any]]) -> None:
        """One step of all environments; next_obs is where it led, also where an episode ended."""
        cut = np.array([bool(info.get("TimeLimit.truncated", False)) for info in infos]) & np.asarray(done, np.bool_)
        terminated = np.asarray(done, np.bool_) & ~(cut & self._timeouts)
        # Environments hand out arrays that they may write to again.
        action = np.asarray(action).reshape(self.n_envs, *self.action_space.shape)
        self._writer.step(_copied(obs), action, np.asarray(reward), terminated, cut & ~terminated, _copied(next_obs))
        self._added += self.n_envs

    def sample(self, batch_size: int, env: Any = None) -> ReplayBufferSamples:
        """Draw a batch, normalized as `env` (a VecNormalize) says; `self.batch` has its importance and ids."""
        if self.memory is not None:
            self.batch = self.memory.sample(batch_size)
        else:
            self.batch = self.source.get_batch(batch_size, self._timeout)
        return self._samples(self.batch, env)

    def _samples(self, batch: Batch, env: Any) -> ReplayBufferSamples:
        size = len(batch.ids)
        _refuse_sequences(0 if batch.gathered.mask is None else batch.gathered.mask.shape[1])
        return ReplayBufferSamples(
            self._tensors(self._normalize_obs(batch["obs"], env)),
            self.to_torch(batch["action"].reshape(size, -1), copy=False),
            self._tensors(self._normalize_obs(batch["next_obs"], env)),
            self.to_torch((batch["discount"] == 0.0).astype(np.float32).reshape(size, 1), copy=False),
            self.to_torch(self._normalize_reward(batch["reward"].reshape(size, 1), env), copy=False),
            self.to_torch(batch["discount"].reshape(size, 1), copy=False),
        )

    def _tensors(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._tensors(part) for key, part in value.items()}
        return self.to_torch(value, copy=False)

    def _get_samples(self, batch_inds: Any, env: Any = None) -> ReplayBufferSamples:
        raise NotImplementedError("samples are drawn by priority, not by position: call sample()")

    def size(self) -> int:
        """Entries that are stored; of a cluster, those that went there."""
        return self._added if self.memory is None else len(self.memory)

    def importance(self) -> torch.Tensor:
        """[B, 1] what the loss of the newest batch is multiplied by, sample by sample."""
        if self.batch is None:
            raise ParameterError("batch", None, "drawn first: call sample()")
        return TorchBatch(self.batch, self.device)["importance"].reshape(-1, 1)


def schema_of(env: Any) -> Schema:
    """The columns that a `ReplayBuffer` writes for an environment (or anything with its two spaces): for a server."""
    return Schema.from_env(env)


def _refuse_sequences(length: int) -> None:
    if length:
        raise ParameterError("sequence_length", length, "0: Stable-Baselines3's algorithms learn from transitions")


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: np.array(part) for key, part in value.items()}
    return np.array(value)


class DQN(stable_baselines3.DQN):
    """Stable-Baselines3's DQN with prioritized replay done right: `replay_buffer_class` is `ReplayBuffer` unless it is
    given.

    Each sample's loss is multiplied by its importance, and its TD error becomes its priority. Schaul et al., ICLR 2016,
    algorithm 1.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        options.setdefault("replay_buffer_class", ReplayBuffer)
        super().__init__(*arguments, **options)

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Draw, learn, and report how surprising it was, `gradient_steps` times."""
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        losses = []
        for _ in range(gradient_steps):
            samples = self.replay_buffer.sample(batch_size, env=self._vec_normalize_env)
            with torch.no_grad():
                ahead = self.q_net_target(samples.next_observations).max(dim=1, keepdim=True).values
                target = samples.rewards + samples.discounts * ahead  # a discount is 0 where an episode terminated
            value = self.q_net(samples.observations).gather(1, samples.actions.long())
            losses_of = functional.smooth_l1_loss(value, target, reduction="none")
            loss = (self.replay_buffer.importance() * losses_of).mean()
            self.policy.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()
            self.replay_buffer.batch.update_priorities((target - value).detach().reshape(-1).cpu().numpy())
            losses.append(loss.item())
        self._n_updates += gradient_steps
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/loss", float(np.mean(losses)))
