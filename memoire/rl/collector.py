"""Vector environments fill a table of rollouts, by a policy that follows the newest model.

    policy.act(obs) ──▶ envs.step ──▶ writer.step ──▶ table of rollouts
         ▲ newest model of a topic      waits inside while the table has no room

In a strict table (max_model_lag=0) open fragments are cut before a new model acts, so that each has one version.

A collector's policy that inference nodes compute: observations go out, columns of a table come back. No torch here.

RemoteActor.ask(obs) ──INFER──▶ node of the learner, or nodes beside it ──▶ action, logp, ... and the version that acted

The parts of an on-policy learner listen at its server, its inference node, and those of further ranks:

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
from memoire.building import ClosingContext, Given, Pending, RowSchema, checked_names, whole
from memoire.building import seconds as checked_seconds
from memoire.errors import Closed, MemoireTimeout, ParameterError
from memoire.kinds import HandsOutOnce
from memoire.kinds import registry as kinds

from .policies import (
    DISCOUNTED,
    MEMORY,
    TOPIC,
    VERSION,
    Asks,
    LoadsModels,
    MlpPolicy,
    Policy,
    made_by_policies,
    policy_rows,
)
from .spaces import check_actions
from .training import check_model_topic

PORTS: Final = 4
"""In a row, that one learner takes."""
BETWEEN_RANKS: Final = 10


def address_of_rank(endpoint: str, rank: int) -> str:
    """Where the learner of this rank has its server, if rank 0 has it at this one; ports 0 and "*" stay."""
    return _shifted(endpoint, BETWEEN_RANKS * rank)


def beside(endpoint: str) -> str:
    """Where the inference node of a server at this address listens: behind its three ports, or at .infer."""
    return _shifted(endpoint, PORTS - 1) if endpoint.startswith("tcp://") else f"{endpoint}.infer"


def _shifted(endpoint: str, by: int) -> str:
    place, colon, port = endpoint.rpartition(":")
    return f"{place}{colon}{int(port) + by}" if port.isdigit() and int(port) else endpoint


class RemoteActor:
    """Acts for a collector by what inference nodes answer; made for an `OnPolicyLearner(policy="remote")`.

    Args:
        urls: Addresses of nodes that compute the same.
        schema: Of the table that is filled.
        timeout: Seconds until a request is given up.
        keys: As of `RemotePolicy`.

    Raises:
        SchemaError: a column of the table is called version.
    """

    def __init__(self, urls: Sequence[str], schema: Schema, *, timeout: float, keys: Given = None) -> None:
        inputs, outputs = policy_rows(schema)
        self._inputs, self._outputs = inputs, outputs
        self.remote = RemotePolicy(urls, inputs, outputs, timeout, keys=keys)
        """What asks the nodes."""

    def ask(self, observations: Any, *, min_version: int = 0, memory: Any = None) -> AskedActions:
        """Have actions computed for observations [N, *F]; returns at once.

        Args:
            min_version: Of the weights: the node waits until they are there.
            memory: [N, *M] what a recurrent policy remembers, if the table has a column of this name.
        """
        columns = {"obs": observations} | ({} if memory is None else {MEMORY: memory})
        return AskedActions(self.remote.ask(columns, min_version), self._outputs)

    def act(self, observations: Any, *, memory: Any = None) -> Mapping[str, Any]:
        """Actions for observations [N, *F], and what else the table stores: [N, ...] by name, and "version"."""
        return self.ask(observations, memory=memory).result()

    def close(self) -> None:
        """Ask no more."""
        self.remote.close()


class AskedActions:
    """Actions that were asked for."""

    def __init__(self, pending: Pending, outputs: RowSchema) -> None:
        self._pending, self._outputs = pending, outputs

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Columns [N, ...] by name, and "version".

        Raises:
            MemoireTimeout: there is no answer in time. May be called again.
        """
        found, outputs = self._pending.result(timeout), self._outputs
        columns: dict[str, Any] = {
            root: outputs.nest(root, {leaf: np.asarray(found[leaf]) for leaf in outputs.leaves(root)})
            for root in outputs.roots
        }
        return columns | {VERSION: self._pending.version}


