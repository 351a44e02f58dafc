"""Which versions of one topic are fetched, and when: announced, on their way, here.

    notice v7 ─┐                                  ┌─ is it here already, or at a neighbour? then nothing is fetched
    UPDATED v7 ┴▶ queue of the topic ─▶ fetching ─┼─ first chunk: says size and hash
                                                  └─ a random pause, if many ask, then a few chunks at a time
                                                                                         ─▶ sum ─▶ delivered

Bodies are fetched one at a time, in chunks, and are seen by nobody before their sum is right. What fails is forgotten,
and asked for again when its version is announced the next time: that happens every few seconds. Pure: each call takes
the time and returns what is to be done.
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
"""Versions that are fetched after a gap in what was heard."""
MAX_QUEUED = 256
"""Versions of one topic that wait until the one that is being fetched is here; the oldest are skipped beyond."""
STALL_TIMEOUT = 10.0
"""Seconds without a chunk after which a newer version is fetched instead, where there is one."""
QUICK = 0.2
"""Seconds within which a chunk comes where the way has room for more of them at a time."""
ALONE = 0.05
"""Seconds within which a chunk comes if few clients ask: then each asks for all chunks that it may, without a pause."""
MAX_HOMES = 4096
"""Servers whose newest epoch is kept for each topic: as many as a WELCOME can name."""
LARGE_BODY_BYTES = 16 << 20
"""Bytes of a body from which on the whole of `limits.tuning.model_spread` is used."""


@dataclass(frozen=True, slots=True)
class _WantedVersion:
    """A version that was announced, 0 for the newest; its checksum where a notice said it."""

    version: int
    checksum: int | None = None


class _Fetching:
    """A body on its way."""

    def __init__(self, version: int, now: float) -> None:
        self.version = version
        self.heard_at = now  # when the newest chunk came
        self.waited = 0.0  # seconds until it came
        self.assembly: ModelAssembly | None = None
        self.asked = 0  # everything before this offset was asked for
        self.open = 0  # chunks that were asked for and have not come
        self.stride = 0  # bytes of a chunk, as the first one came
        self.resume_at = 0.0  # when the random pause is over
        self.window = 1  # chunks that may be on their way: more while they come quickly, fewer where many clients fetch


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    """A stretch of a body is to be asked for; the answer goes to `TopicFetcher.answered`."""

    version: int
    """0: the newest one."""
    offset: int
    size: int
    asked_at: float
    fetching: _Fetching


@dataclass(frozen=True, slots=True)
class CompleteModel:
    """A model is complete."""

    model: Model
    is_renewed: bool
    """Its publisher began anew, so that its version may be lower than before."""
    source: tuple[int, int]
    """Of the topic's newest notice: hash of the server's name, and its epoch; zeros where there was none."""
    skipped: int
    """Versions between this one and the one before."""


Step: TypeAlias = ChunkRequest | CompleteModel


class TopicFetcher:
    """Decides which versions of a topic's models are fetched, from where and when. Pure.

    Args:
        has_receivers: Whether anybody wants every version, and not only the newest.
        find: Looks up, by version and checksum, a model that came from another server already.
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
        self._epochs: OrderedDict[int, int] = OrderedDict()  # newest one of a notice, by the hash of its server's name
        self._source = (0, 0)  # of the newest notice: hash of the server's name, epoch
        self._heard = 0  # newest version that was announced, fetched or not
        self._queue: deque[Model | _WantedVersion] = deque()  # in order: a body that is here, or a version to fetch
        self._fetching: _Fetching | None = None
        self._asked_newest = False
        self._is_renewed = False  # the publisher began anew: a version that we know may name another model
        self._steps: list[Step] = []  # of the call that is under way
        self.refused: Counter[str] = Counter()
        """Bodies that were refused, by code."""
        self.fetched_bytes = 0
        """Of all chunks that came."""

    def _taken(self) -> list[Step]:
        steps, self._steps = self._steps, []
        return steps

    def begin(self, now: float) -> list[Step]:
        """Ask for the newest model, once."""
        if not self._asked_newest:
            self._asked_newest = True
            # In front of what was announced before: behind it, it would be taken for what is newer than that.
            self._queue.appendleft(_WantedVersion(0))
            self._advance(now)
        return self._taken()

    @property
    def heard(self) -> int:
        """The newest version that was announced, fetched or not; 0: none."""
        return self._heard

    def announced(self, version: int, now: float) -> list[Step]:
        """The server says what its newest version is: a notice may have been missed."""
        if version > self._heard:
            self._enqueue(_WantedVersion(version), version)
            self._advance(now)
        return self._taken()

    def noticed(self, notice: messages.Notice, payload: Any, now: float) -> list[Step]:
        """A model was published; its body may be here already. After `is_anew`.

        Raises:
            ProtocolError: the body is not the one that was announced.
        """
        if notice.version <= self._heard:
            return []
        if payload is None and notice.size:
            item: Model | _WantedVersion = _WantedVersion(notice.version, notice.checksum)
        else:
            item = model_of(notice, b"" if payload is None else bytes(payload))
        self._enqueue(item, notice.version)
        self._advance(now)
        return self._taken()

    def _enqueue(self, item: Model | _WantedVersion, version: int) -> None:
        """Put a version behind those that were heard of; who receives every one gets those in between too, as far as
        the node still has them.
        """
        if self._has_receivers() and self._heard:
            between = range(max(self._heard + 1, version - MAX_MISSED), version)
            self._queue.extend(_WantedVersion(missed) for missed in between)
        self._queue.append(item)
        self._heard = version
        while len(self._queue) > MAX_QUEUED:
            self._queue.popleft()

    def is_anew(self, notice: messages.Notice, home: int, *, is_kept: bool = False) -> bool:
        """Whether the notice shows that its publisher began anew and counts from 1: the epoch of its server is newer,
        and its versions name other models. That another server has a newer epoch says nothing: it may only be younger.

        Args:
            home: Hash of that server's name.
            is_kept: The server keeps its models on disk: one that began anew goes on counting.
        """
        self._source = (home, notice.epoch)
        former, newest = self._epochs.get(home, 0), self._newest
        # By size and not by equality: notices of two lives may come in any order, by several ways, and an epoch is the
        # time at which a life began. If a clock was set back, the later life has the smaller epoch and is not seen
        # here; HELLO compares for equality, and `renew` is called because of its answer.
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
        """The publisher began anew: its versions may be lower than those we know, and count from here on."""
        self._is_renewed = True
        self._forget_announced()

    def forget(self) -> None:
        """Another run is counted: the model that is here belongs to the former one. Versions go on counting."""
        self._newest = None
        self._forget_announced()

    def _forget_announced(self) -> None:
        self._heard = 0
        self._fetching = None  # its chunks belong to a version of before
        self._queue.clear()

    def is_coming(self, version: int) -> bool:
        """Whether this version (0: any) is being fetched now, or waits for it; until `begin`, the newest waits."""
        if not self._asked_newest:
            return True
        there = [*([self._fetching] if self._fetching else []), *self._queue]
        return any(version in (0, item.version) or item.version == 0 for item in there)

    @property
    def next_time(self) -> float:
        """When `turn` has something to do."""
        fetching = self._fetching
        if fetching is None:
            return float("inf")
        if not fetching.open:
            return fetching.resume_at
        return fetching.heard_at + STALL_TIMEOUT if self._queue else float("inf")

    def turn(self, now: float) -> list[Step]:
        """Go on with a body whose pause is over, and give up one that stalls."""
        fetching = self._fetching
        if fetching is not None and fetching.open and self._queue and now >= fetching.heard_at + STALL_TIMEOUT:
            self._fetching = None  # its server is away, perhaps; another one may have what came after it
            self._advance(now)
        elif fetching is not None and not fetching.open and now >= fetching.resume_at:
            self._ask(fetching, now)
        return self._taken()

    # What is next

    def _advance(self, now: float) -> None:
        """Deliver what is next in the queue, or fetch it."""
        while self._queue and self._fetching is None:
            if not self._has_receivers() and len(self._queue) > 1:
                self._queue.popleft()  # only the newest counts
                continue
            item = self._queue.popleft()
            if isinstance(item, Model):
                self._deliver(item)
            elif not self._is_here(item.version, item.checksum):
                self._fetching = _Fetching(item.version, now)
                self._ask(self._fetching, now)

    def _is_here(self, version: int, checksum: int | None) -> bool:
        """Whether this version need not be fetched: it is the newest one here, or a neighbour has it."""
        newest = self._newest
        if newest is not None and not self._is_renewed and version <= newest.version:
            return True  # what came after it is announced, also where the newest was asked for
        if newest is not None and (version, checksum) == (newest.version, newest.checksum):
            self._is_renewed = False  # published again, by a server that began anew
            return True
        found = None if checksum is None else self._find(version, checksum)
        if found is not None:
            self._deliver(found)
        return found is not None

    def _deliver(self, model: Model) -> None:
        newest = self._newest
        if newest is not None and not self._is_renewed and model.version <= newest.version:
            return
        is_renewed, self._is_renewed = self._is_renewed, False
        skipped = 0 if newest is None else max(0, model.version - newest.version - 1)
        self._newest = model
        self._steps.append(CompleteModel(model, is_renewed, self._source, skipped))

    # Chunks

    def _ask(self, fetching: _Fetching, now: float) -> None:
        """Ask for the first chunk, or for as many as may be on their way at once."""
        assembly = fetching.assembly
        if assembly is None:
            fetching.open += 1
            self._steps.append(ChunkRequest(fetching.version, 0, self._limits.tuning.model_chunk, now, fetching))
            return
        if not fetching.open:
            fetching.asked = assembly.offset  # again from here, should a node have sent less than it was asked for
        end = min(assembly.size, assembly.offset + self._limits.tuning.model_window * fetching.stride)
        while fetching.open < fetching.window and fetching.asked < end:
            offset, fetching.asked = fetching.asked, fetching.asked + fetching.stride
            fetching.open += 1
            self._steps.append(ChunkRequest(assembly.version, offset, fetching.stride, now, fetching))

    def answered(self, request: ChunkRequest, answer: Answer, now: float) -> list[Step]:
        """The answer to a request: a chunk, or why there is none."""
        fetching = request.fetching
        fetching.waited = now - request.asked_at
        fetching.window = self._window(fetching)
        if isinstance(answer, Closed) or self._fetching is not fetching:
            return []  # or it was given up meanwhile
        fetching.open -= 1
        fetching.heard_at = now
        try:
            model = self._assemble(fetching, answer)
        except MemoireError as error:
            if isinstance(error, ProtocolError):
                self.refused[error.code] += 1
            self._give_up(fetching.version, now)
        else:
            self._go_on(fetching, model, now)
        self._advance(now)
        return self._taken()

    def _window(self, fetching: _Fetching) -> int:
        """Chunks that may be on their way, by how long the newest one took."""
        most = self._limits.tuning.model_window
        if fetching.waited < ALONE:
            return most
        return min(most, fetching.window + 1) if fetching.waited < QUICK else 1

    def _give_up(self, version: int, now: float) -> None:
        """It is not there (any more), or damaged. The newest one is tried once instead; then the next announcement of
        this version, or a newer one, fetches it.
        """
        self._fetching = None
        known = self._newest.version if self._newest and not self._is_renewed else 0
        self._heard = max([known, *(item.version for item in self._queue)])
        if version and not self._queue:
            self._fetching = _Fetching(0, now)
            self._ask(self._fetching, now)

    def _go_on(self, fetching: _Fetching, model: Model | None, now: float) -> None:
        if model is None and fetching.assembly is not None:
            if now >= fetching.resume_at:
                self._ask(fetching, now)
            return
        self._fetching = None
        if model is not None:
            self._deliver(model)

    def _assemble(self, fetching: _Fetching, answer: Answer) -> Model | None:
        """Take a chunk; returns the model when it is whole, or here already (then there is no assembly)."""
        if isinstance(answer, MemoireError):
            raise answer
        chunk = answer.body
        if not isinstance(chunk, messages.Chunk):
            raise ProtocolError("unexpected", f"FETCH was answered by {answer.type.name}")
        payload = b"" if answer.payload is None else memoryview(answer.payload)
        self.fetched_bytes += len(payload)
        if fetching.assembly is None:
            self._heard = max(self._heard, chunk.version)  # the newest was asked for, and it is newer than expected
            if chunk.epoch:  # its notice may come later, or never: its publisher may begin anew before
                self._source = (chunk.home, max(chunk.epoch, self._epochs.get(chunk.home, 0)))
                self._epochs.setdefault(*self._source)
            if self._is_here(chunk.version, chunk.checksum):
                return None  # not again, however large
            self._start(fetching, chunk, len(payload))
        assembly = fetching.assembly
        assert assembly is not None
        if (chunk.version, chunk.checksum) != (assembly.version, assembly.checksum):
            raise ProtocolError("unexpected", "a chunk of another model")
        return assembly.add(chunk.offset, payload, answer.header.payload_checksum)

    def _start(self, fetching: _Fetching, chunk: messages.Chunk, stride: int) -> None:
        """The first chunk says what is coming. Many clients hear of a model at once: if the chunk was long in coming,
        each takes the rest a little later, at random.
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
        if fetching.waited < ALONE:
            return
        spread = self._limits.tuning.model_spread * min(1.0, chunk.size / LARGE_BODY_BYTES)
        fetching.resume_at = fetching.heard_at + self._rng.uniform(0.0, spread)
