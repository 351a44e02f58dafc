"""Rate of caches into a server over TCP, beside plain ZeroMQ that moves as many bytes between two processes."""

import tempfile
import time
from collections.abc import Iterable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq
from measure import TCP, Child, Embedded, Report, Result, close, contest, measure_rounds, results, tell
from peers.tasks import BATCH, EPISODE, distinct, from_the_first
from workloads import Workload, w1, w2

import memoire
from memoire.net import process, sockets
from memoire.replay.memory import Memory
from memoire.wire import _bytes, containers
from memoire.wire import messages as wire
from memoire.wire.frames import encode, name_hash

W1_BYTES = 152_256
"""Bytes of a cache of W1, in which hardly any frame belongs to two samples."""
HELD_BYTES = 256 << 20
"""Bytes of caches that a server holds before it overwrites the oldest."""
UNDRAWN_BYTES = 2 << 30
"""Byte limit of a server that fits all caches of a turn: an overwritten cache would never be drawn."""
DISTINCT_BYTES = 256 << 20
"""Bytes of the messages through which a sender cycles: more than the processor's caches hold."""
FACTS = """W1 and W2 are those of benchmarks/workloads.py, in caches of 256 samples. The baseline moves messages of as
many bytes, cycles through as many distinct ones, and reads none; its high-water marks are those of memoire's sockets
for such caches. It uses the C library's default allocation, while memoire has the library keep some memory
([wire.md](../wire.md#memory-for-messages)); one row has a baseline that does the same. *Ingest* is the way into a
server that checks and holds all caches, without draws. *End to end* is everything: actors draw caches from their
memories, build and push them, and a learner draws a batch for each. For W2 the bytes of the samples in these batches
count, and the baseline moves messages of just these bytes: overlapping stacks cross the wire once."""


