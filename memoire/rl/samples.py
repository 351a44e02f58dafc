"""Samples of any pipeline: their table, the trainer's thread that receives them, and the journal that stores them.

    sample    (act, obs, rew, terminated, truncated, info)     plain values and arrays, compressed by the worker
    entry     obs: the sample's bytes, ragged | reward | is_reset | episode, step

    queue of servers ──take──▶ a thread ──▶ waiting buffers ──update──▶ memory.append_buffer ──▶ batches

One table of rollouts holds the samples, so a server needs no schema of the environment. `append_buffer` of the
trainer's memory takes them.

A journal stores them on disk, unchanged and in order: a checkpoint writes only new samples, and any memory can be
rebuilt from them. Each buffer is a record of a `RecordLog`. A file is removed after its samples have left the memory.
No object of the user's is ever stored.
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
"""Name of the samples' table at a server."""
CAPACITY: Final = 100_000
"""Default capacity of the table, in samples; the oldest are evicted."""
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
    """Return a table for samples of any pipeline. A full table evicts the oldest, so no worker ever waits.

    Args:
        least: Samples for which a trainer should wait before it takes some; stored as `cache_size`.
    """
    least = whole("least", least, 1)
    return Table(SCHEMA, storage="rollouts", capacity=capacity, on_full="drop_oldest", cache_size=least)


class Sample(NamedTuple):
    """Sample of one step or reset, as the compressor returned it."""

    act: Any
    obs: Any
    rew: Any
    terminated: Any
    truncated: bool
    info: Any
    is_reset: bool = False
    """True for the sample of a reset, which is the first of its episode and counts as no step."""
    episode: int = 0
    step: int = 0
    """Numbers of the worker's episode and of the step in it; step 0 is the reset."""
    reward: float = 0.0
    """Reward that the environment returned, before any compression."""
    test_length: int = 0
    test_return: float = 0.0
    """Return of the test episode that the worker ran before this reset; test_length 0 means no test episode."""
    client: bytes = b""
    """Id of the client that sent the sample; b"" before that."""


def columns_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the columns [T, ...] of an episode's samples for `Client.push_episode`.

    Raises:
        ParameterError: a sample holds a value that cannot be sent; names the value's place.
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
    """Return the samples of a learner's rollouts, in order.

    Raises:
        DataError: an entry holds something else.
    """
    packed: Ragged = rollouts["obs"]
    names = "is_reset", "episode", "step", "reward", "test_length", "test_return"
    facts = [rollouts[name].tolist() for name in names]
    clients = [bytes(each) for each in rollouts.client]
    facts.append(
        [client for client, count in zip(clients, rollouts.lengths.tolist(), strict=True) for _ in range(count)]
    )
    body, ends, samples = memoryview(packed.values.tobytes()), np.cumsum(packed.lengths).tolist(), []
    for begin, end, values in zip([0, *ends], ends, zip(*facts, strict=True), strict=False):
        parts = unpack(body[begin:end])
        if not isinstance(parts, tuple) or len(parts) != 6:
            raise DataError("a sample", "holds something else than act, obs, rew, terminated, truncated and info")
        samples.append(Sample._make(parts + values))
    return samples


