"""Tasks and hyperparameters of contest.py, the same for all sides, and their description on its page."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Game:
    """Task that all sides learn."""

    part: str
    algorithm: str
    """Name of the function that the sides' programs run: "dqn", "sac" or "ppo"."""
    title: str
    score: float | None
    """Mean return of 20 greedy episodes, fixed by a pilot: Stable-Baselines3 reaches it in one to two minutes. None:
    only rates are compared.
    """
    seconds: float
    """Time limit of each run in seconds, which also counts for a run that never reaches the score."""
    stack: int = 1
    """Number of frames in an observation."""
    packages: str = ""
    """Name of an environment of peers/versions.toml whose packages all sides can import, or ""."""
    on_gpu: bool = False
    """True if networks learn on a GPU, in a machine with many cores."""

    @property
    def players(self) -> int:
        """Number of processes that play, on sides with such processes: enough to keep the cores of the machine busy."""
        return 8 if self.on_gpu else 2

    @property
    def device(self) -> str:
        """Device on which networks learn, by its name in torch."""
        return "cuda" if self.on_gpu else "cpu"


GAMES = {
    "breakout": Game("A", "dqn", "MinAtar Breakout", 8.0, 180.0),
    "space_invaders": Game("A", "dqn", "MinAtar SpaceInvaders", 40.0, 200.0),
    "pendulum": Game("B", "sac", "InvertedPendulum-v5, steps of 2 ms, 2 % of them 200 ms", 900.0, 150.0),
    "hopper": Game("B", "sac", "Hopper-v5, steps of 2 ms, 2 % of them 200 ms", 230.0, 150.0),
    "lander": Game("C", "ppo", "LunarLander-v3", 200.0, 150.0),
    "pong": Game("D", "dqn", "Pong", None, 60.0, stack=4, packages="contest-ale"),
    "pong_gpu": Game("D", "dqn", "Pong with a GPU", None, 60.0, stack=4, packages="contest-ale", on_gpu=True),
}

# Double DQN with returns of three steps: all sides have the same numbers.

GAMMA, RATE, BATCH, MULTI_STEP = 0.99, 5e-4, 32, 3
UPDATE_INTERVAL = 4
"""Environment steps for each update."""
TARGET_INTERVAL = 1000
"""Steps between two copies of the network into the target."""
CAPACITY, FIRST_UPDATE = 100_000, 2000
PONG_CAPACITY, PONG_FIRST_UPDATE = 20_000, 5000
"""Capacity and first update of Pong, whose frames are large."""
ALPHA, BETA = 0.6, 0.4
MAX_GRAD_NORM = 10.0
EPSILON, EPSILON_STEPS = 0.02, 20_000
"""Final probability of a random action, and the steps in which the probability falls from 1 to it."""

# Soft actor-critic, with an update for each step.

SAC_RATE, SAC_BATCH, SAC_HIDDEN, SAC_ENVS, SAC_FIRST_UPDATE, SAC_ALPHA = 1e-3, 256, (64, 64), 8, 1000, 0.2
POLYAK = 0.995

# Proximal policy optimization: 16 environments, 512 steps of each for an update.

PPO_ENVS, PPO_STEPS, PPO_RATE, PPO_EPOCHS, PPO_MINIBATCH, PPO_HIDDEN = 16, 8192, 1e-3, 6, 256, (64, 64)
PPO_GAMMA, PPO_LAMBDA, PPO_ENTROPY = 0.995, 0.95, 0.005
PPO_CLIP, PPO_MAX_GRAD_NORM, PPO_VALUE, PPO_EPS = 0.2, 0.5, 0.5, 1e-5
"""Clipping range, limit of the gradient's norm, factor of the value's mean square in the loss, and Adam's eps."""


def double_dqn(network: str, first: int, capacity: int) -> str:
    """Return the page's description of double DQN with a network, a first update and a capacity in steps."""
    return (
        f"Double DQN: {network}, returns of {MULTI_STEP} steps, discount {GAMMA}, "
        f"Adam at {RATE:g}, batches of {BATCH}, an update each {UPDATE_INTERVAL} steps from step "
        f"{first:,} on. The target is copied each {TARGET_INTERVAL:,} steps. There is room for {capacity:,} "
        f"steps. Actions are random with a chance that goes from 1 to {EPSILON} in {EPSILON_STEPS:,} steps. Priorities "
        f"are to the power of {ALPHA}, corrected by {BETA}."
    )


PONG = (
    double_dqn("32 filters of 8 x 8, 64 of 4 x 4, 64 of 3 x 3 and 512 units", PONG_FIRST_UPDATE, PONG_CAPACITY)
    + " A step is four of the emulator's frames, the brighter of the last two, 84 x 84 bytes; an observation has the "
    "newest four."
)
DESCRIPTIONS = {
    "dqn": double_dqn("16 filters of 3 x 3 and 128 units", FIRST_UPDATE, CAPACITY),
    "pong": PONG,
    "pong_gpu": PONG
    + (
        " Networks learn on the GPU. With memoire, TorchRL and RLlib eight processes of eight environments play on "
        "cores; with Stable-Baselines3 16 processes of one environment, whose actions are chosen on the GPU. TorchRL's "
        "buffer is there, too."
    ),
    "sac": (
        f"SAC: layers of {SAC_HIDDEN[0]} and {SAC_HIDDEN[1]}, discount {GAMMA}, Adam at {SAC_RATE:g}, batches of "
        f"{SAC_BATCH}, uniform draws, an update for each step from step {SAC_FIRST_UPDATE:,} on. At each update "
        f"targets keep {POLYAK}. The weight of the entropy is learned, from {SAC_ALPHA} on. {SAC_ENVS} environments "
        "run at a time."
    ),
    "ppo": (
        f"PPO: layers of {PPO_HIDDEN[0]} and {PPO_HIDDEN[1]} for policy and value each, {PPO_ENVS} environments, "
        f"{PPO_STEPS:,} steps an iteration, {PPO_EPOCHS} epochs of batches of {PPO_MINIBATCH}, Adam at {PPO_RATE:g}, "
        f"discount {PPO_GAMMA}, lambda {PPO_LAMBDA}. Ratios are clipped by {PPO_CLIP}, gradients at "
        f"{PPO_MAX_GRAD_NORM}. The entropy is weighted by {PPO_ENTROPY}, the mean square of the value's errors by "
        f"{PPO_VALUE}."
    ),
}
"""Description by algorithm, or by game if the game has numbers of its own."""
