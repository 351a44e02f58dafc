"""Does a server take in caches over TCP as fast as plain ZeroMQ moves as many bytes between two processes?"""

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
import zmq
from measure import TCP, Child, Report, Result, arguments, in_turns, results
from peers.tasks import BATCH, EPISODE, distinct
from workloads import Workload, w1, w2

import memoire
from memoire.net import process, sockets
from memoire.replay.memory import Memory
from memoire.security.keys import Keys
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


def raw_receiver(pipe: Connection, endpoint: str, size: int, keeps: bool) -> None:
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
            pull.recv(copy=False)
            began = time.perf_counter()
            for _ in range(count - 1):
                pull.recv(copy=False)
            pipe.send((time.perf_counter() - began, time.process_time() - spent))


class Receiver(Protocol):
    """One side of a comparison: it has senders, which are other processes."""

    spent: float
    """CPU seconds of the process that received, in the last turn."""

    def take(self, count: int) -> float:
        """Seconds from the first message of `count` that came to the last one."""

    def close(self) -> None:
        """End the senders too."""


class Raw:
    """Plain ZeroMQ in processes of its own: a PULL socket that takes messages and looks at none."""

    def __init__(self, size: int, senders: int = 1, endpoint: str = TCP, *, keeps: bool = False) -> None:
        self.receiver = Child(raw_receiver, endpoint, size, keeps)
        self.children = [Child(raw_sender, self.receiver.first_answer, size) for _ in range(senders)]
        self.spent = 0.0

    def take(self, count: int) -> float:
        each = count // len(self.children)
        self.receiver.tell(each * len(self.children))
        for child in self.children:
            child.tell(each)
        seconds, self.spent = self.receiver.answer()
        return float(seconds)

    def close(self) -> None:
        for child in (*self.children, self.receiver):
            child.close()


def episode(workload: Workload, rank: int) -> np.ndarray:
    """The container of an episode."""
    columns = dict(zip(workload.schema.entry_names, workload.episode(np.random.default_rng(rank)), strict=True))

    def fill_column(name: str, target: np.ndarray) -> None:
        target[:] = columns[name].reshape(-1).view(np.uint8)

    facts = np.ones(EPISODE, np.float32), np.zeros(EPISODE, np.float32), np.zeros(EPISODE, np.int64)
    return containers.pack_episode(workload.schema, fill_column, *facts, now=time.time())


