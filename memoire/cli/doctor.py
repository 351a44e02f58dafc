"""Diagnosis of an address (`memoire doctor`): a client's connection steps in order, each reported and explained.

    name ─▶ connection ─▶ ZeroMQ's greeting and socket type ─▶ HELLO ─▶ schema ─▶ UPDATE, clocks

The module needs only the client's three requirements, so that it runs in the smallest actor image. The steps change no
total and no list.

With `--inference`, an inference node answers one row. With `--roundtrip`, a cache is pushed and drawn back:

    this process ──HELLO, cache──▶ proxies ──▶ its home, table ROUNDTRIP ──▶ proxies ──DRAW──▶ this process

Every server has the table ROUNDTRIP beside its own tables, so that no learner draws these entries. Clients of ROUNDTRIP
are probes: a server counts them separately, and no total, list or metric of a run includes them.
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
from memoire.security.keys import Keys, KeysLike
from memoire.version import SOFTWARE, VERSION
from memoire.wire import messages
from memoire.wire.frames import ROUNDTRIP, Message, encode, parse

WELL, NO_ADDRESS, NO_NAME, NOTHING_LISTENS, NOT_MEMOIRE = 0, 1, 3, 4, 5
OTHER_VERSION, NO_ANSWER, NO_SCHEMA, REFUSED, STUCK = 6, 7, 8, 9, 10
"""Exit statuses of `memoire doctor` (2 is a wrong command line)."""
_OTHER_PROGRAM = "A ZeroMQ program listens there, but it is not memoire's; correct the address."
MIN_FILES = 1024
MAX_CLOCK_SKEW: Final = 2.0
"""Seconds between two machines' clocks above which times in logs and ages of samples are misleading."""
_SIGNATURE = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"
_VERSION = b"\x03\x00"
_NO_KEYS = b"NULL".ljust(20, b"\0") + b"\0" * 32
_PORTS = {
    "PULL": "which receives caches: requests go to the port one below",
    "PUB": "which sends notices of models: requests go to the port two below",
    "XPUB": "which sends notices of models: requests go to the port two below",
}


ROUNDTRIP_ENTRIES = 16
ROUNDTRIP_BATCH_SIZE = 64
"""Samples of a draw: large, because a draw also returns samples of other doctors that run at the same time."""


Say: TypeAlias = Callable[[str], object]


class StepFailed(Exception):
    """A step failed: carries the exit status, the finding and the advice."""

    def __init__(self, status: int, finding: str, advice: str) -> None:
        super().__init__(status, finding, advice)
        self.status, self.finding, self.advice = status, finding, advice


def _try_roundtrip(endpoint: str, timeout: float, say: Say, keys: Keys | None) -> None:
    """Push a cache through `endpoint`, draw from all servers until samples of the cache come back, and compare them."""
    marks = np.frombuffer(secrets.token_bytes(8 * ROUNDTRIP_ENTRIES), np.int64)
    try:
        with connect(endpoint, table=ROUNDTRIP, timeout=timeout, capacity=ROUNDTRIP_ENTRIES, keys=keys) as client:
            _push(client, marks, timeout)
            say(f"ok   a cache of {ROUNDTRIP_ENTRIES} entries is at its home {client.home!r}")
            with Reader([endpoint], table=ROUNDTRIP, timeout=timeout, ahead=1, keys=keys) as reader:
                samples = _draw(reader, client.client_id, timeout)
    except Refused as refused:
        is_table = refused.code == "table"
        advice = "Is a server behind this address older than this release?" if is_table else "See the server's log."
        raise StepFailed(REFUSED, str(refused), advice) from refused
    except MemoireError as error:
        advice = "Look at the servers behind this address."
        raise StepFailed(STUCK, f"the cache did not come back: {error}", advice) from error
    if not samples or any(marks[number] != mark for number, mark in samples):
        raise StepFailed(
            STUCK,
            "the drawn samples differ from the pushed entries"
            if samples
            else f"no draw within {timeout:g} s had samples of the cache",
            "Does every server behind this address belong to this cluster and run this release? See their logs.",
        )
    say(f"ok   {len(samples)} samples of the cache came back unchanged")
    say(f"     servers count this probe separately from the run's totals (client {client.client_id.hex()})")


