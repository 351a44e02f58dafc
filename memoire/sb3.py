"""Stable-Baselines3 algorithms on memoire's replay: `pip install 'memoire-rl[sb3]'`.

    model = SAC("MlpPolicy", env, replay_buffer_kwargs={"sampler": memoire.Prioritized(0.6, beta=0.4)})

`DQN`, `SAC`, `TD3` and `QRDQN` (which takes sb3-contrib) are those of the same names with prioritized replay done
right: each sample's losses are multiplied by its importance, and its TD error becomes its priority. Any other
off-policy algorithm trains from `replay_buffer_class=memoire.sb3.ReplayBuffer`; it draws by priorities that nobody
renews.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import stable_baselines3
import torch
from numpy.typing import NDArray
from stable_baselines3.common import buffers
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.utils import polyak_update
from torch.nn import functional

from memoire.replay.batch import Batch
from memoire.replay.buffer import Buffer
from memoire.replay.parameters import NAMES
from memoire.replay.sampling import Sampler, Uniform
from memoire.replay.schema import Schema

from .errors import EpisodeTorn, NotCopied, NotInstalled, ParameterError
from .suggestions import checked_names
from .torch import TorchBatch


class ReplayBuffer(buffers.ReplayBuffer):
    """What an algorithm takes as `replay_buffer_class`: entries go into a `Buffer`, or to a cluster.

    `model.save_replay_buffer(path)` and `load_replay_buffer` work; an episode that is open then ends there.

    Args:
        buffer_size, observation_space, action_space, device, n_envs: As Stable-Baselines3 gives them.
        optimize_memory_usage: Taken and ignored: a frame is stored once in any case.
        handle_timeout_termination: Whether an episode that was cut off has a value behind it; it should.
        sampler: How entries are chosen; None draws uniformly.
        multi_step, discount: Rewards of so many steps are summed; `discount` has to be the algorithm's gamma, which
            those of this module see to.
        seed: Of the draws.
        writer: In place of a buffer: where entries go, such as `client.writer(num_envs=n, autoreset="disabled")`.
        source: With it, who draws: a `Server` or `Reader`, whose `get_batch` is called.
        timeout: Seconds that `source` waits for samples.
        fields: Other fields of `Parameters`.
    """

    @checked_names(NAMES)
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
        **fields: Any,
    ) -> None:
        # The one above makes arrays of its own.
        super(buffers.ReplayBuffer, self).__init__(buffer_size, observation_space, action_space, device, n_envs=n_envs)
        if (writer is None) != (source is None):
            raise ParameterError("source", source, "given together with `writer`, or neither of both")
        self.handle_timeout_termination = handle_timeout_termination
        self.optimize_memory_usage = False
        self._timeout = timeout
        self._added = 0
        self._action_shape = (n_envs, *action_space.shape)
        self._last: Any = None  # where the newest step led
        self._never = np.zeros(n_envs, np.bool_)
        self._nothing = self._never.tobytes()
        self.batch: Batch | None = None
        """The newest batch: with its importance, and `update_priorities`."""
        self.memory: Buffer | None = None
        """The buffer, unless a cluster is used."""
        self._writer = writer
        self.source = source
        """Who draws, where a cluster is used: a `Server` or `Reader`."""
        if writer is None:
            _refuse_sequences(fields.get("sequence_length", 0))
            self.memory = Buffer(
                schema_of(SimpleNamespace(observation_space=observation_space, action_space=action_space)),
                buffer_size,
                sampler=Uniform() if sampler is None else sampler,
                multi_step=multi_step,
                discount=discount,
                seed=seed,
                **fields,
            )
            self._writer = self._made_writer()

    def _made_writer(self) -> Any:
        assert self.memory is not None
        return self.memory.writer(num_envs=self.n_envs, autoreset="disabled")

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: list[dict[str, Any]]) -> None:
        """One step of all environments; next_obs is where it led, also where an episode ended.

        An environment that was reset in the middle of an episode, as at the beginning of `learn`, ends it there.
        """
        over = np.asarray(done, np.bool_)
        # Compared as bytes, as nearly all steps end nothing: `any` takes as long as all of the rest.
        is_plain = over.tobytes() == self._nothing
        terminated, truncated = (self._never, self._never) if is_plain else self._ends(over, infos)
        # Environments hand out arrays that they may write to again; what is stored of obs is a copy in any case.
        after = _copied(next_obs)
        action = np.asarray(action).reshape(self._action_shape)
        if _is_same(obs, self._last):
            obs = self._last  # the same array: then nobody compares them again, which takes longer than all else
        try:
            self._writer.step(obs, action, reward, terminated, truncated, after)
        except EpisodeTorn:
            self._writer.reset(obs, mask=_differ(obs, self._last, self.n_envs))
            self._writer.step(obs, action, reward, terminated, truncated, after)
        self._last = after
        self._added += self.n_envs

    def _ends(
        self, over: NDArray[np.bool_], infos: list[dict[str, Any]]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """(terminated, truncated) [n_envs] of a step that ends the episodes of environments that are `over`."""
        cut = np.array([bool(info.get("TimeLimit.truncated", False)) for info in infos]) & over
        terminated = over & ~(cut & self.handle_timeout_termination)
        return terminated, cut & ~terminated

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
        """[B, 1] what the losses of the newest batch are multiplied by, sample by sample."""
        if self.batch is None:
            raise ParameterError("batch", None, "drawn first: call sample()")
        return TorchBatch(self.batch, self.device)["importance"].reshape(-1, 1)

    def update_priorities(self, td_errors: Iterable[torch.Tensor]) -> None:
        """Report the newest batch's TD errors: [B, 1] of each critic, whose absolute values are averaged."""
        assert self.batch is not None
        errors = torch.stack([each.detach().abs() for each in td_errors]).mean(dim=0)
        self.batch.update_priorities(errors.reshape(-1).to("cpu", torch.float32).numpy())

    def __getstate__(self) -> dict[str, Any]:
        if self.memory is None:
            raise NotCopied("ReplayBuffer of a cluster", "Its entries are at the servers: server.snapshot(path).")
        return vars(self) | {"_writer": None, "_last": None, "batch": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._writer = self._made_writer()


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


def _is_same(obs: Any, other: Any) -> bool:
    """Whether two observations have the same bytes."""
    if isinstance(obs, dict):
        return other is not None and all(_is_same(part, other[key]) for key, part in obs.items())
    return type(obs) is type(other) is np.ndarray and obs.dtype == other.dtype and obs.tobytes() == other.tobytes()


def _differ(obs: Any, other: Any, count: int) -> NDArray[np.bool_]:
    """[count] which environments' observations are others."""
    if isinstance(obs, dict):
        found = np.zeros(count, np.bool_)
        for key, part in obs.items():
            found |= _differ(part, other[key], count)
        return found
    changed: NDArray[np.bool_] = (np.asarray(obs) != np.asarray(other)).reshape(count, -1).any(axis=1)
    return changed


class _CorrectedAlgorithm:
    """Over an algorithm: its replay is a `ReplayBuffer`, whose importance corrects and which hears of TD errors."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        given = options.get("replay_buffer_class") or ReplayBuffer
        if not issubclass(given, ReplayBuffer):
            raise ParameterError("replay_buffer_class", given.__name__, "memoire.sb3.ReplayBuffer, or one below it")
        super().__init__(*arguments, **options | {"replay_buffer_class": given})

    def _setup_model(self) -> None:
        own: Any = self  # the algorithm that this class is over
        usual = {"discount": own.gamma, "multi_step": getattr(own, "n_steps", 1)}
        kwargs = own.replay_buffer_kwargs = usual | own.replay_buffer_kwargs
        if kwargs.get("writer") is None and kwargs["discount"] != own.gamma:
            raise ParameterError("discount", kwargs["discount"], f"the algorithm's gamma, {own.gamma}, or left out")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`n_steps=.* is ignored")  # it is heeded, as multi_step
            super()._setup_model()  # type: ignore[misc]

    def _drawn(self, batch_size: int) -> tuple[ReplayBufferSamples, torch.Tensor]:
        """A batch, and its importance [B, 1]."""
        own: Any = self
        return own.replay_buffer.sample(batch_size, env=own._vec_normalize_env), own.replay_buffer.importance()

    def _record(self, **values: list[float]) -> None:
        own: Any = self
        own.logger.record("train/n_updates", own._n_updates, exclude="tensorboard")
        for name, each in values.items():
            if each:
                own.logger.record(f"train/{name}", float(np.mean(each)))


def _descend(
    optimizer: torch.optim.Optimizer, loss: torch.Tensor, clipped: Any = (), most: float | None = None
) -> float:
    """One step down a loss; the gradients of `clipped` have a norm of at most `most`."""
    optimizer.zero_grad()
    loss.backward()
    if most is not None:
        torch.nn.utils.clip_grad_norm_(clipped, most)
    optimizer.step()
    return float(loss.item())


class _ValueBasedAlgorithm(_CorrectedAlgorithm):
    """An algorithm whose policy is its action values, which one optimizer learns."""

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Draw, learn, and report how surprising it was, `gradient_steps` times."""
        own: Any = self
        own.policy.set_training_mode(True)
        own._update_learning_rate(own.policy.optimizer)
        losses = []
        for _ in range(gradient_steps):
            samples, importance = self._drawn(batch_size)
            each, errors = self._losses(samples)
            loss = (importance * each).mean()
            losses.append(_descend(own.policy.optimizer, loss, own.policy.parameters(), own.max_grad_norm))
            own.replay_buffer.update_priorities([errors])
        own._n_updates += gradient_steps
        self._record(loss=losses)

    def _losses(self, samples: ReplayBufferSamples) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses and TD errors of samples, [B, 1] each."""
        raise NotImplementedError


class DQN(_ValueBasedAlgorithm, stable_baselines3.DQN):
    """Stable-Baselines3's DQN with importance and TD errors. Schaul et al., ICLR 2016, algorithm 1."""

    def _losses(self, samples: ReplayBufferSamples) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            ahead = self.q_net_target(samples.next_observations).max(dim=1, keepdim=True).values
            target = samples.rewards + samples.discounts * ahead  # a discount is 0 where an episode terminated
        value = self.q_net(samples.observations).gather(1, samples.actions.long())
        return functional.smooth_l1_loss(value, target, reduction="none"), target - value


class SAC(_CorrectedAlgorithm, stable_baselines3.SAC):
    """Stable-Baselines3's SAC with importance in all of its losses; priorities are the critics' mean TD errors.

    Haarnoja et al., Soft Actor-Critic Algorithms and Applications, 2018.
    """

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        """Draw, learn, and report how surprising it was, `gradient_steps` times."""
        self.policy.set_training_mode(True)
        adapts = self.ent_coef_optimizer is not None
        self._update_learning_rate(
            [self.actor.optimizer, self.critic.optimizer, *([self.ent_coef_optimizer] if adapts else [])]
        )
        actor_losses, critic_losses, entropy_losses, entropies = [], [], [], []
        for turn in range(gradient_steps):
            samples, importance = self._drawn(batch_size)
            if self.use_sde:
                self.actor.reset_noise()
            action, log_prob = self.actor.action_log_prob(samples.observations)
            log_prob = log_prob.reshape(-1, 1)
            entropy = self.log_ent_coef.detach().exp() if adapts else self.ent_coef_tensor
            entropies.append(entropy.item())
            if adapts:
                missing = (log_prob + self.target_entropy).detach()
                entropy_loss = -(importance * self.log_ent_coef * missing).mean()
                entropy_losses.append(_descend(self.ent_coef_optimizer, entropy_loss))
            with torch.no_grad():
                target = self._target(samples, entropy)
            values = self.critic(samples.observations, samples.actions)
            squares = sum(functional.mse_loss(value, target, reduction="none") for value in values)
            critic_losses.append(_descend(self.critic.optimizer, 0.5 * (importance * squares).mean()))
            worth = torch.cat(self.critic(samples.observations, action), dim=1).min(dim=1, keepdim=True).values
            actor_losses.append(_descend(self.actor.optimizer, (importance * (entropy * log_prob - worth)).mean()))
            self.replay_buffer.update_priorities([target - value for value in values])
            if turn % self.target_update_interval == 0:
                polyak_update(self.critic.parameters(), self.critic_target.parameters(), self.tau)
                polyak_update(self.batch_norm_stats, self.batch_norm_stats_target, 1.0)
        self._n_updates += gradient_steps
        self._record(
            ent_coef=entropies, actor_loss=actor_losses, critic_loss=critic_losses, ent_coef_loss=entropy_losses
        )

    def _target(self, samples: ReplayBufferSamples, entropy: torch.Tensor) -> torch.Tensor:
        """[B, 1] what the critics should say: the least of the targets' values, and the entropy of what is done.
        Called without gradients.
        """
        action, log_prob = self.actor.action_log_prob(samples.next_observations)
        ahead = torch.cat(self.critic_target(samples.next_observations, action), dim=1).min(dim=1, keepdim=True).values
        return samples.rewards + samples.discounts * (ahead - entropy * log_prob.reshape(-1, 1))


class TD3(_CorrectedAlgorithm, stable_baselines3.TD3):
    """Stable-Baselines3's TD3 with importance in both losses; priorities are the critics' mean TD errors.

    Fujimoto et al., Addressing Function Approximation Error in Actor-Critic Methods, ICML 2018.
    """

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Draw, learn, and report how surprising it was, `gradient_steps` times."""
        self.policy.set_training_mode(True)
        self._update_learning_rate([self.actor.optimizer, self.critic.optimizer])
        actor_losses, critic_losses = [], []
        for _ in range(gradient_steps):
            self._n_updates += 1
            samples, importance = self._drawn(batch_size)
            with torch.no_grad():
                target = self._target(samples)
            values = self.critic(samples.observations, samples.actions)
            squares = sum(functional.mse_loss(value, target, reduction="none") for value in values)
            critic_losses.append(_descend(self.critic.optimizer, (importance * squares).mean()))
            self.replay_buffer.update_priorities([target - value for value in values])
            if self._n_updates % self.policy_delay == 0:
                worth = self.critic.q1_forward(samples.observations, self.actor(samples.observations))
                actor_losses.append(_descend(self.actor.optimizer, -(importance * worth).mean()))
                self._follow()
        self._record(actor_loss=actor_losses, critic_loss=critic_losses)

    def _target(self, samples: ReplayBufferSamples) -> torch.Tensor:
        """[B, 1] what the critics should say: the least of the targets' values, of an action with clipped noise.
        Called without gradients.
        """
        noise = torch.randn_like(samples.actions) * self.target_policy_noise
        noise = noise.clamp(-self.target_noise_clip, self.target_noise_clip)
        action = (self.actor_target(samples.next_observations) + noise).clamp(-1, 1)
        ahead = torch.cat(self.critic_target(samples.next_observations, action), dim=1).min(dim=1, keepdim=True).values
        return samples.rewards + samples.discounts * ahead

    def _follow(self) -> None:
        """Move the target networks a little towards the others."""
        polyak_update(self.critic.parameters(), self.critic_target.parameters(), self.tau)
        polyak_update(self.actor.parameters(), self.actor_target.parameters(), self.tau)
        polyak_update(self.critic_batch_norm_stats, self.critic_batch_norm_stats_target, 1.0)
        polyak_update(self.actor_batch_norm_stats, self.actor_batch_norm_stats_target, 1.0)


@functools.cache
def _qrdqn() -> type:
    """QR-DQN, made when it is first asked for: it is in a package of its own."""
    try:
        import sb3_contrib
    except ImportError as error:
        raise NotInstalled("sb3-contrib", "pip install 'memoire-rl[sb3]'") from error

    class QRDQN(_ValueBasedAlgorithm, sb3_contrib.QRDQN):
        """sb3-contrib's QR-DQN with importance; priorities are how far the mean values are apart.

        Dabney et al., Distributional Reinforcement Learning with Quantile Regression, AAAI 2018.
        """

        def _losses(self, samples: ReplayBufferSamples) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.no_grad():
                ahead = self.quantile_net_target(samples.next_observations)
                best = ahead.mean(dim=1).argmax(dim=1)
                ahead = ahead.gather(2, best[:, None, None].expand(-1, ahead.shape[1], 1))[:, :, 0]
                target = samples.rewards + samples.discounts * ahead
            values = self.quantile_net(samples.observations)
            values = values.gather(2, samples.actions[..., None].long().expand(-1, values.shape[1], 1))[:, :, 0]
            apart = target.mean(dim=1, keepdim=True) - values.mean(dim=1, keepdim=True)
            return quantile_losses(values, target)[:, None], apart

    QRDQN.__qualname__ = "QRDQN"
    return QRDQN


def quantile_losses(values: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[B] the quantile Huber loss of each sample: summed over the quantiles of `values` [B, Q], the mean over those of
    `targets` [B, T]. Dabney et al., AAAI 2018, equation 10.
    """
    apart = targets[:, None, :] - values[:, :, None]
    middles = (torch.arange(values.shape[1], device=values.device, dtype=values.dtype) + 0.5) / values.shape[1]
    losses = functional.huber_loss(apart, torch.zeros_like(apart), reduction="none")
    return ((middles[None, :, None] - (apart.detach() < 0).to(values.dtype)).abs() * losses).sum(dim=1).mean(dim=1)


def __getattr__(name: str) -> Any:
    if name == "QRDQN":
        return _qrdqn()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
