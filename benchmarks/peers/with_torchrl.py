"""TorchRL's sides: a prioritized buffer over preallocated tensors. Both stacks are stored, n-step sums are given."""

from functools import cache

import numpy as np
import torch
from tasks import ALPHA, BATCH, BETA, EPISODE, ERRORS, FRACTIONS, Task, in_rotation, leaf_updates, leaf_weights
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

torch.set_num_threads(1)
TASK = cache(Task)


def buffer_of(entries: int) -> TensorDictPrioritizedReplayBuffer:
    storage = LazyTensorStorage(entries)
    return TensorDictPrioritizedReplayBuffer(alpha=ALPHA, beta=BETA, storage=storage, batch_size=BATCH)


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def block_of(task: Task) -> TensorDict:
    """An episode: both observations of each step, and what its n-step transform would have made of the rewards."""
    after = {
        "observation": tensor(task.observations(1)),
        "reward": tensor(task.rewards[:, None]),
        "done": tensor(task.is_end[:, None]),
    }
    now = {"observation": tensor(task.observations(0)), "action": tensor(task.actions), "next": after}
    return TensorDict(now, batch_size=[EPISODE])


@cache
def filled(name: str, entries: int) -> TensorDictPrioritizedReplayBuffer:
    task = TASK(name, entries)
    replay, block = buffer_of(entries), block_of(task)
    for _ in range(entries // EPISODE):
        replay.extend(block)
    replay.update_priority(torch.arange(entries), torch.from_numpy(task.priorities(entries)))
    return replay


def steps(name: str, entries: int):
    """An episode, a step a call."""
    task = TASK(name, entries)
    replay, rows = buffer_of(task.ring), list(block_of(task).unbind(0))

    def insert() -> None:
        for row in rows:
            replay.add(row)

    return insert


def episodes(name: str, entries: int):
    """An episode in one call."""
    task = TASK(name, entries)
    replay, block = buffer_of(task.ring), block_of(task)
    return lambda: replay.extend(block)


def draws(name: str, entries: int):
    return filled(name, entries).sample


def updates(name: str, entries: int):
    replay = filled(name, entries)
    places = [replay.sample()["index"] for _ in range(64)]
    return in_rotation(replay.update_priority, places, torch.from_numpy(ERRORS))


@cache
def tree(leaves: int):
    """The C++ tree itself, by NumPy arrays as memoire's."""
    from torchrl._torchrl import SumSegmentTreeFp64  # absent where its extension does not fit the torch that is there

    made = SumSegmentTreeFp64(leaves)
    made.update(np.arange(leaves), leaf_weights(leaves))
    return made


def tree_draws(leaves: int):
    made = tree(leaves)
    total = made.query(0, leaves)
    return in_rotation(lambda fractions: made.scan_lower_bound(fractions * total), FRACTIONS)


def tree_updates(leaves: int):
    return in_rotation(tree(leaves).update, *leaf_updates(leaves))


def inference_rows(clients: int):
    from with_torchrl_inference import Rows

    return Rows(clients)
