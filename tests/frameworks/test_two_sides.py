"""Tests of settings on two sides, as of table and trainer, worker and learner, checkpoint and agent."""

import contextlib
import inspect
import logging
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from test_ppo import net_of, rollouts_of

from memoire import Buffer, Schema, Server, Table, Uniform, connect, rl
from memoire.errors import DataError, ParameterError, WrongModel
from memoire.rl import PPO, SAC, ActorCritic, GaussianPolicy, OnPolicyLearner, RecurrentPPO, Trainer, Training, World
from memoire.rl.learner import SAVED_APART, Checkpoints
from memoire.rl.sac import TwinCritic
from memoire.rl.saving import form_of, load_agent, save_agent
from memoire.tables.table import TABLE_NAMES
from memoire.tmrl.memory import GenericMemory
from memoire.tmrl.networking import RolloutWorker as PipelineWorker
from memoire.tmrl.networking import Server as SampleServer
from memoire.tmrl.networking import Trainer as PipelineTrainer
from memoire.tmrl.training_offline import TrainingOffline
from rlkit import Actor, Counter, Numbered

pytestmark = pytest.mark.torch
OBS = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
ACT = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
SPACES = SimpleNamespace(observation_space=OBS, action_space=ACT, close=lambda: None)


def names_of(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


OF_BOTH: dict[Any, dict[str, str]] = {  # the table's name, by the trainer's name
    SAC: {"gamma": "discount"},
    PPO: {"gamma": "discount"},
    RecurrentPPO: {"gamma": "discount"},
    Trainer: {"topic": "model_topic"},
    Training: {"start_training": "min_size", "batch_size": "samples_per_insert",
               "max_training_steps_per_env_step": "samples_per_insert"},
    OnPolicyLearner: {"discount": "discount", "max_lag": "max_model_lag", "rollout_length": "rollout_length",
                      "steps": "capacity"},
}  # fmt: skip
OF_THE_TRAINER: dict[Any, set[str]] = {
    SAC: {
        "observation_space", "action_space", "critic", "device", "policy", "hidden", "polyak", "rate", "alpha",
        "learn_entropy_coef", "target_entropy", "seed",
    },
    PPO: {
        "net", "rate", "epochs", "minibatch", "clip", "value_coef", "entropy_coef", "lam", "max_grad_norm",
        "target_kl", "correction", "seed",
    },
    Trainer: {
        "agent", "url", "training", "table", "keys", "name", "model_path", "checkpoint_path", "logger",
        "profile_folder", "timeout",
    },
    Training: {
        "epochs", "rounds", "steps", "update_model_interval", "update_model_seconds", "update_buffer_interval",
        "longest_wait", "agent_scheduler", "profiling",
    },
    OnPolicyLearner: {
        "endpoint", "env", "net", "correction", "policy", "seconds", "checkpoint", "checkpoint_every", "keys", "run",
        "logger", "world",
    },
}  # fmt: skip
OF_THE_TRAINER[RecurrentPPO] = OF_THE_TRAINER[PPO]


def test_every_setting_of_table_and_trainer_is_listed() -> None:
    table = {*names_of(Table), *TABLE_NAMES}
    for cls, alone in OF_THE_TRAINER.items():
        both = OF_BOTH[cls]
        assert names_of(cls) == both.keys() | alone, f"list what {cls.__name__} takes with that of both, or not"
        assert set(both.values()) <= table and not both.keys() & alone
        assert not alone & table, "a setting of this name is the table's, too"


@contextlib.contextmanager
def served(**options: Any) -> Iterator[Server]:
    table = Table(Schema.from_env(SPACES), storage="episodes", capacity=100, discount=0.9, **options)
    with Server("tcp://127.0.0.1:*", tables={"replay": table}) as server:
        yield server


def record(writer: Any, steps: int = 40) -> None:
    places = np.random.default_rng(0).uniform(-1.0, 1.0, (steps + 1, 2)).astype(np.float32)
    for step, obs in enumerate(places[:-1]):
        writer.step(obs, obs[:1], float(obs[0]), step % 5 == 4, False, places[step + 1])


class Plain(Counter):
    """Agent without networks that has a discount of some name."""

    def __init__(self, **discount: Any) -> None:
        super().__init__(OBS, ACT, None)
        vars(self).update(discount)


@pytest.mark.parametrize("name", ["gamma", "discount"])
def test_a_trainer_takes_the_discount_of_its_table_and_refuses_another_one(name: str) -> None:
    with served() as server:
        for agent in (Plain(**{name: 0.8}), Plain(**{name: [0.8]}), *[SAC(OBS, ACT, gamma=0.8)] * (name == "gamma")):
            with pytest.raises(ParameterError, match=rf"^{name} must be 0\.9, which the table has, or left out"):
                Trainer(agent, server.endpoint)
        for value in (0.9, None, np.float64(0.9)):
            with Trainer(Plain(**{name: value}), server.endpoint) as trainer:
                assert getattr(trainer.agent, name) == (0.9 if name == "gamma" or value else None)


@pytest.mark.parametrize("correction", [None, "vtrace"])
def test_ppo_takes_the_discount_of_the_table_and_refuses_another_one(correction: str | None) -> None:
    rollouts = rollouts_of(net_of(), discount=(0.5,))
    same = [PPO(net_of(), gamma=gamma, correction=correction).prepared(rollouts).returns for gamma in (None, 0.5)]
    assert torch.equal(*same)
    with pytest.raises(ParameterError, match=r"^gamma must be 0\.5, which the table has, or left out, got 0\.9"):
        PPO(net_of(), gamma=0.9, correction=correction).update(rollouts)
    rollouts.discount = None
    with pytest.raises(ParameterError, match="Pass gamma=, a number .* come from no table"):
        PPO(net_of()).update(rollouts)


def test_a_learner_makes_its_table_as_it_was_told_and_keeps_no_algorithm_of_another_discount() -> None:
    net = ActorCritic.mlp(SPACES, (8,))
    options: dict[str, Any] = {"discount": 0.5, "max_lag": 3, "rollout_length": 16, "steps": 64}
    with OnPolicyLearner("tcp://127.0.0.1:*", SPACES, net, correction="none", **options) as learner:
        table = learner.server.table("rollouts")
        for name, of_table in OF_BOTH[OnPolicyLearner].items():
            value = table.stats().capacity if of_table == "capacity" else getattr(table.parameters, of_table)
            assert np.all(np.ravel(value) == options[name]), name
        with pytest.raises(ParameterError, match=r"^gamma must be 0\.5, which the table has, or left out, got 0\.9"):
            learner.keep(PPO(learner.net, gamma=0.9))
        assert learner.keep(PPO(learner.net, gamma=0.5)).gamma == 0.5


def pipeline(agent: Any, table: Any, **options: Any) -> rl.Pipeline:
    return rl.Pipeline(run="a", env=lambda: SPACES, policy=GaussianPolicy, agent=agent, table=table, **options)


def with_default(observation_space: Any, action_space: Any, device: Any, gamma: float = 0.7) -> Any:
    return Plain(gamma=gamma)


DISCOUNTS = [  # agent, settings of the table, discount of agent and table
    (rl.partial(SAC, gamma=0.8), {}, 0.8), (SAC, {"discount": 0.8}, 0.8), (SAC, {}, 0.99),
    (rl.partial(SAC, gamma=0.8), {"discount": 0.8}, 0.8), (with_default, {}, 0.7), (with_default, {"discount": 0.8}, 0.8),
    (lambda **spaces: Plain(gamma=None), {"discount": 0.8}, 0.8),
]  # fmt: skip


@pytest.mark.parametrize(("agent", "table", "discount"), DISCOUNTS)
def test_a_pipeline_has_one_discount(agent: Any, table: dict[str, Any], discount: float) -> None:
    run = pipeline(agent, rl.replay(100, **table))
    assert run.make_table().parameters.discount == (discount,)
    instance = run.make_agent()
    with Server("tcp://127.0.0.1:*", tables={"replay": run.make_table()}) as server, Trainer(instance, server.endpoint):
        assert instance.gamma == discount


def test_a_pipeline_of_two_discounts_is_refused() -> None:
    for table in ({"discount": 0.5}, {"discount": (0.5,)}):
        with pytest.raises(ParameterError, match=r"^gamma must be 0\.5, which the table has, or left out, got 0\.9"):
            pipeline(rl.partial(SAC, gamma=0.9), rl.replay(100, **table))


def test_a_pipeline_paces_its_table_as_training_says() -> None:
    plan = Training(start_training=7, max_training_steps_per_env_step=0.5, batch_size=32)
    parameters = pipeline(SAC, rl.replay(100), training=plan, work=rl.Work(is_paced=True)).make_table().parameters
    assert (parameters.min_size, parameters.samples_per_insert) == (7, 16.0)


@pytest.mark.parametrize("multi_step", [1, 3])
def test_an_agent_that_draws_by_itself_refuses_batches_of_another_discount(multi_step: int) -> None:
    buffer = Buffer(Schema.from_env(SPACES), 100, discount=0.5, multi_step=multi_step, seed=0)
    record(buffer.writer())
    batch = buffer.sample(64).to("cpu")
    for gamma in (None, 0.5):
        SAC(OBS, ACT, hidden=(8,), gamma=gamma).train(batch)
    agent = SAC(OBS, ACT, hidden=(8,), gamma=0.9)
    before = [each.clone() for each in agent.policy.parameters()]
    with pytest.raises(
        ParameterError, match=r"^gamma must be 0\.5, the discount of the batches, or left out, got 0\.9"
    ):
        agent.train(batch)
    assert all(torch.equal(*each) for each in zip(before, agent.policy.parameters(), strict=True))


# -------------------------------------------------------------------------------------------------- worker and learner

OF_THE_LEARNER: dict[Any, dict[str, str]] = {  # name at the table or learner, by the name in this test
    rl.RolloutWorker: {"env": "action_space", "policy": "policy", "topic": "topic", "is_paced": "samples_per_insert_tolerance"},
    rl.Collector: {"envs": "env", "policy": "net", "topic": "model_topic"},
}  # fmt: skip
OF_EACH_PROCESS = {"url", "table", "keys", "name", "timeout", "seed", "device", "model_path"}
"""Names that each side has for itself: different values change no samples or models."""
OF_THE_WORKER: dict[Any, set[str]] = {
    rl.RolloutWorker: {
        "recording", "max_samples_per_episode", "model_path_history", "model_history", "obs_preprocessor", "cpus",
    },
    rl.Collector: set(),
}  # fmt: skip


def test_every_setting_of_worker_and_learner_is_listed() -> None:
    learners = set[str]().union(TABLE_NAMES, *map(names_of, (Table, Trainer, Training, SAC, PPO, OnPolicyLearner)))
    for cls, both in OF_THE_LEARNER.items():
        alone = names_of(cls) - both.keys() - OF_EACH_PROCESS
        assert alone == OF_THE_WORKER[cls], f"list what {cls.__name__} takes with that of both, or not"
        assert set(both.values()) <= learners
        assert not alone & learners, "a setting of this name is a learner's, too"


class Numbers(Numbered):
    """Environment of five-step episodes whose observations lie in the space of the networks."""

    observation_space = OBS

    def __init__(self) -> None:
        super().__init__(5)

    def observe(self) -> Any:
        return super().observe() * np.float32([0.0, 0.001])


class AnyModelActor(Actor):
    def load(self, body: bytes, version: int) -> None:
        pass


class Wide(Numbers):
    action_space = gymnasium.spaces.Box(-5.0, 5.0, (1,), np.float32)


SMALL = rl.partial(GaussianPolicy, hidden=(8,))
OTHER_ACTIONS = (
    r"^action_space must be Box\(\[-1\.0\], \[1\.0\]\), .*same environment.*, got 'Box\(\[-5\.0\], \[5\.0\]\)'"
)


@pytest.mark.parametrize(
    ("env", "policy", "error", "says"),
    [
        (Wide, GaussianPolicy, ParameterError, OTHER_ACTIONS),
        (Wide, AnyModelActor, ParameterError, OTHER_ACTIONS),
        (Numbers, SMALL, WrongModel, r"'net.0.weight' as F32\[256, 2\], but the network has F32\[8, 2\]"),
        (Numbers, GaussianPolicy, None, ""),
    ],
)
def test_a_worker_of_another_environment_or_network_than_its_trainers_is_refused(
    env: Any, policy: Any, error: Any, says: str, tmp_path: Path
) -> None:
    path, device = tmp_path / "model", env()
    with (
        served() as server,
        Trainer(SAC(OBS, ACT, hidden=(8,)), server.endpoint, model_path=path) as trainer,
        rl.RolloutWorker(device, policy, server.endpoint) as worker,
    ):
        trainer.loop.publish()
        trainer.save_model()
        if error is None:
            assert worker.await_model(20.0) and rl.RolloutWorker(device, policy, model_path=path).episodes == 0
            return
        alone = lambda: rl.RolloutWorker(device, policy, model_path=path)  # noqa: E731
        for refused in (lambda: worker.await_model(20.0), lambda: worker.run(0, 1), alone):
            with pytest.raises(error, match=says):
                refused()
        assert worker.steps == server.totals().steps == 0
        assert env.action_space == device.action_space and float(env.action_space.high[0]) in (1.0, 5.0)


@pytest.mark.parametrize("acting", ["local", "remote"])
def test_a_collector_of_other_actions_than_its_learners_is_refused(acting: Any) -> None:
    net = ActorCritic.mlp(SPACES, (8,))
    with OnPolicyLearner("tcp://127.0.0.1:*", SPACES, net, 64, 16, policy=acting) as learner:
        with rl.Collector(learner.server.endpoint, gymnasium.vector.SyncVectorEnv([Wide])) as collector:
            with pytest.raises(ParameterError, match=OTHER_ACTIONS):
                collector.run(4)
        assert learner.server.totals().steps == 0
        with rl.Collector(learner.server.endpoint, gymnasium.vector.SyncVectorEnv([Numbers])) as collector:
            assert collector.run(4).version == 1


def worker_of(url: str, **topic: Any) -> rl.RolloutWorker:
    return rl.RolloutWorker(Numbers, SMALL, url, **topic)


@pytest.mark.parametrize("side", [worker_of, lambda url, **topic: Trainer(Plain(), url, **topic)])
def test_a_worker_or_trainer_of_another_topic_than_the_tables_is_refused_if_old_models_are(side: Any) -> None:
    with served(model_topic="weights") as server:
        side(server.endpoint).close()
    with served(model_topic="weights", max_model_lag=2) as server:
        side(server.endpoint, topic="weights").close()
        with pytest.raises(ParameterError, match="^topic must be 'weights', the model_topic of the table"):
            side(server.endpoint)


# ------------------------------------------------------------------------------------------------ checkpoint and agent


class Second(World):
    """Second of two ranks, before its first exchange with the first rank."""

    def minimum(self, values: Sequence[int]) -> list[int]:
        return list(values)


OVERRIDES: dict[Any, dict[str, Any]] = {  # values that differ from the defaults; the log names each pair
    SAC: {"gamma": 0.5, "polyak": 0.9, "rate": 1e-2, "target_entropy": -7.0},
    PPO: {
        "rate": 1e-2, "epochs": 9, "minibatch": 7, "clip": 0.4, "value_coef": 2.0, "entropy_coef": 0.1, "gamma": 0.5,
        "lam": 0.5, "max_grad_norm": 9.0, "target_kl": 0.7, "correction": "vtrace",
    },
    Training: {
        "epochs": 7, "rounds": 7, "steps": 7, "batch_size": 7, "start_training": 7, "update_model_interval": 7,
        "max_training_steps_per_env_step": 7.0, "update_model_seconds": 7.0, "update_buffer_interval": 7,
        "longest_wait": 7.0, "profiling": True,
    },
    OnPolicyLearner: {
        "steps": 128, "rollout_length": 8, "max_lag": 1, "correction": "vtrace", "policy": "remote", "checkpoint_every": 3,
        "discount": 0.5,
    },
    rl.StartStates: {"keep": 7, "temperature": 7.0, "action": ["jump"]},
}  # fmt: skip
REFUSED: dict[Any, dict[str, Any]] = {
    SAC: {
        "hidden": (4,), "critic": lambda **spaces: TwinCritic(3, (4,)), "policy": rl.partial(GaussianPolicy, hidden=(4,)),
        "alpha": 0.5, "learn_entropy_coef": False, "seed": 5, "observation_space": gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32),
        "action_space": gymnasium.spaces.Box(-2.0, 2.0, (1,), np.float32),
    },
    PPO: {"seed": 5},
    Training: {},
    OnPolicyLearner: {"net": ActorCritic(2, 1, is_continuous=True, hidden=(4,)), "world": Second(0, 2)},
    rl.StartStates: {"seed": 5, "first": {"sum": np.int32(3)}},
}  # fmt: skip
OF_THE_PROCESS: dict[Any, set[str]] = {  # settings of the process, which no checkpoint has
    SAC: {"device"},
    PPO: {"net"},  # the learner's
    Training: {"agent_scheduler"},
    OnPolicyLearner: {"endpoint", "env", "seconds", "checkpoint", "keys", "run", "logger"},
    rl.StartStates: {"name", "schema", "key"},
}
for listed in (OVERRIDES, REFUSED, OF_THE_PROCESS):
    listed[RecurrentPPO] = listed[PPO]
