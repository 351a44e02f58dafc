"""Do 12000 malformed connections to every port of server, proxy, relay and their pages end or swell anything?

Nonsense, other protocols, handshakes that are cut, of an old version or with lengths that cannot be, golden messages
damaged behind a right handshake, frames that announce more than there is, requests that are none; some are reset, some
stay. Meanwhile two clients count episodes and push caches through relay and proxy: afterwards all of it is there, every
node answers, and none has grown. With keys, the same again while every port asks for them.

Not among them: ZMTP's PING, which ends libzmq itself where queues are full (docs/security.md); tests/support/rawpeer.py sends it.
"""

import argparse
import contextlib
import json
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from _cluster import Command
from _kit import end, memory, say, table

import memoire
from fuzz import engine
from netkit import record
from rawpeer import GREETING, ready
from wirekit import MESSAGES

SCHEMA = memoire.Schema({"obs": memoire.Column(np.float32, (4,), "state"), "reward": np.float32})
MAX_GROWTH = 64 << 20
HELD = 100
"""Connections that are left open, the oldest closed first."""
GET = b"GET /status HTTP/1.1\r\nHost: localhost\r\n"


class Place:
    """Where connections go: a port, or the path of a socket."""

    def __init__(self, node: str, name: str, url: str) -> None:
        self.node, self.name = node, name
        scheme, _, rest = url.partition("://")
        self.is_http = scheme == "http"
        host, _, port = rest.partition("/")[0].rpartition(":")
        self._path = None if scheme != "ipc" else rest
        self._address = (host, int(port)) if scheme != "ipc" else None

    def connect(self) -> socket.socket:
        if self._path is not None:
            made = socket.socket(socket.AF_UNIX)
            made.settimeout(10.0)
            made.connect(self._path)
            return made
        return socket.create_connection(self._address, 10.0)


def command(body: bytes) -> bytes:
    return b"\x04" + bytes([len(body) & 255]) + body


def long(body: bytes, declared: int, flags: int = 2) -> bytes:
    """A frame that says it has so many bytes."""
    return bytes([flags]) + struct.pack(">Q", declared & (2**64 - 1)) + body


def greeting(rng: random.Random) -> bytes:
    return rng.choice(
        (
            GREETING,
            b"\xff" + bytes(8) + b"\x7f\x03\x01" + rng.choice((b"NULL", b"PLAIN", b"CURVE", b"GSSAPI", b"")).ljust(20, b"\0") + bytes(32),
            b"\xff" + bytes(8) + b"\x7f\x01\x05",  # ZMTP 2.0
            b"\x01\x00",  # ZMTP 1.0
            b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + b"\x01" + bytes(31),
            rng.randbytes(64),
            GREETING[: rng.randrange(64)],
        )
    )  # fmt: skip


def handshake(rng: random.Random) -> bytes:
    """After the greeting."""
    kind = rng.choice((b"DEALER", b"PUSH", b"SUB", b"REQ", b"X" * 200, b""))
    right = ready(kind) if len(kind) < 200 else b""
    return rng.choice(
        (
            right,
            right,
            command(b"\x05READY" + b"\xff" + b"A" * 20),
            command(b"\x05READY\x0bSocket-Type" + struct.pack(">I", 2**32 - 1) + b"PUSH"),
            command(b"\x05HELLO" + rng.randbytes(194)),
            command(b"\x05READY\x08Identity" + struct.pack(">I", 200) + rng.randbytes(200)) + right,
            command(b"\xc8" + rng.randbytes(100)),
            command(b""),
            long(rng.randbytes(100), 2**63 - 1, 6),
            long(rng.randbytes(100), 2**64 - 1),
            rng.randbytes(rng.randrange(1, 200)),
            right + command(b"\x09SUBSCRIBE" + rng.randbytes(20)) + command(b"\x06CANCEL"),
        )
    )  # fmt: skip


