"""PPO with a memory: fragments are unrolled from their own start, and a task that needs a memory is learned."""

import threading

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from memoire.errors import ParameterError
from memoire.replay.rollouts import Rollouts
from memoire.rl import Collector, OnPolicyLearner, RecurrentActorCritic, RecurrentPPO, World, rollout_schema

pytestmark = pytest.mark.torch
LAST = 4


class Recall(gymnasium.Env):
    """A sign is shown at first, zeros follow; the last action earns 1 if it says which sign that was."""

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


def net_of(seed=0):
    torch.manual_seed(seed)
    return RecurrentActorCritic.of(Recall(), hidden=16)


def rollouts_of(net, lengths=(4, 3, 4), seed=0):
    """What a collector would record: each fragment with its own memory at the start."""
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
    fragments = len(lengths)
    facts = {
        "lengths": np.array(lengths),
        "terminated": np.zeros(fragments, bool),
        "truncated": np.ones(fragments, bool),
    }
    facts |= {"has_final": np.ones(fragments, bool), "bootstrap": np.full(fragments, np.nan, np.float32)}
    facts |= {"client": np.zeros((fragments, 16), np.uint8), "model_version": np.ones(count, np.int64)}
    facts |= {"age": np.zeros(count, np.float32)}
    schema = rollout_schema(Recall(), {"memory": (np.float32, (16,))})
    return Rollouts(schema, columns, {"obs": np.ones((fragments, 2), np.float32)}, facts), value


def test_fragments_are_unrolled_from_their_own_memory_as_they_were_acted():
    net = net_of()
    rollouts, value = rollouts_of(net)
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
        found = ppo.forward(batch, index)[0].log_prob(batch.action[index])
        np.testing.assert_allclose(found.detach(), rollouts["logp"][index], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_what_has_to_be_remembered_is_learned(mode):
    net = net_of()
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
    with pytest.raises(ParameterError, match="'remote' for a recurrent network"):
        OnPolicyLearner("tcp://127.0.0.1:*", Recall(), net_of(), 64, world=World())
