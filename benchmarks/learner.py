"""How does a learner's replay compare with every peer's, and with NumPy: insert, draw and gather, update, the tree?

cpprb, TorchRL, Stable-Baselines3 and Reverb each run in a process and an environment of their own (build/peers, made
when it is missing: torch and TensorFlow are gigabytes), are given the same steps, and keep them as they recommend:

* memoire and cpprb store a frame once, cpprb twice where windows have several steps; TorchRL and Stable-Baselines3
  store whole stacks for both states, and hold fewer entries of W2 for that, which is in their favour.
* memoire and Stable-Baselines3 make n-step sums when drawing, cpprb when inserting, TorchRL is given them.
* Reverb makes an item of each step through its structured writer; server and client are in one process.
* Stable-Baselines3 draws uniformly: it knows no priorities, and so no trees.

One thread each, but for Reverb, which has its own.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from measure import Report, Side, contest
from measure import arguments as flags
from peers import NAMES, Company, PeerUnavailable
from peers.tasks import ALPHA, BATCH, BETA, EPISODE, ERRORS, FRACTIONS, Task, in_rotation, leaf_updates, leaf_weights

import memoire
from memoire import _core

SLOTS = "NumPy, column[row] = value for each column"
SLICES = "NumPy, column[a:b] = values for each column"
LEAST_ADDED = {"W1": 1e6, "W2": None}
"""Steps a second that are inserted at least."""
GATHER = "NumPy, fancy indexing of as many rows"
Row = tuple[str, Side, dict[str, Side], dict[str, Any]]


def schema_of(task: Task) -> memoire.Schema:
    return memoire.Schema(
        {
            "obs": memoire.Column(task.dtype, task.shape, "state"),
            "action": memoire.Column(task.action_dtype, task.action_shape),
            "reward": np.float32,
        }
    )


def play(pipe: Connection, client: memoire.Client, task: Task, ring: int, block: int) -> None:
    """An actor's turns: its memory is full before the first, and in each it steps until the pipe says something.

    Args:
        ring: Entries that the memory has room for.
        block: Steps between two looks at the pipe.
    """
    rows = list(zip(task.frames[:EPISODE], task.actions, task.rewards, task.frames[1 : EPISODE + 1], strict=True))
    place, info, writer = 0, {}, client.writer(check=False)  # type: int, dict[str, Any], Any

    def record(steps: int) -> None:
        nonlocal place
        for _ in range(steps):
            obs, action, reward, following = rows[place]
            place = (place + 1) % EPISODE
            writer.step(obs, action, reward, place == 0, False, following, info)

    record(ring)
    pipe.send("ready")
    while pipe.recv() is not None:
        while not pipe.poll():
            record(block)
        pipe.recv()
        pipe.send(None)


def buffer_of(task: Task, entries: int) -> memoire.Buffer:
    sampler = memoire.Prioritized(ALPHA, beta=BETA)
    settings: dict[str, Any] = {"multi_step": task.multi_step, "discount": 0.99, "frame_stack": task.stack}
    return memoire.Buffer(schema_of(task), entries, sampler=sampler, seed=0, start="repeat", **settings)


def extend(buffer: memoire.Buffer, task: Task) -> None:
    buffer.memory.open()
    buffer.memory.extend(0, (task.frames[:EPISODE], task.actions, task.rewards))
    buffer.memory.close(terminated=True, final_state=task.frames[EPISODE])


@cache
def filled(task: Task) -> memoire.Buffer:
    buffer = buffer_of(task, task.entries)
    for _ in range(task.entries // EPISODE):
        extend(buffer, task)
    buffer.update_priorities(np.arange(task.entries), task.priorities(task.entries))
    return buffer


def by_writer(task: Task) -> Side:
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


def by_add(task: Task) -> Side:
    """`memory.add`, for whoever keeps count of episodes; the close is in it."""
    memory = buffer_of(task, task.ring).memory
    rows = list(zip(task.frames[:EPISODE], task.actions, task.rewards, strict=True))

    def adds() -> None:
        memory.open()
        for row in rows:
            memory.add(0, row)
        memory.close(terminated=True, final_state=task.frames[EPISODE])

    return adds


def updates(task: Task) -> Side:
    buffer = filled(task)
    ids = [buffer.sample(BATCH).ids for _ in range(64)]
    return in_rotation(buffer.update_priorities, ids, ERRORS)


# The limit: NumPy, which is given all that has to be found out


class Columns:
    """Arrays of a ring, and the least that Python can do with them."""

    def __init__(self, task: Task, entries: int) -> None:
        shapes = (task.shape, task.dtype), (task.action_shape, task.action_dtype), ((), "float32")
        self.task, self.entries, self.row = task, entries, 0
        self.columns = [np.zeros((entries, *shape), dtype) for shape, dtype in shapes]
        self.values = task.frames[:EPISODE], task.actions, task.rewards
        self.rows = list(zip(*self.values, strict=True))
        random = np.random.default_rng(1)
        last = random.integers(task.stack, entries - task.multi_step, (64, BATCH))
        frames = last if task.stack == 1 else last[:, :, None] - np.arange(task.stack)[::-1]
        self.turns = cycle(zip(last, frames, frames + task.multi_step, strict=True))

    def add(self) -> None:
        for values in self.rows:
            row = self.row
            for column, value in zip(self.columns, values, strict=True):
                column[row] = value
            self.row = (row + 1) % self.entries

    def extend(self) -> None:
        begin = self.row if self.row + EPISODE <= self.entries else 0
        for column, block in zip(self.columns, self.values, strict=True):
            column[begin : begin + EPISODE] = block
        self.row = begin + EPISODE

    def filled(self) -> "Columns":
        for _ in range(self.entries // EPISODE):
            self.extend()
        return self

    def gather(self) -> object:
        last, before, after = next(self.turns)
        states, actions, rewards = self.columns
        return states[before], states[after], actions[last], rewards[last]


# The tree alone


@cache
def tree_of(leaves: int) -> Any:
    tree = _core.PriorityTree(leaves)
    tree.set(np.arange(leaves), leaf_weights(leaves))
    return tree


def tree_draws(leaves: int) -> Side:
    return in_rotation(tree_of(leaves).draw, FRACTIONS)


def tree_updates(leaves: int) -> Side:
    return in_rotation(tree_of(leaves).set, *leaf_updates(leaves))


# The table


class Rows:
    """Every row: its name, memoire's side and the others', made when it is their turn."""

    def __init__(self, company: Company, chosen: Callable[[str], bool]) -> None:
        self.company, self.chosen = company, chosen

    def of_task(self, task: Task, stacked: int) -> Iterator[Row]:
        """Rows of a task; `stacked` is how many entries those hold that store whole stacks."""
        per_episode = {"per_call": EPISODE}
        everyone, sides = ("cpprb", "torchrl", "sb3", "reverb"), partial(self.sides, task, stacked)
        rows: list[tuple[str, Callable[[], Side], Callable[[], dict[str, Side]], dict[str, Any]]] = [
            (
                f"insert a step, episode close included, {task.name}",
                partial(by_add, task),
                lambda: {SLOTS: Columns(task, task.ring).add} | sides("steps", everyone),
                per_episode
                | {"aim": {"Stable-Baselines3": f"add-{task.name}-sb3"}, "floor_rate": LEAST_ADDED[task.name]},
            ),
            (
                f"insert a step with writer.step, {task.name}",
                partial(by_writer, task),
                lambda: sides("steps", everyone),
                per_episode,
            ),
            (
                f"insert episodes of {EPISODE} steps, {task.name}",
                lambda: partial(extend, buffer_of(task, task.ring), task),
                lambda: {SLICES: Columns(task, task.ring).extend} | sides("episodes", ("cpprb", "torchrl")),
                per_episode,
            ),
            (
                f"draw + gather {BATCH}, {task.name}",
                lambda: partial(filled(task).sample, BATCH),
                lambda: {GATHER: Columns(task, task.entries).filled().gather} | sides("draws", everyone),
                {"aim": {"cpprb": f"draw-{task.name}-cpprb", "NumPy,": f"draw-{task.name}-numpy"}},
            ),
            (
                f"update {BATCH} priorities, {task.name}",
                partial(updates, task),
                lambda: sides("updates", ("cpprb", "torchrl", "reverb")),
                {},
            ),
        ]
        for what, ours, theirs, settings in rows:
            if self.chosen(what):
                yield what, ours(), theirs(), settings

    def of_tree(self, leaves: int) -> Iterator[Row]:
        for verb, ours in (("draw", tree_draws), ("update", tree_updates)):
            what = f"{verb} {BATCH} of a tree of {leaves} leaves, float64"
            if self.chosen(what):
                makes = dict.fromkeys(("torchrl", "cpprb"), (f"tree_{verb}s", leaves))
                yield what, ours(leaves), {**self.company.sides(makes)}, {"aim": {"TorchRL": f"tree-{verb}-torchrl"}}

    def sides(self, task: Task, stacked: int, make: str, names: tuple[str, ...]) -> dict[str, Side]:
        entries = {"sb3": stacked, "torchrl": stacked}
        return {**self.company.sides({name: (make, task.name, entries.get(name, task.entries)) for name in names})}


def main() -> None:
    chosen = flags(__doc__, peers=True)
    company = Company(chosen.peers)
    sizes = (("W1", 20_000, 20_000), ("W2", 2_000, 2_000)) if chosen.quick else WHOLE
    pace: dict[str, Any] = {"rounds": 2, "seconds": 0.01} if chosen.quick else {"rounds": 11, "seconds": 0.08}
    report = Report(__doc__)
    report.heading()
    rows = Rows(company, lambda what: chosen.only in what)

    def race(what: str, ours: Side, theirs: dict[str, Side], settings: dict[str, Any]) -> None:
        aims = settings.pop("aim", {})
        named = {baseline: aims.get(baseline.split()[0], "") for baseline in theirs}
        try:
            report.add(*contest(what, ours, theirs, aims=named, **settings, **pace))
        except PeerUnavailable as error:
            company.leave_out(error)
            rest = {baseline: side for baseline, side in theirs.items() if NAMES[error.name] not in baseline}
            race(what, ours, rest, settings | {"aim": aims})

    for name, entries, stacked in sizes:
        task = Task(name, entries)
        report.facts.append(task.described)
        for row in rows.of_task(task, stacked):
            race(*row)
        company.part()
        filled.cache_clear()
    for row in rows.of_tree(50_000 if chosen.quick else 1_000_000):
        race(*row)
    company.part()
    report.facts += company.facts()
    report.finish(chosen.write, "learner")


WHOLE = (("W1", 1_000_000, 1_000_000), ("W2", 50_000, 10_000))
"""Tasks, their entries, and those of peers that store whole stacks."""


if __name__ == "__main__":
    main()
