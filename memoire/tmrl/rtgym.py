"""Real-Time Gym's names over `memoire.rl.realtime`: interface, default settings and a drone."""

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
"""Settings of an environment: copy them, set "interface" to your class, and pass the copy as `config`."""
IDS: Final = ("real-time-gym-v0", "real-time-gym-v1", "real-time-gym-ts-v1")
"""Ids of the same environment, registered when this module is imported."""


_HOME: Final = "memoire.rl.realtime:RealTimeEnv"


def register() -> None:
    """Register the ids of real-time environments in Gymnasium; ids that are registered already are not changed."""
    for name in IDS:
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point=_HOME)


def newest(name: str) -> str:
    """Return the id to create an environment by: the new one for our former id, of which Gymnasium would warn."""
    former, new = IDS[:2]
    is_ours = name == former and all(gymnasium.registry[each].entry_point == _HOME for each in (former, new))
    return new if is_ours else name


register()
