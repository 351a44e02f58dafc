"""The bytes of a table of prompts: payloads and columns of answers, and which of them are to be saved. Pure."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from memoire.replay.schema import Schema

from .columns import RawColumns, append
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
        self._columns: dict[Key, dict[int, RawColumns]] = {}

    def add(self, key: Key, payload: bytes) -> None:
        """Keep the payload of a prompt."""
        self._payloads[key] = payload
        self.bytes += len(payload)
        self._save(PAYLOAD, packed_key(*key), payload)

    def payload(self, key: Key) -> bytes:
        """The payload of a prompt."""
        return self._payloads.get(key, b"")

    def begin(self, key: Key, index: int, amended: int) -> None:
        """An answer begins anew: only what was amended stays of it."""
        kept = self._columns.get(key, {}).get(index)
        if kept:
            self._put(key, index, {place: data for place, data in kept.items() if amended >> place & 1})

    def append(self, key: Key, index: int, come: RawColumns, amended: int = 0) -> None:
        """A piece of an answer came."""
        kept = dict(self._columns.get(key, {}).get(index, {}))
        append(self._schema, kept, come, amended)
        self._put(key, index, kept)

    def replace(self, key: Key, index: int, come: RawColumns) -> None:
        """Columns of an answer are these from now on."""
        self._put(key, index, self._columns.get(key, {}).get(index, {}) | come)

    def _put(self, key: Key, index: int, columns: RawColumns) -> None:
        answers = self._columns.setdefault(key, {})
        self.bytes += _size(columns) - _size(answers.get(index, {}))
        answers[index] = columns
        self._save(COLUMNS, packed_key(*key, index), msgspec.msgpack.encode(columns))

    def columns(self, key: Key, index: int) -> RawColumns:
        """What is there of an answer."""
        return self._columns.get(key, {}).get(index, {})

    def let_go(self, key: Key, index: int | None = None) -> None:
        """Keep the columns of an answer, or of all answers to a prompt, no longer."""
        answers = self._columns.get(key, {})
        for each in [index] if index is not None else list(answers):
            columns = answers.pop(each, None)
            if columns is not None:
                self.bytes -= _size(columns)
                self._save(COLUMNS, packed_key(*key, each), None)
        if not answers:
            self._columns.pop(key, None)

    def forget(self, key: Key) -> None:
        """A prompt has left the table."""
        self.let_go(key)
        self.bytes -= len(self._payloads.pop(key, b""))
        self._save(PAYLOAD, packed_key(*key), None)

    def restore(self, kind: int, key: bytes, body: bytes) -> None:
        """Take what was saved of a payload, or of an answer's columns. Raises msgspec's errors."""
        if kind == PAYLOAD:
            dataset, epoch, index = msgspec.msgpack.decode(key, type=tuple[str, int, int])
            self._payloads[dataset, epoch, index] = body
            self.bytes += len(body)
        else:
            dataset, epoch, index, answer = msgspec.msgpack.decode(key, type=tuple[str, int, int, int])
            columns = msgspec.msgpack.decode(body, type=dict[int, bytes])
            self._columns.setdefault((dataset, epoch, index), {})[answer] = columns
            self.bytes += _size(columns)

    def _save(self, kind: int, key: bytes, body: bytes | None) -> None:
        if self.saves is not None:
            self.saves[kind, key] = body


def _size(columns: RawColumns) -> int:
    return sum(map(len, columns.values()))
