"""Tests of PPO in torch: feed-forward and recurrent networks, and the placement of ranks."""

import threading

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import memoire.torch
from memoire.errors import ParameterError
from memoire.replay.rollouts import Rollouts
from memoire.replay.schema import Schema
from memoire.rl import Collector, OnPolicyLearner, RecurrentActorCritic, RecurrentPPO, World, rollout_schema
from memoire.rl.networks import ActorCritic
from memoire.rl.policies import MlpPolicy, Moments
from memoire.rl.ppo import PPO

pytestmark = pytest.mark.torch
OBS = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)


def net_of(*, is_continuous=False, seed=0, **options):
    torch.manual_seed(seed)
    net = ActorCritic(3, 2, is_continuous=is_continuous, hidden=(16, 16), **options)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return net


def facts_of(lengths, terminated, bootstrap, version):
    """Return the facts of fragments, of which those that did not terminate were truncated."""
    fragments, count = len(lengths), sum(lengths)
    return {
        "lengths": np.array(lengths), "terminated": terminated, "truncated": ~terminated, "has_final": ~terminated,
        "bootstrap": np.full(fragments, bootstrap, np.float32), "client": np.zeros((fragments, 16), np.uint8),
        "model_version": np.full(count, version), "age": np.zeros(count, np.float32),
    }  # fmt: skip


