"""Why does this address not answer? One step after the other, as a client would take them, each said and explained.

    name ─▶ connection ─▶ ZeroMQ's greeting and socket type ─▶ HELLO ─▶ schema ─▶ UPDATE, clocks

Needs nothing but the client's three requirements, so that it runs inside of the thinnest actor image. It changes
no total and no list.

With `--inference`, one row goes there and back once a node answers. With `--roundtrip`, a cache does:

    this process ──HELLO, cache──▶ proxies ──▶ its home, table ROUNDTRIP ──▶ proxies ──DRAW──▶ this process

Every server has that table beside its own, so that no learner ever meets what is pushed here. Its clients are probes:
a server counts them apart, and no total, list or metric of a run has them.
"""

import importlib.metadata
import os
import platform
import resource
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

import numpy as np

from memoire.client.client import Client, connect
from memoire.errors import EndpointError, MemoireError, ProtocolError, Refused
from memoire.inference.policy import RemotePolicy
from memoire.limits import Limits, wall_clock
from memoire.net import addresses, link, sockets
from memoire.net.addresses import TimedSocket
from memoire.net.poller import Poller
from memoire.net.sockets import library_version, shared_context
from memoire.reader.reader import Reader
from memoire.replay.parameters import Parameters
from memoire.replay.schema import RowSchema, Schema
from memoire.security import access
from memoire.security.keys import Given, Keys
from memoire.version import SOFTWARE, VERSION
from memoire.wire import messages
from memoire.wire.frames import ROUNDTRIP, Message, encode, parse

WELL, NO_ADDRESS, NO_NAME, NOTHING_LISTENS, NOT_MEMOIRE = 0, 1, 3, 4, 5
OTHER_VERSION, NO_ANSWER, NO_SCHEMA, REFUSED, STUCK = 6, 7, 8, 9, 10
"""Exit statuses of `memoire doctor` (2 is a wrong command line)."""
_OTHER_PROGRAM = "A ZeroMQ program listens there, but it is not memoire's; correct the address."
MIN_FILES = 1024
SKEW: Final = 2.0
"""Seconds between the clocks of two machines from which times in logs and sample ages mislead."""
_SIGNATURE = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"
_VERSION = b"\x03\x00"
_NO_KEYS = b"NULL".ljust(20, b"\0") + b"\0" * 32
_PORTS = {
    "PULL": "where caches go: memoire's requests go to the port below it",
    "PUB": "where notices of models come from: memoire's requests go two ports below it",
    "XPUB": "where notices of models come from: memoire's requests go two ports below it",
}


ENTRIES = 16
BATCH = 64
"""Samples of a draw: others may be making the same journey, and every one of theirs may be drawn as well."""


Say: TypeAlias = Callable[[str], object]


class StepFailed(Exception):
    """A step failed: the exit status, what was found, and what to do."""

    def __init__(self, status: int, found: str, advice: str) -> None:
        super().__init__(status, found, advice)
        self.status, self.found, self.advice = status, found, advice


def _try_roundtrip(endpoint: str, timeout: float, say: Say, keys: Keys | None) -> None:
    """Push a cache to the server that `endpoint` leads to, draw from all of them until it comes back, and compare."""
    marks = np.frombuffer(secrets.token_bytes(8 * ENTRIES), np.int64)
    try:
        with connect(endpoint, table=ROUNDTRIP, timeout=timeout, capacity=ENTRIES, keys=keys) as client:
            _push(client, marks, timeout)
            say(f"ok   a cache of {ENTRIES} entries is at its home {client.home!r}")
            with Reader([endpoint], table=ROUNDTRIP, timeout=timeout, ahead=1, keys=keys) as reader:
                drawn = _draw(reader, client.client_id, timeout)
    except Refused as refused:
        advice = "Is a server behind it older than this release?" if refused.code == "table" else "Its log says more."
        raise StepFailed(REFUSED, str(refused), advice) from refused
    except MemoireError as error:
        advice = "Look at the servers behind this address."
        raise StepFailed(STUCK, f"a cache did not come back: {error}", advice) from error
    if not drawn or any(marks[number] != mark for number, mark in drawn):
        raise StepFailed(
            STUCK,
            "what was drawn is not what was pushed" if drawn else f"it was not drawn within {timeout:g} s",
            "Is every server behind this address one of this cluster, and of this release? Their logs say more.",
        )
    say(f"ok   {len(drawn)} samples of it came back as they were")
    say(f"     no total, list or metric of the run has it: servers count it apart (client {client.client_id.hex()})")


