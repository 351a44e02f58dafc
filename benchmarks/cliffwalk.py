"""How many updates does learning take on the blind cliffwalk, drawn uniformly, greedily, by rank and in proportion?

The toy problem of Schaul et al., Prioritized Experience Replay, ICLR 2016, section 3.1 and appendix B.1: n states in a
row, two actions in each; one goes on, the other ends the episode with nothing, and only the last state's right action
pays 1. The memory holds every sequence of actions there is, so that one entry in 2 ** n carries news at first. Tabular
Q-learning replays one entry at a time until the mean squared error of all values is below 0.001.
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
    """Every transition of every sequence of actions: (state, action, reward, is the last of its episode)."""
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
    """The values that Q-learning ends in, [length, 2]."""
    values = np.zeros((length, 2))
    for state in range(length):
        values[state, state & 1] = (1.0 - 1.0 / length) ** (length - 1 - state)
    return values


def updates_to_learn(length: int, sampler: Sampler, seed: int) -> int:
    """How many entries are replayed before the values are right; MAX_UPDATES where they never are."""
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
    """Updates of each sampler at each length, one for each seed."""
    found: dict[str, dict[int, list[int]]] = {name: {} for name in SAMPLERS}
    for length in lengths:
        for name, sampler in SAMPLERS.items():
            found[name][length] = [updates_to_learn(length, sampler, seed) for seed in range(seeds)]
        medians = "   ".join(f"{name} {statistics.median(found[name][length]):9.0f}" for name in SAMPLERS)
        tell(f"{length:2d} states, {len(walk(length)):6d} entries   {medians}")
    return found


def main() -> None:
    given = arguments(__doc__, longest=16, seeds=5)
    lines: list[str] = []
    found = measure(list(range(2, given.longest + 1)), given.seeds, lines.append)
    print(*lines, sep="\n")
    if given.write:
        rows = "\n".join(f"    {line}" for line in lines)
        shown = f"Medians of {given.seeds} seeds, updates until the values are right:"
        write_page(given.write, "cliffwalk", __doc__, shown, rows, "![curves](cliffwalk.svg)")
        draw(found, Path(given.write, "cliffwalk.svg"))


def draw(found: dict[str, dict[int, list[int]]], path: Path) -> None:
    """The curves on double logarithmic axes, medians over the range of all seeds."""
    with plot(path, 7, 4.5) as axes:
        for name, by_length in found.items():
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
