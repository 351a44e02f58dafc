"""Side of TorchRL over Ray: its prioritized buffer is an actor, other actors extend it by blocks, a learner samples.

The two stacks of a step are stored with ready n-step sums, as in with_torchrl.py. The buffer does not tie draws to
inserts: a turn lasts until as many batches are drawn as blocks are inserted, and neither waits for the other.
"""

import time

import ray
import torch
from tasks import ALPHA, BATCH, BETA, EPISODE, Task, times_of
from torchrl.data import LazyTensorStorage, PrioritizedReplayBuffer, RayReplayBuffer
from with_torchrl import block_of

RUNTIME = {"num_cpus": 8, "include_dashboard": False, "log_to_driver": False, "configure_logging": False}
NO_CPU = {"num_cpus": 0}


@ray.remote(num_cpus=0)
class Writer:
    """Actor of Ray that stands for an RL actor: it inserts blocks of 256 steps into the buffer."""

    def __init__(self, buffer, blocks: list) -> None:
        torch.set_num_threads(1)
        self.buffer, self.blocks = buffer, blocks

    def insert(self, count: int) -> None:
        for place in range(count):
            self.buffer.extend(self.blocks[place % len(self.blocks)])


class RemoteEndToEnd:
    """Side with the buffer, the writers and the learner in processes of their own."""

    def __init__(self, name: str, entries: int, actors: int) -> None:
        ray.init(**RUNTIME, ignore_reinit_error=True)
        self.buffer = RayReplayBuffer(
            replay_buffer_cls=PrioritizedReplayBuffer, ray_init_config=RUNTIME, remote_config=NO_CPU,
            alpha=ALPHA, beta=BETA, storage=LazyTensorStorage(entries), batch_size=BATCH,
        )  # fmt: skip
        block = block_of(Task(name, entries))
        blocks = [block[begin : begin + BATCH] for begin in range(0, EPISODE - BATCH + 1, BATCH)]
        self.writers = [Writer.remote(self.buffer.client(), blocks) for _ in range(actors)]
        ray.get([each.insert.remote(2) for each in self.writers])
        self.times = []

    def clock(self, count: int) -> float:
        """Return the seconds for `count` batches and as many blocks; `times` has the seconds of each batch."""
        began = time.perf_counter()
        inserted = [each.insert.remote(count // len(self.writers)) for each in self.writers]
        self.times = times_of(self.buffer.sample, count)
        ray.get(inserted)
        return time.perf_counter() - began

    def close(self) -> None:
        self.buffer.close()
        ray.shutdown()