def _push(client: Client, marks: np.ndarray, timeout: float) -> None:
    """Record an entry for each mark, without counting them, and have a cache of them arrive."""
    client.memory.open()
    for mark in marks:
        client.memory.add(0, (mark,))
    client.memory.close(terminated=True)
    pushed = client.push_cache(timeout)
    deadline = time.monotonic() + timeout
    while pushed and (stats := client.stats()).accepted_caches + sum(stats.rejected.values()) == 0:
        if (left := deadline - time.monotonic()) <= 0.0:
            break
        client.update(left)
    stats = client.stats()
    if not pushed or stats.accepted_caches == 0:
        reason = client.push_reason or ", ".join(stats.rejected) or f"nobody has acknowledged it within {timeout:g} s"
        advice = "Caches take the port after the one for requests: is it open, and does the server's log say more?"
        raise StepFailed(STUCK, f"a cache did not arrive: {reason}", advice)


def _draw(reader: Reader, client: bytes, timeout: float) -> list[tuple[int, int]]:
    """(number, mark) of every sample of this client in a batch that has some; none where there was none in time."""
    owner, deadline = np.frombuffer(client, "<u8"), time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0.0:
        batch = reader.get_batch(BATCH, left)
        mine = (batch.ids["client"] == owner).all(axis=1)
        if mine.any():
            return list(zip(batch.ids["number"][mine].tolist(), batch["state"][mine].tolist(), strict=True))
    return []


def _ask_row(endpoint: str, timeout: float, say: Say, keys: Keys | None) -> None:
    """Ask an inference node for the outputs of a row of zeros, whose ragged columns have no element."""
    with RequestSocket(endpoint, timeout, keys) as asker:
        answer, seconds = asker.ask(messages.Hello(role="doctor", software=SOFTWARE))
    say(f"ok   HELLO is answered within {1e3 * seconds:.1f} ms")
    told = answer.body
    if not isinstance(told, messages.Welcome) or told.storage != "inference":
        advice = "Leave --inference out to look into a server, proxy or relay."
        raise StepFailed(NOT_MEMOIRE, f"{endpoint} is no inference node", advice)
    try:
        inputs, outputs = RowSchema.from_json(told.schema), RowSchema.from_json(told.outputs)
        for name, schema in (("inputs", inputs), ("outputs", outputs)):
            say(f"ok   {name}: {', '.join(f'{column} {form}' for column, form in schema.items())}")
        row = {
            name: [np.zeros((0, *column.element), column.dtype)]
            if column.is_ragged
            else np.zeros((1, *column.shape), column.dtype)
            for name, column in inputs.items()
        }
        with RemotePolicy(endpoint, inputs, outputs, timeout, keys=keys) as policy:
            began = time.monotonic()
            pending = policy.ask(row)
            pending.result()
            seconds = time.monotonic() - began
    except MemoireError as error:
        status = REFUSED if isinstance(error, Refused) else NO_ANSWER
        raise StepFailed(status, str(error), "Its log has the whole error, if its function raised one.") from error
    say(f"ok   a row is answered within {1e3 * seconds:.1f} ms, by version {pending.version} of the weights")


def examine(
    endpoint: str,
    *,
    timeout: float = 5.0,
    roundtrip: bool = False,
    inference: bool = False,
    keys: Given = None,
    say: Say = print,
) -> int:
    """Take every step to `endpoint`, saying what each one found; the exit status.

    Args:
        timeout: Seconds for each step.
        roundtrip: Whether to push a cache, too, and draw it back.
        inference: Whether it is an inference node, which is asked for one row of zeros.
        say: Takes each line of the findings.
    """
    for line in versions():
        say(f"     {line}")
    try:
        shown = Keys.of(keys, "learner")
        if shown is not None:
            say(f"     keys: {shown.own.peer.principal} {shown.own.fingerprint}, in {shown.folder}")
        _reach(endpoint, timeout, say, kinds=("ROUTER",), keys=shown)
        if inference:
            _ask_row(endpoint, timeout, say, shown)
        else:
            _converse(endpoint, timeout, say, shown)
        if roundtrip:
            _try_roundtrip(endpoint, timeout, say, shown)
    except StepFailed as sick:
        say(f"FAIL {sick.found}")
        say(f"     {sick.advice}")
        return sick.status
    say("all is well")
    return WELL


