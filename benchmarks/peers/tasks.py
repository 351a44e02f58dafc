"""Tasks that all sides of a comparison share, with NumPy alone: W1 has small steps, W2 stacks of frames."""

import functools
import gc
import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np

EPISODE = 1000
BATCH = 256
ALPHA, BETA = 0.6, 0.4


class Task:
    """Steps of an artificial environment: W1 with 64 numbers, W2 with stacks of 4 frames, 3 of earlier steps."""

    def __init__(self, name: str, entries: int) -> None:
        self.name, self.entries = name, entries
        self.ring = min(entries, 5_000 if name == "W2" else 50_000)  # inserts are timed with warm memory
        self.stack, self.multi_step = (4, 3) if name == "W2" else (1, 1)
        self.shape, self.dtype = ((84, 84), "uint8") if name == "W2" else ((64,), "float32")
        self.action_shape, self.action_dtype = ((1,), "int32") if name == "W2" else ((8,), "float32")
        random = np.random.default_rng(0)
        self.frames = distinct(random, (EPISODE + self.multi_step + self.stack, *self.shape), self.dtype)
        self.actions = distinct(random, (EPISODE, *self.action_shape), self.action_dtype)
        self.rewards = random.standard_normal(EPISODE, dtype="float32")
        self.is_end = np.arange(EPISODE) == EPISODE - 1

    @property
    def described(self) -> str:
        return (
            f"{self.name}: observations {self.dtype}{list(self.shape)}, actions {self.action_dtype}"
            f"{list(self.action_shape)}, reward float32; stack {self.stack}, n-step {self.multi_step}, "
            f"{self.entries} entries"
        )

    def observations(self, begin: int, *, frames_last: bool = True) -> np.ndarray:
        """Return the episode's observations as an environment returns them: stacked if the task has several frames."""
        seen = self.frames
        if self.stack > 1:
            seen = np.lib.stride_tricks.sliding_window_view(seen, self.stack, axis=0)
            seen = seen if frames_last else np.moveaxis(seen, -1, 1)
        return np.ascontiguousarray(seen[begin : begin + EPISODE])

    def priorities(self, entries: int) -> np.ndarray:
        return np.random.default_rng(1).uniform(0.1, 2.0, entries).astype(np.float32)


TASK = functools.cache(Task)


def distinct(random: np.random.Generator, shape: tuple, dtype: str) -> np.ndarray:
    """Return random values that neither compression nor page sharing can shrink."""
    if np.dtype(dtype).kind == "f":
        return random.standard_normal(shape, dtype="float32").astype(dtype, copy=False)
    return random.integers(0, np.iinfo(dtype).max, shape, dtype=dtype)


ERRORS = np.random.default_rng(3).uniform(0.1, 2.0, (64, BATCH)).astype(np.float32)
FRACTIONS = np.random.default_rng(5).random((64, BATCH))


def leaf_updates(leaves: int) -> tuple[np.ndarray, np.ndarray]:
    """Return 64 updates of a tree: leaves [64, 256] and weights [64, 256]."""
    random = np.random.default_rng(6)
    return random.integers(0, leaves, (64, BATCH)), random.uniform(0.1, 2.0, (64, BATCH))


def leaf_weights(leaves: int) -> np.ndarray:
    return np.random.default_rng(4).uniform(0.1, 2.0, leaves)


def in_rotation(call: Callable[..., object], *columns: Sequence) -> Callable[[], object]:
    """Return a side that calls `call` with the next item of each column, in rotation."""
    rows = itertools.cycle(list(zip(*columns, strict=True)))
    return lambda: call(*next(rows))