def _push(client: Client, marks: np.ndarray, timeout: float) -> None:
    """Record an uncounted entry for each mark, push a cache of them, and wait until the server accepts the cache."""
    client.memory.open()
    for mark in marks:
        client.memory.add(0, (mark,))
    client.memory.close(terminated=True)
    pushed = client.push_cache(timeout)
    deadline = time.monotonic() + timeout
    while pushed and (stats := client.stats()).accepted_caches + sum(stats.rejected.values()) == 0:
        if (remaining := deadline - time.monotonic()) <= 0.0:
            break
        client.update(remaining)
    stats = client.stats()
    if not pushed or stats.accepted_caches == 0:
        reason = client.push_reason or ", ".join(stats.rejected) or f"no server acknowledged it within {timeout:g} s"
        advice = "Caches use the port after that for requests. Is this port open? See the server's log, too."
        raise StepFailed(STUCK, f"the cache did not arrive: {reason}", advice)


def _draw(reader: Reader, client: bytes, timeout: float) -> list[tuple[int, int]]:
    """Return (number, mark) of the client's samples in the first batch that has any; [] after `timeout` seconds."""
    owner, deadline = np.frombuffer(client, "<u8"), time.monotonic() + timeout
    while (remaining := deadline - time.monotonic()) > 0.0:
        batch = reader.get_batch(ROUNDTRIP_BATCH_SIZE, remaining)
        is_own = (batch.ids["client"] == owner).all(axis=1)
        if is_own.any():
            return list(zip(batch.ids["number"][is_own].tolist(), batch["state"][is_own].tolist(), strict=True))
    return []


def _ask_row(endpoint: str, timeout: float, say: Say, keys: Keys | None) -> None:
    """Ask an inference node for the outputs of one row of zeros; ragged columns of the row are empty."""
    with RequestSocket(endpoint, timeout, keys) as requests:
        answer, seconds = requests.ask(messages.Hello(role="doctor", software=SOFTWARE))
    say(f"ok   HELLO is answered within {1e3 * seconds:.1f} ms")
    welcome = answer.body
    if not isinstance(welcome, messages.Welcome) or welcome.storage != "inference":
        advice = "Leave out --inference to examine a server, proxy or relay."
        raise StepFailed(NOT_MEMOIRE, f"{endpoint} is not an inference node", advice)
    try:
        inputs, outputs = RowSchema.from_json(welcome.schema), RowSchema.from_json(welcome.outputs)
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
        advice = "If the node's function raised an error, the node's log has the traceback."
        raise StepFailed(status, str(error), advice) from error
    say(f"ok   a row was answered in {1e3 * seconds:.1f} ms, by version {pending.version} of the weights")


def examine(
    endpoint: str,
    *,
    timeout: float = 5.0,
    roundtrip: bool = False,
    inference: bool = False,
    keys: KeysLike = None,
    say: Say = print,
) -> int:
    """Run all steps against `endpoint`, report each result to `say`, and return the exit status.

    Args:
        timeout: Seconds for each step.
        roundtrip: True also pushes a cache and draws it back.
        inference: True expects an inference node, and asks it for one row of zeros.
        say: Called with each line of the report.
    """
    for line in versions():
        say(f"     {line}")
    try:
        identity = Keys.from_setting(keys, "learner")
        if identity is not None:
            say(f"     keys: {identity.own.peer.principal} {identity.own.fingerprint}, in {identity.folder}")
        _check_socket(endpoint, timeout, say, kinds=("ROUTER",), keys=identity)
        if inference:
            _ask_row(endpoint, timeout, say, identity)
        else:
            _check_protocol(endpoint, timeout, say, identity)
        if roundtrip:
            _try_roundtrip(endpoint, timeout, say, identity)
    except StepFailed as failure:
        say(f"FAIL {failure.finding}")
        say(f"     {failure.advice}")
        return failure.status
    say("all is well")
    return WELL


def versions() -> list[str]:
    """Return two lines: versions of all software that affects the wire format, and the limits of open files."""
    installed = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "pyzmq", "msgspec"))
    lines = [
        f"{SOFTWARE}, protocol {messages.VERSION}, Python {platform.python_version()}, {installed}, "
        f"libzmq {library_version()}"
    ]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_low = soft != resource.RLIM_INFINITY and soft < MIN_FILES
    advice = ": too few for a server or proxy with many clients; raise the limit (ulimit -n)" if is_low else ""
    return [*lines, f"open files: {_format_limit(soft)}, at most {_format_limit(hard)}{advice}"]


def _format_limit(number: int) -> str:
    return "no limit" if number == resource.RLIM_INFINITY else str(number)


