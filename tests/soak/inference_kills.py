"""Do seven actors go on when the eighth, which asks the same inference node, is killed or stopped?

Eight processes ask one inference node for actions of their rows. After a while one of them ends: it is killed
(SIGKILL), or stopped (SIGSTOP). `Before` is what the other seven got a second before, `after` what they got from one
second after it on. `Least ratio` is that of the actor that lost most; it has to be 0.9 or more. `Longest` is the
longest time without any answer to any of them. The node must not fail, and every answer must be right.

The control is a node that waits for a request of each of the eight actors before it answers, as SEED RL's does. It has
to stop, or these figures would show nothing.
"""

import argparse
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq
from _kit import TESTS, end, say, table

import memoire

ACTORS = 8
LEAST = 0.9
SETTLE = 1.0
"""Seconds that may pass until the others are as fast again."""
PAUSE = 2.0
"""Seconds without an answer that nobody should see."""


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that prints a line for each answer."""
    command = [sys.executable, str(Path(TESTS) / "support" / program), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


class Answers:
    """What the other seven said: when each answer came to each of them."""

    def __init__(self, children: list[subprocess.Popen[str]]) -> None:
        self.times: dict[int, list[float]] = {}
        """By the descriptor of an actor's output."""
        self.wrong: list[str] = []
        self._ready = selectors.DefaultSelector()
        self._rest: dict[int, str] = defaultdict(str)  # the beginning of a line that is not there yet
        for child in children:
            assert child.stdout is not None
            os.set_blocking(child.stdout.fileno(), False)
            self._ready.register(child.stdout.fileno(), selectors.EVENT_READ)
            self.times[child.stdout.fileno()] = []

    def read(self, seconds: float) -> None:
        """Read for so long."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for key, _ in self._ready.select(left):
                *lines, self._rest[key.fd] = (self._rest[key.fd] + os.read(key.fd, 1 << 16).decode()).split("\n")
                self.times[key.fd] += [time.monotonic()] * len(lines)
                self.wrong += [line for line in lines if line != "answer"]

    @property
    def have_all_begun(self) -> bool:
        """Whether each of the seven got an answer."""
        return all(self.times.values())

    def rates(self, begin: float, finish: float) -> list[float]:
        """Answers a second of each actor."""
        return [sum(begin <= each < finish for each in times) / (finish - begin) for times in self.times.values()]

    def longest(self, begin: float) -> float:
        """Seconds without an answer to any of them."""
        times = sorted(each for times in self.times.values() for each in times if each >= begin)
        return max((b - a for a, b in zip(times, times[1:], strict=False)), default=float("inf"))


@contextmanager
def barrier() -> Iterator[str]:
    """The address of a node that answers when all eight actors have asked."""
    context = zmq.Context()
    router, asked, is_over = context.socket(zmq.ROUTER), [], threading.Event()
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def answer() -> None:
        while not is_over.is_set():
            if router.poll(100):
                asked.append(router.recv_multipart())
            if len(asked) == ACTORS:
                for frames in asked:
                    router.send_multipart(frames)
                asked.clear()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        is_over.set()
        thread.join()
        context.destroy(0)


def measured(
    children: list[subprocess.Popen[str]], number: signal.Signals, seconds: float
) -> tuple[Answers, list, list, float]:
    """What the others got before one of them ended, and after."""
    try:
        answers, deadline = Answers(children[1:]), time.monotonic() + 60.0
        while not answers.have_all_begun and time.monotonic() < deadline:
            answers.read(0.1)
        answers.read(SETTLE + seconds)
        ended = time.monotonic()
        os.kill(children[0].pid, number)
        answers.read(SETTLE + seconds)
        before, after = answers.rates(ended - seconds, ended), answers.rates(ended + SETTLE, time.monotonic())
        return answers, before, after, answers.longest(ended - seconds)
    finally:
        for child in children:
            child.kill()
            child.wait(10)


def row(name: str, before: list[float], after: list[float], longest: float) -> list[object]:
    """One of the table."""
    least = min(b / a for a, b in zip(before, after, strict=True))
    shown = "for good" if not sum(after) else f"{1000 * longest:.0f} ms"
    return [name, f"{sum(before):.0f} /s", f"{sum(after):.0f} /s", f"{least:.2f}", shown]


def trial(name: str, number: signal.Signals, seconds: float, violated: list[str]) -> list[object]:
    """The row of memoire's node."""
    inputs, outputs = {"obs": ("float32", (2,))}, {"value": "float32"}
    with memoire.Inference("tcp://127.0.0.1:0", inputs, outputs, lambda rows: {"value": rows["obs"].sum(1)}) as node:
        children = [start("policy_child.py", "1", node.endpoint) for _ in range(ACTORS)]
        answers, before, after, longest = measured(children, number, seconds)
        stats = node.stats()
    say(f"{name}: {before} /s, then {after} /s; {stats.batches}")
    for number_of, (a, b) in enumerate(zip(before, after, strict=True), start=1):
        if b < LEAST * a:
            violated.append(f"{name}: actor {number_of} got {b:.0f} answers a second after, {a:.0f} before")
    if longest > PAUSE or answers.wrong or stats.failures or stats.faults:
        violated.append(f"{name}: {longest:.2f} s without an answer, wrong {answers.wrong[:3]}, {stats}")
    return row(name, before, after, longest)


def control(name: str, number: signal.Signals, seconds: float, violated: list[str]) -> list[object]:
    """The row of the node that waits for everybody."""
    with barrier() as endpoint:
        _, before, after, longest = measured(
            [start("plain_child.py", endpoint) for _ in range(ACTORS)], number, seconds
        )
    if not min(before) or any(after):
        violated.append(f"{name}: a node that waits for everybody answered {before} /s before, and {after} /s after")
    return row(name, before, after, longest)


def main() -> int:
    """Run all trials and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="before and after")
    seconds = parser.parse_args().seconds
    violated: list[str] = []
    ways = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
    rows = [trial(name, number, seconds, violated) for name, number in ways.items()]
    rows += [control(f"{name}, control", number, min(seconds, 5.0), violated) for name, number in ways.items()]
    print(table(["one of eight is", "before", "after", "least ratio", "longest"], rows))
    return end(violated)


if __name__ == "__main__":
    sys.exit(main())
