"""A learner's network as the policy of an inference node: one forward pass for the rows of many collectors.

An `ActorCritic` on the CPU is computed in NumPy, as collectors do: torch takes several times as long for so few rows.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import memoire.torch
from memoire.inference.node import Inference
from memoire.replay.schema import Schema
from memoire.security.keyfolder import Given

from .actor_critic import ActorCritic
from .columns import MEMORY, observations_of, policy_rows
from .policies import MlpPolicy


class ActingNode:
    """An inference node that samples actions from copies of a network.

    Args:
        endpoint: Where it listens.
        schema: Of the table that collectors fill.
        keys: As of `Inference`.
    """

    def __init__(self, endpoint: str, schema: Schema, *, keys: Given = None) -> None:
        self._inputs, self._outputs = policy_rows(schema)
        self._device = torch.device("cpu")
        self.node = Inference(endpoint, self._inputs, self._outputs, self._act, keys=keys)
        """Its figures are `node.stats()`."""

    def use(self, net: torch.nn.Module, version: int) -> None:
        """Act by the network as it is now from the next batch on; returns when that is so."""
        self._device = next(net.parameters()).device
        if type(net) is ActorCritic and self._device.type == "cpu":
            # The table stores no values of the policy that acted.
            acting = {name: array for name, array in net.state_dict().items() if not name.startswith("value.")}
            self.node.update(MlpPolicy(memoire.torch.body_of(acting), version), version)
        else:
            copied = copy.deepcopy(net).requires_grad_(requires_grad=False)
            self.node.update(copied.eval(), version)
        self.node.wait_version(version)

    def close(self) -> None:
        """Answer no more."""
        self.node.close()

    def _act(self, columns: Mapping[str, Any], acting: MlpPolicy | torch.nn.Module) -> dict[str, Any]:
        """Sampled actions for rows [B], and what else the table stores of a policy."""
        if isinstance(acting, MlpPolicy):
            found = acting.act(observations_of(self._inputs, columns))
        else:
            found = self._by_torch({name: self._tensor(columns[name]) for name in self._inputs.names}, acting)
        column, action = self._outputs["action"], found["action"]
        made = {name: found[name] for name in self._outputs.roots}
        return made | {"action": action.astype(column.dtype).reshape(-1, *column.shape)}

    def _by_torch(self, columns: Mapping[str, torch.Tensor], net: torch.nn.Module) -> dict[str, Any]:
        obs = observations_of(self._inputs, columns)
        with torch.inference_mode():
            if MEMORY in columns:
                distribution, _, memory = net(obs, columns[MEMORY])
                found = {MEMORY: memory.cpu().numpy()}
            else:
                (distribution, _), found = net(obs), {}
            action = distribution.sample()
            logp = distribution.log_prob(action)
        return found | {"action": action.cpu().numpy(), "logp": logp.cpu().numpy()}

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        """A tensor of an array [B, *F]; of a copy, if it lies in a message that is only to be read."""
        return torch.from_numpy(np.require(array, requirements="W")).to(self._device)
