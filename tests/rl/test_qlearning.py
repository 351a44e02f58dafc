"""The demo's learner computes what its papers say, and learns what an end and a cut are worth."""

import contextlib
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

import memoire
from memoire.rl.demo.actor import Player
from memoire.rl.demo.qlearning import Adam, DoubleQ, LearningSettings, Network, act

# ------------------------------------------------------------------------------------------------- the arithmetic


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.integers(1, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_the_gradient_is_what_small_changes_of_the_weights_do(widths: list[int], rows: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    network = Network(widths, seed)
    network.vector[...] = random.normal(size=network.vector.shape)
    observations = random.normal(size=(rows, widths[0])).astype(np.float32)
    slope = random.normal(size=(rows, widths[-1])).astype(np.float32)
    gradient = network.gradient(network.activations(observations), slope)

    def loss(vector: np.ndarray) -> tuple[float, list[np.ndarray]]:
        """The same network in float64, layer by layer, and which ReLUs are open."""
        output, start, signs = observations.astype(np.float64), 0, []
        for depth, (size, width) in enumerate(zip(widths[:-1], widths[1:], strict=True), start=1):
            weights = vector[start : start + size * width].reshape(size, width)
            output = output @ weights + vector[start + size * width : start + (size + 1) * width]
            if depth < len(widths) - 1:
                signs.append(output > 0)
                output = np.maximum(output, 0.0)
            start += (size + 1) * width
        return float((output * slope).sum()), signs

    np.testing.assert_allclose(network(observations), network.activations(observations)[-1])
    for place in range(len(network.vector)):
        step = np.zeros(len(network.vector))
        step[place] = 1e-6
        (above, one), (below, other) = loss(network.vector + step), loss(network.vector - step)
        if all((a == b).all() for a, b in zip(one, other, strict=True)):  # no kink between them
            assert gradient[place] == pytest.approx((above - below) / 2e-6, rel=1e-3, abs=1e-3)


def test_adam_takes_the_steps_of_its_paper() -> None:
    vector = np.array([1.0, -2.0, 3.0], np.float32)
    adam = Adam(vector, 0.1)
    expected, mean, square = vector.astype(np.float64), np.zeros(3), np.zeros(3)
    for number in range(1, 20):
        gradient = np.array([np.sin(number), 1.0, -0.1 * number], np.float32)
        adam.step(gradient)
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        expected -= 0.1 * (mean / (1 - 0.9**number)) / (np.sqrt(square / (1 - 0.999**number)) + 1e-8)
    np.testing.assert_allclose(vector, expected, rtol=1e-4)


def test_weights_travel_as_bytes_and_fit_only_the_same_sizes() -> None:
    one, other = Network((4, 8, 2), 1), Network((4, 8, 2), 2)
    other.load(one.to_bytes())
    np.testing.assert_array_equal(one.vector, other.vector)
    np.testing.assert_array_equal(one.layers[1][0], other.layers[1][0])
    before = other.vector.copy()
    with pytest.raises(ValueError, match="another environment"):
        other.load(Network((4, 9, 2)).to_bytes())
    np.testing.assert_array_equal(other.vector, before)


def batch_of(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "obs": random.normal(size=(rows, 3)),
        "next_obs": random.normal(size=(rows, 3)),
        "action": random.integers(2, size=rows),
        "reward": random.normal(size=rows).astype(np.float32),
        "discount": random.choice([0.0, 0.9], rows).astype(np.float32),
        "importance": random.random(rows).astype(np.float32),
    }


def test_the_network_chooses_and_the_target_judges() -> None:
    learner = DoubleQ(3, 2, settings=LearningSettings(reward_scale=0.5), seed=0)
    learner.target.vector[...] = Network(learner.network.sizes, 9).vector
    batch = batch_of(6)
    value, judged = learner.network(batch["obs"]), learner.target(batch["next_obs"])
    chosen = learner.network(batch["next_obs"]).argmax(axis=1)
    expected = [
        value[row, batch["action"][row]]
        - (0.5 * batch["reward"][row] + batch["discount"][row] * judged[row, chosen[row]])
        for row in range(6)
    ]
    np.testing.assert_allclose(learner.learn(batch), np.array(expected) / 0.5, rtol=1e-4, atol=1e-5)


def test_a_batch_is_learned_in_minibatches_and_every_error_comes_back_in_its_place() -> None:
    learner = DoubleQ(3, 2, settings=LearningSettings(minibatch_size=4, rate=0.0), seed=0)
    batch = batch_of(10)
    errors = learner.learn(batch)
    assert learner.steps == 3
    np.testing.assert_allclose(
        errors[4:8], learner.learn({name: column[4:8] for name, column in batch.items()}), rtol=1e-5
    )


def test_samples_without_importance_change_nothing() -> None:
    one, other = DoubleQ(3, 2, seed=0), DoubleQ(3, 2, seed=0)
    first, second = batch_of(8, 0), batch_of(8, 1)
    for batch in (first, second):
        batch["importance"][4:] = 0.0
    for name in ("obs", "reward", "action"):
        second[name][:4] = first[name][:4]
    second["next_obs"][:4], second["discount"][:4] = first["next_obs"][:4], first["discount"][:4]
    second["importance"][:4] = first["importance"][:4]
    one.learn(first)
    other.learn(second)
    np.testing.assert_allclose(one.network.vector, other.network.vector, rtol=1e-4, atol=1e-7)


def test_actions_are_the_best_known_ones_but_for_a_share_of_random_ones() -> None:
    network, random = Network((3, 4), 0), np.random.default_rng(0)
    observations = random.normal(size=(4000, 3)).astype(np.float32)
    best = network(observations).argmax(axis=1)
    np.testing.assert_array_equal(act(network, observations, 0.0, random), best)
    assert (act(network, observations, 0.4, random) != best).mean() == pytest.approx(0.4 * 3 / 4, abs=0.04)


# --------------------------------------------------------------------------------------------- targets at the end


class Corridor(gymnasium.Env[np.ndarray, int]):
    """Four rooms in a row, whatever one does; a reward of 1 in each. Behind the last one is the end, or the first again.

    With gamma 0.5: an end is worth nothing, so that the rooms are worth 1.875, 1.75, 1.5 and 1; without one every room is
    worth 2, however often the walk is cut off in between.
    """

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, has_end: bool) -> None:
        self.has_end, self.steps = has_end, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.room(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        is_end = self.has_end and self.steps == 4
        return self.room(), 1.0, is_end, not self.has_end and self.steps == 7, {}

    def room(self) -> np.ndarray:
        return np.eye(4, dtype=np.float32)[self.steps % 4]


def corridors(has_end: bool) -> SyncVectorEnv:
    return SyncVectorEnv([lambda: Corridor(has_end)] * 3, autoreset_mode=AutoresetMode.SAME_STEP)


PARAMETERS: dict[str, Any] = {"multi_step": 3, "discount": 0.5}
SMALL = LearningSettings(hidden=(32,), rate=3e-3, minibatch_size=64, batch_size=64, reward_scale=1.0, decay=1500)


@contextlib.contextmanager
def in_process(envs: SyncVectorEnv, steps: int) -> Iterator[Iterator[memoire.Batch]]:
    """Batches from a Buffer in this process."""
    buffer = memoire.Buffer(memoire.Schema.from_env(envs), capacity=2000, seed=0, **PARAMETERS)
    player = Player(envs, buffer.writer(envs), Network((4, 2), 0), epsilon=1.0, seed=0)

    def batches() -> Iterator[memoire.Batch]:
        for _ in range(40):
            player.step()
        for _ in range(steps):
            player.step()
            yield buffer.sample(64)

    yield batches()


@contextlib.contextmanager
def over_the_network(envs: SyncVectorEnv, steps: int) -> Iterator[Iterator[memoire.Batch]]:
    """Batches from a server, of caches that a client pushed."""
    with (
        memoire.Server("tcp://127.0.0.1:0", memoire.Schema.from_env(envs), seed=0, **PARAMETERS) as server,
        memoire.connect(server.endpoint, seed=0, capacity=2000) as client,
    ):
        server.configure(samples_per_insert=64 / 3, cache_size=64)
        client.update(100.0)
        player = Player(envs, client.writer(envs), Network((4, 2), 0), epsilon=1.0, seed=0)

        def batches() -> Iterator[memoire.Batch]:
            for _ in range(40):
                player.step()
            for _ in range(steps):
                player.step()
                yield server.get_batch(64, timeout=100.0)

        yield batches()


@pytest.mark.parametrize("source", [in_process, pytest.param(over_the_network, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("has_end", "values"), [(True, [1.875, 1.75, 1.5, 1.0]), (False, [2.0, 2.0, 2.0, 2.0])])
def test_an_end_is_worth_nothing_and_a_cut_changes_nothing(source: Any, has_end: bool, values: list[float]) -> None:
    envs = corridors(has_end)
    learner = DoubleQ(4, 2, settings=SMALL, seed=0)
    with source(envs, 1200) as batches:
        for batch in batches:
            batch.update_priorities(learner.learn(batch))
    envs.close()
    found = learner.network(np.eye(4, dtype=np.float32))
    np.testing.assert_allclose(found, np.repeat(np.array(values)[:, None], 2, axis=1), atol=0.06)
