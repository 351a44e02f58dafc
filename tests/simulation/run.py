"""Command that runs many seeds, shortens the schedule of a failing one, and prints how to repeat it.

    python -m simulation.run --seeds 2000 --first 1 --workers 2 [--plant NAME] [--storage rollouts] [name=value ...]

A failing seed runs again with fewer and fewer faults, as long as it still fails in the same way.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from .plants import PLANTS
from .trial import Outcome, Settings, run, value_of

REMEMBERED = Path(__file__).with_name("seeds.txt")
"""Seeds that failed once. Each run tries them first."""
CHUNK = 50
"""Trials of one process. The end of the process frees the leftovers of killed simulated processes."""


def kind_of(violation: str) -> str:
    """Return the kind of a violation: its first word."""
    return violation.partition(":")[0]


def shortened(settings: Settings, outcome: Outcome) -> Outcome:
    """Return the same failure with as few faults as possible, leaving out each in turn."""
    wanted, best = kind_of(outcome.violations[0]), outcome
    size = max(1, len(best.faults) // 2)
    while size:
        start = 0
        while start < len(best.faults):
            fewer = best.faults[:start] + best.faults[start + size :]
            tried = run(settings, fewer)
            if any(kind_of(each) == wanted for each in tried.violations):
                best = tried
            else:
                start += size
        size //= 2
    return best


def _prepare(plant: str) -> None:
    logging.disable(logging.CRITICAL)
    if plant:
        PLANTS[plant].apply()


def _try(settings: Settings) -> tuple[Settings, Outcome]:
    """Return a trial's outcome. An error counts as a violation, since pickling may lose parts of it."""
    began = time.monotonic()
    try:
        return settings, run(settings)
    except Exception:
        why = f"error: {traceback.format_exc()}"
        return settings, Outcome(settings.seed, [why], "", 0.0, time.monotonic() - began, 0, {}, [], "")


def remembered(text: str) -> list[Settings]:
    """Parse the trials of a file: each line has a seed and the settings that differ from the defaults."""
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    return [Settings(int(seed), **dict(map(value_of, words))) for seed, *words in filter(None, lines)]


def outcomes(every: list[Settings], workers: int) -> Iterator[tuple[Settings, Outcome]]:
    """Yield each trial's outcome as soon as it is available."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _prepare, (every[0].plant,), maxtasksperchild=CHUNK) as pool:
        yield from pool.imap_unordered(_try, every)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--plant", default="", choices=["", *PLANTS])
    parser.add_argument("--stop-after", type=int, default=3, help="failing seeds after which nothing more is tried")
    parser.add_argument("--whole", action="store_true", help="make no failing schedule shorter")
    parser.add_argument("--digests", action="store_true", help="print what each seed's trace adds up to")
    parser.add_argument("more", nargs="*", help="settings of the trials, such as storage=rollouts")
    args = parser.parse_args()
    values = dict(value_of(word) for word in args.more)
    seeds = range(args.first, args.first + args.seeds)
    every = [Settings(seed, plant=args.plant, **values) for seed in seeds]
    if not (args.plant or values):
        every = [*remembered(REMEMBERED.read_text(encoding="utf-8")), *every]
    began, failed, virtual, seconds, turns = time.monotonic(), [], 0.0, 0.0, 0
    for settings, outcome in outcomes(every, args.workers):
        virtual, seconds, turns = virtual + outcome.virtual, seconds + outcome.seconds, turns + outcome.turns
        if args.digests:
            print(f"seed {settings.seed}: {outcome.turns} turns, {outcome.digest}", flush=True)
        if outcome.violations:
            failed.append((settings, outcome))
            print(outcome, flush=True)
        if len(failed) >= args.stop_after:
            break
    took = time.monotonic() - began
    print(
        f"{virtual:.0f} s of trials in {seconds:.0f} s of a core ({virtual / seconds:.0f} times), {took:.0f} s; {turns} turns"
    )
    if failed and failed[0][1].turns and not args.whole:
        _prepare(args.plant)
        settings, outcome = failed[0]
        best = shortened(settings, outcome)
        schedule = "\n".join(map(str, best.faults)) or "(no faults at all)"
        print(f"\nThe shortest schedule that fails so:\n{schedule}\n{best}")
        words = " ".join(args.more)
        print(f"To see it again: python -m simulation.trial {settings.seed} {words}")
    print(f"{len(failed)} of {len(every)} seeds failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
