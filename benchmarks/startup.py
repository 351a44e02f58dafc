"""How long does it take from the start of a Python to the first batch, alone and with an actor in another process?

Each start is a new process: imports, an empty memory, an episode of 1000 W1 steps, a batch of 256. With an actor: a
server in the learner's process, an actor that is started by it, and a batch of what the actor sent over TCP. Each in
its own environment, as installed; files are in memory already, since one start of each comes first.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

from measure import Report, Result, Spread, in_turns
from measure import arguments as flags
from peers import HERE, NAMES, Peer, PeerUnavailable
from peers.tasks import EPISODE

ALONE, CLUSTER = "first batch from nothing", "first batch over TCP, with an actor in another process"


def ours(what: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, HERE / "with_memoire.py", what], check=True)
    return time.perf_counter() - began


def theirs(name: str, make: str, *given: object) -> float:
    began = time.perf_counter()
    peer = Peer(name)
    try:
        peer.side(make, "W1", EPISODE, *given).clock(2 if given else 1)
    finally:
        taken = time.perf_counter() - began
        peer.close()
    return taken


def compare(report: Report, what: str, takes: dict[str, Callable[[], float]], rounds: int) -> None:
    """Rows of seconds: the ratio is how many times as long the other takes. One start of each is not counted."""
    while True:
        try:
            mine, *others = [seconds[1:] for seconds in in_turns(list(takes.values()), rounds + 1)]
            break
        except PeerUnavailable as error:
            report.facts.append(f"Left out: {error}")
            takes = {name: take for name, take in takes.items() if name != NAMES[error.name]}
    for baseline, other in zip(list(takes)[1:], others, strict=True):
        ratio = Spread.of([b / a for a, b in zip(mine, other, strict=True)])
        report.add(Result(what, "s", Spread.of(mine), Spread.of(other), ratio, baseline))


def main() -> None:
    chosen = flags(__doc__, peers=True)
    names, rounds = chosen.peers.split(","), 1 if chosen.quick else 3
    report = Report(__doc__)
    report.heading()
    bare = {"a bare Python that imports NumPy": bare_python}
    asked = {NAMES[name]: partial(theirs, name, "draws") for name in NAMES if name in names}
    compare(report, ALONE, {"memoire": partial(ours, "alone")} | bare | asked, rounds)
    asked = {NAMES[name]: partial(theirs, name, "end_to_end", 1) for name in ("cpprb", "reverb") if name in names}
    compare(report, CLUSTER, {"memoire": partial(ours, "cluster")} | bare | asked, rounds)
    report.finish(chosen.write, "startup")


def bare_python() -> float:
    """The limit."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import numpy"], check=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
