"""Vector environments fill a table of rollouts, by a policy that follows the newest model.

    policy.act(obs) ──▶ envs.step ──▶ writer.step ──▶ table of rollouts
         ▲ newest model of a topic      waits inside while the table has no room

In a strict table (max_model_lag=0) open fragments are cut before a new model acts, so that each has one version.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from memoire.arguments import seconds as checked_seconds
from memoire.arguments import whole
from memoire.client.client import Client, connect
from memoire.errors import Closed, MemoireTimeout, ParameterError
from memoire.replay.schema import Schema
from memoire.security.keyfolder import Given
from memoire.suggestions import checked_names

from .policies import LoadsModels, MlpPolicy, Policy

TOPIC: Final = "policy"
"""Topic of the models, unless another one is given."""
WAIT_INTERVAL: Final = 0.5
"""Seconds after which somebody who waits for a model sees whether the run is over."""
DISCOUNTED: Final = "discounted"
"""Column for the discounted sum of an episode's rewards so far: rewards are scaled by its spread."""


@dataclass(frozen=True)
class Collected:
    """What a collector has recorded since it was made."""

    steps: int
    episodes: int
    version: int
    """Of the model that acted last."""
    is_finished: bool
    """Whether the run is over."""


class _Group:
    """A vector environment, its writer, and where it is."""

    def __init__(self, envs: Any, client: Client, seed: int | None, has_discounted: bool) -> None:
        self.envs, self.writer = envs, client.writer(envs)
        self.obs, _ = envs.reset(seed=seed)
        self.pending: Any = None  # actions that were asked for
        self.discounted: NDArray[np.float32] | None = np.zeros(envs.num_envs, np.float32) if has_discounted else None


