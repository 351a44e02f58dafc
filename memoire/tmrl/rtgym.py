"""The names of Real-Time Gym over `memoire.rl.realtime`: interfaces, the settings of an environment, a drone."""

from __future__ import annotations

from typing import Any, Final

from memoire.errors import NotInstalled

with NotInstalled.explained("pip install 'memoire-rl[rl]'"):
    import gymnasium

    from memoire.rl.realtime import DEFAULTS, DummyDrone, RealTimeInterface

__all__ = ["DEFAULT_CONFIG_DICT", "DummyRCDrone", "RealTimeGymInterface", "register"]

RealTimeGymInterface = RealTimeInterface
DummyRCDrone = DummyDrone
DEFAULT_CONFIG_DICT: Final[dict[str, Any]] = dict(DEFAULTS)
"""Copy it, replace "interface" by your own class, and give it to an environment as `config`."""
IDS: Final = ("real-time-gym-v0", "real-time-gym-v1", "real-time-gym-ts-v1")
"""Of one and the same environment. They are registered when this module is imported."""


_HOME: Final = "memoire.rl.realtime:RealTimeEnv"


def register() -> None:
    """Have `gymnasium.make` know the ids of real-time environments; those that it knows already stay as they are."""
    for name in IDS:
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point=_HOME)


def newest(name: str) -> str:
    """The id to make an environment by: Gymnasium warns of the former one, and both of ours are the same."""
    former, new = IDS[:2]
    is_ours = name == former and all(gymnasium.registry[each].entry_point == _HOME for each in (former, new))
    return new if is_ours else name


register()
