"""The README's examples run as they stand, and what it links to is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from history.ports import block

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def script(word: str) -> str:
    """The one example with this in it."""
    (found,) = [block for block in BLOCKS if word in block]
    return str(found)


def start(folder: Path, name: str, code: str) -> subprocess.Popen[str]:
    path = folder / name
    path.write_text(code, encoding="utf-8")
    command = [sys.executable, "-W", "error", str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_the_example_of_one_process_runs(tmp_path: Path) -> None:
    child = start(tmp_path, "single.py", script("memoire.Buffer(") + "\nassert batch.obs.shape == (256, 4)\n")
    output, _ = child.communicate(timeout=100)
    assert child.returncode == 0, output


def test_the_examples_of_a_cluster_run_together(tmp_path: Path) -> None:
    port = str(block(3))
    learner = start(tmp_path, "learner.py", script("# learner.py").replace("5560", port))
    actors = [start(tmp_path, f"actor{n}.py", script("# actor.py").replace("5560", port)) for n in range(2)]
    try:
        for child in (learner, *actors):
            output, _ = child.communicate(timeout=100)
            assert child.returncode == 0, output
            assert child is not learner or re.search(r"[1-9]\d* episodes, [1-9]\d* steps", output), output
    finally:
        for child in (learner, *actors):
            child.kill()
            child.communicate()


@pytest.mark.parametrize("target", re.findall(r"(?:\]\(|`)((?:docs|examples|tests|[A-Z]+\.md)[^)`#: ]*)[)`]", README))
def test_what_is_linked_to_is_there(target: str) -> None:
    assert (ROOT / target).exists()
