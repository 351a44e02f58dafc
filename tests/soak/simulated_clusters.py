"""Does a simulated cluster lose or count anything twice, over a thousand seeds and more?

Each trial is two minutes of a cluster in one thread: kills, cuts, a slow network, disks that are full, broken or without
power, and a few rare things made frequent. The seed decides all of it, and the digest of a trace is the same on every
machine with the same versions.
"""

import argparse
import os
import sys
import time

from _kit import end, say, table

STORAGES = {"caches": 1.0, "rollouts": 0.1, "prompts": 0.2, "jobs": 0.2}
"""What trials are about, and how many seeds there are of each for one of caches."""
ALONE = 100
"""Trials that one process runs first, with nothing beside it, to say how fast that is."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    os.environ["PYTHONHASHSEED"] = "0"
    from simulation.run import outcomes
    from simulation.trial import Settings

    alone = [
        outcome for _, outcome in outcomes([Settings(seed) for seed in range(given.first, given.first + ALONE)], 1)
    ]
    virtual, seconds = sum(each.virtual for each in alone), sum(each.seconds for each in alone)
    say(f"alone: {virtual:.0f} s in {seconds:.0f} s of a core")
    speed = f"One process alone: {ALONE} trials of {virtual / ALONE:.0f} s, {seconds / ALONE:.2f} s each"
    speed += f" ({virtual / seconds:.0f} times real time)."
    rows, violations, began = [], [], time.monotonic()
    for storage, share in STORAGES.items():
        seeds = range(given.first, given.first + max(1, round(given.seeds * share)))
        virtual, seconds, failed, digest = 0.0, 0.0, 0, ""
        for settings, outcome in outcomes([Settings(seed, storage=storage) for seed in seeds], given.workers):
            virtual, seconds = virtual + outcome.virtual, seconds + outcome.seconds
            digest = outcome.digest[:16] if settings.seed == given.first else digest
            if outcome.violations:
                failed += 1
                violations.append(f"seed {settings.seed} storage={storage}: {outcome.violations[0]}")
        say(storage, f"{virtual:.0f} s in {seconds:.0f} s of a core")
        hours, times = f"{virtual / 3600:.1f}", f"{virtual / seconds:.0f}"
        rows.append([f"`storage={storage}`", f"{len(seeds):,}", hours, times, failed, f"`{digest}`"])
    head = ["trials", "seeds", "hours of trials", "times real time on a core", "that violated something"]
    print(table([*head, f"digest of seed {given.first}"], rows))
    print(f"\n{speed} The others took {(time.monotonic() - began) / 60:.1f} minutes with {given.workers} processes.")
    return end(violations)


if __name__ == "__main__":
    sys.exit(main())
