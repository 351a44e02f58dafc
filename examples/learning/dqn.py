"""DQN that balances a pole, in one file: double Q-learning on three-step returns from a prioritized buffer.

    python examples/learning/dqn.py                    about two minutes: CartPole-v1 to a mean return of 475
    python examples/learning/dqn.py --seed 3 --steps 20000 --curve curve.csv

The example needs `pip install 'memoire-rl[demo,torch]'`. Mnih et al., Human-level control, Nature 2015; van Hasselt et
al., Double Q-learning, AAAI 2016; Schaul et al., Prioritized Experience Replay, ICLR 2016.
"""

import argparse
import copy
from collections import deque

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import memoire


def q_network(obs: int, actions: int) -> nn.Module:
    """Return a network that maps observations [B, obs] to the return of each action [B, actions]."""
    return nn.Sequential(nn.Linear(obs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, actions))


def td_errors(net: nn.Module, target: nn.Module, batch: memoire.torch.TorchBatch) -> torch.Tensor:
    """Return the TD errors [B] of a batch; its discount is gamma ** 3, or 0 if the episode terminated before."""
    q = net(batch.obs).gather(1, batch.action[:, None])[:, 0]
    with torch.no_grad():
        best = net(batch.next_obs).argmax(1, keepdim=True)
        later = target(batch.next_obs).gather(1, best)[:, 0]
    return batch.reward + batch.discount * later - q


def train(seed: int, steps: int, goal: float, curve: list[tuple[int, float]]) -> float:
    """Play and learn until the mean return of the last 20 episodes reaches the goal; return that mean."""
    torch.manual_seed(seed), torch.set_num_threads(1)
    rng, env = np.random.default_rng(seed), gym.make("CartPole-v1")
    net = q_network(4, 2)
    target, optimizer = copy.deepcopy(net), torch.optim.Adam(net.parameters(), 1e-3)
    sampler = memoire.Prioritized(0.6, beta=memoire.Linear(0.4, 1.0, steps // 2))
    buffer = memoire.Buffer(memoire.Schema.from_env(env), 50_000, sampler=sampler, multi_step=3, seed=seed)
    recent, total = deque(maxlen=20), 0.0
    obs, _ = env.reset(seed=seed)
    with buffer.writer(env) as writer:
        for step in range(steps):
            epsilon = max(0.02, 1.0 - step / 4000)
            with torch.no_grad():
                greedy = int(net(torch.from_numpy(obs)).argmax())
            action = int(rng.integers(2)) if rng.random() < epsilon else greedy
            next_obs, reward, terminated, truncated, info = env.step(action)
            writer.step(obs, action, reward, terminated, truncated, next_obs, info)
            obs, total = next_obs, total + float(reward)
            if terminated or truncated:
                recent.append(total)
                curve.append((step + 1, total))
                obs, total = env.reset()[0], 0.0
                if len(recent) == 20 and np.mean(recent) >= goal:
                    break
            if step >= 1000:
                batch = buffer.sample(128).to("cpu")
                errors = td_errors(net, target, batch)
                loss = (
                    batch.importance * nn.functional.huber_loss(errors, torch.zeros_like(errors), reduction="none")
                ).mean()
                optimizer.zero_grad(), loss.backward(), optimizer.step()
                batch.update_priorities(errors.detach())
                for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
                    slow.data.lerp_(fast.data, 0.005)
    return float(np.mean(recent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60_000, help="most environment steps (default: %(default)s)")
    parser.add_argument("--goal", type=float, default=475.0, help="mean return of 20 episodes that ends the run")
    parser.add_argument("--curve", help="file for the curve: a line `step,return` for each episode")
    args = parser.parse_args()
    curve: list[tuple[int, float]] = []
    mean = train(args.seed, args.steps, args.goal, curve)
    if args.curve:
        with open(args.curve, "w", encoding="utf-8") as file:
            file.writelines(f"{step},{returned:g}\n" for step, returned in curve)
    print(f"mean return of the last 20 episodes: {mean:.1f} after {curve[-1][0]} steps")


if __name__ == "__main__":
    main()
