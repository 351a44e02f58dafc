"""Interrupted calls of a writer, which take effect whole or not at all, and random numbers of forked workers."""

import ast
import copy
import json
import os
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memoire
from interrupts import Call, check_whole, everywhere
from memoire.classic.notebook import PrioritizedReplayBuffer
from memoire.errors import MemoireError
from memoire.replay.columns import Column
from memoire.replay.memory import Memory
from memoire.replay.parameters import Parameters
from memoire.replay.sampling import ForkedGenerator
from memoire.replay.schema import Schema
from memoire.replay.writer import Writer
from memoire.rl.memory import GenericMemory
from memoire.rl.policies import MlpPolicy
from memoire.rl.realtime import DummyDrone
from memoire.rl.starts import StartStates
from memory_checks import LongWay, RecordingObserver, check_memory, with_episode
from statekit import fork

# --- A call of a writer that is interrupted anywhere, as by Ctrl+C, takes effect whole or not at all

SINGLE = np.arange(40, dtype=np.float32).reshape(20, 2)
VECTOR = np.arange(120, dtype=np.float32).reshape(20, 3, 2)
NO, YES = np.zeros(3, np.bool_), np.ones(3, np.bool_)
SECOND = np.array([False, True, False])
WORD = [np.arange(n, dtype=np.uint8) for n in (3, 5, 2, 7, 4, 6, 1, 8, 2, 3)]
ENDED: dict[str, Any] = {"final_obs": VECTOR[19], "_final_obs": SECOND}


def one(at: int, terminated: bool = False, truncated: bool = False, to: int | None = None, **more: Any) -> Call:
    """Return a call that steps a single environment from observation number `at`."""
    after = SINGLE[at + 1 if to is None else to]
    obs = SINGLE[at]
    return lambda writer: writer.step(obs, at, float(at), terminated, truncated, after, {}, **more)


def many(at: int, terminated: Any = NO, truncated: Any = NO, info: Any = None, **more: Any) -> Call:
    """Return a call that steps three environments."""
    obs, after, rewards, actions = VECTOR[at], VECTOR[at + 1], np.arange(3.0), np.full(3, at)
    if (members := more.get("members")) is not None:
        obs, after, rewards, actions = (part[members] for part in (obs, after, rewards, actions))
        terminated, truncated = terminated[members], truncated[members]
    return lambda writer: writer.step(obs, actions, rewards, terminated, truncated, after, info or {}, **more)


def word(at: int, terminated: bool = False) -> Call:
    return lambda writer: writer.step(WORD[at], at, 1.0, terminated, False, WORD[at + 1], {})


def reset(*args: Any, **more: Any) -> Call:
    return lambda writer: writer.reset(*args, **more)


@dataclass
class Case:
    """Call to interrupt, with the calls before, and the calls that a user may make after the interrupt."""

    call: Call
    before: tuple[Call, ...] = ()
    then: tuple[Call, ...] = ()
    num_envs: int | None = None
    autoreset: str = "disabled"
    columns: dict[str, Any] = field(default_factory=dict)
    state: Any = field(default_factory=lambda: Column("float32", (2,), "state"))
    parameters: Parameters = field(default_factory=Parameters)
    long_way: bool = False
    longest: int = 6
    ragged_limit: int = 0
    capacity: int = 14

    def make(self) -> "Tried":
        schema = Schema({"obs": self.state, "action": np.int64, "reward": np.float32, **self.columns})
        return Tried(
            self, Memory(schema, self.capacity, self.parameters, live=True, seed=1, ragged_limit=self.ragged_limit)
        )


class Tried:
    """Case with a memory and a writer of its own."""

    def __init__(self, case: Case, memory: Memory) -> None:
        memory.set_clock(5.0)
        self.memory, self.heard, self.refused = memory, RecordingObserver(), []
        store: Any = LongWay(memory) if case.long_way else memory
        self.writer = Writer(store, case.num_envs, case.autoreset, self.heard, longest=case.longest)
        for call in case.before:
            call(self.writer)

    def go_on(self, calls: tuple[Call, ...]) -> "Tried":
        for call in calls:
            try:
                call(self.writer)
            except MemoireError as error:
                self.refused.append(str(error))
        return self

    def locks(self) -> list[Any]:
        return [self.writer.steps_blocked(), self.memory.held()]

    def outcome(self) -> dict[str, Any]:
        """Return everything that tells two outcomes apart: refusals, observed entries, contents and draws."""
        heard = self.heard
        facts = {"refused": self.refused, "entries told": heard.entries, "episodes told": heard.episodes}
        for name, value in self.memory.contents().items():
            if name not in ("columns", "finals"):
                facts[name] = value.tolist() if isinstance(value, np.ndarray) else value
        rows = self.memory.contents()["meta"]["episode"] >= 0
        codes = np.flatnonzero(rows)
        for name in self.memory.schema.names:
            column = self.memory.schema[name]
            if column.is_ragged:
                facts[f"column {name}"] = self.memory.ragged(name, codes).values.tolist()
            else:
                out = np.zeros((len(codes), *column.shape), column.dtype)
                self.memory.copy_frames(name, codes, out)
                facts[f"column {name}"] = out.tolist()
        if self.memory.num_positive:
            facts["drawn"] = self.memory.draw(8).tolist()
        return facts


