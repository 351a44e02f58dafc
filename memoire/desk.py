"""What a server answers: every request to its reply, with ledger, log, models, parameters and feedback behind it.

No socket: `answer` takes a parsed message and returns a body and a payload, so that a duplicate, a stranger or an
impossible number is tested without a network. Every request may come any number of times. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from . import cache, wire
from .batch import ID
from .errors import MemoireError, ProtocolError
from .ledger import Account, Ledger
from .limits import Limits
from .logbook import Entry, Logbook
from .models import Assembly, Model, ModelStore, StaleVersion, make
from .parameters import Parameters
from .pool import Pool
from .schema import Schema
from .version import SOFTWARE

MOST_UPLOADS = 16
MOST_READERS = 64
KEPT_REPLIES = 64
DRAWS_IN_FLIGHT = 2
"""Draws that a reader may have on their way to one server: the replies to these are kept, so that a resend eats
nothing.
"""
FEEDBACK_SAMPLES = 1 << 16
"""Samples of feedback that wait for one client; the oldest are lost (and counted) beyond."""
FEEDBACK_PER_REPLY = 1 << 14


class Reply(NamedTuple):
    """Body and payload of an answer, and the header's fields that differ from the request's."""

    body: wire.Body
    payload: Any = None
    changed: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class ClientFacts:
    """What a client said of itself when it came."""

    role: str
    label: int
    host: str
    pid: int
    software: str


@dataclass(slots=True)
class _Waiting:
    """Feedback for one client: pieces of (number of the piece, entry numbers [n], TD errors [n])."""

    pieces: deque[tuple[int, NDArray[np.int64], NDArray[np.float32]]] = field(default_factory=deque)
    samples: int = 0
    number: int = 0


class Desk:
    """The state of one server, and the answers that follow from it.

    Args:
        endpoints: Where clients connect to; read at each HELLO, since workers may be added.
        on_lines: Called with log lines that are new, in order.
        on_model: Called when a model is new.
        clock: Seconds since 1970.
    """

    def __init__(
        self,
        *,
        schema: Schema,
        parameters: Parameters,
        pool: Pool,
        run: str,
        name: str,
        limits: Limits,
        max_step: int = 0,
        endpoints: Callable[[], wire.Endpoints] = wire.Endpoints,
        on_lines: Callable[[list[Entry]], None] = lambda lines: None,
        on_model: Callable[[Model], None] = lambda model: None,
        clock: Callable[[], float],
    ) -> None:
        self.schema, self.pool, self.limits = schema, pool, limits
        self.run_name, self.name = run, name
        self.run, self.home = wire.name_hash(run), wire.name_hash(name)
        self.fingerprint = schema.fingerprint
        self.max_step = max_step
        self.epoch = time.time_ns()
        self.parameters, self.parameters_version = parameters, 1
        self.ledger, self.logbook, self.models = Ledger(epoch=self.epoch), Logbook(), ModelStore(limits.model_bytes)
        self.finished = False
        self._told: set[bytes] = set()  # clients that a reply told so
        self.facts: dict[bytes, ClientFacts] = {}
        self.refused: Counter[str] = Counter()
        """Messages that were refused, by code."""
        self.feedback_lost = 0
        """Priorities whose client is not known here, or that waited too long for it."""
        self.feedback_given = 0
        self.lock = threading.RLock()  # everything above and below, except the pool, which has its own
        self._granting = threading.Lock()  # one at a time of the requests that must not be granted twice
        self._waiting: dict[bytes, _Waiting] = {}
        self._uploads: OrderedDict[tuple[bytes, str], Assembly] = OrderedDict()
        # The newest replies to each client's requests that would change something if they were granted twice.
        self._given: OrderedDict[tuple[bytes, wire.Type], OrderedDict[int, Reply]] = OrderedDict()
        self._endpoints, self._on_lines, self._on_model, self._clock = endpoints, on_lines, on_model, clock
        self._answers: dict[type[wire.Body], Callable[[wire.Header, Any, Any], Reply]] = {
            wire.Hello: self._hello,
            wire.Update: self._update,
            wire.Fetch: self._fetch,
            wire.Publish: self._once(self._publish, KEPT_REPLIES),
            wire.Sums: self._sums,
            wire.Draw: self._once(self._draw, DRAWS_IN_FLIGHT),  # batches: only as many as can be on their way
            wire.Feedback: self._once(self._feedback, KEPT_REPLIES),
            wire.Control: self._control,
        }

    def answer(self, message: wire.Message) -> Reply:
        """The reply to a request; REFUSED where it cannot be granted. Never raises for what a peer sent."""
        header = message.header
        answer = self._answers.get(type(message.body))
        try:
            if answer is None:
                raise ProtocolError("unexpected", f"{header.type.name} is no request")
            if header.client == wire.NO_CLIENT:
                raise ProtocolError("client", "a request needs a client id")
            if header.run not in (0, self.run):
                raise ProtocolError("run", f"this server counts run {self.run_name!r}; say HELLO again")
            return answer(header, message.body, message.payload)
        except ProtocolError as error:
            return self.refuse(error)

    def refuse(self, error: ProtocolError) -> Reply:
        """Count a refusal and say it."""
        with self.lock:
            self.refused[error.code if error.code in wire.CODES else "other"] += 1
        return Reply(wire.Refused(code=error.code, text=error.detail[:1000]))

    def _once(
        self, grant: Callable[[wire.Header, Any, Any], Reply], kept: int
    ) -> Callable[[wire.Header, Any, Any], Reply]:
        """Grant each number once; a resend gets the reply that was given, and one older than those kept is refused."""

        def answer(header: wire.Header, body: Any, payload: Any) -> Reply:
            key, number = (header.client, header.type), header.sequence
            with self._granting:
                given = self._given.setdefault(key, OrderedDict())
                self._given.move_to_end(key)
                while len(self._given) > MOST_READERS:
                    self._given.popitem(last=False)
                if number in given:
                    return given[number]
                if len(given) == kept and number < min(given):
                    raise ProtocolError("missing", f"request {number} was overtaken by {min(given)}")
                reply = given[number] = grant(header, body, payload)
                while len(given) > kept:
                    del given[min(given)]
                return reply

        return answer

    # ------------------------------------------------------------------------------------------------ clients

    def _hello(self, header: wire.Header, body: wire.Hello, _: Any) -> Reply:
        since = 0
        with self.lock:
            if body.role == "actor":
                since = self.ledger.account(header.client, self._clock()).since
                self.facts[header.client] = ClientFacts(body.role, body.label, body.host, body.pid, body.software)
                self._tell(header.client)
            codecs = [codec for codec in body.codecs if codec in cache.codecs()]
            welcome = wire.Welcome(
                schema=self.schema.to_json(),
                parameters=self.parameters.to_wire(),
                parameters_version=self.parameters_version,
                max_step=self.max_step,
                run_name=self.run_name,
                home_name=self.name,
                epoch=self.epoch,
                servers=[self.name],
                endpoints=self._endpoints(),
                credit=self.credit(),
                models=self.models.versions(),
                codecs=codecs,
                limits=self._stated_limits(),
                finished=self.finished,
                software=SOFTWARE,
                since=since,
            )
        return Reply(welcome, None, {"run": self.run, "home": self.home, "fingerprint": self.fingerprint})

    def _stated_limits(self) -> dict[str, int]:
        names = ("message_bytes", "request_bytes", "tail_bytes", "model_bytes", "model_chunk")
        return {name: getattr(self.limits, name) for name in names}

    def credit(self) -> int:
        """Bytes that each client may have on the way: its limit, or its share of what is held where that is less."""
        return max(1, min(self.limits.credit, self.limits.held_bytes // max(1, len(self.ledger))))

    def _update(self, header: wire.Header, body: wire.Update, _: Any) -> Reply:
        now = self._clock()
        with self.lock:
            account = self.ledger.report(header.client, header.sequence, body, now)
            taken = self.logbook.take(header.client, body.lines, now)
            if taken:
                self._on_lines(taken)
            # Pieces are numbered anew at each start.
            feedback = self._feedback_for(header.client, body.feedback_through if body.epoch == self.epoch else 0)
            reply = self._updated(account, body)
        self.pool.sums(header.client, header.sequence, body.total_weight, body.positives, body.minimum)
        if feedback is None:
            return Reply(reply)
        return Reply(msgspec.structs.replace(reply, feedback_through=feedback[0]), feedback[1])

    def _tell(self, client: bytes) -> None:
        """Remember who hears in this reply that the run is over. Under the lock."""
        if self.finished:
            self._told.add(client)

    def untold(self, within: float) -> int:
        """Clients heard from in the last `within` seconds that do not know yet that the run is over."""
        since = self._clock() - within
        with self.lock:
            if not self.finished:
                return 0
            return sum(account.last_seen >= since and account.client not in self._told for account in self.ledger)

    def _updated(self, account: Account, body: wire.Update) -> wire.Updated:
        self._tell(account.client)
        is_older = body.parameters_version != self.parameters_version
        return wire.Updated(
            epoch=self.epoch,
            episodes=account.report.episodes,
            steps=account.report.steps,
            lines_through=self.logbook.through(account.client),
            ended_through=account.ended_through,
            caches=account.accepted_caches,
            received_bytes=account.received_bytes,
            rejected=dict(account.rejected),
            lost=account.lost_caches,
            lost_bytes=account.lost_bytes,
            credit=self.credit(),
            parameters_version=self.parameters_version,
            parameters=self.parameters.to_wire() if is_older else None,
            models=self.models.versions(),
            run_name=self.run_name,
            finished=self.finished,
            time=max(0.0, self._clock()),
        )

    # ------------------------------------------------------------------------------------------------ caches

    def arrived(self, header: wire.Header, body: wire.Cache, payload: Any) -> int:
        """Check a cache and hold it; returns its samples. A refused one is counted for its client.

        Raises:
            ProtocolError: it was not taken, and why.
        """
        client, size = header.client, header.payload_bytes
        try:
            self._check_origin(header)
            held = cache.check(payload, self.pool.layout, self.limits, checksum=header.payload_checksum)
            self.pool.add(client, header.sequence, held)
        except ProtocolError as error:
            with self.lock:
                self.refused[error.code] += 1
                if client != wire.NO_CLIENT and header.run in (0, self.run):
                    account = self._arrived(client, size, body)
                    if account is not None:
                        self.ledger.rejected(account, error.code)
            raise
        with self.lock:
            account = self._arrived(client, size, body)
            if account is not None:
                self.ledger.accepted(account, size, held.samples)
        return int(held.samples)

    def _arrived(self, client: bytes, size: int, body: wire.Cache) -> Account | None:
        return self.ledger.arrived(client, size, self._clock(), body.number, body.pushed_bytes, body.since)

    def _check_origin(self, header: wire.Header) -> None:
        if header.client == wire.NO_CLIENT:
            raise ProtocolError("client", "a cache needs a client id")
        if header.run not in (0, self.run):
            raise ProtocolError("run", f"a cache of another run; this server counts {self.run_name!r}")
        if header.fingerprint != self.fingerprint:
            raise ProtocolError(
                "schema", f"made for schema {header.fingerprint:016x}, this server stores {self.fingerprint:016x}"
            )

    # ------------------------------------------------------------------------------------------------ models

    def publish(self, topic: str, content: bytes | bytearray | memoryview | str, version: int = 0) -> Model:
        """Store a new version and tell everyone."""
        if not isinstance(content, (str, bytes, bytearray, memoryview)):
            raise TypeError(f"content must be bytes or str, got {type(content).__name__}; serialize it first")
        size = len(content)
        if size > self.limits.model_bytes:
            raise ValueError(f"a model of {size} bytes; {self.limits.model_bytes} are allowed (limits.model_bytes)")
        made = make(topic, content, 0)  # hashed here: nobody else has to wait for that
        with self.lock:
            model = self.models.add(made, version)
            self._on_model(model)
        return model

    def _publish(self, header: wire.Header, body: wire.Publish, payload: Any) -> Reply:
        with self.lock:
            known = self.models.get(body.topic, body.version) if body.version else None
            if known is not None and known.digest == body.sha256:  # published again, by who cannot know that it is here
                self._uploads.pop((header.client, body.topic), None)
                return Reply(wire.Published(topic=body.topic, received=body.size, version=body.version))
            assembly = self._upload(header.client, body)
            whole = assembly.add(body.offset, memoryview(b"" if payload is None else payload).cast("B"))
            if whole is None:
                return Reply(wire.Published(topic=body.topic, received=assembly.offset))
            del self._uploads[header.client, body.topic]
            try:
                model = self.models.add(whole, body.version)
            except (StaleVersion, ValueError) as error:
                raise ProtocolError("topic", str(error)) from error
            self._on_model(model)
        return Reply(wire.Published(topic=body.topic, received=body.size, version=model.version))

    def _upload(self, client: bytes, body: wire.Publish) -> Assembly:
        key = (client, body.topic)
        assembly = self._uploads.get(key)
        if assembly is None or assembly.digest != body.sha256:
            if body.offset:
                raise ProtocolError("missing", f"a stretch at {body.offset} of a model whose beginning is not here")
            assembly = Assembly(body.topic, 0, body.size, body.sha256, body.text, byte_limit=self.limits.model_bytes)
            self._uploads[key] = assembly
        self._uploads.move_to_end(key)
        while len(self._uploads) > MOST_UPLOADS or (
            len(self._uploads) > 1 and sum(kept.offset for kept in self._uploads.values()) > self.limits.model_bytes
        ):
            self._uploads.popitem(last=False)  # begun and not gone on with: its publisher begins again, if it is there
        return assembly

    def _fetch(self, header: wire.Header, body: wire.Fetch, _: Any) -> Reply:
        with self.lock:
            model = self.models.serve(body.topic, body.version)
        return chunk_of(model, body, self.limits)

    # ------------------------------------------------------------------------------------------------ learners

    def configure(self, changes: Mapping[str, Any]) -> Parameters:
        """Change parameters for everyone; clients hear of it in the reply to their next UPDATE."""
        with self.lock:
            parameters = self.parameters.replace(**changes)
            parameters.check_for(self.schema)
            if parameters != self.parameters:
                self.parameters = parameters
                self.parameters_version += 1
                self.pool.configure(parameters)
            return parameters

    def finish(self) -> None:
        """The run is over: clients hear of it in their next reply."""
        with self.lock:
            self.finished = True

    def _control(self, header: wire.Header, body: wire.Control, _: Any) -> Reply:
        try:
            if body.parameters:
                self.configure(body.parameters)
        except (MemoireError, TypeError) as error:
            raise ProtocolError("parameters", str(error)) from error
        if body.finish:
            self.finish()
        return Reply(wire.Taken(parameters_version=self.parameters_version, finished=self.finished))

    def hand_on(self, ids: NDArray[Any], td_errors: Any) -> int:
        """Keep TD errors of samples for their owners, who fetch them with their next UPDATE; returns how many were
        lost.

        Args:
            ids: `ID` [B], as a batch has them.
            td_errors: [B], finite.
        """
        ids = np.asarray(ids)
        errors = np.ascontiguousarray(td_errors, np.float32)
        if ids.ndim != 1 or errors.shape != ids.shape:
            raise ValueError(f"{len(ids)} ids need as many TD errors, got shape {errors.shape}")
        if not np.isfinite(errors).all():
            raise ValueError(f"{(~np.isfinite(errors)).sum()} of {len(errors)} TD errors are not finite")
        owners, group = np.unique(ids["client"], axis=0, return_inverse=True)
        order = np.argsort(group.ravel(), kind="stable")
        bounds = np.searchsorted(group.ravel()[order], np.arange(len(owners) + 1))
        lost = 0
        with self.lock:
            for owner, start, end in zip(owners, bounds[:-1], bounds[1:], strict=True):
                rows = order[start:end]
                lost += self._keep(owner.astype("<u8").tobytes(), ids["number"][rows].astype(np.int64), errors[rows])
            self.feedback_given += len(ids)
            self.feedback_lost += lost
        return lost

    def _keep(self, client: bytes, numbers: NDArray[np.int64], errors: NDArray[np.float32]) -> int:
        if client not in self.ledger:
            return len(numbers)
        waiting = self._waiting.setdefault(client, _Waiting())
        waiting.number += 1
        waiting.pieces.append((waiting.number, numbers, errors))
        waiting.samples += len(numbers)
        lost = 0
        while waiting.samples > FEEDBACK_SAMPLES and len(waiting.pieces) > 1:
            oldest = len(waiting.pieces.popleft()[1])
            waiting.samples -= oldest
            lost += oldest
        return lost

    def _feedback_for(self, client: bytes, through: int) -> tuple[int, Any] | None:
        """Number and container of what the client has not applied yet."""
        waiting = self._waiting.get(client)
        if waiting is None:
            return None
        while waiting.pieces and waiting.pieces[0][0] <= through:
            waiting.samples -= len(waiting.pieces.popleft()[1])
        chosen: list[tuple[int, NDArray[np.int64], NDArray[np.float32]]] = []
        samples = 0
        for piece in waiting.pieces:
            samples += len(piece[1])
            if chosen and samples > FEEDBACK_PER_REPLY:
                break
            chosen.append(piece)
        if not chosen:
            return None
        numbers = np.concatenate([piece[1] for piece in chosen])
        errors = np.concatenate([piece[2] for piece in chosen])
        ids = np.empty(len(numbers), ID)
        ids["client"] = np.frombuffer(client, "<u8")
        ids["number"] = numbers
        return chosen[-1][0], cache.pack_feedback(self.schema, ids, errors, now=self._clock())

    def _feedback(self, header: wire.Header, body: wire.Feedback, payload: Any) -> Reply:
        samples = lost = 0
        with self.lock:
            for client, (numbers, errors) in cache.read_feedback(payload, self.schema, self.limits).items():
                samples += len(numbers)
                lost += self._keep(client, numbers.astype(np.int64), errors.astype(np.float32))
            self.feedback_given += samples
            self.feedback_lost += lost
        return Reply(wire.Taken(samples=samples - lost, lost=lost, parameters_version=self.parameters_version))

    # ------------------------------------------------------------------------------------------------ readers

    def _sums(self, header: wire.Header, body: wire.Sums, _: Any) -> Reply:
        rows = self.pool.reserve(header.client, body.reserve, body.elsewhere)
        return Reply(wire.Summed(epoch=self.epoch, clients=rows.tobytes(), finished=self.finished))

    def _draw(self, header: wire.Header, body: wire.Draw, _: Any) -> Reply:
        payload = self.pool.draw_counts(header.client, wire.unpack_counts(body.counts), now=self._clock())
        rows = self.pool.reserve(header.client, body.reserve, body.elsewhere)
        return Reply(wire.Drawn(epoch=self.epoch, clients=rows.tobytes(), finished=self.finished), payload)


def chunk_of(model: Model | None, body: wire.Fetch, limits: Limits) -> Reply:
    """The stretch of a model that was asked for.

    Raises:
        ProtocolError: (code "missing") there is no such model here, or no such stretch in it.
    """
    if model is None:
        what = f"version {body.version}" if body.version else "model"
        raise ProtocolError("missing", f"no {what} of topic {body.topic!r} is here")
    if body.offset > model.size:
        raise ProtocolError("missing", f"offset {body.offset} is beyond the {model.size} bytes of {body.topic!r}")
    end = body.offset + min(body.size or limits.model_chunk, limits.model_chunk)
    chunk = wire.Chunk(
        topic=model.topic,
        version=model.version,
        size=model.size,
        sha256=model.digest,
        offset=body.offset,
        text=model.is_text,
    )
    return Reply(chunk, memoryview(model.body)[body.offset : end] if model.size > body.offset else None)
