"""Is everything counted exactly once after two minutes of kills?

50 clients in 10 processes count episodes, log, push caches and follow a model at three servers with state folders,
behind two proxies. Servers, proxies and actors are killed with SIGKILL and stopped with SIGSTOP by a seeded schedule.
In the end each client's episodes, steps and log lines are compared with what it was told and what it did.
"""

import argparse
import sys

from _kit import end, folder, say, table

from history import trial


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="trials, with seeds one after the other")
    parser.add_argument("--kills", type=int, default=28)
    parser.add_argument("--stops", type=int, default=8)
    given = parser.parse_args()
    outcomes = []
    for seed in range(given.seed, given.seed + given.seeds):
        settings = trial.Settings(
            seed=seed,
            seconds=given.seconds,
            servers=3,
            proxies=2,
            actors=10,
            clients=5,
            rate=6.0,
            kills=given.kills,
            stops=given.stops,
            runs=2,
        )
        with folder() as place:
            outcomes.append(trial.run(settings, place))
        say(outcomes[-1])
    names = list(outcomes[0].figures)
    print(table(["", *(f"seed {given.seed + k}" for k in range(given.seeds))], rows(names, outcomes)))
    return end([violation for outcome in outcomes for violation in outcome.violations])


def rows(names: list[str], outcomes: list[trial.Outcome]) -> list[list[str]]:
    shown = [[name.replace("_", " "), *(text(outcome.figures[name]) for outcome in outcomes)] for name in names[1:]]
    return [*shown, ["violations", *(str(len(outcome.violations)) for outcome in outcomes)]]


def text(value: object) -> str:
    """{"server": 9, "actor": 8} -> "9 server, 8 actor"."""
    return ", ".join(f"{count} {kind}" for kind, count in value.items()) if isinstance(value, dict) else str(value)


if __name__ == "__main__":
    sys.exit(main())