def versions() -> list[str]:
    """Of everything that has a say in what goes over the wire, and how many files may be open."""
    installed = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "pyzmq", "msgspec"))
    lines = [
        f"{SOFTWARE}, protocol {messages.VERSION}, Python {platform.python_version()}, {installed}, "
        f"libzmq {library_version()}"
    ]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < MIN_FILES
    more = ": few for a server or proxy with many clients; raise it (ulimit -n)" if few else ""
    return [*lines, f"open files: {_limit(soft)}, at most {_limit(hard)}{more}"]


def _limit(number: int) -> str:
    return "no limit" if number == resource.RLIM_INFINITY else str(number)


# ------------------------------------------------------------------------------------------- is anything there?


def _reach(endpoint: str, timeout: float, say: Say, *, kinds: tuple[str, ...], keys: Keys | None) -> None:
    """Resolve, connect, and hear from a ZeroMQ socket which kind it is: one of `kinds`, the usual one first. One that
    asks for keys says so alone.
    """
    try:
        scheme, _, place = addresses.check(endpoint, "connect to").partition("://")
    except EndpointError as error:
        raise StepFailed(NO_ADDRESS, f"{endpoint!r} is no address: {error.reason}", f"Give {error.instead}.") from error
    if scheme == "inproc":
        raise StepFailed(NO_ADDRESS, "no other process reaches inproc://", "Give tcp://HOST:PORT or ipc://PATH.")
    made = _dial_tcp(endpoint, place, timeout, say) if scheme == "tcp" else _dial_ipc(place, timeout, say)
    with TimedSocket.of(made, time.monotonic() + timeout) as timed:
        kind = _socket_type(timed, endpoint, timeout)
    if scheme == "tcp" and (kind == "CURVE") != (keys is not None):
        raise _one_sided(kind == "CURVE")
    if kind == "CURVE":
        say("ok   a ZeroMQ socket listens there, and asks for a key")
        return
    if kind not in kinds:
        what = _PORTS.get(kind, "no address of memoire's")
        raise StepFailed(
            NOT_MEMOIRE, f"a ZeroMQ {kind} socket listens there, {what}", f"Give the address of a {kinds[0]} socket."
        )
    say(f"ok   a ZeroMQ {kind} socket listens there")


def _dial_tcp(endpoint: str, place: str, timeout: float, say: Say) -> socket.socket:
    host, _, port = place.rpartition(":")
    host = host.strip("[]")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        advice = "Correct the name; in Kubernetes, is the service there, and in this namespace?"
        raise StepFailed(NO_NAME, f"the name {host!r} does not resolve: {error.strerror or error}", advice) from error
    say(f"ok   {host} is {', '.join(dict.fromkeys(str(info[4][0]) for info in found))}")
    try:
        made = socket.create_connection((host, int(port)), timeout)
    except OSError as error:
        raise _nothing_listens(endpoint, error) from error
    say(f"ok   connected to port {port}")
    return made


def _dial_ipc(path: str, timeout: float, say: Say) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(timeout)
    try:
        made.connect("\0" + path[1:] if path.startswith("@") else path)
    except OSError as error:
        made.close()
        raise _nothing_listens(f"ipc://{path}", error) from error
    say(f"ok   connected to {path}")
    return made


def _nothing_listens(endpoint: str, error: OSError) -> StepFailed:
    if isinstance(error, ConnectionRefusedError):
        advice = (
            "The machine is there, but no process listens at this address: start the server or proxy, or correct it."
        )
    elif isinstance(error, FileNotFoundError):
        advice = "There is no such socket file: start the relay or server, and share its folder with this container."
    elif isinstance(error, PermissionError):
        advice = "This user may not open the socket file: give it the group or mode that the relay's folder has."
    elif isinstance(error, TimeoutError):
        advice = "Nothing came back at all: a firewall or NetworkPolicy drops it, or the machine is gone."
    else:
        advice = "Is there a route from here to that machine?"
    reason = error.strerror or "no answer in time"
    return StepFailed(NOTHING_LISTENS, f"cannot connect to {endpoint}: {reason}", advice)


