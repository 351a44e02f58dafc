"""Is a damaged state folder ever believed?

Copies of two state folders (one as a killed server leaves it, one that was closed) get bits flipped, files cut, sectors
zeroed, pages swapped, files removed or put back as they were some transactions ago. Each copy then has to open with
exactly what was in it, or to be refused without being touched. The same for tables of prompts, of which a damaged
answer may be waited for again; there each file is cut at all boundaries of pages, and the disk is full, and the process
is killed, at each step of a write.
"""

import argparse
import itertools
import logging
import sys
import time
from pathlib import Path

from _kit import TESTS, end, say, table

sys.path.insert(1, str(TESTS / "storage"))

import test_every_file as every

import mutations
from statekit import folder_in_memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="at most")
    parser.add_argument("--rounds", type=int, default=1000, help="damaged copies of each folder")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    ends = time.monotonic() + given.seconds
    rows, violations = [], []
    with folder_in_memory() as place:
        killed, older, closed, truth = mutations.make_folders(place)
        work = place / "work"
        work.mkdir()
        for name, source in (("of a killed server", killed), ("that was closed", closed)):
            verdicts = mutations.Counter()
            for start in range(0, given.rounds, 100):
                if time.monotonic() > ends:
                    break
                try:
                    verdicts += mutations.run(
                        source, older, truth, work, min(100, given.rounds - start), given.seed + start
                    )
                except AssertionError as error:
                    violations.append(f"folder {name}: {error}")
                say(f"folder {name}: {dict(verdicts)}")
            rows.append((name, sum(verdicts.values()), *(verdicts[verdict] for verdict in mutations.VERDICTS)))
    logging.lastResort = None  # thousands of warnings are expected
    whole = []
    for name, kind in every.FILES.items():
        if kind.is_database and time.monotonic() < ends:
            with folder_in_memory() as place:
                try:
                    whole.append((name, *in_every_way(kind, place)))
                    say(*whole[-1])
                except AssertionError as error:
                    violations.append(f"{name}: {error}")
    print(table(["folder", "damaged copies", *mutations.VERDICTS], rows))
    print(table(["folder", "flips, cuts and tails", "taken, and right", "refused", "full disks", "kills"], whole))
    return end(violations)


def in_every_way(kind, place: Path) -> tuple[int, ...]:
    """Damage, full disks and kills; raises AssertionError where something else than the truth is served."""
    folder = place / "files"
    folder.mkdir()
    every.fill(kind, folder)
    steps = every.steps_of(kind, folder, place)
    for number, stays in itertools.product(steps, (False, True)):
        every.fail_at(kind, folder, place / f"{number}-{stays}", number, stays)
    for number in steps:
        every.kill_at(kind, folder, place / str(number), number)
    verdicts = every.try_all_damage(kind, folder, 1)
    return verdicts.total(), verdicts["taken"], verdicts["refused"], 2 * len(steps), len(steps)


if __name__ == "__main__":
    sys.exit(main())
