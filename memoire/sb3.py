"""Stable-Baselines3 algorithms on memoire's replay: `pip install 'memoire-rl[sb3]'`.

    model = SAC("MlpPolicy", env, replay_buffer_kwargs={"sampler": memoire.Prioritized(0.7, beta=0.5)})

`DQN`, `SAC`, `TD3` and `QRDQN` (which requires sb3-contrib) are Stable-Baselines3's algorithms of the same names, with
prioritized replay: each sample's losses are multiplied by its importance, and its TD error becomes its priority. Every
other off-policy algorithm trains from `replay_buffer_class=memoire.sb3.ReplayBuffer`, which then draws uniformly.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memoire import Batch, Buffer, Parameters, Prioritized, Schema, Uniform
from memoire.building import NAMES, Sampler, checked_names

from .errors import EpisodeTorn, NotCopied, NotInstalled, ParameterError

with NotInstalled.explained("pip install 'memoire-rl[sb3]'"):
    import stable_baselines3
    import torch
    from gymnasium import spaces
    from stable_baselines3.common import buffers
    from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
    from stable_baselines3.common.utils import polyak_update
    from torch.nn import functional

    from .torch import TorchBatch

_N_STEPS = ("n_steps", "multi_step")
_GAMMA = ("gamma", "discount")


class ReplayBuffer(buffers.ReplayBuffer):
    """Replay buffer for an algorithm's `replay_buffer_class`: entries go into a `Buffer`, or to a cluster.

    `model.save_replay_buffer(path)` and `load_replay_buffer` work: a loaded buffer draws what the saved one would draw
    next. An open episode continues if the environment does; else it ends with the state after the last step.

    Args:
        buffer_size, observation_space, action_space, device, n_envs: As Stable-Baselines3 passes them.
        optimize_memory_usage: Accepted and ignored: a frame is stored once in any case.
        handle_timeout_termination: True if `infos` mark the episodes that were cut off, which bootstrap from their
            final state. With False `infos` are not read: every episode that is done has terminated.
        sampler: Rule that chooses entries. By default uniform, and Prioritized(0.6, beta=0.4) in the algorithms of
            this module. Samplers that follow priorities require `is_corrected`.
        multi_step: Steps whose rewards are summed; by default 1.
        discount: The algorithm's gamma, which Stable-Baselines3 does not pass to its buffer: required for more than
            one step. With one step the algorithm discounts by itself: samples have `discounts` None, and a discount
            is rejected.
        n_steps, gamma: The names of Stable-Baselines3 for `multi_step` and `discount`.
        seed: Seed of the draws. None takes one from NumPy's global generator, which Stable-Baselines3 seeds: two runs
            of an algorithm with the same seed are equal.
        writer: Writer for the entries in place of a buffer, such as
            `client.writer(num_envs=n, autoreset="disabled")`; requires `source`.
        source: A `Server` or `Reader` whose `get_batch` draws; requires `writer`. The source has its own settings:
            `sampler`, `seed` and `fields` are rejected, `multi_step` and `discount` must equal the source's.
        timeout: Seconds that `source` waits for samples.
        is_corrected: True if the algorithm multiplies `importance()` into its losses and reports its errors by
            `update_priorities`, as those of this module do.
        fields: Further fields of `Parameters`.

    Raises:
        ParameterError: a setting is missing, contradicts another one or the source's, or would have no effect.
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
        multi_step: int | None = None,
        discount: float | None = None,
        n_steps: int | None = None,
        gamma: float | None = None,
        seed: int | None = None,
        writer: Any = None,
        source: Any = None,
        timeout: float = 30.0,
        is_corrected: bool = False,
        **fields: Any,
    ) -> None:
        # The parent's constructor would allocate arrays.
        super(buffers.ReplayBuffer, self).__init__(buffer_size, observation_space, action_space, device, n_envs=n_envs)
        if (writer is None) != (source is None):
            raise ParameterError.with_text("Pass both writer= and source=, or neither.")
        self._steps = _common_value(multi_step=multi_step, n_steps=n_steps) or 1
        self._discount: float | None = _common_value(discount=discount, gamma=gamma)
        if self._steps == 1 and self._discount is not None:
            expected = "left out with one step: the algorithm discounts by its own gamma, and does not read this value"
            raise ParameterError("discount", self._discount, expected)
        if self._steps != 1 and self._discount is None:
            raise ParameterError("discount", None, f"set with multi_step={self._steps}: the gamma of the algorithm")
        self.handle_timeout_termination = handle_timeout_termination
        self.optimize_memory_usage = False
        self.is_corrected = is_corrected
        """True if importance is used and errors are reported. False after unpickling, until the algorithm sets it."""
        self._timeout = timeout
        self._added = 0
        self._action_shape = (n_envs, *action_space.shape)
        self._last: Any = None  # next_obs of the newest step
        self._never = np.zeros(n_envs, np.bool_)
        self._nothing = self._never.tobytes()
        self.batch: Batch | None = None
        """The newest batch, with its importance and `update_priorities`; None before the first."""
        self.memory: Buffer | None = None
        """The buffer; None if a cluster is used."""
        self._writer = writer
        self.source = source
        """The `Server` or `Reader` that draws, if a cluster is used; else None."""
        self._checked: Any = None  # the parameters that were last checked
        if writer is not None:
            unused = {"sampler": sampler, "seed": seed} | fields
            for name, value in unused.items():
                if value is not None:
                    raise ParameterError(name, value, "left out with `source`, which draws by its own settings")
        else:
            _refuse_sequences(fields.get("sequence_length", 0))
            self.memory = Buffer(
                schema_of(SimpleNamespace(observation_space=observation_space, action_space=action_space)),
                buffer_size,
                sampler=Uniform() if sampler is None else sampler,
                multi_step=self._steps,
                discount=1.0 if self._discount is None else self._discount,
                seed=int(np.random.randint(1 << 31)) if seed is None else seed,  # noqa: NPY002  (SB3 seeds this one)
                **fields,
            )
            self._writer = self._make_writer()
        self._check_parameters()

    @property
    def n_steps(self) -> int:
        """Number of steps whose rewards are summed: `multi_step`."""
        return self._steps

    @property
    def gamma(self) -> float | None:
        """The discount; None with one step until an algorithm of this module sets it."""
        return self._discount

    @property
    def parameters(self) -> Parameters | None:
        """Parameters of the buffer or of the source; None if the source has none, or does not know them yet."""
        drawn_by = self.source if self.memory is None else self.memory
        is_met = getattr(drawn_by, "servers", True)
        return getattr(drawn_by, "parameters", None) if is_met else None

    def check_algorithm(self, gamma: float, n_steps: int) -> None:
        """Raise if an algorithm has another gamma or n_steps. A buffer of one step without a gamma adopts this gamma.

        Raises:
            ParameterError: names both values. Nothing was changed.
        """
        if self._steps != n_steps:
            raise ParameterError("n_steps", n_steps, f"that of the replay buffer, multi_step={self._steps}")
        if self._discount is None:
            if self.memory is not None:
                self.memory.configure(discount=gamma)
            elif (drawn_by := self.parameters) is not None:
                _refuse_gamma(gamma, drawn_by.discount, "source")
            self._discount = gamma
        _refuse_gamma(gamma, (self._discount,), "replay buffer")
        self._check_parameters()

    def _check_parameters(self) -> None:
        """Raise if the parameters contradict this buffer's settings, such as those of a source that was configured."""
        drawn_by = self.parameters
        if drawn_by is None or drawn_by is self._checked:
            return
        side = "source" if self.memory is None else "memory"
        _refuse_sequences(drawn_by.sequence_length)
        if drawn_by.multi_step != self._steps:
            expected = f"the multi_step of the {side}, {drawn_by.multi_step} (Stable-Baselines3 calls it n_steps)"
            raise ParameterError("multi_step", self._steps, expected)
        if drawn_by.priority_exponent and not self.is_corrected:
            received = f"{drawn_by.prioritization}, exponent {drawn_by.priority_exponent:g}"
            expected = (
                f"memoire.Uniform() at the {side}: this algorithm neither uses importance nor reports errors. Those of "
                f"memoire.sb3 do; if yours does too, set is_corrected=True"
            )
            raise ParameterError("sampler", received, expected)
        if self._discount is not None:
            _refuse_gamma(self._discount, drawn_by.discount, side)
        elif 0.0 in drawn_by.discount:
            expected = f"above 0 at the {side}: a discount of 0 marks a terminated episode"
            raise ParameterError("discount", drawn_by.discount, expected)
        self._checked = drawn_by

    def _make_writer(self, *, resume: bool = False) -> Any:
        assert self.memory is not None
        return self.memory.writer(num_envs=self.n_envs, autoreset="disabled", resume=resume)

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Record one step of all environments. next_obs is the state after the step, also if an episode was cut off. If
        an episode terminated, next_obs is ignored, and may be the first observation of the next episode.

        An episode ends if it is done, or if `infos` mark it as cut off. An environment that was reset in the middle of
        an episode, as at the start of `add`, ends it there.
        """
        over = np.asarray(done, np.bool_)
        # The comparison uses bytes, because nearly all steps end no episode and `any` takes long.
        is_plain = over.tobytes() == self._nothing
        if self.handle_timeout_termination:
            if len(infos) != self.n_envs or isinstance(infos, dict):
                expected = f"a dict for each of {self.n_envs} environments; handle_timeout_termination=False reads none"
                raise ParameterError("infos", f"{type(infos).__name__} of {len(infos)}", expected)
            for info in infos:
                if info.get("TimeLimit.truncated"):
                    is_plain = False
        terminated, truncated = (self._never, self._never) if is_plain else self._ends(over, infos)
        # Environments may overwrite returned arrays; the memory copies obs in any case.
        after = _copied(next_obs)
        action = np.asarray(action).reshape(self._action_shape)
        if self._last is None:
            self._writer.reset(obs)  # each later step makes a new array `after`
        elif _is_same(obs, self._last):
            obs = self._last  # one object: the writer skips its comparison, the slowest part
        try:
            self._writer.step(obs, action, reward, terminated, truncated, after)
        except EpisodeTorn:
            self._writer.reset(obs, mask=_differ(obs, self._last, self.n_envs))
            self._writer.step(obs, action, reward, terminated, truncated, after)
        if not is_plain:  # after a reset, `after` may be the next start, which is not compared
            self._writer.reset(after, mask=terminated | truncated)
        self._last = after
        self._added += self.n_envs

    def _ends(
        self, over: NDArray[np.bool_], infos: list[dict[str, Any]]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return (terminated, truncated) [n_envs] of a step that ends episodes."""
        if not self.handle_timeout_termination:
            return over, self._never  # infos are not read: CleanRL passes those of Gymnasium, a dict of arrays
        cut = np.array([bool(info.get("TimeLimit.truncated", False)) for info in infos])
        return over & ~cut, cut

    def sample(self, batch_size: int, env: Any = None) -> ReplayBufferSamples | DictReplayBufferSamples:
        """Draw a batch, normalized by `env` (a VecNormalize); `self.batch` has its importance and ids.

        With one step `discounts` is None, as in Stable-Baselines3: the algorithm discounts by its gamma where `dones`
        is 0.
        """
        self._check_parameters()
        if self.memory is None:
            self.batch = self.source.get_batch(batch_size, self._timeout)
            return self._samples(self.batch, env)
        # The newest steps can be drawn before the next ones are stored. Rewards are read after the draw.
        with self.memory.memory.cut_for_now(self._writer.last_states()):
            self.batch = self.memory.sample(batch_size)
            return self._samples(self.batch, env)

    def _samples(self, batch: Batch, env: Any) -> ReplayBufferSamples | DictReplayBufferSamples:
        size = len(batch.ids)
        _refuse_sequences(0 if batch.gathered.mask is None else batch.gathered.mask.shape[1])
        kind: Any = DictReplayBufferSamples if isinstance(self.observation_space, spaces.Dict) else ReplayBufferSamples
        return kind(
            self._tensors(self._normalize_obs(batch["obs"], env)),
            self.to_torch(batch["action"].reshape(size, -1), copy=False),
            self._tensors(self._normalize_obs(batch["next_obs"], env)),
            self.to_torch((batch["discount"] == 0.0).astype(np.float32).reshape(size, 1), copy=False),
            self.to_torch(self._rewards(batch, env).reshape(size, 1), copy=False),
            self.to_torch(batch["discount"].reshape(size, 1), copy=False) if self._steps != 1 else None,
        )

    def _rewards(self, batch: Batch, env: Any) -> NDArray[np.float32]:
        """Return the rewards of samples [B]; VecNormalize scales and clips each of several steps, not their sum."""
        if self._steps == 1 or not getattr(env, "norm_reward", False):
            rewards: NDArray[np.float32] = self._normalize_reward(batch["reward"], env)
            return rewards
        if self.memory is None:
            expected = "1 for rewards that VecNormalize clips one by one: a source returns the sums of several steps"
            raise ParameterError("multi_step", self._steps, expected)
        turn = np.arange(self._steps)
        normalized = self._normalize_reward(self.memory.memory.rewards(batch.ids, self._steps), env)
        counted = turn < batch.gathered.steps[:, None]
        discounted = normalized * counted * np.float64(self._discount or 0.0) ** turn
        sums: NDArray[np.float32] = discounted.sum(axis=1).astype(np.float32)
        return sums

    def _tensors(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._tensors(part) for key, part in value.items()}
        # An observation of a Discrete space has one axis in Stable-Baselines3.
        return self.to_torch(value if value.ndim > 1 else value.reshape(-1, 1), copy=False)

    def _get_samples(self, batch_inds: Any, env: Any = None) -> ReplayBufferSamples:
        raise NotImplementedError("samples are drawn by priority, not by position: call sample()")

    def reset(self) -> None:
        """Raise NotImplementedError: entries cannot be removed."""
        raise NotImplementedError("entries cannot be removed: make another ReplayBuffer")

    def size(self) -> int:
        """Return the number of stored entries; with a cluster, of entries that were added."""
        return self._added if self.memory is None else len(self.memory)

    def importance(self) -> torch.Tensor:
        """Return the factors [B, 1] of the newest batch's losses, sample by sample."""
        if self.batch is None:
            raise ParameterError.with_text("No batch has been drawn yet: call sample() first.")
        return TorchBatch(self.batch, self.device)["importance"].reshape(-1, 1)

    def update_priorities(self, td_errors: Iterable[torch.Tensor]) -> None:
        """Report the newest batch's TD errors: [B, 1] of each critic, whose absolute values are averaged."""
        assert self.batch is not None
        errors = torch.stack([each.detach().abs() for each in td_errors]).mean(dim=0)
        self.batch.update_priorities(errors.reshape(-1).to("cpu", torch.float32).numpy())

    def __getstate__(self) -> dict[str, Any]:
        if self.memory is None:
            raise NotCopied("ReplayBuffer of a cluster", "Its entries are at the servers: server.snapshot(path).")
        return vars(self) | {"_writer": None, "batch": None, "_checked": None, "is_corrected": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._writer = self._make_writer(resume=True)


def schema_of(env: Any) -> Schema:
    """Return the schema of a `ReplayBuffer`, for a server: of an environment, or an object with its two spaces."""
    return Schema.from_env(env)


def _common_value(**options: Any) -> Any:
    """Return the value that was passed under any of these names; None if none was. Raises if two differ."""
    agreed = [(name, value) for name, value in options.items() if value is not None]
    for name, value in agreed[1:]:
        if not np.array_equal(np.ravel(value), np.ravel(agreed[0][1])):
            raise ParameterError(name, value, f"the same as {agreed[0][0]}, {agreed[0][1]}, or left out")
    return agreed[0][1] if agreed else None


def _refuse_gamma(gamma: Any, discount: Any, side: str) -> None:
    if not np.all(np.ravel(discount) == np.ravel(gamma)):
        others = ", ".join(f"{each:g}" for each in np.ravel(discount))
        raise ParameterError("gamma", gamma, f"the discount of the {side}, {others}, as rewards are summed with it")


def _refuse_sequences(length: int) -> None:
    if length:
        raise ParameterError("sequence_length", length, "0: Stable-Baselines3's algorithms learn from transitions")


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: np.array(part) for key, part in value.items()}
    return np.array(value)


