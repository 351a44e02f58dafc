"""A collector's policy that inference nodes compute: observations go out, columns of a table come back. No torch here.

RemoteActor.ask(obs) ──INFER──▶ node of the learner, or nodes beside it ──▶ action, logp, ... and the version that acted
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from memoire.inference.policy import Pending, RemotePolicy
from memoire.replay.row_schema import RowSchema
from memoire.replay.schema import Schema
from memoire.security.keyfolder import Given

from .columns import MEMORY, VERSION, policy_rows


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
