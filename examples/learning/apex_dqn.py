"""Ape-X DQN in one file: four actors with an epsilon each, and a learner that draws from all actors' memories.

    python examples/learning/apex_dqn.py               about a minute: CartPole-v1 to a mean return of 475
    python examples/learning/apex_dqn.py --actors 8 --seed 3 --curve curve.csv

Each actor is a process that keeps its episodes, computes priorities by its own copy of the network, and pushes samples.
The example needs `pip install 'memoire-rl[demo,torch]'`. Horgan et al., Distributed Prioritized Experience Replay, ICLR
2018.
"""

import argparse
import copy
import multiprocessing
import time
from collections import deque

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import memoire

COLUMNS = {"obs": (np.float32, (4,)), "action": np.int64, "reward": np.float32, "value": np.float32}
"""Columns of an entry. `value` is the actor's own estimate of a state, from which it computes first priorities."""
SAMPLES_PER_INSERT = 16.0
BATCH = 128
PUBLISH_INTERVAL = 20
"""Batches between two versions of the network."""


def q_network() -> nn.Module:
    """Return a network that maps observations [B, 4] to the return of each action [B, 2]."""
    return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


def act(url: str, number: int, actors: int, seed: int) -> None:
    """Run an actor: play with the newest network until the learner ends the run."""
    torch.set_num_threads(1)
    rng, env, net = np.random.default_rng([seed, number]), gym.make("CartPole-v1"), q_network()
    epsilon = 0.4 ** (1.0 + 7.0 * number / max(1, actors - 1))
    with memoire.connect(url, seed=number, timeout=60.0, on_full="block") as client:
        policy, writer = client.model("policy"), client.writer(env)
        version = memoire.torch.load(policy.wait(timeout=60.0), net)
        obs, _ = env.reset(seed=1000 * seed + number)
        while not client.finished:
            if policy.version > version:
                version = memoire.torch.load(policy.newest(), net)
            with torch.no_grad():
                q = net(torch.from_numpy(obs))
            action = int(rng.integers(2)) if rng.random() < epsilon else int(q.argmax())
            next_obs, reward, terminated, truncated, info = env.step(action)
            extra = {"value": float(q.max()), "model_version": version}
            writer.step(obs, action, reward, terminated, truncated, next_obs, info, **extra)
            obs = env.reset()[0] if terminated or truncated else next_obs


def td_errors(net: nn.Module, target: nn.Module, batch: memoire.torch.TorchBatch) -> torch.Tensor:
    """Return the TD errors [B] of a batch; its discount is gamma ** 3, or 0 if the episode terminated before."""
    q = net(batch.obs).gather(1, batch.action[:, None])[:, 0]
    with torch.no_grad():
        best = net(batch.next_obs).argmax(1, keepdim=True)
        later = target(batch.next_obs).gather(1, best)[:, 0]
    return batch.reward + batch.discount * later - q


def evaluate(net: nn.Module, env: gym.Env) -> float:
    """Play one episode with the best action in every state; return its total reward."""
    obs, total, over = env.reset()[0], 0.0, False
    while not over:
        with torch.no_grad():
            action = int(net(torch.from_numpy(obs)).argmax())
        obs, reward, terminated, truncated, _ = env.step(action)
        total, over = total + float(reward), terminated or truncated
    return total


def learn(server: memoire.Server, seed: int, seconds: float, goal: float, curve: list[tuple[int, float]]) -> float:
    """Learn until the mean return of the last 20 evaluations reaches the goal, or the time is up; return it."""
    torch.manual_seed(seed), torch.set_num_threads(1)
    net, env = q_network(), gym.make("CartPole-v1")
    target, optimizer = copy.deepcopy(net), torch.optim.Adam(net.parameters(), 1e-3)
    memoire.torch.publish(server, "policy", net)
    env.reset(seed=seed)
    recent, until = deque(maxlen=20), time.monotonic() + seconds
    for number, batch in enumerate(memoire.torch.batches(server, BATCH, timeout=60.0), start=1):
        errors = td_errors(net, target, batch)
        loss = (batch.importance * nn.functional.huber_loss(errors, torch.zeros_like(errors), reduction="none")).mean()
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        batch.update_priorities(errors.detach())
        for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.005)
        if number % PUBLISH_INTERVAL == 0:
            memoire.torch.publish(server, "policy", net)
        if number % 200 == 0:
            recent.append(evaluate(net, env))
            curve.append((server.stats().totals.steps, recent[-1]))
            if (len(recent) == 20 and np.mean(recent) >= goal) or time.monotonic() > until:
                break
    server.finish()
    return float(np.mean(recent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=300.0, help="longest time of the run (default: %(default)s)")
    parser.add_argument("--goal", type=float, default=475.0, help="mean return of 20 evaluations that ends the run")
    parser.add_argument("--curve", help="file for the curve: a line `step,return` for each evaluation")
    args = parser.parse_args()
    curve: list[tuple[int, float]] = []
    settings = {"multi_step": 3, "cache_size": 64, "sampler": memoire.Prioritized(0.6, beta=0.4)}
    pace = {"samples_per_insert": SAMPLES_PER_INSERT, "samples_per_insert_tolerance": 50_000.0, "min_size": 1000}
    with memoire.Server("tcp://127.0.0.1:*", COLUMNS, run="apex", seed=args.seed, **settings, **pace) as server:
        spawn = multiprocessing.get_context("spawn")
        rows = [(server.endpoint, number, args.actors, args.seed) for number in range(args.actors)]
        actors = [spawn.Process(target=act, args=row, daemon=True) for row in rows]
        for actor in actors:
            actor.start()
        mean = learn(server, args.seed, args.seconds, args.goal, curve)
        for actor in actors:
            actor.join(30.0)
    if args.curve:
        with open(args.curve, "w", encoding="utf-8") as file:
            file.writelines(f"{step},{returned:g}\n" for step, returned in curve)
    print(f"mean return of the last 20 evaluations: {mean:.1f} after {curve[-1][0]} steps of {args.actors} actors")


if __name__ == "__main__":
    main()