def messages(rng: random.Random) -> bytes:
    """What comes behind a handshake: frames, damaged."""
    made = b""
    for _ in range(rng.randrange(1, 4)):
        frames = [engine.mutate(frame, rng, MESSAGES[0]) for frame in rng.choice(MESSAGES)]
        for number, frame in enumerate([b"", *frames] if rng.random() < 0.5 else frames):
            flags = 2 | (number < len(frames)) if rng.random() < 0.9 else rng.randrange(256) & 0xFB  # no command
            declared = len(frame) if rng.random() < 0.9 else rng.choice((2**63, 2**64 - 1, 2**40, 1 << 28))
            made += long(frame, declared, flags)
    return made


def request(rng: random.Random) -> bytes:
    return rng.choice(
        (
            GET + b"\r\n", GET, b"GET " + b"/" * 9000, rng.randbytes(300), b"\x16\x03\x01\x02\x00\x01" * 20, b"",
            b"POST /status HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n" + b"x" * 1000,
            engine.mutate(GET + b"\r\n", rng, [GET]), GET + b"X: " + b"y" * 20_000 + b"\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        )
    )  # fmt: skip


def attack(place: Place, rng: random.Random, held: list[socket.socket]) -> str:
    """One connection; what kind it was."""
    made = place.connect()
    try:
        if place.is_http:
            kind, pieces = "request", [request(rng)]
        elif (choice := rng.random()) < 0.3:
            kind, pieces = "greeting", [greeting(rng)]
        elif choice < 0.6:
            kind, pieces = "handshake", [GREETING, handshake(rng)]
        else:
            kind, pieces = "messages", [GREETING, ready(rng.choice((b"DEALER", b"PUSH", b"SUB"))), messages(rng)]
        with contextlib.suppress(OSError):  # it may be closed at the first wrong byte
            for number, piece in enumerate(pieces):
                made.sendall(piece)
                if number == 1 and kind == "messages":
                    hear(made, b"READY")
    except BaseException:
        made.close()
        raise
    if kind == "messages" and rng.random() < 0.8:
        held.append(made)  # what was sent is lost where the connection is closed before it was read
    elif rng.random() < 0.3:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not a goodbye
        made.close()
    elif rng.random() < 0.2:
        held.append(made)
    else:
        made.close()
    while len(held) > HELD:
        held.pop(0).close()
    return kind


def hear(made: socket.socket, word: bytes) -> None:
    """Read until this has come, or the other end has closed."""
    heard = b""
    while word not in heard:
        piece = made.recv(1000)
        if not piece:
            return
        heard += piece


class Good:
    """Clients that go on, whatever happens beside them."""

    def __init__(self, urls: list[str], keys: str | None) -> None:
        self._clients = [memoire.connect(url, timeout=60.0, **({"keys": keys} if keys else {})) for url in urls]
        self._stop = threading.Event()
        self.pushed = self.episodes = 0
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.05):
                for client in self._clients:
                    record(client, episodes=1)
                    self.episodes += 1
                    self.pushed += client.push_cache(30.0)
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self._stop.set()
        self._thread.join(60.0)
        for client in self._clients:
            client.update(60.0)
            client.close(10.0)


def page(url: str, name: str) -> dict:
    with urllib.request.urlopen(f"{url}/{name}", timeout=30.0) as answer:
        found: dict = json.load(answer)
        return found


def wait(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.1)


@contextlib.contextmanager
def cluster(folder: Path, keys: str | None) -> Iterator[dict[str, tuple[Command, str]]]:
    """A server, a proxy in front of it and a relay in front of that, each with its pages' address."""
    extra = ["--http", "127.0.0.1:0", *(["--keys", keys] if keys else [])]
    made: dict[str, tuple[Command, str]] = {}
    try:
        for role, more in (
            ("server", ["--endpoint", "tcp://127.0.0.1:0", "--schema", SCHEMA.to_json(), "--set", "cache_size=16"]),
            ("proxy", ["--endpoint", "tcp://127.0.0.1:0"]),
            ("relay", ["--endpoint", f"ipc://{folder}/relay"]),
        ):
            behind = [list(made.values())[-1][0].endpoint] if made else []
            node = Command(role, *more, *extra, *behind)
            assert node.process.stdout is not None
            made[role] = node, node.process.stdout.readline().split()[-1].removesuffix("/status")
        yield made
    finally:
        for node, _ in reversed(made.values()):
            node.end()


