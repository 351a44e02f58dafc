"""Demonstrations of a real environment as a Minari data set: in and out unchanged, and mixed into a learner's batches."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

import memoire
import memoire.minari
from netkit import pool_in, until

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("demonstrations", FOLDER / "demonstrations.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


@pytest.fixture
def data(script, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return script.demonstrations(4, seed=3)


def are_the_same(one, other):
    assert one.total_episodes == other.total_episodes == 4
    for left, right in zip(one.iterate_episodes(), other.iterate_episodes(), strict=True):
        for name in ("observations", "actions", "rewards", "terminations", "truncations"):
            first, second = (np.asarray(getattr(each, name)) for each in (left, right))
            np.testing.assert_array_equal(first, second)
            assert first.dtype == second.dtype, name


def test_the_controller_drives_up_and_chance_does_not(script, data):
    for episode in data.iterate_episodes():
        assert episode.terminations[-1] and -200 < episode.rewards.sum() < -80
    network = script.qlearning.Network((2, 64, 64, 3), seed=0)
    assert script.evaluate(network, script.make_env()) == -200.0


def test_a_data_set_of_a_real_environment_goes_through_a_buffer_unchanged(script, data):
    buffer = memoire.Buffer(memoire.minari.schema(data), 2_000)
    assert memoire.minari.fill(buffer.memory, data) == 4
    about = script.about(script.make_env())
    are_the_same(data, memoire.minari.write(buffer.memory, "memoire/through/buffer-v0", **about))


def test_and_through_a_table_of_a_server(script, data):
    schema = memoire.minari.schema(data)
    table = memoire.Table(schema, storage="episodes", capacity=2_000)
    with memoire.Server("tcp://127.0.0.1:0", tables={"online": table, "demo": table}) as server:
        with memoire.connect(server.endpoint, table="demo") as client:
            script.push(client, data)
            batch = server.table("demo").get_batch(64, timeout=100.0)
            assert len(batch.reward) == 64
            memory = pool_in(server, "demo").memory
            until(lambda: memory.num_episodes == 4)
            about = script.about(script.make_env())
            are_the_same(data, memoire.minari.write(memory, "memoire/through/table-v0", **about))


def test_a_learner_gets_its_share_of_demonstrations_in_every_batch(script, data, monkeypatch):
    learn, seen = script.learn, []

    def learned(learner, batch, random):
        seen.append({name: len(part.reward) for name, part in batch.items()})
        learn(learner, batch, random)

    monkeypatch.setattr(script, "learn", learned)
    curve = script.train(1, 800, data, begin=600, evaluate_every=800)
    assert [step for step, _ in curve] == [800]
    assert seen and all(sizes == {"online": 192, "demo": 64} for sizes in seen)
