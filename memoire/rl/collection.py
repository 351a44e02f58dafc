"""What collectors, inference nodes and observers of an on-policy run take from a file.

collection = rl.Collection(envs=...)      collect steps these; infer acts for collectors that have no policy
def run_episode(start, ask, options)      observe runs it for an agent
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memoire.arguments import whole
from memoire.inference.node import Inference
from memoire.replay.schema import Schema
from memoire.security.keyfolder import Given

from .collector import TOPIC
from .columns import observations_of, policy_rows, rollout_schema
from .pipeline import read_named
from .policies import MlpPolicy, Policy


@dataclass(frozen=True, kw_only=True)
class Collection:
    """How collectors of an on-policy learner act; see docs/on-policy.md.

    Args:
        envs: Makes a vector environment that resets itself.
        policy: Makes what acts, with `load(body, version)`; see `Policy`.
        groups: Vector environments of one collector. Others step while one waits for its actions.
        columns: What the policy returns beside action and logp, as the learner's table has it.
        seed: Of environments and samples; None takes entropy from the system.
    """

    envs: Callable[[], Any]
    policy: Callable[[], Policy] = MlpPolicy
    groups: int = 1
    columns: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        whole("groups", self.groups, 1)

    def make_envs(self) -> list[Any]:
        """The vector environments of a collector."""
        return [self.envs() for _ in range(self.groups)]

    def schema(self) -> Schema:
        """Of the learner's table."""
        with contextlib.closing(self.envs()) as envs:
            return rollout_schema(envs, self.columns)

    def node(self, endpoint: str, url: str, *, topic: str = TOPIC, keys: Given = None) -> Inference:
        """An inference node that acts by the models that a server, or a proxy, has."""
        inputs, outputs = policy_rows(self.schema())

        def load(body: bytes) -> Any:
            policy: Any = self.policy()
            policy.load(body, 0)
            return policy

        def act(columns: Mapping[str, Any], policy: Any) -> dict[str, Any]:
            found = policy.act(observations_of(inputs, columns))
            return {root: found[root] for root in outputs.roots}

        return Inference(endpoint, inputs, outputs, act, load, topic, url, keys=keys)


def read_collection(path: str | os.PathLike[str]) -> Collection:
    """The `collection` of a Python file, which is run for that. Raises ParameterError: it makes none."""
    found: Collection = read_named(path, "collection", Collection, "collection = rl.Collection(...)")
    return found


def read_run_episode(path: str | os.PathLike[str]) -> Callable[..., Any]:
    """The function `run_episode` of a Python file, which is run for that. Raises ParameterError: it has none."""
    found: Callable[..., Any] = read_named(path, "run_episode", Callable, "def run_episode(start, ask, options)")
    return found
