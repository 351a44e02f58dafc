"""Trials of disks: power failures and damage."""

import argparse
import itertools
import logging
import re
import shutil
import time
from collections import Counter
from pathlib import Path

from _kit import CANNOT, TESTS, end, run_named, say, table

# isort: split

import pytest
import test_every_file as every

import powerkit
from faultkit import in_child
from memoire.errors import StateLocked
from powerkit import check_state
from statekit import folder_in_memory


def power_failure() -> int:
    """Does a power failure lose anything that was acknowledged?

    A library that is loaded before all other libraries records all that a store writes, renames and syncs. Afterwards
    the power fails at a thousand random moments. Synced data is there. Each other write is there, missing, or there up
    to a sector, in any order, and names only as far as their folder was synced. All acknowledged steps have to be
    there, each as a whole, with the log's text completed.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0, help="at most")
    parser.add_argument("--cuts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if not (shutil.which("gcc") or shutil.which("cc")):
        print("It takes a C compiler to record what is written.")
        return CANNOT
    ends, violations, cuts, steps = time.monotonic() + args.seconds, [], 0, 0
    with folder_in_memory() as place:
        root = place / "recorded"
        root.mkdir()
        recorded = powerkit.record(root, place, TESTS / "support" / "store_child.py", "steps", root, 20)
        for moment, acknowledged in powerkit.failures(recorded, root, place / "after", args.cuts, args.seed):
            try:
                steps = check_state(place / "after" / "state", acknowledged)
            except Exception as error:
                violations.append(f"seed {args.seed}, moment {moment}, {acknowledged} acknowledged: {error!r}")
            cuts += 1
            if cuts % 100 == 0:
                say(f"{cuts} cuts, {len(violations)} violations")
            if time.monotonic() > ends:
                break
    rows = [("writes, renames and syncs recorded", f"{len(recorded):,}"), ("steps acknowledged", steps)]
    rows += [("power failures", f"{cuts:,}"), ("that lost something acknowledged", len(violations))]
    print(table(["", ""], rows))
    return end(violations)


SORTS = ("flips", "cuts", "removals", "tails")
VERDICTS = ("refused", "named", "unchanged", "silent")
COLUMNS = (*SORTS, "full disks", "double writers", "kills", *VERDICTS)
STEPS = "each step of a write"


def state_damage() -> int:
    """Is a damaged file of a server, a trainer or a client ever believed?

    Every kind of file is tried alone (`tests/disk/test_every_file.py`), and the table has a row for each of its files.
    Each bit of a file below 2 kB is flipped, and the file is cut at each size. In a larger file a sample of bits and
    sizes is tried; in a state folder, 2,000 bits by a seed, the boundaries of all pages and a hundred other
    sizes. The file is removed; its last 512 and 4,096 bytes are zeros or gone. At each step of a write the disk is full
    (once, or from then on), another process writes too, or the process is killed. Undamaged files open before and
    after.

    A damaged file is refused and stays as it was, or all that was acknowledged is there ("unchanged": the damage is in
    free space or in a backup, for example). "Named" is right, too: answers of prompts are missing, these prompts wait
    again, and the log names the file; or a log's text differs, which acknowledges nothing. Anything else is silent.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", nargs="*", default=list(every.FILES), help="of files that are tried alone")
    args = parser.parse_args()
    logging.getLogger("memoire").addHandler(Losses())
    logging.getLogger("memoire").propagate = False  # thousands of warnings are expected
    whole, violations = [], []
    for name in args.kinds:
        with folder_in_memory() as place:
            trial = Trial(every.FILES[name], place, violations)
            try:
                whole += [(f"{name}: {file}", *row) for file, row in trial.rows()]
            except pytest.skip.Exception as reason:
                say(f"{name} is left out: {reason}")
        say(*whole[-1:])
    for name, kind in every.SPARSE.items():
        with folder_in_memory() as place:
            whole.append((f"{name}: {STEPS}", *in_columns(Trial(kind, place, violations).interrupted())))
    whole.append(("sum", *(sum(row[column] for row in whole) for column in range(1, len(whole[0])))))
    print(table(["file", *COLUMNS], whole))
    return end(violations)


def in_columns(row: Counter[str]) -> tuple[int, ...]:
    """Return the counts of a row in the order of the table's columns."""
    return tuple(row[column] for column in COLUMNS)


class Losses(logging.Handler):
    """Handler that counts warnings, in which the log names missing or damaged files."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        Losses.count += record.levelno >= logging.WARNING


class Trial:
    """Damage and faults for the files of one kind, in a separate folder."""

    def __init__(self, kind: every.File, place: Path, violations: list[str]) -> None:
        self.kind, self.place, self.violations = kind, place, violations
        self.folder = place / "files"
        self.folder.mkdir()
        every.fill(kind, self.folder)

    def rows(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return a row for each file with counts of damages and verdicts; the last row is of faults during writes."""
        good = every.contents(self.folder)
        every.is_control(self.kind, self.folder)
        counts: dict[str, Counter[str]] = {}
        for name, content in good.items():
            row = counts.setdefault(re.sub(r"[0-9a-f]{16,}|\d{6,}", "\\*", name), Counter())
            for sort, why, damaged in every.damages(self.kind, name, content, 1):
                row[sort] += 1
                row[self.verdict_of(every.changed(good, name, damaged), f"{name}, {why}")] += 1
        every.put(self.folder, good)
        every.is_control(self.kind, self.folder)
        counts[STEPS] = self.interrupted()
        return [(name, in_columns(row)) for name, row in counts.items()]

    def verdict_of(self, files: dict[str, bytes], why: str) -> str:
        named = Losses.count
        try:
            verdict = every.assert_refused(self.kind, self.folder, files, why)
        except Exception as error:
            self.violations.append(f"{why}: {error!r}")
            return "silent"
        if verdict == "refused":
            return "refused"
        return "unchanged" if Losses.count == named else "named"

    def interrupted(self) -> Counter[str]:
        """Fill the disk, write in another process, or kill the process, at each step of a write; return the counts."""
        kind, folder, place, row = self.kind, self.folder, self.place, Counter[str]()
        steps = every.steps_of(kind, folder, place)
        trials = [("full disks", every.fail_at, number, stays) for number in steps for stays in (False, True)]
        trials += [("double writers", write_twice_at, number) for number in steps]
        trials += [("kills", every.kill_at, number) for number in steps]
        for (sort, what, *arguments), number in zip(trials, itertools.count()):
            row[sort] += 1
            copy = place / str(number)
            try:
                what(kind, folder, copy, *arguments)
                row["unchanged"] += 1
            except Exception as error:
                self.violations.append(f"{sort} {arguments}: {error!r}")
                row["silent"] += 1
            shutil.rmtree(copy)
        return row


def write_twice_at(kind: every.File, folder: Path, place: Path, number: int) -> None:
    """Write in a second process at a step of the first one's write: the second is refused, or the last write stays."""
    shutil.copytree(folder, place)
    steps = itertools.count(1)

    def second() -> None:
        try:
            every.write(kind, place, every.VALUES + 1)
        except StateLocked:
            assert kind.hold is not None
        else:
            assert kind.hold is None

    def at(step: str) -> None:
        if next(steps) == number:
            assert in_child(second) == 0, f"at {step}"

    every.write(kind, place, every.VALUES, at)
    values = kind.read(place)
    assert values == every.VALUES or (kind.hold is None and values == every.VALUES + 1)
    assert not [name for name in every.contents(place) if "draft" in name]


if __name__ == "__main__":
    run_named(globals())
