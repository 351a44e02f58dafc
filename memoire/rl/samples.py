"""Samples of any pipeline: what workers of `memoire.tmrl` send, and how its trainers take them into a memory.

    sample    (act, obs, rew, terminated, truncated, info)     plain values and arrays, as a compressor left them
    entry     obs: its bytes, ragged | reward | is_reset | episode, step

    queue of servers ──take──▶ a thread ──▶ waiting buffers ──update──▶ memory.append_buffer ──▶ batches

They are in one table of rollouts, so a server needs no schema of the environment. `append_buffer` of a trainer's own
memory takes them.

A journal has them on disk, as they came: a checkpoint writes only what is new, and any memory is rebuilt of it. Each
buffer is a record of a `RecordLog`. Files whose samples have left the memory are removed. To rebuild a memory, the
journal gives it buffers as they came: no object of the user's is ever stored.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from memoire import Column, Ragged, Reader, Rollouts, Schema, Table
from memoire.building import (
    ClosingContext,
    Condition,
    DamagedRecord,
    Fault,
    FileKind,
    RecordLog,
    at_once,
    no_fault,
    salvage_log,
    setting,
    whole,
)
from memoire.errors import Closed, DataError, MemoireError, MemoireTimeout, NotEnoughSamples
from memoire.kinds import pack, unpack

from .codec import assembled, leaves_of, paths_of, structure_of
from .saving import put_generator, state_of_generator

_log = logging.getLogger(__name__)

TABLE: Final = "samples"
"""Name of the table."""
CAPACITY: Final = 100_000
"""Samples that the table holds unless told otherwise; the oldest leave."""
SCHEMA: Final = Schema(
    {
        "obs": Column(np.uint8, (None,), "state"),
        "reward": np.float32,
        "is_reset": np.bool_,
        "episode": np.int64,
        "step": np.int64,
        "test_length": np.int64,
        "test_return": np.float64,
    }
)


def samples_table(capacity: int = CAPACITY, least: int = 1) -> Table:
    """A table that holds so many samples of any pipeline; the oldest leave, and no worker ever waits.

    Args:
        least: Samples that a trainer should wait for before it takes some: it reads that off `cache_size`.
    """
    return Table(SCHEMA, storage="rollouts", capacity=capacity, on_full="oldest", cache_size=whole("least", least, 1))


class Sample(NamedTuple):
    """What a step gave, as the compressor left it."""

    act: Any
    obs: Any
    rew: Any
    terminated: Any
    truncated: bool
    info: Any
    is_reset: bool = False
    """Whether it is what `reset` gave: no step, and the first sample of an episode."""
    episode: int = 0
    step: int = 0
    """Which episode of its worker, and which step of that; 0 is the reset."""
    reward: float = 0.0
    """As the environment gave it, whatever the compressor made of it."""
    test_length: int = 0
    test_return: float = 0.0
    """Of a reset: of the test episode that the worker ran before it. Length 0 is none."""
    client: bytes = b""
    """Who sent it; b"" before it is sent."""


def columns_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """Columns [T, ...] of an episode for `Client.push_episode`.

    Raises:
        ParameterError: a sample holds a value that does not travel; says where.
    """
    _, _, _, _, _, _, is_reset, episode, step, reward, test_length, test_return, _ = zip(*samples, strict=True)
    bodies = [pack(each[:6]) for each in samples]
    return {
        "obs": Ragged(np.frombuffer(b"".join(bodies), np.uint8), list(map(len, bodies))),
        "reward": np.nan_to_num(np.array(reward, np.float32)),
        "is_reset": np.array(is_reset),
        "episode": np.array(episode, np.int64),
        "step": np.array(step, np.int64),
        "test_length": np.array(test_length, np.int64),
        "test_return": np.array(test_return, np.float64),
    }


def samples_of(rollouts: Rollouts) -> list[Sample]:
    """The samples that a learner took, in order.

    Raises:
        DataError: an entry is none.
    """
    packed: Ragged = rollouts["obs"]
    names = "is_reset", "episode", "step", "reward", "test_length", "test_return"
    facts = [rollouts[name].tolist() for name in names]
    clients = [bytes(each) for each in rollouts.client]
    facts.append(
        [client for client, count in zip(clients, rollouts.lengths.tolist(), strict=True) for _ in range(count)]
    )
    body, ends, found = memoryview(packed.values.tobytes()), np.cumsum(packed.lengths).tolist(), []
    for begin, end, more in zip([0, *ends], ends, zip(*facts, strict=True), strict=False):
        parts = unpack(body[begin:end])
        if not isinstance(parts, tuple) or len(parts) != 6:
            raise DataError("a sample", "holds something else than act, obs, rew, terminated, truncated and info")
        found.append(Sample._make(parts + more))
    return found


def episodes_of(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Samples by episode, in order: each begins with a reset, or in the middle of what was sent in parts."""
    found: list[list[Sample]] = []
    for sample in samples:
        if sample.is_reset or not found:
            found.append([])
        found[-1].append(sample)
    return found


