"""Evaluation of a run's networks: python evaluate.py GAME FOLDER writes FOLDER/curve.json with a row for each network.

Each network plays twenty greedy episodes side by side, with the same seeds for all networks; a process for each core.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from settings import GAMES
from tasks import MAKERS, load, q_network

EPISODES, SEED = 20, 1_000_000


def policy_of(game: str, arrays: list[np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from observations [B, *F] to the most probable actions [B]."""
    algorithm, env = GAMES[game].algorithm, MAKERS[game][1]()
    space, shape = env.action_space, env.observation_space.shape
    if algorithm == "dqn":
        return q_policy(shape, arrays)
    if algorithm == "sac":
        arrays = arrays[:-2]  # drop the last layer, which gives the deviations
    activation = np.tanh if algorithm == "ppo" else lambda hidden: np.maximum(hidden, 0.0)

    def act(obs: np.ndarray) -> np.ndarray:
        hidden = obs.astype(np.float32)
        for place in range(0, len(arrays) - 2, 2):
            hidden = activation(hidden @ arrays[place].T + arrays[place + 1])
        outputs = hidden @ arrays[-2].T + arrays[-1]
        if algorithm == "ppo":
            return outputs.argmax(1)
        return 0.5 * (space.high + space.low) + 0.5 * (space.high - space.low) * np.tanh(outputs)

    return act


def q_policy(shape: tuple[int, ...], arrays: list[np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    torch.set_num_threads(1)
    net = q_network(shape, len(arrays[-1]))
    with torch.no_grad():
        for parameter, array in zip(net.parameters(), arrays, strict=True):
            parameter.copy_(torch.from_numpy(array))

    def act(obs: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return net(torch.from_numpy(obs).float()).argmax(1).numpy()

    return act


def mean_return(game: str, act: Callable[[np.ndarray], np.ndarray], episodes: int = EPISODES) -> float:
    """Return the mean return of episodes that are played side by side."""
    envs = [MAKERS[game][1]() for _ in range(episodes)]
    seen = {place: env.reset(seed=SEED + place)[0] for place, env in enumerate(envs)}
    total = np.zeros(episodes)
    while seen:
        places = list(seen)
        for place, action in zip(places, act(np.stack([seen[each] for each in places])), strict=True):
            obs, reward, terminated, truncated, _ = envs[place].step(action)
            total[place] += float(reward)
            seen[place] = obs
            if terminated or truncated:
                del seen[place]
    return float(total.mean())


def point_of(game: str, path: Path) -> tuple[str, list[float]]:
    """Evaluate a snapshot; return its name and its row: seconds, steps, mean return."""
    seconds, steps, arrays = load(path)
    return path.name, [round(seconds, 2), steps, round(mean_return(game, policy_of(game, arrays)), 3)]


def main() -> None:
    game, folder = sys.argv[1], Path(sys.argv[2])
    with multiprocessing.Pool(os.cpu_count()) as pool:
        curve = dict(pool.imap(partial(point_of, game), sorted(folder.glob("*.npz"))))
    (folder / "curve.json").write_text(json.dumps(curve))


if __name__ == "__main__":
    main()
