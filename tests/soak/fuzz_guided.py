"""What do hostile inputs come to that are led by what the code does?

libFuzzer, by way of atheris (`.venv/bin/python -m pip install atheris`), sees which lines of Python each input reaches,
and goes on from those that reach new ones. Each target that reads bytes has its share of the time. A finding ends it,
and is left in `build/fuzz`; inputs that reached something new stay there, to begin from the next time.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys

from _kit import CANNOT, ROOT, TESTS, end, table

TARGETS = (
    "wire_message",
    "container",
    "schema_text",
    "model_body",
    "table_file",
    "key_file",
    "log_line",
    "http_request",
    "snapshot_file",
)
FOLDER = ROOT / "build" / "fuzz"


def guide(name: str, arguments: list[str]) -> None:
    """In a process of its own: never returns."""
    import atheris

    with atheris.instrument_imports(include=["memoire"]):
        from fuzz import engine

        target = engine.load(name)

    def one(data: bytes) -> None:
        engine.attempt(name, target.one, data)

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def run(name: str, seconds: float) -> tuple[list[object], str]:
    """A target's row, and what was found."""
    corpus, seeds = FOLDER / name / "corpus", FOLDER / name / "seeds"
    for folder in (corpus, seeds):
        folder.mkdir(parents=True, exist_ok=True)
    code = f"from fuzz import engine\nfor i, data in enumerate([*engine.load({name!r}).seeds(), *engine.corpus({name!r})]):\n"
    code += f"    open({str(seeds)!r} + f'/{{i}}', 'wb').write(data)"
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS), os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | path)
    command = [sys.executable, __file__, "--guide", name, str(corpus), str(seeds), f"-max_total_time={seconds:.0f}"]
    command += ["-max_len=20000", f"-artifact_prefix={FOLDER / name}/", "-timeout=60", "-rss_limit_mb=4096"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | path)
    inputs = re.findall(r"Done (\d+) runs", done.stderr)
    reached = re.findall(r"cov: (\d+) ft: (\d+)", done.stderr) or [("0", "0")]
    first = [name, int(inputs[-1]) if inputs else 0, reached[0][0], reached[-1][0], len(list(corpus.iterdir()))]
    return first, "" if done.returncode == 0 else f"{name}: status {done.returncode}: {done.stderr[-4000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=240.0, help="of all targets together")
    parser.add_argument("--guide", nargs=argparse.REMAINDER, help="be the process of a target")
    given = parser.parse_args()
    if given.guide:
        guide(given.guide[0], given.guide[1:])
    if importlib.util.find_spec("atheris") is None:
        print("This takes atheris: .venv/bin/python -m pip install atheris")
        return CANNOT
    rows, violations = [], []
    for name in TARGETS:
        row, found = run(name, given.seconds / len(TARGETS))
        rows.append(row)
        violations += [found] if found else []
    print(table(["target", "inputs", "places at first", "at the end", "inputs kept"], rows))
    return end(violations)


if __name__ == "__main__":
    sys.exit(main())
