"""What learners and operators decide: parameters, runs, and that a server is drained. Pure.

Models: numbered when they come, shown when they are on disk, fetched chunk by chunk. Pure.

Models on their way to a server, chunk by chunk: a bounded number of them, within a number of bytes. Pure.
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
    stretch_of,
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
"""Models that come in several chunks at the same time; a further one is refused until one of them has ended."""
UPLOAD_TIMEOUT = 60.0
"""Seconds after its newest chunk for which an upload is kept: its publisher has died."""


class Uploads:
    """What publishers have begun to send. An upload that has begun keeps its place until it ends or is given up.

    Args:
        room: Has the whole size of each, `limits.model_bytes` in all at most.
    """

    def __init__(self, limits: Limits, room: ByteHolder) -> None:
        self._limits, self._room = limits, room
        # By client and topic, each with the time of its newest chunk; in the order of these.
        self._begun: OrderedDict[tuple[bytes, str], tuple[ModelAssembly, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._begun)

    def receive(self, client: bytes, body: messages.Publish, payload: Any, now: float) -> tuple[int, Model | None]:
        """Take a chunk; returns how many bytes are here from the beginning on, and the model if it is whole.

        Raises:
            ProtocolError: the model is too large, its beginning is not here, the chunk does not fit, or the whole has
                another checksum than announced: then it is forgotten, and its publisher begins again. Code "busy":
                there is no room beside the uploads that are under way.
        """
        self._give_up(now)
        chunk = memoryview(b"" if payload is None else payload).cast("B")
        key = client, body.topic
        assembly = self._assembly(key, body, is_whole=len(chunk) == body.size)
        try:
            whole = assembly.add(body.offset, chunk)
        finally:
            if assembly.offset == assembly.size:  # all bytes came, right or wrong: no chunk could mend it
                self.drop(*key)
        if whole is None and assembly.offset < assembly.size:
            if (known := self._begun.get(key)) is None or known[0] is not assembly:
                self.drop(*key)
                self._room.add(assembly.size)
            self._begun[key] = assembly, now
            self._begun.move_to_end(key)
        return assembly.offset, whole

    def _assembly(self, key: tuple[bytes, str], body: messages.Publish, *, is_whole: bool) -> ModelAssembly:
        known = self._begun.get(key)
        if known is not None and known[0].checksum == body.checksum:
            return known[0]
        if body.offset:
            raise ProtocolError("missing", f"a stretch at {body.offset} of a model whose beginning is not here")
        size, most = body.size, self._limits.model_bytes
        assembly = ModelAssembly(body.topic, 0, size, body.checksum, body.text, byte_limit=most)
        if not is_whole:
            self._check_room(key, size)
        return assembly

    def _check_room(self, key: tuple[bytes, str], size: int) -> None:
        """Raise ProtocolError where the others leave no room. Their whole sizes count: each of them can be finished."""
        others = [kept.size for other, (kept, _) in self._begun.items() if other != key]
        most = self._limits.model_bytes
        if others and (len(others) >= MAX_UPLOADS or sum(others) + size > most):
            text = (
                f"{len(others)} models of {sum(others)} bytes are being sent to this server, and one of {size} bytes "
                f"was to come; {MAX_UPLOADS} at a time may, of {most} bytes (model_bytes). Send it again: each ends, "
                f"or is given up after {UPLOAD_TIMEOUT:g} s without a chunk"
            )
            raise ProtocolError("busy", text)

    def _give_up(self, now: float) -> None:
        """Forget uploads that do not go on."""
        while self._begun and now >= next(iter(self._begun.values()))[1] + UPLOAD_TIMEOUT:
            self.drop(*next(iter(self._begun)))

    def drop(self, client: bytes, topic: str) -> None:
        """Forget what a client has begun to send for a topic."""
        gone = self._begun.pop((client, topic), None)
        if gone is not None:
            self._room.add(-gone[0].size)

    def clear(self) -> None:
        """Another run begins: forget all of them."""
        for key in list(self._begun):
            self.drop(*key)


def made(topic: str, content: bytes | bytearray | memoryview | str, limits: Limits) -> Model:
    """A model of this content, without a version. It is summed up here, which needs no lock.

    Raises:
        WrongType: the content is no bytes and no text.
        ParameterError: it is too large, or the topic is malformed.
    """
    if not isinstance(content, (str, bytes, bytearray, memoryview)):
        raise WrongType("content", "bytes or str", type(content).__name__, "serialize it first.")
    size = len(content)
    most = limits.model_bytes or MODEL_BYTES
    if size > most:
        allowed = f"at most {most} bytes (limits.model_bytes)"
        raise ParameterError("content", f"{size} bytes", allowed)
    return make(topic, content, 0)


class ModelsHandler:
    """Takes models from learners, here and far away, and gives them to clients.

    Args:
        on_model: Called when a model is new, once it is saved.
        after: Has something called, with the lock held, when all that was said so far is saved.
    """

    def __init__(
        self, state: ServerState, *, on_model: Callable[[Model], None], after: Callable[[Ticket], None]
    ) -> None:
        self._state, self._on_model, self._after = state, on_model, after
        self._uploads = Uploads(state.limits, state.uploads)
        self._unsaved: list[Model] = []  # published since a group was taken to be saved

    def publish(self, made: Model, version: int = 0) -> Model:
        """Number a model, 0 by the next version, and have it saved, then shown to everyone.

        Raises:
            StaleVersion: the topic has this version or a newer one.
            ParameterError: the topic is one too many, or the newest models of the others leave no room.
        """
        model = self._numbered(made, version)
        self._show_when_saved(model)
        return model

    def _numbered(self, made: Model, version: int) -> Model:
        others, most = self._state.models.bytes_beside(made.topic), self._state.limits.model_bytes
        if others + made.size > most:
            expected = (
                f"at most {most - others}: the newest models of other topics, which stay, take {others} of {most} "
                "(limits.model_bytes)"
            )
            raise ParameterError(f"the size of a model of topic {made.topic!r}", made.size, expected)
        return self._state.models.number(made, version)

    def _show_when_saved(self, model: Model) -> None:
        """Nobody may have a version that a restart would forget."""
        committer = self._state.committer
        if not committer.is_durable:
            self._show([model])
            return
        committer.add_model(self._state.run.name, model)
        if not self._unsaved:
            self._after(functools.partial(self._show, self._unsaved))
        self._unsaved.append(model)
        while len(self._unsaved) > 1 and sum(kept.size for kept in self._unsaved) > SMALL_BYTES:
            del self._unsaved[0]  # published faster than the disk takes it: passed over, as by a slow client

    def _show(self, models: list[Model]) -> None:
        for model in models:
            if self._state.models.put(model):
                self._on_model(model)
        self._state.report_models()

    def collected(self) -> None:
        """All models until now are being saved: later ones wait for the next group."""
        self._unsaved = []

    def begin_run(self) -> None:
        """Another run has begun: it has no models yet."""
        self._state.models.renew()
        self._uploads.clear()

    # What is asked from far away

    def receive(self, now: float, header: MessageHeader, body: messages.Publish, payload: Any) -> Reply:
        """Take a chunk of a model; with the last one the model is published."""
        if self._state.models.is_numbered(body.topic, body.version, body.checksum):  # again, by who cannot know that
            self._uploads.drop(header.client, body.topic)
            return _published(body, body.version)
        offset, whole = self._uploads.receive(header.client, body, payload, now)
        if whole is None:
            return Reply(messages.Published(topic=body.topic, received=offset))
        try:
            model = self._numbered(whole, body.version)
        except (StaleVersion, ValueError) as error:
            raise ProtocolError("topic", str(error)) from error
        self._show_when_saved(model)
        return _published(body, model.version)

    def fetch(self, _: float, header: MessageHeader, body: messages.Fetch, payload: Any) -> Reply:
        """A chunk of a model."""
        state = self._state
        model = state.models.serve(body.topic, body.version, stretch_of(body, state.limits))
        newest = state.models.version(body.topic)
        if model is None and 0 < body.version < newest:  # overtaken while it was asked for: nothing is wrong
            text = f"version {body.version} of topic {body.topic!r} has made room for {newest}"
            return Reply(messages.Refused(code="missing", text=text))
        chunk, stretch = chunk_of(model, body, state.limits, home=state.home, epoch=state.epoch)
        return Reply(chunk, stretch, known_checksum(chunk, stretch))


def _published(body: messages.Publish, version: int) -> Reply:
    return Reply(messages.Published(topic=body.topic, received=body.size, version=version), until_saved=True)


class ControlHandler:
    """Changes what everybody follows.

    Args:
        on_news: Called when clients should ask soon, once what is new is saved.
    """

    def __init__(
        self, state: ServerState, models: ModelsHandler, feedback: FeedbackHandler, on_news: Callable[[], None]
    ) -> None:
        self._state, self._models, self._feedback, self._on_news = state, models, feedback, on_news

    def control(self, now: float, header: MessageHeader, body: messages.Control, _: Any) -> Reply:
        """Carry out a CONTROL message of a learner or operator: parameters, run, finish and drain, in this order. If
        one of these is wrong, those before it have taken effect.
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
        """Change a table's parameters for everyone; its clients hear of it in the reply to their next UPDATE.

        Raises:
            ParameterError: a value is out of its range, or caches are held that were made with another one;
                nothing was changed.
        """
        parameters = table.parameters.replace(**changes)
        if parameters != table.parameters:
            version = table.parameters_version + 1
            table.take_parameters(parameters, version, discard_mismatched=discard_mismatched)
            save_parameters(table, self._state.committer)
            self.announce()
        return parameters

    def announce(self) -> None:
        """Send clients NEWS, so that they send an UPDATE soon and get the changes. NEWS goes out when all changes so
        far are saved.
        """
        self._state.committer.after(self._on_news)

    def begin_run(self, name: str, now: float) -> None:
        """Count this run from now on, from zero or where it ended; the former one stays readable, with its caches gone.

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
        """The run is over: clients hear of it in their next reply. False: it goes on, although it was declared over."""
        run = self._state.run
        if run.finished != is_finished:
            run.finished = is_finished
            self._state.informed.clear()
            self._state.committer.add_run(run.facts)
            self.announce()

    def drain(self) -> None:
        """Send all clients elsewhere: they hear of it in their next reply, when all that they said is acknowledged.

        New ones are taken only if nobody else takes them. A restart ends it.
        """
        self._state.leaving = True
        self.announce()