def raw_sender(pipe: Connection, endpoint: str, size: int) -> None:
    """Run a PUSH socket, which sends distinct messages of `size` bytes without copying them."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.set(zmq.SNDHWM, sockets.data_mark(size))
        push.connect(endpoint)
        random = np.random.default_rng(0)
        messages = [distinct(random, (size,), "uint8") for _ in range(max(2, DISTINCT_BYTES // size))]
        pipe.send("ready")
        while (count := pipe.recv()) is not None:
            for turn in range(count):
                push.send(messages[turn % len(messages)], copy=False)
        push.close(0)


def raw_receiver(pipe: Connection, endpoint: str, size: int, keeps: bool = False) -> None:
    """Run a PULL socket, which receives as many messages as each order says; answer with the seconds and CPU seconds.

    Args:
        keeps: Tune the C library as memoire does (docs/development/wire.md).
    """
    if keeps:
        process.tune()
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        pull.set(zmq.RCVHWM, sockets.data_mark(size))
        pull.bind(endpoint)
        pipe.send(pull.last_endpoint.decode())
        while (count := pipe.recv()) is not None:
            spent = time.process_time()
            seconds = from_the_first(partial(pull.recv, copy=False), count)
            pipe.send((seconds, time.process_time() - spent))


class Raw:
    """Plain ZeroMQ in processes of its own: a PULL socket that receives messages without reading them."""

    def __init__(self, size: int, most: int, senders: int = 1, endpoint: str = TCP, *, keeps: bool = False) -> None:
        self.most = most
        self.receiver = Child(raw_receiver, endpoint, size, keeps)
        self.senders = [Child(raw_sender, self.receiver.first_answer, size) for _ in range(senders)]
        self.spent = 0.0
        """CPU seconds of the receiving process in the last turn."""

    def clock(self, count: int) -> float:
        self.receiver.tell(count)
        tell(self.senders, count // len(self.senders))
        seconds, self.spent = self.receiver.answer()
        return float(seconds)

    def close(self) -> None:
        close(*self.senders, self.receiver)


def episode(workload: Workload, rank: int) -> np.ndarray:
    """Return the container of an episode of the workload, with values by rank."""
    columns = dict(zip(workload.schema.entry_names, workload.episode(np.random.default_rng(rank)), strict=True))

    def fill_column(name: str, target: np.ndarray) -> None:
        target[:] = columns[name].reshape(-1).view(np.uint8)

    facts = np.ones(EPISODE, np.float32), np.zeros(EPISODE, np.float32), np.zeros(EPISODE, np.int64)
    return containers.pack_episode(workload.schema, fill_column, *facts, now=time.time())


def sender(pipe: Connection, endpoint: str, workload: Workload, storage: str) -> None:
    """Run a PUSH socket, which sends numbered caches or episodes; all are built before a turn is timed."""
    memory = Memory(workload.schema, workload.ring, workload.parameters, seed=0)
    workload.fill(memory, 0)

    def make(seed: int) -> np.ndarray:
        return episode(workload, seed) if storage == "episodes" else containers.build(memory, BATCH, now=time.time())

    first = make(0)
    copies = max(2, DISTINCT_BYTES // first.nbytes)
    payloads = [first, *map(make, range(1, copies))]
    message_of: Any = wire.EpisodePush if storage == "episodes" else wire.Cache
    checksums = [_bytes.checksum(payload) for payload in payloads]
    facts: dict[str, Any] = {
        "client": b"bench sender 000", "run": name_hash("default"), "home": name_hash("bench"),
        "fingerprint": workload.schema.fingerprint,
    }  # fmt: skip
    sequence = pushed = 0
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.set(zmq.SNDHWM, sockets.data_mark(first.nbytes))
        push.connect(endpoint)
        pipe.send(first.nbytes)
        while (count := pipe.recv()) is not None:
            messages = []
            for turn in range(count):
                payload, known = payloads[turn % copies], checksums[turn % copies]
                sequence += 1
                pushed += payload.nbytes
                body = message_of(number=sequence, pushed_bytes=pushed)
                messages.append(encode(body, sequence=sequence, payload=payload, payload_checksum=known, **facts))
            for message in messages:
                push.send_multipart(message, copy=False)
        push.close(0)


class Ingest:
    """Side with a server that receives caches or episodes: it parses, checks, sums up and holds them, without draws."""

    def __init__(self, workload: Workload, most: int, storage: str = "caches", endpoint: str = TCP) -> None:
        self.most = most
        self.server = memoire.Server(
            endpoint, workload.schema, parameters=workload.parameters, byte_limit=HELD_BYTES, storage=storage,
            name="bench",
        )  # fmt: skip
        self.sender = Child(sender, self.server.push_endpoint, workload, storage)
        self.message_bytes = int(self.sender.first_answer)
        self.spent = 0.0
        """CPU seconds of this process in the last turn."""

    def clock(self, count: int) -> float:
        begin, spent, start = self.server.total_caches, time.process_time(), time.perf_counter()
        self.sender.tell(count)
        while (came := self.server.total_caches) == begin:
            time.sleep(0.0001)
        began, end = time.perf_counter(), begin + count
        while self.server.total_caches < end:
            time.sleep(0.005)
        seconds, self.spent = time.perf_counter() - began, time.process_time() - spent
        remaining = end - came  # 0 if all of a small count had arrived at the first look
        return seconds * count / remaining if remaining else began - start

    def close(self) -> None:
        close(self.sender, self.server)


def actor(pipe: Connection, endpoint: str, workload: Workload, rank: int) -> None:
    """Run a client, which draws as many caches from its memory as each order says, and pushes them."""
    with memoire.connect(endpoint, seed=rank, capacity=workload.ring, on_full="block", timeout=30) as client:
        workload.fill(client.memory, rank)
        client.update(timeout=30)
        pipe.send("ready")
        while (count := pipe.recv()) is not None:
            for _ in range(count):
                while not client.push_cache(timeout=10):
                    pass


def ingest(workload: Workload, count: int, rounds: int) -> Iterable[Result]:
    """Yield the rows of ingest over TCP, and of the CPU time of all threads of the receiving process."""
    name, ours = workload.name, Ingest(workload, count)
    size = ours.message_bytes
    for baseline, keeps in (("PULL socket, 1 sender", False), (KEEPS, True)):
        theirs = Raw(size, count, keeps=keeps)
        aims = {} if keeps else {baseline: f"ingest-{name}-raw"}
        what, settings = f"ingest of {size} byte caches, {name}", {"per_call": size, "unit": "B/s", "aims": aims}
        yield from contest(what, ours, {baseline: theirs}, rounds=rounds, **settings)
        if name == "W1":
            what = "CPU seconds of a server per million samples, W1 (the ratio is to be small)"
            spent = measure_rounds([partial(spend, ours), partial(spend, theirs)], rounds)
            yield from results(what, spent, [baseline], " s", {} if keeps else {baseline: "server-cpu-raw"})
        theirs.close()
    ours.close()


def spend(side: Ingest | Raw) -> float:
    """Run a turn; return the CPU seconds for a million samples."""
    side.clock(side.most)
    return side.spent / (side.most * BATCH) * 1e6


def ingest_over_ipc(workload: Workload, count: int, rounds: int) -> Iterable[Result]:
    """Yield the row of ingest through a Unix socket, as from other containers of the same Pod."""
    with tempfile.TemporaryDirectory() as folder:
        ours = Ingest(workload, count // 2, endpoint=f"ipc://{folder}/memoire")
        theirs = Raw(ours.message_bytes, count // 2, endpoint=f"ipc://{folder}/plain")
        what = f"ingest of {ours.message_bytes} byte caches over ipc, {workload.name}"
        yield from beside(what, ours, "PULL socket over ipc, 1 sender", theirs, rounds)


def ingest_of_episodes(workload: Workload, count: int, rounds: int) -> Iterable[Result]:
    ours = Ingest(workload, count // 2, "episodes")
    size, name = ours.message_bytes, workload.name
    what, aim = f"ingest of episodes of {EPISODE} entries, {size} bytes each, {name}", "ingest-episodes-W1-raw"
    return beside(what, ours, "PULL socket, 1 sender", Raw(size, count // 2), rounds, aim if name == "W1" else "")


def beside(what: str, ours: Ingest, baseline: str, theirs: Raw, rounds: int, aim: str = "") -> list[Result]:
    """Return the row of both sides in bytes a second, and close the sides."""
    settings = {"per_call": ours.message_bytes, "unit": "B/s", "aims": {baseline: aim}}
    rows = contest(what, ours, {baseline: theirs}, rounds=rounds, **settings)
    close(ours, theirs)
    return rows


def batch_bytes(workload: Workload) -> int:
    """Return the bytes of a batch's samples: both stacks of states, and the other columns."""
    stacks = 2 * workload.parameters.frame_stack
    return BATCH * sum(column.nbytes * (stacks if column.role == "state" else 1) for column in workload.schema.values())


