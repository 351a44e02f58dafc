"""No Python for each sample: what runs in the interpreter is the same for 32 samples and for 1024."""

import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

import memoire
from memoire.replay.columns import Column
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.schema import Schema
from memoire.tables.caches.pool import Pool
from memoire.wire import containers as pack
from memoire.wire import containers as unpack
from memoire.wire.layout import layout_of
from memories import with_episode
from netkit import until


class Opcodes:
    """Counts in the calling thread, or in every thread that starts while this is entered.

    A thread traces the frames that it enters after it was started; `only` leaves out all frames but those named and what
    they call, so that the waiting loop around them, which turns as often as the clock wants, does not count. `without`
    leaves out one function and what it calls.
    """

    def __init__(self, only: str | None = None, without: str | None = None) -> None:
        self.only, self.without = only, without
        self.executed = 0
        self.each: list[int] = []
        """What each call of the function named `only` executed."""

    def __enter__(self) -> "Opcodes":
        threading.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        threading.settrace(None)  # type: ignore[arg-type]

    def of(self, call: Callable[[], Any]) -> int:
        """Opcodes that `call` executes in this thread."""
        before = self.executed
        previous = sys.gettrace()
        sys.settrace(self._enter)
        try:
            call()
        finally:
            sys.settrace(previous)
        return self.executed - before

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        if not self._counts(frame):
            return None
        if frame.f_code.co_qualname == self.only:
            self.each.append(0)
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            self.executed += 1
            if self.each:
                self.each[-1] += 1
        return self._step

    def _counts(self, frame: FrameType) -> bool:
        names = set()
        at: FrameType | None = frame
        while at is not None:
            names.add(at.f_code.co_qualname)
            at = at.f_back
        return (self.only is None or self.only in names) and self.without not in names


FEW, MANY = 32, 1024
SCHEMA = Schema(
    {
        "state": Column("float32", (4,), "state"),
        "action": Column("int32", (1,)),
        "reward": Column("float32", (1,), "reward"),
        "value": Column("float32", (1,), "value"),
    }
)


def memory_of(parameters: Parameters, episodes: int = 8, length: int = 400) -> Memory:
    """A memory with closed episodes of varied priorities."""
    random = np.random.default_rng(0)
    memory = Memory(SCHEMA, episodes * length, parameters, seed=0)
    for _ in range(episodes):
        with_episode(memory, episode(random, length))
    return memory


def episode(random: np.random.Generator, length: int) -> list[Any]:
    columns = [SCHEMA[name] for name in SCHEMA.entry_names]
    return [random.standard_normal((length, *column.shape)).astype(column.dtype) for column in columns]


def executed(call: Callable[[int], Any], size: int, tries: int = 5, settle: Callable[[], Any] = int) -> int:
    """Opcodes of one call, once what is done only the first time has been done; `settle` is called before each.

    The least of a few: a lock that another thread holds just then takes a few more. Waking a thread is left out: it does
    nothing when the thread was not asleep.
    """
    call(size)
    counts = []
    for _ in range(tries):
        settle()
        counts.append(Opcodes(without="Waker.wake").of(lambda: call(size)))
    return min(counts)


@pytest.fixture(params=[Parameters(), Parameters(frame_stack=4, multi_step=3)], ids=["plain", "stacked"])
def memory(request: pytest.FixtureRequest) -> Memory:
    return memory_of(request.param)


def test_a_loop_in_python_would_be_seen() -> None:
    def loop(size: int) -> None:
        for _ in range(size):
            pass

    assert executed(loop, FEW) < executed(loop, MANY)


def test_drawing_and_gathering(memory: Memory) -> None:
    assert executed(memory.sample, FEW) == executed(memory.sample, MANY)


def test_updating_priorities(memory: Memory) -> None:
    errors = np.random.default_rng(0).uniform(0.1, 2.0, MANY)
    drawn = memory.draw(MANY)

    def update(size: int) -> None:
        memory.update_priorities(drawn[:size], errors[:size])

    assert executed(update, FEW) == executed(update, MANY)


def test_adding_and_closing_whole_episodes() -> None:
    memory = memory_of(Parameters())
    random = np.random.default_rng(0)
    blocks = {size: episode(random, size) for size in (FEW, MANY)}

    def store(size: int) -> None:
        memory.open(0)
        memory.extend(0, blocks[size])
        memory.close(0)

    assert executed(store, FEW) == executed(store, MANY)