Calls: TypeAlias = Iterable[tuple[Callable[..., object], tuple[Any, ...]]]
"""Functions and arguments, for `at_once`."""
MAX_WAITING: Final = 100_000
"""Samples that wait for the memory; beyond, the servers keep them."""
MAX_TAKE: Final = 8192
"""Samples that are asked for at once."""
QUICK: Final = 0.05
"""Seconds that a take of more than the least waits."""
PAUSE: Final = 0.05
"""Seconds until the thread looks again after an error, or while too many samples wait."""


class SampleTaker:
    """Takes samples on a thread of its own, until it is closed.

    Args:
        reader: Of a table that `samples_table` made.
        least: Samples that one take waits for.
        patience: Seconds after which it takes what is there.
    """

    def __init__(self, reader: Reader, least: int = 1, patience: float = 1.0) -> None:
        self._reader, self._least, self._patience = reader, least, patience
        self._changed = Condition()  # samples came
        self._waiting: deque[list[Sample]] = deque()
        self._count = 0  # samples that wait
        self._size = 0  # samples to ask for, if more than the least
        self.damaged = 0
        """Entries that held something else than samples."""
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="memoire-trainer-samples", daemon=True)
        self._thread.start()

    def take_into(self, coming: deque[list[Sample]]) -> None:
        """Add what came since the last call, in order, parted where samples do not follow each other."""
        with self._changed.held():
            found = [each for samples in self._waiting for each in following(samples)]
            at_once([(coming.extend, (found,)), (self._waiting.clear, ()), *setting(self, _count=0)])

    def wait(self, timeout: float) -> None:
        """Return when samples wait to be taken, or after so many seconds."""
        with self._changed.held():
            self._changed.wait_for(lambda: self._count > 0, timeout)

    def close(self) -> None:
        """End the thread."""
        self._is_closing = True

    def _run(self) -> None:
        while not self._is_closing:
            if self._count >= MAX_WAITING:
                time.sleep(PAUSE)
                continue
            try:
                samples = self._take()
            except Closed:
                return
            except MemoireError as error:
                if not isinstance(error, MemoireTimeout | NotEnoughSamples):
                    _log.warning("no samples: %s", error)
                    time.sleep(PAUSE)
                continue
            with self._changed.held():
                self._waiting.append(samples)
                self._count += len(samples)
                self._changed.notify_all()

    def _take(self) -> list[Sample]:
        """What is there: at least `least` samples, or fewer after `patience` seconds."""
        wanted, self._size = max(self._least, self._size), 0
        try:
            rollouts = self._reader.take(wanted, QUICK if wanted > self._least else self._patience, exact=False)
        except NotEnoughSamples as short:
            if not short.unused or (wanted > self._least > short.unused):
                raise
            rollouts = self._reader.take(short.unused, self._patience, exact=False)
        else:
            self._size = min(MAX_TAKE, 2 * len(rollouts))  # there may be more
        try:
            return samples_of(rollouts)
        except DataError:
            self.damaged += len(rollouts)
            raise


KIND: Final = FileKind(b"memojrnl", 5, "a trainer's journal of samples")
PARTS: Final = 32
"""A file has this share of the memory's samples."""
MAX_PENDING: Final = 4096
"""Samples that wait for a write at most: what a killed process loses."""
SUFFIX: Final = ".samples"


@dataclass
class KeptBuffer:
    """Samples of one worker, as a memory takes them."""

    memory: list[Any]
    starts: list[bool] | None = None
    """For each sample, whether it is a reset's; None if that was not said."""
    continues: bool = False
    """Whether the first one follows the last sample before it."""

    def __len__(self) -> int:
        return len(self.memory)


