"""Can a server be taken out of a cluster under load, while others are killed, with nothing lost?

The last of three servers is drained with `memoire drain` in the middle of a trial: its clients move to the others, its
accounts are copied, and it is ended. What `Reader.totals` then says of the two that are left is compared with what the
clients did, and with all three state folders.
"""

import argparse
import sys

from _kit import end, folder, say, table
from killed_cluster import rows

from history import trial


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    settings = trial.Settings(
        seed=given.seed,
        seconds=given.seconds,
        servers=3,
        proxies=2,
        actors=6,
        clients=5,
        rate=6.0,
        kills=8,
        stops=3,
        drain=True,
    )
    with folder() as place:
        outcome = trial.run(settings, place)
    say(outcome)
    print(table(["", f"seed {given.seed}"], rows(list(outcome.figures), [outcome])))
    return end(outcome.violations)


if __name__ == "__main__":
    sys.exit(main())
