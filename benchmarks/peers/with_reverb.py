"""Sides of Reverb: its structured writer makes an item of each step, a TensorFlow data set draws batches of items.

A frame crosses the wire once, in chunks whose size Reverb chooses; a W2 item is the 7 frames of both stacks, which the
learner would have to stack. Samples in flight: twice a batch for each worker, as its documentation advises.
"""

import itertools
import multiprocessing
import time
from functools import cache

import numpy as np
import reverb
import tensorflow as tf
from reverb import structured_writer as patterns
from tasks import ALPHA, BATCH, EPISODE, ERRORS, TASK, Acting, Task, in_rotation

TABLE = "replay"
SPAWN = multiprocessing.get_context("spawn")


class Steps:
    """Steps of an actor, which are written one at a time, with an item for each step and its window."""

    def __init__(self, task: Task) -> None:
        self.frames = task.stack + task.multi_step
        self.before = task.multi_step + 1
        self.rows = [
            {"obs": task.frames[i], "act": task.actions[i], "rew": task.rewards[i], "done": task.is_end[i]}
            for i in range(EPISODE)
        ]
        self.signature = {
            "obs": tf.TensorSpec((self.frames, *task.shape), tf.as_dtype(task.dtype)),
            "act": tf.TensorSpec(task.action_shape, tf.as_dtype(task.action_dtype)),
            "rew": tf.TensorSpec((task.multi_step,), tf.float32),
            "done": tf.TensorSpec((), tf.bool),
        }

    def writer(self, client: reverb.Client) -> "reverb.StructuredWriter":
        step = patterns.create_reference_step(self.rows[0])
        window = {
            "obs": step["obs"][-self.frames :],
            "act": step["act"][-self.before],
            "rew": step["rew"][-self.before : -1],
            "done": step["done"][-1],
        }
        return client.structured_writer([patterns.create_config(window, TABLE)])


def table_of(steps: Steps, entries: int, *, limiter, once: bool = False) -> reverb.Table:
    return reverb.Table(
        TABLE,
        sampler=reverb.selectors.Prioritized(ALPHA),
        remover=reverb.selectors.Fifo(),
        max_size=entries,
        max_times_sampled=1 if once else 0,
        rate_limiter=limiter,
        signature=steps.signature,
    )


def data_of(address: str):
    dataset = reverb.TrajectoryDataset.from_table_signature(address, TABLE, max_in_flight_samples_per_worker=2 * BATCH)
    return iter(dataset.batch(BATCH, drop_remainder=True).prefetch(2))


