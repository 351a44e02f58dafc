"""The bytes of a table of prompts: payloads and columns of answers, and which of them are to be saved. Pure."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from memoire.replay.schema import Schema

from .columns import NOTHING, Packed, RawColumns, append, chosen, packed, unpacked
from .rows import Key

ROW, PAYLOAD, COLUMNS, STEP, PLAN, FACTS = range(6)
"""Kinds of what is saved."""
Saved: TypeAlias = tuple[int, bytes, bytes | None]
"""Kind, key and body of something that is saved; None takes it out."""


def packed_key(*parts: str | int) -> bytes:
    """A key as it is saved."""
    return msgspec.msgpack.encode(parts)


class PromptBytes:
    """Keeps bytes by prompt. Not thread-safe.

    Args:
        schema: Of the answers.
    """

    def __init__(self, schema: Schema) -> None:
        self.bytes = 0
        self.saves: dict[tuple[int, bytes], bytes | None] | None = None
        """What changed since it was saved last; None: nothing is ever saved."""
        self._schema = schema
        self._payloads: dict[Key, bytes] = {}
        self._answers: dict[Key, dict[int, Packed]] = {}

    def add(self, key: Key, payload: bytes) -> None:
        """Keep the payload of a prompt."""
        self._payloads[key] = payload
        self.bytes += len(payload)
        self._save(PAYLOAD, packed_key(*key), payload)

    def payload(self, key: Key) -> bytes:
        """The payload of a prompt."""
        return self._payloads.get(key, b"")

    def begin(self, key: Key, index: int, amended: int, come: Packed) -> None:
        """The first piece of an answer came: beside it only what was amended stays."""
        if amended:
            self._put(key, index, chosen(self._schema, self.packed(key, index), amended))
            self.append(key, index, amended, come)
        else:
            self._put(key, index, come)

    def append(self, key: Key, index: int, amended: int, come: Packed) -> None:
        """A piece of an answer came."""
        kept = self.columns(key, index)
        append(self._schema, kept, unpacked(self._schema, come), amended)
        self._put(key, index, packed(self._schema, kept))

    def replace(self, key: Key, index: int, come: Packed) -> None:
        """Columns of an answer are these from now on."""
        self._put(key, index, packed(self._schema, self.columns(key, index) | unpacked(self._schema, come)))

    def _put(self, key: Key, index: int, made: Packed) -> None:
        answers = self._answers.setdefault(key, {})
        self.bytes += len(made.data) - len(answers.get(index, NOTHING).data)
        answers[index] = made
        if self.saves is not None:
            self.saves[COLUMNS, packed_key(*key, index)] = msgspec.msgpack.encode(made)

    def packed(self, key: Key, index: int) -> Packed:
        """What is there of an answer."""
        return self._answers.get(key, {}).get(index, NOTHING)

    def columns(self, key: Key, index: int) -> RawColumns:
        """The same, each column by itself."""
        return unpacked(self._schema, self.packed(key, index))

    def let_go(self, key: Key, index: int | None = None) -> None:
        """Keep the columns of an answer, or of all answers to a prompt, no longer."""
        answers = self._answers.get(key, {})
        for each in [index] if index is not None else list(answers):
            made = answers.pop(each, None)
            if made is not None:
                self.bytes -= len(made.data)
                self._save(COLUMNS, packed_key(*key, each), None)
        if not answers:
            self._answers.pop(key, None)

    def forget(self, key: Key) -> None:
        """A prompt has left the table."""
        self.let_go(key)
        self.bytes -= len(self._payloads.pop(key, b""))
        self._save(PAYLOAD, packed_key(*key), None)

    def lose(self, kind: int, *key: str | int) -> None:
        """A payload or an answer that was saved is missing: its row is to go."""
        self._save(kind, packed_key(*key), None)

    def restore(self, kind: int, key: bytes, body: bytes) -> None:
        """Take what was saved of a payload, or of an answer's columns. Raises msgspec's errors."""
        if kind == PAYLOAD:
            dataset, epoch, index = msgspec.msgpack.decode(key, type=tuple[str, int, int])
            self._payloads[dataset, epoch, index] = body
            self.bytes += len(body)
        else:
            dataset, epoch, index, answer = msgspec.msgpack.decode(key, type=tuple[str, int, int, int])
            made = msgspec.msgpack.decode(body, type=Packed)
            self._answers.setdefault((dataset, epoch, index), {})[answer] = made
            self.bytes += len(made.data)

    def _save(self, kind: int, key: bytes, body: bytes | None) -> None:
        if self.saves is not None:
            self.saves[kind, key] = body
