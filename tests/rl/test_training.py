"""Training loops under a manual clock, interrupted calls, and pages of workers and trainers."""

import os
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from interrupts import everywhere
from memoire import Prioritized, Reader, Uniform
from memoire.errors import Closed, CrcFailed, ParameterError
from memoire.models.model import Model
from memoire.nodes.http import NodePages
from memoire.replay.parameters import Parameters
from memoire.rl import Pipeline, RealTimeEnv, Work, partial, replay
from memoire.rl.actors import ModelFollower
from memoire.rl.codec import Codec
from memoire.rl.samples import JOURNAL_FILES, MemoryExperience, Sample, SampleJournal, SampleTaker, columns_of
from memoire.rl.trainer import DrawnBatches
from memoire.rl.training import Training, TrainingLoop
from memoire.tmrl.memory import GenericMemory
from memoire.tmrl.networking import RolloutWorker as PipelineWorker
from memoire.tmrl.networking import Server, Trainer
from memoire.tmrl.training_offline import TrainingOffline
from netkit import in_thread, until
from rlkit import Actor, Arm, Counter, Numbered


class Samples:
    """Experience whose samples arrive while a pause waits for them."""

    def __init__(self, arrives: int = 0, held: int = 0) -> None:
        self.received, self.arrives, self.held = 0, arrives, held
        self.priorities: list[Any] = []

    def update(self) -> None:
        pass

    def __len__(self) -> int:
        return self.held + self.received

    def batch(self) -> Any:
        return "batch"

    def give_priorities(self, batch: Any, priorities: Any) -> None:
        self.priorities.append(priorities)

    def wait(self, timeout: float) -> None:
        self.received += self.arrives


class Agent:
    def __init__(self) -> None:
        self.trained = 0

    def train(self, batch: Any) -> dict[str, Any]:
        self.trained += 1
        return {"loss": float(self.trained), "priorities": [1.0]}


def loop(samples: Samples, **plan: Any) -> tuple[TrainingLoop, Agent, list[int]]:
    agent, published = Agent(), list[int]()
    training_loop = TrainingLoop(agent, samples, lambda: published.append(agent.trained), Training(**plan))
    return training_loop, agent, published


def test_an_epoch_is_rounds_of_steps_with_figures_of_each_round() -> None:
    training_loop, agent, published = loop(
        Samples(held=100, arrives=100), epochs=2, rounds=3, steps=4, update_model_interval=5
    )
    stats = training_loop.run_epoch()
    assert [each.rows()["loss"] for each in stats] == [2.5, 6.5, 10.5]
    assert agent.trained == 12 and published == [5, 10] and training_loop.state.epoch == 1
    rows = stats[0].rows()
    assert {"round_time", "idle_time", "sampling_duration", "training_step_duration", "memory_len"} <= rows.keys()


def test_training_pauses_above_the_ratio_and_says_why() -> None:
    samples = Samples(arrives=1, held=50)
    training_loop, agent, _ = loop(samples, rounds=1, steps=10, max_training_steps_per_env_step=2.0)
    training_loop.run_epoch()
    assert agent.trained == 10 and samples.received == 5 and training_loop.idle["ratio"] >= 0.0
    over = TrainingLoop(Agent(), samples, lambda: None, Training(rounds=1, steps=2), is_over=lambda: bool(over.reason))
    samples.arrives = samples.received = 0
    assert over.run_epoch() == [] and over.state.epoch == 0


def test_a_pause_is_explained() -> None:
    samples, texts = Samples(held=3), list[str]()
    training_loop, _, _ = loop(samples, rounds=1, steps=1, start_training=10)

    def wait(timeout: float) -> None:
        texts.append(training_loop.explain())
        samples.held += 7
        samples.received += 1

    samples.wait = wait  # type: ignore[method-assign]
    training_loop.run_epoch()
    assert texts == ["waiting for samples: 3 of start_training=10 available"] and training_loop.explain() == ""


def test_the_scheduler_comes_first_and_priorities_go_back() -> None:
    samples, seen = Samples(arrives=10, held=10), list[tuple[int, int]]()

    def scheduler(agent: Agent, epoch: int) -> None:
        seen.append((epoch, agent.trained))

    training_loop, _, _ = loop(samples, epochs=2, rounds=1, steps=2, agent_scheduler=scheduler)
    training_loop.run_epoch()
    training_loop.run_epoch()
    assert seen == [(0, 0), (1, 2)] and samples.priorities == [[1.0]] * 4 and training_loop.is_done


def test_models_are_published_by_time_too() -> None:
    now = [0.0]
    agent, published = Agent(), list[int]()
    plan = Training(rounds=1, steps=6, update_model_interval=1000, update_model_seconds=2.5)

    def train(batch: Any) -> dict[str, Any]:
        now[0] += 1.0
        agent.trained += 1
        return {}

    agent.train = train  # type: ignore[method-assign]
    training_loop = TrainingLoop(
        agent, Samples(10, 10), lambda: published.append(agent.trained), plan, clock=lambda: now[0]
    )
    training_loop.run_epoch()
    assert published == [3, 6]


