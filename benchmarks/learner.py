"""How does a learner's replay compare with cpprb's and TorchRL's: insert, draw and gather, update, the tree alone?

Their wheels are installed into an environment of their own, build/peers, where this script starts itself again (torch
is among them: gigabytes). All three get the same steps, and each keeps them as it recommends: memoire stores a frame
once, cpprb too, but for n-step windows, where it stores it for both states, and TorchRL stores whole stacks for both.
memoire makes n-step sums when drawing, cpprb when inserting, and TorchRL is given them. One thread each.
"""

import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from measure import Report, Side, arguments, distinct, installed, race

import memoire
from memoire import _core

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "build" / "peers"
ALPHA, BETA = 0.6, 0.4
BATCH = 256
EPISODE = 1000
Sides = tuple[Side, Side]
Row = tuple[str, Callable[[], Sides], dict[str, Any]]


def in_peers_environment() -> None:
    """Go on where cpprb and TorchRL are; made and filled when it is not there."""
    if find_spec("cpprb") and find_spec("torchrl"):
        return
    python = PEERS / "bin" / "python"
    if Path(sys.prefix) == PEERS:
        sys.exit(f"cpprb or TorchRL cannot be found in {PEERS}: remove it, and start again")
    if not python.exists():
        print(f"installing cpprb and TorchRL into {PEERS}", flush=True)
        venv.create(PEERS, with_pip=True)
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    wanted = [*project["dependency-groups"]["peers"], *project["project"]["dependencies"], "matplotlib"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted], check=True)
    paths = os.pathsep.join([str(Path(memoire.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    os.execve(python, [python, *sys.argv], os.environ | {"PYTHONPATH": paths.rstrip(os.pathsep)})


class Task:
    """Steps of a made-up environment: W1 has small ones, W2 stacks of 4 frames, of which 3 were seen before."""

    def __init__(self, name: str, entries: int) -> None:
        self.name, self.entries = name, entries
        self.ring = min(entries, 5_000 if name == "W2" else 50_000)  # inserts are timed where memory is warm
        self.stack, self.multi_step = (4, 3) if name == "W2" else (1, 1)
        shape, dtype = ((84, 84), "uint8") if name == "W2" else ((64,), "float32")
        self.action = (8,) if name == "W1" else ()
        action = np.float32 if name == "W1" else np.int64
        self.schema = memoire.Schema(
            {
                "obs": memoire.Column(dtype, shape, "state"),
                "action": memoire.Column(action, self.action),
                "reward": np.float32,
            }
        )
        random = np.random.default_rng(0)
        self.frames = distinct(random, (EPISODE + self.stack, *shape), dtype)
        self.actions = distinct(random, (EPISODE, *self.action), "float32" if name == "W1" else "int64")
        self.rewards = random.standard_normal(EPISODE, dtype="float32")
        self.parameters = {"multi_step": self.multi_step, "discount": 0.99, "frame_stack": self.stack}

    @property
    def described(self) -> str:
        columns = ", ".join(f"{name} {column.dtype}{list(column.shape)}" for name, column in self.schema.items())
        return f"{self.name}: {columns}; stack {self.stack}, n-step {self.multi_step}, {self.entries} entries"

    def observations(self, begin: int) -> np.ndarray:
        """The episode's observations as an environment shows them: stacked, frames last where there are several."""
        seen = self.frames
        if self.stack > 1:
            seen = np.lib.stride_tricks.sliding_window_view(seen, self.stack, axis=0)
        return np.ascontiguousarray(seen[begin : begin + EPISODE])

    @property
    def is_end(self) -> np.ndarray:
        return np.arange(EPISODE) == EPISODE - 1


# memoire


def buffer_of(task: Task, entries: int) -> memoire.Buffer:
    sampler = memoire.Prioritized(ALPHA, beta=BETA)
    return memoire.Buffer(task.schema, entries, sampler=sampler, seed=0, start="repeat", **task.parameters)


def extend(buffer: memoire.Buffer, task: Task) -> None:
    buffer.memory.open()
    buffer.memory.extend(0, (task.frames[:EPISODE], task.actions, task.rewards))
    buffer.memory.close(terminated=True, final_state=task.frames[EPISODE])


@cache
def ours_filled(task: Task) -> memoire.Buffer:
    buffer = buffer_of(task, task.entries)
    for _ in range(task.entries // EPISODE):
        extend(buffer, task)
    buffer.update_priorities(np.arange(task.entries), np.random.default_rng(1).uniform(0.1, 2.0, task.entries))
    return buffer


def our_steps(task: Task) -> Side:
    """`writer.step` for one environment, as an actor calls it: checks, both flags, the open episode."""
    buffer = buffer_of(task, task.ring)
    writer = buffer.writer(num_envs=1, autoreset="disabled", check=False)
    frames = [frame[None] for frame in task.frames]
    rest = list(zip(task.actions[:, None], task.rewards[:, None], task.is_end[:, None], strict=True))
    never = np.zeros(1, np.bool_)

    def steps() -> None:
        for number, (action, reward, is_end) in enumerate(rest):
            writer.step(frames[number], action, reward, is_end, never, frames[number + 1])

    return steps


def our_adds(task: Task) -> Side:
    """`memory.add`, for whoever keeps count of episodes."""
    memory = buffer_of(task, task.ring).memory
    rows = list(zip(task.frames[:EPISODE], task.actions, task.rewards, strict=True))

    def adds() -> None:
        memory.open()
        for row in rows:
            memory.add(0, row)
        memory.close(terminated=True, final_state=task.frames[EPISODE])

    return adds


def our_updates(task: Task) -> Side:
    buffer, turn = ours_filled(task), turns()
    ids = [buffer.sample(BATCH).ids for _ in range(64)]
    return lambda: buffer.update_priorities(ids[next(turn)], ERRORS[next(turn)])


ERRORS = np.random.default_rng(3).uniform(0.1, 2.0, (64, BATCH)).astype(np.float32)


def turns() -> Iterator[int]:
    while True:
        yield from range(64)


# cpprb


def cpprb_of(task: Task, entries: int) -> Any:
    import cpprb

    shape = task.schema["obs"].shape + (() if task.stack == 1 else (task.stack,))
    columns = {
        "obs": {"shape": shape, "dtype": task.schema["obs"].dtype},
        "act": {"shape": task.action or 1, "dtype": task.schema["action"].dtype},
        "rew": {},
        "done": {},
    }
    form: dict[str, Any] = {"next_of": "obs"}
    if task.multi_step > 1:  # which n-step windows exclude there
        columns["next_obs"] = columns["obs"]
        several = {"size": task.multi_step, "gamma": 0.99, "rew": "rew", "next": "next_obs"}
        form = {"Nstep": several, "stack_compress": ["obs", "next_obs"]}
    return cpprb.PrioritizedReplayBuffer(entries, columns, alpha=ALPHA, **form)


def cpprb_block(task: Task) -> dict[str, Any]:
    return {
        "obs": task.observations(0),
        "act": task.actions,
        "rew": task.rewards,
        "next_obs": task.observations(1),
        "done": task.is_end,
    }


@cache
def cpprb_filled(task: Task) -> Any:
    replay, block = cpprb_of(task, task.entries), cpprb_block(task)
    for _ in range(task.entries // EPISODE):
        replay.add(**block)
        replay.on_episode_end()
    replay.update_priorities(np.arange(task.entries), np.random.default_rng(1).uniform(0.1, 2.0, task.entries))
    return replay


def cpprb_steps(task: Task) -> Side:
    replay, block = cpprb_of(task, task.ring), cpprb_block(task)
    rows = [{name: column[step] for name, column in block.items()} for step in range(EPISODE)]

    def steps() -> None:
        for row in rows:
            replay.add(**row)
        replay.on_episode_end()

    return steps


def cpprb_extends(task: Task) -> Side:
    replay, block = cpprb_of(task, task.ring), cpprb_block(task)

    def extends() -> None:
        replay.add(**block)
        replay.on_episode_end()

    return extends


def cpprb_updates(task: Task) -> Side:
    replay, turn = cpprb_filled(task), turns()
    indexes = [replay.sample(BATCH, beta=BETA)["indexes"] for _ in range(64)]
    return lambda: replay.update_priorities(indexes[next(turn)], ERRORS[next(turn)])


# TorchRL


def torchrl_of(task: Task, entries: int) -> Any:
    from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

    storage = LazyTensorStorage(entries)
    return TensorDictPrioritizedReplayBuffer(alpha=ALPHA, beta=BETA, storage=storage, batch_size=BATCH)


def torchrl_block(task: Task) -> Any:
    """Both states of each transition, and what its n-step transform would have made of the rewards."""
    import torch
    from tensordict import TensorDict

    def tensor(array: np.ndarray) -> Any:
        return torch.from_numpy(np.ascontiguousarray(array))

    ended = tensor(task.is_end[:, None])
    after = {"observation": tensor(task.observations(1)), "reward": tensor(task.rewards[:, None]), "done": ended}
    entries = {"observation": tensor(task.observations(0)), "action": tensor(task.actions), "next": after}
    return TensorDict(entries, batch_size=[EPISODE])


@cache
def torchrl_filled(task: Task) -> Any:
    import torch

    replay, block = torchrl_of(task, task.entries), torchrl_block(task)
    for _ in range(task.entries // EPISODE):
        replay.extend(block)
    priorities = torch.from_numpy(np.random.default_rng(1).uniform(0.1, 2.0, task.entries).astype(np.float32))
    replay.update_priority(torch.arange(task.entries), priorities)
    return replay


def torchrl_steps(task: Task) -> Side:
    replay, rows = torchrl_of(task, task.ring), list(torchrl_block(task).unbind(0))

    def steps() -> None:
        for row in rows:
            replay.add(row)

    return steps


def torchrl_updates(task: Task) -> Side:
    import torch

    replay, turn = torchrl_filled(task), turns()
    indexes = [replay.sample()["index"] for _ in range(64)]
    errors = torch.from_numpy(ERRORS)
    return lambda: replay.update_priority(indexes[next(turn)], errors[next(turn)])


# The tree alone


@cache
def tree_of(leaves: int) -> Any:
    tree = _core.PriorityTree(leaves)
    tree.set(np.arange(leaves), np.random.default_rng(4).uniform(0.1, 2.0, leaves))
    return tree


@cache
def torchrl_tree(leaves: int) -> Any:
    from torchrl._torchrl import SumSegmentTreeFp64

    tree = SumSegmentTreeFp64(leaves)
    tree.update(np.arange(leaves), np.random.default_rng(4).uniform(0.1, 2.0, leaves))
    return tree


@cache
def cpprb_tree(leaves: int) -> Any:
    """Its trees have no door of their own: the buffer of the least column."""
    import cpprb

    replay = cpprb.PrioritizedReplayBuffer(leaves, {"a": {"dtype": np.int8}}, alpha=1.0)
    replay.add(a=np.zeros(leaves, np.int8), priorities=np.random.default_rng(4).uniform(0.1, 2.0, leaves))
    return replay


FRACTIONS = np.random.default_rng(5).random((64, BATCH))
PLACES = np.random.default_rng(6)


def tree_draws(leaves: int, peer: str) -> Sides:
    tree, turn, other = tree_of(leaves), turns(), turns()
    if peer == "TorchRL":
        theirs = torchrl_tree(leaves)
        total = theirs.query(0, leaves)
        return (
            lambda: tree.draw(FRACTIONS[next(turn)]),
            lambda: theirs.scan_lower_bound(FRACTIONS[next(other)] * total),
        )
    replay = cpprb_tree(leaves)
    return lambda: tree.draw(FRACTIONS[next(turn)]), lambda: replay.sample(BATCH, beta=0.0)


def tree_updates(leaves: int, peer: str) -> Sides:
    tree, turn, other = tree_of(leaves), turns(), turns()
    rows = PLACES.integers(0, leaves, (64, BATCH))
    values = PLACES.uniform(0.1, 2.0, (64, BATCH))

    def ours() -> None:
        at = next(turn)
        tree.set(rows[at], values[at])

    update = torchrl_tree(leaves).update if peer == "TorchRL" else cpprb_tree(leaves).update_priorities

    def theirs() -> None:
        at = next(other)
        update(rows[at], values[at])

    return ours, theirs


# The table


def sides(make_ours: Callable[[Task], Side], make_theirs: Callable[[Task], Side], task: Task) -> Callable[[], Sides]:
    return lambda: (make_ours(task), make_theirs(task))


def our_extends(task: Task) -> Side:
    return partial(extend, buffer_of(task, task.ring), task)


def our_draws(task: Task) -> Side:
    return partial(ours_filled(task).sample, BATCH)


def cpprb_draws(task: Task) -> Side:
    return partial(cpprb_filled(task).sample, BATCH, beta=BETA)


def torchrl_draws(task: Task) -> Side:
    return torchrl_filled(task).sample


def torchrl_extends(task: Task) -> Side:
    replay, block = torchrl_of(task, task.ring), torchrl_block(task)
    return lambda: replay.extend(block)


def rows(tasks: list[Task], leaves: int) -> Iterator[Row]:
    peers = {
        f"cpprb {installed('cpprb')}": (cpprb_steps, cpprb_extends, cpprb_draws, cpprb_updates),
        f"TorchRL {installed('torchrl')}": (torchrl_steps, torchrl_extends, torchrl_draws, torchrl_updates),
    }
    for task in tasks:
        for peer, (steps, extends, draws, updates) in peers.items():
            each = {"per_call": EPISODE, "baseline": peer}
            yield f"insert a step with writer.step, {task.name}", sides(our_steps, steps, task), each
            yield f"insert a step with memory.add, {task.name}", sides(our_adds, steps, task), each
            yield f"insert episodes of {EPISODE} steps, {task.name}", sides(our_extends, extends, task), each
            yield f"draw + gather {BATCH}, {task.name}", sides(our_draws, draws, task), {"baseline": peer}
            yield f"update {BATCH} priorities, {task.name}", sides(our_updates, updates, task), {"baseline": peer}
    for peer in peers:
        name = peer.split()[0]
        what = f"{peer}, a buffer of one int8 column" if name == "cpprb" else f"{peer}, SumSegmentTreeFp64"
        yield f"tree of {leaves} leaves: draw {BATCH}", partial(tree_draws, leaves, name), {"baseline": what}
        yield f"tree of {leaves} leaves: update {BATCH}", partial(tree_updates, leaves, name), {"baseline": what}


def main() -> None:
    chosen = arguments(__doc__)
    in_peers_environment()
    os.environ["RL_LOGGING_LEVEL"] = "WARNING"  # each storage would say that it is there
    import torch

    torch.set_num_threads(1)
    tasks = [Task("W1", 20_000), Task("W2", 2_000)] if chosen.quick else [Task("W1", 1_000_000), Task("W2", 10_000)]
    pace: dict[str, Any] = {"rounds": 3, "seconds": 0.02} if chosen.quick else {"rounds": 11, "seconds": 0.1}
    report = Report(__doc__, [task.described for task in tasks])
    report.heading()
    for what, make, settings in rows(tasks, 100_000 if chosen.quick else 1_000_000):
        if chosen.only in what + settings["baseline"]:
            report.add(race(what, *make(), **settings, **pace))
    report.finish(chosen.write, "learner")


if __name__ == "__main__":
    main()
