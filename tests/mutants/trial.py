"""A copy of the checkout with at most one mistake in it, and what its tests say."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from places import ROOT

HERE = Path(__file__).resolve().parent
LEFT_OUT = (
    "tests/tools/test_mutants.py",
    "tests/tools/test_setup.py",
    "tests/tools/test_packages.py",
    "tests/tools/test_benchmarks.py",
)
"""Test files about this tool, and about builds and archives of the whole checkout."""
SOUND = "tests/samples/test_server_client.py"
"""What has to pass in a copy without any mistake."""
LOOKING = "tests/structure/test_signatures.py"
"""A test file that looks at functions and does not call them."""
NOT_OURS = ("CI", "PYTHONPATH", "MEMOIRE_CHECKED", "PYTHONDONTWRITEBYTECODE")
MARKS = "not browser and not chart and not kubernetes"
QUICK = " and not processes"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def copy_checkout(folder: Path) -> None:
    """Files of the checkout that git knows or would take, and the built extension; what is no longer there goes."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    names = [name for name in names if name and os.path.lexists(ROOT / name)]
    shutil.rmtree(folder, ignore_errors=True)
    for name in names:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)


@dataclass
class Recording:
    """Which tests enter which function, how long each takes, and which cannot be relied on."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Of each test that passed."""
    functions: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Tests that enter a function, `file|name`; `file|` are those that enter any of its functions."""
    kernels: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Tests that come by a mistake in the kernels."""

    @classmethod
    def read(cls, folder: Path) -> "Recording":
        made, lines = cls(), []
        for path in folder.glob("*.jsonl"):
            lines += [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        made.seconds = {line["test"]: line["seconds"] for line in lines if line.get("outcome") == "passed"}
        for line in lines:
            test = line["test"]
            if test in made.seconds:
                for function in line["functions"]:
                    made.functions[function].add(test)
                    made.functions[function.partition("|")[0] + "|"].add(test)
                for number in line["kernels"]:
                    made.kernels[number].add(test)
        return made

    def nearest(self, file: str, tests: set[str], first: set[str]) -> list[str]:
        """In the order in which they are tried: quick ones first, and those of the file's own test file before others."""
        own = f"/test_{Path(file).stem}"

        def rank(test: str) -> tuple[bool, float]:
            return test not in first, (self.seconds[test] + 0.01) * (0.1 if own in test else 1.0)

        return sorted(tests, key=rank)


@dataclass(frozen=True)
class Verdict:
    """What tests said of a mistake."""

    found: bool
    by: str
    """The test that failed, or how its process ended; empty if none did."""
    is_late: bool = False
    """Whether it failed because it took too long, which may be the machine's fault."""


def group_killed(process: "subprocess.Popen[str]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


class Tree:
    """A copy of the checkout in which tests are run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written = 0

    def write(self, file: str, source: bytes) -> None:
        """Replace a file. Compiled files are known by time and size of their source: each time is another one."""
        self._written += 1
        target = self.folder / file
        target.write_bytes(source)
        when = time.time() - 1e6 + 2 * self._written
        os.utime(target, (when, when))

    def environment(self, **more: str) -> dict[str, str]:
        paths = [self.folder, HERE, HERE / "child"]
        kept = {key: value for key, value in os.environ.items() if key not in NOT_OURS}
        threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        return {**kept, **threads, "PYTHONPATH": ":".join(map(str, paths)), "MEMOIRE_TREE": str(self.folder), **more}

    def pytest(self, arguments: list[str], limit: float, **environment: str) -> tuple[int | None, str]:
        """(exit status, output); None if it did not end in time."""
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--hypothesis-profile=ci", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        surroundings = self.environment(**environment)
        process = subprocess.Popen(command, cwd=self.folder, env=surroundings, start_new_session=True, **pipes)
        try:
            return_code: int | None = None
            output, _ = process.communicate(timeout=limit)
            return_code = process.returncode
        except subprocess.TimeoutExpired as error:
            output = (error.output or b"").decode(errors="replace") if isinstance(error.output, bytes) else ""
        finally:
            group_killed(process)
        return return_code, output

    def try_tests(self, tests: list[str], expected: float, longest: float = 5.0, **environment: str) -> Verdict:
        """Run these until one fails. One that takes ten times as long as the longest, and 20 s, hangs."""
        listed = self.folder / "build" / "tests.txt"
        listed.parent.mkdir(exist_ok=True)
        listed.write_text("\n".join(tests), encoding="utf-8")
        heavy = [] if any("schema" in test.partition("::")[0] for test in tests) else ["-p", "no:schemathesis"]
        arguments = [*heavy, "-x", "-rfE", "--tb=line", f"--timeout={20 + 10 * longest:.0f}", f"@{listed}"]
        status, output = self.pytest(arguments, 90 + 10 * expected, **environment)
        (self.folder / "build" / "output.txt").write_text(output, encoding="utf-8")
        return verdict_of(status, output)


def verdict_of(status: int | None, output: str) -> Verdict:
    if status == 0:
        return Verdict(False, "")
    if status is None:
        return Verdict(True, "a hang", True)
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - |$)", output, re.MULTILINE)
    if failed:
        return Verdict(True, failed.group(1), "Timeout" in output)
    if status < 0:
        return Verdict(True, f"a crash, {signal.Signals(-status).name}")
    if "Timeout" in output:
        return Verdict(True, "a hang", True)
    if status in (2, 3, 4):
        return Verdict(True, "an error while tests are imported")
    raise RuntimeError(f"pytest ended with {status}:\n{output[-3000:]}")
