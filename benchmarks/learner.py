"""A learner's replay beside all peers and NumPy: insert, draw and gather, update, the tree.

cpprb, TorchRL, Stable-Baselines3 and Reverb each run in a process and an environment of their own (build/peers, created
if it is missing: torch and TensorFlow are gigabytes). All store the same steps, each as its documentation recommends:

* memoire and cpprb store a frame once, cpprb twice if windows have several steps; TorchRL and Stable-Baselines3
  store whole stacks for both states, and so hold fewer entries of W2, which is in their favour.
* memoire and Stable-Baselines3 compute n-step sums when drawing, cpprb when inserting; TorchRL receives them.
* Reverb makes an item of each step through its structured writer; server and client are in one process.
* Stable-Baselines3 draws uniformly: it has no priorities, and so no trees.

Each side has one thread, except Reverb, which has its own threads.
"""

from functools import cache, partial
from typing import Any

import numpy as np
from measure import Report, Side
from peers.tasks import BATCH, EPISODE, ERRORS, FRACTIONS, Task, in_rotation, leaf_updates, leaf_weights
from workloads import NumpyRing, buffer_of, extend

import memoire
from memoire import _core

SLOTS = "NumPy, column[row] = value for each column"
SLICES = "NumPy, column[a:b] = values for each column"
GATHER = "NumPy, fancy indexing of as many rows"
WHOLE = (("W1", 1_000_000, 1_000_000), ("W2", 50_000, 10_000))
"""Tasks, their entries, and the entries of peers that store whole stacks."""


@cache
def filled(task: Task) -> memoire.Buffer:
    buffer = buffer_of(task, task.entries)
    for _ in range(task.entries // EPISODE):
        extend(buffer.memory, task)
    buffer.update_priorities(np.arange(task.entries), task.priorities(task.entries))
    return buffer


def by_writer(task: Task) -> Side:
    """Return calls of `writer.step` for one environment, as an actor makes them, with checks and both flags."""
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
    """Return calls of `memory.add` for an episode, its close included."""
    memory = buffer_of(task, task.ring).memory
    rows = list(zip(task.frames[:EPISODE], task.actions, task.rewards, strict=True))

    def adds() -> None:
        memory.open()
        for row in rows:
            memory.add(0, row)
        memory.close(terminated=True, final_state=task.frames[EPISODE])

    return adds


def by_episode(task: Task) -> Side:
    return partial(extend, buffer_of(task, task.ring).memory, task)


def draws(task: Task) -> Side:
    return partial(filled(task).sample, BATCH)


def updates(task: Task) -> Side:
    buffer = filled(task)
    ids = [buffer.sample(BATCH).ids for _ in range(64)]
    return in_rotation(buffer.update_priorities, ids, ERRORS)


EVERYONE = ("cpprb", "torchrl", "sb3", "reverb")
ROWS = (
    ("insert a step, episode close included", by_add, {SLOTS: "add"}, "steps", EVERYONE,
     {"Stable-Baselines3": "add-{}-sb3"}),
    ("insert a step with writer.step", by_writer, {}, "steps", EVERYONE, {}),
    (f"insert episodes of {EPISODE} steps", by_episode, {SLICES: "extend"}, "episodes", ("cpprb", "torchrl"), {}),
    (f"draw + gather {BATCH}", draws, {GATHER: "gather"}, "draws", EVERYONE,
     {"cpprb": "draw-{}-cpprb", "NumPy,": "draw-{}-numpy"}),
    (f"update {BATCH} priorities", updates, {}, "updates", ("cpprb", "torchrl", "reverb"), {}),
)  # fmt: skip
"""Name, memoire's side, NumPy's side, the peers' side, the peers, and the aims by baseline of each row."""


def of_task(report: Report, task: Task, stacked: int, pace: dict[str, Any]) -> None:
    """Add the rows of a task; peers that store whole stacks hold `stacked` entries."""
    for what, ours, limit, make, names, aims in ROWS:
        if not report.wants(f"{what}, {task.name}"):
            continue
        inserts, entries = what.startswith("insert"), {"sb3": stacked, "torchrl": stacked}
        theirs: dict[str, Side] = {}
        for name, call in limit.items():
            values = task.frames[:EPISODE], task.actions, task.rewards
            ring = NumpyRing(values, task.ring if inserts else task.entries, task.stack, task.multi_step)
            theirs[name] = getattr(ring, call)
        theirs |= report.peer_group.sides({name: (make, task.name, entries.get(name, task.entries)) for name in names})
        named = {each: aims.get(each.split()[0], "").format(task.name) for each in theirs}
        settings = {"per_call": EPISODE if inserts else 1, "aims": named, **pace}
        report.compare(f"{what}, {task.name}", ours(task), theirs, **settings)


def of_tree(report: Report, leaves: int, pace: dict[str, Any]) -> None:
    """Add the rows of the priority tree alone."""
    tree = _core.PriorityTree(leaves)
    tree.set(np.arange(leaves), leaf_weights(leaves))
    sides = {"draw": in_rotation(tree.draw, FRACTIONS), "update": in_rotation(tree.set, *leaf_updates(leaves))}
    for verb, ours in sides.items():
        what = f"{verb} {BATCH} of a tree of {leaves} leaves, float64"
        if report.wants(what):
            theirs = report.peer_group.sides(dict.fromkeys(("torchrl", "cpprb"), (f"tree_{verb}s", leaves)))
            aims = {each: f"tree-{verb}-torchrl" for each in theirs if each.startswith("TorchRL")}
            report.compare(what, ours, theirs, aims=aims, **pace)


def main() -> None:
    report = Report.begin(__doc__, peers=True)
    sizes = (("W1", 20_000, 20_000), ("W2", 2_000, 2_000)) if report.quick else WHOLE
    pace: dict[str, Any] = {"rounds": 2, "seconds": 0.01} if report.quick else {"rounds": 11, "seconds": 0.08}
    for name, entries, stacked in sizes:
        task = Task(name, entries)
        report.facts.append(task.described)
        of_task(report, task, stacked, pace)
        report.peer_group.stop()
        filled.cache_clear()
    of_tree(report, 50_000 if report.quick else 1_000_000, pace)
    report.peer_group.stop()
    report.finish("learner")


if __name__ == "__main__":
    main()