TWICE = (one(0), one(1))
STEPS = tuple(one(at) for at in range(5))
VALUES = {"value": Column("float32", (), "value")}
CASES = {
    "first step": Case(one(0), then=(one(1), one(2))),
    "usual step": Case(one(2), TWICE, (one(3), one(4))),
    "the long way": Case(one(2), TWICE, (one(3), one(4)), long_way=True),
    "one that needs converting": Case(one(2, init_w=2), TWICE, (one(3), one(4))),
    "terminated": Case(one(2, True), TWICE, (one(5), one(6))),
    "truncated": Case(
        one(2, truncated=True, bootstrap_value=0.5, value=1.0),
        (one(0, value=2.0), one(1, value=3.0)),
        (one(5, value=1.0), one(6, value=1.0)),
        columns=VALUES,
    ),
    "the first of an episode": Case(one(5), (*TWICE, one(2, True)), (one(6), one(7, True))),
    "where one ended": Case(one(3), (*TWICE, one(2, True)), (one(4), one(5, True), one(6), one(7))),
    "that cuts": Case(one(5), STEPS, (one(6), one(7)), longest=5),
    "that cuts and ends": Case(one(5, True), STEPS, (one(8), one(9)), longest=5),
    "a full ring": Case(one(4), (*STEPS, one(5, True), *STEPS, one(5, True), *STEPS[:4]), (one(5), one(6, True))),
    "many steps": Case(one(3), STEPS[:3], (one(4, True),), parameters=Parameters(multi_step=3)),
    "sequences": Case(
        one(3, True), STEPS[:3], (one(7), one(8)), parameters=Parameters(sequence_length=2, sequence_overlap=1)
    ),
    "extra columns": Case(one(2, logp=0.5), (one(0, logp=0.1), one(1, logp=0.2)), columns={"logp": np.float32}),
    "ragged": Case(word(2, True), (word(0), word(1)), (word(5), word(6)), state=Column("uint8", (None,), "state")),
    "ragged without room": Case(
        word(3), (word(0), word(1), word(2)), (word(4), word(5, True)),
        state=Column("uint8", (None,), "state"), ragged_limit=96,
    ),
    "more episodes than ever": Case(
        one(3, True), (*(one(2 * (k % 8), True) for k in range(15)), one(2)), (one(4), one(5)), capacity=40
    ),
    "vector": Case(many(2), (many(0), many(1)), (many(3), many(4)), 3),
    "vector, one ends": Case(many(2, SECOND), (many(0), many(1)), (many(5), many(6)), 3),
    "vector, next_step": Case(many(2, SECOND), (many(0), many(1)), (many(3), many(4)), 3, "next_step"),
    "vector, being reset": Case(many(2), (many(0), many(1, SECOND)), (many(3), many(4, YES)), 3, "next_step"),
    "vector, all being reset": Case(many(2), (many(0), many(1, YES)), (many(3), many(4)), 3, "next_step"),
    "vector, same_step": Case(many(2, NO, SECOND, ENDED), (many(0), many(1)), (many(3),), 3, "same_step"),
    "vector, all end": Case(many(1, NO, YES), (many(0),), (many(5), many(6)), 3),
    "vector, that cuts": Case(many(3, SECOND), (many(0), many(1), many(2)), (many(4),), 3, "next_step", longest=3),
    "some members": Case(
        many(2, SECOND, members=[2, 0]), (many(0), many(1, members=[0, 1, 2])), (many(3, members=[1]), many(4)), 3
    ),
    "reset": Case(reset(SINGLE[7]), TWICE, (one(7), one(8))),
    "reset of a state of its own": Case(
        reset(SINGLE[7]), (one(0, to=10), lambda writer: writer.step(SINGLE[10], 0, 0.0, False, False, SINGLE[11])),
    ),
    "reset, vector": Case(reset(VECTOR[7]), (many(0), many(1)), (many(7), many(8)), 3),
    "reset of some": Case(reset(VECTOR[2], mask=SECOND), (many(0), many(1)), (many(2), many(3)), 3),
    "reset after an end": Case(reset(VECTOR[7], mask=SECOND), (many(0), many(1, SECOND)), (many(7),), 3),
    "reset of members apart": Case(
        reset(VECTOR[2], mask=SECOND), (many(0), many(1, members=[2, 0])), (many(2), many(3)), 3
    ),
    "cut": Case(lambda writer: writer.cut(), TWICE, (one(2), one(3, True))),
    "cut, vector": Case(lambda writer: writer.cut(), (many(0), many(1, SECOND)), (many(7),), 3),
    "close": Case(lambda writer: writer.close(), (many(0), many(1, SECOND)), (many(7),), 3),
}  # fmt: skip


