"""Trials of hostile inputs: from a seed, guided by coverage, and on a build with sanitizers."""

import argparse
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from _kit import CANNOT, ROOT, TESTS, end, run_named, say, table

SHARES = {
    "wire_message": 620_000, "container": 200_000, "key_file": 50_000, "log_line": 50_000, "http_request": 15_000,
    "schema_text": 10_000, "model_body": 10_000, "table_file": 10_000, "model_transfer": 6_000, "minari_data": 5_000,
    "dispatcher": 3_000, "prompts": 20_000, "snapshot_file": 1_500, "state_file": 300, "buffer_file": 20_000,
    "settings_file": 200,
}  # fmt: skip
"""Inputs of each target, of about a million."""
MAX_GROWTH = 32 << 20
FOLDERS = [str(TESTS), str(TESTS / "support")]


def run(name: str, rounds: int, seed: str, **environment: str) -> tuple[dict, str]:
    """Try so many inputs of a target; return the figures of the run, and the reason if it failed."""
    command = [sys.executable, "-P", "-m", "fuzz.engine", name, "--rounds", str(rounds), "--seed", seed, "--json"]
    path = os.pathsep.join([environment.pop("PYTHONPATH", str(ROOT)), *FOLDERS])
    done = subprocess.run(
        command, cwd=TESTS, env=os.environ | {"PYTHONPATH": path} | environment, capture_output=True, text=True
    )
    if done.returncode:
        return {}, f"{name}: status {done.returncode}: {done.stderr[-6000:]}"
    return json.loads(done.stdout), ""


def row(name: str, figures: dict) -> list[object]:
    words = ", ".join(
        f"{count} {verdict}" for verdict, count in sorted(figures["verdicts"].items(), key=lambda e: -e[1])
    )
    return [name, figures["inputs"], f"{figures['seconds']:.0f}", f"{figures['grown'] / 2**20:.1f}", words]


