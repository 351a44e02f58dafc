"""What pages of workers and trainers show of them: time steps of a device, pauses of training, wrong transitions."""

import urllib.request
from typing import Any

import gymnasium
import numpy as np
import pytest

from memoire.errors import CrcFailed, ParameterError
from memoire.nodes.http import NodePages
from memoire.rl import RealTimeEnv, RealTimeInterface, RolloutWorker, partial
from memoire.rl.codec import Codec
from memoire.tmrl.memory import GenericMemory
from memoire.tmrl.networking import RolloutWorker as PipelineWorker
from memoire.tmrl.networking import Server, Trainer
from memoire.tmrl.training import TrainingAgent
from memoire.tmrl.training_offline import TrainingOffline
from netkit import until

BOX = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)


class Still(RealTimeInterface):
    """A device that does nothing."""

    def get_observation_space(self) -> Any:
        return gymnasium.spaces.Tuple((BOX,))

    def get_action_space(self) -> Any:
        return BOX

    def get_default_action(self) -> Any:
        return np.zeros(1, np.float32)

    def send_control(self, control: Any) -> None:
        pass

    def reset(self) -> Any:
        return [np.zeros(1, np.float32)]

    def get_obs_rew_done_info(self) -> Any:
        return [np.full(1, 0.5, np.float32)], 1.0, False, {}


class Actor:
    def __init__(self, observation_space: Any, action_space: Any) -> None:
        pass

    def act(self, obs: Any, test: bool = False) -> Any:
        return np.zeros(1, np.float32)


def device() -> RealTimeEnv:
    return RealTimeEnv(
        {"interface": Still, "time_step_duration": 0.005, "start_obs_capture": 0.005, "ep_max_length": 5}
    )


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


def test_a_worker_of_another_environment_has_no_time_steps() -> None:
    with Server(port=0) as server:
        worker = RolloutWorker(gymnasium.make("CartPole-v1"), Actor, server.server.endpoint, table="samples")
        with worker:
            text = metrics(worker)
    assert "memoire_client_step_seconds_count" not in text and value(text, "memoire_worker_steps_total") == 0


class Counting(TrainingAgent):
    """Trains nothing."""

    def train(self, batch: Any) -> dict[str, float]:
        return {"loss": 0.0}

    def get_actor(self) -> Any:
        return {"value": np.zeros(1, np.float32)}


def training(codec: Codec | None = None, crc: int = 0) -> Any:
    def memory(nb_steps: int, device: Any) -> GenericMemory:
        return GenericMemory(None, nb_steps, memory_size=100, batch_size=4, codec=codec, crc_debug=crc)

    return partial(
        TrainingOffline, env_cls=(gymnasium.spaces.Tuple((BOX, BOX)), BOX), memory_cls=memory,
        training_agent_cls=Counting, epochs=1, rounds=1, steps=10, start_training=5, device="cpu",
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
    samples = value(after, "memoire_trainer_samples_total")  # those that it had taken by then
    assert 5 <= samples <= 20 and value(after, "memoire_trainer_ratio") == pytest.approx(10 / samples)
    assert {f'memoire_trainer_waits{{reason="{each}"}} 0.0' for each in ("start", "ratio")} <= set(after.splitlines())


def wrong(act: Any, obs: Any, rew: Any, done: Any, info: Any) -> Any:
    return act, (obs[0] + np.float32(0.25), *obs[1:]), rew, done, info


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
