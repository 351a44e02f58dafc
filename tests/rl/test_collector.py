"""A collector fills a table of rollouts through real sockets, each fragment by one model, and a learner learns of it."""

import threading
import time

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from actor_critic import NumpyActorCritic
from memoire.errors import MemoireTimeout, ParameterError
from memoire.nodes.tables_file import make_envs
from memoire.rl.onpolicy.collector import Collector
from memoire.rl.policies import MlpPolicy, rollout_schema
from memoire.tables.table import Table
from netkit import QUICK, in_thread, until


class Counter(gymnasium.Env):
    """Observations count steps; an episode is truncated after five."""

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
    """Acts the same always, by version 3."""

    def __init__(self, action):
        self.action = action

    def act(self, observations):
        count = len(observations)
        return {"action": np.stack([self.action] * count), "logp": np.zeros(count, np.float32), "version": 3}


class Asked(Steady):
    """The same for whoever asks, and says how many wait at most."""

    def __init__(self, action):
        super().__init__(action)
        self.waiting = self.most = 0

    def ask(self, observations, *, min_version=0):
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        asked = self

        class Pending:
            def result(self, timeout):
                asked.waiting -= 1
                return asked.act(observations)

        return Pending()


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


def test_actions_of_a_discrete_space_count_from_its_start(cluster):
    envs = envs_of(space=gymnasium.spaces.Discrete(2, start=5))
    server = cluster.server(schema=None, tables=table_of(envs, capacity=1000), limits=QUICK)
    with Collector(server.endpoint, envs, policy=Steady(np.int64(1))) as collector:
        collector.run(8)  # the environment refuses others
    assert (server.table("rollouts").take(8, timeout=20.0)["action"] == 1).all()


def test_two_groups_wait_for_their_actions_at_once(cluster):
    policy, groups = Asked(np.int64(0)), [envs_of(2), envs_of(3)]
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


def test_a_learner_gets_what_other_groups_hold_when_one_waits(cluster):
    groups = [envs_of(2), envs_of(3)]
    server = cluster.server(schema=None, tables=table_of(groups[0], capacity=50, rollout_length=40), limits=QUICK)
    with Collector(server.endpoint, groups, policy=Steady(np.int64(0))) as collector:
        running, _ = in_thread(lambda: collector.run(seconds=30.0))
        table = server.table("rollouts")
        until(lambda: table.stats().unused_samples >= 50)
        assert collector.client.room <= 0 and table.stats().rate.forgiven == 0
        server.finish()
        running.join(30.0)


def test_what_does_not_fit_is_refused(cluster):
    envs = envs_of()
    server = cluster.server(schema=rollout_schema(envs), limits=QUICK)
    with pytest.raises(ParameterError, match="which stores caches"):
        Collector(server.endpoint, envs)
    with pytest.raises(ParameterError, match="a vector environment"):
        Collector(server.endpoint, Counter())
    with pytest.raises(ParameterError, match="reset themselves"):
        Collector(server.endpoint, envs_of(mode=AutoresetMode.DISABLED))


def test_a_collector_without_a_model_says_so_in_time_and_ends_with_the_run(cluster):
    envs = envs_of()
    server = cluster.server(schema=None, tables=table_of(envs, capacity=1000), limits=QUICK)
    with Collector(server.endpoint, envs, timeout=0.3) as collector:
        with pytest.raises(MemoireTimeout):
            collector.run()
        assert collector.run(seconds=0.05).steps == 0
    with Collector(server.endpoint, envs) as collector:
        running, _ = in_thread(collector.run)
        server.finish()
        running.join(30.0)
        assert not running.is_alive() and collector.collected().is_finished


def test_a_numpy_actor_critic_learns_cartpole_from_strict_rollouts(cluster):
    envs = [make_envs("CartPole-v1", 8) for _ in range(2)]
    tables = table_of(envs[0], capacity=1024, rollout_length=128, max_model_lag=0)
    server = cluster.server(schema=None, tables=tables, limits=QUICK)
    table, net = server.table("rollouts"), NumpyActorCritic(4, 2)
    version = server.publish("policy", net.body())
    collectors = [Collector(server.endpoint, each, seed=i) for i, each in enumerate(envs)]
    threads = [threading.Thread(target=each.run, daemon=True) for each in collectors]
    for thread in threads:
        thread.start()
    deadline, best = time.monotonic() + 100.0, 0.0
    while best < 150.0:
        assert time.monotonic() < deadline, f"the newest episodes returned {best:.0f}"
        rollouts = table.take(1024, timeout=60.0, release="publish")
        assert set(rollouts.model_version.tolist()) == {version}, "strict: each entry by the newest model"
        net.update(rollouts)
        version = server.publish("policy", net.body())
        newest = [ended.returned for _, ended in server.episodes(20)]
        best = sum(newest) / max(20, len(newest))
    server.finish()
    for thread, collector in zip(threads, collectors, strict=True):
        thread.join(30.0)
        assert not thread.is_alive()
        collector.close()


def test_what_a_former_model_began_is_cut_before_the_next_one_acts(cluster):
    envs, net = envs_of(), NumpyActorCritic(1, 2)
    server = cluster.server(schema=None, tables=table_of(envs, capacity=1000, max_model_lag=0), limits=QUICK)
    server.publish("policy", net.body())
    with Collector(server.endpoint, envs, policy=MlpPolicy(seed=0)) as collector:
        collector.run(4)
        server.publish("policy", net.body())
        until(lambda: collector.client.model("policy").published == 2)
        collector.run(4)
        collector.client.update(20.0)
    table = server.table("rollouts")
    rollouts = table.take(4, timeout=20.0)
    assert rollouts.model_version.tolist() == [2] * 4, "no fragment has a step of the former model in it"
    assert table.stats().passed_over_samples == 4
