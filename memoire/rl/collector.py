"""Collector: steps vector environments by a policy that follows the newest model, and fills a table of rollouts.

    policy.act(obs) ──▶ envs.step ──▶ writer.step ──▶ table of rollouts
         ▲ newest model of a topic      blocks while the table has no room

In a strict table (max_model_lag=0), open fragments are cut before a new model acts, so that each has one version.

A `RemoteActor` is a policy that inference nodes compute: the collector sends observations and receives columns of the
table. This module needs no torch.

    RemoteActor.ask(obs) ──INFER──▶ inference nodes ──▶ action, logp, ... and the version of the model that acted

Ports of on-policy learners, by rank:

    rank 0   5560 server   5561, 5562 entries and notices   5563 inference        rank 1   5570 ... 5573
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from memoire import Client, RemotePolicy, Schema, connect
from memoire.building import ClosingContext, KeysLike, Pending, RowSchema, checked_names, whole
from memoire.building import seconds as checked_seconds
from memoire.errors import Closed, MemoireTimeout, ParameterError
from memoire.kinds import DeliversOnce
from memoire.kinds import registry as kinds

from .policies import (
    DISCOUNTED,
    MEMORY,
    TOPIC,
    VERSION,
    AsyncPolicy,
    LoadsModels,
    MlpPolicy,
    Policy,
    made_by_policies,
    policy_rows,
)
from .spaces import check_actions
from .training import check_model_topic

LEARNER_PORTS: Final = 4
"""Number of consecutive ports that one learner takes."""
BETWEEN_RANKS: Final = 10


def address_of_rank(endpoint: str, rank: int) -> str:
    """Return the address of the server of a rank, from that of rank 0; ports 0 and "*" stay the same."""
    return _shift_port(endpoint, BETWEEN_RANKS * rank)


def inference_address(endpoint: str) -> str:
    """Return the address of the inference node of a server: the port after its three ports, or ENDPOINT.infer."""
    return _shift_port(endpoint, LEARNER_PORTS - 1) if endpoint.startswith("tcp://") else f"{endpoint}.infer"


def _shift_port(endpoint: str, by: int) -> str:
    host, colon, port = endpoint.rpartition(":")
    return f"{host}{colon}{int(port) + by}" if port.isdigit() and int(port) else endpoint


class RemoteActor:
    """Policy of a collector whose actions inference nodes compute, as for an `OnPolicyLearner(policy="remote")`.

    Args:
        urls: Addresses of nodes that compute the same.
        schema: Schema of the table that the collector fills.
        timeout: Seconds to wait for the answer to a request.
        keys: As of `RemotePolicy`.

    Raises:
        SchemaError: a column of the table is called version.
    """

    def __init__(self, urls: Sequence[str], schema: Schema, *, timeout: float, keys: KeysLike = None) -> None:
        inputs, outputs = policy_rows(schema)
        self._inputs, self._outputs = inputs, outputs
        self.remote = RemotePolicy(urls, inputs, outputs, timeout, keys=keys)
        """Client of the inference nodes."""

    def ask(self, observations: Any, *, min_version: int = 0, memory: Any = None) -> AskedActions:
        """Request actions for observations [N, *F], and return without waiting for them.

        Args:
            min_version: Lowest version of the weights to act by; the node waits for newer weights if needed.
            memory: [N, *M] state of a recurrent policy, if the table has a column of this name.
        """
        columns = {"obs": observations} | ({} if memory is None else {MEMORY: memory})
        return AskedActions(self.remote.ask(columns, min_version), self._outputs)

    def act(self, observations: Any, *, memory: Any = None) -> Mapping[str, Any]:
        """Return actions for observations [N, *F] and the policy's other columns, [N, ...] by name, and "version"."""
        return self.ask(observations, memory=memory).result()

    def close(self) -> None:
        """Close the client of the inference nodes."""
        self.remote.close()


