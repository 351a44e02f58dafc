"""Has Spin check the models beside this file, and shows that each of their rules is needed.

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
"""Steps of one order of events at most."""


@dataclass(frozen=True)
class Check:
    """One property of one model, with what is changed in it."""

    model: str
    claim: str
    changes: tuple[str, ...] = ()
    """Macros that are defined: how much may go wrong, or a rule that is left out."""
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
    """What Spin found."""

    errors: int
    states: int
    why: str
    """What it calls the first error."""


def check(asked: Check, folder: Path) -> Verdict:
    """Go through all states of a model, in a folder of its own.

    Raises:
        RuntimeError: Spin or the compiler refused the model, or the search was not complete.
    """
    model = folder / f"{asked.model}.pml"
    shutil.copy(HERE / model.name, model)
    _run(folder, "spin", "-a", *(f"-D{change}" for change in asked.changes), model.name)
    optimized = "-O2" if asked.holds else "-O0"  # an error is soon found: most of the time is the compiler's
    _run(folder, "cc", optimized, "-w", "-DNFAIR=4", "-DVECTORSZ=2048", "-o", "pan", "pan.c")
    said = _run(folder, "./pan", "-a", "-f", f"-m{DEPTH}", "-N", asked.claim)
    errors, states = re.search(r"errors: (\d+)", said), re.search(r"(\d+) states, stored", said)
    if errors is None or states is None or "max search depth too small" in said:
        raise RuntimeError(f"{asked}: spin did not go through the whole model:\n{said}")
    why = re.search(r"pan:1: (.*)", said)
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
    for asked in CHECKS:
        with tempfile.TemporaryDirectory() as name:
            verdict = check(asked, Path(name))
        is_right = asked.holds == (not verdict.errors)
        failed += not is_right
        what = "holds" if not verdict.errors else f"does not hold: {verdict.why}"
        print(f"{asked}: {what}; {verdict.states:,} states{'' if is_right else '   NOT AS IT SHOULD BE'}", flush=True)
    print(f"{len(CHECKS)} checks in {time.monotonic() - began:.0f} s; {failed} of them not as they should be")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
