"""Server, workers and a trainer together: each sample arrives once and unchanged, in any order of starts."""

import contextlib
import inspect
import itertools
import re
import shutil
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from memoire.errors import (
    CodecMismatch,
    CrcDebugMismatch,
    DataError,
    MemoireTimeout,
    ParameterError,
    Refused,
    StateLocked,
)
from memoire.nodes.http import NodePages
from memoire.rl import weights
from memoire.rl.codec import Codec
from memoire.tmrl.memory import GenericMemory
from memoire.tmrl.networking import Buffer, RolloutWorker, Server, Trainer
from memoire.tmrl.training_offline import TrainingOffline
from memoire.tmrl.util import partial
from netkit import until
from rlkit import ACTIONS, SPACE, Actor, Counter, Numbered

pytestmark = pytest.mark.slow


class Kept:
    """Memory that keeps every sample in the order of arrival."""

    def __init__(self, nb_steps: int, device: Any) -> None:
        self.nb_steps = nb_steps
        self.samples: list[Any] = []
        self.buffers = 0

    def append_buffer(self, buffer: Buffer) -> None:
        self.samples += buffer.memory
        self.buffers += 1

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.nb_steps):
            yield self.samples[-1]

    @property
    def seen(self) -> list[tuple[int, int]]:
        """Environment and observation of each sample, in order of arrival."""
        return [(int(obs[0]), int(obs[1])) for _, obs, *_ in self.samples]


def training(**options: Any) -> Any:
    plan = {"epochs": 1, "rounds": 2, "steps": 20, "update_model_interval": 5, "max_training_steps_per_env_step": 4.0}
    plan |= {"env_cls": (SPACE, ACTIONS), "memory_cls": Kept, "training_agent_cls": Counter, "device": "cpu"}
    return partial(TrainingOffline, **(plan | options))


def worker(port: int, **options: Any) -> RolloutWorker:
    settings = {"port": port, "model_path": None, "connect_timeout": 30.0} | options
    return RolloutWorker(Numbered, Actor, **settings)


def trainer(port: int, **options: Any) -> Trainer:
    settings = {"training_cls": training(), "model_path": None, "checkpoint_path": None} | options
    return Trainer(port=port, flush_every=0.1, connect_timeout=30.0, **settings)


