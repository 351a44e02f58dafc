"""Ends a run of Stable-Baselines3 when its time is up, and has it leave its networks meanwhile."""

from collections.abc import Callable, Iterable

from stable_baselines3.common.callbacks import BaseCallback
from tasks import Run

FUSED = {"optimizer_kwargs": {"fused": True}}
"""For policies: Adam in one pass, as the other sides have it."""


class Watch(BaseCallback):
    """Called after each step of the environments."""

    def __init__(self, run: Run, parameters: Callable[[], Iterable], updates: Callable[[], int] = int) -> None:
        super().__init__()
        self.run, self.parameters, self.updates = run, parameters, updates

    def _on_step(self) -> bool:
        return self.run.goes_on(self.num_timesteps, self.parameters, self.updates())
