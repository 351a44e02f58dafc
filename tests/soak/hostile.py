"""Hostile inputs: from a seed, led by what the code does, and on a build with sanitizers."""

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
"""Inputs of each target, of a million."""
MAX_GROWTH = 32 << 20
FOLDERS = [str(TESTS), str(TESTS / "support")]


def run(name: str, rounds: int, seed: str, **environment: str) -> tuple[dict, str]:
    """What became of so many inputs of a target; and why it ended, where it did not end well."""
    command = [sys.executable, "-P", "-m", "fuzz.engine", name, "--rounds", str(rounds), "--seed", seed, "--json"]
    path = os.pathsep.join([environment.pop("PYTHONPATH", str(ROOT)), *FOLDERS])
    done = subprocess.run(
        command, cwd=TESTS, env=os.environ | {"PYTHONPATH": path} | environment, capture_output=True, text=True
    )
    if done.returncode:
        return {}, f"{name}: status {done.returncode}: {done.stderr[-6000:]}"
    return json.loads(done.stdout), ""


def row(name: str, found: dict) -> list[object]:
    """Of a table: what the target came to."""
    words = ", ".join(f"{count} {verdict}" for verdict, count in sorted(found["verdicts"].items(), key=lambda e: -e[1]))
    return [name, found["inputs"], f"{found['seconds']:.0f}", f"{found['grown'] / 2**20:.1f}", words]


def try_all(shares: dict[str, int], inputs: int, seed: str, most: float = math.inf, **environment: str) -> int:
    """Try so many inputs, of each target its share; the exit status.

    Args:
        most: Bytes by which a target's process may grow.
    """
    rows, violations = [], []
    for name, share in shares.items():
        found, why = run(name, max(100, share * inputs // sum(shares.values())), seed, **environment)
        if why:
            violations.append(why)
            continue
        rows.append(row(name, found))
        if found["grown"] > most:
            violations.append(f"{name}: memory grew by {found['grown'] >> 20} MiB")
    print(f"Seed {seed}; {sum(row[1] for row in rows)} inputs, {len(violations)} findings.\n")
    print(table(["target", "inputs", "seconds", "MiB more", "came to"], rows))
    return end(violations)


def fuzz_inputs() -> int:
    """One million hostile inputs: does anything come of them but what is promised, and does memory stay flat?

    Every target of `tests/fuzz` is handed damaged inputs, from a seed that is new each day unless `--seed` says otherwise.
    Memory is a target's process' after a tenth of its inputs, and at its end. A finding ends the script and says how to try
    it again.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", default=time.strftime("%Y-%m-%d", time.gmtime()))
    given = parser.parse_args()
    return try_all(SHARES, given.inputs, given.seed, MAX_GROWTH)


TARGETS = (
    "wire_message", "container", "schema_text", "model_body", "table_file", "key_file", "log_line", "http_request",
    "snapshot_file",
)  # fmt: skip
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


def run_of_fuzz_guided(name: str, seconds: float) -> tuple[list[object], str]:
    """A target's row, and what was found."""
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
    """What do hostile inputs come to that are led by what the code does?

    libFuzzer, by way of atheris (`.venv/bin/python -m pip install atheris`), sees which lines of Python each input reaches,
    and goes on from those that reach new ones. Each target that reads bytes has its share of the time. A finding ends it,
    and is left in `build/fuzz`; inputs that reached something new stay there, to begin from the next time.
    """
    parser = argparse.ArgumentParser()
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
        row, found = run_of_fuzz_guided(name, given.seconds / len(TARGETS))
        rows.append(row)
        violations += [found] if found else []
    print(table(["target", "inputs", "places at first", "at the end", "inputs kept"], rows))
    return end(violations)


SANITIZED_SHARES = {
    "container": 60_000, "wire_message": 60_000, "dispatcher": 1_000, "snapshot_file": 600, "minari_data": 2_000,
}  # fmt: skip
"""Inputs of each target, of about 120000."""
BASE = ROOT / "build" / "sanitized"
FLAGS = "-g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"


def library(name: str) -> str:
    """Where the compiler has a sanitizer's runtime; "" where it has none."""
    said = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return said if os.path.isabs(said) and os.path.exists(said) else ""


def build() -> Path:
    """The package, compiled with the sanitizers; built again if a source is newer."""
    lib = BASE / "lib"
    made = list((lib / "memoire").rglob("*.so"))
    sources = [
        ROOT / "setup.py",
        *(path for form in ("*.pyx", "*.pxd", "*.h") for path in (ROOT / "memoire").rglob(form)),
    ]
    if made and min(map(os.path.getmtime, made)) > max(path.stat().st_mtime for path in sources):
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
    reach its compiled modules run on that build, with every allocation of Python checked too. One report ends it.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=120_000)
    parser.add_argument("--seed", default=time.strftime("%Y-%m-%d", time.gmtime()))
    given = parser.parse_args()
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
    return try_all(SANITIZED_SHARES, given.inputs, f"sanitized {given.seed}", **environment)


if __name__ == "__main__":
    run_named(globals())