def _is_same(obs: Any, other: Any) -> bool:
    """Return True if two observations have the same bytes."""
    if isinstance(obs, dict):
        return other is not None and all(_is_same(part, other[key]) for key, part in obs.items())
    return type(obs) is type(other) is np.ndarray and obs.dtype == other.dtype and obs.tobytes() == other.tobytes()


def _differ(obs: Any, other: Any, count: int) -> NDArray[np.bool_]:
    """Return a mask [count], True for environments whose observations differ."""
    pairs = [(part, other[key]) for key, part in obs.items()] if isinstance(obs, dict) else [(obs, other)]
    parts = [(np.asarray(one) != np.asarray(two)).reshape(count, -1).any(axis=1) for one, two in pairs]
    changed: NDArray[np.bool_] = np.any(parts, axis=0)
    return changed


_Algorithm: Any = object
"""Base class as type checkers see it; at run time an algorithm of Stable-Baselines3 comes after it."""


class _CorrectedAlgorithm(_Algorithm):
    """Mixin over an algorithm: its replay is a `ReplayBuffer`, which corrects losses and receives TD errors."""

    replay_buffer: Any
    replay_buffer_class: Any
    replay_buffer_kwargs: Any
    _is_n_steps_told = True
    """True if the caller passed n_steps to the algorithm; else `replay_buffer_kwargs` may set it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        passed = inspect.signature(super().__init__).bind_partial(*arguments, **options).arguments
        kind = passed.get("replay_buffer_class") or ReplayBuffer
        if not issubclass(kind, ReplayBuffer):
            raise ParameterError("replay_buffer_class", kind.__name__, "memoire.sb3.ReplayBuffer or a subclass of it")
        self._is_n_steps_told = "n_steps" in passed
        super().__init__(*arguments, **options)

    def _setup_model(self) -> None:
        kwargs = self.replay_buffer_kwargs
        self.replay_buffer_class = self.replay_buffer_class or ReplayBuffer
        self.replay_buffer_kwargs = self._replay_kwargs(kwargs)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="`n_steps=.* is ignored")  # memoire uses it as multi_step
                super()._setup_model()
        finally:
            self.replay_buffer_kwargs = kwargs  # derived values are left out: `load` may change them
        self._is_n_steps_told = True
        self._check_replay()

    def _replay_kwargs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the replay buffer: the caller's, and those derived from the algorithm's settings."""
        rest = {name: value for name, value in kwargs.items() if name not in _GAMMA + _N_STEPS}
        steps = _common_value(**{name: kwargs[name] for name in _N_STEPS if name in kwargs})
        if steps is not None and not self._is_n_steps_told:
            self.n_steps = steps
        elif steps is not None and steps != self._n_steps:
            raise ParameterError("multi_step", steps, f"the algorithm's n_steps, {self._n_steps}, or left out")
        discount = _common_value(**{name: kwargs[name] for name in _GAMMA if name in kwargs})
        if discount is not None and not np.all(np.ravel(discount) == self.gamma):
            raise ParameterError("discount", discount, f"the algorithm's gamma, {self.gamma}, or left out")
        rest["is_corrected"] = True
        if rest.get("sampler") is None and rest.get("source") is None:
            rest["sampler"] = Prioritized()
        return rest | {"multi_step": self._n_steps, "discount": self.gamma if self._n_steps != 1 else None}

    @property
    def _n_steps(self) -> int:
        steps: int = getattr(self, "n_steps", 1)  # QR-DQN has no n_steps
        return steps

    def _check_replay(self) -> None:
        """Raise if the replay buffer is not of this module, or has another gamma or n_steps than the algorithm."""
        if not isinstance(self.replay_buffer, ReplayBuffer):
            kind = type(self.replay_buffer)
            expected = "a memoire.sb3.ReplayBuffer: fill one by its `add`, or use the algorithm of Stable-Baselines3"
            raise ParameterError("replay_buffer", f"{kind.__module__}.{kind.__qualname__}", expected)
        self.replay_buffer.is_corrected = True
        self.replay_buffer.check_algorithm(self.gamma, self._n_steps)

    def load_replay_buffer(self, path: Any, truncate_last_traj: bool = True) -> None:
        """Load a replay buffer that `save_replay_buffer` wrote. The file is a pickle: load only files that you trust.

        Raises:
            ParameterError: the buffer is not of this module, or has another gamma or n_steps; the one before stays.
        """
        before = self.replay_buffer
        try:
            super().load_replay_buffer(path, truncate_last_traj)
            self._check_replay()
        except BaseException:
            self.replay_buffer = before
            raise

    def _discounts(self, samples: ReplayBufferSamples) -> torch.Tensor:
        """Return the factors [B, 1] of the next states' values: 0 where an episode terminated."""
        steps = self.gamma if samples.discounts is None else samples.discounts
        discounts: torch.Tensor = (1.0 - samples.dones) * steps
        return discounts

    def _draw(self, batch_size: int) -> tuple[ReplayBufferSamples, torch.Tensor]:
        """Draw a batch, and return it with its importance [B, 1]."""
        if isinstance(self.replay_buffer, ReplayBuffer):  # the caller may have replaced the buffer on purpose
            self._check_replay()
        return self.replay_buffer.sample(batch_size, env=self._vec_normalize_env), self.replay_buffer.importance()

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Draw a batch, learn from it, and report its TD errors, `gradient_steps` times."""
        self.policy.set_training_mode(True)
        self._update_learning_rate(self._optimizers())
        losses: dict[str, list[float]] = {}
        for turn in range(gradient_steps):
            self._n_updates += 1
            for name, loss in self._learn(*self._draw(batch_size), turn).items():
                losses.setdefault(name, []).append(loss)
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        for name, each in losses.items():
            self.logger.record(f"train/{name}", float(np.mean(each)))

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.actor.optimizer, self.critic.optimizer]

    def _learn(self, samples: ReplayBufferSamples, importance: torch.Tensor, turn: int) -> dict[str, float]:
        """Learn from samples with importance [B, 1], report their TD errors, and return losses by name."""
        raise NotImplementedError

    def _learn_critics(
        self, samples: ReplayBufferSamples, importance: torch.Tensor, target: torch.Tensor, scale: float
    ) -> float:
        """Take one step of the critics towards a target [B, 1], and report their mean TD errors; return the loss."""
        values = self.critic(samples.observations, samples.actions)
        squares = sum(functional.mse_loss(value, target, reduction="none") for value in values)
        loss = _descend(self.critic.optimizer, scale * (importance * squares).mean())
        self.replay_buffer.update_priorities([target - value for value in values])
        return loss


def _descend(
    optimizer: torch.optim.Optimizer, loss: torch.Tensor, clipped: Any = (), most: float | None = None
) -> float:
    """Take one step down a loss; the gradients of `clipped` are clipped to a norm of `most`. Return the loss."""
    optimizer.zero_grad()
    loss.backward()
    if most is not None:
        torch.nn.utils.clip_grad_norm_(clipped, most)
    optimizer.step()
    return float(loss.item())


def _smallest_value(critic: Any, observations: Any, action: torch.Tensor) -> torch.Tensor:
    """Return the smallest value of the critics, [B, 1]."""
    least: torch.Tensor = torch.cat(critic(observations, action), dim=1).min(dim=1, keepdim=True).values
    return least


class _ValueBasedAlgorithm(_CorrectedAlgorithm):
    """Algorithm whose policy consists of action values, learned by one optimizer."""

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.policy.optimizer]

    def _learn(self, samples: ReplayBufferSamples, importance: torch.Tensor, turn: int) -> dict[str, float]:
        each, errors = self._losses(samples)
        loss = (importance * each).mean()
        loss_before = _descend(self.policy.optimizer, loss, self.policy.parameters(), self.max_grad_norm)
        self.replay_buffer.update_priorities([errors])
        return {"loss": loss_before}

    def _losses(self, samples: ReplayBufferSamples) -> tuple[torch.Tensor, torch.Tensor]:
        """Return losses and TD errors of samples, [B, 1] each."""
        raise NotImplementedError


class DQN(_ValueBasedAlgorithm, stable_baselines3.DQN):
    """Stable-Baselines3's DQN with importance and TD errors. Schaul et al., ICLR 2016, algorithm 1."""

    def _losses(self, samples: ReplayBufferSamples) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            ahead = self.q_net_target(samples.next_observations).max(dim=1, keepdim=True).values
            target = samples.rewards + self._discounts(samples) * ahead
        value = self.q_net(samples.observations).gather(1, samples.actions.long())
        return functional.smooth_l1_loss(value, target, reduction="none"), target - value


