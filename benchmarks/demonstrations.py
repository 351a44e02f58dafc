"""Do a few demonstrations in a table beside an actor's own steps help where reward is sparse?

MountainCar-v0: each step costs 1 until the car is on the hill, after 200 steps the episode is cut off, and who acts by
chance never gets there. A controller that pushes to where the car rolls drives up; its episodes, recorded as a Minari
data set, go into the table "demo" of a server, and are mixed into every batch of a learner: 64 of 256 samples. Another
learner gets 256 samples of what its actor did. Q-learning in NumPy as in `memoire demo`, layers of 64, n-step 5.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # matrices this small lose by being shared out
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from measure import arguments, machine, plot, write_page

import memoire
from memoire.rl.demo import qlearning

ENV = "MountainCar-v0"
DATA_SET = "memoire/mountain-car/demonstrations-v0"
BATCH, FROM_DEMO = 256, 64
LEARN_EVERY = 16
"""Steps of the actor between two batches."""
BEGIN = 1_000
"""Steps before the first batch."""
EVALUATE_EVERY, EPISODES = 2_000, 5
SETTINGS = qlearning.LearningSettings(hidden=(64, 64))
SOLVED = -110.0
"""Mean return that the environment's authors ask for."""


def make_env() -> gymnasium.Env[Any, Any]:
    """Position and velocity between -1 and 1: as they are, the velocity is a tenth of the position."""
    return gymnasium.wrappers.RescaleObservation(gymnasium.make(ENV), np.float32(-1.0), np.float32(1.0))


def demonstrations(episodes: int, seed: int) -> Any:
    """A Minari data set of a controller that pushes to where the car rolls; one step in ten is by chance."""
    import minari
    from minari.data_collector import EpisodeBuffer

    random, env, made = np.random.default_rng(seed), make_env(), []
    for number in range(episodes):
        obs, _ = env.reset(seed=seed + number)
        episode = EpisodeBuffer(id=number, seed=seed + number, observations=[obs], actions=[])
        while not (episode.rewards and (episode.terminations[-1] or episode.truncations[-1])):
            action = int(random.integers(3)) if random.random() < 0.1 else 2 * int(obs[1] > 0.0)
            obs, reward, terminated, truncated, _ = env.step(action)
            episode.observations.append(obs)
            for column, value in zip(
                (episode.actions, episode.rewards, episode.terminations, episode.truncations),
                (action, reward, terminated, truncated),
                strict=True,
            ):
                column.append(value)
        made.append(episode)
    about = {
        "env": ENV, "eval_env": ENV, "observation_space": env.observation_space, "action_space": env.action_space,
        "algorithm_name": "pushes to where it rolls", "author": "memoire", "author_email": "nobody@example.invalid",
        "description": "MountainCar-v0, position and velocity between -1 and 1, driven by a rule",
        "code_permalink": "https://example.invalid",
    }  # fmt: skip
    return minari.create_dataset_from_buffers(DATA_SET, made, **about)


def push(client: memoire.Client, data: Any) -> None:
    """A data set's episodes into a client's table."""
    for episode in data.iterate_episodes():
        columns = {"obs": episode.observations[:-1], "action": episode.actions, "reward": episode.rewards}
        ending = {"final_state": episode.observations[-1], "terminated": bool(episode.terminations[-1])}
        if not client.push_episode({name: np.asarray(rows) for name, rows in columns.items()}, **ending):
            raise RuntimeError(client.push_reason)
    client.update()


def train(
    seed: int, steps: int, data: Any = None, *, begin: int = BEGIN, evaluate_every: int = EVALUATE_EVERY
) -> list[tuple[int, float]]:
    """(steps of the actor, mean return of the greedy policy) from beginning to end."""
    env, watched = make_env(), make_env()
    schema = memoire.Schema.from_env(env)
    sampling = {"sampler": memoire.Prioritized(0.6, beta=0.4), "multi_step": 5, "discount": 0.99}
    table = memoire.Table(schema, storage="episodes", capacity=steps + 200, **sampling)
    learner = qlearning.DoubleQ(2, 3, settings=SETTINGS, seed=seed)
    random = np.random.default_rng(seed)
    curve = []
    with (
        memoire.Server("tcp://127.0.0.1:0", tables={"online": table, "demo": table}, seed=seed) as server,
        memoire.connect(server.endpoint, table="online", seed=seed, on_full="block") as actor,
        memoire.connect(server.endpoint, table="demo", seed=seed) as demonstrator,
    ):
        if data is not None:
            push(demonstrator, data)
        wanted = BATCH if data is None else {"online": BATCH - FROM_DEMO, "demo": FROM_DEMO}
        batches = server.batches(wanted, 60.0)
        writer = actor.writer(env)
        obs, _ = env.reset(seed=seed)
        for step in range(1, steps + 1):
            epsilon = max(0.05, 1.0 - 2.0 * step / steps)
            action = int(qlearning.act(learner.network, obs[None], epsilon, random)[0])
            after, reward, terminated, truncated, info = env.step(action)
            writer.step(obs, action, reward, terminated, truncated, after, info)
            obs = env.reset()[0] if terminated or truncated else after
            if step % LEARN_EVERY == 0 and step >= begin:
                learn(learner, next(batches), random)
            if step % evaluate_every == 0:
                curve.append((step, evaluate(learner.network, watched)))
    return curve


