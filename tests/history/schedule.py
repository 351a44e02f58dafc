"""Faults from a seed: who is killed, stopped for a while, or asked to end, and when. The same seed, the same faults."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SETTLE = 1.0
"""Seconds of peace at the beginning."""


@dataclass(frozen=True)
class Fault:
    """What happens to one process."""

    at: float
    """Seconds after the beginning."""
    kind: str
    """"kill" (SIGKILL, then started again), "term" (SIGTERM, then started again), "stop" (SIGSTOP, then SIGCONT) or "cut"
    (its address is gone, then back)."""
    target: str
    """Such as "server-1"."""
    seconds: float
    """How long it is away."""

    @property
    def until(self) -> float:
        return self.at + self.seconds

    def __str__(self) -> str:
        return f"{self.at:6.2f} s {self.kind} {self.target} for {self.seconds:.2f} s"


AWAY = {"kill": (0.05, 1.5), "term": (0.3, 1.5), "stop": (0.3, 3.0), "cut": (0.5, 8.0)}
"""Least and most seconds that each kind of fault takes."""
AWAY |= {"in": (0.5, 8.0), "out": (0.5, 8.0), "slow": (0.5, 5.0), "reset": (0.0, 0.1)}
"""Those that only a simulated network has: cut in one direction, slow, and all connections of a host reset."""
AWAY |= {"full": (0.5, 8.0), "eio": (0.5, 3.0), "power": (0.5, 3.0)}
"""Those of a simulated disk: full, broken until its server is killed and started again, and without power."""
DISK = ("full", "eio", "power")
RECOVERS = {"kill": 1.0, "term": 4.0, "stop": 0.2, "cut": 1.0, "in": 1.0, "out": 1.0, "slow": 0.0, "reset": 0.2}
RECOVERS |= {"full": 1.0, "eio": 1.0, "power": 1.0}
"""Seconds after a fault in which its target is left alone: a process that never gets up shows nothing new."""


def faults(
    seed: int, seconds: float, targets: Sequence[str], counts: Mapping[str, int], pace: float = 1.0
) -> list[Fault]:
    """Spread `counts` of each kind of fault over the time, in turns over the kinds of processes.

    Every kind of process ("server", "proxy", "actor") gets its share, however many there are of it.

    Args:
        pace: Above 1 makes faults as much shorter.
    """
    rng = random.Random(f"faults of {seed}")
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    rng.shuffle(kinds)
    span = (seconds - SETTLE) / max(1, len(kinds))
    free_at = dict.fromkeys(targets, 0.0)
    turns: dict[str, list[str]] = {}
    made = []
    for place, kind in enumerate(kinds):
        at = SETTLE + span * (place + rng.random())
        away = rng.uniform(*AWAY[kind]) / pace
        able = [target for target in targets if kind != "cut" or not target.startswith("actor")]
        able = [target for target in able if kind not in DISK or target.startswith("server")]
        classes = sorted({target.partition("-")[0] for target in able})
        if not turns.get(kind):
            turns[kind] = rng.sample(classes, len(classes))
        wanted = turns[kind].pop()
        free = [target for target in able if free_at[target] <= at]
        of_class = [target for target in free if target.startswith(wanted + "-")]
        if not (of_class or free):
            continue  # everybody is down: a fault less
        target = rng.choice(of_class or free)
        free_at[target] = at + away + RECOVERS[kind]
        made.append(Fault(round(at, 3), kind, target, round(away, 3)))
    return sorted(made, key=lambda fault: fault.at)


def rolling(rounds: int, seconds: float, targets: Sequence[str]) -> list[Fault]:
    """Every target is asked to end and started again, one after the other, `rounds` times."""
    span = (seconds - SETTLE) / max(1, rounds * len(targets))
    order = [target for _ in range(rounds) for target in targets]
    return [Fault(round(SETTLE + place * span, 3), "term", target, 0.2) for place, target in enumerate(order)]