CALLED = {"critic": "critic.weights", "hidden": "critic.weights", "rate": "'lr'", "world": "ranks", "net": "net.",
          "observation_space": "policy.", "action_space": "action_bounds", "first": "first state"}  # fmt: skip
"""Text in messages for a setting, if other than its name."""
AGENTS = (SAC, PPO, RecurrentPPO)
ROWS = [(cls, name) for cls in OVERRIDES for name in OVERRIDES[cls]]


def optimizer_of(owner: Any) -> Any:
    return owner.policy_optimizer if isinstance(owner, SAC) else owner.optimizer


class Run:
    """One life of an agent: built with settings, and resumed from its checkpoint if there is one."""

    def __init__(self, cls: Any, folder: Path, extra: dict[str, Any], change: Any = lambda owner: None) -> None:
        self.cls, self.folder = cls, folder
        getattr(self, {PPO: "algorithm", RecurrentPPO: "algorithm"}.get(cls, cls.__name__.lower()))(extra, change)

    def __getitem__(self, name: str) -> Any:
        return optimizer_of(self.owner).param_groups[0]["lr"] if name == "rate" else getattr(self.owner, name)

    def sac(self, extra: dict[str, Any], change: Any) -> None:
        options = {"observation_space": OBS, "action_space": ACT, "hidden": (8,), "seed": 0} | extra
        self.owner = SAC(**options)
        form = form_of(self.owner)
        load_agent(self.folder, self.owner)
        change(self.owner)
        save_agent(self.folder, self.owner, form, {})

    def algorithm(self, extra: dict[str, Any], change: Any) -> None:
        net = net_of() if self.cls is PPO else rl.RecurrentActorCritic(2, 1, is_continuous=False, hidden=8)
        self.owner = self.cls(net, **({"seed": 0} | extra))
        form = form_of(self.owner, SAVED_APART)
        with contextlib.closing(Checkpoints(self.folder)) as files:
            if files.newest() >= 0:
                saved = files.load(files.newest())
                saved.restore_net(net)
                saved.restore_algorithm(self.owner)
            change(self.owner)
            settings = {"ranks": 1, "checkpoint_every": 1}
            facts = {"steps": 0, "iterations": 0, "version": 1, "settings": settings}
            files.save(files.newest() + 1, net, self.owner, form, facts)

    def training(self, extra: dict[str, Any], change: Any) -> None:
        with served() as server:
            with Trainer(Plain(), server.endpoint, Training(**extra), checkpoint_path=self.folder) as trainer:
                self.owner = trainer.loop.plan
                trainer.save()

    def onpolicylearner(self, extra: dict[str, Any], change: Any) -> None:
        net = ActorCritic(2, 1, is_continuous=True, hidden=(8,))
        options = {"net": net, "steps": 64, "rollout_length": 16, "world": World(), "checkpoint": self.folder} | extra
        options |= {"correction": "none"} if extra.get("max_lag") else {}
        with OnPolicyLearner("tcp://127.0.0.1:*", SPACES, **options) as learner:
            self.owner = SimpleNamespace(**learner.settings)
            for _ in range(options.get("checkpoint_every", 1)):
                learner.publish()

    def startstates(self, extra: dict[str, Any], change: Any) -> None:
        options = {"first": {"sum": np.int32(0)}, "keep": 5, "seed": 0} | extra
        starts = rl.StartStates("a", {"sum": np.int32}, key=lambda columns: float(columns["sum"]), **options)
        path = self.folder / "starts.safetensors"
        if path.exists():
            starts.restore(rl.weights.load(path))
        rl.weights.save(path, starts.arrays())
        self.owner = SimpleNamespace(**starts.settings)