class Collector:
    """Steps environments and records what happens, through one client.

    Args:
        url: Address of the learner's server, or of a proxy before it.
        envs: A Gymnasium vector environment that resets itself, or a sequence of them: groups. If the policy has a
            method `ask(observations)` that returns at once an object with `result(timeout)`, other groups step while
            one waits for its actions.
        policy: What acts; None is an `MlpPolicy`. One with a method `load(body, version)` gets the newest model.
        table, keys, name: As of `memoire.connect`.
        topic: Of the models.
        seed: Of environments and samples.
        timeout: Seconds to wait for the server, for the first model, and for each answer of a policy that is asked.

    Raises:
        MemoireTimeout: nobody answered.
        ParameterError: the environments do not reset themselves, or the table stores no rollouts.
    """

    @checked_names()
    def __init__(
        self,
        url: str,
        envs: Any,
        *,
        policy: Policy | None = None,
        table: str = "",
        topic: str = TOPIC,
        keys: Given = None,
        seed: int | None = None,
        name: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        groups = list(envs) if isinstance(envs, Sequence) else [envs]
        for each in groups:
            _check_envs(each)
        self._patience = checked_seconds(timeout)
        self.policy: Policy = MlpPolicy(seed=seed) if policy is None else policy
        self.client = connect(url, table=table, keys=keys, name=name, timeout=self._patience)
        """Counts, log lines and figures are told through it."""
        self.version = 0
        """Of the model that acted last."""
        try:
            _check_table(self.client)
            self._model = self.client.model(topic)
            columns = self.client.schema.roots
            self._extras = [each for each in columns if each not in ("obs", "action", "reward", "qvest", DISCOUNTED)]
            seeds = [None if seed is None else seed + 10_000 * i for i in range(len(groups))]
            has_discounted = DISCOUNTED in columns
            self._groups = [
                _Group(each, self.client, start, has_discounted) for each, start in zip(groups, seeds, strict=True)
            ]
        except BaseException:
            self.client.close(0.0)
            raise

    @checked_names()
    def run(self, steps: int | None = None, *, seconds: float | None = None) -> Collected:
        """Collect until the run is finished, or so many further entries are recorded, or seconds have passed.

        A step waits inside while the table has no room, `limits.block_timeout` seconds at most.

        Raises:
            MemoireTimeout: no model came in time, or no answer of a policy that was asked.
            Closed: the collector was closed, also from another thread.
        """
        most = whole("steps", steps, 1) if steps is not None else 1 << 62
        deadline, first = time.monotonic() + checked_seconds(seconds), self.client.stats().steps
        while not self.client.finished and time.monotonic() < deadline:
            for group in self._groups:
                if self._follow(deadline):
                    self._step(group)
            if self.client.stats().steps - first >= most:
                break
        return self.collected()

    def collected(self) -> Collected:
        """What was recorded so far."""
        stats = self.client.stats()
        return Collected(stats.steps, stats.episodes, self.version, stats.finished)

    def _follow(self, deadline: float) -> bool:
        """Have the newest model act; False if the run is over, or the deadline came, before there was one."""
        if not isinstance(self.policy, LoadsModels):
            return True
        model, known = self._model, self.version
        if self._is_strict and model.published > known:
            newest = self._awaited(known, deadline)
        else:
            newest = model.newest() or self._awaited(0, deadline)
        if newest is None:
            return False
        if newest.version != known:
            self._begin_version(newest.version)
            self.policy.load(newest.body, newest.version)
        return True

    def _awaited(self, after: int, deadline: float) -> Any:
        """A model above a version; None if the run is over or the deadline came first."""
        patience = time.monotonic() + self._patience
        while not self.client.finished and time.monotonic() < deadline:
            try:
                left = min(deadline, patience) - time.monotonic()
                return self._model.wait(max(0.0, min(WAIT_INTERVAL, left)), after=after)
            except MemoireTimeout:
                if patience <= time.monotonic() < deadline:
                    raise
        return None

    @property
    def _is_strict(self) -> bool:
        return self.client.parameters.max_model_lag == 0

    def _begin_version(self, version: int) -> None:
        """Another model acts from now on: in a strict table, what is open belongs to the former one."""
        if self._is_strict and self.version:
            for group in self._groups:
                group.writer.cut()
        self.version = version
        if not isinstance(self.policy, LoadsModels):  # else the client says itself which model it has
            self.client.scalars({"model_version": float(version)})

    def _step(self, group: _Group) -> None:
        """Step all environments of a group once."""
        columns = self.policy.act(group.obs) if group.pending is None else group.pending.result(self._patience)
        version = int(columns["version"])
        if version != self.version:
            self._begin_version(version)
        action = columns["action"]
        space = group.envs.single_action_space
        next_obs, reward, terminated, truncated, info = group.envs.step(_for(space, action))
        extras = {name: columns[name] for name in self._extras}
        if group.discounted is not None:
            gamma = np.float32(np.max(self.client.parameters.discount_factor))
            group.discounted = extras[DISCOUNTED] = gamma * group.discounted + np.asarray(reward, np.float32)
        group.writer.step(
            group.obs, action, reward, terminated, truncated, next_obs, info, model_version=version, **extras
        )
        if group.discounted is not None:
            group.discounted = np.where(np.asarray(terminated) | truncated, np.float32(0.0), group.discounted)
        group.obs = next_obs
        ask = getattr(self.policy, "ask", None)
        group.pending = None if ask is None else ask(next_obs)

    def close(self, timeout: float | None = None) -> bool:
        """Send what is open and end the client; environments stay open. Returns whether everything was delivered."""
        return self.client.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rollout_schema(env: Any, extra: Mapping[str, Any] | None = None, *, discounted: bool = False) -> Schema:
    """The schema of a table that a `Collector` fills: what the environment has, and logp [] beside it.

    Args:
        env: An environment or vector environment, or anything with its two spaces.
        extra: More columns that the policy returns.
        discounted: Whether to store the discounted sums by which rewards are scaled.
    """
    columns: dict[str, Any] = {"logp": np.float32} | dict(extra or {})
    return Schema.from_env(env, columns | ({DISCOUNTED: np.float32} if discounted else {}))


def _for(space: Any, action: Any) -> Any:
    """Actions as the environment takes them: clipped to a Box, and counted from the start of a discrete space."""
    low = getattr(space, "low", None)
    if low is not None:
        return np.clip(action, low, space.high)
    start = int(getattr(space, "start", 0))
    return action + start if start else action


def _check_envs(envs: Any) -> None:
    if not hasattr(envs, "num_envs") or not hasattr(envs, "single_action_space"):
        raise ParameterError("envs", type(envs).__name__, "a vector environment: gymnasium.make_vec(id, num_envs=8)")
    mode = str(getattr(envs.metadata.get("autoreset_mode"), "value", "")).lower()
    if "disabled" in mode:
        raise ParameterError("envs", "autoreset disabled", "environments that reset themselves: next_step or same_step")


def _check_table(client: Client) -> None:
    if client.storage != "rollouts":
        raise ParameterError("table", f"{client.table!r}, which stores {client.storage}", "one that stores rollouts")
    if client.closed:
        raise Closed("this client")
