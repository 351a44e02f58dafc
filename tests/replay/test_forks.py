"""Forked workers draw other numbers than their parent and siblings: all generators, near and nested, the same in each run."""

import ast
import copy
import json
import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest

import memoire
from memoire.classic.notebook import PrioritizedReplayBuffer
from memoire.replay.memory import ForkedGenerator
from memoire.rl.drone import DummyDrone
from memoire.rl.memory import GenericMemory
from memoire.rl.observers.starts import StartStates
from memoire.rl.policies import MlpPolicy
from statekit import fork

PACKAGE = Path(memoire.__file__).parent
SCHEMA = memoire.Schema({"obs": np.int64, "action": np.int32, "reward": np.float32})


def buffer(seed):
    made = memoire.Buffer(SCHEMA, 1000, sampler=memoire.Uniform(), seed=seed)
    memory = made.memory
    memory.open()
    memory.extend(0, [np.arange(1000), np.zeros(1000, np.int32), np.zeros(1000, np.float32)])
    memory.close(terminated=True)
    return made


def notebook(seed):
    made = PrioritizedReplayBuffer(1000, 0.6, seed=seed)
    made.extend(range(1000))
    return lambda: made.sample(8, 0.4)


def generator_of(kind, name):
    def made(seed):
        held = kind(seed)
        assert isinstance(getattr(held, name), ForkedGenerator)
        return lambda: getattr(held, name).integers(1 << 40, size=8).tolist()

    return made


def bare(kind):
    """One with a generator as its own constructor makes it, however much else it needs."""
    return lambda seed: kind(seed=seed)


HOLDERS = {
    "replay/memory.py": [
        lambda seed: (lambda made: lambda: made.memory.draw(8).tolist())(buffer(seed)),
        lambda seed: (lambda made: lambda: made.memory.generator.integers(1 << 40, size=8).tolist())(buffer(seed)),
        lambda seed: (lambda made: lambda: made.integers(1 << 40, size=8).tolist())(ForkedGenerator(seed)),
    ],
    "classic/notebook.py": [lambda seed: (lambda draw: lambda: draw()["indexes"].tolist())(notebook(seed))],
    "rl/memory.py": [generator_of(bare(GenericMemory), "random")],
    "rl/policies.py": [generator_of(bare(MlpPolicy), "_random")],
    "rl/drone.py": [generator_of(bare(DummyDrone), "_random")],
    "rl/observers/starts.py": [
        generator_of(lambda seed: StartStates("s", {"x": np.float32}, {"x": 0.0}, lambda _: 0.0, seed=seed), "_rng")
    ],
    "rl/demo/actor.py": [], "rl/onpolicy/ppo.py": [], "replay/rollouts.py": [],  # need torch, a cluster, rollouts: a ForkedGenerator
}  # fmt: skip
LOCAL = {
    "tables/prompts/steps.py",
    "rl/__main__.py",
    "rl/trainer/saving.py",
    "rl/demo/qlearning.py",
    "rl/observers/starts.py",
}  # made where they are used, by a given seed
ALL = [(name, n) for name, makes in HOLDERS.items() for n in range(len(makes))]


def test_every_module_that_makes_a_generator_is_tested_here():
    forked, other = set(), set()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func).rpartition(".")[2]
                if called in ("ForkedGenerator", "seed_here"):
                    forked.add(name)
                elif called in ("default_rng", "PCG64", "Generator", "RandomState"):
                    other.add(name)
    assert forked == HOLDERS.keys() and other - LOCAL <= {"replay/memory.py"}


def drawn_in_child(draw, children=0):
    """What a forked process draws, and the first of so many generations of its children."""
    reader, writer = os.pipe()
    child = fork()
    if child == 0:
        code = 1
        try:
            found = [draw()] if not children else [*[draw()], *drawn_in_child(draw, children - 1)]
            os.write(writer, json.dumps(found).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        content = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return json.loads(content)


def family(make, seed):
    """Draws of a process, of two children and of a child of the second; by a program that begins with no child."""

    def run():
        draw = make(seed)
        return [drawn_in_child(draw)[0], *drawn_in_child(draw, 1), draw()]

    found = drawn_in_child(run)[0]  # in a process of its own: the children of this one were counted before
    return [json.dumps(each) for each in found]


@pytest.mark.parametrize(("name", "number"), ALL)
def test_forked_children_draw_apart_and_the_same_in_the_next_run(name, number):
    make = HOLDERS[name][number]
    first, again, unseeded = family(make, 7), family(make, 7), family(make, None)
    assert len(set(first)) == 4 and len(set(unseeded)) == 4
    assert first == again and not set(first) & set(unseeded)


def test_the_children_draw_as_numpy_spawns():
    def run():
        made = ForkedGenerator(7)
        draws = lambda: made.integers(1 << 40, size=4).tolist()  # noqa: E731
        return [drawn_in_child(draws)[0], *drawn_in_child(draws, 1), draws()]

    seeds = [np.random.SeedSequence(7, spawn_key=key) for key in ((0,), (1,), (1, 0), ())]
    assert drawn_in_child(run)[0] == [np.random.default_rng(each).integers(1 << 40, size=4).tolist() for each in seeds]


@pytest.mark.parametrize("way", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_copied_generator_goes_on_where_it_was_and_is_apart_in_children(way):
    made = ForkedGenerator(7)
    made.random(3)
    again = way(made)
    assert type(again) is ForkedGenerator and drawn_in_child(again.random)[0] != again.random()
    assert made.random() != again.random() and again.random() is not None


def test_a_thread_that_draws_meanwhile_leaves_no_lock_to_a_child():
    made, held, stop = ForkedGenerator(7), buffer(7), threading.Event()

    def draw():
        while not stop.is_set():
            made.random(1000)
            held.sample(64)

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    try:
        found = [drawn_in_child(lambda: [made.random(), held.memory.draw(1).tolist()])[0] for _ in range(8)]
    finally:
        stop.set()
        thread.join(20.0)
    assert len({json.dumps(each) for each in found}) == 8