def test_every_setting_of_an_agent_and_its_checkpoint_is_listed() -> None:
    for cls in OVERRIDES:
        rows = OVERRIDES[cls].keys(), REFUSED[cls].keys(), OF_THE_PROCESS[cls]
        assert names_of(cls) == set().union(*rows), f"say what a checkpoint of {cls.__name__} does with it"
        assert sum(map(len, rows)) == len(names_of(cls)), "each in one list"


@pytest.mark.parametrize(("cls", "name"), ROWS, ids=lambda each: getattr(each, "__name__", each))
def test_what_an_agent_is_told_stays_beside_its_checkpoint(cls: Any, name: str, tmp_path: Path, caplog: Any) -> None:
    former, value = Run(cls, tmp_path, {})[name], OVERRIDES[cls][name]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert Run(cls, tmp_path, {name: value})[name] == value != former
    line = next(line for line in caplog.messages if line.startswith("going on with "))
    assert all(each in line for each in (CALLED.get(name, name), f" = {value!r}, as set on this", f" has {former!r}"))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        Run(cls, tmp_path, {name: value})  # a repeated setting changes nothing
    assert not [line for line in caplog.messages if line.startswith("going on with ")]


@pytest.mark.parametrize(
    ("cls", "name"), [(cls, name) for cls in REFUSED for name in REFUSED[cls]],
    ids=lambda each: getattr(each, "__name__", each),
)  # fmt: skip
def test_what_a_checkpoint_cannot_go_on_with_is_refused_by_name(cls: Any, name: str, tmp_path: Path) -> None:
    Run(cls, tmp_path, {})
    with pytest.raises((ParameterError, DataError), match=re.escape(CALLED.get(name, name))):
        Run(cls, tmp_path, {name: REFUSED[cls][name]})
    Run(cls, tmp_path, {"seed": None} if name == "seed" else {})


