"""Classic ReplayMemory in one process: Q-learning on a corridor of nine cells whose right end pays 1."""

import numpy as np

from memoire import ReplayMemory

CELLS, START = 9, 4
rng = np.random.default_rng(0)


def play(memory: ReplayMemory, table: np.ndarray) -> float:
    """Play and record one episode, epsilon-greedy, at most 40 steps; return its total reward."""
    cell, state, total = START, np.array([START], np.int32), 0.0
    memory.new_episode()
    for _ in range(40):
        action = int(rng.integers(2)) if rng.random() < 0.2 else int(table[cell].argmax())
        after = cell + (1 if action else -1)
        reward = float(after == CELLS - 1)
        value = table[cell].max()  # the priority is the error of this value
        memory.add_entry(state, action, reward, 1.0, value, memory.info_buf, 1.0)
        cell, state, total = after, np.array([after], np.int32), total + reward
        if cell in (0, CELLS - 1):
            break
    ended = cell in (0, CELLS - 1)
    memory.close_episode(final_state=state, terminated=ended)  # the final state lets the last step be drawn
    return total


def main() -> None:
    """Play and learn in turns until the greedy policy goes right in every cell."""
    scalar = np.zeros((), np.float32)
    templates = (np.zeros(1, np.int32), np.zeros((), np.int64), scalar, scalar, scalar, scalar, np.zeros(0, np.uint8))
    memory = ReplayMemory(*templates, max_step=2000, seed=0)
    memory.multi_step = 3
    memory.discount_factor = 0.9
    memory.print_info()

    table = np.full((CELLS, 2), 0.5)
    table[[0, -1]] = 0.0  # the ends give no more rewards
    for episode in range(400):
        play(memory, table)
        batch = memory.get_batch(64)
        prev, following, _ = batch
        cells, target_cells = prev.state[:, 0, 0], following.state[:, -1, 0]
        targets = batch.reward + batch.discount * table[target_cells].max(axis=1)
        memory.update_priorities(batch.ids, targets - table[cells, prev.action])
        for *place, target, weight in zip(cells, prev.action, targets, batch.importance, strict=True):
            table[*place] += 0.1 * weight * (target - table[*place])
        if episode >= 50 and table[1:-1].argmax(axis=1).all():
            break
    print(f"after {episode + 1} episodes, {memory.num_episode()} of them in memory, the way right is known:")
    print(np.round(table[1:-1].max(axis=1), 2))


if __name__ == "__main__":
    main()