# ------------------------------------------------------------------------------------------------- transport


def _check_socket(endpoint: str, timeout: float, say: Say, *, kinds: tuple[str, ...], keys: Keys | None) -> None:
    """Resolve and connect, and read the type of the ZeroMQ socket; raise StepFailed if it is not one of `kinds`. A
    socket that asks for keys does not tell its type.
    """
    try:
        scheme, _, place = addresses.check(endpoint, "connect to").partition("://")
    except EndpointError as error:
        finding = f"{endpoint!r} is not a valid address: {error.reason}"
        raise StepFailed(NO_ADDRESS, finding, f"Give {error.instead}.") from error
    if scheme == "inproc":
        advice = "Give tcp://HOST:PORT or ipc://PATH."
        raise StepFailed(NO_ADDRESS, "inproc:// addresses work within one process only", advice)
    connection = _dial_tcp(endpoint, place, timeout, say) if scheme == "tcp" else _dial_ipc(place, timeout, say)
    with TimedSocket.wrap(connection, time.monotonic() + timeout) as timed:
        kind = _socket_type(timed, endpoint, timeout)
    if scheme == "tcp" and (kind == "CURVE") != (keys is not None):
        raise _one_sided(kind == "CURVE")
    if kind == "CURVE":
        say("ok   a ZeroMQ socket listens there, and asks for a key")
        return
    if kind not in kinds:
        purpose = _PORTS.get(kind, "which memoire does not use")
        finding = f"a ZeroMQ {kind} socket listens there, {purpose}"
        raise StepFailed(NOT_MEMOIRE, finding, f"Give the address of a {kinds[0]} socket.")
    say(f"ok   a ZeroMQ {kind} socket listens there")


def _dial_tcp(endpoint: str, place: str, timeout: float, say: Say) -> socket.socket:
    host, _, port = place.rpartition(":")
    host = host.strip("[]")
    try:
        addresses = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        advice = "Correct the name. In Kubernetes: does the service exist, and in this namespace?"
        raise StepFailed(NO_NAME, f"the name {host!r} does not resolve: {error.strerror or error}", advice) from error
    say(f"ok   {host} is {', '.join(dict.fromkeys(str(info[4][0]) for info in addresses))}")
    try:
        connection = socket.create_connection((host, int(port)), timeout)
    except OSError as error:
        raise _nothing_listens(endpoint, error) from error
    say(f"ok   connected to port {port}")
    return connection


def _dial_ipc(path: str, timeout: float, say: Say) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout)
    try:
        connection.connect("\0" + path[1:] if path.startswith("@") else path)
    except OSError as error:
        connection.close()
        raise _nothing_listens(f"ipc://{path}", error) from error
    say(f"ok   connected to {path}")
    return connection


def _nothing_listens(endpoint: str, error: OSError) -> StepFailed:
    if isinstance(error, ConnectionRefusedError):
        advice = (
            "The machine answers, but no process listens at this address. Start the server or proxy, or correct the "
            "address."
        )
    elif isinstance(error, FileNotFoundError):
        advice = "The socket file does not exist. Start the relay or server, and share its folder with this container."
    elif isinstance(error, PermissionError):
        advice = "This user may not open the socket file. Run as a user or group that may write to the socket file."
    elif isinstance(error, TimeoutError):
        advice = "No packet came back: a firewall or NetworkPolicy drops them, or the machine is down."
    else:
        advice = "Is there a route from this machine to that one?"
    reason = error.strerror or "no answer in time"
    return StepFailed(NOTHING_LISTENS, f"cannot connect to {endpoint}: {reason}", advice)


