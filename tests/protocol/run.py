"""Go through every world, and show for every mutation an order of events in which it does harm.

python -m protocol.run [--workers 2] [--only WORD] [--states 2000000]
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
from typing import NamedTuple
from unittest import mock

from .explore import MAX_STATES, Found, Search, World
from .mutations import MUTATIONS
from .worlds import WORLDS


class Task(NamedTuple):
    """One search, in a process of its own."""

    world: World
    mutation: str
    states: int


def search(task: Task) -> tuple[str, Found]:
    """Go through a world, with a rule taken out if the task names one."""
    logging.disable(logging.CRITICAL)
    with mock.patch.object(time, "monotonic", lambda: 0.0):
        if task.mutation:
            MUTATIONS[task.mutation][0]()
        return task.mutation, Search(task.world, task.states).run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", help="worlds and mutations whose name has this word")
    parser.add_argument("--states", type=int, default=MAX_STATES, help="states of a world at most")
    given = parser.parse_args()
    tasks = [Task(world, "", given.states) for world in WORLDS.values()]
    tasks += [Task(world, name, given.states) for name, (_, world) in MUTATIONS.items()]
    tasks = [task for task in tasks if given.only in (task.mutation or task.world.name)]
    began, failed = time.monotonic(), 0
    with multiprocessing.get_context("spawn").Pool(given.workers, maxtasksperchild=1) as pool:
        for mutation, found in pool.imap(search, tasks):
            is_right = bool(found.violation) if mutation else (found.is_whole and not found.violation)
            failed += not is_right
            print(_told(mutation, found), flush=True)
    print(f"{len(tasks)} searches in {time.monotonic() - began:.0f} s; {failed} of them not as they should be")
    return 1 if failed else 0


def _told(mutation: str, found: Found) -> str:
    steps = "\n".join([f"{found.violation}:", *_steps(found)]) if found.violation else ""
    if mutation:
        return f"{mutation}: {steps or f'NOT FOUND ({found})'}"
    return f"{found}\n  {steps or 'no error'}"


def _steps(found: Found) -> list[str]:
    return [f"  {number:3d} {what}" for number, what in enumerate(found.example, start=1)]


if __name__ == "__main__":
    sys.exit(main())