def episodes_of(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Split samples into episodes, in order. Each begins with a reset; only the first may begin in the middle."""
    episodes: list[list[Sample]] = []
    for sample in samples:
        if sample.is_reset or not episodes:
            episodes.append([])
        episodes[-1].append(sample)
    return episodes


Calls: TypeAlias = Iterable[tuple[Callable[..., object], tuple[Any, ...]]]
"""Calls for `at_once`: functions and their arguments."""
MAX_WAITING: Final = 100_000
"""Samples that may wait for the memory; further samples stay on the servers."""
MAX_TAKE: Final = 8192
"""Most samples that one take asks for."""
MORE_TIMEOUT: Final = 0.05
"""Timeout in seconds of a take that asks for more than the least number."""
RETRY_INTERVAL: Final = 0.05
"""Seconds until the thread tries again after an error, or while too many samples wait."""


class SampleTaker:
    """Thread that takes samples from the servers until it is closed.

    Args:
        reader: Reader of a table that `samples_table` made.
        least: Samples for which one take waits.
        patience: Seconds after which it takes the samples that are available.
    """

    def __init__(self, reader: Reader, least: int = 1, patience: float = 1.0) -> None:
        self._reader, self._least, self._patience = reader, least, patience
        self._changed = Condition()  # notified when samples arrive
        self._waiting: deque[list[Sample]] = deque()
        self._count = 0  # samples in _waiting
        self._size = 0  # samples that the next take asks for, if more than the least
        self.damaged = 0
        """Count of entries that were skipped because they held something else than samples."""
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="memoire-trainer-samples", daemon=True)
        self._thread.start()

    def take_into(self, coming: deque[list[Sample]]) -> None:
        """Append the samples since the last call, in order, as one list for each run of consecutive samples."""
        with self._changed.held():
            runs = [each for samples in self._waiting for each in split_into_runs(samples)]
            at_once([(coming.extend, (runs,)), (self._waiting.clear, ()), *setting(self, _count=0)])

    def wait(self, timeout: float) -> None:
        """Wait until samples are available, for at most `timeout` seconds."""
        with self._changed.held():
            self._changed.wait_for(lambda: self._count > 0, timeout)

    def close(self) -> None:
        """Have the thread end after its current take."""
        self._is_closing = True

    def _run(self) -> None:
        while not self._is_closing:
            if self._count >= MAX_WAITING:
                time.sleep(RETRY_INTERVAL)
                continue
            try:
                samples = self._take()
            except Closed:
                return
            except MemoireError as error:
                if not isinstance(error, MemoireTimeout | NotEnoughSamples):
                    _log.warning("cannot take samples, will try again: %s", error)
                    time.sleep(RETRY_INTERVAL)
                continue
            with self._changed.held():
                self._waiting.append(samples)
                self._count += len(samples)
                self._changed.notify_all()

    def _take(self) -> list[Sample]:
        """Take at least `least` samples, or fewer after `patience` seconds."""
        wanted, self._size = max(self._least, self._size), 0
        try:
            rollouts = self._reader.take(wanted, MORE_TIMEOUT if wanted > self._least else self._patience, exact=False)
        except NotEnoughSamples as short:
            if not short.unused or (wanted > self._least > short.unused):
                raise
            rollouts = self._reader.take(short.unused, self._patience, exact=False)
        else:
            self._size = min(MAX_TAKE, 2 * len(rollouts))  # the table may have more
        try:
            return samples_of(rollouts)
        except DataError:
            self.damaged += len(rollouts)
            raise


KIND: Final = FileKind(b"memojrnl", 5, "a trainer's journal of samples")
JOURNAL_FILES: Final = 32
"""Number of files over which a full memory's samples are spread."""
MAX_PENDING: Final = 4096
"""Most samples that may wait for a write; a killed process loses at most these."""
SUFFIX: Final = ".samples"


@dataclass
class KeptBuffer:
    """Buffer of one worker's samples, in the form for a memory."""

    memory: list[Any]
    starts: list[bool] | None = None
    """Flag of each sample, True if a reset gave the sample; None if unknown."""
    continues: bool = False
    """True if the first sample directly follows the last sample of the buffer before."""

    def __len__(self) -> int:
        return len(self.memory)


class SampleJournal(ClosingContext):
    """Journal of samples: files in a folder, oldest first. One process holds its lock, and one thread may use it.

    Args:
        folder: Made if it is missing; the journal in it is continued.
        capacity: Samples that the memory holds; the journal keeps these and a few more.
        at: Called before each step, so that a test can make it fail; see `RecordLog`.

    Raises:
        DataError: a file of the folder is damaged, missing or of another kind; nothing was changed.
        StateError: another process uses the folder.
        OSError: the folder cannot be made, read or written.
    """

    def __init__(self, folder: str | Path, capacity: int, *, at: Fault = no_fault) -> None:
        self._capacity = whole("capacity", capacity, 1)
        self._file_samples = max(1, capacity // JOURNAL_FILES)
        self._pending: list[KeptBuffer] = []
        self._pending_samples = 0
        self._log = RecordLog(folder, KIND, SUFFIX, at=at)

    def __len__(self) -> int:
        """Return the number of samples in the journal, with those that wait for a write."""
        return sum(sum(file.tags) for file in self._log.files) + self._pending_samples

    @property
    def folder(self) -> Path:
        """Folder of the journal's files."""
        return self._log.folder

    @property
    def series(self) -> str:
        """Id of this journal, in hex; a checkpoint names the journal that belongs to the checkpoint."""
        return self._log.series

    @property
    def size(self) -> int:
        """Total size of the files in bytes."""
        return sum(file.size for file in self._log.files)

    def keep(self, buffer: Any) -> None:
        """Add a buffer: its `memory`, and `starts` and `continues` if it has them. `commit` writes it at the latest.

        Raises:
            ParameterError: a sample holds something else than plain values and arrays.
            OSError: the buffer cannot be written now; it waits for the next write.
        """
        at_once(self.add_buffer_calls(buffer))
        self.write_if_many()

    def add_buffer_calls(self, buffer: Any) -> list[tuple[Callable[..., object], tuple[Any, ...]]]:
        """Return the calls that add a buffer, for `at_once`. Call `write_if_many` after them."""
        starts = getattr(buffer, "starts", None)
        entry = KeptBuffer(
            list(buffer.memory), None if starts is None else [bool(each) for each in starts],
            bool(getattr(buffer, "continues", False)),
        )  # fmt: skip
        count = setting(self, _pending_samples=self._pending_samples + len(entry))
        return [(self._pending.append, (entry,)), *count]

    def write_if_many(self) -> None:
        """Write the waiting buffers if they hold many samples. Raises OSError as `keep` does."""
        if self._pending_samples >= min(MAX_PENDING, self._file_samples):
            self._write()

    def commit(self) -> None:
        """Write all waiting samples to disk, and remove files that the memory does not need any more.

        Raises:
            OSError: the samples cannot be written now; they wait for the next commit.
        """
        self._write()
        samples = [sum(file.tags) for file in self._log.files]
        spare = sum(samples) - self._capacity - self._file_samples
        count = 0
        while count < len(samples) - 1 and samples[count] <= spare:
            spare -= samples[count]
            count += 1
        self._log.remove(count)

    def buffers(self) -> Iterator[KeptBuffer]:
        """Yield the buffers on disk, oldest first, with one in memory at a time; leave out those that wait for a write.

        Raises:
            DataError: a file was changed since the journal was opened.
        """
        return (unpacked_buffer(record.payload) for record in self._log.records())

    @staticmethod
    def salvage(folder: str | Path, missing: list[DataError]) -> Iterator[KeptBuffer]:
        """Yield the undamaged buffers of a damaged journal, oldest first; add them to a new journal to keep them.

        Args:
            folder: Folder of the journal; it is only read.
            missing: Receives an error for each damaged or missing part.
        """
        for record in salvage_log(folder, KIND, SUFFIX, missing):
            if not isinstance(record, DamagedRecord):
                yield unpacked_buffer(record.payload)

    def close(self) -> None:
        """Release the folder for another process; may be called twice. Samples that wait for a write are lost."""
        self._log.close()

    def _write(self) -> None:
        """Append one record for each waiting buffer."""
        if self._pending_samples:
            if self._log.files and sum(self._log.files[-1].tags) >= self._file_samples:
                self._log.begin_file()
            written = setting(self, _pending=[], _pending_samples=0)
            self._log.append([(len(each), packed_buffer(each)) for each in self._pending], written)


VALUES, ARRAYS, NUMBERS = range(3)
"""Codes of a column's storage: a list of values, or the rows of one array, which were arrays or NumPy numbers."""


def packed_buffer(buffer: KeptBuffer) -> bytes:
    """Encode a buffer as a record's body. Consecutive samples of equal nesting form a run with one column per leaf.

    Raises:
        ParameterError: a sample holds something else than plain values; names the value's place.
    """
    runs = []
    for structure, samples in groupby(buffer.memory, structure_of):
        rows = [leaves_of(sample) for sample in samples]
        paths = paths_of(structure, "sample")
        columns = [_column([row[index] for row in rows], path) for index, path in enumerate(paths)]
        runs.append((len(rows), assembled(structure, [None] * len(columns)), columns))
    return pack((runs, buffer.starts, buffer.continues))


def _column(values: list[Any], path: str) -> tuple[int, bytes]:
    """Encode values as (storage code, bytes). Arrays of equal dtype and shape become one array, for speed."""
    first = values[0]
    is_numpy = isinstance(first, np.ndarray | np.generic) and len({type(each) for each in values}) == 1
    if not is_numpy or any((each.dtype, each.shape) != (first.dtype, first.shape) for each in values):
        return VALUES, pack(values, path)
    rows = np.concatenate([np.ravel(each) for each in values]).reshape(len(values), *first.shape)
    return NUMBERS if isinstance(first, np.generic) else ARRAYS, pack(rows, path)


def unpacked_buffer(body: bytes) -> KeptBuffer:
    """Decode a record's body; arrays are views of larger ones. Raises DataError if the bytes are no buffer."""
    what = "a record of samples"
    try:
        runs, starts, continues = unpack(body, what)
        memory = [sample for count, template, columns in runs for sample in _samples(count, template, columns, what)]
        if not isinstance(continues, bool) or not (starts is None or len(starts) == len(memory)):
            raise ValueError("the flags of resets do not fit the samples")
    except (ValueError, TypeError, IndexError, OverflowError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(what, f"cannot be read: {error}") from error
    return KeptBuffer(memory, starts, continues)


def _samples(count: int, template: Any, columns: list[tuple[int, bytes]], what: str) -> list[Any]:
    """Decode the samples of a run, nested as in `template`."""
    leaves = []
    for kind, data in columns:
        rows = unpack(data, what)
        # Indexing with "..." keeps an array without dimensions an array.
        leaves.append([rows[index, ...] for index in range(len(rows))] if kind == ARRAYS else list(rows))
    if len(leaves) != len(leaves_of(template)) or any(len(each) != count for each in leaves):
        raise ValueError("the columns do not fit the samples' structure")
    structure = structure_of(template)
    return [assembled(structure, row) for row in (zip(*leaves, strict=True) if leaves else [()] * count)]


class EpisodeReturns:
    """Returns and lengths of the episodes that ended since the last call of `figures`."""

    def __init__(self) -> None:
        self._open: dict[bytes, tuple[int, float]] = {}  # length and return of each worker's episode
        self._ended: dict[str, list[tuple[int, float]]] = {"train": [], "test": []}

    def adding_changes(self, samples: Sequence[Sample]) -> Calls:
        """Return the calls that count samples, for `at_once`."""
        opened: dict[bytes, tuple[int, float]] = {}
        ended: dict[str, list[tuple[int, float]]] = {"train": [], "test": []}
        for sample in samples:
            client = sample.client
            length, returned = (0, 0.0) if sample.is_reset else opened.get(client) or self._open.get(client, (0, 0.0))
            if sample.test_length:
                ended["test"].append((sample.test_length, sample.test_return))
            if not sample.is_reset:
                length, returned = length + 1, returned + sample.reward
            if sample.terminated or sample.truncated:
                ended["train"].append((length, returned))
            opened[client] = (length, returned)
        return [(self._open.update, (opened,)), *((self._ended[kind].extend, (ended[kind],)) for kind in ended)]

    def state(self) -> list[list[Any]]:
        """Return the open episodes, ready for JSON: client, length and return of each."""
        return [[client.hex(), *each] for client, each in self._open.items()]

    def restore(self, state: list[list[Any]]) -> None:
        """Continue these open episodes, which `state` returned."""
        self._open = {bytes.fromhex(client): (length, returned) for client, length, returned in state}

    def figures(self) -> dict[str, float]:
        """Return the means (return_train, return_test, episode_length_train, episode_length_test) and reset them."""
        figures = {}
        for kind, episodes in self._ended.items():
            if episodes:
                figures[f"episode_length_{kind}"] = sum(length for length, _ in episodes) / len(episodes)
                figures[f"return_{kind}"] = sum(returned for _, returned in episodes) / len(episodes)
        at_once([(episodes.clear, ()) for episodes in self._ended.values()])
        return figures


class MemoryExperience:
    """Experience of a trainer: a memory that is filled with the samples of a `SampleTaker`.

    Args:
        taker: Source of the samples.
        memory: Memory of the samples: `append` or `append_buffer` adds a buffer, its length is the number of samples
            that can be drawn, and iterating over it yields the batches of a round.
        buffer: Called with consecutive samples of a worker, and True if the first one follows the memory's last sample;
            returns a buffer for the memory.
        journal: Journal that stores each buffer of the memory; None stores nothing.
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
        """Steps of environments that were received, without resets."""
        self._take = getattr(memory, "append", None) or memory.append_buffer
        self._last: Sample | None = None  # last sample in the memory
        self._incoming: deque[list[Sample]] = deque()  # runs of consecutive samples that the memory gets next
        self.returns = EpisodeReturns()
        """Returns of the received episodes."""
        self._batches: Iterator[Any] = iter(())

    def update(self) -> None:
        """Add the received samples to the memory: one buffer for each run of consecutive samples."""
        self._taker.take_into(self._incoming)
        while self._incoming:
            self._append(self._incoming[0])

    def _append(self, samples: list[Sample]) -> None:
        """Add the first waiting run to the memory. The run waits until the memory has it, also after an interrupt."""
        continues = self._last is not None and _follows(self._last, samples[0])
        buffer = self._buffer(samples, continues)
        received = self.received + sum(not sample.is_reset for sample in samples)
        moved = [(self._incoming.popleft, ()), *setting(self, _last=samples[-1], received=received)]
        noted = () if self._journal is None else self._journal.add_buffer_calls(buffer)
        at_once([(self._take, (buffer,)), *moved, *self.returns.adding_changes(samples), *noted])
        if self._journal is not None:
            self._journal.write_if_many()

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, ready for JSON: newest sample, open episodes, and the memory's generators."""
        last = self._last
        return {
            "last": None if last is None else [last.client.hex(), last.episode, last.step],
            "open": self.returns.state(), "random": {name: state_of_generator(each) for name, each in self._random()},
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any], received: int) -> None:
        """Continue from `state` of another process, which had received `received` steps."""
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
        """Yield name and generator of each random generator of the memory."""
        for owner in (self.memory, getattr(self.memory, "rings", None)):
            for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
                if state_of_generator(value) is not None:
                    yield f"{type(owner).__name__}.{name}", value

    def __len__(self) -> int:
        return len(self.memory)

    def batch(self) -> Any:
        """Return the next batch of the memory; begins a new round after the last one."""
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self.memory)
            batch = next(self._batches)
        return batch

    def give_priorities(self, batch: Any, priorities: Any) -> None:
        """Pass new priorities to a memory that has `update_priorities`."""
        give = getattr(self.memory, "update_priorities", None)
        if give is not None:
            give(batch, priorities)

    def wait(self, timeout: float) -> None:
        """Wait until samples arrive, for at most `timeout` seconds."""
        self._taker.wait(timeout)

    def close(self) -> None:
        """Close the `SampleTaker`, whose thread then ends."""
        self._taker.close()


def split_into_runs(samples: list[Sample]) -> list[list[Sample]]:
    """Split samples into runs of one worker without gaps. An episode may end early if a reset follows."""
    runs: list[list[Sample]] = []
    last: Sample | None = None
    for sample in samples:
        is_next = last is not None and (_follows(last, sample) or (sample.is_reset and sample.client == last.client))
        if not is_next:
            runs.append([])
        runs[-1].append(sample)
        last = sample
    return runs


def _follows(one: Sample, other: Sample) -> bool:
    """Return True if `other` directly follows `one` in the same episode."""
    return (one.client, one.episode, one.step + 1) == (other.client, other.episode, other.step)
