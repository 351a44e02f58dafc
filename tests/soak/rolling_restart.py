"""Does a rolling restart of every process, ten times over, lose anything or keep anyone waiting?

Servers, proxies and actors of a cluster under load get SIGTERM one after the other and are started again; each has to
be gone within ten seconds, with status 0, and nobody may fail.
"""

import argparse
import sys

from _kit import end, folder, say, table
from killed_cluster import rows

from history import trial


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.0, help="of it all; by default two for each restart")
    given = parser.parse_args()
    nodes = 3 + 2 + 4
    settings = trial.Settings(
        seed=1,
        seconds=given.seconds or 2.0 * given.rounds * nodes,
        servers=3,
        proxies=2,
        actors=4,
        clients=5,
        rate=6.0,
        kills=0,
        stops=0,
        rounds=given.rounds,
        runs=2,
    )
    with folder() as place:
        outcome = trial.run(settings, place)
    say(outcome)
    print(table(["", "rolling restart"], rows(list(outcome.figures), [outcome])))
    return end(outcome.violations)


if __name__ == "__main__":
    sys.exit(main())