class Acting:
    """Side with actors in processes of their own, which insert so many blocks of steps, and a learner here."""

    def start(self, context, actors: int, act: Callable[..., None], *args: object) -> None:
        """Start processes that call `act` with their end of a pipe, and wait until each reports that it is ready. None
        over the pipe ends a process.
        """
        self.pipes, self.actors = [], []
        for _ in range(actors):
            ours, theirs = context.Pipe()
            process = context.Process(target=act, args=(theirs, *args), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.actors.append(process)
        for pipe in self.pipes:
            pipe.recv()

    def draw(self) -> None:
        """Draw the learner's next batch; subclasses override the method."""
        raise NotImplementedError

    def clock(self, count: int) -> float:
        """Return the seconds for `count` batches, timed from the first on; `times` has the seconds of each batch."""
        for pipe in self.pipes:
            pipe.send(count // len(self.pipes))
        self.draw()
        self.times = times_of(self.draw, count - 1)
        return sum(self.times) * count / (count - 1)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for actor in self.actors:
            actor.join(10)


def from_the_first(draw: Callable[[], object], count: int) -> float:
    """Return the seconds for `count` batches, timed from the first batch on and scaled to all."""
    draw()
    began = time.perf_counter()
    for _ in range(count - 1):
        draw()
    return (time.perf_counter() - began) * count / (count - 1)


def times_of(ask: Callable[[], object], count: int) -> list[float]:
    """Make `count` calls, and return the seconds of each."""
    moments = [time.perf_counter()]
    for _ in range(count):
        ask()
        moments.append(time.perf_counter())
    return [end - begin for begin, end in itertools.pairwise(moments)]


def answer_orders(pipe, ask: Callable[[], object]) -> None:
    """Call `ask` as many times as each order says; answer with the seconds of each call."""
    pipe.send("ready")
    while (count := pipe.recv()) is not None:
        pipe.send(times_of(ask, count))


def clock(side: Callable[[], object], count: int) -> float:
    """Return the seconds for `count` calls of a side, measured by the side itself if it has a `clock`."""
    if hasattr(side, "clock"):
        return float(side.clock(count))
    gc.collect()
    gc.disable()
    try:
        began = time.perf_counter()
        for _ in range(count):
            side()
        return time.perf_counter() - began
    finally:
        gc.enable()


# The network that all inference nodes compute: 8 numbers in, two layers of 64, 4 out.

INPUTS, HIDDEN, OUTPUTS = 8, 64, 4
_RANDOM = np.random.default_rng(0)
LAYERS = [
    (_RANDOM.standard_normal((a, b), np.float32) / np.sqrt(a, dtype=np.float32), np.zeros(b, np.float32))
    for a, b in ((INPUTS, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, OUTPUTS))
]
"""Weight and bias of each layer."""


def computed(inputs):
    """Compute the network: rows [B, 8] to rows [B, 4]."""
    for depth, (weight, bias) in enumerate(LAYERS, start=1):
        inputs = inputs @ weight + bias
        if depth < len(LAYERS):
            inputs = np.tanh(inputs)
    return inputs


# Packets of samples of a drone, from a worker to a trainer, and a model in return.

PACKETS = 16
"""Number of different packets, which are sent in rotation."""
MODEL_BYTES = 1_000_000


def columns(length):
    """Yield packets of so many samples as columns [T, *F]: the observation has four numbers, the action two."""
    random = np.random.default_rng(0)
    for _ in range(PACKETS):
        yield {
            "obs": random.standard_normal((length, 4), np.float32),
            "action": random.standard_normal((length, 2), np.float32),
            "reward": random.standard_normal(length, np.float32),
            "terminated": np.arange(length) == length - 1,
        }


def packets(length):
    """Yield the packets of `columns` as lists of samples (act, obs, rew, done, info), as TMRL's workers make them."""
    for packet in columns(length):
        obs = [tuple(row.reshape(4, 1)) for row in packet["obs"]]
        rest = packet["action"], obs, packet["reward"].tolist(), packet["terminated"].tolist()
        yield [
            (act.copy(), tuple(x.copy() for x in seen), rew, done, {})
            for act, seen, rew, done in zip(*rest, strict=True)
        ]


def model():
    """Return a model of about a megabyte: random bytes in place of weights."""
    return np.random.default_rng(1).integers(0, 256, MODEL_BYTES, np.uint8).tobytes()
