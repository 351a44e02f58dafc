"""Rollout workers: training and test episodes, their ends, and the samples that arrive."""

import contextlib
import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from history.ports import held
from memoire import Reader, Schema, Server, Table
from memoire.errors import CodecMismatch, MemoireTimeout, NotEnoughSamples, ParameterError, WrongType
from memoire.rl import RolloutWorker, weights
from memoire.rl.codec import MARK, PREPROCESSOR, Codec, digest
from memoire.rl.memory import NO_DONE, six_parts
from memoire.rl.recording import Packets
from memoire.rl.samples import TABLE, samples_of, samples_table
from memoire.rl.spaces import ACTION_SPACE
from memoire.rl.worker import run_synchronous
from memoire.wire.messages import TEST, TRAIN
from netkit import in_thread, until
from rlkit import Actor, Numbered

pytestmark = pytest.mark.slow


def model(value: float) -> bytes:
    return weights.pack({"value": np.array([value], np.float32)})


@pytest.fixture
def queue() -> Iterator[Server]:
    with Server("tcp://127.0.0.1:0", tables={TABLE: samples_table()}) as server:
        yield server


def packets(least: int = 1, **options: Any) -> Any:
    return lambda client: Packets(client, options.pop("compressor", None), least, **options)


def taken(server: Server, count: int) -> list[Any]:
    return samples_of(server.table(TABLE).take(count, timeout=10.0))


def test_a_test_episode_comes_before_training_episodes_and_is_no_sample(queue: Server) -> None:
    device, policy = Numbered(5), Actor()
    with RolloutWorker(device, policy, queue.endpoint, recording=packets()) as worker:
        kinds: list[str] = []
        worker.run(2, 3, on_episode=lambda kind, result: kinds.append(kind))
        assert kinds == ["test", "train", "train", "test", "train"]
        assert worker.steps == 15 and worker.episodes == 3
        assert policy.tests.count(True) == 10
        expected = [(TEST, 5, 5.0), (TRAIN, 5, 5.0), (TRAIN, 5, 5.0), (TEST, 5, 5.0), (TRAIN, 5, 5.0)]
        assert until(lambda: [(each.kind, each.length, each.returned) for _, each in queue.episodes()] == expected)
        stats = queue.stats()
        assert (stats.recent.count, stats.tested.count, stats.tested.return_mean) == (3, 2, 5.0)
        assert worker.stats().tests == 2
    samples = taken(queue, 18)
    assert [each.is_reset for each in samples] == ([True] + [False] * 5) * 3
    assert [each.test_length for each in samples if each.is_reset] == [5, 0, 5]
    assert until(lambda: queue.totals().steps == 15 and queue.totals().episodes == 3)


@pytest.fixture
def paced(keep: Any) -> tuple[Server, RolloutWorker]:
    """Return a server that admits as many entries as learners draw, and a paced worker with episodes of 50 steps."""
    band = {"samples_per_insert": 1.0, "samples_per_insert_tolerance": 20.0}
    table = Table(Schema.from_env(Numbered()), storage="episodes", capacity=1000, **band)
    server = keep(Server("tcp://127.0.0.1:0", tables={"replay": table}))
    return server, keep(RolloutWorker(Numbered(50), Actor(), server.endpoint, is_paced=True))


def test_a_paced_worker_begins_no_episode_without_room_and_records_none_in_vain(paced: Any) -> None:
    server, worker = paced
    worker.client.configure_limits(block_timeout=0.01)  # an episode that has to wait for room is dropped
    thread, _ = in_thread(worker.run, 0, 4)
    with Reader(server.endpoint) as reader:
        while thread.is_alive():
            with contextlib.suppress(NotEnoughSamples):
                reader.get_batch(10, timeout=0.5)
    assert (worker.steps, worker.client.stats().passed_steps) == (200, 0)
    assert until(lambda: server.table("replay").stats().rate.entries == 200)


@pytest.mark.parametrize("is_expert", [False, True])
def test_a_worker_that_waits_for_learners_runs_test_episodes_meanwhile(paced: Any, is_expert: bool) -> None:
    worker, kinds = paced[1], list[str]()
    pauses, update = [0], worker.client.update

    def on_episode(kind: str, result: Any) -> None:
        kinds.append(kind)
        if len(kinds) == 4:
            worker.stop()

    def counted(timeout: float) -> None:  # an expert runs no tests: the twentieth wait stops it
        update(timeout)
        pauses[0] += 1
        if pauses[0] == 20:
            worker.stop()

    worker.client.update = counted
    worker.run(0, test_pause=0.0, is_expert=is_expert, on_episode=on_episode)
    assert kinds == (["train"] if is_expert else ["train", "test", "test", "test"])
    assert worker.steps == 50  # tests are no samples


