"""Command that counts the seeds until each planted fault is detected, and runs seeds without a fault.

python -m simulation.find [--seeds 2000] [--control 100] [--only WORD]
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Final

from .plants import PLANTS
from .run import outcomes
from .trial import Settings

CONTROL: Final = "slow_disk"
"""A plant that is no fault."""


def report_of(plant: str, seeds: int, workers: int) -> tuple[int, float, str]:
    """Run seeds until the fault is detected. Return their number, their seconds of a core, and the violation or ""."""
    settings = PLANTS[plant].settings if plant else {}
    every = [Settings(seed, plant=plant, **settings) for seed in range(1, seeds + 1)]
    ran, seconds = 0, 0.0
    for _, outcome in outcomes(every, workers):
        ran, seconds = ran + 1, seconds + outcome.seconds
        if outcome.violations:
            return ran, seconds, outcome.violations[0].splitlines()[0]
    return ran, seconds, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2000, help="seeds for each fault at most")
    parser.add_argument("--control", type=int, default=100, help="seeds without a fault")
    parser.add_argument("--only", default="", help="faults whose name has this word")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    began, missed = time.monotonic(), []
    for plant in [name for name in PLANTS if args.only in name and name != CONTROL]:
        seeds, seconds, violation = report_of(plant, args.seeds, args.workers)
        missed += [] if violation else [plant]
        how = f"found after {seeds} seeds" if violation else f"NOT FOUND in {seeds} seeds"
        print(f"{plant:28} {how:26} {seconds:6.0f} s of a core   {violation[:110]}", flush=True)
    for plant in ("", CONTROL) if args.control else ():
        seeds, _, violation = report_of(plant, args.control, args.workers)
        missed += [plant or "control"] if violation else []
        print(f"{plant or 'nothing planted':28} {seeds} seeds: {violation or 'clean'}", flush=True)
    print(f"{time.monotonic() - began:.0f} s; not as it should be: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