class SAC(_CorrectedAlgorithm, stable_baselines3.SAC):
    """Stable-Baselines3's SAC with importance in all of its losses; priorities are the critics' mean TD errors.

    Haarnoja et al., Soft Actor-Critic Algorithms and Applications, 2018.
    """

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        adapting = [] if self.ent_coef_optimizer is None else [self.ent_coef_optimizer]
        return [*super()._optimizers(), *adapting]

    def _learn(self, samples: ReplayBufferSamples, importance: torch.Tensor, turn: int) -> dict[str, float]:
        if self.use_sde:
            self.actor.reset_noise()
        action, log_prob = self.actor.action_log_prob(samples.observations)
        log_prob, losses = log_prob.reshape(-1, 1), {}
        if self.ent_coef_optimizer is None:
            entropy = self.ent_coef_tensor
        else:
            entropy = self.log_ent_coef.detach().exp()
            missing = (log_prob + self.target_entropy).detach()
            entropy_loss = -(importance * self.log_ent_coef * missing).mean()
            losses["ent_coef_loss"] = _descend(self.ent_coef_optimizer, entropy_loss)
        with torch.no_grad():
            next_action, next_log_prob = self.actor.action_log_prob(samples.next_observations)
            ahead = _smallest_value(self.critic_target, samples.next_observations, next_action)
            ahead = ahead - entropy * next_log_prob.reshape(-1, 1)
            target = samples.rewards + self._discounts(samples) * ahead
        losses["critic_loss"] = self._learn_critics(samples, importance, target, 0.5)
        worth = _smallest_value(self.critic, samples.observations, action)
        actor_loss = (importance * (entropy * log_prob - worth)).mean()
        losses["actor_loss"] = _descend(self.actor.optimizer, actor_loss)
        if turn % self.target_update_interval == 0:
            polyak_update(self.critic.parameters(), self.critic_target.parameters(), self.tau)
            polyak_update(self.batch_norm_stats, self.batch_norm_stats_target, 1.0)
        return losses | {"ent_coef": entropy.item()}