@pytest.mark.parametrize(
    ("cls", "name"), [row for row in ROWS if row[0] in AGENTS], ids=lambda each: getattr(each, "__name__", each)
)
def test_what_training_has_changed_and_a_caller_too_is_refused_by_name(cls: Any, name: str, tmp_path: Path) -> None:
    trained = {"correction": "decoupled", "epochs": 3, "minibatch": 3}.get(name, 0.3)

    def change(owner: Any) -> None:
        if name == "rate":
            optimizer_of(owner).param_groups[0]["lr"] = trained
        else:
            setattr(owner, name, trained)

    Run(cls, tmp_path, {}, change)
    with pytest.raises(ParameterError, match=re.escape(CALLED.get(name, name))) as refused:
        Run(cls, tmp_path, {name: OVERRIDES[cls][name]})
    assert repr(trained) in str(refused.value) and repr(OVERRIDES[cls][name]) in str(refused.value)
    assert Run(cls, tmp_path, {})[name] == trained  # with the former settings, the agent keeps the trained value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_learner_goes_on_with_all_generators_of_the_process_and_above_all_versions(dtype: Any, tmp_path: Path):
    """The second learner saves more often, and the first published models after its last checkpoint."""
    states, versions = [], []
    for every, models in ((5, 9), (1, 0)):
        net = ActorCritic(2, 1, is_continuous=True, hidden=(8,)).to(dtype)
        options: dict[str, Any] = {"checkpoint": tmp_path, "checkpoint_every": every}
        with OnPolicyLearner("tcp://127.0.0.1:*", SPACES, net, 64, 16, **options) as learner:
            ppo = learner.keep(PPO(learner.net))
            for _ in range(models):
                sum(each.sum() for each in net.parameters()).backward()
                ppo.optimizer.step()
                learner.publish()
                if learner.iterations == 5:
                    states.append(state_of(net, ppo))
            if not models:
                assert learner.iterations == 5
                states.append(state_of(net, ppo))
            versions.append(net.version)
    assert states[0] == states[1] and versions[1] > versions[0] == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0-5.safetensors", "rank-0.lock"]


