"""Environments by id, with float32 observations from results in old and new forms."""

import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from memoire.errors import EntryError
from memoire.rl.realtime import RealTimeEnv
from memoire.rl.spaces import default_action, float32_space, observation_in
from memoire.tmrl import rtgym
from memoire.tmrl.envs import GenericGymEnv
from memoire.tmrl.rtgym import DEFAULT_CONFIG_DICT
from memoire.tmrl.util import partial
from rlkit import Arm


class GymEnvironment(gymnasium.Env):
    """Environment with the results of Gym, before Gymnasium."""

    observation_space = spaces.Tuple(
        (spaces.Box(-1, 1, (1,), np.float64), spaces.Dict({"image": spaces.Box(0, 255, (2, 2), np.uint8)}))
    )
    action_space = spaces.Box(0.5, 2.0, (2,), np.float32)

    def __init__(self, info=None):
        self.info = info or {}

    def obs(self):
        return [0.25, {"image": np.ones((2, 2), np.uint8)}]

    def reset(self, seed=None, options=None):
        return self.obs()

    def step(self, action):
        return self.obs(), 1.0, True, self.info


CONFIG = {
    **DEFAULT_CONFIG_DICT, "interface": Arm, "time_step_duration": 0.01, "start_obs_capture": 0.01, "ep_max_length": 3,
    "act_buf_len": 4, "reset_act_buf": False, "benchmark": True, "benchmark_polyak": 0.2,
}  # fmt: skip


def test_an_environment_of_a_device_has_its_spaces_without_being_reset():
    env = partial(GenericGymEnv, id="real-time-gym-v0", gym_kwargs={"config": CONFIG})()
    assert env.action_space == spaces.Box(-2.0, 2.0, (1,), np.float32)
    assert env.observation_space.spaces[1] == spaces.Box(-1e6, 1e6, (2,), np.float32)
    assert env.observation_space.spaces[2:] == (env.action_space,) * 4
    assert isinstance(env.unwrapped, RealTimeEnv) and env.unwrapped.interface.sent == []


def test_a_device_runs_an_episode():
    env = GenericGymEnv(id="real-time-gym-v1", gym_kwargs={"config": CONFIG})
    obs, info = env.reset()
    assert env.observation_space.contains(obs) and info == {}
    assert default_action(env).tolist() == env.default_action.tolist() == [0.0]
    ends = []
    for _ in range(3):
        obs, reward, terminated, truncated, info = env.step(np.array([1.0]))
        assert env.observation_space.contains(obs)
        ends.append((terminated, truncated))
    assert ends == [(False, False), (False, False), (False, True)]
    assert set(env.unwrapped.benchmarks()) >= {"step_duration"}
    env.close()


def test_ids_are_registered_at_import_and_an_error_of_the_maker_keeps_class_and_sentence():
    code = (
        "import gymnasium, memoire.tmrl.rtgym as rtgym; from memoire.errors import *; import sys\n"
        "for name in rtgym.IDS: assert name in gymnasium.registry\n"
        "for config, kind, words in (({'interval': 1}, UnknownName, \"takes no 'interval'\"),\n"
        "                            ({'ep_max_length': 0}, ParameterError, 'ep_max_length must be')):\n"
        "    try: gymnasium.make('real-time-gym-ts-v1', config={**rtgym.DEFAULT_CONFIG_DICT, 'interface': list, **config})\n"
        "    except kind as error: assert type(error) is kind and words in str(error), repr(error)\n"
        "    else: raise SystemExit('it was made')"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert completed.returncode == 0, completed.stderr


def test_ids_that_somebody_else_registered_stay_theirs():
    rtgym.register()
    gymnasium.registry.pop("real-time-gym-v1")
    try:
        gymnasium.register("real-time-gym-v1", entry_point=GymEnvironment)
        rtgym.register()
        assert isinstance(GenericGymEnv("real-time-gym-v1").unwrapped, GymEnvironment)
    finally:
        gymnasium.registry.pop("real-time-gym-v1")
        rtgym.register()


@pytest.fixture
def old():
    gymnasium.register("memoire-old-v0", entry_point=GymEnvironment)
    yield "memoire-old-v0"
    gymnasium.registry.pop("memoire-old-v0")


def test_numbers_become_float32_arrays_and_other_dtypes_stay(old):
    env = GenericGymEnv(old)
    obs, _ = env.reset()
    assert (obs[0].dtype, obs[0].shape, obs[0][0]) == (np.float32, (1,), 0.25)
    assert obs[1]["image"].dtype == np.uint8
    assert env.observation_space.spaces[0].dtype == np.float32
    assert env.observation_space.contains(obs)


def test_answers_of_four_values_are_adapted(old):
    for info, ends in (({}, (True, False)), ({"TimeLimit.truncated": True}, (False, True))):
        env = GenericGymEnv(old, {"info": info})
        assert env.reset()[1] == {}
        assert env.step(None)[2:4] == ends


def test_a_device_rests_by_its_own_default_action_or_by_the_nearest_to_zero(old):
    assert GenericGymEnv(old).default_action.tolist() == [0.5, 0.5]

    class Plain:
        def __init__(self, space):
            self.action_space = space

    assert default_action(Plain(spaces.Discrete(3))) == 0
    assert default_action(Plain(spaces.MultiDiscrete([2, 3]))).tolist() == [0, 0]
    nested = spaces.Dict({"a": spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (1,))))})
    assert default_action(Plain(nested))["a"][0] == 0


def test_spaces_become_float32_in_all_parts():
    space = spaces.Dict({"x": spaces.Tuple((spaces.Box(-1, 1, (2,), np.float64), spaces.Discrete(2)))})
    converted = float32_space(space)
    assert converted["x"][0].dtype == np.float32 and converted["x"][1] == spaces.Discrete(2)


@pytest.mark.parametrize(
    ("value", "text"),
    [((1, 2, 3), "obs.*2 parts.*tuple of 3"), ((np.zeros(3), {}), r"obs\[0\].*shape \(1,\).*shape \(3,\)"),
     ((0.0, {"picture": 1}), r"obs\[1\].*parts called image"), (("x", {"image": 0}), r"obs\[0\].*numbers")],
)  # fmt: skip
def test_an_observation_that_does_not_fit_is_refused_with_the_part(value, text):
    with pytest.raises(EntryError, match=text):
        observation_in(float32_space(GymEnvironment.observation_space), value)
