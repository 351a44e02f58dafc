"""The newest model of each run and topic: small bodies lie in the database, large ones are files beside it."""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from memoire.errors import StateCorrupt
from memoire.models.model import Model
from memoire.replay.replacement import remove_abandoned_in, replace_file
from memoire.wire import _bytes

from . import private_files
from .records import MODEL, Fact, StoredModel, run_key

_log = logging.getLogger(__name__)

INLINE_BYTES: Final = 16 * 1024
"""Bytes of a model's body that are stored in the database itself."""

_NAME: Final = re.compile(r"[0-9]+-[0-9a-f]{16}-[0-9]+\.model")

Stored: TypeAlias = dict[tuple[int, str], StoredModel]
"""By number of the run and topic."""


class StoredModels:
    """The models of a state folder. One thread writes; any may read.

    Args:
        folder: Of the files; made when it is not there.
        at: Called at named points, so that a test may end the process there.
    """

    def __init__(self, folder: Path, at: Callable[[str], None]) -> None:
        self._folder, self._at = folder, at
        self._stored: Stored = {}
        self.missing: list[str] = []
        """Models that have no body any more, a sentence each."""
        private_files.make_folder(folder)

    def load(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Take what the database has of each model, by key; files that it does not name go."""
        for key, body in rows:
            run, topic = struct.unpack(">I", key[:4])[0], key[4:].decode()
            model = self._stored[run, topic] = msgspec.msgpack.decode(body, type=StoredModel)
            if model.body is None and not (path := self._path(run, topic, model.version)).exists():
                self.missing.append(f"{path} is gone: topic {topic!r} has no model until the next one is published")
                _log.warning("%s", self.missing[-1])
        named = {self._path(run, topic, model.version) for (run, topic), model in self._stored.items()}
        remove_abandoned_in(self._folder, ".model")
        for path in self._folder.iterdir():
            if _NAME.fullmatch(path.name) and path not in named:
                path.unlink(missing_ok=True)

    def _path(self, run: int, topic: str, version: int) -> Path:
        return self._folder / f"{run}-{_bytes.checksum(topic.encode()):016x}-{version}.model"

    def of(self, run: int | None) -> list[Model]:
        """The newest model of each topic of a run, in the order of topics.

        Raises:
            StateCorrupt: a body is not what was published.
        """
        stored = sorted(self._stored.copy().items())
        found = [self._read(owner, topic, model) for (owner, topic), model in stored if owner == run]
        return [model for model in found if model is not None]

    def versions(self) -> dict[str, int]:
        """The highest version of each topic over all runs: versions never go back."""
        versions: dict[str, int] = {}
        for (_, topic), model in self._stored.copy().items():
            versions[topic] = max(model.version, versions.get(topic, 0))
        return versions

    def _read(self, run: int, topic: str, stored: StoredModel) -> Model | None:
        path = self._path(run, topic, stored.version)
        if stored.body is None and not path.exists():
            return None  # somebody took it away; its version stays
        body = stored.body if stored.body is not None else path.read_bytes()
        if _bytes.checksum(body) != stored.checksum:
            raise StateCorrupt(
                str(path),
                f"model {topic!r} version {stored.version} has another XXH3 than what was published",
                "Bring it back from a backup of yours, or remove the file: the topic then has no model until the next "
                "one is published.",
            )
        return Model(topic, stored.version, body, stored.text, stored.checksum)

    def write(self, models: Iterable[tuple[int, Model]]) -> tuple[Stored, list[Fact]]:
        """Write bodies that are too large for the database; on disk when this returns, before the database names them.

        Returns:
            What is to be handed to `replace` once the facts, the second value, are in the database.
        """
        written: Stored = {}
        facts: list[Fact] = []
        for run, model in models:
            is_small = model.size <= INLINE_BYTES
            body = model.body if is_small else None
            stored = StoredModel(model.version, model.size, model.checksum, model.is_text, body)
            written[run, model.topic] = stored
            facts.append((MODEL, run_key(run, model.topic.encode()), msgspec.msgpack.encode(stored)))
            if not is_small:
                self._write_file(self._path(run, model.topic, model.version), model.body)
        return written, facts

    def _write_file(self, path: Path, body: bytes) -> None:
        def at(step: str) -> None:
            if step == "replace":
                self._at("before model")

        replace_file(path, body, mode=private_files.mode_in(self._folder), at=at)
        self._at("after model")

    def replace(self, written: Stored) -> None:
        """The database names these models: files of the former ones go."""
        for key, stored in written.items():
            former = self._stored.get(key)
            self._stored[key] = stored
            if former is not None and former.body is None and former.version != stored.version:
                self._path(*key, former.version).unlink(missing_ok=True)
