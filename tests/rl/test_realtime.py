"""Real-time environments: steps end on time, late steps are counted by cause, and no device is left moving."""

import math
import os
import threading

import numpy as np
import pytest
from gymnasium import spaces

from memoire.errors import MemoireTimeout, ParameterError, UnknownName, WrongType
from memoire.rl import realtime
from memoire.rl.realtime import DEFAULTS, DummyDrone, RealTimeEnv, RealTimeInterface
from memoire.rl.step_clock import DURATIONS
from rlkit import Arm


class VirtualClock:
    """Clock that advances by `sleep`, and not by itself."""

    def __init__(self, now=100.0):
        self.now = now

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def virtual(**config):
    clock = VirtualClock()
    slow = config.pop("slow", None)
    defaults = {"interface": Arm, "interface_kwargs": {"clock": clock, "slow": slow and (lambda n: slow(clock, n))}}
    env = RealTimeEnv({**defaults, "async_threading": False, **config}, clock=clock, sleep=clock.sleep)
    return env, clock, env.interface


def test_steps_follow_each_other_without_a_gap_and_controls_go_out_at_their_begin():
    env, clock, arm = virtual(time_step_duration=0.1, start_obs_capture=0.1)
    env.reset()
    for action in (1.0, 2.0, -1.0):
        clock.now += 0.07  # the policy computes
        env.step(np.array([action]))
    assert arm.sent == [(100.0, 0.0), (100.1, 1.0), (100.2, 2.0), (100.3, -1.0)]
    assert arm.read_at == [100.1, 100.2, 100.3]
    assert env.times.steps == 3 and sum(env.times.late.values()) == 0
    assert math.isclose(env.times.figures()["step_seconds"], 0.1)


def test_the_action_buffer_is_filled_anew_or_goes_on_with_the_default_action():
    for is_reset, expected in ((True, [0.0, 0.0, 0.0]), (False, [1.0, 2.0, 0.0])):
        env, *_ = virtual(act_buf_len=3, reset_act_buf=is_reset)
        env.reset()
        env.step([1.0])
        env.step([2.0])
        obs, _ = env.reset()
        assert [float(part[0]) for part in obs[2:]] == expected


def test_breaks_are_no_fault_of_the_policy_and_no_step():
    env, clock, arm = virtual(time_step_duration=0.1, start_obs_capture=0.1)
    env.reset()
    env.unwrapped.wait()  # Real-Time Gym calls wait, too
    clock.now += 0.5
    env.step([1.0])
    clock.now += 1.5  # no policy computes for 15 steps
    env.step([1.0])
    assert env.times.late == {"policy": 0, "environment": 0, "pause": 2}
    assert env.times.steps == 0 and env.times.late_share == 0.0
    assert [value for _, value in arm.sent] == [0.0, 0.0, 1.0, 1.0]


def test_wait_on_done_has_the_device_wait():
    env, _, arm = virtual(ep_max_length=1, wait_on_done=True)
    env.reset()
    env.step([1.0])
    assert [value for _, value in arm.sent] == [0.0, 0.0], "an action that ends an episode would come after its end"


@pytest.mark.parametrize(("is_last_kept", "sent"), [(False, [0.0, 1.0, 0.0, 3.0]), (True, [0.0, 1.0, 2.0, 3.0])])
def test_the_action_that_ends_an_episode_is_sent_by_the_reset_or_replaced_by_the_default_one(is_last_kept, sent):
    for length in (0, 2):  # lengths of the action buffer
        env, _, arm = virtual(ep_max_length=2, act_buf_len=length, reset_act_buf=False, last_act_on_reset=is_last_kept)
        env.reset()
        env.step([1.0])
        assert [float(part[0]) for part in env.step([2.0])[0][2:]] == [1.0, 2.0][:length]
        assert [float(part[0]) for part in env.reset()[0][2:]] == [1.0, sent[2]][:length]
        env.step([3.0])
        assert [value for _, value in arm.sent] == sent


def test_settings_are_changed_from_the_next_time_step_on():
    env, clock, arm = virtual(time_step_duration=0.1, start_obs_capture=0.1, ep_max_length=9)
    env.reset()
    env.set_time_step_duration(0.2, 0.5)
    env.set_start_obs_capture(0.15)
    with pytest.raises(ParameterError, match="time_step_duration must be a number from 0"):
        env.set_time_step_duration(-1.0)
    for _ in range(2):
        env.step([1.0])
    assert [round(at, 6) for at, _ in arm.sent] == [100.0, 100.1, 100.3]
    env.set_ep_max_length(3)
    assert env.step([1.0])[2:4] == (False, True)
    env.set_default_action([0.5])
    env.reset()
    assert arm.sent[-1][1] == env.default_action[0] == 0.5


