"""Runner of this folder's trials, one after the other, which writes docs/development/records/soak.md: `make soak`.

    python tests/soak/_run.py [--write docs/development/records/soak.md] [NAME ...]
    python tests/soak/PROGRAM.py NAME [OPTIONS]

A program has several trials. Each answers one question, the first line of its function's docstring; the page shows the
rest of the docstring below. A trial prints its result as Markdown on standard output, and ends with 0 (every promise
held), 77 (cannot run on this machine, prints why) or another status (a violation). With names only these trials run,
and the page keeps its other sections.
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
"""Seconds after which a script counts as hanging; the longest script works for two hours."""
HEAD = """# Soak

What `make soak` printed: the trials and measurements that are too long for `make test`. Each section is one trial of a program
in `tests/soak/`, which ends with an error when a promise of [guarantees.md](guarantees.md) does not hold.

{machine}
"""
SECTION = re.compile(r"<!-- (\w+) -->\n(.*?)(?=<!-- \w+ -->\n|\Z)", re.DOTALL)


class Trial(NamedTuple):
    """Trial of a program: a function that answers one question."""

    path: Path
    name: str
    words: str
    """Question of the trial, and its explanation."""


def trials(names: list[str]) -> list[Trial]:
    """Return the trials with these names, or all, in order of names."""
    programs = [path for path in HERE.glob("*.py") if not path.name.startswith("_")]
    every = sorted(
        (Trial(path, *entry) for path in programs for entry in names_in(path).items()), key=lambda one: one.name
    )
    there = [each.name for each in every]
    if unknown := set(names) - {*there}:
        sys.exit(f"no trial is called {', '.join(sorted(unknown))}; there are {', '.join(there)}")
    return [each for each in every if not names or each.name in names]


def run(path: Path, *words: str, longest: float = LONGEST) -> tuple[int, str, float]:
    """Run a program; return its exit status, standard output and seconds."""
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
    question, _, more = trial.words.partition("\n")
    verdict = {0: "held", CANNOT: "not run here"}.get(status, f"**VIOLATED** (exit status {status})")
    summary = f"`{trial.path.name} {trial.name}`, {seconds:.0f} s: {verdict}."
    return "\n\n".join(filter(None, [f"## {question}", more.strip(), summary, output]))


def page(former: str, new: dict[str, str]) -> str:
    """Return the page with these new sections, and other sections of the former page, in order of names."""
    there = {each.name for each in trials([])}
    kept = {name: text.strip() for name, text in SECTION.findall(former) if name in there}
    sections = sorted({**kept, **new}.items())
    where = re.sub(r", load [\d.]+", "", machine())  # load of a moment: a section has its own time
    return HEAD.format(machine=where) + "".join(f"\n<!-- {name} -->\n{text}\n" for name, text in sections)


def recorded(written: Path) -> set[str]:
    """Return the names of trials on the page; a trial that cannot run keeps its former result."""
    return {name for name, _ in SECTION.findall(written.read_text(encoding="utf-8"))} if written.exists() else set()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path, help="page to write the results to")
    parser.add_argument("names", nargs="*", metavar="NAME", help="trials to run (default: all)")
    args = parser.parse_args()
    failed = []
    for trial in trials(args.names):
        say(f"{trial.name}:")
        status, output, seconds = run(trial.path, trial.name)
        held = "ok" if status == 0 else f"status {status}"
        print(f"{trial.name}: {held} after {seconds:.0f} s\n{output}\n", flush=True)
        failed += [trial.name] * (status not in (0, CANNOT))
        if args.write and (status != CANNOT or trial.name not in recorded(args.write)):
            former = args.write.read_text(encoding="utf-8") if args.write.exists() else ""
            new = {trial.name: section(trial, status, output, seconds)}
            args.write.write_text(page(former, new), encoding="utf-8")
    if failed:
        say(f"violated: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