def _socket_type(made: socket.socket, endpoint: str, timeout: float) -> str:
    """ZMTP 3.0's handshake by hand, as far as the peer's READY: which socket type it has (rfc.zeromq.org/spec/23)."""
    heard = bytearray()
    try:
        made.sendall(_SIGNATURE + _VERSION)  # what it asks for is said before it hears what we have
        _receive(made, 10, heard)
        if heard[0] != 0xFF or heard[9] != 0x7F:
            raise _not_zeromq(endpoint, heard)
        _receive(made, 64, heard)
        mechanism = heard[12:32].rstrip(b"\0").decode("ascii", "replace")
        if mechanism == "CURVE":
            return mechanism
        if mechanism != "NULL":
            advice = "It is not memoire's: its own processes use keys (CURVE), or none."
            raise StepFailed(REFUSED, f"the ZeroMQ socket there wants {mechanism} security", advice)
        made.sendall(
            _NO_KEYS
        )  # and no more: who is told of a kind that does not fit may hang up before it says its own
        flags, length = _receive(made, 2, bytearray())
        body = _receive(made, length, bytearray()) if flags == 4 else bytearray()
    except EOFError:
        raise _not_zeromq(endpoint, heard) from None
    except TimeoutError:
        if heard:
            raise _not_zeromq(endpoint, heard) from None
        advice = "Is it another service, such as an HTTP server, or a process that hangs (or was stopped)?"
        found = f"something accepts connections there, but says nothing for {timeout:g} s"
        raise StepFailed(NOT_MEMOIRE, found, advice) from None
    except OSError as error:
        advice = "Is it another service, or a proxy (such as a service mesh) in front of nothing?"
        raise StepFailed(NOT_MEMOIRE, f"the connection broke off: {error.strerror or error}", advice) from error
    _, _, after = body.partition(b"Socket-Type")
    size = int.from_bytes(after[:4], "big")
    return after[4 : 4 + size].decode("ascii", "replace") or "(unnamed)"


def _one_sided(asks: bool) -> StepFailed:
    if asks:
        advice = "Connect with keys (--keys FOLDER), as the cluster's other clients do."
        return StepFailed(REFUSED, "the ZeroMQ socket there wants CURVE security: it asks for a key", advice)
    advice = "Start the process there with --keys, or take this command's keys away (--keys, $MEMOIRE_KEYS)."
    return StepFailed(REFUSED, "the ZeroMQ socket there asks for no key, so nobody knows who it is", advice)


def _receive(made: socket.socket, size: int, heard: bytearray) -> bytearray:
    """`heard`, filled up to `size` bytes; EOFError when the peer hangs up first."""
    while len(heard) < size:
        more = made.recv(size - len(heard))
        if not more:
            raise EOFError
        heard += more
    return heard


def _not_zeromq(endpoint: str, heard: bytearray) -> StepFailed:
    said = f"it says {bytes(heard[:32])!r}" if heard else "it hangs up at once"
    advice = "Another service has this port: give memoire's, or find out what listens there (ss -ltnp)."
    return StepFailed(NOT_MEMOIRE, f"what listens at {endpoint} does not speak ZeroMQ: {said}", advice)


# -------------------------------------------------------------------------------------------- is it memoire?


class RequestSocket:
    """A DEALER that asks, and waits for each answer at most `timeout` seconds; one request at a time.

    Raises:
        StepFailed: that is no address.
    """

    def __init__(self, endpoint: str, timeout: float, keys: Keys | None = None) -> None:
        self.endpoint, self.timeout = endpoint, timeout
        self.facts: dict[str, int] = {}
        self._client, self._sequence = secrets.token_bytes(16), 0
        self._doors = Poller()
        self._socket = sockets.request_client(shared_context(), Limits().reply_bytes)
        self._doors.add(self._socket)
        try:
            self._link = link.dial(self._doors, self._socket, endpoint, watch=True, keys=keys)
        except EndpointError as error:
            self._doors.close()
            raise StepFailed(NO_ADDRESS, str(error), "Give tcp://HOST:PORT or ipc://PATH.") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._doors.close()

    def ask(self, body: messages.Body) -> tuple[Message, float]:
        """The answer to a request, and the seconds it took. Asked again each second until the time is up."""
        self._sequence += 1
        request = encode(body, client=self._client, sequence=self._sequence, **self.facts)
        deadline = time.monotonic() + self.timeout
        while (now := time.monotonic()) < deadline and self._link.denied is None:
            sent = sockets.send(self._socket, [b"", *request])
            until = min(deadline, now + (1.0 if sent else 0.05))
            while time.monotonic() < until and self._link.denied is None:
                self._doors.wait(until)
                frames = sockets.receive(self._socket)
                if frames is not None:
                    return self._read(frames), time.monotonic() - now
        if self._link.denied is not None:
            denied = self._link.denied
            raise StepFailed(REFUSED, f"this process is not let in: {denied.reason}", denied.advice) from denied
        name = type(body).__name__.upper()
        advice = (
            "A proxy answers only when a server behind it does: look at its servers. Else the process hangs, or it is "
            "a ZeroMQ ROUTER of some other program."
            if self._link.is_connected
            else self._link.explain()
        )
        raise StepFailed(NO_ANSWER, f"nobody answered {name} within {self.timeout:g} s", advice)

    def _read(self, frames: Sequence[Any]) -> Message:
        try:
            message = parse(frames[1:])
        except ProtocolError as error:
            if error.code == "version":
                raise _other_version(error.detail) from error
            raise StepFailed(NOT_MEMOIRE, f"the answer is not memoire's: {error}", _OTHER_PROGRAM) from error
        said = message.body
        if isinstance(said, messages.Refused):
            if said.code == "version":
                raise _other_version(f"it speaks {said.versions}: {said.text}")
            if said.code == "denied":
                advice = "Mend the keys of that proxy or relay: those in its folder, and those that its servers let in."
                raise StepFailed(REFUSED, f"the proxy or relay there is refused itself: {said.text}", advice)
            raise StepFailed(REFUSED, f"it refuses ({said.code}): {said.text}", "Its log says more.")
        return message