class SampleJournal(ClosingContext):
    """Samples in files of a folder, oldest first. For one process, which has its lock, and one thread.

    Args:
        folder: Is made. What is in it is gone on from.
        capacity: Samples that the memory holds: so many are kept here, and a little more.
        at: Called before each step, so that a test may let it fail: see `RecordLog`.

    Raises:
        DataError: a file of the folder is damaged, missing or another one; nothing was changed.
        StateError: another process has the folder.
        OSError: the folder cannot be made, read or written.
    """

    def __init__(self, folder: str | Path, capacity: int, *, at: Fault = no_fault) -> None:
        self._capacity = whole("capacity", capacity, 1)
        self._part = max(1, capacity // PARTS)
        self._pending: list[KeptBuffer] = []
        self._pending_samples = 0
        self._log = RecordLog(folder, KIND, SUFFIX, at=at)

    def __len__(self) -> int:
        """Samples that are here, those included that wait for a write."""
        return sum(sum(file.tags) for file in self._log.files) + self._pending_samples

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self._log.folder

    @property
    def series(self) -> str:
        """Names this journal, in hex: a checkpoint says which one belongs to it."""
        return self._log.series

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self._log.files)

    def keep(self, buffer: Any) -> None:
        """Note a buffer: its `memory`, and `starts` and `continues` if it has them. On disk soon, at once by `commit`.

        Raises:
            ParameterError: a sample holds something else than plain values and arrays.
            OSError: it cannot be written. It waits for the next write.
        """
        at_once(self.noting(buffer))
        self.write_if_many()

    def noting(self, buffer: Any) -> list[tuple[Callable[..., object], tuple[Any, ...]]]:
        """The calls that note a buffer, for `at_once`; `write_if_many` has to follow."""
        starts = getattr(buffer, "starts", None)
        kept = KeptBuffer(
            list(buffer.memory), None if starts is None else [bool(each) for each in starts],
            bool(getattr(buffer, "continues", False)),
        )  # fmt: skip
        count = setting(self, _pending_samples=self._pending_samples + len(kept))
        return [(self._pending.append, (kept,)), *count]

    def write_if_many(self) -> None:
        """Write what was noted, if it is much. Raises as `keep`."""
        if self._pending_samples >= min(MAX_PENDING, self._part):
            self._write()

    def commit(self) -> None:
        """Have all samples on disk, and remove files that the memory needs no more.

        Raises:
            OSError: it cannot be written. The samples wait for the next commit.
        """
        self._write()
        samples = [sum(file.tags) for file in self._log.files]
        spare = sum(samples) - self._capacity - self._part
        count = 0
        while count < len(samples) - 1 and samples[count] <= spare:
            spare -= samples[count]
            count += 1
        self._log.remove(count)

    def buffers(self) -> Iterator[KeptBuffer]:
        """All buffers, oldest first, one in memory at a time; those that wait for a write are not among them.

        Raises:
            DataError: a file was changed since the journal was opened.
        """
        return (unpacked_buffer(record.payload) for record in self._log.records())

    @staticmethod
    def salvage(folder: str | Path, missing: list[DataError]) -> Iterator[KeptBuffer]:
        """Read what is left of a damaged journal, oldest first: a program of the user's may keep it in a new one.

        Args:
            folder: Of the journal, which is only read.
            missing: Gets an error for each part that is damaged or not there.
        """
        for record in salvage_log(folder, KIND, SUFFIX, missing):
            if not isinstance(record, DamagedRecord):
                yield unpacked_buffer(record.payload)

    def close(self) -> None:
        """Let another process have the folder; once is enough. Samples that wait for a write are not written."""
        self._log.close()

    def _write(self) -> None:
        """Append a record of each buffer that waits."""
        if self._pending_samples:
            if self._log.files and sum(self._log.files[-1].tags) >= self._part:
                self._log.begin_file()
            written = setting(self, _pending=[], _pending_samples=0)
            self._log.append([(len(each), packed_buffer(each)) for each in self._pending], written)


VALUES, ARRAYS, NUMBERS = range(3)
"""How a column is stored: a list; rows of one array, which were arrays, or numbers of NumPy."""


