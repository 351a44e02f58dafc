"""Tests of a learner with collectors on real sockets: strict entries, checkpoints, and two ranks that stay equal."""

import contextlib
import multiprocessing
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from torch.distributions import Categorical

from history.ports import held
from memoire.errors import DataError, NotEnoughSamples, ParameterError
from memoire.nodes.settings import make_envs
from memoire.rl import PPO, ActorCritic, Collector, OnPolicyLearner, World
from memoire.rl.learner import Checkpoints

pytestmark = pytest.mark.torch


def mlp(envs, seed=0, hidden=(32, 32), kind=ActorCritic, **options):
    torch.manual_seed(seed)
    return kind.mlp(envs, hidden, **options)


@contextlib.contextmanager
def collecting(url, count=2):
    collectors = [Collector(url, make_envs("CartPole-v1", 4), seed=i) for i in range(count)]
    threads = [threading.Thread(target=each.run, daemon=True) for each in collectors]
    for thread in threads:
        thread.start()
    yield
    for thread, collector in zip(threads, collectors, strict=True):
        thread.join(30.0)
        assert not thread.is_alive()
        collector.close()


def test_ppo_learns_cartpole_from_strict_rollouts_with_normalization():
    envs = make_envs("CartPole-v1", 1)
    net = mlp(envs, normalize_observations=True, normalize_rewards=True)
    with OnPolicyLearner("tcp://127.0.0.1:*", envs, net, 1024, 128, seconds=90.0, discount=0.98) as learner:
        ppo = learner.keep(PPO(learner.net, 1e-3, 8, 128, lam=0.9, seed=0))
        with collecting(learner.server.endpoint):
            while learner.recent_return < 150 and not learner.is_over:
                rollouts = learner.collect(60.0)
                assert len(rollouts) == 1024 and set(rollouts.model_version) == {net.version}
                figures = ppo.update(rollouts)
                learner.log(figures)
                learner.publish()
            learner.server.finish()
        assert learner.recent_return >= 150
        assert learner.server.stats().learner_scalars["learner_steps"] == learner.steps
    assert float(net.observations.count) == learner.steps and float(net.rewards.variance) > 1.0


CHILD = """
import sys
sys.modules["torch"] = None  # any import of it fails
from memoire.nodes.settings import make_envs
from memoire.rl import Collector
with Collector(sys.argv[1], [make_envs(sys.argv[2], 2) for _ in range(2)], seed=1) as collector:
    print(collector.run())
"""


class Certain(ActorCritic):
    """Network that acts unlike the perceptrons with the same parameters."""

    def forward(self, observations):
        distribution, values = super().forward(observations)
        return Categorical(logits=3.0 * distribution.logits), values


@pytest.mark.parametrize(
    ("kind", "env"), [(ActorCritic, "CartPole-v1"), (ActorCritic, "Pendulum-v1"), (Certain, "CartPole-v1")]
)
def test_collectors_without_torch_ask_the_learner(kind, env):
    envs = make_envs(env, 1)
    net = mlp(envs, kind=kind, normalize_observations=True)
    with OnPolicyLearner("tcp://127.0.0.1:*", envs, net, 256, 32, policy="remote") as learner:
        command = [sys.executable, "-c", CHILD, learner.server.endpoint, env]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        ppo = learner.keep(PPO(learner.net, 1e-3, 2, 64))
        for _ in range(4):
            rollouts = learner.collect(60.0)
            assert set(rollouts.model_version) == {net.version}
            with torch.no_grad():
                logp = net(torch.from_numpy(rollouts["obs"]))[0].log_prob(torch.from_numpy(rollouts["action"]))
            np.testing.assert_allclose(rollouts["logp"], logp.numpy(), rtol=1e-4, atol=1e-5)
            ppo.update(rollouts)
            learner.publish()
        learner.server.finish()
        output, _ = child.communicate(timeout=60.0)
        assert child.returncode == 0 and "is_finished=True" in output
        assert learner.inference.stats().failures == 0 and learner.inference.stats().rows >= 4 * 256


class Pair(World):
    """Rank that runs as a thread, beside a second rank."""

    barrier, reports = threading.Barrier(2, timeout=20.0), [[0], [0]]

    def minimum(self, values):
        self.reports[self.rank] = list(values)
        self.barrier.wait()
        minima = [min(each) for each in zip(*self.reports, strict=True)]
        self.barrier.wait()
        return minima


FACTS = {"steps": 64, "iterations": 1, "version": 2, "settings": {"ranks": 1, "checkpoint_every": 1}}


def saved_learner(folder, rank=0, facts=FACTS):
    files = Checkpoints(folder, rank)
    files.save(1, mlp(make_envs("CartPole-v1", 1), hidden=(8,)), None, None, facts)
    files.close()


def begun(folder, world=None):
    envs = make_envs("CartPole-v1", 1)
    options = {"checkpoint": folder, "world": world or World()}
    return OnPolicyLearner("tcp://127.0.0.1:*", envs, mlp(envs, hidden=(8,)), 64, 16, **options)