def state_of(net: Any, ppo: Any) -> list[Any]:
    """Return the next number of each generator, the optimizer's moments, and the network's parameters."""
    moments = [each["exp_avg"].tolist() for each in ppo.optimizer.state.values()]
    drawn = [torch.rand(1).item(), np.random.random(), random.random(), ppo.random.random()]  # noqa: NPY002
    return [drawn, moments, *(each.tolist() for each in net.parameters())]


# ------------------------------------------------------------------------------------- a run that is stopped and resumed


class RecordingSAC(SAC):
    """SAC that records each batch and a number of each generator; one generator is created at the first step."""

    def __init__(self, observation_space: Any, action_space: Any, device: Any = "cpu") -> None:
        super().__init__(observation_space, action_space, device, hidden=(8,), gamma=0.9, seed=0)
        self.rows: list[Any] = []
        self.own: Any = None

    def train(self, batch: Any) -> dict[str, Any]:
        self.own = np.random.default_rng(5) if self.own is None else self.own
        obs = batch[0] if isinstance(batch, tuple) else batch.obs
        drawn = random.random(), np.random.random(), float(torch.rand(1)), self.own.random()  # noqa: NPY002
        self.rows.append([np.ravel(obs).tolist(), *drawn])
        if not isinstance(batch, tuple):  # sums of torch depend on where arrays begin
            names = ("obs", "action", "reward", "discount", "next_obs", "importance", "steps")
            batch = SimpleNamespace(**{name: getattr(batch, name).clone() for name in names})
        return super().train(batch)