def packed_buffer(buffer: KeptBuffer) -> bytes:
    """A buffer as the body of a record: samples that are nested alike are a run, and each of their leaves is a column.

    Raises:
        ParameterError: a sample holds something else than plain values; says where.
    """
    runs = []
    for structure, samples in groupby(buffer.memory, structure_of):
        rows = [leaves_of(sample) for sample in samples]
        paths = paths_of(structure, "sample")
        columns = [_column([row[place] for row in rows], path) for place, path in enumerate(paths)]
        runs.append((len(rows), assembled(structure, [None] * len(columns)), columns))
    return pack((runs, buffer.starts, buffer.continues))


def _column(values: list[Any], path: str) -> tuple[int, bytes]:
    """How values are stored, and that as bytes: those of NumPy which are of one form take a fraction as one array."""
    first = values[0]
    is_numpy = isinstance(first, np.ndarray | np.generic) and len({type(each) for each in values}) == 1
    if not is_numpy or any((each.dtype, each.shape) != (first.dtype, first.shape) for each in values):
        return VALUES, pack(values, path)
    rows = np.concatenate([np.ravel(each) for each in values]).reshape(len(values), *first.shape)
    return NUMBERS if isinstance(first, np.generic) else ARRAYS, pack(rows, path)


def unpacked_buffer(body: bytes) -> KeptBuffer:
    """The buffer of a record's body; arrays are views of larger ones. Raises DataError: these are other bytes."""
    what = "a record of samples"
    try:
        runs, starts, continues = unpack(body, what)
        memory = [sample for count, template, columns in runs for sample in _samples(count, template, columns, what)]
        if not isinstance(continues, bool) or not (starts is None or len(starts) == len(memory)):
            raise ValueError("which of them begin an episode is not said")
    except (ValueError, TypeError, IndexError, OverflowError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(what, f"cannot be read: {error}") from error
    return KeptBuffer(memory, starts, continues)


def _samples(count: int, template: Any, columns: list[tuple[int, bytes]], what: str) -> list[Any]:
    """The samples of a run, which are nested as a template."""
    leaves = []
    for kind, data in columns:
        rows = unpack(data, what)
        # With "...", an array of no dimension stays one.
        leaves.append([rows[place, ...] for place in range(len(rows))] if kind == ARRAYS else list(rows))
    if len(leaves) != len(leaves_of(template)) or any(len(each) != count for each in leaves):
        raise ValueError("columns are of other samples")
    structure = structure_of(template)
    return [assembled(structure, row) for row in (zip(*leaves, strict=True) if leaves else [()] * count)]


class EpisodeReturns:
    """Returns and lengths of the episodes that samples tell of, since they were asked for last."""

    def __init__(self) -> None:
        self._open: dict[bytes, tuple[int, float]] = {}  # length and return of each worker's episode
        self._ended: dict[str, list[tuple[int, float]]] = {"train": [], "test": []}

    def adding(self, samples: Sequence[Sample]) -> Calls:
        """The calls that count samples, for `at_once`."""
        found: dict[bytes, tuple[int, float]] = {}
        ended: dict[str, list[tuple[int, float]]] = {"train": [], "test": []}
        for sample in samples:
            client = sample.client
            length, returned = (0, 0.0) if sample.is_reset else found.get(client) or self._open.get(client, (0, 0.0))
            if sample.test_length:
                ended["test"].append((sample.test_length, sample.test_return))
            if not sample.is_reset:
                length, returned = length + 1, returned + sample.reward
            if sample.terminated or sample.truncated:
                ended["train"].append((length, returned))
            found[client] = (length, returned)
        return [(self._open.update, (found,)), *((self._ended[kind].extend, (ended[kind],)) for kind in ended)]

    def state(self) -> list[list[Any]]:
        """The episodes that go on, as JSON has them: client, length and return."""
        return [[client.hex(), *each] for client, each in self._open.items()]

    def restore(self, state: list[list[Any]]) -> None:
        """Go on with these episodes."""
        self._open = {bytes.fromhex(client): (length, returned) for client, length, returned in state}

    def figures(self) -> dict[str, float]:
        """return_train, return_test, episode_length_train and episode_length_test, in the mean; {} of no episodes."""
        found = {}
        for kind, episodes in self._ended.items():
            if episodes:
                found[f"episode_length_{kind}"] = sum(length for length, _ in episodes) / len(episodes)
                found[f"return_{kind}"] = sum(returned for _, returned in episodes) / len(episodes)
        at_once([(episodes.clear, ()) for episodes in self._ended.values()])
        return found


class MemoryExperience:
    """Samples that a taker brings, in a memory.

    Args:
        taker: Where they come from.
        memory: What holds them: `append` or `append_buffer` takes a buffer, its length is what can be drawn, and to
            iterate over it gives the batches of a round.
        buffer: Called with samples of one worker, and whether the first one follows the last sample that the memory
            got; makes what the memory takes.
        journal: Keeps each buffer that the memory has; None: nothing does.
    """

    def __init__(
        self,
        taker: SampleTaker,
        memory: Any,
        buffer: Callable[[list[Sample], bool], Any],
        journal: SampleJournal | None = None,
    ) -> None:
        self._taker, self.memory, self._buffer, self._journal = taker, memory, buffer, journal
        self.received = 0
        """Steps of environments that came; resets are none."""
        self._take = getattr(memory, "append", None) or memory.append_buffer
        self._last: Sample | None = None  # that the memory got
        self._coming: deque[list[Sample]] = deque()  # samples that the memory gets next, as they follow each other
        self.returns = EpisodeReturns()
        """Of the episodes that came."""
        self._batches: Iterator[Any] = iter(())

    def update(self) -> None:
        """Give the memory what came: a buffer for each worker, as its samples follow each other."""
        self._taker.take_into(self._coming)
        while self._coming:
            self._append(self._coming[0])

    def _append(self, samples: list[Sample]) -> None:
        """Give the memory the first of what came. It stays the first until the memory has it, whatever interrupts."""
        continues = self._last is not None and _follows(self._last, samples[0])
        buffer = self._buffer(samples, continues)
        received = self.received + sum(not sample.is_reset for sample in samples)
        has_come = [(self._coming.popleft, ()), *setting(self, _last=samples[-1], received=received)]
        noted = () if self._journal is None else self._journal.noting(buffer)
        at_once([(self._take, (buffer,)), *has_come, *self.returns.adding(samples), *noted])
        if self._journal is not None:
            self._journal.write_if_many()

    def state(self) -> dict[str, Any]:
        """What `restore` takes, as JSON has it: the newest sample, open episodes, and the memory's own generators."""
        last = self._last
        return {
            "last": None if last is None else [last.client.hex(), last.episode, last.step],
            "open": self.returns.state(), "random": {name: state_of_generator(each) for name, each in self._random()},
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any], received: int) -> None:
        """Go on where another process was when it called `state`, and had received so many samples."""
        self.received = received
        if state["last"] is not None:
            client, episode, step = state["last"]
            self._last = Sample(
                None, None, None, False, False, {}, client=bytes.fromhex(client), episode=episode, step=step
            )
        self.returns.restore(state["open"])
        for name, generator in self._random():
            if name in state["random"]:
                put_generator(generator, *state["random"][name])

    def _random(self) -> Iterator[tuple[str, Any]]:
        """The generators by which the memory draws."""
        for owner in (self.memory, getattr(self.memory, "rings", None)):
            for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
                if state_of_generator(value) is not None:
                    yield f"{type(owner).__name__}.{name}", value

    def __len__(self) -> int:
        return len(self.memory)

    def batch(self) -> Any:
        """The next batch of the memory."""
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self.memory)
            batch = next(self._batches)
        return batch

    def give_priorities(self, batch: Any, priorities: Any) -> None:
        """Tell a memory that has priorities."""
        give = getattr(self.memory, "update_priorities", None)
        if give is not None:
            give(batch, priorities)

    def wait(self, timeout: float) -> None:
        """Return when samples came."""
        self._taker.wait(timeout)

    def close(self) -> None:
        """End the taker."""
        self._taker.close()


def following(samples: list[Sample]) -> list[list[Sample]]:
    """Samples parted where they come from another worker, or where one is missing before one that is no reset."""
    found: list[list[Sample]] = []
    last: Sample | None = None
    for sample in samples:
        is_next = last is not None and (_follows(last, sample) or (sample.is_reset and sample.client == last.client))
        if not is_next:
            found.append([])
        found[-1].append(sample)
        last = sample
    return found


def _follows(one: Sample, other: Sample) -> bool:
    """Whether a sample is the next one of the same episode."""
    return (one.client, one.episode, one.step + 1) == (other.client, other.episode, other.step)
