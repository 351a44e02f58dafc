"""Named arrays come back from bytes and files as they were; a policy in NumPy acts by them, or says what is wrong."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from memoire.errors import DataError, ParameterError, WrongModel
from memoire.models import tensors
from memoire.rl import weights
from memoire.rl.policies import LoadsModels, MlpPolicy, Moments, Policy


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


def test_arrays_come_back_as_they_were(tmp_path):
    given = net() | {
        "n": np.float64(3.5),
        "big": np.arange(4, dtype=">i8"),
        "flags": np.array([True, False]),
        "none": np.zeros((0, 2), np.int8),
    }
    weights.save(tmp_path / "a" / "w.safetensors", given)
    for found in (weights.unpack(weights.pack(given)), weights.load(tmp_path / "a" / "w.safetensors")):
        assert list(found) == list(given)
        for name, array in given.items():
            assert np.array_equal(found[name], array) and found[name].shape == np.shape(array)
    assert os.listdir(tmp_path / "a") == ["w.safetensors"]


def test_what_cannot_be_put_in_its_place_leaves_nothing_behind(tmp_path):
    path = tmp_path / "w.safetensors"
    (path / "in the way").mkdir(parents=True)
    with pytest.raises(ParameterError, match="this is a folder, and stays as it is"):
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
    policy = MlpPolicy(weights.pack(arrays), 1)
    assert np.array_equal(policy.act(OBS)["value"], policy.act(nested)["value"])
    assert isinstance(policy, Policy) and isinstance(policy, LoadsModels)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"policy.0.weight": None}, "has no 'policy.0.weight'"),
        ({"policy.1.bias": None}, "layer 1 of 'policy' in shapes"),
        ({"policy.1.weight": np.ones((3, 7), np.float32)}, "layer 1 of 'policy' in shapes"),
        (
            {"value.1.weight": np.ones((2, 8), np.float32), "value.1.bias": np.ones(2)},
            "value network that does not fit",
        ),
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
    with pytest.raises(ParameterError, match="loaded first"):
        MlpPolicy().act(OBS)
    with pytest.raises(ParameterError, match="of 4 numbers each"):
        MlpPolicy(weights.pack(net())).act(OBS[:, :2])


def test_moments_of_parts_are_those_of_the_whole():
    values = np.random.default_rng(0).normal(1000.0, 3.0, (100, 4))
    merged = Moments((4,))
    for part in (values[:10], values[:0], values[10:13], values[13:]):
        merged.merge(Moments.of(part))
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
    moments = Moments.of(np.array([-2.0, 2.0, 2.0, -2.0]))
    assert moments.scale(np.array([0.0, 4.0, -1e9])).tolist() == [0.0, 2.0, -10.0]


def test_observations_are_normalized_by_what_came_with_the_model():
    arrays, moments = net(), Moments.of(OBS * 5.0 + 2.0)
    normal = MlpPolicy(weights.pack(arrays | moments.arrays("observations")), 1).act(OBS)["value"]
    np.testing.assert_allclose(
        normal, MlpPolicy(weights.pack(arrays), 1).act(moments.normalize(OBS))["value"], rtol=1e-6
    )
