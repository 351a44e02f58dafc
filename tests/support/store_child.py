"""Processes that are killed while they save: run as a script, the module forks one for each fault.

    python store_child.py points FOLDER POINT [POINT ...]     a state folder for the first and fourth hit of each point
    python store_child.py steps FOLDER STEPS                  no process is killed; the store is closed and opened once

The file `acks` beside each state folder holds one byte for each acknowledged step.
"""

import os
import sys
from functools import partial
from pathlib import Path

from faultkit import KillAt, in_child
from memoire.accounting.runs import RunFacts
from memoire.disk import snapshot_file
from memoire.disk.snapshot_file import SnapshotHeader, SnapshotRecord, TableAbout
from memoire.limits import Limits
from memoire.models.model import make
from memoire.tables.base import LARGE_ROWS, LOSABLE_ROWS, SMALL_ROWS
from memoire.tables.caches.inspection import ClientRecord
from statekit import CLIENTS, RUN, Keeper, account

HITS = (1, 4)
STEPS = 5
LIMITS = Limits.of(log_bytes=600)
TABLE = TableAbout(name="default", storage="caches", schema="{}", parameters={})
ABOUT = SnapshotHeader(server="home", run=RUN, tables=[TABLE])


def step_of(keeper):
    return int(keeper.store.settings().get("step", "0"))


def prompts_of(step):
    """Return the rows of a step: a large payload, a small answer, and removals of former ones."""
    former = [(LARGE_ROWS[0], b"%d" % (step - 2), None), (LOSABLE_ROWS[0], b"%d" % (step - 3), None)]
    new = [
        (LARGE_ROWS[0], b"%d" % step, bytes([step % 256]) * 70_000),
        (LOSABLE_ROWS[0], b"%d" % step, b"answer %d" % step),
    ]
    return [*former, *new, (SMALL_ROWS[0], b"newest", b"%d" % step)]


def run(folder, acks, at, steps):
    """Save several steps, each with changes of every kind; write a byte for each acknowledged step."""
    keeper = Keeper(folder / "state", limits=LIMITS, at=at)
    first = step_of(keeper) + 1
    for step in range(first, first + steps):
        keeper.save(
            accounts=[account(CLIENTS[step % 8], step, step * step), account(CLIENTS[0], step)],
            lines=[(CLIENTS[0], 2 * step - 1, f"{step} a"), (CLIENTS[0], 2 * step, f"{step} " + "b" * 300)],
            models=[make("big", bytes([step % 256]) * 20_000, step), make("small", f"{step}", step)],
            runs=[RunFacts(RUN, began=1.0), RunFacts(f"run {step}", began=float(step))],
            settings={"step": str(step)},
            rows={"t": prompts_of(step)},
        )
        os.write(acks, b".")
        if step % 2 == 0:
            keeper.store.back_up()
            snapshot_file.write(
                folder / "state" / "memory.snapshot", ABOUT, [SnapshotRecord(ClientRecord(id=CLIENTS[0]))], at=at
            )
    keeper.close()


def acks_of(folder):
    return os.open(folder / "acks", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def main(kind, folder, *arguments):
    folder = Path(folder)
    if kind == "points":
        for point in arguments:
            for hit in HITS:
                here = folder / f"{point.replace(' ', '_')}-{hit}"
                here.mkdir()
                acks = acks_of(here)
                status = in_child(partial(run, here, acks, KillAt(point, hit), STEPS))
                (here / "status").write_text(str(status))
                os.close(acks)
        return
    acks = acks_of(folder)
    for _ in range(2):
        run(folder, acks, lambda point: None, int(arguments[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
