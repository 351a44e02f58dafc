"""Does a power failure lose anything that was acknowledged?

Everything that a store writes, renames and syncs is recorded by a library that is loaded before all others. Then the
power fails at a thousand random moments: what was synced is there, of the rest each write is there, not there, or there
up to a sector, in any order, and names only as far as their folder was synced. What was acknowledged before has to be
there, each step whole, with the log's text completed.
"""

import argparse
import shutil
import sys
import time

from _kit import CANNOT, TESTS, end, say, table

import powerkit
from killkit import check_state
from statekit import folder_in_memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="at most")
    parser.add_argument("--cuts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if not (shutil.which("gcc") or shutil.which("cc")):
        print("It takes a C compiler to record what is written.")
        return CANNOT
    ends, violations, cuts, steps = time.monotonic() + given.seconds, [], 0, 0
    with folder_in_memory() as place:
        root = place / "recorded"
        root.mkdir()
        recorded = powerkit.record(root, place, TESTS / "support" / "store_child.py", "steps", root, 20)
        for moment, acknowledged in powerkit.failures(recorded, root, place / "after", given.cuts, given.seed):
            try:
                steps = check_state(place / "after" / "state", acknowledged)
            except Exception as error:
                violations.append(f"seed {given.seed}, moment {moment}, {acknowledged} acknowledged: {error!r}")
            cuts += 1
            if cuts % 100 == 0:
                say(f"{cuts} cuts, {len(violations)} violations")
            if time.monotonic() > ends:
                break
    rows = [("writes, renames and syncs recorded", f"{len(recorded):,}"), ("steps acknowledged", steps)]
    rows += [("power failures", f"{cuts:,}"), ("that lost something acknowledged", len(violations))]
    print(table(["", ""], rows))
    return end(violations)


if __name__ == "__main__":
    sys.exit(main())
