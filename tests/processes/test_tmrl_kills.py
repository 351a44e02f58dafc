"""kill -9 of a server, workers and a trainer, again and again: every sample arrives at most once, and in order."""

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from history.ports import held
from netkit import until

ROLES = Path(__file__).resolve().parents[1] / "support" / "tmrl_roles.py"
KILLS = 2


class Role:
    """A process that is started again."""

    def __init__(self, role: str, url: str, path: Path, log: Path) -> None:
        self.command = [sys.executable, str(ROLES), role, url, str(path)]
        self.log = log
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            # A memory that is rebuilt would write what it holds again, as if it had come.
            how = {"TMRL_SLEEP_US": "500", "TMRL_RESUME": "weights", "MEMOIRE_TMRL": str(self.log.parent)}
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env={**os.environ, **how})

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20.0)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.kill()


def arrivals(file: Path) -> list[tuple[int, int]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [(int(number), int(made)) for number, made in (line.split() for line in lines)]


@pytest.mark.parametrize("victim", ["server", "worker", "trainer"])
def test_after_kills_samples_go_on_and_none_came_twice(tmp_path: Path, victim: str) -> None:
    with held(3) as port, contextlib.ExitStack() as stack:
        url, file = f"tcp://127.0.0.1:{port}", tmp_path / "samples"
        paths = {"server": tmp_path / "state", "worker": file, "trainer": file}
        roles = {role: Role(role, url, paths[role], tmp_path / f"{role}.log") for role in paths}
        other = Role("worker", url, file, tmp_path / "other.log")
        for each in (*roles.values(), other):
            stack.callback(each.end)
        for _ in range(KILLS):
            before = len(arrivals(file))
            assert until(lambda before=before: len(arrivals(file)) > before + 100, 60.0)
            roles[victim].kill()
            roles[victim].start()
        before = len(arrivals(file))
        assert until(lambda: len(arrivals(file)) > before + 100, 60.0)
        found = arrivals(file)
        assert max(Counter(found).values()) == 1
        newest: dict[int, int] = {}
        for number, made in found:
            assert made > newest.get(number, 0), (number, made, newest)
            newest[number] = made
