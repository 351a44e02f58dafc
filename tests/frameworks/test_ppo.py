"""PPO in torch: the policy in NumPy agrees with the network, corrections are named and right, gradients do what they say."""

import numpy as np
import pytest
import torch

import memoire.torch
from memoire.errors import ParameterError
from memoire.replay.rollouts import Rollouts
from memoire.replay.schema import Schema
from memoire.rl.networks import ActorCritic
from memoire.rl.onpolicy.ppo import PPO
from memoire.rl.policies import MlpPolicy, Moments

pytestmark = pytest.mark.torch
OBS = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)


def net_of(*, is_continuous=False, seed=0, **options):
    torch.manual_seed(seed)
    net = ActorCritic(3, 2, is_continuous=is_continuous, hidden=(16, 16), **options)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return net


def rollouts_of(net, *, count=256, lag=0, shift=0.0, seed=0, discount=(0.99,)):
    """A bandit: action 1 earns 1, action 0 nothing; fragments of four, every second one terminated."""
    random = np.random.default_rng(seed)
    obs = random.standard_normal((count, 3)).astype(np.float32)
    out = MlpPolicy(memoire.torch.body_of(net), 5, seed=seed).act(obs)
    schema = Schema({"obs": (np.float32, (3,)), "action": np.int64, "reward": np.float32, "logp": np.float32})
    columns = {"obs": obs, "action": out["action"], "reward": out["action"].astype(np.float32)}
    columns["logp"] = (out["logp"] + np.float32(shift)).astype(np.float32)
    fragments = count // 4
    is_end = np.arange(fragments) % 2 == 0
    facts = {"lengths": np.full(fragments, 4), "terminated": is_end, "truncated": ~is_end, "has_final": ~is_end}
    facts |= {"bootstrap": np.zeros(fragments, np.float32), "client": np.zeros((fragments, 16), np.uint8)}
    facts |= {"model_version": np.full(count, 5 - lag), "age": np.zeros(count, np.float32)}
    net.version = 5
    return Rollouts(schema, columns, {"obs": np.ones((fragments, 3), np.float32)}, facts, discount)


@pytest.mark.parametrize("is_continuous", [False, True])
def test_the_policy_in_numpy_agrees_with_the_network(is_continuous):
    net = net_of(is_continuous=is_continuous, normalize_observations=True)
    net.merge({"observations": Moments.of(OBS * 3.0 + 1.0)})
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
    """Entries of a policy that was e**3 times as sure of its actions: without a correction they weigh fully."""
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
    net.merge({"rewards": Moments.of(np.array([-4.0, 4.0]))})
    assert PPO(net, lam=0.0).prepared(rollouts_of(net, discount=(0.0,))).returns.max() == pytest.approx(0.25)