class Local:
    """Server and client in one process, without a wire in between."""

    def __init__(self, name: str, entries: int) -> None:
        task = TASK(name, entries)
        self.steps, self.entries = Steps(task), entries
        limiter = reverb.rate_limiters.MinSize(1)
        self.server = reverb.Server([table_of(self.steps, task.entries, limiter=limiter)], port=None)
        self.client = reverb.Client(f"localhost:{self.server.port}")
        self.writer = self.steps.writer(self.client)

    def insert(self) -> None:
        """Insert an episode step by step."""
        for place, row in enumerate(self.steps.rows):
            self.writer.append(row)
            if place % BATCH == 0:
                self.writer.flush(block_until_num_items=BATCH)
        self.writer.flush()

    def filled(self) -> "Local":
        for _ in range(min(self.entries, TASK_ITEMS) // EPISODE):
            self.insert()
        return self


TASK_ITEMS = 20_000
"""Maximum of items for draws: fewer than other sides hold, since Reverb cannot insert whole episodes at once."""

filled = cache(lambda name, entries: Local(name, entries).filled())


def steps(name: str, entries: int):
    return Local(name, entries).insert


class Draws:
    """Draws from a data set that prefetches; batches that were prefetched between two turns are not timed."""

    def __init__(self, name: str, entries: int) -> None:
        local = filled(name, entries)
        self.data = data_of(f"localhost:{local.server.port}")

    def clock(self, count: int) -> float:
        for _ in range(FETCHED):
            next(self.data)
        counted = max(count, FETCHED)
        began = time.perf_counter()
        for _ in range(counted):
            next(self.data)
        return (time.perf_counter() - began) * count / counted


FETCHED = 40
"""Untimed batches of a turn: more than Reverb's workers and the data set keep ready."""

draws = Draws


def updates(name: str, entries: int):
    local = filled(name, entries)
    data = data_of(f"localhost:{local.server.port}")
    keys = [[int(key) for key in next(data).info.key.numpy()] for _ in range(64)]

    def update(keys: list, errors) -> None:
        local.client.mutate_priorities(TABLE, dict(zip(keys, errors.tolist(), strict=True)))

    return in_rotation(update, keys, ERRORS)


AHEAD = 64 * BATCH
"""Items that actors may insert before they are drawn: more than the data set keeps in flight."""


def act(pipe, name: str, entries: int, port: int) -> None:
    steps = Steps(TASK(name, entries))
    writer = steps.writer(reverb.Client(f"127.0.0.1:{port}"))
    for place in range(steps.frames - 1):  # no window is complete yet
        writer.append(steps.rows[place])
    writer.flush()
    pipe.send("ready")
    place = 0
    while (count := pipe.recv()) is not None:
        for _ in range(count):
            for _ in range(BATCH):
                writer.append(steps.rows[place % EPISODE])
                place += 1
            writer.flush(block_until_num_items=BATCH)
        writer.flush()


def queue_of(name: str, entries: int) -> reverb.Server:
    """Return a server whose items are drawn once each; inserts wait if AHEAD items are undrawn."""
    limiter = reverb.rate_limiters.Queue(AHEAD)
    return reverb.Server([table_of(Steps(TASK(name, entries)), 2 * AHEAD, limiter=limiter, once=True)], port=None)


class DataSet(Acting):
    """Side with actors and a learner that draws from a data set."""

    def draw(self) -> None:
        next(self.data)


class EndToEnd(DataSet):
    """Server in the learner's process and actors in other processes: each step makes an item, which is drawn once."""

    def __init__(self, name: str, entries: int, actors: int) -> None:
        self.server = queue_of(name, entries)
        self.follow(name, entries, actors, self.server.port)

    def follow(self, name: str, entries: int, actors: int, port: int) -> None:
        self.start(SPAWN, actors, act, name, entries, port)
        self.data = data_of(f"localhost:{port}")


def serve(pipe, name: str, entries: int) -> None:
    server = queue_of(name, entries)
    pipe.send(server.port)
    pipe.recv()


class RemoteEndToEnd(EndToEnd):
    """Variant of `EndToEnd` with the server in a process of its own."""

    def __init__(self, name: str, entries: int, actors: int) -> None:
        self.end, theirs = SPAWN.Pipe()
        SPAWN.Process(target=serve, args=(theirs, name, entries), daemon=True).start()
        self.follow(name, entries, actors, self.end.recv())


QUEUE, TAKEN = "fragments", 8
"""Name of the table of fragments, and the number of fragments that the learner takes at a time."""


def row_of(task: Task, place: int) -> dict:
    """Return a step as actors of an on-policy learner record it."""
    return {
        "obs": task.frames[place],
        "action": task.actions[place],
        "reward": task.rewards[place],
        "logp": task.rewards[place],
        "done": task.is_end[place],
    }


def write_fragments(pipe, name: str, length: int, envs: int, port: int) -> None:
    task = TASK(name, EPISODE)
    rows = [row_of(task, place) for place in range(EPISODE)]
    client = reverb.Client(f"127.0.0.1:{port}")
    writers = [client.trajectory_writer(num_keep_alive_refs=length) for _ in range(envs)]
    pipe.send("ready")
    steps = itertools.cycle(rows)
    while (count := pipe.recv()) is not None:
        for _ in range(count * TAKEN // envs):
            for row in itertools.islice(steps, length):
                for writer in writers:
                    writer.append(row)
            for writer in writers:
                writer.create_item(QUEUE, 1.0, {name: writer.history[name][-length:] for name in row})
                writer.flush(block_until_num_items=TAKEN)
        for writer in writers:
            writer.flush()


class Fragments(DataSet):
    """Queue in the learner's process with fragments that actors write step by step; each fragment is drawn once."""

    def __init__(self, name: str, length: int, envs: int, actors: int) -> None:
        row = row_of(TASK(name, EPISODE), 0)
        signature = {
            name: tf.TensorSpec((length, *np.shape(value)), tf.as_dtype(np.asarray(value).dtype))
            for name, value in row.items()
        }
        table = reverb.Table.queue(QUEUE, 8 * TAKEN, signature=signature)
        self.server = reverb.Server([table], port=None)
        self.start(SPAWN, actors, write_fragments, name, length, envs, self.server.port)
        data = reverb.TrajectoryDataset.from_table_signature(
            f"localhost:{self.server.port}", QUEUE, max_in_flight_samples_per_worker=2 * TAKEN
        )
        self.data = iter(data.batch(TAKEN, drop_remainder=True).prefetch(2))
