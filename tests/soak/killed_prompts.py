"""Is each prompt trained on exactly once an epoch, while servers, proxies, workers and the trainer are killed?

The trainer also dies between its checkpoint and its commit, and between its commit and the next checkpoint; and it is
sent back to older checkpoints. Then mistakes are planted, each of which has to be found.
"""

import argparse
import sys

from _kit import end, folder, say, table

from prompt_trial import Trial, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--kills", type=int, default=30, help="of servers, proxies and workers together")
    parser.add_argument("--deaths", type=int, default=50, help="of the trainer, of each of the two kinds")
    parser.add_argument("--returns", type=int, default=5, help="to older checkpoints")
    parser.add_argument("--seconds", type=float, default=360.0, help="that the trial may take")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plants", action="store_true", help="only the planted mistakes")
    given = parser.parse_args()
    violations = [] if given.plants else trial(given)
    for plant in ("skip", "double", "forget"):
        with folder() as place:
            found = run(Trial(str(place), plant=plant, seed=given.seed, kills=8, seconds=60.0, dies_after_commit=4))
        say(f"planted {plant!r}: {found.violations[:2]}")
        if not found.violations:
            violations.append(f"the planted mistake {plant!r} was not found")
    return end(violations)


def trial(given: argparse.Namespace) -> list[str]:
    """The whole trial; what was violated."""
    with folder() as place:
        outcome = run(
            Trial(
                str(place), prompts=given.prompts, group=8, epochs=given.epochs, step_groups=10, servers=2, proxies=2,
                workers=3, kills=given.kills, dies_after_checkpoint=given.deaths, dies_after_commit=given.deaths,
                returns=given.returns, seconds=given.seconds, seed=given.seed,
            )
        )  # fmt: skip
    print(table(["what", "seen"], [[name, value] for name, value in outcome.figures.items()]))
    return outcome.violations


if __name__ == "__main__":
    sys.exit(main())
