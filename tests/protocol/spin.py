"""Command that runs Spin on the models beside this file, and shows that each of their rules is needed.

    python -m protocol.spin

Spin is Debian's package `spin`; it writes a program in C for each model, which goes through all of its states. Gerard J.
Holzmann, The Spin Model Checker, 2003.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
MISSING: Final = "spin is not installed: Debian and Ubuntu have it as the package spin"
DEPTH: Final = 1_000_000
"""Greatest number of steps in one order of events."""


@dataclass(frozen=True)
class Check:
    """One property of a model, and the macros that change the model."""

    model: str
    claim: str
    changes: tuple[str, ...] = ()
    """Macros that bound the faults or leave out a rule."""
    holds: bool = True

    def __str__(self) -> str:
        return " ".join([self.model, self.claim, *self.changes])


CHECKS: Final = (
    Check("drain", "drained", ("LOSSES=1", "KILLS=0")),
    Check("drain", "drained", ("LOSSES=0", "KILLS=1")),
    Check("drain", "moved", ("LOSSES=1", "KILLS=0")),
    Check("drain", "moved", ("LOSSES=0", "KILLS=1")),
    Check("finish", "heard"),
    Check("finish", "over"),
    Check("drain", "drained", ("LOSSES=1", "KILLS=0", "NEVER_AGAIN"), holds=False),
    Check("drain", "moved", ("LOSSES=0", "KILLS=0", "NO_WAIT"), holds=False),
    Check("drain", "moved", ("LOSSES=0", "KILLS=0", "NO_GUESTS"), holds=False),
    Check("finish", "heard", ("NEVER_AGAIN",), holds=False),
    Check("finish", "over", ("NO_WAIT",), holds=False),
)


@dataclass(frozen=True)
class Verdict:
    """Spin's result for one check."""

    errors: int
    states: int
    why: str
    """Spin's description of the first error."""


def check(query: Check, folder: Path) -> Verdict:
    """Search all states of a model, in a folder of its own.

    Raises:
        RuntimeError: Spin or the compiler refused the model, or the search was not complete.
    """
    model = folder / f"{query.model}.pml"
    shutil.copy(HERE / model.name, model)
    _run(folder, "spin", "-a", *(f"-D{change}" for change in query.changes), model.name)
    optimized = "-O2" if query.holds else "-O0"  # a failing search is short; the compiler takes longer
    _run(folder, "cc", optimized, "-w", "-DNFAIR=4", "-DVECTORSZ=2048", "-o", "pan", "pan.c")
    output = _run(folder, "./pan", "-a", "-f", f"-m{DEPTH}", "-N", query.claim)
    errors, states = re.search(r"errors: (\d+)", output), re.search(r"(\d+) states, stored", output)
    if errors is None or states is None or "max search depth too small" in output:
        raise RuntimeError(f"{query}: spin did not go through the whole model:\n{output}")
    why = re.search(r"pan:1: (.*)", output)
    return Verdict(int(errors[1]), int(states[1]), "" if why is None else why[1].partition(" (at")[0])


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> int:
    if shutil.which("spin") is None:
        print(MISSING, file=sys.stderr)
        return 77
    failed, began = 0, time.monotonic()
    for query in CHECKS:
        with tempfile.TemporaryDirectory() as name:
            verdict = check(query, Path(name))
        is_right = query.holds == (not verdict.errors)
        failed += not is_right
        what = "holds" if not verdict.errors else f"does not hold: {verdict.why}"
        print(f"{query}: {what}; {verdict.states:,} states{'' if is_right else '   NOT AS IT SHOULD BE'}", flush=True)
    print(f"{len(CHECKS)} checks in {time.monotonic() - began:.0f} s; {failed} of them not as they should be")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