EPOCHS = 4
PLAN: dict[str, Any] = {"rounds": 2, "steps": 3, "max_training_steps_per_env_step": 1e6}


@contextlib.contextmanager
def own_memory() -> Iterator[Callable[[int, Path], Any]]:
    """Yield a function that creates a trainer with its own memory, filled with 40 transitions before the first step."""
    cls = rl.partial(
        TrainingOffline, env_cls=(OBS, ACT), training_agent_cls=RecordingSAC, start_training=40, device="cpu",
        memory_cls=rl.partial(GenericMemory, batch_size=4), **PLAN,
    )  # fmt: skip
    with SampleServer(port=0) as server, PipelineWorker(Numbers, Actor, port=server.port, model_path=None) as worker:
        worker.run(0, 8)

        def new_trainer(epochs: int, folder: Path) -> Any:
            options = {"port": server.port, "model_path": None, "checkpoint_path": folder, "flush_every": 0.1}
            return PipelineTrainer(rl.partial(cls, epochs=epochs), **options)

        yield new_trainer


@contextlib.contextmanager
def drawing_servers() -> Iterator[Callable[[int, Path], Any]]:
    """Yield a function that creates a trainer whose server draws; equal entries hide the order of draws."""
    same = np.zeros(2, np.float32), np.zeros(1, np.float32)
    with served(sampler=Uniform()) as server, connect(server.endpoint) as client, client.writer() as writer:
        for step in range(40):
            writer.step(*same, 1.0, False, step == 39, same[0].copy())

        def new_trainer(epochs: int, folder: Path) -> Any:
            plan = Training(epochs=epochs, start_training=40, batch_size=4, **PLAN)
            return Trainer(RecordingSAC(OBS, ACT), server.endpoint, plan, checkpoint_path=folder)

        yield new_trainer


