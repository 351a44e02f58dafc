"""Do seven actors go on when the eighth, which asks the same inference node, is killed or stopped?

Eight processes ask one inference node for actions of their rows. After a while one of them ends: it is killed
(SIGKILL), or stopped (SIGSTOP). `Before` is what the other seven got a second before, `after` what they got from one
second after it on; it has to be 0.85 of that or more. `Longest` is the longest time without any answer to any of them.
The node must not fail, and every answer must be right.
"""

import argparse
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from _kit import TESTS, end, say, table

import memoire

ACTORS = 8
LEAST = 0.85
SETTLE = 1.0
"""Seconds that may pass until the others are as fast again."""
PAUSE = 2.0
"""Seconds without an answer that nobody should see."""


def start(endpoint: str) -> subprocess.Popen[str]:
    """A process that prints a line for each answer."""
    child = Path(TESTS) / "support" / "policy_child.py"
    return subprocess.Popen([sys.executable, str(child), "1", endpoint], stdout=subprocess.PIPE, text=True)


class Answers:
    """What the other seven said: when each answer came."""

    def __init__(self, children: list[subprocess.Popen[str]]) -> None:
        self.times: list[float] = []
        self.wrong: list[str] = []
        self._ready = selectors.DefaultSelector()
        self._rest: dict[int, str] = defaultdict(str)  # the beginning of a line that is not there yet
        for child in children:
            assert child.stdout is not None
            os.set_blocking(child.stdout.fileno(), False)
            self._ready.register(child.stdout.fileno(), selectors.EVENT_READ)

    def read(self, seconds: float) -> None:
        """Read for so long."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for key, _ in self._ready.select(left):
                *lines, self._rest[key.fd] = (self._rest[key.fd] + os.read(key.fd, 1 << 16).decode()).split("\n")
                self.times += [time.monotonic()] * len(lines)
                self.wrong += [line for line in lines if line != "answer"]

    def rate(self, begin: float, finish: float) -> float:
        """Answers a second."""
        return sum(begin <= each < finish for each in self.times) / (finish - begin)

    def longest(self, begin: float) -> float:
        """Seconds without an answer."""
        times = [each for each in self.times if each >= begin]
        return max((b - a for a, b in zip(times, times[1:], strict=False)), default=float("inf"))


def trial(name: str, number: signal.Signals, seconds: float, violated: list[str]) -> list[object]:
    """One row of the table."""
    inputs, outputs = {"obs": ("float32", (2,))}, {"value": "float32"}
    with memoire.Inference("tcp://127.0.0.1:0", inputs, outputs, lambda rows: {"value": rows["obs"].sum(1)}) as node:
        children = [start(node.endpoint) for _ in range(ACTORS)]
        try:
            answers = Answers(children[1:])
            deadline = time.monotonic() + 60.0
            while node.stats().clients < ACTORS and time.monotonic() < deadline:
                answers.read(0.1)
            answers.read(seconds)
            ended = time.monotonic()
            os.kill(children[0].pid, number)
            answers.read(SETTLE + seconds)
            finish = time.monotonic()
            before, after = answers.rate(ended - seconds, ended), answers.rate(ended + SETTLE, finish)
            longest, stats = answers.longest(ended - seconds), node.stats()
        finally:
            for child in children:
                child.kill()
                child.wait(10)
    say(f"{name}: {before:.0f}/s, then {after:.0f}/s; {stats.batches}")
    if after < LEAST * before:
        violated.append(f"{name}: {after:.0f} answers a second after, {before:.0f} before")
    if longest > PAUSE or answers.wrong or stats.failures or stats.faults:
        violated.append(f"{name}: {longest:.2f} s without an answer, wrong {answers.wrong[:3]}, {stats}")
    return [name, f"{before:.0f} /s", f"{after:.0f} /s", f"{after / before:.2f}", f"{1000 * longest:.0f} ms"]


def main() -> int:
    """Run both trials and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="before and after")
    seconds = parser.parse_args().seconds
    violated: list[str] = []
    ways = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
    rows = [trial(name, number, seconds, violated) for name, number in ways.items()]
    print(table(["one of eight is", "before", "after", "ratio", "longest"], rows))
    return end(violated)


if __name__ == "__main__":
    sys.exit(main())
