"""Runs the scripts of this folder one after the other and writes docs/soak.md: `make soak`.

    python tests/soak/_run.py [--write docs/soak.md] [NAME ...]

A script answers one question, the first line of its docstring; the rest of the docstring stands under it. It prints its
result in Markdown on standard output, and ends with 0 (every promise held), 77 (cannot run here, says why) or anything
else (something was violated). With names only those run, and the others' sections of the page stay as they are.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from _kit import CANNOT, ROOT, say

sys.path.append(str(ROOT / "benchmarks"))
from measure import machine  # noqa: E402

HERE = Path(__file__).resolve().parent
LONGEST = 14_400.0
"""Seconds after which a script is taken to hang; the longest one works for two hours."""
HEAD = """# Soak

What `make soak` printed: the trials and measurements that are too long for `make test`. Each section is one script in
`tests/soak/`, which ends with an error when a promise of [guarantees.md](guarantees.md) does not hold.

{machine}
"""
SECTION = re.compile(r"<!-- (\w+) -->\n(.*?)(?=<!-- \w+ -->\n|\Z)", re.DOTALL)


def scripts(names: list[str]) -> list[Path]:
    """Those with these names, or all."""
    found = sorted(path for path in HERE.glob("*.py") if not path.name.startswith("_"))
    unknown = set(names) - {path.stem for path in found}
    if unknown:
        sys.exit(
            f"no script is called {', '.join(sorted(unknown))}; there are {', '.join(path.stem for path in found)}"
        )
    return [path for path in found if not names or path.stem in names]


def run(path: Path, longest: float = LONGEST) -> tuple[int, str, float]:
    """Exit status, standard output, seconds."""
    began = time.monotonic()
    command = [sys.executable, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            output, _ = process.communicate(timeout=longest)
        except BaseException as error:
            os.killpg(process.pid, 9)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return -9, f"Did not end within {longest:g} s.", longest
    return process.returncode, output.strip(), time.monotonic() - began


def section(path: Path, status: int, output: str, seconds: float) -> str:
    """A script's part of the page."""
    question, _, more = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or path.stem).partition("\n")
    verdict = {0: "held", CANNOT: "not run here"}.get(status, f"**VIOLATED** (exit status {status})")
    return "\n\n".join(
        filter(None, [f"## {question}", more.strip(), f"`{path.stem}.py`, {seconds:.0f} s: {verdict}.", output])
    )


def page(former: str, made: dict[str, str]) -> str:
    """The page with the sections that were made, and those of the former page that were not, in order of names."""
    there = {path.stem for path in scripts([])}
    kept = {name: text.strip() for name, text in SECTION.findall(former) if name in there}
    sections = sorted({**kept, **made}.items())
    where = re.sub(r", load [\d.]+", "", machine())  # of one moment: sections are made at different ones
    return HEAD.format(machine=where) + "".join(f"\n<!-- {name} -->\n{text}\n" for name, text in sections)


def recorded(written: Path) -> set[str]:
    """The scripts whose results are on the page: one that cannot run here takes none of them away."""
    return {name for name, _ in SECTION.findall(written.read_text(encoding="utf-8"))} if written.exists() else set()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", type=Path, help="page to write the results to")
    parser.add_argument("names", nargs="*", metavar="NAME", help="scripts to run, without .py (default: all)")
    given = parser.parse_args()
    failed = []
    for path in scripts(given.names):
        say(f"{path.stem}:")
        status, output, seconds = run(path)
        print(
            f"{path.stem}: {'ok' if status == 0 else f'status {status}'} after {seconds:.0f} s\n{output}\n", flush=True
        )
        failed += [path.stem] * (status not in (0, CANNOT))
        if given.write and (status != CANNOT or path.stem not in recorded(given.write)):
            former = given.write.read_text(encoding="utf-8") if given.write.exists() else ""
            made = {path.stem: section(path, status, output, seconds)}
            given.write.write_text(page(former, made), encoding="utf-8")
    if failed:
        say(f"violated: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