@contextlib.contextmanager
def working(*workers: RolloutWorker) -> Iterator[None]:
    """Run workers in threads until the end of the block."""
    threads = [threading.Thread(target=each.run, args=(3,), daemon=True) for each in workers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for each in workers:
            each.stop()
        for thread in threads:
            thread.join(20.0)
            assert not thread.is_alive()


def test_a_trainer_trains_on_what_workers_send_and_they_act_by_its_models() -> None:
    with Server(port=0) as server, worker(server.port) as first, worker(server.port) as second:
        with trainer(server.port) as learner, working(first, second):
            learner.run()
            memory = learner.training.memory
            assert learner.agent.count == 40 and learner.loop.is_done
            assert until(lambda: first.version and second.version)
            assert until(lambda: {number for number, _ in memory.seen} == {first.env.number, second.env.number} or
                         learner.experience.update())  # fmt: skip
        for each in (first.env.number, second.env.number):
            came = [observation for number, observation in memory.seen if number == each]
            assert came == sorted({*came}), "each once, and in order"
        late = worker(server.port)
        assert late.update_actor_weights(blocking=True) and late.actor.act(None) == [40.0]
        late.close()


ROLES = {"port", "keys", "insecure", "security", "password"}
"""Settings of a role's connection; roles with different values cannot connect."""
OF_BOTH = ROLES | {"server_ip", "server_port", "connect_timeout", "model_path"}
"""Settings of workers and trainers alone: the server's address, and a file of the model for each role."""
PIPELINE = {"sample_compressor": "codec"} | {name: name for name in ("crc_debug", "obs_preprocessor", "env_cls")}
"""Settings of a trainer's memory or training, by their names at a worker; each sample or model is compared."""


def test_every_setting_of_worker_trainer_and_server_is_listed() -> None:
    names = [set(inspect.signature(role_class).parameters) for role_class in (RolloutWorker, Trainer, Server)]
    assert names[0] & names[1] == OF_BOTH and names[0] & names[2] == names[1] & names[2] == ROLES
    there = set(inspect.signature(GenericMemory).parameters) | set(inspect.signature(TrainingOffline).parameters)
    assert names[0] & there - {"device"} == PIPELINE.keys() - {"sample_compressor"}
    assert set(PIPELINE.values()) <= there and names[1] & there == names[2] & there == set()


@pytest.mark.parametrize("start_role", [worker, trainer])
def test_a_worker_or_trainer_of_another_run_than_its_servers_is_refused(start_role: Any, monkeypatch: Any) -> None:
    """Topics of models contain the run's name, so a worker of another run would keep its first model."""
    with Server(port=0) as server:
        monkeypatch.setenv("MEMOIRE_TMRL_RUN_NAME", "other")
        with pytest.raises(ParameterError, match="^RUN_NAME must be 'run', as at the server: .* got 'other'"):
            start_role(server.port)
        monkeypatch.delenv("MEMOIRE_TMRL_RUN_NAME")
        start_role(server.port).close()


def test_episodes_are_run_and_the_environment_is_measured_if_asked() -> None:
    with Server(port=0) as server, worker(server.port) as runner:
        runner.run_episodes(nb_episodes=2)
        runner.run_episodes(5, nb_episodes=1, train=True)
        assert (runner.tests, runner.steps) == (2, 5)
        times = runner.run_env_benchmark(7)
        assert times["steps"] == 7 and 0.0 < times["mean"] <= times["max"] and runner.steps == 5


def test_a_worker_beyond_the_bound_waits_until_another_one_leaves() -> None:
    with Server(port=0, max_workers=1) as server:
        first = worker(server.port)
        with pytest.raises(Refused, match="1 actors are active, and the server accepts at most max_actors=1"):
            worker(server.port, connect_timeout=0.5)
        first.close()
        worker(server.port).close()
    with pytest.raises(ParameterError, match="max_workers"):
        Server(port=0, max_workers=0)


def test_a_server_packet_has_a_least_size_and_a_time() -> None:
    with Server(25, port=0) as server, worker(server.port) as runner, trainer(server.port) as taking:
        memory = taking.training.memory
        runner.run(0, 3)
        assert until(lambda: len(memory) == 33 or taking.experience.update())
        assert memory.buffers <= 2
        runner.run(0, 1)  # 11 samples, fewer than a packet, arrive as well
        assert until(lambda: len(memory) == 44 or taking.experience.update())


@pytest.mark.parametrize("order", list(itertools.permutations(("server", "worker", "trainer"))), ids="-".join)
def test_any_order_of_starts_works(order: tuple[str, ...]) -> None:
    from history.ports import held

    with held(3) as port, contextlib.ExitStack() as stack:
        ready = {role: threading.Event() for role in order}
        roles: dict[str, Any] = {}
        kinds: dict[str, Callable[[], Any]] = {
            "server": lambda: Server(port=port), "worker": lambda: worker(port), "trainer": lambda: trainer(port)
        }  # fmt: skip

        def start(role: str) -> None:
            roles[role] = stack.enter_context(kinds[role]())
            ready[role].set()

        threads = [threading.Thread(target=start, args=(role,), daemon=True) for role in order]
        for thread in threads:
            thread.start()
            thread.join(0.3)  # roles before the server wait for the server
        for thread in threads:
            thread.join(30.0)
        assert set(roles) == set(order)
        with working(roles["worker"]):
            roles["trainer"].run()
        assert roles["trainer"].agent.count == 40


def test_threads_have_names_and_end_with_what_began_them() -> None:
    before = set(threading.enumerate())
    with Server(port=0) as server, worker(server.port), trainer(server.port):
        began = [thread for thread in threading.enumerate() if thread not in before]
        named = [thread for thread in began if thread.name.startswith("memoire-")]
        assert len(named) >= 4 and {"memoire-pull-0", "memoire-trainer-samples"} <= {each.name for each in named}
        assert all(type(each).__module__.startswith("zmq.") for each in began if each not in named)
        with contextlib.closing(NodePages("127.0.0.1:0", server.server)) as pages:
            assert urllib.request.urlopen(f"http://{pages.address}/livez", timeout=10.0).status == 200
    assert until(lambda: not any(thread.is_alive() for thread in named))


def test_the_constructor_connects_and_makes_no_step() -> None:
    with Server(port=0) as server, worker(server.port) as runner:
        assert runner.client is not None and runner.client.endpoint.endswith(str(server.port))
        assert (runner.env.made, runner.steps, runner.episodes) == (0, 0, 0)


def test_spaces_are_read_off_an_environment_that_is_never_reset() -> None:
    class Fragile(Numbered):
        def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
            raise AssertionError("reset was called")

    for env_cls in (Fragile, partial(Fragile, length=3), (SPACE, ACTIONS)):
        agent = training(env_cls=env_cls)().agent
        assert (agent.observation_space, agent.action_space) == (SPACE, ACTIONS)


@pytest.mark.parametrize(("is_usable", "device"), [(True, "cuda"), (False, "cpu")])
def test_a_device_is_chosen_if_none_is_said(is_usable: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: is_usable)))
    assert training(device=None)().device == device
    assert training(device="cuda:1")().device == "cuda:1"


