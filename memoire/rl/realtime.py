"""Gymnasium environments in real time: the device moves while a policy computes, and time steps have a fixed length.

    class Arm(rl.RealTimeInterface):       # eight methods that control a device
        ...
    env = rl.RealTimeEnv({"interface": Arm, "time_step_duration": 0.05, "start_obs_capture": 0.05, "act_buf_len": 4})

`step(action)` waits for the end of the current time step, sends the action, and returns the observation that was taken
in that time step. The action therefore takes effect while the policy computes the next one, and the last actions are
part of the observation (Ramstedt and Pal, Real-Time Reinforcement Learning, NeurIPS 2019).
"""

from __future__ import annotations

import concurrent.futures
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from memoire.building import ForkedGenerator, Held, one_of, refuse_unknown
from memoire.errors import EpisodeError, MemoireTimeout, ParameterError, WrongType

from .spaces import observation_in, pin, reset_result
from .step_clock import ElasticClock, MovingAverages, StepTimes, Traces, cause_of

_log = logging.getLogger(__name__)

OBSERVATION_TIMEOUT: Final = 30.0
"""Seconds that a step waits for the interface's observation."""
LATE_INTERVAL: Final = 10.0
"""Seconds between two log lines about late steps."""
BENCHMARK_TYPES: Final = ("polyak", "trace")
ADVICE: Final = "get_obs_rew_done_info of the interface has to return at once."


class RealTimeInterface:
    """Interface to a device, or to a program that does not wait: subclass it and set the subclass as "interface"."""

    def get_observation_space(self) -> Any:
        """Return a Tuple of spaces, without the last actions, which `RealTimeEnv` appends."""
        raise _missing_method(self, "get_observation_space")

    def get_action_space(self) -> spaces.Box:
        """Return the space of one action."""
        raise _missing_method(self, "get_action_space")

    def get_default_action(self) -> Any:
        """Return the action that the device gets without a policy: [A] numbers."""
        raise _missing_method(self, "get_default_action")

    def send_control(self, control: Any) -> None:
        """Send an action to the device; returns at once."""
        raise _missing_method(self, "send_control")

    def reset(self) -> Any:
        """Begin an episode; return the list of observations, or (list, info). `reset` may take `seed` and `options`."""
        raise _missing_method(self, "reset")

    def get_obs_rew_done_info(self) -> tuple[Any, Any, Any, dict[str, Any]]:
        """Return (list of observations, reward, True if the episode is over, info) now; has to return at once."""
        raise _missing_method(self, "get_obs_rew_done_info")

    def wait(self) -> None:
        """Have the device wait in its place; returns at once. By default it sends the default action."""
        self.send_control(self.get_default_action())

    def render(self) -> Any:
        """Show the device; does nothing by default."""
        return None


DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType({
    "interface": RealTimeInterface,
    "interface_args": (),
    "interface_kwargs": {},
    "time_step_duration": 0.05,
    "start_obs_capture": 0.05,
    "time_step_timeout_factor": 1.0,
    "ep_max_length": math.inf,
    "real_time": True,
    "async_threading": True,
    "act_in_obs": True,
    "act_buf_len": 1,
    "reset_act_buf": True,
    "act_prepro_func": None,
    "obs_prepro_func": None,
    "benchmark": False,
    "benchmark_type": "polyak",
    "benchmark_polyak": 0.1,
    "wait_on_done": False,
    "last_act_on_reset": False,
})  # fmt: skip
"""Default settings of an environment; docs/trainers.md has a table of these settings."""


class _Captured(NamedTuple):
    obs: Any
    reward: Any
    is_done: bool
    info: dict[str, Any]
    times: tuple[float, float]
    """Clock's times of the call of the interface and of its return."""