def _socket_type(connection: socket.socket, endpoint: str, timeout: float) -> str:
    """Return the peer's ZeroMQ socket type, from a ZMTP 3.0 handshake up to its READY (rfc.zeromq.org/spec/23)."""
    received = bytearray()
    try:
        connection.sendall(_SIGNATURE + _VERSION)  # the peer names its mechanism before it sees ours
        _receive(connection, 10, received)
        if received[0] != 0xFF or received[9] != 0x7F:
            raise _not_zeromq(endpoint, received)
        _receive(connection, 64, received)
        mechanism = received[12:32].rstrip(b"\0").decode("ascii", "replace")
        if mechanism == "CURVE":
            return mechanism
        if mechanism != "NULL":
            advice = "Another program listens there: memoire's processes use CURVE security, or no security."
            raise StepFailed(REFUSED, f"the ZeroMQ socket there asks for {mechanism} security", advice)
        connection.sendall(_NO_KEYS)  # no socket type is sent: the peer may hang up on a wrong type first
        flags, length = _receive(connection, 2, bytearray())
        body = _receive(connection, length, bytearray()) if flags == 4 else bytearray()
    except EOFError:
        raise _not_zeromq(endpoint, received) from None
    except TimeoutError:
        if received:
            raise _not_zeromq(endpoint, received) from None
        advice = "Is it another service, such as an HTTP server, or a process that hangs or was stopped?"
        finding = f"a process accepts connections there, but sent nothing for {timeout:g} s"
        raise StepFailed(NOT_MEMOIRE, finding, advice) from None
    except OSError as error:
        advice = "Is it another service, or a proxy (such as a service mesh) without a server behind it?"
        raise StepFailed(NOT_MEMOIRE, f"the connection broke off: {error.strerror or error}", advice) from error
    _, _, value = body.partition(b"Socket-Type")
    size = int.from_bytes(value[:4], "big")
    return value[4 : 4 + size].decode("ascii", "replace") or "(unnamed)"


def _one_sided(asks: bool) -> StepFailed:
    if asks:
        advice = "Connect with keys (--keys FOLDER), as the cluster's other clients do."
        return StepFailed(REFUSED, "the ZeroMQ socket there asks for a key (CURVE security)", advice)
    advice = "Start the process there with --keys, or run this command without keys (--keys, $MEMOIRE_KEYS)."
    return StepFailed(REFUSED, "the ZeroMQ socket there uses no keys, so its identity cannot be verified", advice)


def _receive(connection: socket.socket, size: int, received: bytearray) -> bytearray:
    """Fill `received` up to `size` bytes from the socket and return it; raise EOFError if the peer hangs up first."""
    while len(received) < size:
        chunk = connection.recv(size - len(received))
        if not chunk:
            raise EOFError
        received += chunk
    return received


def _not_zeromq(endpoint: str, received: bytearray) -> StepFailed:
    reply = f"it sent {bytes(received[:32])!r}" if received else "it hung up at once"
    advice = "Another service uses this port. Give memoire's port, or list listening processes (ss -ltnp)."
    return StepFailed(NOT_MEMOIRE, f"the process that listens at {endpoint} does not speak ZeroMQ: {reply}", advice)


# -------------------------------------------------------------------------------------------------- protocol


class RequestSocket:
    """DEALER socket for one request at a time, with at most `timeout` seconds for each answer.

    Raises:
        StepFailed: `endpoint` is not a valid address.
    """

    def __init__(self, endpoint: str, timeout: float, keys: Keys | None = None) -> None:
        self.endpoint, self.timeout = endpoint, timeout
        self.facts: dict[str, int] = {}
        self._client, self._sequence = secrets.token_bytes(16), 0
        self._poller = Poller()
        self._socket = sockets.request_client(shared_context(), Limits().reply_bytes)
        self._poller.add(self._socket)
        try:
            self._link = link.dial(self._poller, self._socket, endpoint, watch=True, keys=keys)
        except EndpointError as error:
            self._poller.close()
            raise StepFailed(NO_ADDRESS, str(error), "Give tcp://HOST:PORT or ipc://PATH.") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._poller.close()

    def ask(self, body: messages.Body) -> tuple[Message, float]:
        """Return the answer to a request and its round trip time in seconds; resend each second until the timeout."""
        self._sequence += 1
        request = encode(body, client=self._client, sequence=self._sequence, **self.facts)
        deadline = time.monotonic() + self.timeout
        while (now := time.monotonic()) < deadline and self._link.denied is None:
            sent = sockets.send(self._socket, [b"", *request])
            until = min(deadline, now + (1.0 if sent else 0.05))
            while time.monotonic() < until and self._link.denied is None:
                self._poller.wait(until)
                frames = sockets.receive(self._socket)
                if frames is not None:
                    return self._read(frames), time.monotonic() - now
        if self._link.denied is not None:
            denied = self._link.denied
            raise StepFailed(REFUSED, f"the server denied access: {denied.reason}", denied.advice) from denied
        name = body.type.name
        advice = (
            "A proxy answers only if a server behind it does: check its servers. Otherwise the process hangs, or "
            "belongs to another program that uses ZeroMQ."
            if self._link.is_connected
            else self._link.explain()
        )
        raise StepFailed(NO_ANSWER, f"no answer to {name} within {self.timeout:g} s", advice)

    def _read(self, frames: Sequence[Any]) -> Message:
        try:
            message = parse(frames[1:])
        except ProtocolError as error:
            if error.code == "version":
                raise _other_version(error.detail) from error
            raise StepFailed(NOT_MEMOIRE, f"the answer is not a memoire message: {error}", _OTHER_PROGRAM) from error
        reply = message.body
        if isinstance(reply, messages.Refusal):
            if reply.code == "version":
                raise _other_version(f"it speaks {reply.versions}: {reply.text}")
            if reply.code == "denied":
                advice = "Check the keys in the folder of that proxy or relay, and whether its servers authorize them."
                raise StepFailed(REFUSED, f"its servers deny the proxy or relay access: {reply.text}", advice)
            raise StepFailed(REFUSED, f"it refuses ({reply.code}): {reply.text}", "See its log.")
        return message


