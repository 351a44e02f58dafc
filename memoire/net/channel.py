"""The request channel of a client, reader or proxy: numbered requests over one DEALER, sent again until answered.

Belongs to the worker that owns its socket; every method is called inside of it.

`PendingRequests` says when to send each request again, and when to give it up; it is pure, time is passed in.

A request may be sent any number of times, since each one is idempotent; its number finds it again when a reply comes.
The pause before a resend doubles and is drawn at random from its upper half, so that a thousand clients of a node
that comes back do not ask in the same instant.
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
from memoire.wire.receivers import Receiver, introduced

from . import sockets
from .link import Link, dial
from .poller import Poller
from .sockets import Context, Socket
from .thread import Worker

_log = logging.getLogger(__name__)

MAX_PER_TURN = 64
RENEW_TIMEOUT = 5.0
"""Seconds without a word, while an answer is awaited, after which the socket is made anew, times 1 to 1.5: ZeroMQ never
reconnects one whose address was for a moment somebody else's, who did not understand it."""
DENIED_TIMEOUT = 2.5
"""Seconds without being let in after which somebody is told: a key that was authorized a moment ago is known then."""
ATTEMPT_TIMEOUT = 12.0
"""Seconds between two signs that ZeroMQ is trying to connect: its longest pause and longest attempt, and more."""
FINAL = "version", *TOO_LARGE
"""Codes of replies that would be the same if they came again."""
LARGE_PAYLOAD = 1 << 16
"""Bytes of a payload from which on one more pass over it is worth avoiding."""


@dataclass(slots=True)
class PendingRequest:
    """One request on its way; belongs to the thread that owns the socket."""

    number: int
    frames: Sequence[Any]
    deadline: float
    """When to give up; infinity for what must never be given up."""
    finish: Callable[[Any], None]
    """Called once, with the reply or an exception."""
    next_send: float
    started: float
    patience: float = 0.0
    """Least seconds before it is sent again, other than after a lost connection."""
    sends: int = 0
    sent_at: float = float("-inf")


class PendingRequests:
    """The requests of one channel that have no reply yet."""

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
        """Keep a request until it is answered; it is due at once."""
        call = self._calls[number] = PendingRequest(number, frames, deadline, finish, now, now, patience)
        return call

    def due(self, now: float) -> list[PendingRequest]:
        """Those to send now, in the order of their numbers."""
        return [call for call in self._calls.values() if call.next_send <= now < call.deadline]

    def sent(self, call: PendingRequest, now: float) -> None:
        """The socket took it; sets when it is sent again."""
        pause = min(self._resend_most, self._resend_after * 2.0 ** min(call.sends, 30))
        call.next_send = now + max(call.patience, pause if call.sends == 0 else pause * self._rng.uniform(0.5, 1.0))
        self.resends += call.sends > 0
        call.sends += 1
        call.sent_at = now

    def lost(self, before: float, now: float) -> None:
        """Have everything sent again now that was sent until `before`: the connection was lost then, and is back."""
        for call in self._calls.values():
            if call.sent_at <= before:
                call.next_send = min(call.next_send, now)

    def take(self, number: int) -> PendingRequest | None:
        """The call that this reply answers, which is over now; None when it has been answered or given up."""
        return self._calls.pop(number, None)

    def expired(self, now: float) -> list[PendingRequest]:
        """Those whose deadline has passed; they are over."""
        if not self._calls:
            return []
        gone = [call for call in self._calls.values() if now >= call.deadline]
        for call in gone:
            del self._calls[call.number]
        return gone

    def all(self) -> list[PendingRequest]:
        """Every open call; they are over (the channel closes)."""
        gone = list(self._calls.values())
        self._calls.clear()
        return gone

    def next_time(self) -> float:
        """When something is due or expires next; infinity when nothing is open."""
        if not self._calls:
            return float("inf")
        return min([min(call.next_send, call.deadline) for call in self._calls.values()])

    def next_deadline(self) -> float:
        """When the next one expires; infinity when none does."""
        return min((call.deadline for call in self._calls.values()), default=float("inf"))


