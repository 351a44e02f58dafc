"""Settings that two sides have, table and trainer, checkpoint and agent: equal, or named and refused."""

import contextlib
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from test_ppo import net_of, rollouts_of

from memoire import Buffer, Schema, Server, Table, connect
from memoire.errors import ParameterError
from memoire.pool.tables import TABLE_NAMES
from memoire.rl import (
    PPO,
    SAC,
    ActorCritic,
    GaussianPolicy,
    OnPolicyLearner,
    Pipeline,
    RecurrentPPO,
    Trainer,
    Training,
    TrainingAgent,
    Work,
    partial,
    replay,
)
from netkit import until

pytestmark = pytest.mark.torch
OBS = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
ACT = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
SPACES = SimpleNamespace(observation_space=OBS, action_space=ACT, close=lambda: None)


def names_of(made: Any) -> set[str]:
    """Its arguments."""
    return set(inspect.signature(made).parameters)


# -------------------------------------------------------------------------------------------------- table and trainer

OF_BOTH: dict[Any, dict[str, str]] = {  # by their names here, those of the table
    SAC: {"gamma": "discount_factor"},
    PPO: {"gamma": "discount_factor"},
    RecurrentPPO: {"gamma": "discount_factor"},
    Trainer: {"topic": "model_topic"},
    Training: {
        "start_training": "min_size",
        "max_training_steps_per_env_step": "samples_per_insert",
        "batch_size": "samples_per_insert",
    },
    OnPolicyLearner: {
        "discount": "discount_factor",
        "max_lag": "max_model_lag",
        "length": "rollout_length",
        "steps": "capacity",
    },
}
OF_THE_TRAINER: dict[Any, set[str]] = {
    SAC: {
        "observation_space", "action_space", "device", "policy", "hidden", "polyak", "rate", "alpha",
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
ELSEWHERE = {"discount", "discount_factor", "parameters", "schema"}
"""Names of a table for what the above has under another name, or takes from the table as it is."""


def test_every_setting_of_table_and_trainer_is_listed() -> None:
    table = {*names_of(Table), *TABLE_NAMES}
    for made, alone in OF_THE_TRAINER.items():
        both = OF_BOTH[made]
        assert names_of(made) == both.keys() | alone, f"list what {made.__name__} takes with that of both, or not"
        assert set(both.values()) <= table and not both.keys() & alone
        assert not alone & table, "a setting of this name is the table's, too"


@contextlib.contextmanager
def served(**options: Any) -> Iterator[Server]:
    table = Table(Schema.from_env(SPACES), storage="episodes", capacity=100, discount=0.9, **options)
    with Server("tcp://127.0.0.1:*", tables={"replay": table}) as server:
        yield server


def record(writer: Any, steps: int = 40) -> None:
    """Episodes of five steps."""
    places = np.random.default_rng(0).uniform(-1.0, 1.0, (steps + 1, 2)).astype(np.float32)
    for step, obs in enumerate(places[:-1]):
        writer.step(obs, obs[:1], float(obs[0]), step % 5 == 4, False, places[step + 1])


class Plain(TrainingAgent):
    """An agent without networks that has a discount of some name."""

    def __init__(self, **discount: Any) -> None:
        super().__init__(OBS, ACT, None)
        vars(self).update(discount)

    def train(self, batch: Any) -> dict[str, Any]:
        return {}

    def get_actor(self) -> Any:
        return {"value": np.zeros(1, np.float32)}


@pytest.mark.parametrize("name", ["gamma", "discount", "discount_factor"])
def test_a_trainer_takes_the_discount_of_its_table_and_refuses_another_one(name: str) -> None:
    with served() as server:
        for agent in (Plain(**{name: 0.8}), Plain(**{name: [0.8]}), *[SAC(OBS, ACT, gamma=0.8)] * (name == "gamma")):
            with pytest.raises(ParameterError, match=rf"^{name} must be 0\.9, which the table has, or left out"):
                Trainer(agent, server.endpoint)
        for value in (0.9, None, np.float64(0.9)):
            with Trainer(Plain(**{name: value}), server.endpoint) as trainer:
                assert getattr(trainer.agent, name) == (0.9 if name == "gamma" or value else None)


def test_a_trainer_hears_that_its_table_is_configured() -> None:
    with served() as server, connect(server.endpoint) as client, client.writer() as writer:
        record(writer)
        agents = [Plain(gamma=None), Plain(gamma=0.9)]
        follows, told = (Trainer(agent, server.endpoint, Training(batch_size=4)) for agent in agents)
        with follows, told:
            for trainer in (follows, told):
                trainer.experience.batch()
            server.configure(discount=0.5)
            assert until(lambda: all(each.reader.parameters.discount_factor == (0.5,) for each in (follows, told)))
            follows.experience.batch()
            assert follows.agent.gamma == 0.5
            with pytest.raises(ParameterError, match=r"^gamma must be 0\.5, which the table has"):
                told.experience.batch()


def test_a_trainer_of_another_topic_than_the_tables_is_refused_if_old_models_are() -> None:
    with served(model_topic="weights") as server, Trainer(Plain(), server.endpoint):
        pass
    with served(model_topic="weights", max_model_lag=2) as server:
        with pytest.raises(ParameterError, match="^topic must be 'weights', the model_topic of the table"):
            Trainer(Plain(), server.endpoint)
        with Trainer(Plain(), server.endpoint, topic="weights"):
            pass


@pytest.mark.parametrize("correction", [None, "vtrace"])
def test_ppo_takes_the_discount_of_the_table_and_refuses_another_one(correction: str | None) -> None:
    rollouts = rollouts_of(net_of(), discount=(0.5,))
    same = [PPO(net_of(), gamma=gamma, correction=correction).prepared(rollouts).returns for gamma in (None, 0.5)]
    assert torch.equal(*same)
    with pytest.raises(ParameterError, match=r"^gamma must be 0\.5, which the table has, or left out, got 0\.9"):
        PPO(net_of(), gamma=0.9, correction=correction).update(rollouts)
    rollouts.discount = None
    with pytest.raises(ParameterError, match="gamma must be a number .* from no table"):
        PPO(net_of()).update(rollouts)


def test_a_learner_makes_its_table_as_it_was_told_and_keeps_no_algorithm_of_another_discount() -> None:
    net = ActorCritic.mlp(SPACES, (8,))
    options: dict[str, Any] = {"discount": 0.5, "max_lag": 3, "length": 16, "steps": 64}
    with OnPolicyLearner("tcp://127.0.0.1:*", SPACES, net, correction="none", **options) as learner:
        table = learner.server.table("rollouts")
        for name, of_table in OF_BOTH[OnPolicyLearner].items():
            found = table.stats().capacity if of_table == "capacity" else getattr(table.parameters, of_table)
            assert np.all(np.ravel(found) == options[name]), name
        with pytest.raises(ParameterError, match=r"^gamma must be 0\.5, which the table has, or left out, got 0\.9"):
            learner.keep(PPO(learner.net, gamma=0.9))
        assert learner.keep(PPO(learner.net, gamma=0.5)).gamma == 0.5


def pipeline(agent: Any, table: Any, **options: Any) -> Pipeline:
    return Pipeline(run="a", env=lambda: SPACES, policy=GaussianPolicy, agent=agent, table=table, **options)


def with_default(observation_space: Any, action_space: Any, device: Any, gamma: float = 0.7) -> Any:
    return Plain(gamma=gamma)


TOLD = [  # the agent, what the table is told, and the discount of both
    (partial(SAC, gamma=0.8), {}, 0.8), (SAC, {"discount": 0.8}, 0.8), (partial(SAC, gamma=0.8), {"discount": 0.8}, 0.8),
    (SAC, {"discount_factor": 0.8}, 0.8), (SAC, {}, 0.99), (with_default, {}, 0.7), (with_default, {"discount": 0.8}, 0.8),
    (lambda **spaces: Plain(gamma=None), {"discount": 0.8}, 0.8),
]  # fmt: skip


@pytest.mark.parametrize(("agent", "table", "discount"), TOLD)
def test_a_pipeline_has_one_discount(agent: Any, table: dict[str, Any], discount: float) -> None:
    run = pipeline(agent, replay(100, **table))
    assert run.make_table().parameters.discount_factor == (discount,)
    made = run.make_agent()
    with Server("tcp://127.0.0.1:*", tables={"replay": run.make_table()}) as server, Trainer(made, server.endpoint):
        assert made.gamma == discount


def test_a_pipeline_of_two_discounts_is_refused() -> None:
    for table in ({"discount": 0.5}, {"discount_factor": (0.5,)}):
        with pytest.raises(ParameterError, match=r"^gamma must be 0\.5, which the table has, or left out, got 0\.9"):
            pipeline(partial(SAC, gamma=0.9), replay(100, **table))


def test_a_pipeline_paces_its_table_as_training_says() -> None:
    plan = Training(start_training=7, max_training_steps_per_env_step=0.5, batch_size=32)
    parameters = pipeline(SAC, replay(100), training=plan, work=Work(is_paced=True)).make_table().parameters
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
    with pytest.raises(ParameterError, match=r"^gamma must be 0\.5, by which batches were made, or left out, got 0\.9"):
        agent.train(batch)
    assert all(torch.equal(*each) for each in zip(before, agent.policy.parameters(), strict=True))
