"""Does compiled code touch memory that is not its own, or compute what C leaves undefined, under hostile input?

memoire is built once more with AddressSanitizer and UndefinedBehaviorSanitizer, and the targets of `tests/fuzz` that
reach its compiled modules run on that build, with every allocation of Python checked too. One report ends it.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

from _kit import CANNOT, ROOT, end, say, table
from fuzz_inputs import row, run

SHARES = {"container": 60_000, "wire_message": 60_000, "dispatcher": 1_000, "snapshot_file": 600, "minari_data": 2_000}
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
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
    rows, violations = [], []
    for name, share in SHARES.items():
        found, why = run(name, max(100, share * given.inputs // 120_000), f"sanitized {given.seed}", **environment)
        if why:
            violations.append(why)
        else:
            rows.append(row(name, found))
    print(f"Seed {given.seed}; {sum(row[1] for row in rows)} inputs, {len(violations)} reports.\n")
    print(table(["target", "inputs", "seconds", "MiB more", "came to"], rows))
    return end(violations)


if __name__ == "__main__":
    sys.exit(main())
