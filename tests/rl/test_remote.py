"""Collectors that ask inference nodes: one address is enough, entries are strict, and two groups overlap."""

import inspect

import numpy as np
import pytest

import memoire
from actor_critic import NumpyActorCritic
from memoire.errors import MemoireTimeout, ParameterError, SchemaError
from memoire.nodes.tables_file import make_envs
from memoire.replay.columns import Column
from memoire.rl.onpolicy.collector import Collector, RemoteActor
from memoire.rl.policies import Asks, MlpPolicy, Policy, policy_rows, rollout_schema
from memoire.tables.table import Table
from netkit import QUICK, in_thread


def test_rows_of_a_policy_are_the_columns_that_the_collector_does_not_know():
    obs = {"image": Column(np.uint8, (2, 2), "state"), "speed": Column(np.float32, (), "state")}
    made = {"action": np.int64, "logp": np.float32, "value": np.float32, "memory": (np.float32, (3,))}
    schema = memoire.Schema({"obs": obs, "reward": np.float32, "discounted": np.float32} | made)
    inputs, outputs = policy_rows(schema)
    assert inputs.names == ("obs.image", "obs.speed", "memory") and outputs.names == tuple(made)


@pytest.fixture
def open_node(cluster):
    made = []

    def start(server, endpoint):
        def function(columns, policy):
            return policy.act(columns["obs"])

        rows = policy_rows(server.schema)
        models = {"weights": lambda body: MlpPolicy(body, seed=0), "connect": server.endpoint}
        made.append(memoire.Inference(endpoint, *rows, function, **models, context=cluster.context))
        return made[-1]

    yield start
    for node in made:
        node.close()


def strict_server(cluster, envs, *inference):
    table = Table(rollout_schema(envs), storage="rollouts", capacity=256, rollout_length=32, max_model_lag=0)
    return cluster.server(schema=None, tables={"rollouts": table}, limits=QUICK, inference=inference)


def test_collectors_find_the_node_at_the_server_and_record_nothing_by_a_former_model(cluster, open_node):
    groups = [[make_envs("CartPole-v1", 2) for _ in range(2)] for _ in range(2)]
    place, net = cluster.address(), NumpyActorCritic(4, 2)
    server = strict_server(cluster, groups[0][0], place)
    node = open_node(server, place)
    proxy = cluster.proxy([server])
    version = server.publish("policy", net.body())
    collectors = [
        Collector(node.endpoint, each, seed=i)
        for i, (node, each) in enumerate(zip((server, proxy), groups, strict=True))
    ]
    threads = [in_thread(each.run)[0] for each in collectors]
    table = server.table("rollouts")
    for _ in range(4):
        rollouts = table.take(256, timeout=60.0, release="publish")
        assert set(rollouts.model_version.tolist()) == {version}
        version = server.publish("policy", net.body())
    server.finish()
    for thread, collector in zip(threads, collectors, strict=True):
        thread.join(60.0)
        assert not thread.is_alive()
        collector.close()
    stats = node.stats()
    assert stats.failures == 0 and stats.version >= 4
    assert stats.requests * 2 <= stats.rows, "each request has the rows of a group"


def test_a_collector_whose_node_is_away_says_so_and_ends_with_the_run(cluster):
    envs = make_envs("CartPole-v1", 2)
    place = cluster.address()
    server = strict_server(cluster, envs, place)
    with Collector(server.endpoint, envs, timeout=0.5) as collector:
        assert isinstance(collector.policy, RemoteActor)
        with pytest.raises(MemoireTimeout, match=place.rpartition(":")[2]):
            collector.run()
    with Collector(server.endpoint, envs) as collector:
        running, _ = in_thread(collector.run)
        server.finish()
        running.join(30.0)
        assert not running.is_alive() and collector.collected().is_finished


def test_a_policy_that_is_given_acts_although_there_are_nodes(cluster):
    envs = make_envs("CartPole-v1", 2)
    server = strict_server(cluster, envs, "tcp://*:5570")
    server.publish("policy", NumpyActorCritic(4, 2).body())
    with Collector(server.endpoint, envs, policy=MlpPolicy(seed=0)) as collector:
        assert collector.run(8).version == 1


def arguments_of(*functions):
    return {name for each in functions for name in inspect.signature(each).parameters} - {"args", "kwargs"}


NAMES = arguments_of(RemoteActor.ask, RemoteActor.act, Policy.act, Asks.ask, MlpPolicy.act) | {
    "observations", "min_version", "columns", "extras", "inputs", "terminated", "truncated", "version", "lane", "name",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(NAMES - {"memory"}))
def test_a_column_of_any_name_is_stored_as_its_policy_says_or_refused_before_the_first_step(name, cluster):
    """Names of arguments, and of what the writer and policies say by themselves; memory is fed back."""
    envs, asked = make_envs("CartPole-v1", 2), []

    class Acts:
        def act(self, observations):
            asked.append(observations)
            found = {"action": np.zeros(2, np.int64), "logp": np.zeros(2, np.float32), "version": 7}
            return {name: np.array([42, 43])} | found if name not in ("terminated", "truncated") else found

    columns = {"obs": Column(np.float32, (4,), "state"), "action": np.int64, "reward": np.float32, "logp": np.float32}
    table = Table(memoire.Schema(columns | {name: np.int64}), storage="rollouts", capacity=256, rollout_length=4)
    server = cluster.server(schema=None, tables={"rollouts": table}, limits=QUICK)
    if name in ("self", "version"):
        with pytest.raises(SchemaError, match=f"column '{name}': .* Choose another"):
            Collector(server.endpoint, envs, policy=Acts())
        assert not asked
        if name == "version":
            for refuses in (rollout_schema, lambda envs, extra: policy_rows(table.schema)):
                with pytest.raises(SchemaError, match="column 'version'"):
                    refuses(envs, {name: np.int64})
        return
    with Collector(server.endpoint, envs, policy=Acts()) as collector:
        collector.run(8)
        rollouts = server.table("rollouts").take(8, 20.0)
    assert set(rollouts.model_version.tolist()) == {7}
    assert set(rollouts[name].tolist()) <= {42, 43} if name not in ("terminated", "truncated") else {0, 1}


def test_clients_are_told_of_nodes_as_they_reach_them(cluster):
    here, there = "tcp://*:5570", "tcp://inference-0:5570"
    servers = [cluster.server(inference=[here, there]), cluster.server(inference=[there])]
    seen = ("tcp://127.0.0.1:5570", there)
    assert cluster.client(servers[0]).inference == seen
    assert cluster.client(cluster.proxy(servers)).inference == seen
    assert cluster.client(cluster.server()).inference == ()


@pytest.mark.parametrize("given", ["tcp://node:5570", ["tcp://node:5570"] * 65])
def test_what_is_no_list_of_addresses_is_refused(given):
    with pytest.raises(ParameterError, match="a list of at most 64 addresses"):
        memoire.Server("tcp://127.0.0.1:0", {"obs": np.float32}, inference=given)