def ways_on(case: Case) -> Iterator[tuple[Call, ...]]:
    """Yield the calls of a user after an interrupt: a new start, the same call again, or only later calls."""
    obs = SINGLE[12] if case.num_envs is None else VECTOR[12]
    is_ragged = not isinstance(case.state.shape, tuple) or None in case.state.shape
    start: Call = reset(WORD[8] if is_ragged else obs)
    again: Call = word(8) if is_ragged else one(12) if case.num_envs is None else many(12)
    if case.columns:
        name = next(iter(case.columns))
        again = one(12, **{name: 1.0})
    yield start, again, lambda writer: writer.close()  # begin again
    yield case.call, *case.then, lambda writer: writer.close()  # the writer repeats the interrupted call
    yield *case.then, lambda writer: writer.close()  # the writer never made the call


@pytest.mark.slow
@pytest.mark.parametrize("opcodes", [pytest.param(False, id="line"), pytest.param(True, id="opcode")])
@pytest.mark.parametrize("name", CASES)
def test_a_call_that_is_interrupted_has_happened_or_has_not(name: str, opcodes: bool) -> None:
    case = CASES[name]
    check_whole(case.make, case.call, ways_on(case), opcodes=opcodes)


DRAWS: dict[str, Callable[[memoire.Buffer], Any]] = {
    "sample": lambda buffer: buffer.sample(4),
    "sample_episodes": lambda buffer: buffer.sample_episodes(2),
    "update_priorities": lambda buffer: buffer.update_priorities(np.arange(4), np.full(4, 0.5)),
    "configure": lambda buffer: buffer.configure(multi_step=2),
    "rate": lambda buffer: buffer.rate,
}


@pytest.mark.slow
@pytest.mark.parametrize("opcodes", [False, True], ids=["line", "opcode"])
@pytest.mark.parametrize("name", DRAWS)
def test_after_a_draw_that_is_interrupted_this_thread_and_others_go_on(name: str, opcodes: bool) -> None:
    schema = memoire.Schema({"obs": memoire.Column("float32", (2,), "state"), "action": "int64", "reward": "float32"})
    buffer = memoire.Buffer(
        schema, 100, sampler=memoire.Prioritized(0.6, beta=0.4), seed=1, samples_per_insert=1e9, min_size=4
    )
    writer = buffer.writer()
    for step in range(60):
        obs, is_last = np.full(2, step, np.float32), step % 5 == 4
        writer.step(obs, 0, 1.0, is_last, False, obs + 1)
        if is_last:
            writer.reset(obs + 1)
    done: list[str] = []

    def go_on() -> None:
        for each in DRAWS.values():
            each(buffer)
        check_memory(buffer.memory)
        done.append(threading.current_thread().name)

    for number, interrupted in enumerate(everywhere(opcodes)):
        place = interrupted(lambda: DRAWS[name](buffer))
        other = threading.Thread(target=go_on, name=str(number), daemon=True)
        other.start()
        other.join(20.0)
        assert done[-1:] == [str(number)], f"another thread waits, interrupted at {place}"
    go_on()


class Probed(LongWay):
    """Memory that notes, during each change, if another thread could take the lock."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self.between: list[bool] = []

    def closing_changes(self, lane: int, **end: Any) -> Any:
        close, opens = self.memory.closing_changes(lane, **end)
        return [close, (self.probe, ()), opens]

    def probe(self) -> None:
        entered = threading.Event()

        def enter() -> None:
            with self.memory.held():
                entered.set()

        threading.Thread(target=enter, daemon=True).start()
        self.between.append(entered.wait(0.02))


def test_a_change_waits_for_no_lock_that_an_interrupt_could_find_it_at() -> None:
    """The lock is held before the first change, because a C function that waits for a lock is interrupted, too."""
    memory = CASES["terminated"].make().memory
    store: Any = Probed(memory)
    writer = Writer(store, None, "disabled")
    for call in (*TWICE, one(2, True), one(5), reset(SINGLE[9])):
        call(writer)
    assert store.between == [False, False]


# --- Random numbers of forked workers differ from those of parent and siblings, and repeat in each run

PACKAGE = Path(memoire.__file__).parent
SCHEMA = memoire.Schema({"obs": np.int64, "action": np.int32, "reward": np.float32})


def buffer(seed):
    replay = memoire.Buffer(SCHEMA, 1000, sampler=memoire.Uniform(), seed=seed)
    values = np.arange(1000), np.zeros(1000, np.int32), np.zeros(1000, np.float32)
    with_episode(replay.memory, values, terminated=True)
    return replay


def notebook(seed):
    replay = PrioritizedReplayBuffer(1000, 0.6, seed=seed)
    replay.extend(range(1000))
    return lambda: replay.sample(8, 0.4)


def generator_of(kind, name):
    def draws_for(seed):
        held = kind(seed)
        assert isinstance(getattr(held, name), ForkedGenerator)
        return lambda: getattr(held, name).integers(1 << 40, size=8).tolist()

    return draws_for


def bare(kind):
    """Return a function that makes an object with only a seed, so that the object's constructor makes the generator."""
    return lambda seed: kind(seed=seed)


