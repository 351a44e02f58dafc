"""Sides of tlspyo: a relay, a trainer's endpoint, and endpoints of workers in their own processes, as TMRL has them."""

import multiprocessing
import os
import signal
import socket
import tempfile
import time
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from tasks import model, packets
from tlspyo import Endpoint, Relay

MAX_BUFFER = 536_870_912
"""Bytes: the `max_buf_len` of TMRL's endpoints."""


class Buffer:
    """Buffer as TMRL's workers send it: samples, and figures of the newest episodes."""

    def __init__(self, memory):
        self.memory = memory
        self.stat_train_return = self.stat_test_return = 0.0
        self.stat_train_steps = self.stat_test_steps = 0


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def keys_folder():
    """Return a folder with a key and a certificate for the host that endpoints expect.

    tlspyo's own generator needs an older pyOpenSSL.
    """
    folder, key = Path(tempfile.mkdtemp()), rsa.generate_private_key(65537, 2048)
    name, now = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "default")]), datetime.now(UTC)
    cert = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(1))
    cert = cert.add_extension(x509.SubjectAlternativeName([x509.DNSName("default")]), critical=False)
    cert = cert.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    pem = serialization.Encoding.PEM
    (folder / "certificate.pem").write_bytes(cert.sign(key, hashes.SHA256()).public_bytes(pem))
    form, secret = serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(pem, form, secret))
    return str(folder)


@cache
def relay(security):
    """Start a relay; return its port, its folder of keys, and the relay."""
    os.setpgid(0, 0)  # one process group for all processes of the side, which end together
    folder, port = keys_folder(), free_port()
    return port, folder, Relay(port, "password", local_com_port=free_port(), security=security, keys_dir=folder)


def endpoint(group, security, port, folder, mode="asynchronous"):
    return Endpoint(
        "127.0.0.1", port, "password", group, local_com_port=free_port(), max_buf_len=MAX_BUFFER, security=security,
        keys_dir=folder, deserializer_mode=mode,
    )  # fmt: skip


def send(pipe, length, *where):
    """Run a worker, which sends as many packets as each order says."""
    worker, ready = endpoint("workers", *where, "synchronous"), [Buffer(each) for each in packets(length)]
    pipe.send("ready")
    while (count := pipe.recv()) is not None:
        for number in range(count):
            worker.produce(ready[number % len(ready)], "trainers")
    worker.stop()


def follow(pipe, *where):
    """Run a worker, which reports the number of each model that it receives."""
    worker = endpoint("workers", *where, "synchronous")
    while True:
        for number, _ in worker.receive_all(blocking=True):
            pipe.send(number)


def started(target, *args):
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    spawn.Process(target=target, args=(theirs, *args)).start()
    return ours


class Side:
    """Side whose `close` kills all processes of the process group."""

    def close(self):
        os.killpg(0, signal.SIGKILL)


class Samples(Side):
    """Side that receives packets from one worker, as objects in the trainer."""

    def __init__(self, security, length):
        where = security, *relay(security)[:2]
        self.trainer = endpoint("trainers", *where)
        self.worker = started(send, length, *where)
        self.worker.recv()
        self.clock(1)

    def clock(self, count):
        began, came = time.perf_counter(), 0
        self.worker.send(count)
        self.trainer.notify({"trainers": count})  # faster than asking again and again, as TMRL's trainers do
        while came < count:
            came += len(self.trainer.receive_all(blocking=True))
        return time.perf_counter() - began


class Models(Side):
    """Side that sends models to all workers, and waits until each worker has each model."""

    def __init__(self, security, workers):
        where = security, *relay(security)[:2]
        self.trainer, self.body, self.number = endpoint("trainers", *where), model(), 0
        self.workers = [started(follow, *where) for _ in range(workers)]
        deadline = time.monotonic() + 60.0
        while not all(each.poll(1.0) for each in self.workers):  # a new endpoint receives the newest model
            assert time.monotonic() < deadline
            if not self.number:
                self.publish()
        for each in self.workers:
            each.recv()

    def publish(self):
        self.number += 1
        self.trainer.broadcast((self.number, self.body), "workers")

    def clock(self, count):
        began = time.perf_counter()
        for _ in range(count):
            self.publish()
            for worker in self.workers:
                while worker.recv() < self.number:
                    pass
        return time.perf_counter() - began
