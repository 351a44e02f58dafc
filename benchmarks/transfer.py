"""Rates of samples from a worker to a trainer, and of models back, beside TMRL's transport (tlspyo)."""

import tempfile
import time
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import zmq
from measure import TCP, Child, Report, close, serve
from peers.tasks import columns, model, packets

import memoire
from memoire.errors import MemoireTimeout
from memoire.rl.samples import TABLE, Sample, SampleTaker, columns_of, samples_table
from memoire.security import provision as key_writer
from memoire.wire import _bytes

WORKERS: Final = 8
"""Number of workers that receive a model."""
LENGTHS: Final = 100, 1000
"""Numbers of samples in a packet."""
SENT: Final = 100_000
"""Number of samples of a turn."""
TAKEN: Final = 8192
"""Samples of one request, as a trainer of `memoire.rl` makes it."""
MODELS: Final = 20
"""Number of models of a turn."""
CAPACITY: Final = 1_000_000
TIMEOUT: Final = 60.0
SCHEMA: Final = memoire.Schema(
    {
        "obs": memoire.Column(np.float32, (4,), "state"),
        "action": memoire.Column(np.float32, (2,)),
        "reward": np.float32,
        "terminated": np.bool_,
    }
)
FACTS: Final = f"""A worker, a server and a trainer are processes of their own. A *sample* is a drone's: an action
of two numbers, an observation of four, a reward, and a flag at the last sample of a packet. A turn is timed from the
order to the worker until the trainer has all samples. An episode of TMRL's tutorial has 100 samples, one
of its games 1000. *Columns* is what `memoire.rl` sends: arrays for each packet. *Objects* is what `memoire.tmrl` sends,
as TMRL does: tuples of small arrays, each of which the worker packs and the trainer rebuilds. Memoire's trainer asks
for {TAKEN} samples at a time. The benchmark asks tlspyo for all packets of a turn at once, which is the fastest use:
TMRL's trainer asks repeatedly. In *encrypted* rows, tlspyo's wire is TLS, and memoire's is CURVE.

A *model* has 1 MB. Each model is timed until each of {WORKERS} workers, processes of their own, has the model as
bytes. *Plain* has ZeroMQ alone: a PUB socket, and a SUB socket in each worker. With *XXH3* both ends compute this
checksum of each model, as memoire's publisher, server and workers do."""


def keys_of(folder: str | None, role: str) -> Path | None:
    return None if folder is None else Path(folder) / role


def both_tables(pipe: Connection, folder: str | None) -> None:
    """Run a server with the tables of columns and of samples."""
    tables = {
        "columns": memoire.Table(SCHEMA, storage="rollouts", capacity=CAPACITY, on_full="drop_oldest"),
        TABLE: samples_table(CAPACITY),
    }
    serve(pipe, memoire.Server(TCP, tables=tables, keys=keys_of(folder, "server")))


def send(pipe: Connection, endpoint: str, folder: str | None, table: str, length: int) -> None:
    """Run a worker, which sends as many packets as each order says."""
    with memoire.connect(endpoint, table=table, keys=keys_of(folder, "actor")) as client:
        ready: list[Any] = list(columns(length))
        if table != "columns":
            ready = [[Sample(act, obs, rew, done, False, info, reward=rew) for act, obs, rew, done, info in packet]
                     for packet in packets(length)]  # fmt: skip
        pipe.send("ready")
        while (count := pipe.recv()) is not None:
            for number in range(count):
                packet = ready[number % len(ready)]
                assert client.push_episode(packet if table == "columns" else columns_of(packet), timeout=TIMEOUT)


def follow(pipe: Connection, endpoint: str, folder: str | None) -> None:
    """Run a worker, which reports the version of each model that it receives."""
    with memoire.connect(endpoint, table="columns", keys=keys_of(folder, "actor")) as client:
        handle, seen = client.model("actor"), 0
        pipe.send(0)
        while True:
            with suppress(MemoireTimeout):
                seen = handle.wait(1.0, after=seen).version
                pipe.send(seen)


