"""Models on their way to a server, chunk by chunk: a bounded number of them, within a number of bytes. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.models.model import Model, ModelAssembly
from memoire.wire import messages
from memoire.wire.byte_budget import ByteHolder

MAX_UPLOADS = 16
"""Models that come in several chunks at the same time; a further one is refused until one of them has ended."""
UPLOAD_TIMEOUT = 60.0
"""Seconds after its newest chunk for which an upload is kept: its publisher has died."""


@dataclass(slots=True)
class _Upload:
    assembly: ModelAssembly
    came: float
    """When its newest chunk came."""


class Uploads:
    """What publishers have begun to send. An upload that has begun keeps its place until it ends or is given up.

    Args:
        room: Has the whole size of each, `limits.model_bytes` in all at most.
    """

    def __init__(self, limits: Limits, room: ByteHolder) -> None:
        self._limits, self._room = limits, room
        self._begun: OrderedDict[tuple[bytes, str], _Upload] = OrderedDict()  # by client and topic; in order of `came`

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
            if (known := self._begun.get(key)) is None or known.assembly is not assembly:
                self.drop(*key)
                self._room.add(assembly.size)
            self._begun[key] = _Upload(assembly, now)
            self._begun.move_to_end(key)
        return assembly.offset, whole

    def _assembly(self, key: tuple[bytes, str], body: messages.Publish, *, is_whole: bool) -> ModelAssembly:
        known = self._begun.get(key)
        if known is not None and known.assembly.checksum == body.checksum:
            return known.assembly
        if body.offset:
            raise ProtocolError("missing", f"a stretch at {body.offset} of a model whose beginning is not here")
        size, most = body.size, self._limits.model_bytes
        assembly = ModelAssembly(body.topic, 0, size, body.checksum, body.text, byte_limit=most)
        if not is_whole:
            self._check_room(key, size)
        return assembly

    def _check_room(self, key: tuple[bytes, str], size: int) -> None:
        """Raise ProtocolError where the others leave no room. Their whole sizes count: each of them can be finished."""
        others = [kept.assembly.size for other, kept in self._begun.items() if other != key]
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
        while self._begun:
            key, oldest = next(iter(self._begun.items()))
            if now < oldest.came + UPLOAD_TIMEOUT:
                return
            self.drop(*key)

    def drop(self, client: bytes, topic: str) -> None:
        """Forget what a client has begun to send for a topic."""
        gone = self._begun.pop((client, topic), None)
        if gone is not None:
            self._room.add(-gone.assembly.size)

    def clear(self) -> None:
        """Another run begins: forget all of them."""
        for key in list(self._begun):
            self.drop(*key)
