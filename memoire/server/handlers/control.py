"""Control handler: parameters, runs and draining, as learners and operators decide. Pure.

Models handler: numbers models, publishes them after the save, and sends them chunk by chunk. Pure.

Uploads: models that arrive chunk by chunk, bounded in number and in bytes. Pure.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from memoire import arguments
from memoire.accounting.runs import Ticket
from memoire.errors import MemoireError, ParameterError, ProtocolError, WrongType
from memoire.limits import MODEL_BYTES, Limits
from memoire.models.model import (
    SMALL_BYTES,
    Model,
    ModelAssembly,
    StaleVersion,
    chunk_of,
    known_checksum,
    make,
    max_chunk_bytes,
)
from memoire.replay.parameters import Parameters
from memoire.server.state import ServerState, save_parameters
from memoire.tables.registry import Reply
from memoire.tables.table import OpenTable
from memoire.wire import messages
from memoire.wire.byte_budget import ByteHolder
from memoire.wire.frames import MessageHeader

from .accounts import FeedbackHandler

MAX_UPLOADS = 16
"""Maximum models that arrive in several chunks at the same time; a further one is refused until an upload ends."""
UPLOAD_TIMEOUT = 60.0
"""Seconds after the newest chunk for which an upload is kept; then its publisher is presumed dead."""


class Uploads:
    """Models that publishers have begun to send. An upload keeps its place until it ends or expires.

    Args:
        room: Holder that counts the whole size of each upload, together at most `limits.model_bytes`.
    """

    def __init__(self, limits: Limits, room: ByteHolder) -> None:
        self._limits, self._room = limits, room
        # Assembly and time of the newest chunk, by client and topic; oldest time first.
        self._by_topic: OrderedDict[tuple[bytes, str], tuple[ModelAssembly, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_topic)

    def receive(self, client: bytes, body: messages.Publish, payload: Any, now: float) -> tuple[int, Model | None]:
        """Take a chunk; return the number of consecutive bytes received, and the model if it is complete.

        Raises:
            ProtocolError: the model is too large, its beginning is missing, the chunk does not fit, or the whole has
                another checksum than announced: the upload is dropped, and its publisher starts again. Code "busy":
                the other uploads leave no room.
        """
        self._drop_expired(now)
        chunk = memoryview(b"" if payload is None else payload).cast("B")
        key = client, body.topic
        assembly = self._assembly(key, body, is_whole=len(chunk) == body.size)
        try:
            whole = assembly.add(body.offset, chunk)
        finally:
            if assembly.offset == assembly.size:  # all bytes came, right or wrong: no further chunk can repair them
                self.drop(*key)
        if whole is None and assembly.offset < assembly.size:
            if (known := self._by_topic.get(key)) is None or known[0] is not assembly:
                self.drop(*key)
                self._room.add(assembly.size)
            self._by_topic[key] = assembly, now
            self._by_topic.move_to_end(key)
        return assembly.offset, whole

    def _assembly(self, key: tuple[bytes, str], body: messages.Publish, *, is_whole: bool) -> ModelAssembly:
        known = self._by_topic.get(key)
        if known is not None and known[0].checksum == body.checksum:
            return known[0]
        if body.offset:
            raise ProtocolError(
                "missing", f"the chunk at byte {body.offset} belongs to no upload; send the model again from byte 0"
            )
        size, most = body.size, self._limits.model_bytes
        assembly = ModelAssembly(body.topic, 0, size, body.checksum, body.text, byte_limit=most)
        if not is_whole:
            self._check_room(key, size)
        return assembly

    def _check_room(self, key: tuple[bytes, str], size: int) -> None:
        """Raise ProtocolError if other uploads leave no room; each counts as a whole, so that all can finish."""
        others = [kept.size for other, (kept, _) in self._by_topic.items() if other != key]
        most = self._limits.model_bytes
        if others and (len(others) >= MAX_UPLOADS or sum(others) + size > most):
            text = (
                f"{len(others)} models of {sum(others)} bytes are being uploaded; one of {size} bytes does not fit: "
                f"at most {MAX_UPLOADS} uploads of {most} bytes together (model_bytes). Retry later: an upload ends, "
                f"or expires after {UPLOAD_TIMEOUT:g} s without a chunk"
            )
            raise ProtocolError("busy", text)

    def _drop_expired(self, now: float) -> None:
        while self._by_topic and now >= next(iter(self._by_topic.values()))[1] + UPLOAD_TIMEOUT:
            self.drop(*next(iter(self._by_topic)))

    def drop(self, client: bytes, topic: str) -> None:
        """Drop a client's upload for a topic."""
        gone = self._by_topic.pop((client, topic), None)
        if gone is not None:
            self._room.add(-gone[0].size)

    def clear(self) -> None:
        """Drop all uploads, at the begin of another run."""
        for key in list(self._by_topic):
            self.drop(*key)


