"""Fetching of one topic's models: announced versions, chunks on their way, complete models. Pure.

    notice v7 ─┐                                  ┌─ here already, or found elsewhere? then nothing is fetched
    UPDATED v7 ┴▶ queue of the topic ─▶ fetching ─┼─ first chunk: has size and hash
                                                  └─ a random pause, if many ask, then a few chunks at a time
                                                                                         ─▶ checksum ─▶ delivered

Bodies are fetched one at a time, in chunks, and are delivered only after their checksum is right. A failed fetch is
forgotten, and the version is fetched at its next announcement: that happens every few seconds. Each call takes the time
and returns the steps to take.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from memoire.errors import Closed, MemoireError, ProtocolError
from memoire.limits import MODEL_BYTES, Limits
from memoire.wire import messages
from memoire.wire.frames import Answer

from .model import Model, ModelAssembly, model_of

MAX_MISSED = 64
"""Largest number of missed versions that are fetched after a gap in the announcements."""
MAX_QUEUED = 256
"""Versions of one topic that wait during a fetch; beyond, the oldest are skipped."""
STALL_TIMEOUT = 10.0
"""Seconds without a chunk after which a newer version, if there is one, is fetched instead."""
QUICK_TIME = 0.2
"""Seconds within which a chunk comes if the connection has room for more chunks at a time."""
ALONE_TIME = 0.05
"""Seconds within which a chunk comes if few clients fetch: then a client asks for all chunks without a pause."""
MAX_HOMES = 4096
"""Servers of each topic whose newest epochs are kept: as many as a WELCOME can name."""
LARGE_BODY_BYTES = 16 << 20
"""Bytes of a body from which on the pause is drawn from all of `limits.tuning.model_spread`."""


@dataclass(frozen=True, slots=True)
class _WantedVersion:
    """Announced version, 0 for the newest; with its checksum if a notice had it."""

    version: int
    checksum: int | None = None


class _Fetching:
    """Fetch of one body that is under way."""

    def __init__(self, version: int, now: float) -> None:
        self.version = version
        self.heard_at = now  # time of the newest chunk
        self.waited = 0.0  # seconds from the request of the newest chunk to its arrival
        self.assembly: ModelAssembly | None = None
        self.asked = 0  # all bytes before this offset were requested
        self.open = 0  # requested chunks that have not come
        self.stride = 0  # bytes of the first and of each other chunk
        self.resume_at = 0.0  # end of the random pause
        self.window = 1  # chunks to request at once: more while chunks come quickly, fewer if many clients fetch


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    """Request for a part of a body; the answer goes to `TopicFetcher.receive_answer`."""

    version: int
    """Version of the model; 0 is the newest one."""
    offset: int
    size: int
    asked_at: float
    fetching: _Fetching


@dataclass(frozen=True, slots=True)
class CompleteModel:
    """Delivery of a complete model."""

    model: Model
    is_renewed: bool
    """True if the publisher restarted its numbering, so that the version may be lower than before."""
    source: tuple[int, int]
    """Origin of the topic's newest notice: hash of the server's name, and its epoch; zeros before any notice."""
    skipped: int
    """Number of versions between this model and the model received before."""


Step: TypeAlias = ChunkRequest | CompleteModel


class TopicFetcher:
    """Fetcher of one topic's models, which decides what to fetch, and when. Pure.

    Args:
        has_receivers: Function that returns True if every version is wanted, not only the newest.
        find: Function that returns a model that another server sent already, by version and checksum.
        rng: Random numbers for the pauses.
    """

    def __init__(
        self,
        limits: Limits,
        has_receivers: Callable[[], bool],
        find: Callable[[int, int], Model | None],
        rng: random.Random,
    ) -> None:
        self._limits, self._has_receivers, self._find, self._rng = limits, has_receivers, find, rng
        self._newest: Model | None = None
        self._epochs: OrderedDict[int, int] = OrderedDict()  # newest epoch by the hash of the server's name
        self._source = (0, 0)  # server (hash of the name) and epoch of the newest notice
        self._heard = 0  # newest version that was announced, fetched or not
        self._queue: deque[Model | _WantedVersion] = deque()  # complete models and versions to fetch, in order
        self._fetching: _Fetching | None = None
        self._asked_newest = False
        self._is_renewed = False  # a known version may name another model, because its publisher restarted
        self._steps: list[Step] = []  # steps of the present call
        self.refused: Counter[str] = Counter()
        """Number of rejected bodies, by code."""
        self.fetched_bytes = 0
        """Number of bytes in all received chunks."""

    def _take_steps(self) -> list[Step]:
        steps, self._steps = self._steps, []
        return steps

    def begin(self, now: float) -> list[Step]:
        """Ask for the newest model, at the first call."""
        if not self._asked_newest:
            self._asked_newest = True
            # In front of announced versions: behind them, version 0 would count as newer than those versions.
            self._queue.appendleft(_WantedVersion(0))
            self._advance(now)
        return self._take_steps()

    @property
    def newest_announced(self) -> int:
        """Newest version that was announced, fetched or not; 0 before any."""
        return self._heard

    def receive_versions(self, version: int, now: float) -> list[Step]:
        """Record the newest version that a reply named, in case its notice was lost."""
        if version > self._heard:
            self._enqueue(_WantedVersion(version), version)
            self._advance(now)
        return self._take_steps()

    def receive_notice(self, notice: messages.Notice, payload: Any, now: float) -> list[Step]:
        """Record a notice of a published model, with its body if it is small. Call `is_anew` before.

        Raises:
            ProtocolError: the body differs from the notice.
        """
        if notice.version <= self._heard:
            return []
        if payload is None and notice.size:
            item: Model | _WantedVersion = _WantedVersion(notice.version, notice.checksum)
        else:
            item = model_of(notice, b"" if payload is None else bytes(payload))
        self._enqueue(item, notice.version)
        self._advance(now)
        return self._take_steps()

    def _enqueue(self, item: Model | _WantedVersion, version: int) -> None:
        """Queue a version. If every version is wanted, queue the missed ones before it too, which the node may still
        have.
        """
        if self._has_receivers() and self._heard:
            between = range(max(self._heard + 1, version - MAX_MISSED), version)
            self._queue.extend(_WantedVersion(missed) for missed in between)
        self._queue.append(item)
        self._heard = version
        while len(self._queue) > MAX_QUEUED:
            self._queue.popleft()

    def is_publisher_restart(self, notice: messages.Notice, home: int, *, is_kept: bool = False) -> bool:
        """Return True if a notice shows that its publisher restarted and counts from 1.

        A publisher restarted if the epoch of its server is newer and its versions name other models. A newer epoch of
        another server means nothing: that server may only have started later.

        Args:
            home: Hash of the server's name.
            is_kept: True if the server keeps its models on disk and so goes on counting after a restart.
        """
        self._source = (home, notice.epoch)
        former, newest = self._epochs.get(home, 0), self._newest
        # By size and not by equality: notices of two lives may come in any order, over several connections. An epoch
        # is the start time of a life. If a clock was set back, the later life has the smaller epoch and is not detected
        # here; HELLO compares for equality, and its answer leads to `renew`.
        if notice.epoch <= former:
            return False
        goes_back = newest is not None and notice.version <= newest.version and notice.checksum != newest.checksum
        is_anew = bool(former) and goes_back and not is_kept
        if is_anew:
            self.renew()
        self._epochs[home] = notice.epoch
        while len(self._epochs) > MAX_HOMES:
            self._epochs.popitem(last=False)
        return is_anew

    def renew(self) -> None:
        """Accept lower versions from now on, because the publisher restarted its numbering."""
        self._is_renewed = True
        self._forget_announced()

    def forget(self) -> None:
        """Forget the newest model, because another run began. Versions go on counting."""
        self._newest = None
        self._forget_announced()

    def _forget_announced(self) -> None:
        self._heard = 0
        self._fetching = None  # the chunks belong to a former version
        self._queue.clear()

    def is_coming(self, version: int) -> bool:
        """Return True if this version (0: any) is queued or being fetched; before `begin`, always True."""
        if not self._asked_newest:
            return True
        coming = [*([self._fetching] if self._fetching else []), *self._queue]
        return any(version in (0, item.version) or item.version == 0 for item in coming)

    @property
    def next_time(self) -> float:
        """Time at which `tick` has something to do."""
        fetching = self._fetching
        if fetching is None:
            return float("inf")
        if not fetching.open:
            return fetching.resume_at
        return fetching.heard_at + STALL_TIMEOUT if self._queue else float("inf")

    def tick(self, now: float) -> list[Step]:
        """Continue a fetch after its pause, and give up one that stalls."""
        fetching = self._fetching
        if fetching is not None and fetching.open and self._queue and now >= fetching.heard_at + STALL_TIMEOUT:
            self._fetching = None  # the server may be gone; another server may have newer versions
            self._advance(now)
        elif fetching is not None and not fetching.open and now >= fetching.resume_at:
            self._request(fetching, now)
        return self._take_steps()

    # The next request

    def _advance(self, now: float) -> None:
        """Deliver or fetch the next versions of the queue."""
        while self._queue and self._fetching is None:
            if not self._has_receivers() and len(self._queue) > 1:
                self._queue.popleft()  # of versions, only the newest counts
                continue
            item = self._queue.popleft()
            if isinstance(item, Model):
                self._deliver(item)
            elif not self._is_here(item.version, item.checksum):
                self._fetching = _Fetching(item.version, now)
                self._request(self._fetching, now)

    def _is_here(self, version: int, checksum: int | None) -> bool:
        """Return True if this version need not be fetched, because it is here or was found elsewhere."""
        newest = self._newest
        if newest is not None and not self._is_renewed and version <= newest.version:
            return True  # a newer version will be announced
        if newest is not None and (version, checksum) == (newest.version, newest.checksum):
            self._is_renewed = False  # published again by a restarted server
            return True
        elsewhere = None if checksum is None else self._find(version, checksum)
        if elsewhere is not None:
            self._deliver(elsewhere)
        return elsewhere is not None

    def _deliver(self, model: Model) -> None:
        newest = self._newest
        if newest is not None and not self._is_renewed and model.version <= newest.version:
            return
        is_renewed, self._is_renewed = self._is_renewed, False
        skipped = 0 if newest is None else max(0, model.version - newest.version - 1)
        self._newest = model
        self._steps.append(CompleteModel(model, is_renewed, self._source, skipped))

    # Chunks

    def _request(self, fetching: _Fetching, now: float) -> None:
        """Request the first chunk, or as many chunks as may be on their way at once."""
        assembly = fetching.assembly
        if assembly is None:
            fetching.open += 1
            self._steps.append(ChunkRequest(fetching.version, 0, self._limits.tuning.model_chunk, now, fetching))
            return
        if not fetching.open:
            fetching.asked = assembly.offset  # the fetch goes on from here if a node sent less than requested
        end = min(assembly.size, assembly.offset + self._limits.tuning.model_window * fetching.stride)
        while fetching.open < fetching.window and fetching.asked < end:
            offset, fetching.asked = fetching.asked, fetching.asked + fetching.stride
            fetching.open += 1
            self._steps.append(ChunkRequest(assembly.version, offset, fetching.stride, now, fetching))

    def receive_answer(self, request: ChunkRequest, answer: Answer, now: float) -> list[Step]:
        """Process the answer to a request: a chunk or an error."""
        fetching = request.fetching
        fetching.waited = now - request.asked_at
        fetching.window = self._window(fetching)
        if isinstance(answer, Closed) or self._fetching is not fetching:
            return []  # the fetch was closed or given up
        fetching.open -= 1
        fetching.heard_at = now
        try:
            model = self._assemble(fetching, answer)
        except MemoireError as error:
            if isinstance(error, ProtocolError):
                self.refused[error.code] += 1
            self._give_up(fetching.version, now)
        else:
            self._continue(fetching, model, now)
        self._advance(now)
        return self._take_steps()

    def _window(self, fetching: _Fetching) -> int:
        """Return the number of chunks that may be on their way, from the time that the newest one took."""
        most = self._limits.tuning.model_window
        if fetching.waited < ALONE_TIME:
            return most
        return min(most, fetching.window + 1) if fetching.waited < QUICK_TIME else 1

    def _give_up(self, version: int, now: float) -> None:
        """Give up a version that is missing or damaged, and try the newest one once instead. A later announcement
        fetches this version, or a newer one.
        """
        self._fetching = None
        known = self._newest.version if self._newest and not self._is_renewed else 0
        self._heard = max([known, *(item.version for item in self._queue)])
        if version and not self._queue:
            self._fetching = _Fetching(0, now)
            self._request(self._fetching, now)

    def _continue(self, fetching: _Fetching, model: Model | None, now: float) -> None:
        if model is None and fetching.assembly is not None:
            if now >= fetching.resume_at:
                self._request(fetching, now)
            return
        self._fetching = None
        if model is not None:
            self._deliver(model)

    def _assemble(self, fetching: _Fetching, answer: Answer) -> Model | None:
        """Add a chunk. Return the model once it is whole; None with no assembly if the model is here already."""
        if isinstance(answer, MemoireError):
            raise answer
        chunk = answer.body
        if not isinstance(chunk, messages.Chunk):
            raise ProtocolError("unexpected", f"FETCH was answered by {answer.type.name}")
        payload = b"" if answer.payload is None else memoryview(answer.payload)
        self.fetched_bytes += len(payload)
        if fetching.assembly is None:
            self._heard = max(self._heard, chunk.version)  # the newest was requested, and is newer than announced
            if chunk.epoch:  # the notice may come later, or never after a restart
                self._source = (chunk.home, max(chunk.epoch, self._epochs.get(chunk.home, 0)))
                self._epochs.setdefault(*self._source)
            if self._is_here(chunk.version, chunk.checksum):
                return None  # do not fetch the version again
            self._start(fetching, chunk, len(payload))
        assembly = fetching.assembly
        assert assembly is not None
        if (chunk.version, chunk.checksum) != (assembly.version, assembly.checksum):
            raise ProtocolError("unexpected", "a chunk of another model")
        return assembly.add(chunk.offset, payload, answer.header.payload_checksum)

    def _start(self, fetching: _Fetching, chunk: messages.Chunk, stride: int) -> None:
        """Begin the assembly with the first chunk, which has size and hash. Many clients hear of a model at once: if
        the chunk took long, each client requests the other chunks after a random pause.
        """
        fetching.assembly = ModelAssembly(
            chunk.topic,
            chunk.version,
            chunk.size,
            chunk.checksum,
            chunk.text,
            byte_limit=self._limits.model_bytes or MODEL_BYTES,
            early=4 * self._limits.tuning.model_window,
        )
        fetching.stride = fetching.asked = stride
        if fetching.waited < ALONE_TIME:
            return
        spread = self._limits.tuning.model_spread * min(1.0, chunk.size / LARGE_BODY_BYTES)
        fetching.resume_at = fetching.heard_at + self._rng.uniform(0.0, spread)
