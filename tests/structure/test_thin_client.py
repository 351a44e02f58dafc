"""Image of an actor, which needs only numpy, pyzmq and msgspec."""

import subprocess
import sys
import tomllib
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest

import memoire
from netkit import SCHEMA

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(memoire.__file__).resolve().parent


def required() -> list[str]:
    """Return the packages that memoire requires without its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [requirement.split(">=")[0] for requirement in project["dependencies"]]


def link(site: Path, source: Path) -> None:
    if not (site / source.name).exists():
        (site / source.name).symlink_to(source)


@pytest.fixture(scope="module")
def thin_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a Python with memoire and its requirements, as links to installed packages: no network is needed."""
    folder = tmp_path_factory.mktemp("thin")
    venv.create(folder, with_pip=False, symlinks=True)
    site = next((folder / "lib").glob("python3*")) / "site-packages"
    for name in required():
        files = distribution(name).files
        assert files is not None
        for root in sorted({file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}):
            link(site, Path(str(distribution(name).locate_file(root))))
    link(site, PACKAGE)
    return str(folder / "bin" / "python")


def run(python: str, *arguments: str, timeout: float = 100.0) -> str:
    """Run Python without this run's environment: no PYTHONPATH, no user site, no working directory on the path."""
    result = subprocess.run([python, "-I", *arguments], capture_output=True, text=True, timeout=timeout, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_only_three_requirements_are_declared() -> None:
    assert required() == ["numpy", "pyzmq", "msgspec"]


def test_the_library_imports_with_its_requirements(thin_python: str) -> None:
    code = "import memoire, memoire._core; print(memoire.__file__, memoire._core.CHECKED, *memoire.__all__)"
    place, checked, *names = run(thin_python, "-c", code).split()
    assert Path(place).resolve().parent == PACKAGE
    assert checked == str(sys.modules["memoire._core"].CHECKED)
    assert set(memoire.__all__) == set(names)


PUSH_A_CACHE = """
import sys
from importlib.util import find_spec
import numpy as np
import memoire

with memoire.connect(sys.argv[1], seed=1, timeout=100) as client:
    writer = client.writer(num_envs=1, autoreset="disabled")
    for step in range(40):
        obs, following = np.full((1, 4), step, np.float32), np.full((1, 4), step + 1, np.float32)
        ends = np.array([step == 39])
        writer.step(obs, np.array([step], np.int32), np.ones(1), ends, np.array([False]), following, {})
    assert client.push_cache(timeout=100), client.push_reason
    client.update(timeout=100)
foreign = ["gymnasium", "lz4", "rich", "scipy", "hypothesis", "pytest", "Cython", "setuptools", "pip"]
print("pushed; foreign modules:", [name for name in foreign if name in sys.modules or find_spec(name)])
"""


def test_a_client_pushes_a_cache_with_its_requirements(thin_python: str) -> None:
    with memoire.Server("tcp://127.0.0.1:0", SCHEMA, seed=0) as server:
        printed = run(thin_python, "-c", PUSH_A_CACHE, server.endpoint)
        batch = server.get_batch(32, timeout=100.0)
        assert (server.total_episodes, server.total_steps) == (1, 40)
    assert printed.split("\n")[0] == "pushed; foreign modules: []"
    assert (batch.next_obs == batch.obs + 1).all()