def _other_version(detail: str) -> StepFailed:
    advice = f"Give both sides the same release of memoire-rl; here is {VERSION}."
    return StepFailed(OTHER_VERSION, f"memoire listens there, but of another version: {detail}", advice)


def _converse(endpoint: str, timeout: float, say: Say, keys: Keys | None) -> None:
    """HELLO and UPDATE, as a client does, and a look at the addresses that it learns."""
    with RequestSocket(endpoint, timeout, keys) as asker:
        welcome = _greet(asker, say)
        answer, seconds = asker.ask(messages.Update(epoch=welcome.epoch, leaving=True))
        say(f"ok   UPDATE is answered within {1e3 * seconds:.1f} ms")
        _compare_clocks(answer.body, wall_clock() - seconds / 2, say)
    ports = welcome.endpoints
    for use, port, kinds in (("caches", ports.push, ("PULL",)), ("notices", ports.publish, ("XPUB", "PUB"))):
        say(f"     {use}: {port}")
        _reach(addresses.seen_from(endpoint, port), timeout, say, kinds=kinds, keys=keys)
    if keys is None and (found := access.reachable([endpoint, ports.push, ports.publish])):
        places = ", ".join(found)
        say(f"warn nobody is asked for a key at {places}: whoever comes may push, draw and publish (--keys)")


def _greet(asker: RequestSocket, say: Say) -> messages.Welcome:
    hello = messages.Hello(role="doctor", software=SOFTWARE, host=socket.gethostname()[:256], pid=os.getpid())
    message, seconds = asker.ask(hello)
    welcome = message.body
    if not isinstance(welcome, messages.Welcome):
        raise StepFailed(NOT_MEMOIRE, f"HELLO was answered by {message.type.name}", _OTHER_PROGRAM)
    say(
        f"ok   HELLO is answered within {1e3 * seconds:.1f} ms: run {welcome.run_name!r}, home {welcome.home_name!r}, "
        f"{max(1, len(welcome.servers))} server(s){', finished' if welcome.finished else ''}"
    )
    kept = "on disk" if welcome.durable else "in memory only: totals and log lines end with it (no --state-dir)"
    say(f"ok   its home is {welcome.software or 'an older memoire'}, and keeps what it acknowledges {kept}")
    try:
        schema = Schema.from_json(welcome.schema)
        Parameters.from_wire(welcome.parameters).check_for(schema)
    except MemoireError as error:
        advice = "The server was started without a schema, or by another release: look at its --schema and version."
        raise StepFailed(NO_SCHEMA, f"it answers, but gives no schema that can be used: {error}", advice) from error
    say(f"ok   schema: {', '.join(f'{name} {column}' for name, column in schema.items())}")
    header = message.header
    asker.facts = {"run": header.run, "home": header.home, "fingerprint": header.fingerprint, "table": welcome.table}
    return welcome


def _compare_clocks(answer: messages.Body, here: float, say: Say) -> None:
    """Say how far the server's clock is from this one, `here` in the middle of the round trip."""
    there = answer.time if isinstance(answer, messages.Updated) else 0.0
    if not there:
        return  # it does not say
    ahead = there - here
    if abs(ahead) < SKEW:
        say(f"ok   its clock is {1e3 * abs(ahead):.0f} ms {'ahead' if ahead > 0 else 'behind'}, round trip included")
    else:
        say(
            f"warn its clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the one here: times in logs "
            f"and ages of samples mislead. Keep both on NTP."
        )
