"""Is each entry of rollouts handed out once and whole, while servers, proxies and actors are killed and stopped?

Twenty clients record rollouts at three servers behind two proxies, and a learner far away takes them. In the first trial
everybody is killed and stopped: what a killed server held is lost, and nothing may come twice or torn. In the second
one nobody is killed, but servers and proxies are stopped, so that requests are sent again: nothing may be lost either.
"""

import argparse
import dataclasses
import sys

from _kit import end, folder, say, table
from killed_cluster import rows

from history import trial


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each trial")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    common = trial.Settings(
        seed=given.seed, seconds=given.seconds, servers=3, proxies=2, actors=4, clients=5, storage="rollouts"
    )
    killed = dataclasses.replace(common, kills=12, stops=4)
    stopped = dataclasses.replace(common, kills=0, stops=16, spared=("actor",))
    outcomes = []
    for settings in (killed, stopped):
        with folder() as place:
            outcomes.append(trial.run(settings, place))
        say(outcomes[-1])
    print(table(["", "killed", "stopped"], rows(list(outcomes[0].figures), outcomes)))
    return end([violation for outcome in outcomes for violation in outcome.violations])


if __name__ == "__main__":
    sys.exit(main())
