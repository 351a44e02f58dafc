"""The frames of one request after the other for as many rows, and what the answers to them have.

All requests of a policy that acts step by step are the same but for a number and the values, and so are their answers:
few steps make and read them here, and compiled ones. Whatever is not just so is for the parser, which says what it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from memoire.limits import Limits
from memoire.replay.row_schema import RowSchema
from memoire.wire import _bytes, messages
from memoire.wire.frames import encode
from memoire.wire.row_container import Rows
from memoire.wire.row_form import FORMS

ANSWER_FRAMES: Final = 3
"""Of an answer: an empty one, the header, the rows."""


class Exchange:
    """Requests of so many rows, and the answers.

    Args:
        head: Frame 0 of one of them, with whatever number and payload.
    """

    def __init__(self, inputs: Any, outputs: Any, head: bytes, expected: bytes, tail_bytes: int) -> None:
        self._inputs, self._outputs, self._head = inputs, outputs, head
        self._expected, self._tail_bytes = expected, tail_bytes

    @classmethod
    def of(
        cls, inputs: RowSchema, outputs: RowSchema, rows: int, *, client: bytes, patience: float, limits: Limits
    ) -> Exchange | None:
        """The exchange of so many rows; None while the forms of both containers are not known."""
        asked, answered = FORMS.of(inputs, rows), FORMS.of(outputs, rows)
        if asked is None or answered is None:
            return None
        facts: dict[str, Any] = {"client": client, "payload": b"\0"}
        head = encode(messages.Infer(patience=patience), fingerprint=inputs.fingerprint, **facts)[0]
        expected = encode(messages.Inferred(), fingerprint=outputs.fingerprint, **facts)[0]
        return cls(asked, answered, head, expected, limits.tail_bytes)

    def request(self, columns: Mapping[str, Any], number: int) -> list[bytes] | None:
        """The frames of a request; None if the columns are not just as they should be."""
        payload = self._inputs.pack(columns) if type(columns) is dict else None
        return None if payload is None else [b"", _bytes.renumbered(self._head, number, payload), payload]

    def outputs(self, frames: Sequence[Any], number: int) -> Rows | None:
        """The columns of an answer; None if the frames are something else than the usual answer to this request."""
        if len(frames) != ANSWER_FRAMES or len(frames[0]):
            return None
        _, head, payload = frames
        if not _bytes.is_answer(head, payload, self._expected, number, self._tail_bytes):
            return None
        found: Rows | None = self._outputs.unpack(payload)
        return found
