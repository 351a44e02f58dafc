"""Is anything counted or learned from twice, while a pipeline's server, workers and trainer are killed with SIGKILL?

A server with a state folder, two workers and a trainer with a checkpoint are processes of their own (`memoire.tmrl`). Each
role is killed ten times, at random moments, and started again at once. Observations say which process made them, and
which one it is. So a sample that comes twice is seen: in what one life of the trainer got, its journal included, and in
what several lives got anew. Servers may not count more steps than environments made. What a killed process had not sent
or written yet is lost, and no promise is made for it.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from _kit import CANNOT, TESTS, end, folder, say, table

from history.ports import held
from memoire import Reader
from memoire.errors import MemoireError

ROLES = ("server", "worker-0", "worker-1", "trainer")
PROGRAM = TESTS / "support" / "tmrl_roles.py"


class Pipeline:
    """The processes, which are started again when they were killed."""

    def __init__(self, place: Path, port: int) -> None:
        self.place, self.url = place, f"tcp://127.0.0.1:{port}"
        self.kills: Counter[str] = Counter()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for role in ROLES:
            self.start(role)

    def start(self, role: str) -> None:
        path = {"server": "state", "trainer": "samples"}.get(role, "steps")
        command = [sys.executable, str(PROGRAM), role.partition("-")[0], self.url, str(self.place / path)]
        environment = {
            **os.environ, "TMRL_EPOCHS": "inf", "TMRL_SLEEP_US": "2000", "TMRL_STEPS": str(self.place / "steps"),
            "MEMOIRE_TMRL": str(self.place),
        }  # fmt: skip
        with (self.place / f"{role}.log").open("ab") as log:
            self.processes[role] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def kill(self, role: str) -> None:
        self.processes[role].kill()
        self.processes[role].wait()
        self.kills[role.partition("-")[0]] += 1
        self.start(role)

    def finish(self, role: str, patience: float = 30.0) -> None:
        self.processes[role].send_signal(signal.SIGTERM)
        self.processes[role].wait(patience)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def lines(path: Path) -> list[tuple[str, ...]]:
    """Lines of a trainer's life: where a sample came from (journal or queue), process and number. A torn one is left."""
    text = path.read_text(encoding="ascii")
    return [tuple(line.split()) for line in text[: text.rfind("\n") + 1].splitlines()]


def twice(found: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [sample for sample, count in Counter(found).items() if count > 1]


def told(pipeline: Pipeline) -> int:
    """Steps that the server counts, when it counts no more."""
    with Reader(pipeline.url, table="samples") as reader:
        before = -1
        for _ in range(100):
            try:
                steps = reader.totals().totals.steps
            except MemoireError as error:
                say(error)
                steps = -1
            if steps == before >= 0:
                return steps
            before = steps
            time.sleep(1.0)
    raise RuntimeError("the server does not come to an end with its counts")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10, help="of each role")
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between two of them, in the mean")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if os.name != "posix":
        print("SIGKILL needs POSIX.")
        return CANNOT
    rng = random.Random(given.seed)
    plan = [role for role in ("server", "worker", "trainer") for _ in range(given.kills)]
    rng.shuffle(plan)
    with held(3) as port, folder() as place:
        pipeline = Pipeline(place, port)
        try:
            time.sleep(5.0)
            for number, role in enumerate(plan, start=1):
                time.sleep(rng.uniform(0.5, 1.5) * given.pause)
                gone = [name for name, each in pipeline.processes.items() if each.poll() is not None]
                if gone:
                    return end(
                        [f"{name} ended by itself:\n{(place / f'{name}.log').read_text()[-3000:]}" for name in gone]
                    )
                name = f"worker-{rng.randrange(2)}" if role == "worker" else role
                say(f"{number} of {len(plan)}: killing {name}")
                pipeline.kill(name)
            time.sleep(8.0)
            for name in ("worker-0", "worker-1"):
                pipeline.finish(name)
            steps = told(pipeline)
            time.sleep(2.0)
        finally:
            pipeline.close()
        return judged(place, pipeline, steps)


def judged(place: Path, pipeline: Pipeline, steps: int) -> int:
    made = sum(path.stat().st_size for path in place.glob("steps.*"))
    lives = [lines(path) for path in sorted(place.glob("samples.[0-9]*"))]
    anew = [line[1:] for life in lives for line in life if line[0] == "Buffer"]
    kept = [line for life in lives for line in life if line[0] != "Buffer"]
    violations = [
        f"one life of the trainer got {each} twice" for life in lives for each in twice([x[1:] for x in life])
    ]
    violations += [f"two lives of the trainer got {each} from workers" for each in twice(anew)]
    violations += [f"the server counts {steps} steps, and {made} were made"] * (steps > made)
    violations += ["nothing was rebuilt after a kill of the trainer"] * (not kept)
    violations += ["workers' samples did not arrive"] * (len(anew) < 1000)
    print(table(["what", "count"], [
        *((f"kills of the {role}" if role != "worker" else "kills of workers", pipeline.kills[role])
          for role in ("server", "worker", "trainer")),
        ("steps that environments made", made), ("steps that the server counts", steps),
        ("samples that trainers got from workers", len(anew)), ("of them twice", len(twice(anew))),
        ("samples that trainers rebuilt from their journal", len(kept)),
    ]))  # fmt: skip
    return end(violations)


if __name__ == "__main__":
    sys.exit(main())