def _other_version(detail: str) -> StepFailed:
    advice = f"Install the same release of memoire-rl on both sides; this side has {VERSION}."
    return StepFailed(OTHER_VERSION, f"memoire listens there, but with another protocol version: {detail}", advice)


def _check_protocol(endpoint: str, timeout: float, say: Say, keys: Keys | None) -> None:
    """Send HELLO and UPDATE as a client does, and check the addresses in the reply."""
    with RequestSocket(endpoint, timeout, keys) as requests:
        welcome = _send_hello(requests, say)
        answer, seconds = requests.ask(messages.Update(epoch=welcome.epoch, leaving=True))
        say(f"ok   UPDATE is answered within {1e3 * seconds:.1f} ms")
        _compare_clocks(answer.body, wall_clock() - seconds / 2, say)
    ports = welcome.endpoints
    for use, port, kinds in (("caches", ports.push, ("PULL",)), ("notices", ports.publish, ("XPUB", "PUB"))):
        say(f"     {use}: {port}")
        _check_socket(addresses.seen_from(endpoint, port), timeout, say, kinds=kinds, keys=keys)
    if keys is None and (open_addresses := access.reachable([endpoint, ports.push, ports.publish])):
        places = ", ".join(open_addresses)
        say(f"warn {places} can be reached without a key: any machine may push, draw and publish (use --keys)")


def _send_hello(requests: RequestSocket, say: Say) -> messages.Welcome:
    hello = messages.Hello(role="doctor", software=SOFTWARE, host=socket.gethostname()[:256], pid=os.getpid())
    message, seconds = requests.ask(hello)
    welcome = message.body
    if not isinstance(welcome, messages.Welcome):
        raise StepFailed(NOT_MEMOIRE, f"the answer to HELLO is {message.type.name}, not WELCOME", _OTHER_PROGRAM)
    say(
        f"ok   HELLO is answered within {1e3 * seconds:.1f} ms: run {welcome.run_name!r}, home {welcome.home_name!r}, "
        f"{max(1, len(welcome.servers))} server(s){', finished' if welcome.finished else ''}"
    )
    medium = "on disk" if welcome.durable else "in memory only: a restart loses totals and log lines (no --state-dir)"
    say(f"ok   its home runs {welcome.software or 'an older memoire'} and keeps acknowledged data {medium}")
    try:
        schema = Schema.from_json(welcome.schema)
        Parameters.from_wire(welcome.parameters).check_for(schema)
    except MemoireError as error:
        advice = "The server has no schema, or runs another release: check its --schema and its version."
        raise StepFailed(NO_SCHEMA, f"the server answers, but its schema cannot be used: {error}", advice) from error
    say(f"ok   schema: {', '.join(f'{name} {column}' for name, column in schema.items())}")
    header = message.header
    requests.facts = {"run": header.run, "home": header.home, "fingerprint": header.fingerprint, "table": welcome.table}
    return welcome


def _compare_clocks(answer: messages.Body, local_time: float, say: Say) -> None:
    """Report the skew between the server's clock and `local_time`, this clock in the middle of the round trip."""
    server_time = answer.time if isinstance(answer, messages.Updated) else 0.0
    if not server_time:
        return  # the answer has no time
    skew = server_time - local_time
    if abs(skew) < MAX_CLOCK_SKEW:
        say(f"ok   its clock is {1e3 * abs(skew):.0f} ms {'ahead' if skew > 0 else 'behind'}, round trip included")
    else:
        say(
            f"warn its clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} the local clock: times in "
            f"logs and ages of samples are misleading. Synchronize both machines by NTP."
        )
