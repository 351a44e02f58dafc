"""Models: numbered when they come, shown when they are on disk, fetched chunk by chunk. Pure."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from memoire.accounting.unsaved_changes import Ticket
from memoire.errors import ParameterError, ProtocolError, WrongType
from memoire.limits import MODEL_BYTES, Limits
from memoire.models.model import SMALL_BYTES, Model, StaleVersion, chunk_of, known_checksum, make, stretch_of
from memoire.pool.desk import Reply
from memoire.server.state import ServerState
from memoire.wire import messages
from memoire.wire.frames import MessageHeader

from .uploads import Uploads


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
