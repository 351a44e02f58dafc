"""Environments, networks and run state that all sides of contest.py share, and snapshots of the learned networks.

A side is a program of this folder, such as sb3_side.py, which learns until its time is up. Every few seconds the side
writes the network that acts, with the time and its steps. evaluate.py plays with these networks after the run, so that
evaluation takes no time from any side.
"""

import copy
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import settings
import torch
from settings import GAMES, Game
from torch import nn

SNAPSHOT_INTERVAL = 3.0
"""Seconds between two snapshots of the network."""
MAX_STEPS = 1000
"""Limit of the steps of a MinAtar episode, which a perfect player would never end."""


class Frames(gym.Wrapper):
    """MinAtar game whose frames have channels first, as networks take them: uint8 [C, 10, 10]."""

    def __init__(self, game: str) -> None:
        from minatar.gym import BaseEnv

        super().__init__(BaseEnv(game, use_minimal_action_set=True))
        rows, columns, channels = self.env.game.state_shape()
        self.observation_space = gym.spaces.Box(0, 1, (channels, rows, columns), np.uint8)

    def reset(self, *, seed=None, options=None):
        obs, info = self.env.reset(seed=seed)
        return self.frame(obs), info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(int(action))
        return self.frame(obs), float(reward), bool(terminated), truncated, info

    @staticmethod
    def frame(obs):
        return np.ascontiguousarray(obs.transpose(2, 0, 1)).view(np.uint8)


def minatar(game: str) -> gym.Env:
    return gym.wrappers.TimeLimit(Frames(game), MAX_STEPS)


def pong(stack: int) -> gym.Env:
    """Return Pong with frames of 84 x 84, one for four frames of the emulator, and `stack` frames in an observation."""
    import ale_py

    gym.register_envs(ale_py)
    env = gym.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    env = gym.wrappers.AtariPreprocessing(env, frame_skip=4, screen_size=84)
    return gym.wrappers.FrameStackObservation(env, stack) if stack > 1 else env


class Slow(gym.Wrapper):
    """Environment with slow steps: each takes 2 ms, and one in fifty 200 ms, as with robots and browsers."""

    STEP, TAIL, SHARE = 0.002, 0.2, 0.02

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.random = np.random.default_rng()

    def step(self, action):
        time.sleep(self.TAIL if self.random.random() < self.SHARE else self.STEP)
        return self.env.step(action)


def heavy_tailed(name: str) -> gym.Env:
    return Slow(gym.make(name))


MAKERS: dict[str, tuple[Callable[[], gym.Env], Callable[[], gym.Env]]] = {
    "breakout": (partial(minatar, "breakout"),) * 2,
    "space_invaders": (partial(minatar, "space_invaders"),) * 2,
    "pendulum": (partial(heavy_tailed, "InvertedPendulum-v5"), partial(gym.make, "InvertedPendulum-v5")),
    "hopper": (partial(heavy_tailed, "Hopper-v5"), partial(gym.make, "Hopper-v5")),
    "lander": (partial(gym.make, "LunarLander-v3"),) * 2,
    "pong": (partial(pong, GAMES["pong"].stack), partial(pong, 1)),
    "pong_gpu": (partial(pong, GAMES["pong_gpu"].stack), partial(pong, 1)),
}
"""Constructors of the environments for learning and for evaluation, by game; Pong's second has single frames."""


def with_newest(stacks, frames, is_first):
    """Append the newest frames [E, *F] to stacks [E, K, *F]; a stack at an episode's start repeats its first frame."""
    stacks = np.concatenate([stacks[:, 1:], frames[:, None]], 1)
    stacks[is_first] = frames[is_first, None]
    return stacks


def epsilon_at(steps: int) -> float:
    return max(settings.EPSILON, 1.0 - steps * (1.0 - settings.EPSILON) / settings.EPSILON_STEPS)


def q_network(shape: tuple[int, ...], actions: int):
    """Return a network of frames [B, C, 10, 10] -> [B, A]: 16 filters of 3 x 3 and 128 units, as by MinAtar's authors.

    Networks for frames [B, C, 84, 84] have the three layers of filters and the 512 units that are usual for Atari.
    """
    channels, size, _ = shape
    if size == 10:
        filters, width, units = [nn.Conv2d(channels, 16, 3), nn.ReLU()], 1024, 128
    else:
        layers = nn.Conv2d(channels, 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3)
        layers[0].weight.data /= 255.0  # inputs are bytes
        filters, width, units = [module for layer in layers for module in (layer, nn.ReLU())], 3136, 512
    return nn.Sequential(*filters, nn.Flatten(), nn.Linear(width, units), nn.ReLU(), nn.Linear(units, actions))


def tanh_network(inputs: int, hidden: Iterable[int], outputs: int, last: float):
    """Return a network [B, inputs] -> [B, outputs]: tanh layers, orthogonal weights, the last of scale `last`."""
    layers, widths = [], [inputs, *hidden, outputs]
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
        nn.init.orthogonal_(layers[-2].weight, math.sqrt(2.0))
        nn.init.zeros_(layers[-2].bias)
    nn.init.orthogonal_(layers[-2].weight, last)
    return nn.Sequential(*layers[:-1])


def double_errors(net, later, obs, action, reward, discount, next_obs):
    """Return the TD errors [B] of double Q-learning. Frames are uint8; the discount is 0 after a terminal state.

    `later` [B, A] has the target's values of the next states.
    """
    q = net(obs.float()).gather(1, action[:, None])[:, 0]
    with torch.no_grad():
        best = net(next_obs.float()).argmax(1, keepdim=True)
        goal = reward + discount * later.gather(1, best)[:, 0]
    return goal - q


