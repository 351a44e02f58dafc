"""Collectors fill tables of rollouts, also by inference nodes; policies in NumPy act by named arrays."""

import inspect
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import memoire
from memoire.errors import DataError, MemoireTimeout, ParameterError, SchemaError, WrongModel
from memoire.models import tensors
from memoire.nodes.settings import make_envs
from memoire.replay.columns import Column
from memoire.rl import weights
from memoire.rl.collector import Collector, RemoteActor
from memoire.rl.policies import AsyncPolicy, LoadsModels, MlpPolicy, Moments, Policy, policy_rows, rollout_schema
from memoire.tables.table import Table
from netkit import QUICK, in_thread

pytestmark = pytest.mark.slow

# --- A collector fills a table of rollouts through real sockets, and one model makes each fragment


class Counter(gymnasium.Env):
    """Environment whose observations count its steps; an episode is truncated after five."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)

    def __init__(self, action_space=None):
        self.action_space = action_space or gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        return np.full(1, self.t, np.float32), 1.0, False, self.t == 5, {}


def envs_of(count=2, mode=AutoresetMode.NEXT_STEP, space=None):
    return SyncVectorEnv([lambda: Counter(space)] * count, autoreset_mode=mode)


class Steady:
    """Policy that always takes the same action, with version 3."""

    def __init__(self, action):
        self.action = action

    def act(self, observations):
        count = len(observations)
        return {"action": np.stack([self.action] * count), "logp": np.zeros(count, np.float32), "version": 3}


class AskedPolicy(Steady):
    """Inference client with this policy, which counts the requests that wait, and their maximum."""

    def __init__(self, action):
        super().__init__(action)
        self.waiting = self.most = 0

    def ask(self, observations, *, min_version=0):
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        return SimpleNamespace(result=lambda timeout: self.answer(observations))

    def answer(self, observations):
        self.waiting -= 1
        return self.act(observations)


def table_of(envs, **options):
    schema = rollout_schema(envs, discounted=options.pop("discounted", False))
    return {"rollouts": Table(schema, storage="rollouts", **options)}


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_an_episode_that_is_truncated_keeps_its_final_observation(cluster, mode):
    envs = envs_of(2, mode)
    server = cluster.server(schema=None, tables=table_of(envs, capacity=1000, discounted=True), limits=QUICK)
    with Collector(server.endpoint, envs, policy=Steady(np.int64(1))) as collector:
        collected = collector.run(20)
    assert collected.steps >= 20 and collected.version == 3
    rollouts = server.table("rollouts").take(20, timeout=20.0)
    ends = rollouts.truncated
    assert ends.any() and (rollouts.final["obs"][ends] == 5).all() and set(rollouts.model_version) == {3}
    assert (rollouts["obs"] < 5).all() and not rollouts.terminated.any()
    sums = np.cumsum(0.99 ** np.arange(5))
    np.testing.assert_allclose(rollouts["discounted"], sums[rollouts["obs"][:, 0].astype(int)], rtol=1e-5)


def test_actions_are_clipped_for_the_environment_and_kept_as_they_were(cluster):
    box = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    envs = envs_of(space=box)
    server = cluster.server(schema=None, tables=table_of(envs, capacity=1000), limits=QUICK)
    with Collector(server.endpoint, envs, policy=Steady(np.full(2, 7.0, np.float32))) as collector:
        collector.run(8)
    assert (server.table("rollouts").take(8, timeout=20.0)["action"] == 7.0).all()


def test_two_groups_wait_for_their_actions_at_once(cluster):
    policy, groups = AskedPolicy(np.int64(0)), [envs_of(2), envs_of(3)]
    server = cluster.server(schema=None, tables=table_of(groups[0], capacity=1000), limits=QUICK)
    with Collector(server.endpoint, groups, policy=policy) as collector:
        assert collector.run(40).steps >= 40
        version = collector.version
        collector.client.update(20.0)
        (client,) = server.clients()
        assert client.scalars == {"model_version": version}, "it has no model itself, and says which one acts"
    assert policy.most == 2
    rollouts = server.table("rollouts").take(40, timeout=20.0)
    assert rollouts.truncated.all() and rollouts.lengths.max() == 5
    assert rollouts.final["obs"][:, 0].tolist() == rollouts.lengths.tolist(), "each group goes on where it was"


def test_what_does_not_fit_is_refused(cluster):
    envs = envs_of()
    server = cluster.server(schema=rollout_schema(envs), limits=QUICK)
    with pytest.raises(ParameterError, match="stores caches; a collector needs one that stores rollouts"):
        Collector(server.endpoint, envs)
    with pytest.raises(ParameterError, match="a vector environment"):
        Collector(server.endpoint, Counter())
    with pytest.raises(ParameterError, match="a collector needs next_step or same_step"):
        Collector(server.endpoint, envs_of(mode=AutoresetMode.DISABLED))


# --- Collectors that ask inference nodes need one address, keep entries strict, and overlap two groups


def strict_server(cluster, envs, *inference):
    table = Table(rollout_schema(envs), storage="rollouts", capacity=256, rollout_length=32, max_model_lag=0)
    return cluster.server(schema=None, tables={"rollouts": table}, limits=QUICK, inference=inference)


def test_collectors_find_the_node_at_the_server_and_record_nothing_by_a_former_model(cluster):
    groups = [[make_envs("CartPole-v1", 2) for _ in range(2)] for _ in range(2)]
    place, body = cluster.address(), weights.pack(net(2))
    server = strict_server(cluster, groups[0][0], place)
    act = lambda columns, policy: policy.act(columns["obs"])  # noqa: E731
    models = {"weights": lambda body: MlpPolicy(body, seed=0), "connect": server.endpoint, "context": cluster.context}
    node = cluster.keep(memoire.Inference(place, *policy_rows(server.schema), act, **models))
    proxy = cluster.proxy([server])
    version = server.publish("policy", body)
    collectors = [Collector(near.endpoint, each, seed=0) for near, each in zip((server, proxy), groups, strict=True)]
    threads = [in_thread(each.run)[0] for each in collectors]
    table = server.table("rollouts")
    for _ in range(4):
        rollouts = table.take(256, timeout=60.0, release="publish")
        assert set(rollouts.model_version.tolist()) == {version}
        version = server.publish("policy", body)
    server.finish()
    for thread, collector in zip(threads, collectors, strict=True):
        thread.join(60.0)
        assert not thread.is_alive()
        collector.close()
    stats = node.stats()
    assert stats.failures == 0 and stats.version >= 4
    assert stats.requests * 2 <= stats.rows, "each request has the rows of a group"


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_collector_without_a_model_or_a_node_says_so_in_time_and_ends_with_the_run(cluster, is_remote):
    envs, place = make_envs("CartPole-v1", 2), cluster.address()
    server = strict_server(cluster, envs, *[place] * is_remote)
    with Collector(server.endpoint, envs, timeout=0.5) as collector:
        assert isinstance(collector.policy, RemoteActor) == is_remote
        with pytest.raises(MemoireTimeout, match=place.rpartition(":")[2] if is_remote else None):
            collector.run()
        assert is_remote or collector.run(seconds=0.05).steps == 0
    with Collector(server.endpoint, envs) as collector:
        running, _ = in_thread(collector.run)
        server.finish()
        running.join(30.0)
        assert not running.is_alive() and collector.collected().is_finished


def arguments_of(*functions):
    return {name for each in functions for name in inspect.signature(each).parameters} - {"args", "kwargs"}


NAMES = arguments_of(RemoteActor.ask, RemoteActor.act, Policy.act, AsyncPolicy.ask, MlpPolicy.act) | {
    "observations", "min_version", "columns", "extras", "inputs", "terminated", "truncated", "version", "lane", "name",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(NAMES - {"memory"}))
def test_a_column_of_any_name_is_stored_as_its_policy_says_or_refused_before_the_first_step(name, cluster):
    """NAMES are arguments of a step, and values that writers or policies set; "memory" is fed back to the policy."""
    envs, asked = make_envs("CartPole-v1", 2), []

    class Acts:
        def act(self, observations):
            asked.append(observations)
            outputs = {"action": np.zeros(2, np.int64), "logp": np.zeros(2, np.float32), "version": 7}
            return {name: np.array([42, 43])} | outputs if name not in ("terminated", "truncated") else outputs

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


@pytest.mark.parametrize("addresses", ["tcp://node:5570", ["tcp://node:5570"] * 65])
def test_what_is_no_list_of_addresses_is_refused(addresses):
    with pytest.raises(ParameterError, match="a list of at most 64 addresses"):
        memoire.Server("tcp://127.0.0.1:0", {"obs": np.float32}, inference=addresses)


# --- Named arrays as bytes and files, and a policy in NumPy that acts by named arrays


def net(outputs=3, *, value=True, log_std=None, seed=0):
    random = np.random.default_rng(seed)
    arrays = {}
    for name, last in (("policy", outputs), ("value", 1)) if value else (("policy", outputs),):
        for i, (fan_in, fan_out) in enumerate(((4, 8), (8, last))):
            arrays[f"{name}.{i}.weight"] = random.standard_normal((fan_out, fan_in)).astype(np.float32)
            arrays[f"{name}.{i}.bias"] = random.standard_normal(fan_out).astype(np.float32)
    return arrays if log_std is None else arrays | {"log_std": np.full(outputs, log_std, np.float32)}


def logits_of(arrays, obs):
    hidden = np.tanh(obs @ arrays["policy.0.weight"].T + arrays["policy.0.bias"])
    return hidden @ arrays["policy.1.weight"].T + arrays["policy.1.bias"]


OBS = np.random.default_rng(1).standard_normal((5, 4)).astype(np.float32)


def test_importing_the_room_needs_neither_torch_nor_gymnasium():
    code = (
        "import sys, json; sys.modules.update(torch=None, gymnasium=None); import memoire.rl as rl; "
        "print(json.dumps([n for n in ('numpy', 'zmq') if n in sys.modules])); rl.MlpPolicy, rl.weights"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert json.loads(done.stdout) == []


def test_there_is_no_other_name():
    import memoire.rl

    assert {"MlpPolicy", "Moments", "weights"} <= set(dir(memoire.rl))
    with pytest.raises(AttributeError, match="has no attribute 'MlpPolcy'"):
        _ = memoire.rl.MlpPolcy


def test_what_cannot_be_put_in_its_place_leaves_nothing_behind(tmp_path):
    path = tmp_path / "w.safetensors"
    (path / "in the way").mkdir(parents=True)
    with pytest.raises(ParameterError, match="is a folder, and was not changed"):
        weights.save(path, {"x": np.zeros(3)})
    assert os.listdir(tmp_path) == ["w.safetensors"] and os.listdir(path) == ["in the way"]


def test_what_cannot_travel_is_refused(tmp_path):
    with pytest.raises(ParameterError, match=r"arrays\['x'\] must be of a dtype among .* got 'complex128'"):
        weights.pack({"x": np.ones(1, complex)})
    body = weights.pack({"x": np.ones(3)})
    for wrong in (b"", body[:-1], body + b"\0", b"\xff" * 30):
        with pytest.raises(WrongModel):
            weights.unpack(wrong)
    (tmp_path / "f").write_bytes(body[:-1])
    with pytest.raises(DataError, match="is damaged"):
        weights.load(tmp_path / "f")
    with pytest.raises(WrongModel, match="has 'x' as BF16, which NumPy lacks"):
        weights.unpack(tensors.pack({"x": tensors.Array("BF16", (1,), memoryview(bytes(2)))}))


def test_actions_are_sampled_as_the_logits_say():
    arrays, policy = net(), MlpPolicy(seed=3)
    policy.load(weights.pack(arrays), 7)
    logits = logits_of(arrays, OBS)
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    taken = np.zeros((5, 3))
    for _ in range(4000):
        out = policy.act(OBS)
        taken[np.arange(5), out["action"]] += 1
    np.testing.assert_allclose(out["logp"], logs[np.arange(5), out["action"]], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(taken / 4000, np.exp(logs), atol=0.03)
    assert out["version"] == 7 and out["value"].shape == (5,) and out["action"].dtype == np.int64
    assert np.array_equal(policy.act(OBS, is_greedy=True)["action"], logits.argmax(1))


def test_actions_of_a_box_have_the_gaussian_s_mean_spread_and_density():
    arrays = net(2, log_std=-0.5, value=False)
    policy = MlpPolicy(weights.pack(arrays), 1, seed=3)
    outs = [policy.act(OBS) for _ in range(3000)]
    actions, means = np.stack([out["action"] for out in outs]), logits_of(arrays, OBS)
    np.testing.assert_allclose(actions.mean(0), means, atol=0.05)
    np.testing.assert_allclose(actions.std(0), np.exp(-0.5), atol=0.03)
    density = -0.5 * ((actions[0] - means) / np.exp(-0.5)) ** 2 + 0.5 - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(outs[0]["logp"], density.sum(1), rtol=1e-4)
    assert "value" not in outs[0] and outs[0]["action"].dtype == np.float32


def test_nested_observations_lie_side_by_side():
    arrays = net()
    nested = {"a": OBS[:, :1], "b": (OBS[:, 1:3].reshape(5, 2, 1), OBS[:, 3])}
    policy = MlpPolicy(weights.pack(arrays))
    assert policy.version == 0 == policy.act(OBS)["version"]
    assert np.array_equal(policy.act(OBS)["value"], policy.act(nested)["value"])
    assert isinstance(policy, Policy) and isinstance(policy, LoadsModels)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"policy.0.weight": None}, "has no 'policy.0.weight'"),
        ({"policy.1.bias": None}, "layer 1 of 'policy' in shapes"),
        ({"policy.1.weight": np.ones((3, 7), np.float32)}, "layer 1 of 'policy' in shapes"),
        ({"value.1.weight": np.ones((2, 8), np.float32), "value.1.bias": np.ones(2)}, "value network that does not"),
        ({"log_std": np.ones(2)}, r"log_std of shape \(2,\) for 3 means"),
        ({"observations.mean": np.ones(4)}, "has statistics of observations"),
        (Moments((3,)).arrays("observations"), r"statistics of shape \(3,\) for 4 inputs"),
    ],
)
def test_a_body_that_does_not_fit_leaves_the_former_model(change, problem):
    arrays = net()
    policy = MlpPolicy(weights.pack(arrays), 5)
    wrong = {name: array for name, array in (arrays | change).items() if array is not None}
    with pytest.raises(WrongModel, match=problem):
        policy.load(weights.pack(wrong), 6)
    assert policy.act(OBS)["version"] == 5


def test_a_policy_without_a_model_or_with_other_observations_says_so():
    with pytest.raises(ParameterError, match="has no model yet"):
        MlpPolicy().act(OBS)
    with pytest.raises(ParameterError, match="the model takes 4"):
        MlpPolicy(weights.pack(net())).act(OBS[:, :2])


def test_moments_of_parts_are_those_of_the_whole():
    values = np.random.default_rng(0).normal(1000.0, 3.0, (100, 4))
    merged = Moments((4,))
    for part in (values[:10], values[:0], values[10:13], values[13:]):
        merged.merge(Moments.from_values(part))
    np.testing.assert_allclose(merged.mean, values.mean(0))
    np.testing.assert_allclose(merged.variance, values.var(0))
    again = Moments.read(merged.arrays("x"), "x")
    assert again is not None and again.count == 100
    normal = again.normalize(values)
    assert abs(normal.mean()) < 1e-3 and abs(normal.std() - 1) < 1e-3
    assert again.normalize(values + 1e6).max() == 10.0
    with pytest.raises(ParameterError, match=r"of shape \(4,\)"):
        merged.merge(Moments())


def test_rewards_are_scaled_and_not_moved():
    moments = Moments.from_values(np.array([-2.0, 2.0, 2.0, -2.0]))
    assert moments.scale(np.array([0.0, 4.0, -1e9])).tolist() == [0.0, 2.0, -10.0]


def test_observations_are_normalized_by_what_came_with_the_model():
    arrays, moments = net(), Moments.from_values(OBS * 5.0 + 2.0)
    normal = MlpPolicy(weights.pack(arrays | moments.arrays("observations")), 1).act(OBS)["value"]
    expected = MlpPolicy(weights.pack(arrays), 1).act(moments.normalize(OBS))["value"]
    np.testing.assert_allclose(normal, expected, rtol=1e-6)
