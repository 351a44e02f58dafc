"""A learner's network as the policy of an inference node: one forward pass for the rows of many collectors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memoire.inference.node import Inference
from memoire.replay.schema import Schema
from memoire.security.keyfolder import Given

from .columns import MEMORY, policy_rows


class ActingNode:
    """An inference node that samples actions from copies of a network.

    Args:
        endpoint: Where it listens.
        schema: Of the table that collectors fill.
        keys: As of `Inference`.
    """

    def __init__(self, endpoint: str, schema: Schema, *, keys: Given = None) -> None:
        self._inputs, outputs = policy_rows(schema)
        self._action, self._device = outputs["action"], torch.device("cpu")
        self.node = Inference(endpoint, self._inputs, outputs, self._act, keys=keys)
        """Its figures are `node.stats()`."""

    def use(self, net: torch.nn.Module, version: int) -> None:
        """Act by the network as it is now from the next batch on; returns when that is so."""
        self._device = next(net.parameters()).device
        acting = copy.deepcopy(net).requires_grad_(requires_grad=False)
        self.node.update(acting.eval(), version)
        self.node.wait_version(version)

    def close(self) -> None:
        """Answer no more."""
        self.node.close()

    def _act(self, columns: Mapping[str, Any], net: torch.nn.Module) -> dict[str, Any]:
        """Sampled actions for rows [B], and what else the table stores of a policy."""
        inputs = self._inputs
        obs = inputs.nest("obs", {leaf: self._tensor(columns[leaf]) for leaf in inputs.leaves("obs")})
        with torch.inference_mode():
            if MEMORY in inputs:
                distribution, values, memory = net(obs, self._tensor(columns[MEMORY]))
                found = {MEMORY: memory.cpu().numpy()}
            else:
                (distribution, values), found = net(obs), {}
            action = distribution.sample()
            logp = distribution.log_prob(action)
        column, array = self._action, action.cpu().numpy()
        made = {"action": array.astype(column.dtype).reshape(-1, *column.shape)}
        return found | made | {"logp": logp.cpu().numpy(), "value": values.cpu().numpy()}

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        """A tensor of an array [B, *F]; of a copy, if it lies in a message that is only to be read."""
        return torch.from_numpy(np.require(array, requirements="W")).to(self._device)