HOLDERS = {
    "replay/memory.py": [
        lambda seed: (lambda replay: lambda: replay.memory.draw(8).tolist())(buffer(seed)),
        lambda seed: (lambda replay: lambda: replay.memory.generator.integers(1 << 40, size=8).tolist())(buffer(seed)),
    ],
    "replay/sampling.py": [
        lambda seed: (lambda generator: lambda: generator.integers(1 << 40, size=8).tolist())(ForkedGenerator(seed))
    ],
    "classic/notebook.py": [lambda seed: (lambda draw: lambda: draw()["indexes"].tolist())(notebook(seed))],
    "rl/memory.py": [generator_of(bare(GenericMemory), "random")],
    "rl/policies.py": [generator_of(bare(MlpPolicy), "_random")],
    "rl/realtime.py": [generator_of(bare(DummyDrone), "_random")],
    "rl/starts.py": [
        generator_of(lambda seed: StartStates("s", {"x": np.float32}, {"x": 0.0}, lambda _: 0.0, seed=seed), "_rng")
    ],
    "rl/demo/actor.py": [], "rl/ppo.py": [], "replay/rollouts.py": [],  # need torch, a cluster, rollouts: a ForkedGenerator
}  # fmt: skip
LOCAL = {
    "prompts/steps.py",
    "rl/__main__.py",
    "rl/saving.py",
    "rl/demo/qlearning.py",
    "rl/starts.py",
}  # code makes these generators by an explicit seed
ALL = [(name, n) for name, makes in HOLDERS.items() for n in range(len(makes))]


def test_every_module_that_makes_a_generator_is_tested_here():
    forked, other = set(), set()
    for path in PACKAGE.rglob("*.py"):
        name, text = path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")
        if not re.search(r"Generator|seed_here|default_rng|PCG64|RandomState", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func).rpartition(".")[2]
                if called in ("ForkedGenerator", "seed_here"):
                    forked.add(name)
                elif called in ("default_rng", "PCG64", "Generator", "RandomState"):
                    other.add(name)
    assert forked == HOLDERS.keys() and other - LOCAL <= {"replay/memory.py", "replay/sampling.py"}


def drawn_in_child(draw, children=0):
    """Return a draw of a forked process, and a draw of each of `children` generations below that process."""
    reader, writer = os.pipe()
    child = fork()
    if child == 0:
        code = 1
        try:
            draws = [draw()] if not children else [*[draw()], *drawn_in_child(draw, children - 1)]
            os.write(writer, json.dumps(draws).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        content = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return json.loads(content)


def family(make, seed):
    """Return draws of a process, of its two children and of a grandchild, in a program without earlier children."""

    def run():
        draw = make(seed)
        return [drawn_in_child(draw)[0], *drawn_in_child(draw, 1), draw()]

    draws = drawn_in_child(run)[0]  # a fresh process: this process has former children
    return [json.dumps(each) for each in draws]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), ALL)
def test_forked_children_draw_apart_and_the_same_in_the_next_run(name, number):
    make = HOLDERS[name][number]
    first, again, unseeded = family(make, 7), family(make, 7), family(make, None)
    assert len(set(first)) == 4 and len(set(unseeded)) == 4
    assert first == again and not set(first) & set(unseeded)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda generator: pickle.loads(pickle.dumps(generator))])
def test_a_copied_generator_goes_on_where_it_was_and_is_apart_in_children(way):
    generator = ForkedGenerator(7)
    generator.random(3)
    again = way(generator)
    assert type(again) is ForkedGenerator and drawn_in_child(again.random)[0] != again.random()
    assert generator.random() != again.random() and again.random() is not None


def test_a_thread_that_draws_meanwhile_leaves_no_lock_to_a_child():
    generator, held, stop = ForkedGenerator(7), buffer(7), threading.Event()

    def draw():
        while not stop.is_set():
            generator.random(1000)
            held.sample(64)

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    try:
        draws = [drawn_in_child(lambda: [generator.random(), held.memory.draw(1).tolist()])[0] for _ in range(8)]
    finally:
        stop.set()
        thread.join(20.0)
    assert len({json.dumps(each) for each in draws}) == 8