def test_samples_go_at_the_end_of_an_episode_when_there_are_enough(queue: Server) -> None:
    recorders: list[Packets] = []

    def recording(client: Any) -> Packets:
        recorders.append(Packets(client, None, 10))
        return recorders[0]

    with RolloutWorker(Numbered(5), Actor(), queue.endpoint, recording=recording) as worker:
        worker.run(0, 1)
        assert len(taken(queue, 6)) == 6  # the end of a run sends the remaining samples
        worker.run_episode(train=True)
        assert len(recorders[0]) == 6
        worker.run_episode(train=True)
        assert len(recorders[0]) == 0 and len(taken(queue, 12)) == 12


def test_a_stream_sends_within_an_episode(queue: Server) -> None:
    device = Numbered(1000)
    with RolloutWorker(device, Actor(), queue.endpoint, recording=packets(4, stream=True)) as worker:
        arrived: list[int] = []

        def look() -> None:
            if device.count == 8:
                arrived.append(len(taken(queue, 8)))
                worker.stop()

        device.on_step = look
        worker.run(0, 1)
    assert arrived == [8]


def test_a_compressor_takes_done_or_terminated_and_truncated_and_gives_as_many(queue: Server) -> None:
    seen: list[tuple[Any, ...]] = []

    def five(act: Any, obs: Any, rew: Any, done: Any, info: Any, scale: float = 2.0) -> Any:
        seen.append((done, NO_DONE in info))
        return act, obs, rew * scale, done, {}

    def six(act: Any, obs: Any, rew: Any, terminated: Any, truncated: Any, info: Any) -> Any:
        seen.append((terminated, truncated, NO_DONE in info))
        return act, obs, rew * 2, terminated, truncated, {}

    # The device terminates after two steps, or the test gives the device up after one: each compressor learns the end.
    of_six = (False, True, False)
    for compressor, flags in ((five, (False, True)), (six, of_six), (functools.partial(six), of_six)):
        for limit, last in ((1, (False, True)), (9, (True, False))):
            seen.clear()
            options = {"recording": packets(compressor=compressor), "max_samples_per_episode": limit}
            with RolloutWorker(Numbered(2), Actor(), queue.endpoint, **options) as worker:
                worker.run(0, 1)
            sample = taken(queue, 2 if limit == 1 else 3)[-1]
            assert (sample.rew, sample.terminated, sample.truncated) == (2.0, *last)
            is_told = compressor is not five and limit == 1
            assert (NO_DONE in sample.info) == is_told and (seen[-1] == flags) == (limit == 1)
            assert six_parts((*sample[:4], sample.info))[4] == is_told

    for wrong, error in ((lambda act, obs, rew, info: None, ParameterError), (lambda *six: six[:4], WrongType),
                         (lambda *six: None, WrongType)):  # fmt: skip
        with pytest.raises(error, match=r"sample_compressor.*(terminated|of the 5 values)"):
            with RolloutWorker(Numbered(2), Actor(), queue.endpoint, recording=packets(compressor=wrong)) as worker:
                worker.run(0, 1)


def test_digests_of_codec_and_preprocessor_travel_with_each_reset(queue: Server) -> None:
    def same(obs: Any) -> Any:
        return obs

    codec = Codec({"obs": np.float16}, {"obs": np.float32})
    recording = packets(compressor=codec, preprocessor=same)
    with RolloutWorker(Numbered(2), Actor(), queue.endpoint, recording=recording, obs_preprocessor=same) as worker:
        worker.run(0, 2)
    infos = [each.info for each in taken(queue, 6)]
    codec.check_mark(infos[0], "a worker")
    assert [MARK in info for info in infos] == [True, False, False] * 2
    assert [info.get(PREPROCESSOR) for info in infos] == [digest(same), None, None] * 2
    with pytest.raises(CodecMismatch, match="a worker compresses samples with the codec float16"):
        Codec({"obs": np.float32}, {"obs": np.float64}).check_mark(infos[0], "a worker")