def model_from(topic: str, content: bytes | bytearray | memoryview | str, limits: Limits) -> Model:
    """Return a model of this content, without a version. Computes the checksum; needs no lock.

    Raises:
        WrongType: the content is neither bytes nor text.
        ParameterError: it is too large, or the topic is malformed.
    """
    if not isinstance(content, (str, bytes, bytearray, memoryview)):
        raise WrongType("content", "bytes or str", type(content).__name__, "Serialize it first.")
    size = len(content)
    most = limits.model_bytes or MODEL_BYTES
    if size > most:
        raise ParameterError.with_text(
            f"The model has {size} bytes; the limit is {most} (limits.model_bytes). Nothing was published."
        )
    return make(topic, content, 0)


class ModelsHandler:
    """Handler of models: publishes those of local and remote learners, and sends them to clients.

    Args:
        on_model: Called with each new model, after its save.
        after: Schedules a call, with the lock held, after the save of all changes so far.
    """

    def __init__(
        self, state: ServerState, *, on_model: Callable[[Model], None], after: Callable[[Ticket], None]
    ) -> None:
        self._state, self._on_model, self._after = state, on_model, after
        self._uploads = Uploads(state.limits, state.uploads)
        self._unsaved: list[Model] = []  # published since the last group was collected

    def publish(self, model: Model, version: int = 0) -> Model:
        """Give a model a version (0: the next one), save it, and then announce it; return the model.

        Raises:
            StaleVersion: the topic has this version or a newer one.
            ParameterError: the topic exceeds the maximum of topics, or other topics' newest models leave no room.
        """
        model = self._with_version(model, version)
        self._announce_when_saved(model)
        return model

    def _with_version(self, model: Model, version: int) -> Model:
        others, most = self._state.models.bytes_beside(model.topic), self._state.limits.model_bytes
        if others + model.size > most:
            raise ParameterError.with_text(
                f"A model of topic {model.topic!r} has {model.size} bytes, but {most - others} are free: the newest "
                f"models of other topics take {others} of {most} bytes (limits.model_bytes). Nothing was published."
            )
        return self._state.models.assign_version(model, version)

    def _announce_when_saved(self, model: Model) -> None:
        """Announce a model after its save, so that no client has a version that a restart would lose."""
        committer = self._state.committer
        if not committer.is_durable:
            self._announce([model])
            return
        committer.add_model(self._state.run.name, model)
        if not self._unsaved:
            self._after(functools.partial(self._announce, self._unsaved))
        self._unsaved.append(model)
        while len(self._unsaved) > 1 and sum(kept.size for kept in self._unsaved) > SMALL_BYTES:
            del self._unsaved[0]  # published faster than the disk saves: skipped, as by a slow client

    def _announce(self, models: list[Model]) -> None:
        for model in models:
            if self._state.models.put(model):
                self._on_model(model)
        self._state.report_models()

    def clear_unsaved_models(self) -> None:
        """Begin a new list of unsaved models: the models in the list now belong to the group being saved."""
        self._unsaved = []

    def begin_run(self) -> None:
        """Drop models and uploads of the former run."""
        self._state.models.renew()
        self._uploads.clear()

    # Requests from other processes

    def receive(self, now: float, header: MessageHeader, body: messages.Publish, payload: Any) -> Reply:
        """Take a chunk of a model; publish the model with its last chunk."""
        if self._state.models.is_numbered(body.topic, body.version, body.checksum):  # a resend after a lost reply
            self._uploads.drop(header.client, body.topic)
            return _published(body, body.version)
        offset, whole = self._uploads.receive(header.client, body, payload, now)
        if whole is None:
            return Reply(messages.Published(topic=body.topic, received=offset))
        try:
            model = self._with_version(whole, body.version)
        except (StaleVersion, ValueError) as error:
            raise ProtocolError("topic", str(error)) from error
        self._announce_when_saved(model)
        return _published(body, model.version)

    def fetch(self, _: float, header: MessageHeader, body: messages.Fetch, payload: Any) -> Reply:
        """Return a chunk of a model."""
        state = self._state
        model = state.models.serve(body.topic, body.version, max_chunk_bytes(body, state.limits))
        newest = state.models.version(body.topic)
        if model is None and 0 < body.version < newest:  # a newer version came during the fetch: no fault
            text = f"version {body.version} of topic {body.topic!r} was replaced by version {newest}"
            return Reply(messages.Refusal(code="missing", text=text))
        chunk, stretch = chunk_of(model, body, state.limits, home=state.home, epoch=state.epoch)
        return Reply(chunk, stretch, known_checksum(chunk, stretch))