def trained(make: Any, folder: Path, lives: Sequence[int]) -> Any:
    """Return the trainer after several lives, each ended at a number of epochs and begun with other random numbers."""
    with make() as new_trainer:
        for number, epochs in enumerate(lives):
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(number)
            with new_trainer(epochs, folder) as trainer:
                if not number:
                    for seed in (random.seed, np.random.seed, torch.manual_seed):
                        seed(7)
                    if hasattr(trainer, "training"):
                        trainer.training.memory.rings.random = np.random.default_rng(7)
                trainer.run()
                assert trainer.loop.state.epoch == epochs
    return trainer


@pytest.mark.parametrize("make", [own_memory, drawing_servers])
def test_a_trainer_that_is_stopped_after_an_epoch_goes_on_as_if_it_had_not_been(make: Any, tmp_path: Path) -> None:
    straight = trained(make, tmp_path / "straight", [EPOCHS])
    for stops in ([1, EPOCHS], [2, 3, EPOCHS]):
        resumed = trained(make, tmp_path / f"{stops}", stops)
        assert len(resumed.agent.rows) == len(straight.agent.rows) == EPOCHS * 6
        steps = zip(resumed.agent.rows, straight.agent.rows, strict=True)
        assert not [step for step, (one, other) in enumerate(steps) if one != other], f"other draws after {stops}"
        for name in ("policy", "critic", "target"):
            both = (getattr(each.agent, name).parameters() for each in (resumed, straight))
            assert all(torch.equal(*pair) for pair in zip(*both, strict=True)), name
        assert resumed.loop.state.updates == straight.loop.state.updates
