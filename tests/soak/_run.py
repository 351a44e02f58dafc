"""Runs the trials of this folder one after the other and writes docs/development/records/soak.md: `make soak`.

    python tests/soak/_run.py [--write docs/development/records/soak.md] [NAME ...]
    python tests/soak/PROGRAM.py NAME [OPTIONS]

A program has several trials. Each answers one question, the first line of its function's docstring; the rest of the
docstring stands under it. It prints its result in Markdown on standard output, and ends with 0 (every promise held), 77
(cannot run here, says why) or anything else (something was violated). With names only those run, and the others' sections
of the page stay as they are.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from _kit import CANNOT, ROOT, names_in, say

sys.path.append(str(ROOT / "benchmarks"))
from measure import machine  # noqa: E402

HERE = Path(__file__).resolve().parent
LONGEST = 14_400.0
"""Seconds after which a script is taken to hang; the longest one works for two hours."""
HEAD = """# Soak

What `make soak` printed: the trials and measurements that are too long for `make test`. Each section is one trial of a program
in `tests/soak/`, which ends with an error when a promise of [guarantees.md](guarantees.md) does not hold.

{machine}
"""
SECTION = re.compile(r"<!-- (\w+) -->\n(.*?)(?=<!-- \w+ -->\n|\Z)", re.DOTALL)


class Trial(NamedTuple):
    """One of a program."""

    path: Path
    name: str
    words: str
    """Its question, and more about it."""


def trials(names: list[str]) -> list[Trial]:
    """Those with these names, or all, in order of names."""
    programs = [path for path in HERE.glob("*.py") if not path.name.startswith("_")]
    found = sorted(
        (Trial(path, *said) for path in programs for said in names_in(path).items()), key=lambda one: one.name
    )
    there = [each.name for each in found]
    if unknown := set(names) - {*there}:
        sys.exit(f"no trial is called {', '.join(sorted(unknown))}; there are {', '.join(there)}")
    return [each for each in found if not names or each.name in names]


def run(path: Path, *words: str, longest: float = LONGEST) -> tuple[int, str, float]:
    """Exit status, standard output, seconds."""
    began = time.monotonic()
    command = [sys.executable, str(path), *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            output, _ = process.communicate(timeout=longest)
        except BaseException as error:
            os.killpg(process.pid, 9)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return -9, f"Did not end within {longest:g} s.", longest
    return process.returncode, output.strip(), time.monotonic() - began


def section(trial: Trial, status: int, output: str, seconds: float) -> str:
    """A trial's part of the page."""
    question, _, more = trial.words.partition("\n")
    verdict = {0: "held", CANNOT: "not run here"}.get(status, f"**VIOLATED** (exit status {status})")
    told = f"`{trial.path.name} {trial.name}`, {seconds:.0f} s: {verdict}."
    return "\n\n".join(filter(None, [f"## {question}", more.strip(), told, output]))


def page(former: str, made: dict[str, str]) -> str:
    """The page with the sections that were made, and those of the former page that were not, in order of names."""
    there = {each.name for each in trials([])}
    kept = {name: text.strip() for name, text in SECTION.findall(former) if name in there}
    sections = sorted({**kept, **made}.items())
    where = re.sub(r", load [\d.]+", "", machine())  # of one moment: sections are made at different ones
    return HEAD.format(machine=where) + "".join(f"\n<!-- {name} -->\n{text}\n" for name, text in sections)


def recorded(written: Path) -> set[str]:
    """The trials whose results are on the page: one that cannot run here takes none of them away."""
    return {name for name, _ in SECTION.findall(written.read_text(encoding="utf-8"))} if written.exists() else set()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path, help="page to write the results to")
    parser.add_argument("names", nargs="*", metavar="NAME", help="trials to run (default: all)")
    given = parser.parse_args()
    failed = []
    for trial in trials(given.names):
        say(f"{trial.name}:")
        status, output, seconds = run(trial.path, trial.name)
        held = "ok" if status == 0 else f"status {status}"
        print(f"{trial.name}: {held} after {seconds:.0f} s\n{output}\n", flush=True)
        failed += [trial.name] * (status not in (0, CANNOT))
        if given.write and (status != CANNOT or trial.name not in recorded(given.write)):
            former = given.write.read_text(encoding="utf-8") if given.write.exists() else ""
            made = {trial.name: section(trial, status, output, seconds)}
            given.write.write_text(page(former, made), encoding="utf-8")
    if failed:
        say(f"violated: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