def trial(count: int, seed: str, keys: str | None) -> tuple[list[list[object]], list[str]]:
    rows: list[list[object]] = []
    violations: list[str] = []
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="memoire-soak-") as name, cluster(Path(name), keys) as nodes:
        places = [Place(role, "pages", url) for role, (_, url) in nodes.items()]
        for role, (_, url) in nodes.items():
            places += [Place(role, port, at) for port, at in page(url, "status")["endpoints"].items() if at]
        good = Good([nodes["proxy"][0].endpoint, nodes["relay"][0].endpoint], keys)
        kinds: Counter[tuple[str, str]] = Counter()
        before: dict[str, int] = {}
        held: list[socket.socket] = []
        for number in range(count):
            place = rng.choice(places)
            kinds[place.node, attack(place, rng, held)] += 1
            if number == count // 4:
                before = {role: memory(node.pid) for role, (node, _) in nodes.items()}
            if number % 1000 == 999:
                say(f"{number + 1} connections, {good.episodes} episodes of good clients")
        for made in held:
            made.close()
        good.end()
        if good.error is not None:
            violations.append(f"a good client failed: {good.error!r}")
        for role, (node, url) in nodes.items():
            if node.process.poll() is not None:
                violations.append(f"{role} ended with status {node.process.returncode}")
                continue
            wait(lambda url=url: page(url, "readyz")["ready"], f"{role} is not ready")
            said = page(url, "status")["stats"]
            grown = memory(node.pid) - before[role]
            refused = sum(said["refused"].values())
            own = {kind: kinds[role, kind] for kind in ("request", "greeting", "handshake", "messages")}
            rows.append([f"{role}{', keys' if keys else ''}", *own.values(), refused, f"{grown / 2**20:.1f}"])
            if said["faults"]:
                violations.append(f"{role}: {said['faults']} faults")
            if grown > MAX_GROWTH:
                violations.append(f"{role} grew by {grown >> 20} MiB")
        totals = page(nodes["server"][1], "status")["stats"]["totals"]
        if (totals["episodes"], totals["accepted_caches"]) != (good.episodes, good.pushed):
            violations.append(f"{good.episodes} episodes and {good.pushed} caches were counted as {totals}")
        rows.append(
            [f"good clients{', keys' if keys else ''}", "-", "-", "-", f"{good.episodes} episodes", good.pushed, "-"]
        )
    return rows, violations


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--connections", type=int, default=12_000)
    parser.add_argument("--seed", default=time.strftime("%Y-%m-%d", time.gmtime()))
    parser.add_argument("--keys", action=argparse.BooleanOptionalAction, default=True, help="also with keys")
    given = parser.parse_args()
    rows, violations = trial(given.connections, given.seed, None)
    if given.keys:
        with tempfile.TemporaryDirectory(prefix="memoire-soak-keys-") as folder:
            subprocess.run(
                [sys.executable, "-m", "memoire", "keys", "new", f"{folder}/keys"], check=True, stdout=sys.stderr
            )
            more, wrong = trial(given.connections, f"keys {given.seed}", f"{folder}/keys")
            rows, violations = rows + more, violations + wrong
    print(f"Seed {given.seed}. MiB: more than after a quarter of the connections.\n")
    print(table(["node", "requests", "greetings", "handshakes", "messages", "refused messages", "MiB"], rows))
    return end(violations)


if __name__ == "__main__":
    sys.exit(main())
