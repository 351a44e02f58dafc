"""Does a server take in caches over TCP as fast as plain ZeroMQ moves as many bytes between two processes?"""

import tempfile
import time
from collections.abc import Iterable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import zmq
from measure import TCP, Child, Embedded, Report, Result, close, contest, in_turns, results, tell
from peers.tasks import BATCH, EPISODE, distinct, from_the_first
from workloads import Workload, w1, w2

import memoire
from memoire.net import process, sockets
from memoire.replay.memory import Memory
from memoire.wire import _bytes, containers
from memoire.wire import messages as wire
from memoire.wire.frames import encode, name_hash

W1_BYTES = 152_256
"""Of a cache of W1: frames hardly ever cross twice."""
HELD_BYTES = 256 << 20
"""Bytes of caches that a server holds before it overwrites the oldest."""
UNDRAWN_BYTES = 2 << 30
"""Room for all that one turn pushes: a cache that is overwritten would be waited for in vain."""
DISTINCT_BYTES = 256 << 20
"""Bytes that a sender cycles through: more than the processor's caches hold."""
FACTS = """W1 and W2 are those of benchmarks/workloads.py, in caches of 256 samples. The baseline moves messages of as
many bytes, cycles through as many distinct ones, and looks at none; its high-water marks are those of memoire's sockets
for such caches. It takes its memory as the C library gives it, where memoire has it keep some
([sockets.md](../sockets.md)); a row shows one that does the same. *Ingest* is the way into a server that checks and
holds everything and that nobody draws from. *End to end* is everything: actors draw caches from their memories, build
and push them, and a learner draws a batch for each. For W2 the bytes of the samples in these batches count, and the
baseline moves messages of just these bytes: overlapping stacks cross the wire once."""


def raw_sender(pipe: Connection, endpoint: str, size: int) -> None:
    """PUSH distinct messages of `size` bytes, without copying them."""
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
    """PULL as many messages as it is told, and look at none; says how long that took, and the process's own seconds.

    Args:
        keeps: Tell the C library what memoire tells it (docs/sockets.md).
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
    """Plain ZeroMQ in processes of its own: a PULL socket that takes messages and looks at none."""

    def __init__(self, size: int, most: int, senders: int = 1, endpoint: str = TCP, *, keeps: bool = False) -> None:
        self.most = most
        self.receiver = Child(raw_receiver, endpoint, size, keeps)
        self.senders = [Child(raw_sender, self.receiver.first_answer, size) for _ in range(senders)]
        self.spent = 0.0
        """CPU seconds of the process that received, in the last turn."""

    def clock(self, count: int) -> float:
        self.receiver.tell(count)
        tell(self.senders, count // len(self.senders))
        seconds, self.spent = self.receiver.answer()
        return float(seconds)

    def close(self) -> None:
        close(*self.senders, self.receiver)


def episode(workload: Workload, rank: int) -> np.ndarray:
    """The container of an episode."""
    columns = dict(zip(workload.schema.entry_names, workload.episode(np.random.default_rng(rank)), strict=True))

    def fill_column(name: str, target: np.ndarray) -> None:
        target[:] = columns[name].reshape(-1).view(np.uint8)

    facts = np.ones(EPISODE, np.float32), np.zeros(EPISODE, np.float32), np.zeros(EPISODE, np.int64)
    return containers.pack_episode(workload.schema, fill_column, *facts, now=time.time())


def sender(pipe: Connection, endpoint: str, workload: Workload, storage: str) -> None:
    """PUSH messages that were made beforehand, each with a number of its own: only the way into the server is timed."""
    memory = Memory(workload.schema, workload.ring, workload.parameters, seed=0)
    workload.fill(memory, 0)

    def make(seed: int) -> np.ndarray:
        return episode(workload, seed) if storage == "episodes" else containers.build(memory, BATCH, now=time.time())

    first = make(0)
    copies = max(2, DISTINCT_BYTES // first.nbytes)
    payloads = [first, *map(make, range(1, copies))]
    message_of: Any = wire.Episode if storage == "episodes" else wire.Cache
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
    """A server that takes caches in, or episodes: parses, checks, sums up, holds them; there are no draws."""

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
        begin, spent, told = self.server.total_caches, time.process_time(), time.perf_counter()
        self.sender.tell(count)
        while (came := self.server.total_caches) == begin:
            time.sleep(0.0001)
        began, end = time.perf_counter(), begin + count
        while self.server.total_caches < end:
            time.sleep(0.005)
        seconds, self.spent = time.perf_counter() - began, time.process_time() - spent
        left = end - came  # none where so few were asked for that the first look sees all of them
        return seconds * count / left if left else began - told

    def close(self) -> None:
        close(self.sender, self.server)


def actor(pipe: Connection, endpoint: str, workload: Workload, rank: int) -> None:
    """A client that draws caches from its memory and pushes them, as fast as it may."""
    with memoire.connect(endpoint, seed=rank, capacity=workload.ring, on_full="block", timeout=30) as client:
        workload.fill(client.memory, rank)
        client.update(timeout=30)
        pipe.send("ready")
        while (count := pipe.recv()) is not None:
            for _ in range(count):
                while not client.push_cache(timeout=10):
                    pass


def ingest(workload: Workload, count: int, rounds: int) -> Iterable[Result]:
    """Into a server over TCP, and what the receiving process spends on that: all of its threads, and the system."""
    name, ours = workload.name, Ingest(workload, count)
    size = ours.message_bytes
    for baseline, keeps in (("PULL socket, 1 sender", False), (KEEPS, True)):
        theirs = Raw(size, count, keeps=keeps)
        aims = {} if keeps else {baseline: f"ingest-{name}-raw"}
        what, settings = f"ingest of {size} byte caches, {name}", {"per_call": size, "unit": "B/s", "aims": aims}
        yield from contest(what, ours, {baseline: theirs}, rounds=rounds, **settings)
        if name == "W1":
            what = "CPU seconds of a server per million samples, W1 (the ratio is to be small)"
            spent = in_turns([partial(spend, ours), partial(spend, theirs)], rounds)
            yield from results(what, spent, [baseline], " s", {} if keeps else {baseline: "server-cpu-raw"})
        theirs.close()
    ours.close()


def spend(side: Ingest | Raw) -> float:
    """CPU seconds for a million samples."""
    side.clock(side.most)
    return side.spent / (side.most * BATCH) * 1e6


def ingest_over_ipc(workload: Workload, count: int, rounds: int) -> Iterable[Result]:
    """Through a Unix socket, as from the other containers of a Pod."""
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
    """A row of bytes a second."""
    settings = {"per_call": ours.message_bytes, "unit": "B/s", "aims": {baseline: aim}}
    found = contest(what, ours, {baseline: theirs}, rounds=rounds, **settings)
    close(ours, theirs)
    return found


def batch_bytes(workload: Workload) -> int:
    """Bytes of a batch's samples: both stacks of states, and the other columns."""
    stacks = 2 * workload.parameters.frame_stack
    return BATCH * sum(column.nbytes * (stacks if column.role == "state" else 1) for column in workload.schema.values())


def end_to_end(workload: Workload, count: int, rounds: int) -> Iterable[Result]:
    """Actors draw and push caches, a learner draws batches of as many samples; all that happens in between counts."""
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
