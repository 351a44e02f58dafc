"""The bytes of a table of prompts: payloads and columns of answers, and which of them are to be saved. Pure."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from memoire.replay.schema import Schema

from .columns import NOTHING, Packed, RawColumns, joined, packed, unpacked
from .rows import Key

ROW, PAYLOAD, COLUMNS, STEP, PLAN, FACTS = range(6)
"""Kinds of what is saved."""
Saved: TypeAlias = tuple[int, bytes, bytes | None]
"""Kind, key and body of something that is saved; None takes it out, or says that its file is missing or damaged."""


def packed_key(*parts: str | int) -> bytes:
    """A key as it is saved."""
    return msgspec.msgpack.encode(parts)


PIECE_BYTES: Final = 256
"""What a payload or a piece takes beside its bytes, about."""
JOINED_BYTES: Final = 1 << 20
"""Bytes of a whole answer whose pieces are joined: many small ones take more than what is in them."""
AMENDED: Final = -1
"""In place of a piece's number: columns that came from elsewhere, and count for more than those of pieces."""


class PromptBytes:
    """Keeps bytes by prompt, those of an answer as its pieces came: a long one costs its length. Not thread-safe.

    Args:
        schema: Of the answers.
    """

    def __init__(self, schema: Schema) -> None:
        self.bytes = 0
        """Of all that is kept, and of what is to be saved."""
        self.payload_bytes = 0
        """Those of them that payloads take."""
        self.joined_bytes = JOINED_BYTES
        """Bytes of a whole answer up to which its pieces are joined."""
        self._unsaved_bytes = 0
        self._saves: dict[tuple[int, bytes], bytes | None] | None = None
        self._schema = schema
        self._payloads: dict[Key, bytes] = {}
        self._answers: dict[Key, dict[int, dict[int, Packed]]] = {}  # by the answer, and the number of the piece

    @property
    def saves(self) -> dict[tuple[int, bytes], bytes | None] | None:
        """What changed since it was saved last; None: nothing is ever saved."""
        return self._saves

    @saves.setter
    def saves(self, changes: dict[tuple[int, bytes], bytes | None] | None) -> None:
        self._saves = changes
        self.bytes -= self._unsaved_bytes
        self._unsaved_bytes = 0

    def add(self, key: Key, payload: bytes) -> None:
        """Keep the payload of a prompt."""
        self._payloads[key] = payload
        self._count_payload(PIECE_BYTES + len(payload))
        self._save(PAYLOAD, packed_key(*key), payload)

    def _count_payload(self, size: int) -> None:
        self.bytes += size
        self.payload_bytes += size

    def payload(self, key: Key) -> bytes:
        """The payload of a prompt."""
        return self._payloads.get(key, b"")

    def begin(self, key: Key, index: int, come: Packed) -> None:
        """The first piece of an answer came: beside it only what was amended stays."""
        self.begin_again(key, index)
        self._put(key, index, 0, come)

    def begin_again(self, key: Key, index: int) -> None:
        """Of an answer only what was amended stays."""
        for number in [number for number in self._pieces(key, index) if number != AMENDED]:
            self._drop(key, index, number)

    def append(self, key: Key, index: int, come: Packed) -> None:
        """A further piece of an answer came."""
        self._put(key, index, 1 + max(self._pieces(key, index), default=AMENDED), come)

    def amend(self, key: Key, index: int, come: Packed) -> None:
        """Columns of an answer are these from now on, whatever its pieces bring."""
        former = unpacked(self._schema, self._pieces(key, index).get(AMENDED, NOTHING))
        self._put(key, index, AMENDED, packed(self._schema, former | unpacked(self._schema, come)))

    def join(self, key: Key, index: int) -> None:
        """An answer is whole: put its pieces together, unless it is long."""
        pieces = {number: piece for number, piece in self._pieces(key, index).items() if number != AMENDED}
        if len(pieces) > 1 and sum(len(piece.data) for piece in pieces.values()) <= self.joined_bytes:
            whole = packed(self._schema, joined(self._schema, [pieces[number] for number in sorted(pieces)]))
            self.begin(key, index, whole)

    def _pieces(self, key: Key, index: int) -> dict[int, Packed]:
        return self._answers.get(key, {}).get(index, {})

    def _put(self, key: Key, index: int, number: int, made: Packed) -> None:
        pieces = self._answers.setdefault(key, {}).setdefault(index, {})
        former = pieces.get(number)
        self.bytes += len(made.data) - (-PIECE_BYTES if former is None else len(former.data))
        pieces[number] = made
        if self._saves is not None:
            self._save(COLUMNS, packed_key(*key, index, number), msgspec.msgpack.encode(made))

    def _drop(self, key: Key, index: int, number: int) -> None:
        made = self._answers[key][index].pop(number)
        self.bytes -= PIECE_BYTES + len(made.data)
        self._save(COLUMNS, packed_key(*key, index, number), None)

    def packed(self, key: Key, index: int) -> Packed:
        """What is there of an answer."""
        pieces = self._pieces(key, index)
        if len(pieces) == 1:
            return next(iter(pieces.values()))
        return packed(self._schema, self.columns(key, index))

    def columns(self, key: Key, index: int) -> RawColumns:
        """The same, each column by itself."""
        pieces = self._pieces(key, index)
        amended = unpacked(self._schema, pieces.get(AMENDED, NOTHING))
        return joined(self._schema, [pieces[number] for number in sorted(pieces) if number != AMENDED]) | amended

    def let_go(self, key: Key, index: int | None = None) -> None:
        """Keep the columns of an answer, or of all answers to a prompt, no longer."""
        answers = self._answers.get(key, {})
        for each in [index] if index is not None else list(answers):
            for number in list(answers.get(each, {})):
                self._drop(key, each, number)
            answers.pop(each, None)
        if not answers:
            self._answers.pop(key, None)

    def forget(self, key: Key) -> None:
        """A prompt has left the table."""
        self.let_go(key)
        payload = self._payloads.pop(key, None)
        self._count_payload(0 if payload is None else -PIECE_BYTES - len(payload))
        self._save(PAYLOAD, packed_key(*key), None)

    def lose(self, kind: int, key: bytes) -> None:
        """A payload or a piece of an answer that was saved is missing: its row is to go."""
        self._save(kind, key, None)

    def restore(self, kind: int, key: bytes, body: bytes) -> None:
        """Take what was saved of a payload, or of an answer's columns. Raises msgspec's errors."""
        if kind == PAYLOAD:
            dataset, epoch, index = msgspec.msgpack.decode(key, type=tuple[str, int, int])
            self._payloads[dataset, epoch, index] = body
            self._count_payload(PIECE_BYTES + len(body))
        else:
            of = msgspec.msgpack.decode(key, type=tuple[str, int, int, int, int])
            made = msgspec.msgpack.decode(body, type=Packed)
            self._answers.setdefault(of[:3], {}).setdefault(of[3], {})[of[4]] = made
            self.bytes += PIECE_BYTES + len(made.data)

    def _save(self, kind: int, key: bytes, body: bytes | None) -> None:
        if self._saves is not None:
            grown = len(body or b"") - len(self._saves.get((kind, key)) or b"")
            self._unsaved_bytes += grown
            self.bytes += grown
            self._saves[kind, key] = body

    def check_invariants(self) -> None:
        """Raise AssertionError if the bytes are not the sum of what is kept. For tests."""
        pieces = [piece for answers in self._answers.values() for each in answers.values() for piece in each.values()]
        kept = [*self._payloads.values(), *(piece.data for piece in pieces)]
        unsaved = sum(len(body or b"") for body in (self._saves or {}).values() if body is not None)
        assert self.bytes == sum(PIECE_BYTES + len(data) for data in kept) + self._unsaved_bytes
        assert self._unsaved_bytes <= unsaved
