"""Where does the time go, of a server that takes caches in, of an actor and a learner that go as fast as they may, of a
learner that is far from its server, of an inference node and who asks it, and of models on their way to workers?

perf looks at what a process runs, two thousand times a second, while the sides of benchmarks/wire.py are at work;
waiting is not counted. It takes Linux's perf, and the right to look: as root, or with kernel.perf_event_paranoid at
most 1.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import transfer
from farlearner import Cell, Cluster
from measure import Child, arguments, cells, head, write_page
from workloads import w1, w2

import inference
import wire

LEAST = 0.02
"""Share of a function that is named."""
MODULES = ("_core", "_bytes", "_container", "_draw", "_multipart")
PARTS = (
    ("the system: copies between sockets and memory, wake-ups", ("[kernel", "[vdso")),
    ("memoire's compiled modules", tuple(f"{name}.abi3" for name in MODULES)),
    ("the C library, mostly copies", ("libc.so", "libm.so", "ld-linux")),
    ("ZeroMQ", ("libzmq", "_zmq.")),
    ("the interpreter, with msgspec and NumPy", ("",)),
)


class Sample(NamedTuple):
    """A line of perf's report."""

    share: float
    thread: str
    library: str
    function: str

    @property
    def part(self) -> str:
        """Where it ran, in words."""
        whose = "ZeroMQ's thread" if self.thread.startswith("ZMQ") else "Python's threads"
        return f"{whose}: {next(name for name, marks in PARTS if any(mark in self.library for mark in marks))}"


def parsed(report: str) -> list[Sample]:
    """The lines of `perf report` with the fields that `profiled` asks for."""
    samples = []
    for line in report.splitlines():
        fields = [field.strip() for field in line.split(";")]
        if len(fields) >= 4 and fields[0].endswith("%"):
            function = fields[3].partition("] ")[2].split()[0]
            samples.append(Sample(float(fields[0][:-1]) / 100, fields[1], fields[2], function))
    return samples


def profiled(pid: int, work: Callable[[], object]) -> list[Sample]:
    """What a process ran while `work` was done."""
    with tempfile.TemporaryDirectory() as folder:
        record = ["perf", "record", "--quiet", "--freq", "2000", "--pid", str(pid), "--output", f"{folder}/data"]
        recording = subprocess.Popen(record, stderr=subprocess.DEVNULL)
        time.sleep(1.0)  # it says nothing when it begins
        work()
        recording.send_signal(signal.SIGINT)
        recording.wait(60)
        fields = ["--no-children", "--stdio", "--fields", "overhead,comm,dso,symbol", "--field-separator", ";"]
        command = ["perf", "report", "--input", f"{folder}/data", *fields]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return parsed(said.stdout)


def tables(what: str, samples: list[Sample]) -> Iterator[str]:
    """A section of the page."""
    parts: Counter[str] = Counter()
    for sample in samples:
        parts[sample.part] += sample.share  # type: ignore[assignment]
    yield f"## {what}\n"
    yield head("where", "share of its time")
    yield from (cells(part, f"{100 * share:.0f} %") for part, share in parts.most_common() if share >= LEAST / 4)
    yield "\n" + head("function", "thread", "share", left=2)
    for sample in sorted(samples, reverse=True):
        if sample.share >= LEAST:
            yield cells(f"`{sample.function}`", sample.thread, f"{100 * sample.share:.0f} %")
    yield ""


def sections(quick: bool) -> Iterator[str]:
    """Everything that is looked at."""
    for workload, count in ((w1(), 8000), (w2(), 200)):
        count //= 20 if quick else 1
        for storage in ("episodes", "caches"):
            ingest = wire.Ingest(workload, storage)
            ingest.take(count // 4)
            what = f"A server that takes in {storage} of {ingest.message_bytes} bytes, {workload.name}"
            yield from tables(what, profiled(os.getpid(), lambda: ingest.take(count)))  # noqa: B023
            ingest.close()
        raw = wire.Raw(ingest.message_bytes)
        raw.take(count // 4)
        what = f"The baseline: a PULL socket that takes in messages of as many bytes, {workload.name}"
        yield from tables(what, profiled(raw.receiver.pid, lambda: raw.take(count)))  # noqa: B023
        raw.close()
        ends = wire.EndToEnd(workload, 1)
        ends.take(count // 4)
        processes = {
            "The learner, with the server in it": os.getpid(),
            "The actor": ends.children[0].pid,
        }
        for who, pid in processes.items():
            yield from tables(f"{who}, end to end, {workload.name}", profiled(pid, lambda: ends.take(count)))  # noqa: B023
        ends.close()
    yield from far_sections(0.5 if quick else 4.0)
    yield from asking_sections(2000 if quick else 16_000)
    yield from model_sections(20 if quick else 200)


def process_sections(who: Iterable[str], processes: Iterable[Child], work: Callable[[], object]) -> Iterator[str]:
    """The first ones of some processes, named by `who`, while this work is done."""
    for what, process in zip(who, processes, strict=False):
        yield from tables(what, profiled(process.pid, work))


def asking_sections(rows: int) -> Iterator[str]:
    """An inference node and one of its clients, as benchmarks/inference.py has them."""
    asking = inference.Asking(inference.node, inference.client, inference.CLIENTS)
    asking.clock(rows // 4)
    who = f"An inference node that {inference.CLIENTS} processes ask for one row each", "One of these processes"
    yield from process_sections(who, [asking.node, *asking.clients], lambda: asking.clock(rows))
    asking.close()


def model_sections(count: int) -> Iterator[str]:
    """A server and one of eight workers, as benchmarks/transfer.py has them."""
    place = transfer.Place(None)
    models = transfer.Models(place)
    models.clock(count // 4)
    who = f"A server that gives models of 1 MB to {transfer.WORKERS} workers", "One of these workers"
    yield from process_sections(who, place.processes, lambda: models.clock(count))
    place.close()


def far_sections(seconds: float) -> Iterator[str]:
    """A learner with the server in its process, then one apart from it, as benchmarks/farlearner.py has them."""
    for name in ("W1", "W2"):
        for near, roles in ((True, ("learner",)), (False, ("server", "reader"))):
            cluster = Cluster(Cell(name, 4), None, near=near)
            cluster.take(0.5)
            where = "with the server in the learner's process" if near else "with the learner far from its server"
            for role in roles:
                pid = cluster.roles[role][0].pid
                what = f"The {role}, 4 actors that record step by step, {where}, {name}"
                yield from tables(what, profiled(pid, lambda: cluster.take(seconds)))  # noqa: B023
            cluster.close()


def main() -> None:
    chosen = arguments(__doc__)
    if shutil.which("perf") is None:
        sys.exit("perf is not installed: nothing was looked at (Debian has it in linux-perf)")
    page = []
    for line in sections(chosen.quick):
        print(line, flush=True)
        page.append(line)
    if chosen.write:
        write_page(chosen.write, "profiles", __doc__, "\n".join(page))


if __name__ == "__main__":
    main()