def test_by_turns_an_observation_shows_what_the_action_led_to():
    env, clock, arm = virtual(real_time=False, time_step_duration=0.1, start_obs_capture=0.05)
    env.reset()
    clock.now += 7.0
    env.step([1.0])
    assert (arm.sent, arm.read_at, round(clock.now, 6)) == ([(107.0, 1.0)], [107.05], 107.1)


def test_benchmarks_have_the_names_of_real_time_gym():
    env, clock, _ = virtual(benchmark=True, benchmark_polyak=0.5, time_step_duration=0.1, start_obs_capture=0.1)
    env.reset()
    for seconds in (0.02, 0.04):
        clock.now += seconds
        env.step([0.0])
    rows = env.benchmarks()
    assert set(rows) == {
        "time_step_duration", "step_duration", "join_duration", "inference_duration", "send_control_duration",
        "get_obs_duration",
    }  # fmt: skip
    assert rows["inference_duration"] == pytest.approx((0.03, 0.01))
    assert rows["time_step_duration"] == pytest.approx((0.1, 0.0))
    with pytest.raises(ParameterError, match="benchmarks.. needs .benchmark.: True"):
        virtual()[0].benchmarks()


def test_a_trace_has_when_each_duration_began_and_ended():
    env, clock, _ = virtual(benchmark=True, benchmark_type="trace", time_step_duration=0.1, start_obs_capture=0.1)
    env.reset()
    for seconds in (0.02, 0.04):
        clock.now += seconds
        env.step([0.0])
    rows = env.benchmarks()
    assert set(rows["deltas"]) == set(DURATIONS)
    assert rows["deltas"]["inference_duration"].round(6).tolist() == [0.02, 0.04]
    times = {name: each.round(6).tolist() for name, each in rows["clock"].items()}
    assert times["start_step"] == [100.02, 100.14] and times["end_step"] == [100.1, 100.2] == times["end_step_join"]
    assert times["start_get_obs"] == times["end_get_obs"] == [100.1, 100.2]
    assert times["start_send_control"] == times["end_send_control"] == [100.0, 100.1, 100.2]


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"time_step": 0.1}, UnknownName, "takes no 'time_step'. Did you mean 'time_step_duration'"),
        ({"time_step_duration": -1}, ParameterError, "time_step_duration must be a number from 0"),
        ({"act_buf_len": 1.5}, ParameterError, "act_buf_len must be a whole number from 0"),
        ({"interface": RealTimeInterface}, ParameterError, "interface must be a class of your own"),
        ({"benchmark_type": "polyack"}, ParameterError, "benchmark_type must be one of 'polyak', 'trace'.*you mean"),
        ({"obs_prepro_func": 3}, ParameterError, "obs_prepro_func must be a function or None"),
        ({"ep_max_length": "long"}, ParameterError, "ep_max_length must be a number from 1"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(config, error, text):
    with pytest.raises(error, match=text):
        RealTimeEnv({"interface": Arm, **config})


def test_all_settings_of_real_time_gym_are_known():
    seed = {"interface", "time_step_duration", "start_obs_capture", "time_step_timeout_factor", "ep_max_length",
            "act_buf_len", "reset_act_buf", "benchmark", "benchmark_polyak"}  # fmt: skip
    newer = {"wait_on_done", "act_in_obs", "interface_kwargs", "act_prepro_func", "obs_prepro_func", "benchmark_type"}
    assert seed | newer <= set(DEFAULTS)


@pytest.mark.parametrize("method", ["get_observation_space", "get_action_space", "get_default_action", "reset",
                                    "get_obs_rew_done_info"])  # fmt: skip
def test_a_method_that_is_missing_is_named(method):
    class Half(RealTimeInterface):
        pass

    with pytest.raises(WrongType, match=f"Half.{method} must be a method of your own"):
        getattr(Half(), method)()


@pytest.mark.parametrize("is_real_time", [True, False])
def test_steps_come_between_reset_and_the_end_or_close(is_real_time):
    env, _, arm = virtual(ep_max_length=1, real_time=is_real_time)
    for prepare in (lambda: None, lambda: (env.reset(), env.step([1.0])), lambda: (env.reset(), env.step([1.0]))):
        prepare()
        sent = list(arm.sent)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"without an open episode: .* Call reset\(\) first"):
                env.step([0.0])
        assert arm.sent == sent
    env.reset()
    env.close()
    env.close()
    with pytest.raises(RuntimeError, match=r"after close\(\)\. No action was sent"):
        env.step([0.0])
    with pytest.raises(ParameterError, match=r"reset\(\) was called after close"):
        env.reset()