def end_to_end(workload: Workload, count: int, rounds: int) -> Iterable[Result]:
    """Yield the rows of actors that draw and push caches, and a learner that draws batches of as many samples."""
    is_large, count = workload.name == "W2", max(8, count // 2)
    size = batch_bytes(workload) if is_large else W1_BYTES
    settings = {"per_call": size, "unit": "B/s"} if is_large else {"per_call": BATCH, "unit": " samples/s"}
    for actors in (1, 4):
        parameters = {"parameters": workload.parameters, "byte_limit": UNDRAWN_BYTES, "seed": 0}
        server = memoire.Server(TCP, workload.schema, **parameters)
        ours = Embedded(server, partial(server.get_batch, BATCH, timeout=60), count, actor, actors, workload)
        theirs = {f"PULL socket, {actors} senders, as many bytes": Raw(size, count, actors)}
        aims = dict.fromkeys(theirs, f"end-W2-{actors}-raw" if is_large else "")
        what = f"end to end, {actors} actors, {workload.name}"
        yield from contest(what, ours, theirs, rounds=rounds, aims=aims, **settings)
        close(*theirs.values(), ours)


KEEPS = "PULL socket that keeps the memory of messages, too"


def main() -> None:
    report = Report.begin(__doc__, FACTS)
    rounds, scale = (2, 10) if report.quick else (7, 1)
    for workload, count in ((w1(), 4000 // scale), (w2(), 64 // scale)):
        for measure in (ingest, ingest_over_ipc, ingest_of_episodes, end_to_end):
            if report.wants(f"{measure.__name__.replace('_', ' ')}, {workload.name}"):
                for result in measure(workload, count, rounds):
                    report.add(result)
    report.finish("wire")


if __name__ == "__main__":
    main()