def test_several_trainers_share_samples_each_once() -> None:
    with Server(port=0) as server, worker(server.port) as runner:
        with trainer(server.port) as one, trainer(server.port) as other:
            runner.run(0, 20)
            memories = [each.training.memory for each in (one, other)]

            def all_came() -> bool:
                one.experience.update()
                other.experience.update()
                return sum(map(len, memories)) == 220

            assert until(all_came)
            assert len({*memories[0].seen, *memories[1].seen}) == 220


def test_each_epoch_is_profiled_if_asked(tmp_path: Path) -> None:
    options = {"checkpoint_path": str(tmp_path / "a"), "training_cls": training(profiling=True)}
    with Server(port=0) as server, worker(server.port) as runner, working(runner):
        with trainer(server.port, **options) as training_now:
            training_now.run()
    assert (tmp_path / "a_profiles" / "epoch-0.prof").stat().st_size > 0


@pytest.mark.parametrize(
    ("resume", "count", "epoch", "has_samples"),
    [("all", 40, 1, True), ("memory", 0, 0, True), ("weights", 40, 0, False), ("none", 0, 0, False)],
)
def test_what_to_go_on_with_is_chosen(resume: str, count: int, epoch: int, has_samples: bool, tmp_path: Path) -> None:
    options = {"checkpoint_path": str(tmp_path / "a_t.cpt"), "model_path": str(tmp_path / "a_t.pth")}
    with Server(port=0) as server, worker(server.port) as runner, working(runner):
        with trainer(server.port, **options) as first:
            first.run()
            saved = list(first.training.memory.seen)
        with trainer(server.port, **options, resume=resume, training_cls=training(epochs=2)) as second:
            seen = list(second.training.memory.seen)
            assert (second.agent.count, second.loop.state.epoch) == (count, epoch)
            # The memory's own append_buffer has received the samples of the checkpoint, in the checkpoint's order.
            assert seen[: len(saved)] == saved if has_samples else saved[0] not in seen
            assert second.loop.gate.updates == 40 * epoch  # the ratio continues
            second.run()
            assert second.agent.count == count + 40 * (2 - epoch)
    assert weights.load(tmp_path / "a_t.pth")["value"][0] == second.agent.count
    assert (tmp_path / "a_t.cpt_metrics.jsonl").read_text().count("\n") == 1 + 2 - epoch
    former = [path.name for path in tmp_path.rglob("*.former-1")]
    assert former == {"all": [], "memory": [], "weights": ["samples.former-1"], "none": ["a_t.cpt.former-1"]}[resume]


