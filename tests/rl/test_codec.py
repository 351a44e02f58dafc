"""Compressor and inverse are one object; samples of another codec are refused; last actions are left out and rebuilt."""

import contextlib
import functools
import zlib
from typing import Any

import numpy as np
import pytest

from memoire.errors import CodecMismatch, ParameterError, WrongType
from memoire.rl.codec import PREPROCESSOR, ActionHistory, Codec, PreprocessorCheck, digest, digest_of
from memoire.rl.memory import GenericMemory


def shrink(act, obs, rew, done, info):
    return act, (obs[0].astype(np.float16),), rew, done, info


def grow(act, obs, rew, done, info):
    return act, (obs[0].astype(np.float32),), rew, done, info


def pack(picture):
    return zlib.compress(picture.tobytes())


def unpack(body):
    return np.frombuffer(zlib.decompress(body), np.uint8).reshape(4, 4)


def sample(number, done=False, info=None):
    picture = np.full((4, 4), number, np.uint8)
    return np.float32([number]), (picture, np.float32([number, 0.5])), float(number), done, info or {}


def test_a_codec_compresses_as_a_workers_function_does():
    codec = Codec(shrink, grow)
    act, obs, rew, done, info = codec(1, (np.ones(2, np.float32),), 2.0, False, {"a": 1})
    assert (act, obs[0].dtype, rew, done, info) == (1, np.float16, 2.0, False, {"a": 1})
    assert codec.restored((act, obs, rew, done, info), "sample")[1][0].dtype == np.float32
    assert codec.restored((act, obs, rew, done, info), "append")[1][0].dtype == np.float16


def test_single_leaves_are_compressed_and_the_others_stay():
    codec = Codec({"obs[0]": pack, "act": np.negative}, {"obs[0]": unpack, "act": np.negative})
    act, obs, *_ = codec(*sample(3))
    assert act == -3 and isinstance(obs[0], bytes) and obs[1][1] == 0.5
    with pytest.raises(ParameterError, match=r"one of 'obs\[0\]', 'obs\[1\]'"):
        Codec({"obs[7]": pack}, {"obs[7]": unpack})(*sample(3))


@pytest.mark.parametrize("when", ["append", "sample"])
@pytest.mark.parametrize("form", ["whole", "leaves"])
def test_a_memory_restores_when_it_is_told_to(when, form):
    calls = []

    def counted(function):
        return lambda *given: (calls.append(1), function(*given))[1]

    if form == "whole":
        codec = Codec(
            lambda a, o, r, d, i: (a, (pack(o[0]), o[1]), r, d, i),
            counted(lambda a, o, r, d, i: (a, (unpack(o[0]), o[1]), r, d, i)), when=when,
        )  # fmt: skip
    else:
        codec = Codec({"obs[0]": pack}, {"obs[0]": counted(unpack)}, when={"obs[0]": when})
    memory = GenericMemory(100, codec=codec)
    memory.append([codec(*sample(number)) for number in range(10)])
    assert len(calls) == (10 if when == "append" else 0)
    found = memory.transitions([0, 8])
    assert (len(calls) > 10) == (when == "sample") or when == "sample"
    assert found.last_obs[0][:, 0, 0].tolist() == [0, 8] and found.new_obs[0][:, 0, 0].tolist() == [1, 9]
    assert found.new_obs[0].dtype == np.uint8 and found.act.tolist() == [[1.0], [9.0]]


def test_bytes_that_nobody_restores_stay_bytes():
    memory = GenericMemory(10)
    memory.append([(np.zeros(1), (b"x" * number,), 0.0, False, {}) for number in range(1, 4)])
    assert memory.transitions([1]).new_obs[0].tolist() == [b"xxx"]


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ((shrink, None), ParameterError, "two functions, or functions of the same leaves"),
        (({"obs[0]": pack}, {"obs[1]": unpack}), ParameterError, "functions of the same leaves"),
        (({"obs[0]": pack}, grow), ParameterError, "functions of the same leaves"),
        ((3, grow), WrongType, "compress must be a function"),
    ],
)
def test_half_a_pair_is_refused(given, error, text):
    with pytest.raises(error, match=text):
        Codec(*given)


def test_an_unknown_time_and_a_wrong_result_are_refused():
    with pytest.raises(ParameterError, match="when must be one of 'append', 'sample'"):
        Codec(shrink, grow, when="later")
    with pytest.raises(WrongType, match="must be a tuple"):
        Codec(lambda *parts: parts[0], grow)(1, 2, 3, 4, 5)


def test_the_same_functions_have_the_same_digest_and_others_another_one():
    codec, other = Codec(shrink, grow), Codec(shrink, grow, history=ActionHistory(2))
    assert codec.digest == Codec(shrink, grow).digest
    assert codec.digest.startswith("source:")
    assert len({codec.digest, other.digest, Codec(grow, shrink).digest, Codec(history=ActionHistory(2)).digest}) == 4
    codec.check(codec.name, codec.digest, "worker drone-1")
    with pytest.raises(
        CodecMismatch, match=r"worker drone-1 compresses samples by the codec shrink\+grow.*same version"
    ):
        codec.check(other.name, other.digest, "worker drone-1")