def rollouts_of(net, *, count=256, lag=0, shift=0.0, seed=0, discount=(0.99,)):
    """Return rollouts of a bandit: action 1 earns 1, action 0 nothing; every second fragment of four terminates."""
    random = np.random.default_rng(seed)
    obs = random.standard_normal((count, 3)).astype(np.float32)
    out = MlpPolicy(memoire.torch.body_of(net), 5, seed=seed).act(obs)
    schema = Schema({"obs": (np.float32, (3,)), "action": np.int64, "reward": np.float32, "logp": np.float32})
    columns = {"obs": obs, "action": out["action"], "reward": out["action"].astype(np.float32)}
    columns["logp"] = (out["logp"] + np.float32(shift)).astype(np.float32)
    is_end = np.arange(count // 4) % 2 == 0
    net.version = 5
    final = {"obs": np.ones((len(is_end), 3), np.float32)}
    return Rollouts(schema, columns, final, facts_of(np.full(len(is_end), 4), is_end, 0.0, 5 - lag), discount)


@pytest.mark.parametrize("is_continuous", [False, True])
def test_the_policy_in_numpy_agrees_with_the_network(is_continuous):
    net = net_of(is_continuous=is_continuous, normalize_observations=True)
    net.merge({"observations": Moments.from_values(OBS * 3.0 + 1.0)})
    out = MlpPolicy(memoire.torch.body_of(net), 1, seed=0).act(OBS)
    with torch.no_grad():
        distribution, values = net(torch.from_numpy(OBS))
        logp = distribution.log_prob(torch.from_numpy(out["action"]))
    np.testing.assert_allclose(out["value"], values.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out["logp"], logp.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("correction", [None, "none", "decoupled", "vtrace"])
def test_an_update_makes_what_earned_more_likely(correction):
    net = net_of()
    ppo = PPO(net, rate=3e-3, epochs=8, minibatch=64, correction=correction, seed=0)
    before = net(torch.from_numpy(OBS))[0].probs[:, 1].mean()
    for seed in range(5):
        figures = ppo.update(rollouts_of(net, seed=seed, discount=(0.0,)))
    after = net(torch.from_numpy(OBS))[0].probs[:, 1].mean()
    assert after > before + 0.1 and figures["lag_max"] == 0.0
    assert set(figures) == {
        "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm", "explained_variance",
        "lag_mean", "lag_max",
    }  # fmt: skip
    assert figures["explained_variance"] <= 1.0 and 0.0 <= figures["clip_fraction"] <= 1.0


def test_old_rollouts_need_a_correction_by_name():
    net = net_of()
    with pytest.raises(ParameterError, match="entries up to 2 versions old"):
        PPO(net).update(rollouts_of(net, lag=2))
    with pytest.raises(ParameterError, match="'vtrace'"):
        PPO(net, correction="vtrac")
    net.correction = "none"
    assert PPO(net).update(rollouts_of(net, lag=2))["lag_mean"] == 2.0


def test_what_the_present_policy_would_hardly_do_weighs_little():
    """Entries come from a policy e**3 times as sure of its actions; without a correction they weigh fully."""
    moved = {}
    for correction in ("none", "decoupled", "vtrace"):
        net = net_of()
        batch = PPO(net, correction=correction).prepared(rollouts_of(net, lag=1, shift=3.0))
        moved[correction] = float((batch.weight * batch.advantage).abs().mean())
        is_around_the_start = np.allclose(batch.logp, rollouts_of(net)["logp"], atol=1e-4)
        assert is_around_the_start == (correction != "none")
    assert moved["decoupled"] < 0.1 * moved["none"] and moved["vtrace"] < 0.1 * moved["none"]


def test_a_divergence_ends_the_update():
    steps = {}
    for target in (None, 1e-9):
        net = net_of()
        ppo = PPO(net, rate=1e-2, epochs=5, minibatch=64, target_kl=target, seed=0)
        ppo.update(rollouts_of(net))
        steps[target] = int(ppo.optimizer.state[next(net.parameters())]["step"])
    assert steps == {None: 20, 1e-9: 4}


def test_tensors_are_the_rollouts_own_memory():
    net = net_of()
    rollouts = rollouts_of(net)
    batch = PPO(net).prepared(rollouts)
    assert batch.obs.data_ptr() == rollouts["obs"].ctypes.data
    assert batch.logp.data_ptr() == rollouts["logp"].ctypes.data


def test_rewards_are_scaled_by_the_spread_of_discounted_sums():
    net = net_of(normalize_rewards=True)
    net.merge({"rewards": Moments.from_values(np.array([-4.0, 4.0]))})
    assert PPO(net, lam=0.0).prepared(rollouts_of(net, discount=(0.0,))).returns.max() == pytest.approx(0.25)


LAST = 4


class Recall(gymnasium.Env):
    """Environment that shows a sign, then zeros; the last action earns 1 if it names the sign."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.sign = 0, int(self.np_random.integers(2))
        return np.array([2 * self.sign - 1, 0], np.float32), {}

    def step(self, action):
        self.t += 1
        reward = float(self.t == LAST and action == self.sign)
        return np.array([0, self.t / LAST], np.float32), reward, self.t == LAST, False, {}


def envs_of(count=4, mode=AutoresetMode.NEXT_STEP):
    return SyncVectorEnv([Recall] * count, autoreset_mode=mode)


def recurrent_net(seed=0):
    torch.manual_seed(seed)
    return RecurrentActorCritic.for_env(Recall(), hidden=16)


def rollouts_of_recurrent(net, lengths=(4, 3, 4), seed=0):
    """Return rollouts as a collector records them: each fragment starts with its own memory."""
    random, count = np.random.default_rng(seed), sum(lengths)
    obs = random.standard_normal((count, 2)).astype(np.float32)
    memory, logp, value, at = np.zeros((count, 16), np.float32), np.zeros(count, np.float32), np.zeros(count), 0
    action = random.integers(0, 2, count)
    for fragment, length in enumerate(lengths):
        known = torch.full((1, 16), 0.1 * fragment)
        for _ in range(length):
            memory[at] = known.numpy()
            with torch.no_grad():
                distribution, values, known = net(torch.from_numpy(obs[at : at + 1]), known)
            logp[at], value[at] = distribution.log_prob(torch.from_numpy(action[at : at + 1])), values
            at += 1
    columns = {"obs": obs, "action": action, "reward": np.ones(count, np.float32), "logp": logp, "memory": memory}
    schema = rollout_schema(Recall(), {"memory": (np.float32, (16,))})
    facts = facts_of(lengths, np.zeros(len(lengths), bool), np.nan, 1)
    return Rollouts(schema, columns, {"obs": np.ones((len(lengths), 2), np.float32)}, facts), value


def test_fragments_are_unrolled_from_their_own_memory_as_they_were_acted():
    net = recurrent_net()
    rollouts, value = rollouts_of_recurrent(net)
    ppo = RecurrentPPO(net, minibatch=4, gamma=0.99, seed=0)
    with torch.no_grad():
        distribution, values, final = ppo.evaluate(rollouts)
        logp = distribution.log_prob(torch.from_numpy(rollouts["action"]))
    np.testing.assert_allclose(logp, rollouts["logp"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(values, value, rtol=1e-4, atol=1e-6)
    assert final.shape == (3,)
    seen = np.sort(np.concatenate(list(ppo.minibatches(rollouts))))
    np.testing.assert_array_equal(seen, np.arange(11))
    batch = ppo.prepared(rollouts)
    for index in ppo.minibatches(rollouts):
        replayed = ppo.forward(batch, index)[0].log_prob(batch.action[index])
        np.testing.assert_allclose(replayed.detach(), rollouts["logp"][index], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_what_has_to_be_remembered_is_learned(mode):
    net = recurrent_net()
    options = {"policy": "remote", "seconds": 60.0, "discount": 1.0}
    with OnPolicyLearner("tcp://127.0.0.1:*", Recall(), net, 512, 64, **options) as learner:
        ppo = learner.keep(RecurrentPPO(learner.net, 3e-3, 8, 128, entropy_coef=0.01, seed=0))
        collector = Collector(learner.server.endpoint, [envs_of(8, mode) for _ in range(2)], seed=0)
        running = threading.Thread(target=collector.run, daemon=True)
        running.start()
        while learner.recent_return < 0.95 and not learner.is_over:
            rollouts = learner.collect(60.0)
            starts = np.cumsum(rollouts.lengths) - rollouts.lengths
            begins = rollouts["obs"][starts, 0] != 0
            assert begins.any() and not rollouts["memory"][starts[begins]].any(), "nothing is known at first"
            assert rollouts["memory"][rollouts["obs"][:, 0] == 0].any(1).all(), "and something afterwards"
            ppo.update(rollouts)
            learner.publish()
        learner.server.finish()
        running.join(30.0)
        collector.close()
    assert learner.recent_return >= 0.95, "guesses return 0.5"


def test_a_recurrent_network_acts_at_the_learner_only():
    with pytest.raises(ParameterError, match="'remote', because collectors cannot compute a recurrent network"):
        OnPolicyLearner("tcp://127.0.0.1:*", Recall(), recurrent_net(), 64, world=World())


GLOO, NCCL = "gloo", "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("devices", "device", "backend"), [(0, "cpu", GLOO), (1, "cpu", GLOO), (2, "cuda:1", NCCL), (8, "cuda:1", NCCL)]
)
def test_nccl_is_chosen_if_each_rank_of_a_machine_has_a_gpu_and_one_learner_needs_no_torchrun(devices, device, backend):
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert World.rank_and_backend(environment, devices) == (World(3, 4, device), backend)
    assert World.rank_and_backend({}, devices)[0].device == ("cuda:0" if devices else "cpu")
    assert World.rank_and_backend({}, 0) == (World(), GLOO)