def try_all(shares: dict[str, int], inputs: int, seed: str, most: float = math.inf, **environment: str) -> int:
    """Try so many inputs, shared among the targets; return the exit status.

    Args:
        most: Bytes by which a target's process may grow.
    """
    rows, violations = [], []
    for name, share in shares.items():
        figures, why = run(name, max(100, share * inputs // sum(shares.values())), seed, **environment)
        if why:
            violations.append(why)
            continue
        rows.append(row(name, figures))
        if figures["grown"] > most:
            violations.append(f"{name}: memory grew by {figures['grown'] >> 20} MiB")
    print(f"Seed {seed}; {sum(row[1] for row in rows)} inputs, {len(violations)} findings.\n")
    print(table(["target", "inputs", "seconds", "MiB more", "came to"], rows))
    return end(violations)


def fuzz_inputs() -> int:
    """Do a million hostile inputs have only promised results, and does memory stay flat?

    Every target of `tests/fuzz` gets damaged inputs, from a seed that is new each day unless `--seed` sets one. Memory
    is compared in a target's process after a tenth of its inputs and at its end. A finding ends the target's run, and
    the script prints how to try the input again.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", default=time.strftime("%Y-%m-%d", time.gmtime()))
    args = parser.parse_args()
    return try_all(SHARES, args.inputs, args.seed, MAX_GROWTH)


TARGETS = (
    "wire_message", "container", "schema_text", "model_body", "table_file", "key_file", "log_line", "http_request",
    "snapshot_file",
)  # fmt: skip
FOLDER = ROOT / "build" / "fuzz"


def guide(name: str, arguments: list[str]) -> None:
    """Fuzz a target in this process; never returns."""
    import atheris

    with atheris.instrument_imports(include=["memoire"]):
        from fuzz import engine

        target = engine.load(name)

    def one(data: bytes) -> None:
        engine.attempt(name, target.one, data)

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def run_of_fuzz_guided(name: str, seconds: float) -> tuple[list[object], str]:
    """Run a target; return its row of the table and its finding, or ""."""
    corpus, seeds = FOLDER / name / "corpus", FOLDER / name / "seeds"
    for folder in (corpus, seeds):
        folder.mkdir(parents=True, exist_ok=True)
    code = f"from fuzz import engine\nfor i, data in enumerate(engine.load({name!r}).seeds()):\n"
    code += f"    open({str(seeds)!r} + f'/{{i}}', 'wb').write(data)"
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), *FOLDERS, os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | path)
    command = [sys.executable, __file__, "fuzz_guided", "--guide", name, str(corpus), str(seeds)]
    command += [f"-max_total_time={seconds:.0f}", "-max_len=20000", f"-artifact_prefix={FOLDER / name}/"]
    command += ["-timeout=60", "-rss_limit_mb=4096"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | path)
    inputs = re.findall(r"Done (\d+) runs", done.stderr)
    reached = re.findall(r"cov: (\d+) ft: (\d+)", done.stderr) or [("0", "0")]
    first = [name, int(inputs[-1]) if inputs else 0, reached[0][0], reached[-1][0], len(list(corpus.iterdir()))]
    return first, "" if done.returncode == 0 else f"{name}: status {done.returncode}: {done.stderr[-4000:]}"


def fuzz_guided() -> int:
    """Do hostile inputs that coverage of the code guides have only promised results?

    libFuzzer, through atheris (`.venv/bin/python -m pip install atheris`), sees which lines of Python each input
    reaches, and goes on from inputs that reach new lines. Each target that reads bytes has its share of the time. A
    finding ends its target's run and stays in `build/fuzz`, as do inputs that reached new lines, from which the next
    run begins.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=240.0, help="of all targets together")
    parser.add_argument("--guide", nargs=argparse.REMAINDER, help="be the process of a target")
    args = parser.parse_args()
    if args.guide:
        guide(args.guide[0], args.guide[1:])
    if importlib.util.find_spec("atheris") is None:
        print("This takes atheris: .venv/bin/python -m pip install atheris")
        return CANNOT
    rows, violations = [], []
    for name in TARGETS:
        row, finding = run_of_fuzz_guided(name, args.seconds / len(TARGETS))
        rows.append(row)
        violations += [finding] if finding else []
    print(table(["target", "inputs", "places at first", "at the end", "inputs kept"], rows))
    return end(violations)


SANITIZED_SHARES = {
    "container": 60_000, "wire_message": 60_000, "dispatcher": 1_000, "snapshot_file": 600, "minari_data": 2_000,
}  # fmt: skip
"""Inputs of each target, of about 120000."""
BASE = ROOT / "build" / "sanitized"
FLAGS = "-g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"


def library(name: str) -> str:
    """Return the path of a sanitizer's runtime, or "" if the compiler has none."""
    path = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return path if os.path.isabs(path) and os.path.exists(path) else ""


def build() -> Path:
    """Build the package with the sanitizers if a source is newer than the last build; return its folder."""
    lib = BASE / "lib"
    built = list((lib / "memoire").rglob("*.so"))
    sources = [
        ROOT / "setup.py",
        *(path for form in ("*.pyx", "*.pxd", "*.h") for path in (ROOT / "memoire").rglob(form)),
    ]
    if built and min(map(os.path.getmtime, built)) > max(path.stat().st_mtime for path in sources):
        ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.pyx", "*.pxd", "*.h")
        shutil.copytree(ROOT / "memoire", lib / "memoire", ignore=ignored, dirs_exist_ok=True)
        return lib
    say("building memoire under the sanitizers: some minutes")
    flags = {"CC": "gcc", "CFLAGS": FLAGS, "LDFLAGS": "-fsanitize=address,undefined"}
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(BASE), "--build-lib", str(lib), "--force"]
    subprocess.run(command, cwd=ROOT, env=os.environ | flags, check=True, stdout=sys.stderr, stderr=subprocess.DEVNULL)
    return lib


def fuzz_sanitized() -> int:
    """Does compiled code touch memory that is not its own, or compute what C leaves undefined, under hostile input?

    memoire is built once more with AddressSanitizer and UndefinedBehaviorSanitizer, and the targets of `tests/fuzz` that
    reach its compiled modules run on that build, with every allocation of Python checked too. One report ends the run.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=120_000)
    parser.add_argument("--seed", default=time.strftime("%Y-%m-%d", time.gmtime()))
    args = parser.parse_args()
    runtimes = [library(name) for name in ("libasan.so", "libubsan.so")] if shutil.which("gcc") else [""]
    if platform.system() != "Linux" or not all(runtimes):
        print("This takes Linux and gcc with the runtimes of its sanitizers.")
        return CANNOT
    environment = {
        "PYTHONPATH": str(build()),
        "LD_PRELOAD": ":".join(runtimes),
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }
    return try_all(SANITIZED_SHARES, args.inputs, f"sanitized {args.seed}", **environment)


if __name__ == "__main__":
    run_named(globals())