WAIT_INTERVAL: Final = 0.5
"""Seconds after which somebody who waits for a model sees whether the run is over."""


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

    def __init__(self, envs: Any, client: Client, seed: int | None) -> None:
        self.envs, self.writer = envs, client.writer(envs)
        self.obs, _ = envs.reset(seed=seed)
        self.pending: Any = None  # actions that were asked for
        count, schema, mode = envs.num_envs, client.schema, _autoreset_mode(envs)
        self.discounted: NDArray[np.float32] | None = None
        if DISCOUNTED in schema:
            self.discounted = np.zeros(count, np.float32)
        self.memory: NDArray[Any] | None = None  # of a recurrent policy, before its next action
        if MEMORY in schema:
            self.memory = np.zeros((count, *schema[MEMORY].shape), schema[MEMORY].dtype)
        self._resets_late, self._has_ended = "same" not in mode, np.zeros(count, np.bool_)

    @property
    def inputs(self) -> dict[str, Any]:
        """What a policy is given beside the observation."""
        return {} if self.memory is None else {MEMORY: self.memory}

    def sums(self, reward: Any, gamma: np.float32) -> dict[str, Any]:
        """The column with discounted sums of rewards, this step's [N] included; {} if the table has none."""
        if self.discounted is None:
            return {}
        self.discounted = gamma * self.discounted + np.asarray(reward, np.float32)
        return {DISCOUNTED: self.discounted}

    def go_on(self, obs: Any, memory: Any, has_ended: NDArray[np.bool_]) -> None:
        """A step was recorded; has_ended [N] says for which environments an episode ended."""
        self.obs = obs
        if self.discounted is not None:
            self.discounted = np.where(has_ended, np.float32(0.0), self.discounted)
        if self.memory is not None:
            # An environment that resets itself in the next step makes the policy act once in between.
            is_new = has_ended | (self._has_ended if self._resets_late else False)
            self.memory = np.array(memory, self.memory.dtype)
            self.memory[is_new] = 0
        self._has_ended = has_ended


