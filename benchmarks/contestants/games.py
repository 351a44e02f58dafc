"""What is learned in contest.py: each game with its score and its time. Imports nothing that is to be installed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Game:
    """A task, the same for all sides."""

    part: str
    algorithm: str
    """What programs of this folder begin with."""
    title: str
    score: float | None
    """Mean return of 20 greedy episodes, fixed by a pilot: Stable-Baselines3 reaches it in one to two minutes. None:
    only rates are compared.
    """
    seconds: float
    """Of each run, and what a run counts that never reaches the score."""
    stack: int = 1
    """Frames in an observation."""
    packages: str = ""
    """An environment of peers/versions.toml whose packages all sides find besides."""
    on_gpu: bool = False
    """Whether networks learn on a GPU, beside which there are many cores."""

    @property
    def players(self) -> int:
        """Processes that play, of a side that has some: so many as keep the cores of the machine busy."""
        return 8 if self.on_gpu else 2

    @property
    def device(self) -> str:
        """Where networks learn, as torch calls it."""
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