def test_a_learner_that_is_started_again_goes_on_from_its_counts(tmp_path):
    saved_learner(tmp_path)
    with begun(tmp_path) as learner:
        assert (learner.steps, learner.iterations) == (64, 1) and learner.net.version > 2


def errors_of_two(folder):
    """Return the error of each of two ranks that begin with this folder, or None."""
    errors = {}

    def begin(rank):
        try:
            begun(folder, Pair(rank, 2)).close()
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return [errors.get(rank) for rank in range(2)]


@pytest.mark.parametrize(
    "facts",
    [{"steps": 1, "iterations": 1, "version": 1}, FACTS | {"settings": {"ranks": None, "checkpoint_every": 1}},
     FACTS | {"settings": {"ranks": 1, "checkpoint_every": "x"}}, FACTS | {"steps": None}, FACTS | {"iterations": []},
     FACTS | {"version": float("inf")}],
)  # fmt: skip
def test_a_checkpoint_that_lacks_a_fact_is_refused_by_name(tmp_path, facts):
    saved_learner(tmp_path, facts=facts)
    with pytest.raises(DataError, match=r"rank-0-1.safetensors is not a checkpoint of a learner"):
        begun(tmp_path)


def test_each_of_several_ranks_refuses_what_one_of_them_cannot_go_on_with(tmp_path):
    saved_learner(tmp_path / "fewer")
    for error in errors_of_two(tmp_path / "fewer"):
        assert isinstance(error, ParameterError) and "at most 1, the number of ranks" in str(error)
    for rank in range(2):
        saved_learner(tmp_path / "damaged", rank, FACTS | {"settings": {"ranks": 2, "checkpoint_every": 1}})
    path = tmp_path / "damaged" / "rank-1-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    first, second = errors_of_two(tmp_path / "damaged")
    assert isinstance(first, DataError) and "another rank cannot read its checkpoint" in str(first)
    assert isinstance(second, DataError) and str(path) in str(second)


def test_settings_that_do_not_fit_are_refused():
    envs = make_envs("CartPole-v1", 1)
    with pytest.raises(ParameterError, match="because max_lag is above 0"):
        OnPolicyLearner("tcp://127.0.0.1:*", envs, mlp(envs), max_lag=1)
    with pytest.raises(ParameterError, match="did you mean 'remote'"):
        OnPolicyLearner("tcp://127.0.0.1:*", envs, mlp(envs), policy="Remote")
    with pytest.raises(ParameterError, match="a multiple of the 3 ranks"):
        OnPolicyLearner("tcp://127.0.0.1:*", envs, mlp(envs), 64, world=World(0, 3))
    # Ranks on different machines use equal ports.
    assert [World(3, 4).port_offset, World(3, 4, local_rank=1).port_offset] == [3, 1]
    with pytest.raises(ParameterError, match="below .WORLD_SIZE"):
        World.from_environment({"RANK": "2", "WORLD_SIZE": "2"})
    learner = OnPolicyLearner("tcp://127.0.0.1:*", envs, mlp(envs), 64, 16, max_lag=2, correction="vtrace", seconds=0)
    assert PPO(learner.net).correction == "vtrace" and learner.is_over
    with pytest.raises(NotEnoughSamples, match="waiting for 64 more entries"):
        learner.collect(0.05)
    learner.close()


def rank_of(rank, port, results):
    """Train one of two ranks, four times on the entries of its own collectors."""
    import os

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    envs = make_envs("CartPole-v1", 1)
    net = mlp(envs, seed=rank, normalize_observations=True)
    with OnPolicyLearner("tcp://127.0.0.1:*", envs, net, 256, 32) as learner:
        ppo = learner.keep(PPO(learner.net, 1e-2, 4, 32, target_kl=0.02))
        with collecting(learner.server.endpoint, 1):
            for _ in range(4):
                rollouts = learner.collect(60.0)
                ppo.update(rollouts)
                learner.publish()
            learner.server.finish()
        try:
            learner.world.check_equal(entries=128 + rank)
            message = ""
        except Exception as error:
            message = str(error)
        state = {name: tensor.detach().numpy().tobytes() for name, tensor in net.state_dict().items()}
        results.put((rank, len(rollouts), net.version, state, message))
    torch.distributed.destroy_process_group()


def test_two_ranks_have_the_same_parameters_bit_by_bit():
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with held(1) as port:
        pass
    ranks = [context.Process(target=rank_of, args=(rank, port, results), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + 100.0
    outcomes = sorted(results.get(timeout=max(0.1, deadline - time.monotonic())) for _ in ranks)
    for rank in ranks:
        rank.join(20.0)
        assert rank.exitcode == 0
    first, second = outcomes
    assert first[1:3] == second[1:3] == (128, 5) and first[3] == second[3]
    assert "128 to 129 entries, and rank 0 has 128" in first[4] and "rank 1 has 129" in second[4]