class Collector(ClosingContext):
    """Steps environments and records what happens, through one client.

    Args:
        url: Address of the learner's server, or of a proxy before it.
        envs: A Gymnasium vector environment that resets itself, or a sequence of them: groups. If the policy is asked
            (see `Asks`), other groups step while one waits for its actions.
        policy: What acts. None is a `RemoteActor` if the server tells of inference nodes, or else an `MlpPolicy`. One
            with a method `load(body, version)` gets the newest model.
        table, keys, name: As of `memoire.connect`.
        topic: Of the models.
        seed: Of environments and samples.
        timeout: Seconds to wait for the server, for the first model, and for each answer of a policy that is asked.

    Raises:
        MemoireTimeout: nobody answered.
        ParameterError: the environments do not reset themselves, or the table stores no rollouts.
        SchemaError: a column of the table is called version.
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
        self.client = connect(url, table=table, keys=keys, name=name, timeout=self._patience)
        """Counts, log lines and figures are told through it."""
        self.version = 0
        """Of the model that acted last."""
        self._remote: RemoteActor | None = None  # that was made here
        try:
            _check_table(self.client)
            self.policy: Policy = self._usual_policy(seed, keys) if policy is None else policy
            # Looked at once: isinstance of a protocol takes as long as a small network.
            self._loads = self.policy if isinstance(self.policy, LoadsModels) else None
            self._asks = self.policy if isinstance(self.policy, Asks) else None
            if self._loads is not None:
                check_model_topic(self.client.parameters, topic)
            self._model = self.client.model(topic)
            self._extras = [each for each in made_by_policies(self.client.schema) if each not in ("action", MEMORY)]
            seeds = [None if seed is None else seed + 10_000 * i for i in range(len(groups))]
            self._groups = [_Group(each, self.client, start) for each, start in zip(groups, seeds, strict=True)]
        except BaseException:
            self.close(0.0)
            raise

    def _usual_policy(self, seed: int | None, keys: Given) -> Policy:
        """Ask the inference nodes that the server tells of, or act by the models that it publishes."""
        client = self.client
        if not client.inference:
            return MlpPolicy(seed=seed)
        self._remote = RemoteActor(client.inference, client.schema, timeout=self._patience, keys=keys)
        return self._remote

    @checked_names()
    def run(self, steps: int | None = None, *, seconds: float | None = None) -> Collected:
        """Collect until the run is finished, or so many further entries are recorded, or seconds have passed.

        A step waits inside while the table has no room, `limits.block_timeout` seconds at most.

        Raises:
            MemoireTimeout: no model came in time, or no answer of a policy that was asked.
            ParameterError: a model was trained for another action space than the environments'.
            Closed: the collector was closed, also from another thread.
        """
        most = None if steps is None else whole("steps", steps, 1)
        deadline, first = time.monotonic() + checked_seconds(seconds), self.client.stats().steps
        while not self.client.finished and time.monotonic() < deadline:
            for group in self._groups:
                if self._follow(deadline):
                    self._step(group)
            if most is not None and self.client.stats().steps - first >= most:
                break
        return self.collected()

    def collected(self) -> Collected:
        """What was recorded so far."""
        stats = self.client.stats()
        return Collected(stats.steps, stats.episodes, self.version, stats.finished)

    def _follow(self, deadline: float) -> bool:
        """Have the newest model act; False if the run is over, or the deadline came, before there was one."""
        if self._loads is None:
            return True
        model, known = self._model, self.version
        if self._is_strict and model.published > known:
            newest = self._awaited(known, deadline)
        else:
            newest = model.newest() or self._awaited(0, deadline)
        if newest is None:
            return False
        if newest.version != known:
            self._check_model(newest)
            self._begin_version(newest.version)
            self._loads.load(newest.body, newest.version)
        return True

    def _compare_actions(self) -> None:
        """Refuse what nodes have computed for other actions than the environments': models say for which."""
        first = time.monotonic() + WAIT_INTERVAL  # nobody has to publish what nodes compute with
        newest = self._model.newest() or (None if self.version else self._awaited(0, first))
        if newest is not None:
            self._check_model(newest)

    def _check_model(self, model: Any) -> None:
        for group in self._groups:
            check_actions(model.body, group.envs.single_action_space)

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
        if self._loads is None:  # else the client says itself which model it has
            self.client.scalars({"model_version": float(version)})

    def _step(self, group: _Group) -> None:
        """Step all environments of a group once, unless the run ends before there are actions."""
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
        if self.client.room <= envs.num_envs:  # the step will wait: a learner has to get what other groups hold
            for each in self._groups:
                each.writer.cut()
        group.writer.step(
            group.obs, action, reward, terminated, truncated, next_obs, info, model_version=version, **extras
        )
        group.go_on(next_obs, columns.get(MEMORY), np.asarray(terminated) | np.asarray(truncated))
        group.pending = None if self._asks is None else self._asks.ask(next_obs, **group.inputs)

    def _actions(self, group: _Group) -> Mapping[str, Any] | None:
        """What the policy returns for a group; None if the run is over before an answer comes."""
        asks = self._asks
        if asks is None:
            policy: Any = self.policy
            columns: Mapping[str, Any] | None = policy.act(group.obs, **group.inputs)
            return columns
        columns = self._answer(group.pending or asks.ask(group.obs, **group.inputs))
        if columns is not None and self._is_strict and columns["version"] < (newest := self._model.published):
            # It was asked before another group waited for the new model: the table takes no step of the former one.
            columns = self._answer(asks.ask(group.obs, min_version=newest, **group.inputs))
        return columns

    def _answer(self, asked: Any) -> Mapping[str, Any] | None:
        patience = time.monotonic() + self._patience
        while True:
            try:
                answer: Mapping[str, Any] = asked.result(min(WAIT_INTERVAL, max(0.0, patience - time.monotonic())))
                return answer
            except MemoireTimeout:
                if self.client.finished:
                    return None
                if time.monotonic() >= patience:
                    raise

    def close(self, timeout: float | None = None) -> bool:
        """Send what is open and end the client; environments stay open. Returns whether everything was delivered."""
        if self._remote is not None:
            self._remote.close()
        return self.client.close(timeout)


def for_space(space: Any, action: Any) -> Any:
    """Actions as the environment takes them: clipped to a Box, and counted from the start of a discrete space."""
    low = getattr(space, "low", None)
    if low is not None:
        return np.clip(action, low, space.high)
    start = int(getattr(space, "start", 0))
    return action + start if start else action


def _check_envs(envs: Any) -> None:
    if not hasattr(envs, "num_envs") or not hasattr(envs, "single_action_space"):
        raise ParameterError("envs", type(envs).__name__, "a vector environment: gymnasium.make_vec(id, num_envs=8)")
    if "disabled" in _autoreset_mode(envs):
        raise ParameterError("envs", "autoreset disabled", "environments that reset themselves: next_step or same_step")


def _autoreset_mode(envs: Any) -> str:
    return str(getattr(envs.metadata.get("autoreset_mode"), "value", "")).lower()


def _check_table(client: Client) -> None:
    if not kinds.offers(client.storage, HandsOutOnce):
        raise ParameterError("table", f"{client.table!r}, which stores {client.storage}", "one that stores rollouts")
    if client.closed:
        raise Closed("this client")
