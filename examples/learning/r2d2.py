"""R2D2 in one file: a recurrent Q-network that balances a pole without seeing the speeds.

    python examples/learning/r2d2.py                   a few minutes: CartPole-v1 without speeds to a mean return of 300
    python examples/learning/r2d2.py --seed 3 --steps 40000 --curve curve.csv

Sequences of 24 entries overlap by half. Each comes with the hidden state before its first entry, and eight entries of
burn-in adapt that state to the network's newer weights. The example needs `pip install 'memoire-rl[demo,torch]'`.
Kapturowski et al., Recurrent Experience Replay in Distributed Reinforcement Learning, ICLR 2019.
"""

import argparse
import copy
from collections import deque

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import memoire

SEEN = [0, 2]
"""Indices of the observation that the network sees: the cart's position and the pole's angle."""
UNITS, ENVS, BATCH, UPDATE_INTERVAL = 64, 8, 64, 1
COLUMNS = {"obs": (np.float32, (2,)), "action": np.int64, "reward": np.float32, "hidden": (np.float32, (UNITS,))}
SEQUENCES = {"sequence_length": 24, "sequence_overlap": 12, "burn_in": 8, "sequence_first": ("hidden",)}


class RecurrentQ(nn.Module):
    """GRU whose states give the return of each action."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.q = nn.GRU(len(SEEN), UNITS, batch_first=True), nn.Linear(UNITS, 2)

    def forward(self, obs: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the actions' returns [B, T, 2] and the last hidden state [B, UNITS]; obs is [B, T, 2]."""
        states, last = self.memory(obs, hidden[None].contiguous())
        return self.q(states), last[0]


def td_errors(net: nn.Module, target: nn.Module, batch: memoire.torch.TorchBatch) -> torch.Tensor:
    """Return the TD errors [B, T] of a batch of sequences: 0 for entries of burn-in or after an end, by the mask."""
    q, later = (network(batch.obs, batch.hidden)[0] for network in (net, target))  # [B, T + 1, 2]
    best = later[:, 1:].gather(2, q[:, 1:].argmax(2, keepdim=True))[..., 0].detach()
    taken = q[:, :-1].gather(2, batch.action[..., None])[..., 0]
    return torch.where(batch.mask, batch.reward + batch.discount * best - taken, 0.0)


def train(seed: int, steps: int, goal: float, curve: list[tuple[int, float]]) -> float:
    """Play and learn until the mean return of the last 40 nearly greedy episodes reaches the goal; return that mean."""
    torch.manual_seed(seed), torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    envs = gym.make_vec("CartPole-v1", ENVS, vectorization_mode="sync", vector_kwargs={"autoreset_mode": "SameStep"})
    net = RecurrentQ()
    target, optimizer = copy.deepcopy(net), torch.optim.Adam(net.parameters(), 5e-4)
    buffer = memoire.Buffer(COLUMNS, 50_000, sampler=memoire.Prioritized(0.6, beta=0.4), seed=seed, **SEQUENCES)
    recent, totals, hidden = deque(maxlen=40), np.zeros(ENVS), torch.zeros(ENVS, UNITS)
    epsilons = 0.4 ** (1.0 + 7.0 * np.arange(ENVS) / (ENVS - 1))  # an epsilon for each environment, as in Ape-X
    obs = envs.reset(seed=seed)[0][:, SEEN]
    with buffer.writer(envs) as writer:
        for step in range(0, steps, ENVS):
            with torch.no_grad():
                q, after = net(torch.from_numpy(obs)[:, None], hidden)
            is_random = rng.random(ENVS) < epsilons
            action = np.where(is_random, rng.integers(2, size=ENVS), q[:, 0].argmax(1).numpy())
            next_obs, reward, terminated, truncated, info = envs.step(action)
            next_obs = next_obs[:, SEEN]
            over = terminated | truncated
            if over.any():
                info = {**info, "final_obs": [None if each is None else each[SEEN] for each in info["final_obs"]]}
            writer.step(obs, action, reward, terminated, truncated, next_obs, info, hidden=hidden.numpy())
            obs, hidden, totals = next_obs, torch.where(torch.from_numpy(over)[:, None], 0.0, after), totals + reward
            for returned in totals[over & (epsilons < 0.02)]:
                recent.append(float(returned))
                curve.append((step + ENVS, float(returned)))
            totals[over] = 0.0
            if len(recent) == 40 and np.mean(recent) >= goal:
                break
            if step >= 2000 and step // ENVS % UPDATE_INTERVAL == 0:
                batch = buffer.sample(BATCH).to("cpu")
                errors = td_errors(net, target, batch)
                loss = (batch.importance[:, None] * errors**2).sum() / batch.mask.sum()
                optimizer.zero_grad(), loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 10.0)
                optimizer.step()
                batch.update_priorities(errors.detach())
                for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
                    slow.data.lerp_(fast.data, 0.005)
    return float(np.mean(recent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300_000, help="most steps of all environments together")
    parser.add_argument("--goal", type=float, default=300.0, help="mean return of 40 episodes that ends the run")
    parser.add_argument("--curve", help="file for the curve: a line `step,return` for each episode")
    args = parser.parse_args()
    curve: list[tuple[int, float]] = []
    mean = train(args.seed, args.steps, args.goal, curve)
    if args.curve:
        with open(args.curve, "w", encoding="utf-8") as file:
            file.writelines(f"{step},{returned:g}\n" for step, returned in curve)
    print(f"mean return of the last 40 episodes: {mean:.1f} after {curve[-1][0]} steps")


if __name__ == "__main__":
    main()
