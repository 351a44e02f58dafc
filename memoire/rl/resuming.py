"""What a trainer goes on with of the files of a former one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from memoire.errors import ParameterError
from memoire.replay.file_lock import FileLock
from memoire.storage.folder_lock import lock_folder
from memoire.suggestions import one_of

RESUMES: Final = ("all", "memory", "weights", "none")
"""Everything; its samples alone; its agent alone; nothing, and its files are put aside."""


def checked_resume(value: Any) -> str:
    """One of RESUMES. Raises ParameterError: it is none of them."""
    if value not in RESUMES:
        raise ParameterError("resume", value, one_of(value, RESUMES))
    return str(value)


def put_aside(path: str | Path) -> Path | None:
    """Give a file or folder another name beside it, so that a run begins anew; the name, or None if there is nothing.

    Nothing is deleted: the name is the former one with ".former-1", or the next number that is free.

    Raises:
        StateLocked: a trainer that runs has the folder.
    """
    place, number = Path(path), 1
    if not place.exists():
        return None
    while (other := place.with_name(f"{place.name}.former-{number}")).exists():
        number += 1
    lock = lock_checkpoint(place) if place.is_dir() else None
    try:
        return place.rename(other)
    finally:
        if lock is not None:
            lock.release()


def lock_checkpoint(folder: Path) -> FileLock:
    """Lock the folder of a checkpoint, which is made if it is not there: one trainer at a time has it.

    Raises:
        StateError: another one has it, or it cannot be locked.
        OSError: it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return lock_folder(folder, "the checkpoint folder", "trainer")


def begin_fresh(paths: Iterable[str | Path], *, is_sure: bool = False, ask: Callable[[str], str] = input) -> None:
    """Put a run's files aside, so that it begins anew, after a question.

    Args:
        paths: Files and folders; those that are not there are passed over.
        is_sure: Do so without a question.
        ask: Gets the question, gives the answer.

    Raises:
        ParameterError: the answer was not yes; nothing was changed.
    """
    there = [Path(path) for path in paths if Path(path).exists()]
    if not there:
        return
    names = "\n".join(f"  {path}" for path in there)
    question = f"These files of a former run are given other names:\n{names}\nGo on? [yes/no] "
    try:
        answer = "yes" if is_sure else ask(question)
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise ParameterError("--fresh", answer.strip(), "the answer yes at a terminal, or --yes beside it")
    for path in there:
        put_aside(path)