def test_a_checkpoint_of_one_trainer_with_the_samples_of_another_is_refused(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.cpt", "b.cpt")]
    with Server(port=0) as server:
        for path in paths:
            with trainer(server.port, checkpoint_path=str(path)) as each:
                each.save()
        (paths[0] / "samples").rename(tmp_path / "of a")
        for other in ("gone", paths[1] / "samples"):
            if other != "gone":
                shutil.rmtree(paths[0] / "samples")
                shutil.copytree(other, paths[0] / "samples")
            with pytest.raises(DataError, match='one of the two is of another trainer.*resume="weights"'):
                trainer(server.port, checkpoint_path=str(paths[0]))
        for resume in ("memory", "weights"):
            trainer(server.port, checkpoint_path=str(paths[0]), resume=resume).close()
        shutil.rmtree(paths[0] / "samples")
        (tmp_path / "of a").rename(paths[0] / "samples")
        trainer(server.port, checkpoint_path=str(paths[0])).close()


def test_a_checkpoint_that_a_trainer_has_is_refused_to_others_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "a_t.cpt"
    with Server(port=0) as server:
        with trainer(server.port, checkpoint_path=str(path)) as first:
            for resume in ("all", "weights", "none"):
                with pytest.raises(StateLocked, match=r"the checkpoint folder .* is in use by process"):
                    trainer(server.port, checkpoint_path=str(path), resume=resume)
            first.save()
        assert sorted(each.name for each in tmp_path.iterdir()) == ["a_t.cpt"]
        trainer(server.port, checkpoint_path=str(path), resume="none").close()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a_t.cpt", "a_t.cpt.former-1"]


def loading(tmp_path: Path) -> dict[str, Any]:
    """Return options with functions of the user that keep a whole training."""
    saved: dict[str, Any] = {}

    def dump(training_now: Any, path: str) -> None:
        saved[path] = training_now
        Path(path).write_text("here")

    load = lambda path: saved[str(path)]  # noqa: E731
    return {"checkpoint_path": str(tmp_path / "a"), "dump_run_instance_fn": dump, "load_run_instance_fn": load}


def test_functions_of_the_user_save_and_load_in_place_of_ours(tmp_path: Path) -> None:
    options = loading(tmp_path)
    with Server(port=0) as server, worker(server.port) as runner, working(runner):
        with trainer(server.port, **options) as first:
            first.run()
        with trainer(server.port, **options) as second:
            assert second.training is first.training
            assert second.loop.is_done and second.loop.state.updates == 40  # the finished epoch is not trained again
        with trainer(server.port, **options, training_cls=training(epochs=3)) as third:
            assert third.training is first.training and third.loop.plan.epochs == 3  # set by the caller, not loaded

        def updated(old: Any, training_cls: Any) -> Any:
            training_now = training_cls()
            training_now.agent.count = old.agent.count
            return training_now

        with trainer(server.port, **options, training_cls=training(epochs=7), updater_fn=updated) as third:
            assert (third.loop.plan.epochs, third.agent.count) == (7, first.agent.count)


class Tuned(Counter):
    """Agent with its settings under other names, in a dict and in a list; training changes `epsilon`."""

    def __init__(self, *spaces: Any, rate: Any = 0.5, layers: Any = (4, 4), epsilon: float = 1.0, **named: Any) -> None:
        super().__init__(*spaces, **named)
        self.options, self.widths, self.epsilon = {"step": rate}, list(layers), epsilon
        self.generator, self.kept = np.random.default_rng(), object()
        self.weights = np.zeros(2)

    def train(self, batch: Any) -> dict[str, Any]:
        self.epsilon, self.weights = 0.1, self.weights + 1.0
        return super().train(batch)


class Small(GenericMemory):
    """Memory with batches of four as NumPy arrays, which needs no torch."""

    def __init__(self, nb_steps: int, device: Any, **options: Any) -> None:
        super().__init__(None, nb_steps, batch_size=4, **options)


def tuned_training(memory: Any = None, agent: Any = None, **plan: Any) -> Any:
    agent_cls = partial(Tuned, **(agent or {}))
    memory_cls = partial(Small, **(memory or {}))
    return training(training_agent_cls=agent_cls, memory_cls=memory_cls, **plan)


@pytest.mark.parametrize(
    ("agent", "settings", "text"),
    [
        ({"rate": 0.25}, {"options": {"step": 0.25}}, r"options\['step'\] = 0\.25, as set on this agent; .* has 0\.5"),
        ({"layers": (4, 8)}, {"widths": [4, 8]}, r"widths\[1\] = 8, as set on this agent; .* has 4"),
        ({"layers": (9,)}, {"widths": [9]}, r"widths = list\(9\), as set on this agent; .* has list\(4, 4\)"),
    ],
)
def test_what_is_told_beside_functions_of_the_user_stays_and_the_log_names_both(
    agent: dict[str, Any], settings: dict[str, Any], text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = loading(tmp_path)
    with Server(port=0) as server, worker(server.port) as runner, working(runner):
        with trainer(server.port, **options, training_cls=tuned_training()) as first:
            first.run()
        kept, state = first.agent.kept, first.agent.generator.bit_generator.state
        for is_new in (True, False):
            caplog.clear()
            with trainer(server.port, **options, training_cls=tuned_training(agent=agent)) as next_one:
                now = next_one.agent
                assert now is first.agent and {name: getattr(now, name) for name in settings} == settings
                assert (now.epsilon, now.count, now.weights.tolist()) == (0.1, 40, [40.0, 40.0])
                assert now.kept is kept and now.generator.bit_generator.state == state
            lines = [line for line in caplog.messages if line.startswith("going on with")]
            assert len(lines) == is_new and all(re.search(text, line) for line in lines)
        with trainer(server.port, **options, training_cls=tuned_training(agent=agent, epochs=3, steps=7)) as third:
            assert (third.loop.plan.epochs, third.loop.plan.steps) == (3, 7)
        assert "going on with steps = 7, as set on this trainer; the checkpoint has 20" in caplog.messages


@pytest.mark.parametrize("is_marked", [True, False])
def test_what_training_has_changed_cannot_be_told_beside_functions_of_the_user(is_marked: bool, tmp_path: Path) -> None:
    options = loading(tmp_path)
    with Server(port=0) as server, worker(server.port) as runner, working(runner):
        with trainer(server.port, **options, training_cls=tuned_training()) as first:
            first.run()
        if not is_marked:  # a user's own training does not record its arguments
            del first.training.made_as
        with pytest.raises(ParameterError, match=r"^epsilon must be .*0\.1.*, got 0\.7"):
            trainer(server.port, **options, training_cls=tuned_training(agent={"epsilon": 0.7}, steps=7))
        assert first.training.steps == 20 and first.agent.epsilon == 0.1, "nothing was changed"
        with pytest.raises(
            ParameterError, match="^memory_size must be 1000000, as the loaded training has it.*, got 9"
        ):
            trainer(server.port, **options, training_cls=tuned_training(memory={"memory_size": 9}))


def test_an_address_elsewhere_needs_keys_and_the_error_has_the_line_to_write() -> None:
    for end in (lambda **more: worker(55555, **more), lambda **more: trainer(55555, **more)):
        with pytest.raises(ParameterError, match=r'keys="keys/(actor|learner)".*insecure=True'):
            end(server_ip="10.0.0.5")
    with pytest.raises(MemoireTimeout):
        worker(9, server_ip="10.255.255.1", insecure=True, connect_timeout=0.2)


def test_a_server_without_keys_listens_at_this_machine_only() -> None:
    with Server(port=0) as server:
        assert server.server.endpoint.startswith("tcp://127.0.0.1:")


def test_a_class_that_is_missing_is_named() -> None:
    with pytest.raises(ParameterError, match="env_cls"):
        RolloutWorker()
    with pytest.raises(ParameterError, match="actor_module_cls"):
        RolloutWorker(Numbered)


def rings(**options: Any) -> Callable[..., GenericMemory]:
    """Return a constructor of memories with rings and NumPy arrays, which need no torch."""
    return lambda nb_steps, device: GenericMemory(None, nb_steps, batch_size=4, **options)


def itself(obs: Any) -> Any:
    return obs


WITH_CODEC, WITH_FUNCTION = {"codec": Codec({"obs": np.float64}, {"obs": np.float32})}, {"obs_preprocessor": itself}
five = lambda act, obs, rew, done, info: (act, obs, rew, done, info)  # noqa: E731


def test_what_a_memory_rebuilds_is_what_workers_recorded() -> None:
    cls = training(memory_cls=rings(crc_debug=True, **WITH_CODEC))
    with Server(port=0) as server, worker(server.port, sample_compressor=WITH_CODEC["codec"], crc_debug=True) as runner:
        with trainer(server.port, training_cls=cls) as taking, working(runner):
            taking.run()
            assert taking.training.memory.checks.passed == 160


@pytest.mark.parametrize(
    ("of_worker", "of_memory", "error", "says"),
    [
        ({}, WITH_CODEC, CodecMismatch, "^a worker compresses samples with the codec None.*Give both the same"),
        ({"sample_compressor": five}, WITH_CODEC, CodecMismatch, "^a worker .*its sample_compressor is not a "),
        ({"sample_compressor": WITH_CODEC["codec"]}, {}, CodecMismatch, "restores them with none"),
        (WITH_FUNCTION, {}, ParameterError, "^obs_preprocessor must be source:.*that of a worker.* got None"),
        ({}, WITH_FUNCTION, ParameterError, "^obs_preprocessor must be None, that of a worker.* got 'source:"),
        ({"crc_debug": True}, {}, CrcDebugMismatch, "set for .*, but not for GenericMemory"),
        ({}, {"crc_debug": True}, CrcDebugMismatch, "set for GenericMemory, but not for the worker"),
    ],
)
def test_what_only_a_worker_or_only_a_memory_has_is_refused(
    of_worker: Any, of_memory: Any, error: Any, says: str
) -> None:
    with Server(port=0) as server, worker(server.port, **of_worker) as runner:
        with trainer(server.port, training_cls=training(memory_cls=rings(**of_memory))) as taking:
            runner.run(0, 1)
            with pytest.raises(error, match=says):
                assert until(lambda: taking.experience.received or taking.experience.update())
            assert not taking.training.memory.rings.held


def test_a_memory_that_preprocesses_by_itself_says_so() -> None:
    class Own(GenericMemory):
        preprocesses_itself = True

    cls = training(memory_cls=lambda nb_steps, device: Own(None, nb_steps))
    with Server(port=0) as server, worker(server.port, obs_preprocessor=itself) as runner:
        with trainer(server.port, training_cls=cls) as taking:
            runner.run(0, 1)
            assert until(lambda: taking.experience.received or taking.experience.update())
