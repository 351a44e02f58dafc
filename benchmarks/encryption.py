"""How much of a server's ingest is left when everything is encrypted, and what do more I/O threads or proxies bring?"""

import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq
from measure import Report, arguments
from workloads import BATCH, Workload, w1

import memoire
import wire as plain
from memoire.net import sockets
from memoire.security import provision as key_writer
from memoire.security.keys import Keys
from memoire.wire import _bytes, containers, messages
from memoire.wire.frames import encode, name_hash

FOLLOWS = """Senders, proxies and server run on the same cores: both sides of each connection pay on them, and only
the ratios say something. Where one I/O thread already finds no further core, more threads and proxies bring little.
Encryption is the work of ZeroMQ's I/O threads, and a connection belongs to one of them: a server whose ingest it
bounds takes more threads (`--io-threads 4`, or `process=Process(context=zmq.Context(4))`) and as many connections
(actors, or proxies), on as many cores. `ipc://` from a relay to the actors of its pod is not encrypted and costs
nothing."""


def sender(pipe: Connection, endpoint: str, workload: Workload, folder: str | None, rank: int) -> None:
    """PUSH caches that were made beforehand, by the key in a folder or without one."""
    memory = plain.filled(workload, rank)
    payloads = [containers.build(memory, BATCH, now=time.time()) for _ in range(64)]
    checksums = [_bytes.checksum(payload) for payload in payloads]
    facts: dict[str, Any] = {
        "client": f"bench sender {rank:03}".encode(), "run": name_hash("default"),
        "home": name_hash("bench"), "fingerprint": workload.schema.fingerprint,
    }  # fmt: skip
    sequence = pushed = 0
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.set(zmq.SNDHWM, sockets.data_mark(payloads[0].nbytes))
        if folder is not None:
            keys = Keys(folder, "actor")
            known = {key.role: key.public for key in keys.servers}
            role, endpoint = endpoint.split("@")
            sockets.use_keys(push, keys.own.public, keys.own.secret or b"", known[role])
        push.connect(endpoint.rpartition("@")[2])
        pipe.send(payloads[0].nbytes)
        while (count := pipe.recv()) is not None:
            for turn in range(count):
                payload = payloads[turn % len(payloads)]
                sequence += 1
                pushed += payload.nbytes
                body = messages.Cache(number=sequence, pushed_bytes=pushed)
                known_sum = checksums[turn % len(payloads)]
                frames = encode(body, sequence=sequence, payload=payload, payload_checksum=known_sum, **facts)
                push.send_multipart(frames, copy=False)
        push.close(0)


def proxy(pipe: Connection, server: str, folder: str | None) -> None:
    """A proxy in a process of its own."""
    with memoire.Proxy("tcp://127.0.0.1:0", [server], keys=folder) as made:
        while not made.servers:
            time.sleep(0.01)
        pipe.send(made.push_endpoint)
        while pipe.recv() is not None:
            pass


class Ingest:
    """A server that takes in caches of several senders, through proxies or not."""

    def __init__(self, workload: Workload, folder: str | None, *, senders: int, threads: int, proxies: int) -> None:
        self.context = zmq.Context(threads)
        self.server = memoire.Server(
            "tcp://127.0.0.1:0",
            workload.schema,
            parameters=workload.parameters,
            byte_limit=plain.HELD_BYTES,
            process=memoire.Process(context=self.context),
            name="bench",
            keys=folder,
        )
        self.proxies = [plain.Child(proxy, self.server.endpoint, folder) for _ in range(proxies)]
        fronts = [f"proxy@{child.first_answer}" for child in self.proxies] or [f"server@{self.server.push_endpoint}"]
        self.senders = [
            plain.Child(sender, fronts[rank % len(fronts)], workload, folder, rank) for rank in range(senders)
        ]
        self.message_bytes = int(self.senders[0].first_answer)

    def take(self, count: int) -> float:
        """Seconds for `count` caches, from the first that came on."""
        begin, each = self.server.total_caches, count // len(self.senders)
        for child in self.senders:
            child.tell(each)
        while (came := self.server.total_caches) == begin:
            time.sleep(0.0001)
        began, end = time.perf_counter(), begin + each * len(self.senders)
        while self.server.total_caches < end - 2:  # a proxy may lose the oldest, should its queue be full
            time.sleep(0.002)
        return (time.perf_counter() - began) * (count - 1) / (end - came)

    def close(self) -> None:
        for child in (*self.senders, *self.proxies):
            child.close()
        self.server.close()
        self.context.term()


def main() -> None:
    chosen = arguments(__doc__)
    report = Report(__doc__, [FOLLOWS])
    report.heading()
    workload = w1()
    with tempfile.TemporaryDirectory() as folder:
        key_writer.write_cluster(Path(folder) / "keys")
        keys = str(Path(folder) / "keys")
        for senders, threads, proxies in ((1, 1, 0), (2, 1, 0), (2, 2, 0), (2, 1, 1), (2, 1, 2), (2, 2, 2)):
            what = f"{senders} senders, {threads} I/O threads, {proxies} proxies"
            if chosen.only not in what:
                continue
            ours = Ingest(workload, keys, senders=senders, threads=threads, proxies=proxies)
            theirs = Ingest(workload, None, senders=senders, threads=threads, proxies=proxies)
            report.add(
                plain.compare(
                    f"caches of {ours.message_bytes} bytes, encrypted, {what}",
                    ours,
                    theirs,
                    count=200 if chosen.quick else 1600,
                    rounds=2 if chosen.quick else 5,
                    per_message=ours.message_bytes,
                    unit="B/s",
                    baseline="the same without keys",
                )
            )
            ours.close()
            theirs.close()
    report.finish(chosen.write, "encryption")


if __name__ == "__main__":
    main()