@pytest.mark.parametrize(
    ("plan", "name", "value"),
    [(Training, "rounds", 0), (Training, "max_training_steps_per_env_step", 0.0), (Training, "start_training", -1),
     (Work, "test_pause", -1.0)],
)  # fmt: skip
def test_a_plan_that_cannot_be_is_refused(plan: Any, name: str, value: float) -> None:
    with pytest.raises(ParameterError, match=name):
        plan(**{name: value})


def test_a_table_without_a_discount_has_the_default_one_of_its_agent() -> None:
    spaces = {"env": Numbered, "policy": Actor, "agent": lambda gamma=0.7, **_: None}
    pipeline = Pipeline(run="a", table=replay(100), work=Work(test_pause=0.0), **spaces)
    assert pipeline.make_table().parameters.discount == (0.7,)


@pytest.mark.parametrize(("sampler", "sent"), [(Uniform(), []), (Prioritized(0.6), [[2.0, 3.0]])])
def test_priorities_are_sent_only_if_draws_depend_on_them(sampler: Any, sent: list[list[float]]) -> None:
    def totals() -> Any:
        raise Closed("this reader")

    parameters = Parameters().replace(**sampler.fields())
    experience = DrawnBatches(cast(Reader, SimpleNamespace(parameters=parameters, totals=totals)), 2)
    received: list[list[float]] = []
    experience.give_priorities(SimpleNamespace(update_priorities=received.append), [2.0, 3.0])
    experience.close()
    assert received == sent


ENDS = 20.0
"""Seconds in which a call of another thread must end."""


class Once:
    """Reader that returns samples of these workers once, and is closed afterwards."""

    parameters = None

    def __init__(self, *workers: int) -> None:
        each = {k: [Sample(k, k, 1.0, False, False, {}, episode=1, step=step) for step in range(3)] for k in workers}
        self.left, self.steps = [each], [7]
        self.client = np.array([np.frombuffer(bytes([k]) * 16, np.uint8) for k in workers])
        self.lengths = np.full(len(workers), 3)
        self.columns = columns_of([sample for samples in each.values() for sample in samples])

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, wanted: int, patience: float, exact: bool) -> Any:
        if not self.left:
            raise Closed("this reader")
        self.left.clear()
        return self

    def totals(self) -> Any:
        if not self.steps:
            raise Closed("this reader")
        return SimpleNamespace(totals=SimpleNamespace(steps=self.steps.pop()))


class Memory(list[Any]):
    """List in place of a `GenericMemory`."""

    append = list.extend


def taker() -> SampleTaker:
    sample_taker: Any = SampleTaker(Once(1, 2))  # type: ignore[arg-type]
    sample_taker.wait(ENDS)
    return sample_taker


class ReceivedBuffer(list[Any]):
    """Buffer of samples, whose `memory` names the worker and the step of each."""

    @property
    def memory(self) -> list[Any]:
        return [(each.client[0], each.step) for each in self]


@pytest.mark.parametrize("every", [1 if "INTERRUPTED_OPCODES" in os.environ else 17])
def test_samples_that_came_are_in_memory_journal_and_figures_once_wherever_their_trainer_is_interrupted(
    every: int, tmp_path: Path
) -> None:
    expected = [(client, step) for client in (1, 2) for step in range(3)]
    for number, interrupted in enumerate(everywhere(every=every)):
        memory: Any = Memory()
        with SampleJournal(tmp_path / str(number), 2 * JOURNAL_FILES) as journal:  # the file writes each buffer at once
            experience = MemoryExperience(taker(), memory, lambda samples, continues: ReceivedBuffer(samples), journal)
            place = interrupted(experience.update)
            experience.update()
            journal.commit()
            assert [(each.client[0], each.step) for each in memory] == expected, place
            assert [tuple(sample) for each in journal.buffers() for sample in each.memory] == expected, place
            assert experience.received == 6 and experience.state()["last"] == [(b"\2" * 16).hex(), 1, 2], place
            assert [each[1:] for each in experience.state()["open"]] == [[3, 0.0]] * 2, place


class Models:
    """Subscription that receives one model, and is closed afterwards."""

    def __init__(self) -> None:
        self.left = [Model("policy", 3, b"weights", False, 0)]

    def wait(self, timeout: float, after: int) -> Model:
        if not self.left:
            raise Closed("this client")
        return self.left.pop()


def follower() -> ModelFollower:
    actor: Any = SimpleNamespace(prepare=lambda body, version: body)
    model_follower = ModelFollower(Models(), actor, lambda body, version: None)  # type: ignore[arg-type]
    assert model_follower.wait(2, ENDS)
    return model_follower


