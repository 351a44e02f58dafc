"""Sides of TorchRL: a prioritized buffer over preallocated tensors, with both stacks and ready n-step sums."""

import multiprocessing
import time
from functools import cache

import numpy as np
import tasks
import torch
from tasks import BATCH, EPISODE, ERRORS, INPUTS, TASK, Task, in_rotation
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

torch.set_num_threads(1)


def buffer_of(entries: int) -> TensorDictPrioritizedReplayBuffer:
    storage = LazyTensorStorage(entries)
    return TensorDictPrioritizedReplayBuffer(alpha=tasks.ALPHA, beta=tasks.BETA, storage=storage, batch_size=BATCH)


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def block_of(task: Task) -> TensorDict:
    """Return an episode: both observations of each step, and the reward in place of its n-step sum."""
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
    """Return a call that inserts an episode step by step."""
    task = TASK(name, entries)
    replay, rows = buffer_of(task.ring), list(block_of(task).unbind(0))

    def insert() -> None:
        for row in rows:
            replay.add(row)

    return insert


def episodes(name: str, entries: int):
    """Return a call that inserts an episode at once."""
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
    """Return the C++ tree itself, which takes NumPy arrays like memoire's."""
    from torchrl._torchrl import SumSegmentTreeFp64  # missing if the extension does not fit the installed torch

    segment_tree = SumSegmentTreeFp64(leaves)
    segment_tree.update(np.arange(leaves), tasks.leaf_weights(leaves))
    return segment_tree


def tree_draws(leaves: int):
    segment_tree = tree(leaves)
    total = segment_tree.query(0, leaves)
    return in_rotation(lambda fractions: segment_tree.scan_lower_bound(fractions * total), tasks.FRACTIONS)


def tree_updates(leaves: int):
    return in_rotation(tree(leaves).update, *tasks.leaf_updates(leaves))


# TorchRL's inference server and its clients run in their own processes, with slots in shared memory.


def policy():
    torch.set_num_threads(1)
    parts = []
    for weight, bias in tasks.LAYERS:
        layer = torch.nn.Linear(*weight.shape)
        layer.weight.data, layer.bias.data = torch.from_numpy(weight.T.copy()), torch.from_numpy(bias.copy())
        parts += [layer, torch.nn.Tanh()]
    from tensordict.nn import TensorDictModule

    return TensorDictModule(torch.nn.Sequential(*parts[:-1]), in_keys=["obs"], out_keys=["logits"])


def ask(pipe, client):
    torch.set_num_threads(1)
    row = TensorDict({"obs": torch.ones(INPUTS)})
    client(row)
    tasks.answer_orders(pipe, lambda: client(row))


@cache
def pipes_of(count):
    from torchrl.modules.inference_server import ProcessInferenceServer, ProcessSlotTransport

    context = multiprocessing.get_context("spawn")
    request, response = TensorDict({"obs": torch.zeros(INPUTS)}), TensorDict({"logits": torch.zeros(tasks.OUTPUTS)})
    server = ProcessInferenceServer(
        policy_factory=policy,
        transport=ProcessSlotTransport(request, response, num_slots=count, ctx=context),
        request_spec=request,
        max_batch_size=count,  # the server does not wait: a batch is the requests that have arrived
        policy_device="cpu",
        output_device="cpu",
        policy_version_key=None,
        mp_context=context,
    ).start()
    pipes = []
    for client in server.clients(count):
        ours, theirs = context.Pipe()
        context.Process(target=ask, args=(theirs, client), daemon=True).start()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    return server, pipes


class Rows:
    """Clients that request one row after another; `times` has the seconds of each answer of the newest turn."""

    def __init__(self, count):
        self.server, self.pipes = pipes_of(count)

    def clock(self, count):
        began = time.perf_counter()
        for pipe in self.pipes:
            pipe.send(max(1, count // len(self.pipes)))
        self.times = [each for pipe in self.pipes for each in pipe.recv()]
        return time.perf_counter() - began

    def close(self):
        for pipe in self.pipes:
            pipe.send(None)
        self.server.shutdown()
