"""Command that searches every world, and shows for every mutation an order of events in which it does harm.

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

from .explore import MAX_STATES, Search, SearchResult, World
from .mutations import MUTATIONS
from .worlds import WORLDS


class Task(NamedTuple):
    """One search, in a process of its own."""

    world: World
    mutation: str
    states: int


def search(task: Task) -> tuple[str, SearchResult]:
    """Search a world, without the rule that the task's mutation takes out."""
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
    args = parser.parse_args()
    tasks = [Task(world, "", args.states) for world in WORLDS.values()]
    tasks += [Task(world, name, args.states) for name, (_, world) in MUTATIONS.items()]
    tasks = [task for task in tasks if args.only in (task.mutation or task.world.name)]
    began, failed = time.monotonic(), 0
    with multiprocessing.get_context("spawn").Pool(args.workers, maxtasksperchild=1) as pool:
        for mutation, result in pool.imap(search, tasks):
            is_right = bool(result.violation) if mutation else (result.is_whole and not result.violation)
            failed += not is_right
            print(_report(mutation, result), flush=True)
    print(f"{len(tasks)} searches in {time.monotonic() - began:.0f} s; {failed} of them not as they should be")
    return 1 if failed else 0


def _report(mutation: str, result: SearchResult) -> str:
    steps = "\n".join([f"{result.violation}:", *_steps(result)]) if result.violation else ""
    if mutation:
        return f"{mutation}: {steps or f'NOT FOUND ({result})'}"
    return f"{result}\n  {steps or 'no error'}"


def _steps(result: SearchResult) -> list[str]:
    return [f"  {number:3d} {what}" for number, what in enumerate(result.example, start=1)]


if __name__ == "__main__":
    sys.exit(main())
