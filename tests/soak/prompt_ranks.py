"""Do four ranks of a trainer draw disjoint parts of each step, every prompt once, and the same ones after restarts?

Two servers with state folders hold the prompts. Every 500 steps all readers start again, every 2,500 a server does; then
each rank draws a former step once more, and has to get the groups that it had.
"""

import argparse
import contextlib
import sys
import time

import numpy as np
from _kit import end, folder, say, table

import memoire

RANKS, GROUPS = 4, 8
COLUMNS = {"tokens": (np.int32, (None,)), "reward": np.float32}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", type=int, default=10_000, help="steps that are drawn, by each rank")
    given = parser.parse_args()
    with folder() as place:
        violations, figures = trial(given.draws, str(place))
    print(table(["what", "seen"], list(figures.items())))
    return end(violations)


class Scene:
    """Servers, and what uses them; all can start again."""

    def __init__(self, place: str) -> None:
        self.place, self.servers, self.readers = place, {}, []

    def start(self, name: str) -> None:
        """Start a server, or start it again with what it had."""
        if name in self.servers:
            self.servers[name].close()
        made = memoire.Table(COLUMNS, storage="prompts", group=1, keep=4)
        address = f"ipc://{self.place}/{name}"
        self.servers[name] = memoire.Server(
            address, tables={"t": made}, name=name, state_dir=f"{self.place}/{name}-state"
        )

    def connect(self) -> None:
        """All ranks, and somebody who gives and answers, begin anew."""
        for each in self.readers:
            each.close()
        urls = [f"ipc://{self.place}/{name}" for name in self.servers]
        facts = {"timeout": 120.0, "session": "trial"}
        self.readers = [memoire.Prompts(urls, "t", rank=(rank, RANKS), **facts) for rank in range(RANKS)]
        self.readers.append(memoire.Prompts(urls, "t", timeout=120.0))

    def close(self) -> None:
        """End everything."""
        for each in (*self.readers, *self.servers.values()):
            each.close()


def trial(draws: int, place: str) -> tuple[list[str], dict[str, object]]:
    """What was violated, and what was seen."""
    scene, rng = Scene(place), np.random.default_rng(0)
    violations: list[str] = []
    drawn: set[int] = set()
    restarts, again, given, began = 0, 0, 0, time.monotonic()
    ratios = []
    with contextlib.closing(scene):
        for name in ("a", "b"):
            scene.start(name)
        scene.connect()
        last: list[list[memoire.tables.prompts.rows.Key]] = []
        for step in range(draws):
            if step and step % 500 == 0:
                scene.connect()
                restarts += 1
            if step and step % 2500 == 0:
                scene.start("ab"[step // 2500 % 2])
                restarts += 1
            if step and step % 500 == 0:
                same = [each.draw(step - 1, GROUPS).keys for each in scene.readers[:RANKS]]
                again += RANKS
                if same != last:
                    violations.append(f"step {step - 1} has other groups after a restart")
            if step * GROUPS >= given - 4 * GROUPS and given < draws * GROUPS:
                given = answer(scene.readers[-1], given, min(1000, draws * GROUPS - given), rng)
            steps = [each.draw(step, GROUPS) for each in scene.readers[:RANKS]]
            last = [each.keys for each in steps]
            indexes = [index for keys in last for _, _, index in keys]
            if len(indexes) != GROUPS or len(set(indexes)) != GROUPS or drawn & set(indexes):
                violations.append(f"step {step}: ranks got {last}")
            drawn.update(indexes)
            ratios.append(max(steps[0].rank_tokens) / np.mean(steps[0].rank_tokens))
            if step % 4 == 3:
                scene.readers[0].commit(step)
            if step % 1000 == 999:
                say(f"{step + 1} steps after {time.monotonic() - began:.0f} s")
        if drawn != set(range(draws * GROUPS)):
            violations.append(f"{draws * GROUPS - len(drawn)} prompts were never drawn")
        counts = scene.readers[-1].counts()
        if counts["drawn"] + counts["committed"] != draws * GROUPS:
            violations.append(f"the states are {counts}")
    figures = {
        "draws of each of four ranks": draws, "prompts, each in one step and one rank": len(drawn),
        "restarts of all readers or of a server": restarts, "draws that were repeated after one": again,
        "seconds": round(time.monotonic() - began),
    }  # fmt: skip
    return violations, figures


def answer(prompts: memoire.Prompts, first: int, count: int, rng: np.random.Generator) -> int:
    """Give and answer so many prompts of one answer each; returns the number of all."""
    prompts.add(dict.fromkeys(range(first, first + count), b""))
    left = count
    while left:
        leases = prompts.lease(256)
        sizes = rng.lognormal(3.0, 1.0, len(leases)).astype(int) + 1
        prompts.answer_all(
            [(lease, {0: {"tokens": np.zeros(size, np.int32), "reward": 1.0}})
             for lease, size in zip(leases, sizes, strict=True)]
        )  # fmt: skip
        left -= len(leases)
    return first + count


if __name__ == "__main__":
    sys.exit(main())