def as_one(net):
    """Return one parameter [N] that concatenates all parameters of a network, which become views of it.

    Gradients are concatenated, too, so that an optimiser makes one step instead of one for each parameter.
    """
    parameters = list(net.parameters())
    one = torch.nn.Parameter(torch.cat([each.detach().flatten() for each in parameters]))
    one.grad = torch.zeros_like(one)
    sizes = [each.numel() for each in parameters]
    for each, values, gradient in zip(parameters, one.detach().split(sizes), one.grad.split(sizes), strict=True):
        each.data, each.grad = values.view_as(each), gradient.view_as(each)
    return one


class DoubleDqn:
    """Network, target and optimiser of a side without an algorithm of its own."""

    def __init__(self, env: gym.Env, device: str = "cpu") -> None:
        self.net = q_network(env.observation_space.shape, int(env.action_space.n)).to(device)
        self.target = copy.deepcopy(self.net)
        self.weights = as_one(self.net)
        self.optimizer = torch.optim.Adam([self.weights], settings.RATE, fused=True)
        self.updates = 0

    def later(self, next_obs):
        """Return the target and its values [N, A] of next states [N, ...]. Safe while another thread updates."""
        target = self.target
        with torch.no_grad():
            return target, target(next_obs.float())

    def update(self, *columns, known=(None, None)):
        """Update once for each batch in these columns, importance first and next states last; return all TD errors.

        Args:
            known: Result of an earlier call of `later` for these next states, which is ignored if the target has
                changed since.
        """
        _, later = known if known[0] is self.target else self.later(columns[-1])
        batches = zip(*(each.split(settings.BATCH) for each in (later, *columns)), strict=True)
        errors = torch.cat([self._step(*batch) for batch in batches])
        if self.updates % (settings.TARGET_INTERVAL // settings.UPDATE_INTERVAL) == 0:
            self.target = copy.deepcopy(self.net)
        return errors

    def _step(self, later, importance, *columns):
        errors = double_errors(self.net, later, *columns)
        loss = (importance * nn.functional.huber_loss(errors, errors.new_zeros(len(errors)), reduction="none")).mean()
        self.weights.grad.zero_()
        loss.backward()
        nn.utils.clip_grad_norm_([self.weights], settings.MAX_GRAD_NORM)
        self.optimizer.step()
        self.updates += 1
        return errors.detach()


@dataclass
class Run:
    """Run of a side with a seed, as the environment variable CONTEST describes it."""

    game: str
    seed: int
    seconds: float
    folder: str
    began: float
    """Start time of the program in seconds, by the monotonic clock that all processes of a machine share."""
    options: dict[str, str]
    written: float = 0.0

    @classmethod
    def learn(cls, *algorithms: Callable[["Run"], None]) -> None:
        """Read the run from CONTEST, and call the function that has the name of its algorithm."""
        run = cls(**json.loads(os.environ["CONTEST"]))
        torch.set_num_threads(1)
        torch.manual_seed(run.seed)
        next(each for each in algorithms if each.__name__ == run.task.algorithm)(run)

    @property
    def make(self) -> Callable[[], gym.Env]:
        """Constructor of the environment for learning."""
        return MAKERS[self.game][0]

    @property
    def task(self) -> Game:
        return GAMES[self.game]

    @property
    def capacity(self) -> int:
        """Capacity of a replay memory in steps."""
        return settings.PONG_CAPACITY if self.task.stack > 1 else settings.CAPACITY

    @property
    def first_update(self) -> int:
        """Number of steps before the first update."""
        return settings.PONG_FIRST_UPDATE if self.task.stack > 1 else settings.FIRST_UPDATE

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @property
    def is_due(self) -> bool:
        """True if it is time to write a snapshot of the run."""
        return self.elapsed - self.written >= SNAPSHOT_INTERVAL or self.written < self.seconds <= self.elapsed

    def goes_on(self, steps: int, parameters: Callable[[], Iterable], updates: int = 0) -> bool:
        """Return True while the run has time left, and write a snapshot if one is due.

        A snapshot has the network's parameters in order, or seconds, steps and updates if only rates are compared.
        """
        now = self.elapsed
        if self.is_due:
            self.written = now
            if self.task.score is None:
                self._keep("curve.json", {f"{now:.3f}": [now, steps, updates]})
            else:
                save(Path(self.folder), now, steps, [np.asarray(each.detach().numpy()) for each in parameters()])
        return now < self.seconds

    def report(self, **facts: object) -> None:
        """Add facts about the run, for the page."""
        if self.task.on_gpu:
            facts["gpu"] = torch.cuda.get_device_name()
        self._keep("facts.json", facts)

    def _keep(self, name: str, facts: dict[str, object]) -> None:
        path = Path(self.folder, name)
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | facts))


def save(folder: Path, seconds: float, steps: int, arrays: list[np.ndarray]) -> None:
    """Write a snapshot of the network atomically."""
    name = f"{int(seconds * 1000):09d}.npz"
    named = {f"p{place}": each for place, each in enumerate(arrays)}
    with (folder / f".{name}").open("wb") as file:
        np.savez(file, seconds=seconds, steps=steps, **named)
    (folder / f".{name}").rename(folder / name)


def load(path: Path) -> tuple[float, int, list[np.ndarray]]:
    """Return the seconds, steps and parameters of a snapshot."""
    with np.load(path) as file:
        arrays = [file[f"p{place}"] for place in range(len(file.files) - 2)]
        return float(file["seconds"]), int(file["steps"]), arrays