class TD3(_CorrectedAlgorithm, stable_baselines3.TD3):
    """Stable-Baselines3's TD3 with importance in both losses; priorities are the critics' mean TD errors.

    Fujimoto et al., Addressing Function Approximation Error in Actor-Critic Methods, ICML 2018.
    """

    def _learn(self, samples: ReplayBufferSamples, importance: torch.Tensor, turn: int) -> dict[str, float]:
        with torch.no_grad():
            noise = torch.randn_like(samples.actions) * self.target_policy_noise
            noise = noise.clamp(-self.target_noise_clip, self.target_noise_clip)
            action = (self.actor_target(samples.next_observations) + noise).clamp(-1, 1)
            ahead = _smallest_value(self.critic_target, samples.next_observations, action)
            target = samples.rewards + self._discounts(samples) * ahead
        losses = {"critic_loss": self._learn_critics(samples, importance, target, 1.0)}
        if self._n_updates % self.policy_delay == 0:
            worth = self.critic.q1_forward(samples.observations, self.actor(samples.observations))
            losses["actor_loss"] = _descend(self.actor.optimizer, -(importance * worth).mean())
            polyak_update(self.critic.parameters(), self.critic_target.parameters(), self.tau)
            polyak_update(self.actor.parameters(), self.actor_target.parameters(), self.tau)
            polyak_update(self.critic_batch_norm_stats, self.critic_batch_norm_stats_target, 1.0)
            polyak_update(self.actor_batch_norm_stats, self.actor_batch_norm_stats_target, 1.0)
        return losses


