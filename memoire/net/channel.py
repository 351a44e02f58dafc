"""Request channel of a client, reader or proxy: numbered requests over one DEALER, sent again until answered.

A channel belongs to the worker that owns its socket; every method is called in the worker's thread.

`PendingRequests` decides when to send a request again, and when it expires; it is pure, time is passed in.

A request may be sent any number of times, since each one is idempotent; its number assigns a reply to it. The pause
before a resend doubles and is drawn at random from its upper half, so that thousands of clients of a restarted node do
not ask at the same time.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from memoire.errors import AuthError, MemoireError, MemoireTimeout, ProtocolError, Refused
from memoire.limits import Limits
from memoire.security.keys import Keys
from memoire.wire import messages
from memoire.wire.frames import TOO_LARGE, Answer, MessageHeader, check_payload, encode, parse, peek
from memoire.wire.receivers import ReplyLimits, hello_with_limits

from . import sockets
from .link import Link, dial
from .poller import Poller
from .sockets import Context, Socket
from .thread import Worker

_log = logging.getLogger(__name__)

MAX_PER_TURN = 64
RENEW_TIMEOUT = 5.0
"""Seconds, times 1 to 1.5, without a reply to open requests after which the socket is replaced: ZeroMQ never reconnects
a socket if another service, which rejected its handshake, had the address for a moment."""
DENIED_TIMEOUT = 2.5
"""Seconds of refused connections after which a caller gets AuthError: by then a new key is known to all nodes."""
ATTEMPT_TIMEOUT = 12.0
"""Most seconds between two signs that ZeroMQ is trying to connect: more than its longest pause and attempt together."""
FINAL = "version", *TOO_LARGE
"""Codes of unreadable replies after which a resend would bring the same again."""
LARGE_PAYLOAD = 1 << 16
"""Bytes of a payload from which on a second pass over it is worth avoiding."""


@dataclass(slots=True)
class PendingRequest:
    """One open request; belongs to the thread that owns the socket."""

    number: int
    frames: Sequence[Any]
    deadline: float
    """Time at which the request expires; infinity for a request that never does."""
    finish: Callable[[Any], None]
    """Callback, called once with the reply or an exception."""
    next_send: float
    started: float
    patience: float = 0.0
    """Least seconds before a resend, other than after a lost connection."""
    sends: int = 0
    sent_at: float = float("-inf")


class PendingRequests:
    """Open requests of one channel, by number."""

    def __init__(self, resend_after: float, resend_most: float, rng: random.Random) -> None:
        self._calls: dict[int, PendingRequest] = {}
        self._resend_after = resend_after
        self._resend_most = resend_most
        self._rng = rng
        self.resends = 0

    def __len__(self) -> int:
        return len(self._calls)

    def start(
        self,
        number: int,
        frames: Sequence[Any],
        deadline: float,
        finish: Callable[[Any], None],
        now: float,
        patience: float = 0.0,
    ) -> PendingRequest:
        """Add a request, which is due at once; returns it."""
        call = self._calls[number] = PendingRequest(number, frames, deadline, finish, now, now, patience)
        return call

    def due_requests(self, now: float) -> list[PendingRequest]:
        """Return the requests to send now, in the order in which they were added."""
        return [call for call in self._calls.values() if call.next_send <= now < call.deadline]

    def sent(self, call: PendingRequest, now: float) -> None:
        """Record that the socket took a request; sets the time of the next resend."""
        pause = min(self._resend_most, self._resend_after * 2.0 ** min(call.sends, 30))
        call.next_send = now + max(call.patience, pause if call.sends == 0 else pause * self._rng.uniform(0.5, 1.0))
        self.resends += call.sends > 0
        call.sends += 1
        call.sent_at = now

    def resend_lost(self, before: float, now: float) -> None:
        """Make requests due now that were sent until `before`, when the connection was lost that is back now."""
        for call in self._calls.values():
            if call.sent_at <= before:
                call.next_send = min(call.next_send, now)

    def take(self, number: int) -> PendingRequest | None:
        """Remove and return the request with this number; None if it was answered or has expired."""
        return self._calls.pop(number, None)

    def expired(self, now: float) -> list[PendingRequest]:
        """Remove and return the requests whose deadline has passed."""
        if not self._calls:
            return []
        expired = [call for call in self._calls.values() if now >= call.deadline]
        for call in expired:
            del self._calls[call.number]
        return expired

    def remove_all(self) -> list[PendingRequest]:
        """Remove and return every open request, when the channel closes."""
        calls = list(self._calls.values())
        self._calls.clear()
        return calls

    def next_time(self) -> float:
        """Return the time of the next resend or expiry; infinity if no request is open."""
        if not self._calls:
            return float("inf")
        return min([min(call.next_send, call.deadline) for call in self._calls.values()])

    def next_deadline(self) -> float:
        """Return the time at which the next request expires; infinity if none does."""
        return min((call.deadline for call in self._calls.values()), default=float("inf"))


class Channel:
    """Channel for requests to one address, with the fields of the headers of its requests.

    Args:
        poller: Poller of the thread that owns the channel.
        client: Id of the requesting client; replies to other clients are rejected.
        numbers: Iterator of sequence numbers: one counter for all messages of a client.
        keys: Keys of this process; None connects without keys.
    """

    def __init__(
        self,
        poller: Poller,
        context: Context,
        endpoint: str,
        *,
        client: bytes,
        limits: Limits,
        rng: random.Random,
        numbers: Iterator[int] | None = None,
        keys: Keys | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.run = self.home = self.fingerprint = self.table = 0
        self.longest = limits.tuning.request_bytes
        """Most bytes of a frame of a request: for a longer one the peer ends the connection, and loses later ones."""
        self.refused: Counter[str] = Counter()
        """Number of replies that were rejected, by code."""
        self.heard_at = 0.0
        """Time of the newest reply, by time.monotonic(); 0 before the first."""
        self.renewals = 0
        """Number of times that the socket was replaced or its name resolved to another address. The owner's other
        sockets to the same node have to follow."""
        self.connections = 0
        """Number of connections established so far."""
        self._client = client
        self._introduces = bool(ReplyLimits.with_limits(limits).declared_limits)  # HELLO precedes other requests
        self._is_unknown = self._introduces  # the peer may not know which replies this client takes
        self._limits = limits
        self._keys = keys
        self._poller = poller
        self._context = context
        self._rng = rng
        self._numbers = numbers or itertools.count(1)
        self.link: Link
        """Link of the socket: its address, state and errors. Further sockets of the owner join it until `renewals`
        changes. Any thread may read the link's attributes."""
        self._calls = PendingRequests(limits.tuning.resend_after, limits.tuning.resend_most, rng)
        self._renewed_at = float("-inf")
        self._denied_since = float("inf")
        self._socket = self._open()

    def _open(self) -> Socket:
        socket = sockets.request_client(self._context, self._limits.reply_bytes)
        former = getattr(self, "link", None)
        self.link = dial(self._poller, socket, self.endpoint, watch=True, keys=self._keys)
        if former is not None:
            self.link.denied = former.denied  # as before, until the new socket connects
        self._address, self._seen = self.link.address, 0
        self._is_blocked = False
        self._patience = RENEW_TIMEOUT * self._rng.uniform(1.0, 1.5)
        self._asked_at = time.monotonic()  # time since which a request is open
        return self._poller.add(socket)

    @property
    def _renew_at(self) -> float:
        """Time at which the socket is replaced if no reply comes before."""
        if not len(self._calls):
            return float("inf")
        give_up = max(self.heard_at, self._asked_at) + self._patience
        # While ZeroMQ goes on trying, a new socket would not connect sooner.
        tries = self.link.is_down and not self.link.has_given_up
        return max(give_up, self.link.stirred_at + ATTEMPT_TIMEOUT) if tries else give_up

    @property
    def denied_for_good(self) -> AuthError | None:
        """Error if the peer has refused this process' keys for `DENIED_TIMEOUT` seconds; else None. Thread-safe."""
        is_long = time.monotonic() - self._denied_since >= DENIED_TIMEOUT
        return self.link.denied if is_long else None

    @property
    def resends(self) -> int:
        """Number of resends of requests."""
        return self._calls.resends

    def ask(
        self,
        body: messages.Body,
        finish: Callable[[Answer], None],
        deadline: float = float("inf"),
        *,
        payload: Any = None,
        payload_checksum: int | None = None,
        home: int | None = None,
        sequence: int | None = None,
        run: int | None = None,
        patience: float = 0.0,
    ) -> int:
        """Send a request; `finish` gets its reply, or the error that ends it (Refused, MemoireTimeout). Returns its
        number.

        Args:
            finish: Called in the thread of the channel, once; maybe before this call returns.
            deadline: Time at which the request expires, by time.monotonic(); infinity resends without end.
            payload_checksum: XXH3 of the payload, if it is known.
            home: Hash of the server that has to answer; None takes the channel's own.
            sequence: Number of the request; None takes the next one.
            run: Hash of the run; None takes the channel's own.
            patience: Least seconds before a resend, if a second answer would cost much.
        """
        if isinstance(body, messages.Hello):
            body = hello_with_limits(body, self._limits)
        number = next(self._numbers) if sequence is None else sequence
        try:
            frames = encode(
                body,
                client=self._client,
                sequence=number,
                run=self.run if run is None else run,
                home=self.home if home is None else home,
                table=self.table,
                fingerprint=self.fingerprint,
                payload=payload,
                payload_checksum=payload_checksum,
            )
        except (TypeError, ValueError, OverflowError) as error:  # a gap in the caller's checks must not end the thread
            text = f"{type(body).__name__.upper()} was not sent, since it cannot be encoded: {error}"
            self._poller.post(lambda: finish(Refused(self.endpoint, "tail", text)))
            return number
        if len(frames[0]) > self.longest or len(frames[-1]) > self.longest:
            size = max(len(frame) for frame in frames)
            name, most = type(body).__name__.upper(), self.longest
            text = f"{name} of {size} bytes was not sent; the limit is {most} (request_bytes)"
            self._poller.post(lambda: finish(Refused(self.endpoint, "too_large", text)))
            return number
        now = time.monotonic()
        if not len(self._calls):
            self._asked_at = now
        call = self._calls.start(number, [b"", *frames], deadline, finish, now, patience)
        self._notice_endings()
        if now >= deadline or self._is_blocked or self._is_unknown or not sockets.send(self._socket, call.frames):
            self.pump()
        else:
            self._calls.sent(call, now)
        return number

    @property
    def is_free(self) -> bool:
        """True if `ask_at_once` may be called: as far as known the channel is connected, and no request is open."""
        self._notice_endings()
        return not (self._is_unknown or self._is_blocked or len(self._calls) or self.link.is_down)

    def ask_at_once(
        self,
        number: int,
        frames: list[bytes],
        now: float,
        read: Callable[[list[zmq.Frame], int], Any],
        open_: Callable[[], tuple[float, Callable[[Answer], None]]],
    ) -> Any:
        """Send a whole request and wait `sockets.ANSWER_TIMEOUT` for its answer. Only if no answer comes, it becomes an
        open request as those of `ask`, since that costs more than to send it. Only while `is_free`.

        Args:
            read: Parses the frames of an answer, given the request's number; None if they are not its answer.
            open_: Called if no answer came; returns the request's deadline and `finish`.

        Returns:
            The result of `read`, or None if the request is still open.
        """
        is_sent = sockets.send(self._socket, frames)
        reply = sockets.receive(self._socket, most=4, wait=True) if is_sent else None
        result = None if reply is None else read(reply, number)
        if result is not None:
            self.heard_at = time.monotonic()
            return result
        self._asked_at = now
        call = self._calls.start(number, frames, *open_(), now)
        if is_sent:
            self._calls.sent(call, now)
        if reply is not None:
            self._take(reply)
        return None

    def apply_welcome(self, header: MessageHeader, welcome: messages.Welcome) -> None:
        """Apply a WELCOME: later requests carry its run, home, table and schema, and respect the peer's size limit."""
        self.run, self.home = header.run, header.home
        self.fingerprint, self.table = header.fingerprint, welcome.table
        self.longest = min(
            self._limits.tuning.request_bytes, welcome.limits.get("request_bytes", self._limits.tuning.request_bytes)
        )

    def drop(self, number: int) -> None:
        """Forget a request without a call of its `finish`; an answer that comes later is ignored."""
        self._calls.take(number)

    def pump(self) -> None:
        """Send requests that are due, expire those past their deadline, and replace a socket that gets no replies."""
        now = time.monotonic()
        for call in self._calls.expired(now):
            call.finish(self._timeout(call, now))
        self._notice_endings()
        self._look_after_link(now)
        if not len(self._calls) and not self._is_blocked and not self.link.is_outdated:
            return  # nearly always, for the many channels of a proxy
        if now >= self._renew_at or self.link.is_outdated:
            self._poller.drop(self._socket)
            self._socket = self._open()
            self._renewed_at = now
            self.renewals += 1
        due = self._calls.due_requests(now)
        blocked = bool(due) and self._is_unknown and not self._introduce()
        for call in () if blocked else due:
            if not sockets.send(self._socket, call.frames):
                blocked = True
                break
            self._calls.sent(call, now)
        if blocked != self._is_blocked:
            self._is_blocked = blocked
            self._poller.watch(self._socket, reading=True, writing=blocked)

    def _notice_endings(self) -> None:
        """Take connection events: the next message goes to the connection known now, or after HELLO to a newer one."""
        if self._introduces and self.link.monitor is not None:
            self.link.read_events()
            self._is_unknown = self._is_unknown or self.link.is_down or self.link.connections != self._seen

    def _introduce(self) -> bool:
        """Send HELLO with this client's receive limits, before the first request of a connection, since the peer may
        have restarted. Returns True if it was sent; its answer is ignored.
        """
        hello = hello_with_limits(messages.Hello(role="client"), self._limits)
        facts: dict[str, Any] = {"client": self._client, "sequence": next(self._numbers), "home": self.home}
        self._is_unknown = not sockets.send(self._socket, [b"", *encode(hello, **facts)])
        return not self._is_unknown

    def _look_after_link(self, now: float) -> None:
        link = self.link
        if link.denied is not None and self._denied_since == float("inf"):
            _log.warning("%s", link.denied)
        self._denied_since = min(self._denied_since, now) if link.denied is not None else float("inf")
        if link.connections != self._seen:
            self.connections += link.connections - self._seen
            self._is_unknown = self._introduces
            self._seen = link.connections
            self._calls.resend_lost(max(link.lost_at, self._renewed_at), now)
        if link.address != self._address:
            self.renewals += bool(self._address)
            self._address = link.address

    def next_time(self) -> float:
        """Return the time when `pump` has something to do; while the socket has no room, only expiry and renewal."""
        due = self._calls.next_deadline() if self._is_blocked else self._calls.next_time()
        return min(due, self._renew_at)

    def tick(self, ready: dict[object, int]) -> None:
        """Take up to `MAX_PER_TURN` received replies, then call `pump`."""
        if ready.get(self._socket, 0) & sockets.READABLE:
            for _ in range(MAX_PER_TURN):
                frames = sockets.receive(self._socket, most=4)
                if frames is None:
                    break
                self._take(frames)
                if not len(self._calls):
                    break  # any further message is a second answer, and can wait
        self.pump()

    def take_soon(self) -> bool:
        """Wait `sockets.ANSWER_TIMEOUT` for a reply and take it. False at once if requests still wait to be sent.

        Cheaper than a wait of the poller and a `tick`, which the caller still has to take from time to time.
        """
        if self._is_blocked:
            return False
        frames = sockets.receive(self._socket, most=4, wait=True)
        if frames is not None:
            self._take(frames)
        return True

    def close(self, error: MemoireError) -> None:
        """End every open request with this error. The poller closes the socket."""
        for call in self._calls.remove_all():
            call.finish(error)

    def close_socket(self) -> None:
        """Close the socket; the owner's thread goes on without this channel."""
        self._poller.drop(self._socket)

    def _take(self, frames: list[zmq.Frame]) -> None:
        try:
            if len(frames[0]):
                raise ProtocolError("frames", "a reply must begin with an empty frame")
            is_small = len(frames[-1]) < LARGE_PAYLOAD
            message = parse(frames[1:], self._limits, verify_payload=is_small)
            if not (is_small or message.payload is None or isinstance(message.body, messages.Chunk)):
                check_payload(message.payload, message.header.payload_checksum)  # a chunk's copy is checked
            if message.header.client != self._client:
                raise ProtocolError("client", "the reply is for another client")
        except ProtocolError as error:
            self.refused[error.code] += 1
            if error.code in FINAL:
                self._end_call(frames[1:], error)
            return
        self.heard_at = time.monotonic()
        call = self._calls.take(message.header.sequence)
        if call is None:
            return  # a second answer, to a resend
        if isinstance(message.body, messages.Refusal):
            call.finish(Refused(self.endpoint, message.body.code, message.body.text))
        else:
            call.finish(message)

    def _end_call(self, frames: list[zmq.Frame], error: ProtocolError) -> None:
        """End the request that an unreadable reply answers, since a resend would bring the same reply."""
        header = peek(frames)
        if header is not None and header.client == self._client:
            call = self._calls.take(header.sequence)
            if call is not None:
                text = f"the reply was rejected: {error.detail}" if error.code in TOO_LARGE else error.detail
                call.finish(Refused(self.endpoint, error.code, text))

    def _timeout(self, call: PendingRequest, now: float) -> MemoireTimeout:
        sends = "It could not be sent: no peer is connected."
        if call.sends:
            sends = f"It was sent {call.sends} time{'s' * (call.sends > 1)}."
        advice = f"{sends} {self.link.explain(probe=False)}"
        return MemoireTimeout("reply", self.endpoint, now - call.started, advice)


def open_channels(
    channels: dict[str, Channel],
    urls: Iterable[str],
    worker: Worker,
    context: Context,
    *,
    client: bytes,
    limits: Limits,
    keys: Keys | None,
    numbers: Iterator[int] | None = None,
) -> None:
    """Open a channel to each address and add it to `channels`, which the worker closes at its end. Call before `start`.

    Args:
        client: Id of the requesting client, 16 bytes.
        numbers: One counter for the requests of all channels; None gives each channel its own.

    Raises:
        EndpointError: an address is malformed. The worker has ended.
        KeyFileError: the keys cannot be used. The worker has ended.
    """
    facts: dict[str, Any] = {"client": client, "limits": limits, "keys": keys, "numbers": numbers}
    rng = random.Random(client)
    try:
        for url in urls:
            channels[url] = Channel(worker.poller, context, url, rng=rng, **facts)
    except BaseException:
        worker.stop(0.0)
        raise