class AskedActions:
    """Pending actions that a `RemoteActor` has requested."""

    def __init__(self, pending: Pending, outputs: RowSchema) -> None:
        self._pending, self._outputs = pending, outputs

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for the answer and return its columns [N, ...] by name, and "version".

        Raises:
            MemoireTimeout: no answer came in time. `result` may be called again.
        """
        arrays, outputs = self._pending.result(timeout), self._outputs
        columns: dict[str, Any] = {
            root: outputs.nest(root, {leaf: np.asarray(arrays[leaf]) for leaf in outputs.leaves(root)})
            for root in outputs.roots
        }
        return columns | {VERSION: self._pending.version}


WAIT_INTERVAL: Final = 0.5
"""Seconds between two checks whether the run is finished, while a collector waits for a model."""


@dataclass(frozen=True)
class Collected:
    """Totals of a collector since its construction."""

    steps: int
    episodes: int
    version: int
    """Version of the model that acted last."""
    is_finished: bool
    """True if the run is finished."""


class _Group:
    """Vector environment with its writer, its last observations and the state of its policy."""

    def __init__(self, envs: Any, client: Client, seed: int | None) -> None:
        self.envs, self.writer = envs, client.writer(envs)
        self.obs, _ = envs.reset(seed=seed)
        self.pending: Any = None  # requested actions
        count, schema, mode = envs.num_envs, client.schema, _autoreset_mode(envs)
        self.discounted: NDArray[np.float32] | None = None
        if DISCOUNTED in schema:
            self.discounted = np.zeros(count, np.float32)
        self.memory: NDArray[Any] | None = None  # state of a recurrent policy before the next action
        if MEMORY in schema:
            self.memory = np.zeros((count, *schema[MEMORY].shape), schema[MEMORY].dtype)
        self._resets_late, self._has_ended = "same" not in mode, np.zeros(count, np.bool_)

    @property
    def inputs(self) -> dict[str, Any]:
        """Arguments of a policy beside the observation."""
        return {} if self.memory is None else {MEMORY: self.memory}

    def sums(self, reward: Any, gamma: np.float32) -> dict[str, Any]:
        """Add this step's rewards [N] to the discounted sums, and return their column; {} if the table has none."""
        if self.discounted is None:
            return {}
        self.discounted = gamma * self.discounted + np.asarray(reward, np.float32)
        return {DISCOUNTED: self.discounted}

    def store_next_inputs(self, obs: Any, memory: Any, has_ended: NDArray[np.bool_]) -> None:
        """Store the observations and memory for the next step; reset sums and memory where has_ended [N] is True."""
        self.obs = obs
        if self.discounted is not None:
            self.discounted = np.where(has_ended, np.float32(0.0), self.discounted)
        if self.memory is not None:
            # If an environment resets in the next step, the policy acts once more before that.
            is_new = has_ended | (self._has_ended if self._resets_late else False)
            self.memory = np.array(memory, self.memory.dtype)
            self.memory[is_new] = 0
        self._has_ended = has_ended


