"""Models on their way to a server, chunk by chunk: a bounded number of them, within a number of bytes. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from memoire.errors import ProtocolError
from memoire.limits import Limits
from memoire.models.model import Model, ModelAssembly
from memoire.wire import messages

MAX_UPLOADS = 16


class Uploads:
    """What publishers have begun to send. The one that came on least lately gives way: its publisher begins again."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._begun: OrderedDict[tuple[bytes, str], ModelAssembly] = OrderedDict()  # by client and topic

    def __len__(self) -> int:
        return len(self._begun)

    def receive(self, client: bytes, body: messages.Publish, payload: Any) -> tuple[int, Model | None]:
        """Take a chunk; returns how many bytes are here from the beginning on, and the model if it is whole.

        Raises:
            ProtocolError: the model is too large, its beginning is not here, the chunk does not fit, or the whole has
                another checksum than announced: then it is forgotten, and its publisher begins again.
        """
        assembly = self._assembly(client, body)
        try:
            whole = assembly.add(body.offset, memoryview(b"" if payload is None else payload).cast("B"))
        finally:
            if assembly.offset == assembly.size:  # all bytes came, right or wrong: no chunk could mend it
                self.drop(client, body.topic)
        return assembly.offset, whole

    def _assembly(self, client: bytes, body: messages.Publish) -> ModelAssembly:
        key = client, body.topic
        assembly = self._begun.get(key)
        if assembly is None or assembly.checksum != body.checksum:
            if body.offset:
                raise ProtocolError("missing", f"a stretch at {body.offset} of a model whose beginning is not here")
            size, most = body.size, self._limits.model_bytes
            assembly = ModelAssembly(body.topic, 0, size, body.checksum, body.text, byte_limit=most)
            self._begun[key] = assembly
        self._begun.move_to_end(key)
        while len(self._begun) > MAX_UPLOADS or (len(self._begun) > 1 and self._bytes() > self._limits.model_bytes):
            self._begun.popitem(last=False)
        return assembly

    def _bytes(self) -> int:
        return sum(kept.offset for kept in self._begun.values())

    def drop(self, client: bytes, topic: str) -> None:
        """Forget what a client has begun to send for a topic."""
        self._begun.pop((client, topic), None)

    def clear(self) -> None:
        """Another run begins: forget all of them."""
        self._begun.clear()