@pytest.mark.parametrize(("ending", "error"), [("error", OSError), ("stop", None), ("interrupt", KeyboardInterrupt)])
def test_whatever_ends_it_the_device_rests_and_samples_are_sent(queue: Server, ending: str, error: Any) -> None:
    device = Numbered(1000)
    worker = RolloutWorker(device, Actor(), queue.endpoint, recording=packets(10_000))

    def end() -> None:
        if ending == "error" and len(device.actions) == 8:
            raise OSError("the cable is out")
        if ending != "error" and len(device.actions) == 7:
            worker.stop() if ending == "stop" else os.kill(os.getpid(), signal.SIGINT)

    device.on_step = end
    with pytest.raises(error) if error else contextlib.nullcontext():
        worker.run()
    assert device.actions[-1] == 0.0 and device.actions[:7] == [0.5] * 7
    assert len(taken(queue, 8)) == 8
    worker.close()


def test_a_late_worker_gets_the_newest_model_and_keeps_its_history(queue: Server, tmp_path: Path) -> None:
    queue.publish("policy", model(0.25))
    queue.publish("policy", model(0.75))
    policy = Actor()
    options = {"model_path": tmp_path / "a.pth", "model_path_history": tmp_path / "a_", "model_history": 2}
    with RolloutWorker(Numbered(5), policy, queue.endpoint, recording=packets(), **options) as worker:
        assert worker.await_model(10.0)
        worker.follow()
        assert worker.version == 2 and policy.value == 0.75
        for value in (0.1, 0.2):
            before = worker.version
            queue.publish("policy", model(value))
            assert worker.await_model(10.0)
            worker.follow()
            assert worker.version == before + 1
    assert weights.load(tmp_path / "a.pth")["value"][0] == np.float32(0.2)
    assert len(list(tmp_path.glob("a_*"))) == 1  # the second of three models
    again = Actor()
    alone = RolloutWorker(Numbered(5), again, model_path=tmp_path / "a.pth")
    assert again.value == np.float32(0.2) and alone.client is None
    alone.close()


def test_a_worker_alone_needs_a_model(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"has no server .url=None.*nothing\.pth"):
        RolloutWorker(Numbered(5), Actor(), model_path=tmp_path / "nothing.pth")
    weights.save(tmp_path / "b.pth", {"value": np.zeros(1, np.float32)}, {ACTION_SPACE: "Discrete(3)"})
    with pytest.raises(ParameterError, match=r"Discrete\(3\), for which this model was trained"):
        RolloutWorker(Numbered(5), Actor(), model_path=tmp_path / "b.pth")


def test_a_synchronous_worker_waits_for_the_next_model(queue: Server) -> None:
    with RolloutWorker(Numbered(4), Actor(), queue.endpoint, recording=packets()) as worker:
        steps = {"initial_steps": 8, "max_steps_per_update": 8, "nb_steps": 16}
        thread, _ = in_thread(lambda: run_synchronous(worker, **steps))
        assert until(lambda: worker.steps == 8)
        assert len(taken(queue, 10)) == 10  # the worker sent samples before the wait
        assert thread.is_alive() and worker.steps == 8
        queue.publish("policy", model(0.25))
        thread.join(10.0)
        assert not thread.is_alive() and worker.steps == 16


def test_nobody_there_is_said_with_the_address() -> None:
    with pytest.raises(MemoireTimeout, match="127.0.0.1"):
        RolloutWorker(Numbered(5), Actor(), "tcp://127.0.0.1:9", timeout=0.2)


def test_a_worker_takes_the_first_of_several_servers_that_answers(queue: Server) -> None:
    with held(1) as unused_port:
        urls = [f"tcp://127.0.0.1:{unused_port}", queue.endpoint]
        with RolloutWorker(Numbered(5), Actor(), urls, recording=packets(), timeout=2.0) as worker:
            worker.run(0, 1)
    assert len(taken(queue, 6)) == 6


def test_a_worker_runs_episodes_on_the_processors_that_it_is_given(queue: Server) -> None:
    mine, seen = sorted(os.sched_getaffinity(0)), list[set[int]]()
    with RolloutWorker(Numbered(5), Actor(), queue.endpoint, recording=packets(), cpus=mine[:1]) as worker:
        run = lambda: (worker.run(0, 1), seen.append(os.sched_getaffinity(0)))  # noqa: E731
        in_thread(run)[0].join(20.0)
    assert seen == [set(mine[:1])] and sorted(os.sched_getaffinity(0)) == mine