@functools.cache
def _qrdqn() -> type:
    """Return the class of QR-DQN, made at the first use since it needs another package, sb3-contrib."""
    with NotInstalled.explained("pip install 'memoire-rl[sb3]'"):
        import sb3_contrib

    class QRDQN(_ValueBasedAlgorithm, sb3_contrib.QRDQN):
        """sb3-contrib's QR-DQN with importance; priorities are the differences between mean values.

        Dabney et al., Distributional Reinforcement Learning with Quantile Regression, AAAI 2018.
        """

        def _losses(self, samples: ReplayBufferSamples) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.no_grad():
                ahead = self.quantile_net_target(samples.next_observations)
                best = ahead.mean(dim=1).argmax(dim=1)
                ahead = ahead.gather(2, best[:, None, None].expand(-1, ahead.shape[1], 1))[:, :, 0]
                target = samples.rewards + self._discounts(samples) * ahead
            values = self.quantile_net(samples.observations)
            values = values.gather(2, samples.actions[..., None].long().expand(-1, values.shape[1], 1))[:, :, 0]
            apart = target.mean(dim=1, keepdim=True) - values.mean(dim=1, keepdim=True)
            return quantile_losses(values, target)[:, None], apart

    QRDQN.__qualname__ = "QRDQN"
    return QRDQN


def quantile_losses(values: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the quantile Huber loss of each sample, [B]: summed over the quantiles of `values` [B, Q], and averaged
    over those of `targets` [B, T]. Dabney et al., AAAI 2018, equation 10.
    """
    apart = targets[:, None, :] - values[:, :, None]
    middles = (torch.arange(values.shape[1], device=values.device, dtype=values.dtype) + 0.5) / values.shape[1]
    losses = functional.huber_loss(apart, torch.zeros_like(apart), reduction="none")
    return ((middles[None, :, None] - (apart.detach() < 0).to(values.dtype)).abs() * losses).sum(dim=1).mean(dim=1)


def __getattr__(name: str) -> Any:
    if name == "QRDQN":
        return _qrdqn()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
