"""Tests of SAC: densities of its policy, one step against its equations, learning, and checkpoints."""

import copy
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from memoire import Buffer, Schema
from memoire.errors import DataError, ParameterError
from memoire.rl import SAC, GaussianPolicy, try_policy, weights
from memoire.rl.saving import form_of, load_agent, save_agent, unsaved

pytestmark = pytest.mark.torch
OBS = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
ACT = gymnasium.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))


def new_agent(**options: Any) -> SAC:
    return SAC(OBS, ACT, **({"hidden": (16,), "seed": 0} | options))


def batch(size: int = 32, seed: int = 0) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.rand(*shape, generator=generator)  # noqa: E731
    return SimpleNamespace(
        obs=draw(size, 2), action=draw(size, 2), reward=draw(size), next_obs=draw(size, 2),
        discount=torch.full((size,), 0.9), importance=torch.ones(size),
    )  # fmt: skip


def test_the_density_of_an_action_is_that_of_its_transformed_gaussian() -> None:
    torch.manual_seed(1)
    policy = GaussianPolicy(OBS, ACT, hidden=(8,))
    with torch.no_grad():
        action, logp = policy(torch.zeros(200_000, 2))
    unit = (action - policy.low) / (policy.high - policy.low)
    assert (unit >= 0).all() and (unit <= 1).all()
    # The mean of 1 / density over samples is the volume of (-1, 1) ** 2, in which tanh lies.
    assert float((-logp).exp().mean()) == pytest.approx(4.0, rel=0.1)


def test_a_space_without_bounds_is_refused() -> None:
    with pytest.raises(ParameterError, match="finite bounds"):
        GaussianPolicy(OBS, gymnasium.spaces.Box(-np.inf, np.inf, (1,)))


def values(critic: torch.nn.Module, which: int, inputs: Any) -> np.ndarray[Any, Any]:
    """Return the values of one twin, computed in NumPy."""
    arrays = [each.detach().double().numpy()[which] for each in critic.parameters()]
    weights_of, biases = arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]
    for depth, (weight, bias) in enumerate(zip(weights_of, biases, strict=True), start=1):
        inputs = inputs @ weight + bias
        inputs = np.maximum(inputs, 0.0) if depth < len(weights_of) else inputs
    return inputs[:, 0]


def test_a_step_has_the_losses_of_its_equations_and_moves_targets_as_they_say() -> None:
    agent, entries = new_agent(polyak=0.9, alpha=0.5), batch()
    entries.discount[::4] = 0.0  # terminal states
    with torch.no_grad():  # targets that differ from the critics
        for parameter in agent.target.parameters():
            parameter.add_(0.1)
    critic, target, policy = (copy.deepcopy(each) for each in (agent.critic, agent.target, agent.policy))
    torch.manual_seed(7)
    with torch.no_grad():
        (next_action, next_logp), (action, logp) = policy(entries.next_obs), policy(entries.obs)
    torch.manual_seed(7)
    figures = agent.train(entries)

    numbers = {name: np.asarray(each, np.float64) for name, each in vars(entries).items()}
    beside = np.hstack([numbers["next_obs"], next_action.double().numpy()])
    least = np.minimum(values(target, 0, beside), values(target, 1, beside))
    wanted = numbers["reward"] + numbers["discount"] * (least - 0.5 * next_logp.double().numpy())
    taken = np.hstack([numbers["obs"], numbers["action"]])
    errors = [values(critic, which, taken) - wanted for which in (0, 1)]
    assert float(figures["loss_critic"]) == pytest.approx(np.mean(errors[0] ** 2 + errors[1] ** 2), rel=1e-4)
    assert figures["priorities"].numpy() == pytest.approx((errors[0] + errors[1]) / 2, abs=1e-4)

    beside = np.hstack([numbers["obs"], action.double().numpy()])  # the actor's loss uses the updated critics
    least = np.minimum(values(agent.critic, 0, beside), values(agent.critic, 1, beside))
    assert float(figures["loss_actor"]) == pytest.approx(np.mean(0.5 * logp.double().numpy() - least), rel=1e-4)
    mine, before, now = (list(each.parameters()) for each in (agent.critic, target, agent.target))
    for one, former, moved in zip(mine, before, now, strict=True):
        assert torch.allclose(moved, 0.9 * former + 0.1 * one, atol=1e-6)