def learn(learner: qlearning.DoubleQ, batch: Any, random: np.random.Generator) -> None:
    """One batch: what is mixed is joined, and its rows are shuffled for the minibatches."""
    rows = batch.joined if hasattr(batch, "joined") else batch
    order = random.permutation(len(rows["reward"]))
    errors = np.empty(len(order), np.float32)
    errors[order] = learner.learn({name: np.asarray(rows[name])[order] for name in qlearning.USED})
    batch.update_priorities(errors)


def evaluate(network: qlearning.Network, env: gymnasium.Env[Any, Any]) -> float:
    """Mean return of the greedy policy over the same few episodes."""
    returns = []
    for number in range(EPISODES):
        obs, _ = env.reset(seed=1000 + number)
        total, over = 0.0, False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(int(network(obs[None]).argmax()))
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    return statistics.mean(returns)


def draw(found: dict[str, list[list[tuple[int, float]]]], path: Path) -> None:
    """Each seed's curve, faint, and their median."""
    with plot(path, 7, 4.5) as axes:
        for (name, curves), color in zip(found.items(), ("tab:orange", "tab:blue"), strict=True):
            steps = [step for step, _ in curves[0]]
            for curve in curves:
                axes.plot(steps, [mean for _, mean in curve], color=color, alpha=0.25, linewidth=1)
            axes.plot(steps, medians(curves), color=color, label=name, linewidth=2)
        axes.axhline(SOLVED, color="black", linewidth=0.8, linestyle="--")
        axes.set(xlabel="steps of the actor", ylabel="return of the greedy policy", title=ENV)
        axes.legend()
        axes.grid(alpha=0.3)


def medians(curves: list[list[tuple[int, float]]]) -> list[float]:
    return [statistics.median(mean for _, mean in point) for point in zip(*curves, strict=True)]


def lines(found: dict[str, list[list[tuple[int, float]]]]) -> Iterator[str]:
    for name, curves in found.items():
        yield f"{name}:"
        means = zip(curves[0], medians(curves), strict=True)
        points = ", ".join(f"{step // 1000}k {mean:.0f}" for (step, _), mean in means)
        yield f"    median return of the greedy policy  {points}"
        best = ", ".join(f"{max(mean for _, mean in curve):.0f}" for curve in curves)
        yield f"    best of each seed                   {best}"


def main() -> None:
    given = arguments(__doc__, seeds=5, steps=30_000)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MINARI_DATASETS_PATH"] = folder
        data = demonstrations(20, 0)
        returns = [float(np.sum(episode.rewards)) for episode in data.iterate_episodes()]
        shown = f"{data.total_episodes} demonstrations of {data.total_steps} steps, mean return {np.mean(returns):.0f}"
        print(__doc__, machine(), shown, sep="\n", flush=True)
        began = time.perf_counter()
        found: dict[str, list[list[tuple[int, float]]]] = {}
        for name, source in (("online alone", None), ("online and demonstrations", data)):
            found[name] = [train(seed, given.steps, source) for seed in range(given.seeds)]
        text = "\n".join(lines(found))
        print(text, f"{time.perf_counter() - began:.0f} s", sep="\n")
    if given.write:
        draw(found, Path(given.write, "demonstrations.svg"))
        table = "\n".join(f"    {line}" for line in text.splitlines())
        facts = f"{shown}; {given.seeds} seeds."
        write_page(given.write, "demonstrations", __doc__, facts, table, "![curves](demonstrations.svg)")


if __name__ == "__main__":
    main()