class RealTimeEnv(gymnasium.Env[Any, Any]):
    """Gymnasium environment around an interface to a device, with time steps of a fixed length.

    If a step is late by at most `time_step_timeout_factor` time steps, the clock goes on, and the next steps are
    shorter. A thread takes each observation at its time, even if the policy is late.

    Args:
        config: Settings by name, as in DEFAULTS; "interface" is a class, or another callable that makes an interface.
        cpus: Processors for the calling thread and the thread of observations, from the first reset on; None leaves
            that to the system.
        timeout: Seconds that a step waits for the interface's observation.
        clock, sleep: Functions for monotonic seconds and for waiting. A simulated clock needs "async_threading": False.

    Raises:
        UnknownName, ParameterError: a setting is unknown, or cannot have its value.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        cpus: Collection[int] | None = None,
        timeout: float = OBSERVATION_TIMEOUT,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.config = _checked(config)
        values = self.config
        self.interface = values["interface"](*values["interface_args"], **values["interface_kwargs"])
        self.action_space = self.interface.get_action_space()
        self.default_action = np.asarray(self.interface.get_default_action(), self.action_space.dtype)
        self._device_space: Any = self.interface.get_observation_space()
        if not isinstance(self._device_space, spaces.Tuple):
            expected = (
                "a Tuple of spaces: return gymnasium.spaces.Tuple((space,)), and each observation in a list, [obs]"
            )
            raise ParameterError("get_observation_space()", str(self._device_space), expected)
        self._num_actions = values["act_buf_len"] if values["act_in_obs"] else 0
        self.observation_space = spaces.Tuple((*self._device_space.spaces, *[self.action_space] * self._num_actions))
        self.times = StepTimes()
        """Durations of time steps, and counts of late steps."""
        self._actions = deque([self.default_action] * self._num_actions, maxlen=self._num_actions)
        duration = values["time_step_duration"]
        elasticity = duration * values["time_step_timeout_factor"]
        self._steps = ElasticClock(duration, values["start_obs_capture"], elasticity)
        is_traced = values["benchmark_type"] == "trace"
        self._durations = Traces() if is_traced and values["benchmark"] else MovingAverages(values["benchmark_polyak"])
        self._clock, self._sleep, self._cpus = clock, sleep, cpus
        self._timeout = timeout
        self._thread: _Background | None = None
        self._is_running = self._is_paused = self._is_closed = False
        self._is_moving = False  # the interface was reset; before, the device may be missing
        self._last_action: Any = None  # action of the last step; None before the first step
        self._is_over = True  # no episode is open
        self._is_unsent = False  # the buffer's last action ended an episode and was not sent
        self._step = self._unlogged = 0  # late steps since the last log line
        self._logged_at = -math.inf
        self._began = self._returned = 0.0  # times of the last control and of the caller's observation

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; return (observation, info).

        The device gets its default action. With "last_act_on_reset", without "reset_act_buf": the last action.
        """
        super().reset(seed=seed)
        self._prepare()
        if self.config["reset_act_buf"]:
            self._actions.extend([self.default_action] * self._num_actions)
        elif not self.config["last_act_on_reset"]:
            if self._is_unsent and self._actions:
                self._actions.pop()
            self._actions.append(self.default_action)
        keeps_last = self.config["last_act_on_reset"] and not self.config["reset_act_buf"]
        first = self._last_action if keeps_last and self._last_action is not None else self.default_action
        self._is_unsent, self._is_moving = False, True
        obs, info = self._reset_interface(seed, options)
        self._step = 0
        if self.config["real_time"]:
            self._send(first)
            self._steps.restart(self._clock())
            self._begin_capture()
        self._returned = self._clock()
        self._is_paused = self._is_over = False
        return self._observation(obs), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Wait for the end of the time step, and send the action; return (obs, reward, terminated, truncated, info).

        The observation was taken in the time step that ended; its last part is `action` itself. The last action of an
        episode is not sent, since it would take effect after the end.

        Raises:
            EpisodeError: no episode is open, or the environment is closed. A RuntimeError.
            MemoireTimeout: the interface gave no observation in time.
        """
        if self._is_closed:
            raise EpisodeError("step() was called after close(). No action was sent. Make a new environment.")
        if self._is_over or (self.config["real_time"] and not self._is_running):
            raise EpisodeError(
                "step() was called without an open episode: before reset(), after the end of an episode, or after a "
                "failed step. No action was sent. Call reset() first."
            )
        called = self._clock()
        self._durations.add("inference_duration", self._returned, called)
        control = np.array(action, self.action_space.dtype)
        self._step += 1
        self._last_action = control
        self._actions.append(control)
        captured = self._real_time(control, called) if self.config["real_time"] else self._step_in_turn(control)
        terminated = bool(captured.is_done)
        truncated = not terminated and self._is_last
        self._is_over = terminated or truncated
        if self._is_over and self.config["wait_on_done"]:
            self.pause()
        self._returned = self._clock()
        self._durations.add("step_duration", called, self._returned)
        return self._observation(captured.obs), captured.reward, terminated, truncated, captured.info

    def pause(self) -> None:
        """Have the device wait in its place until the next step; that step is not late because of the policy."""
        self._is_paused = True
        self.interface.wait()

    wait = pause

    def set_default_action(self, default_action: Any) -> None:
        """Set the default action, an array [A] in the action space; it is sent from the next reset on."""
        self.default_action = np.array(default_action, self.action_space.dtype).reshape(self.action_space.shape)

    def set_time_step_duration(self, time_step_duration: float, time_step_timeout_factor: float | None = None) -> None:
        """Set the seconds of a time step, and how many time steps it may be late, from the next one on."""
        changes = {"time_step_duration": time_step_duration}
        if time_step_timeout_factor is not None:
            changes["time_step_timeout_factor"] = time_step_timeout_factor
        self._set(changes)

    def set_start_obs_capture(self, start_obs_capture: float) -> None:
        """Set the seconds from the begin of a time step to its observation, from the next one on."""
        self._set({"start_obs_capture": start_obs_capture})

    def set_ep_max_length(self, ep_max_length: float) -> None:
        """Set the steps after which an episode is truncated, also for the open episode."""
        self._set({"ep_max_length": ep_max_length})

    def _set(self, changes: Mapping[str, Any]) -> None:
        """Change settings together. If one setting is wrong, change none and raise ParameterError."""
        self.config = _checked({**self.config, **changes})
        settings = self.config
        duration = settings["time_step_duration"]
        self._steps.change(duration, settings["start_obs_capture"], duration * settings["time_step_timeout_factor"])

    def render(self, mode: str = "human", join_thread: bool = False) -> Any:
        """Return the result of the interface's `render`.

        Args:
            mode: Not used.
            join_thread: Wait until the observation of the current time step is taken, so that only the calling thread
                uses the interface.

        Raises:
            MemoireTimeout: the interface gave no observation in time.
        """
        if join_thread and self._is_running and self._thread is not None:
            self._thread.wait(self._timeout)
        return self.interface.render()

    def benchmarks(self) -> Mapping[str, Any]:
        """Return (average, mean deviation) in seconds of each of `step_clock.DURATIONS`; for "trace" see `Traces.rows`.

        Raises:
            ParameterError: "benchmark" is not set.
        """
        if not self.config["benchmark"]:
            raise ParameterError.with_text(
                'benchmarks() needs "benchmark": True in the configuration of the environment.'
            )
        return self._durations.rows()

    def close(self) -> None:
        """Have the device do its default action, and end the thread; leave a device alone that was never reset.

        Closing again does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._thread is not None:
                self._thread.close()
        finally:
            if self._is_moving:
                self.interface.wait()

    # ------------------------------------------------------------------------------------------------- time steps

    def _real_time(self, control: Any, called: float) -> _Captured:
        """Return the observation of the time step that ended; begin the next one with this control."""
        captured = self._await_capture()
        self._durations.add("join_duration", called, self._clock())
        self._sleep_until(self._steps.end)
        now = self._clock()
        cause = cause_of(self._steps, self._returned, called, now, is_paused=self._is_paused)
        self._is_paused = False
        self._durations.add("time_step_duration", self._began, now)
        late, is_in_time = now - self._steps.end, self._steps.begin_next(now)
        self.times.add(now - self._began, cause, is_in_time)
        if not is_in_time and cause != "pause":
            self._warn_late(now, late, cause)
        if captured.is_done or self._is_last:
            self._is_unsent = True
        else:
            self._send(control)
            self._begin_capture()
        return captured

    @property
    def _is_last(self) -> bool:
        """True if the current step is the last one that an episode may have."""
        return bool(self._step >= self.config["ep_max_length"])

    def _warn_late(self, now: float, late: float, cause: str) -> None:
        """Log late steps that restarted the clock, at most one line in LATE_INTERVAL."""
        self._unlogged += 1
        if now - self._logged_at >= LATE_INTERVAL:
            _log.warning("%d time steps were too long, the last by %.3f s: the %s is slow", self._unlogged, late, cause)
            self._unlogged, self._logged_at = 0, now

    def _step_in_turn(self, control: Any) -> _Captured:
        """Return the result of the control, without a thread: the device is observed only during steps."""
        self._send(control)
        self._steps.restart(self._began)
        captured = self._capture()
        self._sleep_until(self._steps.end)
        return captured

    def _send(self, control: Any) -> None:
        self._began = self._clock()
        prepare = self.config["act_prepro_func"]
        self.interface.send_control(control if prepare is None else prepare(control.copy()))
        self._durations.add("send_control_duration", self._began, self._clock())

    def _begin_capture(self) -> None:
        self._is_running = True
        if self._thread is not None:
            self._thread.start(self._capture)

    def _await_capture(self) -> _Captured:
        """Wait for the observation of the current step, and return it."""
        self._is_running = False
        captured = self._capture() if self._thread is None else self._thread.result(self._timeout)
        self._durations.add("get_obs_duration", *captured.times)
        return captured

    def _capture(self) -> _Captured:
        self._sleep_until(self._steps.capture_at)
        began = self._clock()
        obs, reward, is_done, info = self._read()
        return _Captured(self._preprocess(obs), reward, bool(is_done), info, (began, self._clock()))

    def _read(self) -> tuple[Any, Any, Any, dict[str, Any]]:
        newer = getattr(self.interface, "get_obs_rew_terminated_info", None)
        read: Any = self.interface.get_obs_rew_done_info if newer is None else newer
        result: tuple[Any, Any, Any, dict[str, Any]] = read()
        return result

    def _sleep_until(self, at: float) -> None:
        seconds = at - self._clock()
        if seconds > 0.0:
            self._sleep(seconds)

    # ---------------------------------------------------------------------------------------------- observations

    def _prepare(self) -> None:
        """End the current step, and start the thread before the first reset."""
        if self._is_closed:
            raise ParameterError.with_text("reset() was called after close(). Create a new environment.")
        if self._is_running:
            self._await_capture()
        if self._thread is None and self.config["async_threading"] and self.config["real_time"]:
            if self._cpus is not None:
                pin(self._cpus)
            self._thread = _Background(self._cpus)

    def _reset_interface(self, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """Reset the device and return (observations, info), for interfaces of either form."""
        reset: Any = self.interface.reset
        result = reset(seed=seed, options=options) if _takes(reset, "seed") else reset()
        obs, info = reset_result(result)
        return self._preprocess(obs), info

    def _preprocess(self, obs: Any) -> Any:
        prepare = self.config["obs_prepro_func"]
        return obs if prepare is None else prepare(obs)

    def _observation(self, obs: Any) -> tuple[Any, ...]:
        observations: tuple[Any, ...] = observation_in(self._device_space, obs)
        return (*observations, *(action.copy() for action in self._actions))  # copies for the caller


class _Background:
    """Thread that takes one observation after the other.

    Args:
        cpus: Processors for the thread; None leaves that to the system.
    """

    def __init__(self, cpus: Collection[int] | None) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], _Captured], Future[_Captured]] | None] = queue.SimpleQueue()
        self._newest: Future[_Captured] = Future()
        self._cpus = cpus
        # A daemon thread: an interface that hangs does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="memoire-real-time", daemon=True)
        self._thread.start()

    def start(self, job: Callable[[], _Captured]) -> None:
        self._newest = Future()
        self._jobs.put((job, self._newest))

    def wait(self, timeout: float) -> None:
        """Return when the newest job has ended, also by an error; raises MemoireTimeout if it takes longer."""
        if not concurrent.futures.wait([self._newest], timeout).done:
            raise MemoireTimeout("observation", "the interface", timeout, ADVICE)

    def result(self, timeout: float) -> _Captured:
        """Wait for the newest job; return its observation or raise its error."""
        self.wait(timeout)
        return self._newest.result()

    def close(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        if self._cpus is not None:
            pin(self._cpus)
        while (task := self._jobs.get()) is not None:
            job, future = task
            try:
                future.set_result(job())
            except BaseException as error:  # `result` raises it
                future.set_exception(error)


def _checked(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings, with defaults for those that `config` lacks; raises UnknownName and ParameterError."""
    refuse_unknown("RealTimeEnv config", config, DEFAULTS)
    settings = {**DEFAULTS, **config}
    if not callable(settings["interface"]) or settings["interface"] is RealTimeInterface:
        raise ParameterError("interface", settings["interface"], "a class of your own with RealTimeInterface's methods")
    ranges = {
        "time_step_duration": (0.0, math.inf), "start_obs_capture": (0.0, math.inf),
        "time_step_timeout_factor": (0.0, math.inf), "ep_max_length": (1, math.inf), "benchmark_polyak": (0.0, 1.0),
    }  # fmt: skip
    for name, (low, high) in ranges.items():
        if not isinstance(settings[name], int | float) or not low <= settings[name] <= high:
            raise ParameterError(name, settings[name], f"a number from {low:g} to {high:g}")
    kind = settings["benchmark_type"]
    if kind not in BENCHMARK_TYPES:
        raise ParameterError("benchmark_type", kind, one_of(kind, BENCHMARK_TYPES))
    for name in ("act_prepro_func", "obs_prepro_func"):
        if settings[name] is not None and not callable(settings[name]):
            raise ParameterError(name, settings[name], "a function or None")
    if not isinstance(settings["act_buf_len"], int) or settings["act_buf_len"] < 0:
        raise ParameterError("act_buf_len", settings["act_buf_len"], "a whole number from 0")
    return settings


def _takes(function: Callable[..., Any], name: str) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _missing_method(interface: RealTimeInterface, method: str) -> WrongType:
    kind = type(interface).__name__
    return WrongType(f"{kind}.{method}", "a method of your own", "none", f"Write `def {method}(self, ...)` in {kind}.")


# A device for first trials

SPEED_LIMIT: Final = 2.0
"""Maximum speed in each direction, in units per second."""
BORDER: Final = 1.0
"""Limit of each coordinate, which stays in [-1, 1]."""


class DummyDrone:
    """Simulated drone behind a slow radio: each command and each position is delayed by a random time.

    The drone moves in a square, at the velocities that it receives, without a thread, a window or a device. Safe to
    call from several threads. Positions are computed at each call from the commands and their times.

    Args:
        delays: Least and greatest seconds that a command takes to the drone, and a position back. A later command never
            arrives before a former one.
        seed: Seed of the delays; None takes entropy from the system.
        clock: Function that returns monotonic seconds.

    Example:
        drone = DummyDrone(delays=(0.01, 0.02), seed=1)
        drone.send_control(0.5, -0.5)
        x, y = drone.get_observation()
    """

    def __init__(
        self,
        delays: tuple[float, float] = (0.02, 0.05),
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        low, high = delays
        if not 0.0 <= low <= high:
            raise ParameterError("delays", delays, "(least, greatest) seconds, with 0 <= least <= greatest")
        self._delays, self._clock, self._random = delays, clock, ForkedGenerator(seed)
        self._lock = threading.Lock()  # guards the attributes below
        # (time, velocity x, velocity y) in order; _start is the position at the time of the first leg.
        self._legs: deque[tuple[float, float, float]] = deque([(clock(), 0.0, 0.0)])
        self._start = (0.0, 0.0)

    def send_control(self, vel_x: Any, vel_y: Any) -> None:
        """Have the drone move at this velocity as soon as the command arrives; returns at once."""
        velocity = [min(max(float(each), -SPEED_LIMIT), SPEED_LIMIT) for each in (vel_x, vel_y)]
        with Held(self._lock):
            arrives = self._clock() + self._delay()
            self._legs.append((max(arrives, self._legs[-1][0]), velocity[0], velocity[1]))

    def get_observation(self) -> tuple[float, float]:
        """Return the position (x, y) of the drone a random delay ago."""
        with Held(self._lock):
            now = self._clock()
            self._forget(now - self._delays[1])
            return self._position(now - self._delay())

    def _delay(self) -> float:
        return float(self._random.uniform(*self._delays))

    def _forget(self, before: float) -> None:
        """Drop legs that ended before a time, and move _start to the end of the last dropped leg."""
        while len(self._legs) > 1 and self._legs[1][0] <= before:
            (begin, *velocity), end = self._legs[0], self._legs[1][0]
            self._start = _move(self._start, velocity, end - begin)
            self._legs.popleft()

    def _position(self, at: float) -> tuple[float, float]:
        position, legs = self._start, list(self._legs)
        for (begin, *velocity), end in zip(legs, [*(leg[0] for leg in legs[1:]), at], strict=True):
            position = _move(position, velocity, max(0.0, min(end, at) - begin))
        return position


def _move(position: tuple[float, float], velocity: list[float], seconds: float) -> tuple[float, float]:
    """Return the position after `seconds` at this velocity; it stops at the border."""
    x, y = (min(max(p + v * seconds, -BORDER), BORDER) for p, v in zip(position, velocity, strict=True))
    return x, y