def made(text):
    names = {}
    exec(compile(text, "<made>", "exec"), names)
    return names["f"]


def test_a_digest_is_of_source_or_of_byte_code():
    first, second = made("def f(x): return x + 1"), made("def f(x): return x + 2")
    assert digest_of(first).startswith("code-3.") and digest_of(first) != digest_of(second)
    assert digest_of(first) == digest_of(made("def f(x):\n    return x + 1  # more"))
    # Another version of Python makes other byte code: nothing is said of it.
    Codec(first, second).check("f", "code-3.9:1234", "a worker") if Codec(first, second).name == "f" else None
    assert digest_of(functools.partial(shrink, 1)) != digest_of(functools.partial(shrink, 2))
    assert digest_of(functools.partial(first, 1)).startswith("code-3.")

    class Callable:
        def __call__(self, *parts):
            return parts

    assert digest_of(Callable()).startswith("source:")


def test_histories_are_checked():
    with pytest.raises(ParameterError, match="length must be a whole number from 1"):
        ActionHistory(0)
    with pytest.raises(ParameterError, match="start must be one of 'repeat', 'skip'"):
        ActionHistory(2, "pad")
    with pytest.raises(WrongType, match="obs must be a tuple with 3 actions at its end"):
        Codec(history=ActionHistory(3))(1, (1, 2), 0.0, False, {})


class Buffered:
    """An environment whose observations end with its last actions, as a real-time one."""

    def __init__(self, length, is_reset):
        self.length, self.is_reset = length, is_reset
        self.actions, self.time = [np.float32([0])] * length, 0

    def obs(self):
        return (np.float32([self.time]), *self.actions[-self.length :])

    def reset(self):
        self.actions = [np.float32([0])] * self.length if self.is_reset else [*self.actions, np.float32([0])]
        return self.obs()

    def step(self, action):
        self.time += 1
        self.actions.append(action)
        return self.obs()


@pytest.mark.parametrize(("is_reset", "start"), [(True, "repeat"), (False, "skip")])
def test_action_buffers_are_rebuilt_as_the_environment_made_them(is_reset, start):
    env, random = Buffered(3, is_reset), np.random.default_rng(0)
    codec = Codec(history=ActionHistory(3, start))
    memory, truth = GenericMemory(1000, codec=codec), []
    for _ in range(4):
        obs = env.reset()
        samples, steps = [codec(np.float32([0]), obs, 0.0, False, {})], []
        for step in range(6):
            action = random.random(1, np.float32)
            new_obs = env.step(action)
            samples.append(codec(action, new_obs, 0.0, step == 5, {}))
            steps.append((obs, action, new_obs))
            obs = new_obs
        assert len(samples[1][1]) == 1
        memory.append(samples)
        truth += steps if start == "repeat" else steps[2:]
    assert len(memory) == len(truth)
    for item, (last_obs, act, new_obs) in enumerate(truth):
        found = memory.transition(item)
        assert [part.tolist() for part in found[0]] == [part.tolist() for part in last_obs]
        assert [part.tolist() for part in found[3]] == [part.tolist() for part in new_obs]
        assert found[1] == act == found[3][-1]  # the newest action is in the buffer


def halved(obs: Any) -> Any:
    return obs / 2.0


def doubled(obs: Any) -> Any:
    return obs * 2.0


@pytest.mark.parametrize(
    ("worker", "memory", "differ"),
    [(halved, halved, False), (None, None, False), (halved, doubled, True), (halved, None, True), (None, halved, True)],
)
def test_functions_that_differ_are_refused_by_both_names(worker: Any, memory: Any, differ: bool) -> None:
    check = PreprocessorCheck(memory)
    infos: list[dict[str, Any]] = [{PREPROCESSOR: digest(worker)} if worker else {}, {}]
    both = [digest(each) or None for each in (worker, memory)]
    says = "^obs_preprocessor must be {}, as a worker has it: give both the same function, got {!r}".format(*both)
    with pytest.raises(ParameterError, match=says) if differ else contextlib.nullcontext():
        check.look(infos, [True, False])


def test_samples_in_the_middle_of_an_episode_say_nothing() -> None:
    PreprocessorCheck(halved).look([{}, {}], [False, False])


def test_byte_code_of_another_python_is_told_of_once(caplog: Any) -> None:
    check = PreprocessorCheck(halved)
    for _ in range(3):
        check.look([{PREPROCESSOR: "code-3.99:0123"}], [True])
    assert len(caplog.records) == 1 and "cannot compare a worker's obs_preprocessor code-3.99:0123" in caplog.text
