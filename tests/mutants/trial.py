"""Copy of the checkout with at most one mistake, and verdicts of its tests."""

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
"""Test file that has to pass in a copy without any mistake."""
LOOKING = "tests/structure/test_signatures.py"
"""Test file that inspects functions without calling them."""
NOT_OURS = ("CI", "PYTHONPATH", "MEMOIRE_CHECKED", "PYTHONDONTWRITEBYTECODE")
MARKS = "not browser and not chart and not kubernetes"
QUICK = " and not processes"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def copy_checkout(folder: Path) -> None:
    """Copy the files of the checkout that git knows or would add into an emptied folder."""
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
    """Records of tests: their times, and the functions and mistakes that they reach."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each test that passed."""
    functions: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Tests that enter a function, `file|name`; `file|` stands for all functions of the file."""
    kernels: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Tests that reach a mistake in the kernels, by its number."""

    @classmethod
    def read(cls, folder: Path) -> "Recording":
        recording, lines = cls(), []
        for path in folder.glob("*.jsonl"):
            lines += [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        recording.seconds = {line["test"]: line["seconds"] for line in lines if line.get("outcome") == "passed"}
        for line in lines:
            test = line["test"]
            if test in recording.seconds:
                for function in line["functions"]:
                    recording.functions[function].add(test)
                    recording.functions[function.partition("|")[0] + "|"].add(test)
                for number in line["kernels"]:
                    recording.kernels[number].add(test)
        return recording

    def nearest(self, file: str, tests: set[str], first: set[str]) -> list[str]:
        """Return tests in the order of trials: `first`, then quick ones; the file's own test file counts as quicker."""
        own = f"/test_{Path(file).stem}"

        def rank(test: str) -> tuple[bool, float]:
            return test not in first, (self.seconds[test] + 0.01) * (0.1 if own in test else 1.0)

        return sorted(tests, key=rank)


@dataclass(frozen=True)
class Verdict:
    found: bool
    by: str
    """The test that failed, or how its process ended; empty if none did."""
    is_late: bool = False
    """True if the test failed because it took too long, which may be the machine's fault."""


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
        """Replace a file, each time with another time of change, so that its compiled file is not reused."""
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
        """Run pytest; return (exit status, output), with None for a run that did not end in time."""
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
        """Run these tests until one fails; a test that takes 20 s plus ten times `longest` counts as a hang."""
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