def test_a_space_that_is_no_tuple_is_refused_with_the_line_to_write():
    class Boxed(Arm):
        def get_observation_space(self):
            return spaces.Box(0.0, 1.0, (2,))

    with pytest.raises(ParameterError, match=r"return gymnasium.spaces.Tuple\(\(space,\)\), .* got 'Box"):
        RealTimeEnv({"interface": Boxed})


def test_an_interface_of_the_newer_form_is_taken():
    class Newer(Arm):
        get_obs_rew_done_info = None

        def reset(self, seed=None, options=None):
            return [-1.0, [0, 0]], {"seed": seed}

        def get_obs_rew_terminated_info(self):
            return [7.0, [0, 0]], 1.0, True, {}

    env, *_ = virtual(interface=Newer)
    assert env.reset(seed=5)[1] == {"seed": 5}
    assert env.step([0.0])[2:4] == (True, False)


def real(timeout=30.0, cpus=None, **config):
    settings = {"interface": Arm, "time_step_duration": 0.02, "start_obs_capture": 0.02, **config}
    return RealTimeEnv(settings, timeout=timeout, cpus=cpus)


def test_what_the_interface_raises_reaches_the_caller_and_the_device_rests():
    with pytest.raises(OSError, match="the cable is out"), real(interface_kwargs={"broken_at": 2}) as env:
        env.reset()
        for _ in range(3):
            env.step([1.0])
    assert env.interface.sent[-1][1] == 0.0


def test_rendering_may_wait_until_no_thread_but_the_callers_uses_the_interface():
    asked, answered = threading.Event(), threading.Event()
    env = real(timeout=5.0, interface_kwargs={"slow": lambda read: (asked.set(), answered.wait(5))})
    env.interface.render = lambda: (len(env.interface.read_at), answered.is_set())
    env.reset()
    assert asked.wait(5) and env.render() == (1, False)
    threading.Timer(0.05, answered.set).start()
    assert env.render("human", join_thread=True) == (1, True)
    assert float(env.step([1.0])[0][0][0]) == 1.0, "what the step takes is still there"
    env.close()


@pytest.mark.parametrize("call", [lambda env: env.step([1.0]), lambda env: env.render(join_thread=True)])
def test_an_interface_that_hangs_ends_in_an_error(call):
    hung = threading.Event()
    env = real(timeout=0.05, interface_kwargs={"slow": lambda read: hung.wait(30)})
    env.reset()
    with pytest.raises(MemoireTimeout, match="no observation from the interface"):
        call(env)
    hung.set()
    env.close()


def test_processors_are_chosen_or_refused():
    before = os.sched_getaffinity(0)
    try:
        cpu = min(before)
        with real(time_step_duration=0.001, start_obs_capture=0.001, cpus=[cpu]) as env:
            env.reset()
            assert os.sched_getaffinity(0) == {cpu}
        with pytest.raises(ParameterError, match="cpus must be some of this process's processors"):
            realtime.pin([100_000])
    finally:
        os.sched_setaffinity(0, before)


def slow_position(commands, delay, at, step=1e-4):
    """Return the position by integrating velocities in small steps."""
    place, now = np.zeros(2), 0.0
    while now < at - 1e-9:
        current = [velocity for begin, velocity in commands if begin + delay <= now + 1e-9]
        place = np.clip(place + step * np.clip(current[-1] if current else (0.0, 0.0), -2, 2), -1, 1)
        now += step
    return place


def test_a_drone_moves_as_its_late_commands_say():
    clock = VirtualClock(0.0)
    drone = DummyDrone(delays=(0.03, 0.03), clock=clock)
    commands = [(0.0, (1.0, -1.0)), (0.1, (5.0, 0.5)), (0.4, (-1.0, 0.0)), (0.9, (0.0, 0.0))]
    for number, (clock.now, velocity) in enumerate(commands, start=1):
        drone.send_control(*velocity)
        expected = slow_position(commands[:number], 0.03, clock.now - 0.03)
        assert drone.get_observation() == pytest.approx(expected, abs=1e-3)
    clock.now = 2.0
    assert drone.get_observation() == pytest.approx(slow_position(commands, 0.03, 1.97), abs=1e-3)
    assert drone.get_observation()[0] == pytest.approx(0.2, abs=1e-6)


def test_a_drone_has_delays_between_its_bounds():
    clock = VirtualClock(0.0)
    drone = DummyDrone(seed=1, clock=clock)
    drone.send_control(1.0, 0.0)
    clock.now = 0.5
    seen = [drone.get_observation()[0] for _ in range(200)]
    assert min(seen) >= 0.5 - 0.1 - 1e-9 and max(seen) <= 0.5 - 0.04 + 1e-9 and len(set(seen)) > 100
    with pytest.raises(ParameterError, match="delays must be"):
        DummyDrone(delays=(0.05, 0.02))