def counts() -> DrawnBatches:
    batches = DrawnBatches(Once(1), 2)  # type: ignore[arg-type]
    assert batches.await_count(ENDS) == 7
    return batches


WAITS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "samples": (taker, lambda each: each.wait(0.01)),
    "a model": (follower, lambda each: each.wait(3, 0.001)),
    "steps": (counts, lambda each: each.await_count(0.01)),
    "more steps": (counts, lambda each: each.wait(0.001)),
}


@pytest.mark.parametrize("name", WAITS)
def test_after_a_wait_that_is_interrupted_another_thread_can_wait(name: str) -> None:
    make, wait = WAITS[name]
    waited = make()
    for interrupted in everywhere():
        place = interrupted(lambda: wait(waited))
        thread, box = in_thread(wait, waited)
        thread.join(ENDS)
        assert "value" in box, f"interrupted at {place}: {box.get('error', 'no end')!r}"


# --- Pages of workers and trainers: time steps of a device, pauses of training, wrong transitions


def device() -> RealTimeEnv:
    return RealTimeEnv({"interface": Arm, "time_step_duration": 0.005, "start_obs_capture": 0.005, "ep_max_length": 5})


def metrics(node: Any) -> str:
    with NodePages("127.0.0.1:0", node) as pages:
        assert pages.url is not None
        with urllib.request.urlopen(f"{pages.url}/metrics", timeout=20) as answer:
            return str(answer.read(), "utf-8")


def value(text: str, name: str) -> float:
    return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{name} "))


def test_a_worker_of_a_device_shows_its_time_steps_and_test_episodes() -> None:
    with Server(port=0) as server, PipelineWorker(device, Actor, port=server.port, model_path=None) as worker:
        worker.run(2, 2)
        text, times = metrics(worker), worker.env.times
        worker.env.close()
    assert value(text, "memoire_worker_steps_total") == 10 and value(text, "memoire_worker_test_episodes_total") == 1
    assert value(text, "memoire_client_step_seconds_count") == times.steps >= 12
    assert value(text, "memoire_client_step_seconds_sum") == pytest.approx(times.seconds)
    assert value(text, 'memoire_client_late_steps_total{cause="policy"}') == times.late["policy"]


def training(codec: Codec | None = None, crc: int = 0) -> Any:
    def memory(nb_steps: int, device: Any) -> GenericMemory:
        return GenericMemory(None, nb_steps, memory_size=100, batch_size=4, codec=codec, crc_debug=crc)

    return partial(
        TrainingOffline, env_cls=device, memory_cls=memory, training_agent_cls=Counter, epochs=1, rounds=1, steps=10,
        start_training=5, device="cpu",
    )  # fmt: skip


def test_a_trainer_shows_its_ratio_and_what_it_waits_for() -> None:
    with Server(port=0) as server, PipelineWorker(device, Actor, port=server.port, model_path=None) as worker:
        worker.run(0, 4)
        worker.env.close()
        with Trainer(training(), port=server.port, model_path=None, checkpoint_path=None) as trainer:
            before = metrics(trainer)
            trainer.run()
            after = metrics(trainer)
    assert value(before, "memoire_trainer_updates_total") == 0
    assert value(after, "memoire_trainer_updates_total") == 10
    samples = value(after, "memoire_trainer_samples_total")  # samples that the trainer had taken by then
    assert 5 <= samples <= 20 and value(after, "memoire_trainer_ratio") == pytest.approx(10 / samples)
    assert {f'memoire_trainer_waits{{reason="{each}"}} 0.0' for each in ("start", "ratio")} <= set(after.splitlines())


def wrong(act: Any, obs: Any, rew: Any, done: Any, info: Any) -> Any:
    return act, (obs[0] + np.float32(0.25), *obs[1:]), rew, done, info


@pytest.mark.slow
def test_servers_hear_of_a_wrong_transition_before_the_trainer_ends() -> None:
    codec = Codec(wrong, lambda *parts: parts)
    with Server(port=0) as server:
        with PipelineWorker(device, Actor, codec, port=server.port, model_path=None, crc_debug=True) as worker:
            worker.run(0, 2)
            worker.env.close()
        with Trainer(training(codec, 1), port=server.port, model_path=None, checkpoint_path=None) as trainer:
            with pytest.raises(CrcFailed):
                trainer.run()
            assert value(metrics(trainer), "memoire_crc_failed_total") == 1
            assert until(lambda: server.server.stats().learner_scalars.get("trainer_crc_failed") == 1.0)


def test_an_episode_of_an_unknown_kind_is_refused() -> None:
    with Server(port=0) as server, PipelineWorker(device, Actor, port=server.port, model_path=None) as worker:
        assert worker.client is not None
        with pytest.raises(ParameterError, match="kind must be train or test, got 'expert'"):
            worker.client.report(1, 1.0, kind="expert")
