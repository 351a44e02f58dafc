"""Is a damaged state folder ever believed?

Copies of two state folders (one as a killed server leaves it, one that was closed) get bits flipped, files cut, sectors
zeroed, pages swapped, files removed or put back as they were some transactions ago. Each copy then has to open with
exactly what was in it, or to be refused without being touched.
"""

import argparse
import sys
import time

from _kit import end, say, table

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
    print(table(["folder", "damaged copies", *mutations.VERDICTS], rows))
    return end(violations)


if __name__ == "__main__":
    sys.exit(main())
