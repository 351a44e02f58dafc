"""Plant each fault in turn, and say after how many seeds it is found; then look for faults where nothing is planted.

python -m simulation.find [--seeds 2000] [--control 100] [--only WORD]
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any, Final, NamedTuple

from .plants import PLANTS
from .run import outcomes
from .trial import Settings

SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "polls_for_what_it_never_takes": {"terms": 12, "rate": 4.0},
    "locks_that_have_to_be_whole": {"power": 8},
    "ends_of_those_that_are_there": {"seconds": 20, "kills": 8, "cuts": 6, "pause": 0.5},
    # What is lost with a connection or a server is no fault, so that nothing can be said of what lacks then: there are none
    # of them. A server that was stopped is asked a second time.
    "forgotten_replies": {
        "kills": 0,
        "terms": 0,
        "eio": 0,
        "power": 0,
        "resets": 0,
        "stops": 30,
        "slow": 30,
        "pause": 0.3,
        "rate": 2.0,
    },
}
"""What more a fault needs: much of what brings it to light."""
CONTROL: Final = "slow_disk"
"""A plant that is no fault."""


class Report(NamedTuple):
    """What came of one plant."""

    seeds: int
    """That were run."""
    seconds: float
    """Of a core."""
    violation: str
    """"" if nothing was found."""


def report_of(plant: str, seeds: int, workers: int) -> Report:
    """Run seeds until the fault is found."""
    given = PLANTS[plant].settings if plant else {}
    every = [Settings(seed, plant=plant, **{**given, **SETTINGS.get(plant, {})}) for seed in range(1, seeds + 1)]
    ran, seconds = 0, 0.0
    for _, outcome in outcomes(every, workers):
        ran, seconds = ran + 1, seconds + outcome.seconds
        if outcome.violations:
            return Report(ran, seconds, outcome.violations[0].splitlines()[0])
    return Report(ran, seconds, "")


def main() -> int:
    """Plant them all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2000, help="seeds for each fault at most")
    parser.add_argument("--control", type=int, default=100, help="seeds without a fault")
    parser.add_argument("--only", default="", help="faults whose name has this word")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    began, missed = time.monotonic(), []
    for plant in [name for name in PLANTS if given.only in name and name != CONTROL]:
        found = report_of(plant, given.seeds, given.workers)
        missed += [] if found.violation else [plant]
        how = f"found after {found.seeds} seeds" if found.violation else f"NOT FOUND in {found.seeds} seeds"
        print(f"{plant:28} {how:26} {found.seconds:6.0f} s of a core   {found.violation[:110]}", flush=True)
    for plant in ("", CONTROL) if given.control else ():
        found = report_of(plant, given.control, given.workers)
        missed += [plant or "control"] if found.violation else []
        name = plant or "nothing planted"
        print(f"{name:28} {found.seeds} seeds: {found.violation or 'clean'}", flush=True)
    print(f"{time.monotonic() - began:.0f} s; not as it should be: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