class Collector(ClosingContext):
    """Actor of on-policy learning: steps environments, and records their entries through one client.

    Args:
        url: Address of the learner's server, or of a proxy in front of it.
        envs: A Gymnasium vector environment with autoreset, or a sequence of them (groups). If the policy answers
            asynchronously (see `AsyncPolicy`), other groups step while one waits for its actions.
        policy: Policy that acts. None is a `RemoteActor` if the server has inference nodes, else an `MlpPolicy`. A
            policy with a method `load(body, version)` gets the newest model.
        table, keys, name: As of `memoire.connect`.
        topic: Topic of the models.
        seed: Seed of environments and of the default policy.
        timeout: Seconds to wait for the server, for the first model, and for each answer of an asynchronous policy.

    Raises:
        MemoireTimeout: the server did not answer.
        ParameterError: the environments have no autoreset, or the table stores no rollouts.
        SchemaError: a column of the table is called version.

    Example:
        collector = Collector("tcp://127.0.0.1:5560", gymnasium.make_vec("CartPole-v1", num_envs=8), seed=0)
        with collector:
            print(collector.run(seconds=60.0).steps)
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
        keys: KeysLike = None,
        seed: int | None = None,
        name: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        groups = list(envs) if isinstance(envs, Sequence) else [envs]
        for each in groups:
            _check_envs(each)
        self._patience = checked_seconds(timeout)
        self.client = connect(url, table=table, keys=keys, name=name, timeout=self._patience)
        """Client of the server: carries entries, counts, log lines and figures."""
        self.version = 0
        """Version of the model that acted last."""
        self._remote: RemoteActor | None = None  # the default policy, which `close` closes
        try:
            _check_table(self.client)
            self.policy: Policy = self._usual_policy(seed, keys) if policy is None else policy
            # Checked once: isinstance of a protocol takes as long as a small network.
            self._loads = self.policy if isinstance(self.policy, LoadsModels) else None
            self._asks = self.policy if isinstance(self.policy, AsyncPolicy) else None
            if self._loads is not None:
                check_model_topic(self.client.parameters, topic)
            self._model = self.client.model(topic)
            self._extras = [each for each in made_by_policies(self.client.schema) if each not in ("action", MEMORY)]
            seeds = [None if seed is None else seed + 10_000 * i for i in range(len(groups))]
            self._groups = [_Group(each, self.client, start) for each, start in zip(groups, seeds, strict=True)]
        except BaseException:
            self.close(0.0)
            raise

    def _usual_policy(self, seed: int | None, keys: KeysLike) -> Policy:
        client = self.client
        if not client.inference:
            return MlpPolicy(seed=seed)
        self._remote = RemoteActor(client.inference, client.schema, timeout=self._patience, keys=keys)
        return self._remote

    @checked_names()
    def run(self, steps: int | None = None, *, seconds: float | None = None) -> Collected:
        """Collect until the run is finished, `steps` more entries are recorded, or `seconds` have passed.

        A step blocks while the table has no room, at most `limits.block_timeout` seconds.

        Raises:
            MemoireTimeout: no model, or no answer of an asynchronous policy, came in time.
            ParameterError: a model was trained for another action space than the environments'.
            Closed: the collector was closed, also from another thread.
        """
        max_steps = None if steps is None else whole("steps", steps, 1)
        deadline, first = time.monotonic() + checked_seconds(seconds), self.client.stats().steps
        while not self.client.finished and time.monotonic() < deadline:
            for group in self._groups:
                if self._follow(deadline):
                    self._step(group)
            if max_steps is not None and self.client.stats().steps - first >= max_steps:
                break
        return self.collected()

    def collected(self) -> Collected:
        """Return the totals so far."""
        stats = self.client.stats()
        return Collected(stats.steps, stats.episodes, self.version, stats.finished)

    def _follow(self, deadline: float) -> bool:
        """Load the newest model into the policy; False if the run or the time ends before the first model."""
        if self._loads is None:
            return True
        model, version = self._model, self.version
        if self._is_strict and model.published > version:
            newest = self._wait_model(version, deadline)
        else:
            newest = model.newest() or self._wait_model(0, deadline)
        if newest is None:
            return False
        if newest.version != version:
            self._check_model(newest)
            self._begin_version(newest.version)
            self._loads.load(newest.body, newest.version)
        return True

    def _compare_actions(self) -> None:
        first = time.monotonic() + WAIT_INTERVAL  # a learner need not publish the model that the nodes use
        newest = self._model.newest() or (None if self.version else self._wait_model(0, first))
        if newest is not None:
            self._check_model(newest)

    def _check_model(self, model: Any) -> None:
        for group in self._groups:
            check_actions(model.body, group.envs.single_action_space)

    def _wait_model(self, after: int, deadline: float) -> Any:
        """Wait for a model above version `after`; return None if the run or the time ends first."""
        patience = time.monotonic() + self._patience
        while not self.client.finished and time.monotonic() < deadline:
            try:
                remaining = min(deadline, patience) - time.monotonic()
                return self._model.wait(max(0.0, min(WAIT_INTERVAL, remaining)), after=after)
            except MemoireTimeout:
                if patience <= time.monotonic() < deadline:
                    raise
        return None

    @property
    def _is_strict(self) -> bool:
        return self.client.parameters.max_model_lag == 0

    def _begin_version(self, version: int) -> None:
        """Record that another model acts; in a strict table, cut the open fragments of the former model."""
        if self._is_strict and self.version:
            for group in self._groups:
                group.writer.cut()
        self.version = version
        if self._loads is None:  # the client reports its model's version
            self.client.scalars({"model_version": float(version)})

    def _step(self, group: _Group) -> None:
        columns = self._actions(group)
        if columns is None:
            return
        version = int(columns["version"])
        if version != self.version:
            if self._asks is not None:
                self._compare_actions()
            self._begin_version(version)
        action, envs = columns["action"], group.envs
        next_obs, reward, terminated, truncated, info = envs.step(for_space(envs.single_action_space, action))
        gamma = np.float32(np.max(self.client.parameters.discount))
        extras = {name: columns[name] for name in self._extras} | group.inputs | group.sums(reward, gamma)
        if self.client.room <= envs.num_envs:  # the step will block: send the open fragments of all groups first
            for each in self._groups:
                each.writer.cut()
        group.writer.step(
            group.obs, action, reward, terminated, truncated, next_obs, info, model_version=version, **extras
        )
        group.store_next_inputs(next_obs, columns.get(MEMORY), np.asarray(terminated) | np.asarray(truncated))
        group.pending = None if self._asks is None else self._asks.ask(next_obs, **group.inputs)

    def _actions(self, group: _Group) -> Mapping[str, Any] | None:
        """Return the policy's columns for a group; None if the run ends before an answer comes."""
        asks = self._asks
        if asks is None:
            policy: Any = self.policy
            columns: Mapping[str, Any] | None = policy.act(group.obs, **group.inputs)
            return columns
        columns = self._wait_answer(group.pending or asks.ask(group.obs, **group.inputs))
        if columns is not None and self._is_strict and columns["version"] < (newest := self._model.published):
            # The answer was requested before the new model came: a strict table accepts no step of the former model.
            columns = self._wait_answer(asks.ask(group.obs, min_version=newest, **group.inputs))
        return columns

    def _wait_answer(self, pending: Any) -> Mapping[str, Any] | None:
        patience = time.monotonic() + self._patience
        while True:
            try:
                answer: Mapping[str, Any] = pending.result(min(WAIT_INTERVAL, max(0.0, patience - time.monotonic())))
                return answer
            except MemoireTimeout:
                if self.client.finished:
                    return None
                if time.monotonic() >= patience:
                    raise

    def close(self, timeout: float | None = None) -> bool:
        """Send open fragments and close the client; environments stay open. Returns True if all were delivered."""
        if self._remote is not None:
            self._remote.close()
        return self.client.close(timeout)


def for_space(space: Any, action: Any) -> Any:
    """Return actions as the environment takes them: clipped to a Box, or shifted by a discrete space's start."""
    low = getattr(space, "low", None)
    if low is not None:
        return np.clip(action, low, space.high)
    start = int(getattr(space, "start", 0))
    return action + start if start else action


def _check_envs(envs: Any) -> None:
    if not hasattr(envs, "num_envs") or not hasattr(envs, "single_action_space"):
        raise ParameterError("envs", type(envs).__name__, "a vector environment: gymnasium.make_vec(id, num_envs=8)")
    if "disabled" in _autoreset_mode(envs):
        raise ParameterError.with_text(
            "envs has the autoreset mode disabled; a collector needs next_step or same_step."
        )


def _autoreset_mode(envs: Any) -> str:
    return str(getattr(envs.metadata.get("autoreset_mode"), "value", "")).lower()


def _check_table(client: Client) -> None:
    if not kinds.has_capability(client.storage, DeliversOnce):
        raise ParameterError.with_text(
            f"Table {client.table!r} stores {client.storage}; a collector needs one that stores rollouts."
        )
    if client.closed:
        raise Closed("this client")
