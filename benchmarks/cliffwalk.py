"""Updates that learning takes on the blind cliffwalk with uniform, greedy, rank-based and proportional draws.

The toy problem of Schaul et al., Prioritized Experience Replay, ICLR 2016, section 3.1 and appendix B.1. The walk has n
states in a row, with two actions in each. One action goes on, the other ends the episode without a reward, and only the
last state's right action pays 1. The memory holds all sequences of actions, and only one of its entries has a reward.
Tabular Q-learning replays one entry at a time until the mean squared error of all values is below 0.001.
"""

import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
from measure import arguments, plot, write_page

from memoire import Greedy, Memory, Parameters, Prioritized, RankBased, Schema, Uniform
from memoire.replay.sampling import Sampler

SAMPLERS: dict[str, Sampler] = {
    "uniform": Uniform(),
    "proportional": Prioritized(0.6, beta=0.0),
    "rank-based": RankBased(0.7, beta=0.0, stratified=False),
    "greedy": Greedy(),
}
STEP = 0.25
GOAL = 1e-3
MAX_UPDATES = 10_000_000
SCHEMA = Schema({"state": (np.int8, ()), "action": np.int8, "reward": np.float32})


def walk(length: int) -> list[tuple[int, int, float, bool]]:
    """Return the transitions of all sequences of actions: (state, action, reward, is the last of its episode)."""
    steps = []
    for sequence in range(1 << length):
        for state in range(length):
            action = sequence >> state & 1
            is_right = action == state & 1
            is_last = not is_right or state == length - 1
            steps.append((state, action, float(is_right and state == length - 1), is_last))
            if is_last:
                break
    return steps


def truth(length: int) -> np.ndarray:
    """Return the values to which Q-learning converges, [length, 2]."""
    values = np.zeros((length, 2))
    for state in range(length):
        values[state, state & 1] = (1.0 - 1.0 / length) ** (length - 1 - state)
    return values


def updates_to_learn(length: int, sampler: Sampler, seed: int) -> int:
    """Return the entries replayed until the values are right, or MAX_UPDATES if they never are."""
    rng = np.random.default_rng(seed)
    transitions = walk(length)
    memory = Memory(SCHEMA, len(transitions), Parameters().replace(**sampler.fields(), start="repeat"), seed=seed)
    memory.open()
    ends = np.flatnonzero([last for *_, last in transitions]) + 1
    episodes = np.split(np.arange(len(transitions)), ends[:-1])
    steps = [transitions[i] for episode in rng.permutation(len(ends)) for i in episodes[episode]]
    for state, action, reward, is_last in steps:
        memory.add(0, (np.int8(state), np.int8(action), np.float32(reward)))
        if is_last:
            memory.close(terminated=True)
            memory.open()
    q = rng.normal(size=(length, 2)) * 0.1
    right, discount = truth(length), 1.0 - 1.0 / length
    for update in range(1, MAX_UPDATES):
        number = memory.draw(1)
        state, action, reward, is_last = steps[number[0]]
        error = reward - q[state, action] + (0.0 if is_last else discount * q[state + 1].max())
        q[state, action] += STEP * error
        memory.update_priorities(number, [error])
        if update % 16 == 0 and np.square(q - right).mean() < GOAL:
            return update
    return MAX_UPDATES


def measure(lengths: list[int], seeds: int, tell: Callable[[str], None]) -> dict[str, dict[int, list[int]]]:
    """Return the updates of each sampler at each length, one count for each seed."""
    counts: dict[str, dict[int, list[int]]] = {name: {} for name in SAMPLERS}
    for length in lengths:
        for name, sampler in SAMPLERS.items():
            counts[name][length] = [updates_to_learn(length, sampler, seed) for seed in range(seeds)]
        medians = "   ".join(f"{name} {statistics.median(counts[name][length]):9.0f}" for name in SAMPLERS)
        tell(f"{length:2d} states, {len(walk(length)):6d} entries   {medians}")
    return counts


def main() -> None:
    args = arguments(__doc__, longest=16, seeds=5)
    lines: list[str] = []
    counts = measure(list(range(2, args.longest + 1)), args.seeds, lines.append)
    print(*lines, sep="\n")
    if args.write:
        rows = "\n".join(f"    {line}" for line in lines)
        shown = f"Medians of {args.seeds} seeds, updates until the values are right:"
        write_page(args.write, "cliffwalk", __doc__, shown, rows, "![curves](cliffwalk.svg)")
        draw(counts, Path(args.write, "cliffwalk.svg"))


def draw(counts: dict[str, dict[int, list[int]]], path: Path) -> None:
    """Draw the curves on double logarithmic axes: medians, over a band of the range of all seeds."""
    with plot(path, 7, 4.5) as axes:
        for name, by_length in counts.items():
            sizes, updates = [len(walk(length)) for length in by_length], list(by_length.values())
            middles = [statistics.median(each) for each in updates]
            (curve,) = axes.loglog(sizes, middles, marker="o", markersize=3, label=name)
            ends = list(map(min, updates)), list(map(max, updates))
            axes.fill_between(sizes, *ends, color=curve.get_color(), alpha=0.2)
        axes.set(xlabel="entries in the memory", ylabel="updates until the values are right", title="Blind cliffwalk")
        axes.legend()
        axes.grid(alpha=0.3)


if __name__ == "__main__":
    main()