@pytest.mark.parametrize(("wanted", "direction"), [(10.0, 1.0), (-10.0, -1.0)])
def test_alpha_grows_while_the_policy_is_less_random_than_wanted_and_falls_else(wanted: float, direction: int) -> None:
    agent = new_agent(target_entropy=wanted, alpha=0.5, rate=1e-3)
    assert float(agent.train(batch())["entropy_coef"]) == pytest.approx(0.5 * np.exp(1e-3 * direction), rel=1e-5)
    assert new_agent().target_entropy == -2.0


def test_a_tuple_of_a_users_memory_trains_too() -> None:
    entries = batch()
    rows = entries.obs, entries.action, entries.reward, entries.next_obs, torch.zeros(32)
    figures = new_agent(gamma=0.9).train(rows)
    assert "priorities" not in figures and {"loss_actor", "loss_critic"} <= figures.keys()
    with pytest.raises(ParameterError, match=r"gamma must be a number in \[0, 1\]: batches that are tuples"):
        new_agent().train(rows)


def test_a_checkpoint_holds_networks_optimizers_and_random_numbers(tmp_path: Path) -> None:
    agent = new_agent()
    for _ in range(3):
        agent.train(batch())
    save_agent(tmp_path, agent, form_of(new_agent()), {"epoch": 1})
    ahead = {name: float(value) for name, value in agent.train(batch()).items() if name != "priorities"}
    torch.manual_seed(5)
    again = new_agent(seed=None)
    assert load_agent(tmp_path, again) == {"epoch": 1} and unsaved(agent) == []
    same = {name: float(value) for name, value in again.train(batch()).items() if name != "priorities"}
    assert same == ahead
    for one, other in zip(agent.policy.parameters(), again.policy.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(DataError, match=r"holds 'critic\.weights\.0' as .*, but this agent has"):
        load_agent(tmp_path, SAC(OBS, ACT, hidden=(8,)))


def test_a_network_that_is_made_while_training_is_named_and_refused(tmp_path: Path) -> None:
    agent = new_agent()
    form = form_of(agent)
    agent.late = torch.nn.Linear(1, 1)  # type: ignore[attr-defined]
    assert save_agent(tmp_path, agent, form, {}) == ["late"]
    with pytest.raises(DataError, match="holds 'late' as a module of .* create it in the agent's __init__"):
        load_agent(tmp_path, new_agent())


class Reach(gymnasium.Env[Any, Any]):
    """Environment of one step, which rewards an action near the observation."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.obs = self.random.uniform(-0.8, 0.8, 1).astype(np.float32)
        return self.obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, np.float32), -abs(float(action[0] - self.obs[0])), True, False, {}


def test_it_learns_to_reach_and_its_file_acts_without_a_server(tmp_path: Path) -> None:
    env = Reach()
    agent = SAC(env.observation_space, env.action_space, hidden=(64,), rate=3e-3, alpha=0.01,
                learn_entropy_coef=False, seed=0)  # fmt: skip
    buffer = Buffer(Schema.from_env(env), capacity=5000, seed=0)
    writer = buffer.writer()
    for step in range(800):
        obs, _ = env.reset()
        action = agent.policy.act(torch.from_numpy(obs)[None])
        next_obs, reward, terminated, truncated, info = env.step(action)
        writer.step(obs, action, reward, terminated, truncated, next_obs, info)
        if step >= 100:
            agent.train(buffer.sample(64).to("cpu"))
    path = tmp_path / "policy.safetensors"
    weights.save(path, {name: tensor.numpy() for name, tensor in agent.policy.state_dict().items()})
    results = try_policy(env, functools.partial(GaussianPolicy, hidden=(256, 256)), path, 50)
    assert np.mean([each.returned for each in results]) > -0.1