def subscribe(pipe: Connection, endpoint: str, is_checked: bool) -> None:
    """Run a worker with a plain SUB socket, which reports the size of each message."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"")
        socket.connect(endpoint)
        pipe.send("ready")
        while True:
            body = socket.recv(copy=False).buffer
            if is_checked:
                _bytes.checksum(body)
            pipe.send(len(body))


class Plain:
    """Side that sends models to workers over plain sockets."""

    most = MODELS

    def __init__(self, place: "Place", is_checked: bool) -> None:
        self._body, self._is_checked = model(), is_checked
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.bind(TCP)
        where = self._socket.last_endpoint.decode(), is_checked
        self._workers = [place.start(subscribe, *where).pipe for _ in range(WORKERS)]
        deadline = time.monotonic() + TIMEOUT
        while not all(each.poll(0.1) for each in self._workers):  # a subscription takes effect after some time
            assert time.monotonic() < deadline
            self._socket.send(b"")
        self._socket.send(b"last")
        for each in self._workers:
            while each.recv() != len(b"last"):
                pass

    def clock(self, count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            if self._is_checked:
                _bytes.checksum(self._body)
            self._socket.send(self._body, copy=False)
            for each in self._workers:
                each.recv()
        return time.perf_counter() - began


class Place:
    """Server, and the processes that send to it and follow it, until `close`."""

    def __init__(self, folder: str | None) -> None:
        self.folder = folder
        self.processes: list[Child] = []
        self._readers: list[memoire.Reader] = []
        self.endpoint = self.start(both_tables, folder).first_answer

    def start(self, target: Any, *args: object) -> Child:
        self.processes.append(Child(target, *args))
        return self.processes[-1]

    def reader(self, table: str) -> memoire.Reader:
        self._readers.append(memoire.Reader(self.endpoint, table=table, keys=keys_of(self.folder, "learner")))
        return self._readers[-1]

    def close(self) -> None:
        """End all readers and processes; afterwards the folder of keys may be deleted."""
        close(*self._readers)
        for child in self.processes:
            child.process.kill()
            child.process.join()
            child.pipe.close()


class Packets:
    """Side that receives packets from one worker, as columns or as samples of any form."""

    def __init__(self, place: Place, table: str, length: int) -> None:
        self.most = SENT // length
        self._length, self._worker = length, place.start(send, place.endpoint, place.folder, table, length)
        reader = place.reader(table)
        self._taker, self._reader = (SampleTaker(reader) if table == TABLE else None), reader

    def clock(self, count: int) -> float:
        samples: deque[list[Sample]] = deque()
        began, missing = time.perf_counter(), count * self._length
        self._worker.tell(count)
        while missing:
            if self._taker is None:
                missing -= len(self._reader.take(min(missing, TAKEN), TIMEOUT))
            else:
                self._taker.wait(TIMEOUT)
                self._taker.take_into(samples)
                missing -= sum(map(len, samples))
                samples.clear()
        return time.perf_counter() - began


class Models:
    """Side that sends models to all workers, and waits until each worker has each model."""

    most = MODELS

    def __init__(self, place: Place) -> None:
        self._followers = [place.start(follow, place.endpoint, place.folder).pipe for _ in range(WORKERS)]
        self._reader, self._body = place.reader("columns"), model()

    def clock(self, count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            version = self._reader.publish("actor", self._body)
            for each in self._followers:
                while each.recv() < version:
                    pass
        return time.perf_counter() - began


def samples(report: Report, what: str, keys: str | None, security: str | None, rounds: int) -> None:
    """Add the rows for two lengths of packets and two forms of samples."""
    for length in LENGTHS:
        place = Place(keys)
        theirs = report.company.sides({"tlspyo": ("Samples", security, length)}, most=SENT // length)
        for form, table in (("columns", "columns"), ("objects", TABLE)):
            if report.wants(f"{form}, {length} together{what}"):
                aim = "transfer-samples" if (form, length, what) == ("columns", 1000, "") else ""
                settings = {"unit": " samples/s", "per_call": length, "aims": dict.fromkeys(theirs, aim)}
                ours = Packets(place, table, length)
                report.compare(f"{form}, {length} together{what}", ours, theirs, rounds=rounds, **settings)
        report.company.part()
        place.close()


def models(report: Report, what: str, keys: str | None, security: str | None, rounds: int) -> None:
    """Add the rows of a model, beside tlspyo and plain sockets."""
    title = f"1 MB to {WORKERS} workers{what}"
    if report.wants(title):
        place = Place(keys)
        theirs = report.company.sides({"tlspyo": ("Models", security, WORKERS)}, most=MODELS)
        aims = dict.fromkeys(theirs, "" if what else "transfer-models")
        if not what:
            theirs |= {"plain PUB and SUB": Plain(place, False), "plain PUB and SUB, XXH3": Plain(place, True)}
        report.compare(title, Models(place), theirs, unit=" models/s", rounds=rounds, aims=aims)
        report.company.part()
        place.close()


def main() -> None:
    report = Report.begin(__doc__, FACTS, peers=True)
    rounds = 3 if report.quick else 5
    with tempfile.TemporaryDirectory() as folder:
        key_writer.write_cluster(Path(folder))
        for what, keys, security in (("", None, None), (", encrypted", folder, "TLS")):
            samples(report, what, keys, security, rounds)
            models(report, what, keys, security, rounds)
    report.finish("transfer")


if __name__ == "__main__":
    main()
