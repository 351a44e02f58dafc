"""Is everything still counted exactly once when servers and proxies lose the network?

A cluster under load in a network namespace of its own, in which addresses of servers and proxies vanish for up to eight
seconds: no reset, no refusal, only silence. Meanwhile others are killed and stopped.
"""

import argparse
import sys

from _kit import CANNOT, end, folder, say, table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cuts", type=int, default=10)
    given = parser.parse_args()
    from history import network

    why = network.own()  # before anything that starts threads is imported
    if why:
        print(why)
        return CANNOT
    from killed_cluster import rows

    from history import trial

    settings = trial.Settings(
        seed=given.seed,
        seconds=given.seconds,
        servers=3,
        proxies=2,
        actors=5,
        clients=4,
        rate=8.0,
        kills=6,
        stops=2,
        cuts=given.cuts,
    )
    with folder() as place:
        outcome = trial.run(settings, place)
    say(outcome)
    print(table(["", f"seed {given.seed}"], rows(list(outcome.figures), [outcome])))
    return end(outcome.violations)


if __name__ == "__main__":
    sys.exit(main())
