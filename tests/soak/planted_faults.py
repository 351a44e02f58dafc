"""Does each planted fault make the history test fail?

Each trial runs with one wrong piece in place of the product's (`tests/history/plants.py`), and the check that is
responsible must find it. `slow_disk` is no fault: nothing may be found there.
"""

import argparse
import sys

from _kit import end, folder, say, table

from history import trial
from history.plants import PLANTS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.0, help="of each trial; by default as the plant says")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    rows, wrong = [], []
    for name in given.names or PLANTS:
        plant = PLANTS[name]
        settings = {**plant.settings, **({"seconds": given.seconds} if given.seconds else {})}
        with folder() as place:
            outcome = trial.run(trial.Settings(plant=name, **settings), place)
        say(name, outcome)
        found = [violation for violation in outcome.violations if violation.startswith(plant.found_by)]
        if bool(found) != bool(plant.found_by):
            wrong.append(f"{name} was {'found, and is no fault' if found else 'not found'}")
        rows.append([f"`{name}`", plant.apply.__doc__, plant.found_by.rstrip(": ") or "nothing", len(found)])
    print(table(["planted", "what is wrong", "found by", "violations"], rows))
    return end(wrong)


if __name__ == "__main__":
    sys.exit(main())
