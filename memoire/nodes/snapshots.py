"""Snapshots from the command line: ordered at every server of a cluster, looked into, and given to servers at their
start.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from memoire.errors import MemoireError, ParameterError
from memoire.pool import kinds
from memoire.pool.interface import HearsSums
from memoire.reader.reader import Reader
from memoire.security.keyfolder import Given
from memoire.server.server import Server
from memoire.storage import snapshot

INCOMPLETE = 3
"""Exit status when a server has not written its file, or a file is damaged."""


def order(
    endpoint: str, name: str, *, timeout: float = 600.0, keys: Given = None, say: Callable[[str], object] = print
) -> int:
    """Have every server behind this address write a snapshot into its own state folder; the exit status.

    Raises:
        MemoireTimeout: an address on the way leads to nobody, and nothing was ordered.
    """
    with Reader([endpoint], timeout=min(10.0, timeout), keys=keys) as reader:
        told = reader.snapshot(name, timeout)
    failed = 0
    for server, answer in sorted(told.items()):
        if isinstance(answer, MemoireError):
            failed += 1
            say(f"{server}: not written: {answer}")
            continue
        held = _held(answer.caches, answer.samples, answer.episodes, answer.entries)
        say(f"{server}: {answer.path}: {held}, {answer.bytes} bytes, {answer.seconds:.1f} s")
    return INCOMPLETE if failed else 0


def _held(caches: int, samples: int, episodes: int, entries: int) -> str:
    words = [f"{caches} caches of {samples} samples"] if caches or not episodes else []
    return " and ".join(words + ([f"{episodes} episodes of {entries} entries"] if episodes else []))


def show(path: str, *, check: bool = False, as_json: bool = False, say: Callable[[str], object] = print) -> int:
    """Print what a file holds; the exit status.

    Raises:
        DataError: it cannot be read, or is no snapshot.
    """
    found = snapshot.facts(path, check=check)
    if as_json:
        say(json.dumps(found))
    else:
        taken = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["taken"]))
        say(f"{path}: server {found['server']!r}, run {found['run']!r}, taken at {taken}, {found['bytes']} bytes")
        for table in found["tables"]:
            say(_line(table))
        if not found["complete"] and not found["damage"]:
            say("It is not complete: the server had to end while it was written.")
        if found["damage"]:
            say(f"It is damaged: {found['damage']}.")
    return INCOMPLETE if found["damage"] else 0


def _line(table: dict[str, Any]) -> str:
    if "caches" not in table:
        return f"  {table['name']}: {table['storage']}; how many is not known"
    held = _held(table["caches"], table["samples"], table["episodes"], table["entries"])
    is_left = kinds.offers(table["storage"], HearsSums)
    left = f", {table['unused']} not drawn yet, of {table['clients']} clients" if is_left else ""
    return f"  {table['name']}: {held}{left}, {table['bytes']} bytes"


def part_of(given: str | None) -> tuple[int, int]:
    """(rank, of) of "K/N": the K-th of N servers, counted from 1."""
    if given is None:
        return 0, 1
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", given)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ParameterError("--part", given, "K/N for the K-th of N servers, such as 1/3, 2/3 and 3/3")
    return int(found[1]) - 1, int(found[2])


def restore(server: Server, paths: Sequence[str], part: str | None, *, configure: bool, skip_damaged: bool) -> None:
    """Put files into a server that starts; what came of it goes to standard error. Files that were restored into its
    state folder before are left out.

    Raises:
        DataError, SnapshotMismatch: a file cannot be read, or does not fit.
        ParameterError: the part is none.
    """
    done = server.restore(paths, part=part_of(part), configure=configure, skip_damaged=skip_damaged, once=True)
    left_out = len(paths) - done.files
    known = f"; {left_out} of the files were restored here before" if left_out else ""
    print(f"memoire server: restored {done}{known}", file=sys.stderr, flush=True)