def sender(
    pipe: Connection, endpoint: str, workload: Workload, storage: str, rank: int = 0, keys: str | None = None
) -> None:
    """PUSH messages that were made beforehand, each with a number of its own: only the way into the server is timed.

    Args:
        rank: The sender's number.
        keys: A folder of keys, with which ROLE@ENDPOINT is the endpoint of that role.
    """
    memory = Memory(workload.schema, workload.ring, workload.parameters, seed=rank)
    workload.fill(memory, rank)

    def make(seed: int) -> np.ndarray:
        return episode(workload, seed) if storage == "episodes" else containers.build(memory, BATCH, now=time.time())

    first = make(0)
    copies = max(2, DISTINCT_BYTES // first.nbytes)
    payloads = [first, *map(make, range(1, copies))]
    message_of: Any = wire.Episode if storage == "episodes" else wire.Cache
    checksums = [_bytes.checksum(payload) for payload in payloads]
    facts: dict[str, Any] = {
        "client": f"bench sender {rank:03}".encode(), "run": name_hash("default"), "home": name_hash("bench"),
        "fingerprint": workload.schema.fingerprint,
    }  # fmt: skip
    sequence = pushed = 0
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.set(zmq.SNDHWM, sockets.data_mark(first.nbytes))
        role, _, endpoint = endpoint.rpartition("@")
        if keys is not None:
            own = Keys(keys, "actor")
            public = {key.role: key.public for key in own.servers}[role]
            sockets.use_keys(push, own.own.public, own.own.secret or b"", public)
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


def proxy(pipe: Connection, server: str, keys: str | None) -> None:
    """A proxy in a process of its own."""
    with memoire.Proxy(TCP, [server], keys=keys) as relay:
        while not relay.servers:
            time.sleep(0.01)
        pipe.send(relay.push_endpoint)
        while pipe.recv() is not None:
            pass


class Ingest:
    """A server that takes caches in, or episodes: parses, checks, sums up, holds them; there are no draws.

    Args:
        senders, proxies: How many there are; senders push to the proxies in turn.
        threads: ZeroMQ's, of a context that the server is given; 0: it has its own.
        keys: A folder of keys for all of them.
    """

    def __init__(
        self, workload: Workload, storage: str = "caches", endpoint: str = TCP, *, senders: int = 1, proxies: int = 0,
        threads: int = 0, keys: str | None = None,
    ) -> None:  # fmt: skip
        self.context = zmq.Context(threads) if threads else None
        self.server = memoire.Server(
            endpoint, workload.schema, parameters=workload.parameters, byte_limit=HELD_BYTES, storage=storage,
            process=memoire.Process(context=self.context) if threads else None, name="bench", keys=keys,
        )  # fmt: skip
        relays = [Child(proxy, self.server.endpoint, keys) for _ in range(proxies)]
        fronts = [f"proxy@{child.first_answer}" for child in relays] or [f"server@{self.server.push_endpoint}"]
        self.senders = [
            Child(sender, fronts[rank % len(fronts)], workload, storage, rank, keys) for rank in range(senders)
        ]
        self.children, self.lost = [*self.senders, *relays], 2 * bool(proxies)
        self.message_bytes = int(self.senders[0].first_answer)
        self.spent = 0.0

    def take(self, count: int) -> float:
        begin, spent, each = self.server.total_caches, time.process_time(), count // len(self.senders)
        told = time.perf_counter()
        for child in self.senders:
            child.tell(each)
        while (came := self.server.total_caches) == begin:
            time.sleep(0.0001)
        began, end = time.perf_counter(), begin + each * len(self.senders)
        while self.server.total_caches < end - self.lost:  # a proxy may lose the oldest, should its queue be full
            time.sleep(0.005)
        seconds, self.spent = time.perf_counter() - began, time.process_time() - spent
        left = end - came  # none where so few were asked for that the first look sees all of them
        return seconds * (count - 1) / left if left else began - told

    def close(self) -> None:
        for child in self.children:
            child.close()
        self.server.close()
        if self.context is not None:
            self.context.term()


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


class EndToEnd:
    """Actors draw and push caches, a learner draws batches of as many samples; all that happens in between counts."""

    def __init__(self, workload: Workload, actors: int) -> None:
        self.server = memoire.Server(
            TCP, workload.schema, parameters=workload.parameters, byte_limit=UNDRAWN_BYTES, seed=0
        )
        self.children = [Child(actor, self.server.endpoint, workload, rank) for rank in range(actors)]
        self.spent = 0.0

    def take(self, count: int) -> float:
        each, spent = count // len(self.children), time.process_time()
        for child in self.children:
            child.tell(each)
        self.server.get_batch(BATCH, timeout=60)
        began = time.perf_counter()
        for _ in range(each * len(self.children) - 1):
            self.server.get_batch(BATCH, timeout=60)
        seconds, self.spent = time.perf_counter() - began, time.process_time() - spent
        return seconds

    def close(self) -> None:
        for child in self.children:
            child.close()
        self.server.close()


def compare(
    what: str, ours: Receiver, theirs: Receiver, *, count: int, rounds: int, per_message: float, **settings: Any
) -> Result:
    """Let both sides take turns; one turn of each that is not counted comes first."""

    def rate(side: Receiver) -> float:
        return (count - 1) * per_message / side.take(count)

    baseline, aim = settings.pop("baseline"), settings.pop("aim", "")
    rates = in_turns([partial(rate, ours), partial(rate, theirs)], rounds + 1)
    return results(what, [each[1:] for each in rates], [baseline], aims={baseline: aim}, **settings)[0]


def processor(ours: Receiver, theirs: Receiver, baseline: str, aim: str, *, count: int, rounds: int) -> Result:
    """What the receiving process spends on messages, whatever the senders do: all of its threads, and the system."""

    def spend(side: Receiver) -> float:
        side.take(count)
        return side.spent / (count * BATCH) * 1e6

    rates = [each[1:] for each in in_turns([partial(spend, ours), partial(spend, theirs)], rounds + 1)]
    what = "CPU seconds of a server per million samples, W1 (the ratio is to be small)"
    return results(what, rates, [baseline], aims={baseline: aim}, unit=" s")[0]


def by_file(workload: Workload, size: int, *, count: int, rounds: int) -> Result:
    """Ingest through a Unix socket, as from the other containers of a Pod."""
    with tempfile.TemporaryDirectory() as folder:
        ours = Ingest(workload, endpoint=f"ipc://{folder}/memoire")
        theirs = Raw(size, endpoint=f"ipc://{folder}/plain")
        what = f"ingest of {size} byte caches over ipc, {workload.name}"
        settings = {"per_message": size, "unit": "B/s", "baseline": "PULL socket over ipc, 1 sender"}
        found = compare(what, ours, theirs, count=count, rounds=rounds, **settings)
        ours.close()
        theirs.close()
    return found


def batch_bytes(workload: Workload) -> int:
    """Bytes of a batch's samples: both stacks of states, and the other columns."""
    stacks = 2 * workload.parameters.frame_stack
    return BATCH * sum(column.nbytes * (stacks if column.role == "state" else 1) for column in workload.schema.values())


Pace = dict[str, int]
KEEPS = "PULL socket that keeps the memory of messages, too"


def ingests(workload: Workload, count: int, rounds: int, wanted: Callable[[str], bool]) -> Iterator[Result]:
    """Into a server, over TCP and a Unix socket, caches and episodes."""
    name, pace = workload.name, {"count": count, "rounds": rounds}
    ours = Ingest(workload)
    size = ours.message_bytes
    settings: dict[str, Any] = {"per_message": size, "unit": "B/s"}
    sides = (
        (Raw(size), "PULL socket, 1 sender", {"floor": 0.5, "aim": f"ingest-{name}-raw"}, "server-cpu-raw"),
        (Raw(size, keeps=True), KEEPS, {}, ""),
    )
    for theirs, baseline, aims, cpu_aim in sides:
        if wanted(f"ingest {name}"):
            what = f"ingest of {size} byte caches, {name}"
            yield compare(what, ours, theirs, baseline=baseline, **pace, **settings, **aims)
        if name == "W1" and wanted("processor"):
            yield processor(ours, theirs, baseline, cpu_aim, **pace)
        theirs.close()
    ours.close()
    half: Pace = {"count": count // 2, "rounds": rounds}
    if wanted(f"ipc {name}"):
        yield by_file(workload, size, **half)
    if wanted(f"episodes {name}"):
        stored = Ingest(workload, "episodes")
        settings["per_message"] = size = stored.message_bytes
        plain = Raw(size)
        what = f"ingest of episodes of {EPISODE} entries, {size} bytes each, {name}"
        aims = {"aim": "ingest-episodes-W1-raw"} if name == "W1" else {}
        yield compare(what, stored, plain, baseline="PULL socket, 1 sender", **half, **settings, **aims)
        stored.close()
        plain.close()


def ends(workload: Workload, size: int, count: int, rounds: int) -> Iterator[Result]:
    """From the memories of actors to the batches of a learner; messages of the baseline are of `size` bytes."""
    is_large = workload.name == "W2"
    for actors in (1, 4):
        ours, theirs = EndToEnd(workload, actors), Raw(size, actors)
        yield compare(
            f"end to end, {actors} actors, {workload.name}",
            ours,
            theirs,
            count=count,
            rounds=rounds,
            per_message=size if is_large else BATCH,
            unit="B/s" if is_large else " samples/s",
            baseline=f"PULL socket, {actors} senders, as many bytes",
            aim=f"end-W2-{actors}-raw" if is_large else "",
        )
        theirs.close()
        ours.close()


def main() -> None:
    chosen = arguments(__doc__)
    report = Report(__doc__, [FACTS])
    report.heading()
    rounds, scale = (2, 10) if chosen.quick else (7, 1)
    for workload, count, size in ((w1(), 4000 // scale, W1_BYTES), (w2(), 64 // scale, batch_bytes(w2()))):
        for result in ingests(workload, count, rounds, lambda what: chosen.only in what):
            report.add(result)
        if chosen.only in f"end to end {workload.name}":
            for result in ends(workload, size, max(8, count // 2), rounds):
                report.add(result)
    report.finish(chosen.write, "wire")


if __name__ == "__main__":
    main()