class Channel:
    """Requests to one address, with the facts that stand in each header.

    Args:
        client: Id of whoever asks; replies for another one are refused.
        numbers: Where sequence numbers come from: one counter for all messages of a client.
        keys: Of this process; None connects without.
    """

    def __init__(
        self,
        doors: Poller,
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
        """Bytes that a frame of a request may have: a longer one would cut the connection, and what is behind it."""
        self.refused: Counter[str] = Counter()
        """Replies that were refused, by code."""
        self.heard_at = 0.0
        """When the newest reply came, by time.monotonic(); 0 when none has."""
        self.renewals = 0
        """How often the socket was made anew or its name led elsewhere; the owner's other sockets to the same node have
        to follow."""
        self.connections = 0
        """How often a connection came about."""
        self._client = client
        self._introduces = bool(Receiver.with_limits(limits).takes)  # by a HELLO in front of each connection's requests
        self._is_unknown = self._introduces  # whether the other side may not know what this client takes
        self._limits = limits
        self._keys = keys
        self._doors = doors
        self._context = context
        self._rng = rng
        self._numbers = numbers or itertools.count(1)
        self.link: Link
        """Where it is connected, and why not; other sockets of the owner join it until `renewals` changes. Any thread
        may read its attributes."""
        self._calls = PendingRequests(limits.tuning.resend_after, limits.tuning.resend_most, rng)
        self._renewed_at = float("-inf")
        self._denied_since = float("inf")
        self._socket = self._open()

    def _open(self) -> Socket:
        made = sockets.request_client(self._context, self._limits.reply_bytes)
        former = getattr(self, "link", None)
        self.link = dial(self._doors, made, self.endpoint, watch=True, keys=self._keys)
        if former is not None:
            self.link.denied = former.denied  # until it is known better
        self._address, self._seen = self.link.address, 0
        self._is_blocked = False
        self._patience = RENEW_TIMEOUT * self._rng.uniform(1.0, 1.5)
        self._asked_at = time.monotonic()  # since when somebody waits for an answer
        return self._doors.add(made)

    @property
    def _renew_at(self) -> float:
        """When to give the socket up, should nobody answer until then."""
        if not len(self._calls):
            return float("inf")
        give_up = max(self.heard_at, self._asked_at) + self._patience
        # While ZeroMQ goes on trying, a new socket could do no better.
        tries = self.link.is_down and not self.link.has_given_up
        return max(give_up, self.link.stirred_at + ATTEMPT_TIMEOUT) if tries else give_up

    @property
    def denied_for_good(self) -> AuthError | None:
        """Why this process is not let in there, once it has been so for a while. From any thread."""
        is_long = time.monotonic() - self._denied_since >= DENIED_TIMEOUT
        return self.link.denied if is_long else None

    @property
    def resends(self) -> int:
        """Requests that were sent again."""
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
            deadline: When to give up, by time.monotonic(); infinity resends for ever.
            payload_checksum: XXH3 of the payload, if it is known.
            home: Which server it is for, where that is not the channel's own.
            sequence: Its number, where the caller had to know it before.
            patience: Least seconds before it is sent again, where a second answer would cost much.
        """
        if isinstance(body, messages.Hello):
            body = introduced(body, self._limits)
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
        except (TypeError, ValueError, OverflowError) as error:  # a fault of the caller's checks: others go on
            text = f"{type(body).__name__.upper()} was not sent, since it cannot be encoded: {error}"
            self._doors.post(lambda: finish(Refused(self.endpoint, "tail", text)))
            return number
        if len(frames[0]) > self.longest or len(frames[-1]) > self.longest:
            size = max(len(frame) for frame in frames)
            text = (
                f"{type(body).__name__.upper()} of {size} bytes was not sent; {self.longest} are taken (request_bytes)"
            )
            self._doors.post(lambda: finish(Refused(self.endpoint, "too_large", text)))
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
        """Whether `ask_at_once` may be called: it is connected, as far as is known, and nothing waits here."""
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
        """Send a whole request and wait `sockets.ANSWER_TIMEOUT` for its answer. It is an open request, as those of
        `ask`, only if that is not there by then: to keep one costs more than to send it. Only while `is_free`.

        Args:
            read: Makes something of the frames of an answer, or None if it cannot.
            open_: Called if there is nothing yet; returns the request's deadline and `finish`.

        Returns:
            What `read` has made, or None.
        """
        is_sent = sockets.send(self._socket, frames)
        came = sockets.receive(self._socket, most=4, wait=True) if is_sent else None
        found = None if came is None else read(came, number)
        if found is not None:
            self.heard_at = time.monotonic()
            return found
        self._asked_at = now
        call = self._calls.start(number, frames, *open_(), now)
        if is_sent:
            self._calls.sent(call, now)
        if came is not None:
            self._take(came)
        return None

    def learned(self, header: MessageHeader, told: messages.Welcome) -> None:
        """A WELCOME came: requests carry its facts from now on, and are no longer than the other side takes."""
        self.run, self.home = header.run, header.home
        self.fingerprint, self.table = header.fingerprint, told.table
        self.longest = min(
            self._limits.tuning.request_bytes, told.limits.get("request_bytes", self._limits.tuning.request_bytes)
        )

    def drop(self, number: int) -> None:
        """Forget a request: its answer no longer matters."""
        self._calls.take(number)

    def pump(self) -> None:
        """Send what is due and end what is overdue."""
        now = time.monotonic()
        for call in self._calls.expired(now):
            call.finish(self._timeout(call, now))
        self._notice_endings()
        self._look_after_link(now)
        if not len(self._calls) and not self._is_blocked and not self.link.is_outdated:
            return  # nearly always, of the many channels of a proxy
        if now >= self._renew_at or self.link.is_outdated:
            self._doors.drop(self._socket)
            self._socket = self._open()
            self._renewed_at = now
            self.renewals += 1
        due = self._calls.due(now)
        blocked = bool(due) and self._is_unknown and not self._introduce()
        for call in () if blocked else due:
            if not sockets.send(self._socket, call.frames):
                blocked = True
                break
            self._calls.sent(call, now)
        if blocked != self._is_blocked:
            self._is_blocked = blocked
            self._doors.watch(self._socket, reading=True, writing=blocked)

    def _notice_endings(self) -> None:
        """Whatever is sent after this comes to the connection that was there last, or after a HELLO to a newer one."""
        if self._introduces and self.link.monitor is not None:
            self.link.heard()
            self._is_unknown = self._is_unknown or self.link.is_down or self.link.connections != self._seen

    def _introduce(self) -> bool:
        """Tell the other side what this client takes, before it answers the first request of a connection: it may have
        begun again meanwhile. Returns whether that was sent; nobody waits for the answer.
        """
        hello = introduced(messages.Hello(role="client"), self._limits)
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
            self._calls.lost(max(link.lost_at, self._renewed_at), now)
        if link.address != self._address:
            self.renewals += bool(self._address)
            self._address = link.address

    def next_time(self) -> float:
        """When `pump` has something to do; while nobody is connected, when a request expires."""
        due = self._calls.next_deadline() if self._is_blocked else self._calls.next_time()
        return min(due, self._renew_at)

    def turn(self, ready: dict[object, int]) -> None:
        """Take the replies that came, then pump."""
        if ready.get(self._socket, 0) & sockets.READABLE:
            for _ in range(MAX_PER_TURN):
                frames = sockets.receive(self._socket, most=4)
                if frames is None:
                    break
                self._take(frames)
                if not len(self._calls):
                    break  # whatever else came is a second answer, and has time
        self.pump()

    def take_soon(self) -> bool:
        """Wait `sockets.ANSWER_TIMEOUT` for a reply and take it. False at once if requests still wait to be sent.

        It costs less than to wait by the doors and take a `turn`, which has to follow now and then.
        """
        if self._is_blocked:
            return False
        frames = sockets.receive(self._socket, most=4, wait=True)
        if frames is not None:
            self._take(frames)
        return True

    def close(self, error: MemoireError) -> None:
        """End every open request with this error. The socket is closed by the doors."""
        for call in self._calls.all():
            call.finish(error)

    def leave(self) -> None:
        """Close the socket too: the owner goes on without this channel."""
        self._doors.drop(self._socket)

    def _take(self, frames: list[zmq.Frame]) -> None:
        try:
            if len(frames[0]):
                raise ProtocolError("frames", "a reply begins with an empty frame")
            is_small = len(frames[-1]) < LARGE_PAYLOAD
            message = parse(frames[1:], self._limits, verify_payload=is_small)
            if not (is_small or message.payload is None or isinstance(message.body, messages.Chunk)):
                check_payload(message.payload, message.header.payload_checksum)  # a chunk's is compared as it is copied
            if message.header.client != self._client:
                raise ProtocolError("client", "a reply for somebody else")
        except ProtocolError as error:
            self.refused[error.code] += 1
            if error.code in FINAL:
                self._end_call(frames[1:], error)
            return
        self.heard_at = time.monotonic()
        call = self._calls.take(message.header.sequence)
        if call is None:
            return  # answered before: a resend was
        if isinstance(message.body, messages.Refused):
            call.finish(Refused(self.endpoint, message.body.code, message.body.text))
        else:
            call.finish(message)

    def _end_call(self, frames: list[zmq.Frame], error: ProtocolError) -> None:
        """The other side never answers this request in words that can be read here."""
        header = peek(frames)
        if header is not None and header.client == self._client:
            call = self._calls.take(header.sequence)
            if call is not None:
                text = f"its reply was not taken: {error.detail}" if error.code in TOO_LARGE else error.detail
                call.finish(Refused(self.endpoint, error.code, text))

    def _timeout(self, call: PendingRequest, now: float) -> MemoireTimeout:
        tries = f"It was sent {call.sends} times." if call.sends else "It could not be sent: nobody is connected there."
        advice = f"{tries} {self.link.explain(probe=False)}"
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
    """Put a channel to each address into `channels`, which the worker closes at its end; before the worker begins.

    Args:
        client: 16 bytes, the id of whoever asks.
        numbers: One counter for the requests of all of them; None: one each.

    Raises:
        EndpointError: an address is malformed. The worker has ended.
        KeyFileError: the keys cannot be used. Likewise.
    """
    facts: dict[str, Any] = {"client": client, "limits": limits, "keys": keys, "numbers": numbers}
    rng = random.Random(client)
    try:
        for url in urls:
            channels[url] = Channel(worker.doors, context, url, rng=rng, **facts)
    except BaseException:
        worker.stop(0.0)
        raise
