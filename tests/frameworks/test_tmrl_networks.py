"""Tests of memoire.tmrl with torch: shared copies, actors, agents of TMRL 0.7, and batches as tensors."""

import functools

import gymnasium
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from memoire.errors import DataError, ParameterError  # noqa: E402
from memoire.rl import weights  # noqa: E402
from memoire.rl.memory import on_device  # noqa: E402
from memoire.rl.weights import read_model  # noqa: E402
from memoire.tmrl.actor import ActorModule  # noqa: E402
from memoire.tmrl.custom import MLPActorCritic, SpinupSacAgent  # noqa: E402
from memoire.tmrl.nn import copy_shared, no_grad  # noqa: E402

pytestmark = pytest.mark.torch


class Net(ActorModule):
    def __init__(self, observation_space, action_space):
        super().__init__(observation_space, action_space)
        self.layer = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))

    def act(self, obs, test=False):
        return self.layer(obs).numpy()


def test_a_shared_copy_follows_and_is_not_trained():
    net = Net("obs", "act")
    copy = no_grad(copy_shared(net))
    assert (copy.observation_space, copy.action_space) == ("obs", "act")
    assert not any(each.requires_grad for each in copy.parameters())
    assert all(each.requires_grad for each in net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    net.layer(torch.ones(4, 3)).sum().backward()
    net.layer(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    for (name, mine), (_, theirs) in zip(net.state_dict().items(), copy.state_dict().items(), strict=True):
        if name.endswith("num_batches_tracked"):
            continue
        assert mine.data_ptr() == theirs.data_ptr() and torch.equal(mine, theirs), name


def test_an_actor_needs_its_act():
    with pytest.raises(NotImplementedError):
        ActorModule(None, None).act(None)


def test_the_agent_of_tmrl_0_7_learns_by_any_actor_and_values_and_keeps_its_step_sizes():
    spaces = gymnasium.spaces.Tuple([gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Box(-1, 1, (1, 2))])
    actions = gymnasium.spaces.Box(-2, 2, (1,))
    agent = SpinupSacAgent(
        spaces, actions, "cpu", functools.partial(MLPActorCritic, hidden_sizes=(8,), activation=torch.nn.Tanh),
        0.9, 0.99, 0.1, 1e-1, 1e-2, 1e-3, optimizer_critic="SGD", l2_critic=0.5, betas_actor=(0.5, 0.6),
    )  # fmt: skip
    optimizers = agent.policy_optimizer, agent.critic_optimizer, agent.alpha_optimizer
    policy, critic, alpha = (each.param_groups[0] for each in optimizers)
    assert [each["lr"] for each in (policy, critic, alpha)] == [1e-1, 1e-2, 1e-3]
    assert (agent.gamma, agent.polyak, agent.alpha) == (0.9, 0.99, 0.1)
    assert isinstance(optimizers[1], torch.optim.SGD) and (critic["weight_decay"], policy["betas"]) == (0.5, (0.5, 0.6))
    obs, act = (torch.rand(16, 2), torch.rand(16, 1, 2)), torch.rand(16, 1)
    before = [each.clone() for each in agent.critic.parameters()]
    figures = agent.train((obs, act, torch.ones(16), obs, torch.ones(16), torch.zeros(16)))
    assert {"loss_actor", "loss_critic", "loss_entropy_coef", "entropy_coef"} == figures.keys()
    assert not any(torch.equal(*pair) for pair in zip(before, agent.critic.parameters(), strict=True))
    actor = agent.get_actor()
    assert isinstance(actor.net[1], torch.nn.Tanh) and actor(obs, with_logprob=False)[1] is None
    assert actions.contains(actor.act(tuple(each[:1] for each in obs), test=True))
    assert not torch.equal(actor(obs)[0], actor(obs)[0]), "outside of tests, actions are random"
    with pytest.raises(ParameterError, match="did you mean 'adam'"):
        SpinupSacAgent(spaces, actions, optimizer_actor="adm")
    with pytest.raises(ParameterError, match="no betas"):
        SpinupSacAgent(spaces, actions, betas_critic=(0, 0), optimizer_critic="sgd")


def test_batches_become_tensors_of_the_same_memory():
    arrays = (np.zeros((4, 2), np.float32), {"a": np.arange(4)})
    tensors = on_device(arrays, "cpu")
    tensors[0][1, 1] = 7.0
    assert arrays[0][1, 1] == 7.0 and tensors[1]["a"].dtype == torch.int64
    assert on_device(arrays, None) is arrays


def test_weights_of_torch_are_read_and_nothing_else(tmp_path):
    net, path = torch.nn.Linear(3, 2), tmp_path / "a.pth"
    torch.save(net.state_dict(), path)
    assert (weights.unpack(read_model(path))["weight"] == net.weight.detach().numpy()).all()
    torch.save(net, path)
    with pytest.raises(DataError, match="holds more than weights"):
        read_model(path)
    torch.save({"epoch": 3}, path)
    with pytest.raises(DataError, match="without tensors by name"):
        read_model(path)
