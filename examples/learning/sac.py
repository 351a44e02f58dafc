"""Soft actor-critic that swings a pendulum up, in one file: two critics, and an entropy bonus that is learned.

    python examples/learning/sac.py                    about a minute: Pendulum-v1 to a mean return of -200
    python examples/learning/sac.py --seed 3 --steps 10000 --curve curve.csv

The example needs `pip install 'memoire-rl[demo,torch]'`. Haarnoja et al., Soft Actor-Critic Algorithms and
Applications, 2018.
"""

import argparse
import copy
from collections import deque
from itertools import chain

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import memoire


class Actor(nn.Module):
    """Policy network that draws actions in (-1, 1) from a squashed normal distribution."""

    def __init__(self, obs: int, actions: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.mean, self.spread = nn.Linear(128, actions), nn.Linear(128, actions)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw actions [B, A] for observations [B, obs]; return them and their log-probabilities [B]."""
        hidden = self.body(obs)
        normal = torch.distributions.Normal(self.mean(hidden), self.spread(hidden).clamp(-5.0, 2.0).exp())
        raw = normal.rsample()
        # log(1 - tanh(x)**2), in a form that stays finite
        squashing = 2.0 * (np.log(2.0) - raw - nn.functional.softplus(-2.0 * raw))
        return raw.tanh(), (normal.log_prob(raw) - squashing).sum(1)


class Critic(nn.Module):
    """Network that maps observations [B, obs] and actions [B, A] to the return [B] of those actions."""

    def __init__(self, obs: int, actions: int) -> None:
        super().__init__()
        sizes = (obs + actions, 128), (128, 128), (128, 1)
        first, second, last = (nn.Linear(*size) for size in sizes)
        self.net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)

    def forward(self, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([obs, action], 1))[:, 0]


class Agent:
    """Networks of soft actor-critic, and one update of all networks."""

    def __init__(self, obs: int, actions: int) -> None:
        self.actor = Actor(obs, actions)
        self.critics = nn.ModuleList([Critic(obs, actions), Critic(obs, actions)])
        self.targets = copy.deepcopy(self.critics)
        self.log_alpha = torch.zeros(1, requires_grad=True)  # logarithm of the entropy's weight
        self.entropy = -float(actions)
        parts = (self.actor.parameters(), self.critics.parameters(), [self.log_alpha])
        self.optimizer = torch.optim.Adam(chain(*parts), 1e-3)

    def update(self, batch: memoire.torch.TorchBatch) -> torch.Tensor:
        """Learn from a batch and return the TD errors [B] of the first critic."""
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            action, logp = self.actor(batch.next_obs)
            later = torch.min(*(target(batch.next_obs, action) for target in self.targets)) - alpha * logp
            goal = batch.reward + batch.discount * later
        errors = [goal - critic(batch.obs, batch.action) for critic in self.critics]
        action, logp = self.actor(batch.obs)
        for parameter in self.critics.parameters():
            parameter.requires_grad_(False)  # the actor's loss does not train the critics
        value = torch.min(*(critic(batch.obs, action) for critic in self.critics))
        for parameter in self.critics.parameters():
            parameter.requires_grad_(True)
        losses = [(batch.importance * error**2).mean() for error in errors]
        losses += [(alpha * logp - value).mean(), -(self.log_alpha.exp() * (logp.detach() + self.entropy)).mean()]
        self.optimizer.zero_grad(), sum(losses).backward(), self.optimizer.step()
        for slow, fast in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.01)
        return errors[0].detach()


def train(seed: int, steps: int, goal: float, curve: list[tuple[int, float]]) -> float:
    """Play and learn until the mean return of the last 20 episodes reaches the goal; return that mean."""
    torch.manual_seed(seed), torch.set_num_threads(1)
    rng, env = np.random.default_rng(seed), gym.make("Pendulum-v1")
    agent, high = Agent(3, 1), env.action_space.high
    schema = {"obs": (np.float32, (3,)), "action": (np.float32, (1,)), "reward": np.float32}
    buffer = memoire.Buffer(schema, 100_000, sampler=memoire.Prioritized(0.4, beta=0.4), seed=seed)
    recent, total = deque(maxlen=20), 0.0
    obs, _ = env.reset(seed=seed)
    with buffer.writer(env) as writer:
        for step in range(steps):
            with torch.no_grad():
                drawn = agent.actor(torch.from_numpy(obs)[None])[0][0].numpy()
            action = drawn if step >= 1000 else rng.uniform(-1.0, 1.0, 1).astype(np.float32)
            next_obs, reward, terminated, truncated, info = env.step(action * high)
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
                batch.update_priorities(agent.update(batch))
    return float(np.mean(recent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20_000, help="most environment steps (default: %(default)s)")
    parser.add_argument("--goal", type=float, default=-200.0, help="mean return of 20 episodes that ends the run")
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