def _published(body: messages.Publish, version: int) -> Reply:
    return Reply(messages.Published(topic=body.topic, received=body.size, version=version), until_saved=True)


class ControlHandler:
    """Handler of CONTROL: changes parameters, runs and draining for all clients.

    Args:
        on_news: Called after the save if clients should send UPDATE soon.
    """

    def __init__(
        self, state: ServerState, models: ModelsHandler, feedback: FeedbackHandler, on_news: Callable[[], None]
    ) -> None:
        self._state, self._models, self._feedback, self._on_news = state, models, feedback, on_news

    def control(self, now: float, header: MessageHeader, body: messages.Control, _: Any) -> Reply:
        """Apply a CONTROL message of a learner or operator: parameters, run, finish and drain, in this order. If one of
        these fails, those before it have taken effect.
        """
        table = self._state.tables.numbered(header.table)
        try:
            if body.parameters:
                self.configure(table, body.parameters, discard_mismatched=body.discard_mismatched)
            if body.run:
                self.begin_run(body.run, now)
        except (MemoireError, TypeError) as error:
            raise ProtocolError("parameters", str(error)) from error
        if body.finish:
            self.finish()
        if body.drain:
            self.drain()
        taken = messages.Taken(parameters_version=table.parameters_version, finished=self._state.run.finished)
        return Reply(taken, until_saved=True)

    def configure(
        self, table: OpenTable, changes: Mapping[str, Any], *, discard_mismatched: bool = False
    ) -> Parameters:
        """Change a table's parameters for all clients; each gets them in the reply to its next UPDATE.

        Raises:
            ParameterError: a value is out of its range, or the table holds caches made with another value; nothing
                was changed.
        """
        parameters = table.parameters.replace(**changes)
        if parameters != table.parameters:
            version = table.parameters_version + 1
            table.take_parameters(parameters, version, discard_mismatched=discard_mismatched)
            save_parameters(table, self._state.committer)
            self.announce()
        return parameters

    def announce(self) -> None:
        """Send NEWS to clients, after the save of all changes so far: they soon send UPDATE and get the changes."""
        self._state.committer.call_after_save(self._on_news)

    def begin_run(self, name: str, now: float) -> None:
        """Begin a run, or continue a former run of this name. The present run's caches are dropped, its totals stay.

        Raises:
            ParameterError: the name is invalid.
        """
        arguments.name("run", name)
        state = self._state
        if name == state.run.name:
            return
        former = state.runs.begin(name, now)
        state.committer.add_run(former.facts)
        state.committer.add_run(state.run.facts)
        for table in state.tables:
            if table.of_run is not None:
                table.of_run.clear()
            table.limiter.reset()
        self._models.begin_run()
        self._feedback.give_up_all(former)
        state.informed.clear()
        self.announce()

    def finish(self, is_finished: bool = True) -> None:
        """Finish the present run, or continue it if False; clients read this in their next reply."""
        run = self._state.run
        if run.finished != is_finished:
            run.finished = is_finished
            self._state.informed.clear()
            self._state.committer.add_run(run.facts)
            self.announce()

    def drain(self) -> None:
        """Send all clients to other servers, by the next reply to each, when all that it reported is acknowledged.

        New clients are accepted only if no other server accepts them. A restart ends the drain.
        """
        self._state.leaving = True
        self.announce()
