"""Sides of Ray Serve: a deployment that batches, and clients in processes of Ray that hold its handle."""

import time
from functools import cache

import numpy as np
import ray
from ray import serve
from tasks import INPUTS, computed, times_of

MAX_BATCH, MAX_WAIT = 256, 0.005
"""Rows, and seconds: the settings of memoire's node."""


@serve.deployment(max_ongoing_requests=MAX_BATCH)
class Node:
    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=MAX_WAIT)
    async def __call__(self, rows):
        return list(computed(np.stack(rows)))


@ray.remote(num_cpus=0)
class Client:
    def __init__(self, handle):
        self.handle = handle

    def ask(self, count):
        row = np.ones(INPUTS, np.float32)
        return times_of(lambda: self.handle.remote(row).result(), count)


@cache
def clients_of(count):
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    handle = serve.run(Node.bind())
    clients = [Client.remote(handle) for _ in range(count)]
    ray.get([each.ask.remote(3) for each in clients])
    return clients


class Rows:
    """Clients that request one row after another; `times` has the seconds of each answer of the newest turn."""

    def __init__(self, count):
        self.clients = clients_of(count)

    def clock(self, count):
        began = time.perf_counter()
        answers = ray.get([each.ask.remote(max(1, count // len(self.clients))) for each in self.clients])
        seconds = time.perf_counter() - began
        self.times = [each for took in answers for each in took]
        return seconds
