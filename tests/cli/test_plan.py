"""Tests of `memoire plan`: its sizes match real caches and episodes, and more load never takes less."""

import dataclasses
import runpy
import time
from pathlib import Path

import numpy as np
import pytest

import memoire
from memoire.cli import main, plan
from memoire.errors import ParameterError
from memoire.replay.memory import Memory
from memoire.wire import containers
from memoire.wire.parts import ContainerKind
from memory_checks import with_episode

STACKS = {"frame_stack": 3, "multi_step": 2}

ROOT = Path(__file__).resolve().parents[2]


def schema():
    return memoire.Schema(
        {
            "state": memoire.Column("uint8", (6, 6), "state"),
            "action": memoire.Column("int32"),
            "reward": memoire.Column("float32", (2,), "reward"),
        }
    )


def memory_of(parameters, steps=4000):
    values = np.zeros((steps, 6, 6), np.uint8), np.zeros(steps, np.int32), np.ones((steps, 2), np.float32)
    return with_episode(Memory(schema(), steps, parameters, seed=0), values, np.ones(steps, np.float32))


@pytest.mark.parametrize(
    "settings", [{}, STACKS, {**STACKS, "multi_step": 9}, {"frame_stack": 2, "next": ()}, {"sequence_length": 5}]
)
@pytest.mark.parametrize("kind", [ContainerKind.CACHE, ContainerKind.DRAWN])
def test_a_sample_has_the_bytes_that_a_cache_of_few_samples_has_more_for_one_more(settings, kind):
    memory = memory_of(memoire.Parameters(**settings))

    def container(samples):
        if kind is ContainerKind.DRAWN:
            return containers.build_drawn(memory, bytes(16), samples, now=0.0).nbytes
        return containers.build(memory, samples, now=0.0).nbytes

    measured = (container(120) - container(40)) / 80
    planned = plan.sample_bytes(memory.schema, memory.parameters, kind)
    assert 0.75 * planned < measured < planned + 5.0  # samples share frames, and blocks begin at multiples of 64


def test_a_step_of_an_episode_has_the_bytes_that_its_container_has_more_for_one_more():
    def container(steps):
        facts = np.ones(steps, np.float32), np.zeros(steps, np.float32), np.zeros(steps, np.int64)
        return containers.pack_episode(schema(), lambda name, target: target.fill(0), *facts, now=time.time()).nbytes

    assert (container(1280) - container(640)) / 640 == plan.entry_bytes(schema())


def test_compression_takes_its_share_of_frames_alone():
    whole, half = (plan.sample_bytes(schema(), memoire.Parameters(**STACKS), compressed=share) for share in (1.0, 0.5))
    assert whole - half == 0.5 * 5 * 36  # 3 frames of the stack and 2 next frames
    assert plan.entry_bytes(schema()) - plan.entry_bytes(schema(), compressed=0.5) == 0.5 * 36


def load(**changes):
    return dataclasses.replace(plan.Workload(schema(), memoire.Parameters(**STACKS)), **changes)


@pytest.mark.parametrize("storage", ["caches", "episodes"])
@pytest.mark.parametrize("name", ["actors", "learners", "batches", "batch_size"])
def test_more_of_anything_never_takes_less(storage, name):
    less = plan.plan(load(storage=storage))
    more = plan.plan(load(storage=storage, **{name: 8 * getattr(less.load, name)}))
    assert more.server_cores >= less.server_cores
    assert more.servers >= less.servers
    assert more.inward >= less.inward
    assert more.server_cores + more.proxy_cores > less.server_cores + less.proxy_cores


def test_batches_travel_packed_by_lz4_alone():
    def sent(compression):
        parameters = memoire.Parameters(compression=compression)
        return plan.plan(load(parameters=parameters, compressed=0.1))

    assert sent("lz4").outward < 0.9 * sent("zlib").outward
    assert sent("lz4").inward == sent("zlib").inward
    assert sent("auto").outward == sent("lz4").outward


def test_the_command_prints_the_plan(capsys):
    assert main.main(["plan", "--state", "84x84", "--set", "frame_stack=4", "--actors", "3", "--network", "20"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("load     3 actors, 50 steps a second each; 10 learners")
    assert "servers  " in text and "proxies  2" in text and "Gbit/s" in text
    assert (
        main.main(["plan", "--env", "CartPole-v1", "--storage", "episodes", "--embedded", "--model-bytes", "1e6"]) == 0
    )
    text = capsys.readouterr().out
    assert "one in each learner" in text and "models" in text
    described = schema().to_json()
    assert main.main(["plan", "--schema", described]) == 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--state", "8x"], "--state must be a shape and a dtype"),
        (["--state", "8:colour"], "--state must be a shape and a dtype"),
        (["--actors", "0"], "actors must be a number above 0"),
        (["--compressed", "1.5"], "compressed must be a share of the states' bytes, above 0 and at most 1"),
        (["--compressed", "0.5"], "compressed=0.5 needs a table with compression: --set compression=lz4"),
        (["--network", "nan"], "network must be a number above 0"),
    ],
)
def test_what_cannot_be_planned_is_said(words, complaint, capsys):
    assert main.main(["plan", *words]) == 1
    assert complaint in capsys.readouterr().err


def test_a_ragged_column_has_no_size_to_plan_with():
    ragged = memoire.Schema({"state": memoire.Column("uint8", (None, 3), "state"), "reward": np.float32})
    with pytest.raises(ParameterError, match="column 'state' must be of a fixed shape to plan with"):
        plan.plan(plan.Workload(ragged, memoire.Parameters()))


def test_the_page_shows_what_the_command_prints():
    page = runpy.run_path(str(ROOT / "tools" / "plan_docs.py"))["page"]
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert text.count("$ memoire plan") == 3
    assert text == page(text), "run tools/plan_docs.py"