def test_building_a_cache(memory: Memory) -> None:
    def build(size: int) -> None:
        pack.build(memory, size, now=0.0)

    assert executed(build, FEW) == executed(build, MANY)


def test_checking_a_cache(memory: Memory) -> None:
    layout = layout_of(memory.schema, memory.parameters)
    received = {size: pack.build(memory, size, now=0.0) for size in (FEW, MANY)}

    def check(size: int) -> None:
        unpack.check(received[size], layout)

    assert executed(check, FEW) == executed(check, MANY)


@pytest.mark.parametrize("reuse", [False, True], ids=["once", "again"])
def test_drawing_a_batch_from_many_caches(memory: Memory, reuse: bool) -> None:
    """Eight clients with eight caches of 128 samples each: the larger batch also takes from more caches."""
    parameters = memory.parameters.replace(reuse_cache=reuse)
    pool = Pool(memory.schema, parameters, seed=0)
    for sequence in range(64):
        held = unpack.check(pack.build(memory, 128, now=0.0), pool.layout)
        pool.add(bytes([sequence % 8 + 1]) * 16, sequence, held)
    assert executed(pool.get, FEW) == executed(pool.get, MANY)


@pytest.fixture
def cluster(memory: Memory) -> Iterator[tuple[memoire.Server, memoire.Client]]:
    """A server with enough caches for the larger batch, and a client with a memory of its own."""
    with memoire.Server("tcp://127.0.0.1:0", SCHEMA, parameters=memory.parameters, seed=0) as server:
        with memoire.connect(server.endpoint, seed=0, capacity=3200, timeout=100) as client:
            random = np.random.default_rng(0)
            for _ in range(8):
                client.memory.open(0)
                client.memory.extend(0, episode(random, 400))
                client.memory.close(0)
            yield server, client


def wait_for_caches(server: memoire.Server, caches: int) -> None:
    until(lambda: server.total_caches >= caches)


def is_taken(client: memoire.Client) -> None:
    """Wait until the server has said that it has all that was pushed."""
    until(lambda: client.update(timeout=100) or not client.stats().in_flight_caches)


def test_pushing_a_cache(cluster: tuple[memoire.Server, memoire.Client]) -> None:
    server, client = cluster

    def push(size: int) -> None:
        assert client.push_cache(timeout=100)

    counts = []
    for size in (FEW, MANY):
        server.configure(cache_size=size)
        client.update(timeout=100)
        assert client.parameters.cache_size == size
        # While much is on the way, a push does a little more: it asks for news sooner.
        counts.append(executed(push, size, tries=20, settle=lambda: is_taken(client)))
    assert counts[0] == counts[1]


def test_taking_caches_in(memory: Memory) -> None:
    """What the server's own thread does with a cache that came, counted there."""
    counts = {}
    for size in (FEW, MANY):
        with Opcodes(only="Dispatcher.arrived") as opcodes:
            parameters = memory.parameters.replace(cache_size=size)
            with memoire.Server("tcp://127.0.0.1:0", SCHEMA, parameters=parameters, seed=0) as server:
                with memoire.connect(server.endpoint, seed=0, capacity=3200, timeout=100) as client:
                    client.memory.open(0)
                    client.memory.extend(0, episode(np.random.default_rng(0), 400))
                    client.memory.close(0)
                    for pushed in range(1, 11):
                        assert client.push_cache(timeout=100)
                        wait_for_caches(server, pushed)
        assert len(opcodes.each) == 10
        counts[size] = min(opcodes.each[2:])  # what is done now and then, as time passes, is left out
    assert counts[FEW] == counts[MANY]


def test_a_batch_and_its_priorities(cluster: tuple[memoire.Server, memoire.Client]) -> None:
    server, client = cluster
    for pushed in range(1, 31):
        assert client.push_cache(timeout=100)
        wait_for_caches(server, pushed)
    batches = {}

    def get(size: int) -> None:
        batches[size] = server.get_batch(size)

    def update(size: int) -> None:
        batches[size].update_priorities(np.linspace(0.1, 2.0, size))

    assert executed(get, FEW) == executed(get, MANY)
    assert executed(update, FEW) == executed(update, MANY)
