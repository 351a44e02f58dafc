"""Recurrent Q-network that has to remember: the way is shown once, at the start of a corridor of 7 to 10 steps.

Sequences of 6 entries never reach from start to end. Each comes with the hidden state before its first entry, and two
entries of burn-in adapt that state to the network's newer weights (R2D2: Kapturowski et al., ICLR 2019). With the
argument `zeros` the hidden state starts from zeros instead, and the network learns nothing.
"""

import copy
import sys

import numpy as np
import torch

import memoire
from memoire.torch import TorchBatch

MAZES, UNITS, ROUNDS, STORED = 32, 32, 400, float("zeros" not in sys.argv)
CUT = {"sequence_length": 6, "sequence_overlap": 3, "burn_in": 2, "sequence_first": ("hidden",)}


def values(net: torch.nn.ModuleDict, obs: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of left and right [B, T, 2], and the last hidden state [B, UNITS]; obs is [B, T, 2]."""
    states, _ = net["memory"](obs, hidden[None].contiguous())
    return net["q"](states), states[:, -1]


def play(agent: torch.nn.ModuleDict, writer: memoire.Writer, rng: np.random.Generator, epsilon: float) -> float:
    """Walk once through each maze; return the mean return: 1 with memory of the way, 0.5 without."""
    way, length, hidden = rng.choice([-1, 1], MAZES), rng.integers(7, 11), torch.zeros(MAZES, UNITS)
    seen = np.float32([[way * (t == 0), np.full(MAZES, t >= length)] for t in range(length + 2)]).transpose(0, 2, 1)
    for t in range(length + 1):
        with torch.no_grad():
            q, after = values(agent, torch.tensor(seen[t][:, None]), hidden)
        action = np.where(rng.random(MAZES) < epsilon, rng.integers(2, size=MAZES), q[:, 0].argmax(1).numpy())
        reward, over = (action == (way > 0)) * float(t == length), np.full(MAZES, t == length)
        writer.step(seen[t], action, reward, over, np.zeros(MAZES, bool), seen[t + 1], hidden=hidden.numpy())
        hidden = after
    return float(reward.mean())


torch.manual_seed(0)
rng, returns = np.random.default_rng(0), []
agent = torch.nn.ModuleDict({"memory": torch.nn.GRU(2, UNITS, batch_first=True), "q": torch.nn.Linear(UNITS, 2)})
target, optimizer = copy.deepcopy(agent), torch.optim.Adam(agent.parameters(), 2e-3)
schema = {"obs": (np.float32, (2,)), "action": np.int64, "reward": np.float32, "hidden": (np.float32, (UNITS,))}
buffer = memoire.Buffer(memoire.Schema(schema), 20_000, sampler=memoire.Prioritized(0.6), seed=0, **CUT)
writer = buffer.writer(num_envs=MAZES, autoreset="disabled")
for turn in range(ROUNDS):
    returns.append(play(agent, writer, rng, max(0.02, 1.0 - turn / 100)))
    for _ in range(4):
        batch = TorchBatch(buffer.sample(64))
        q, later = (values(net, batch.obs, STORED * batch.hidden)[0] for net in (agent, target))
        best = later[:, 1:].gather(2, q[:, 1:].argmax(2, keepdim=True))[..., 0].detach()
        td_errors = batch.reward + batch.discount * best - q[:, :-1].gather(2, batch.action[..., None])[..., 0]
        loss = (batch.importance[:, None] * torch.where(batch.mask, td_errors, 0.0) ** 2).sum() / batch.mask.sum()
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        batch.update_priorities(td_errors)
    target = copy.deepcopy(agent) if turn % 5 == 0 else target
mean = np.mean(returns[-50:])
print(f"mean return of the last 50 rounds: {mean:.2f}, the way is {'remembered' if mean > 0.9 else 'forgotten'}")
