"""Samples on their way: compressed and restored, compared bit by bit, and packed as plain values."""

import contextlib
import functools
import logging
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from msgspec.msgpack import Ext

from memoire import Reader, Server, connect
from memoire.errors import CodecMismatch, CrcDebugMismatch, CrcFailed, DataError, ParameterError, WrongType
from memoire.rl import samples as envelope
from memoire.rl.codec import PREPROCESSOR, ActionHistory, Codec, PreprocessorCheck, digest, digest_of
from memoire.rl.crc import SAMPLE, SENDER, SUMS, Checks, Marks, first_difference, first_different_sum, sums_of
from memoire.rl.memory import GenericMemory
from memoire.rl.samples import Sample, columns_of, samples_of, samples_table, split_into_runs
from memoire.wire.values import MAX_DEPTH
from memoire.wire.values import pack as pack_of_envelope
from memoire.wire.values import unpack as unpack_of_envelope
from rlkit import same

# --- Compressor and inverse are one object; samples of another codec are refused; the inverse rebuilds last actions


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
        return lambda *parts: (calls.append(1), function(*parts))[1]

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
    transitions = memory.transitions([0, 8])
    assert (len(calls) > 10) == (when == "sample") or when == "sample"
    assert transitions.last_obs[0][:, 0, 0].tolist() == [0, 8] and transitions.new_obs[0][:, 0, 0].tolist() == [1, 9]
    assert transitions.new_obs[0].dtype == np.uint8 and transitions.act.tolist() == [[1.0], [9.0]]


def test_bytes_that_nobody_restores_stay_bytes():
    memory = GenericMemory(10)
    memory.append([(np.zeros(1), (b"x" * number,), 0.0, False, {}) for number in range(1, 4)])
    assert memory.transitions([1]).new_obs[0].tolist() == [b"xxx"]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Codec(shrink, None), ParameterError, "two functions, or functions of the same leaves"),
        (lambda: Codec({"obs[0]": pack}, {"obs[1]": unpack}), ParameterError, "functions of the same leaves"),
        (lambda: Codec({"obs[0]": pack}, grow), ParameterError, "functions of the same leaves"),
        (lambda: Codec(3, grow), WrongType, "compress must be a function"),
        (lambda: Codec(shrink, grow, when="later"), ParameterError, "when must be one of 'append', 'sample'"),
        (lambda: Codec(lambda *parts: parts[0], grow)(1, 2, 3, 4, 5), WrongType, "must be a tuple"),
        (lambda: ActionHistory(0), ParameterError, "length must be a whole number from 1"),
        (lambda: ActionHistory(2, "pad"), ParameterError, "start must be one of 'repeat', 'skip'"),
        (
            lambda: Codec(history=ActionHistory(3))(1, (1, 2), 0, False, {}),
            WrongType,
            "a tuple with 3 actions at its end",
        ),
    ],
)
def test_what_is_no_codec_or_gives_something_else_is_refused(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_the_same_functions_have_the_same_digest_and_others_another_one():
    codec, other = Codec(shrink, grow), Codec(shrink, grow, history=ActionHistory(2))
    assert codec.digest == Codec(shrink, grow).digest
    assert codec.digest.startswith("source:")
    assert len({codec.digest, other.digest, Codec(grow, shrink).digest, Codec(history=ActionHistory(2)).digest}) == 4
    codec.check(codec.name, codec.digest, "worker drone-1")
    says = r"worker drone-1 compresses samples with the codec shrink\+grow.*same version"
    with pytest.raises(CodecMismatch, match=says):
        codec.check(other.name, other.digest, "worker drone-1")


def compiled(text):
    names = {}
    exec(compile(text, "<made>", "exec"), names)
    return names["f"]


def test_a_digest_is_of_source_or_of_byte_code():
    first, second = compiled("def f(x): return x + 1"), compiled("def f(x): return x + 2")
    assert digest_of(first).startswith("code-3.") and digest_of(first) != digest_of(second)
    assert digest_of(first) == digest_of(compiled("def f(x):\n    return x + 1  # more"))
    # Another version of Python compiles other byte code, so the codec reports no mismatch.
    Codec(first, second).check("f", "code-3.9:1234", "a worker") if Codec(first, second).name == "f" else None
    assert digest_of(functools.partial(shrink, 1)) != digest_of(functools.partial(shrink, 2))
    assert digest_of(functools.partial(first, 1)).startswith("code-3.")

    class Callable:
        def __call__(self, *parts):
            return parts

    assert digest_of(Callable()).startswith("source:")


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
    says = "^obs_preprocessor must be {}, that of a worker .give the memory and workers the same function., got {!r}".format(
        *both
    )
    with pytest.raises(ParameterError, match=says) if differ else contextlib.nullcontext():
        check.check_samples(infos, [True, False])


def test_byte_code_of_another_python_is_told_of_once_and_samples_in_the_middle_of_an_episode_say_nothing(
    caplog: Any,
) -> None:
    check = PreprocessorCheck(halved)
    check.check_samples([{}, {}], [False, False])
    for _ in range(3):
        check.check_samples([{PREPROCESSOR: "code-3.99:0123"}], [True])
    assert len(caplog.records) == 1 and "cannot compare a worker's obs_preprocessor code-3.99:0123" in caplog.text


# --- Bitwise comparison of transitions; a different pixel, dtype or shape is reported with its place

PICTURE = np.random.default_rng(0).integers(0, 256, (84, 84), np.uint8)
HALF = np.float32(0.5)


def transition(picture=PICTURE, rew=HALF, done=False):
    last_obs = {"image": PICTURE.copy(), "pose": (np.float32([1, 2]), np.int64(3))}
    new_obs = {"image": np.array(picture), "pose": (np.float32([1, 2]), np.int64(3))}
    return last_obs, np.float32([0.1, -0.1]), rew, new_obs, done


def with_pixel():
    changed = PICTURE.copy()
    changed[40, 41] ^= 1
    return changed


def test_a_changed_pixel_passes_where_texts_are_compared_and_fails_here():
    before, after = transition(), transition(with_pixel())
    assert [str(part) for part in before] == [str(part) for part in after]  # TMRL compares texts: no difference
    difference = first_difference(before, after)
    assert difference.path == "new_obs['image'], index (40, 41)"
    assert (int(difference.expected), int(difference.received)) == (PICTURE[40, 41], PICTURE[40, 41] ^ 1)
    assert first_different_sum(sums_of(before), sums_of(after)).path == "new_obs['image']"
    assert first_difference(before, transition()) is None
    assert first_different_sum(sums_of(before), sums_of(transition())) is None


@pytest.mark.parametrize(
    ("changed", "path", "received"),
    [
        (transition(PICTURE.astype(np.int16)), "new_obs['image']", "int16[84, 84]"),
        (transition(PICTURE[:83]), "new_obs['image']", "uint8[83, 84]"),
        (transition(PICTURE[:, ::-1][:, ::-1]), None, ""),
        (transition(rew=0.5), None, ""),
        (transition(rew=np.float64(0.5)), None, ""),
        (transition(rew=np.float32(0.25)), "rew", "0.25"),
        (transition(done=np.bool_(False)), None, ""),
        (transition(done=True), "done", "True"),
        (transition(rew=np.float32(-0.0) + np.float32(0.5)), None, ""),
    ],
)
def test_dtype_shape_and_values_count_and_whose_numbers_they_are_does_not(changed, path, received):
    difference = first_difference(transition(), changed)
    assert (difference is None) == (path is None)
    if difference is not None:
        assert (difference.path, difference.received) == (path, received)
    assert (first_different_sum(sums_of(transition()), sums_of(changed)) is None) == (path is None)


def test_not_a_number_equals_itself_and_zeros_have_signs():
    assert first_difference(transition(rew=np.float32("nan")), transition(rew=np.float32("nan"))) is None
    assert first_difference(transition(rew=np.float32(0.0)), transition(rew=np.float32(-0.0))).path == "rew"


def test_lists_count_as_tuples_and_missing_leaves_are_named():
    last_obs, act, rew, new_obs, done = transition()
    as_list = {**new_obs, "pose": list(new_obs["pose"])}
    assert first_difference(transition(), (last_obs, act, rew, as_list, done)) is None
    less = (last_obs, act, rew, {"image": PICTURE}, done)
    assert tuple(first_difference(transition(), less)) == ("new_obs['pose'][0]", "present", "missing")
    assert tuple(first_difference(less, transition())) == ("new_obs['pose'][0]", "missing", "present")
    assert first_different_sum(sums_of(less), sums_of(transition())).expected == "missing"


@given(st.integers(0, 84 * 84 * 8 - 1))
def test_every_bit_counts(bit):
    changed = PICTURE.copy()
    changed.reshape(-1)[bit // 8] ^= 1 << bit % 8
    index = tuple(map(int, np.unravel_index(bit // 8, (84, 84))))
    assert first_difference(transition(), transition(changed)).path == f"new_obs['image'], index {index}"
    assert first_different_sum(sums_of(transition()), sums_of(transition(changed))) is not None


def test_texts_bytes_and_empty_arrays_are_compared():
    assert sums_of(("a", b"a", 0, np.zeros((0, 2)), False)) != sums_of(("b", b"a", 0, np.zeros((0, 3)), False))
    with pytest.raises(ParameterError, match="transition must be made of numbers"):
        sums_of((object(), 0, 0, 0, False))


def test_marks_travel_and_are_checked(caplog):
    caplog.set_level(logging.INFO)
    marks, checks = Marks(True, "drone-1"), Checks(True, "MyMemory")
    reset, info = marks.mark({}, None, 3, 0), marks.mark({"x": 1}, transition(), 3, 12)
    assert info["x"] == 1 and SAMPLE in info and SAMPLE not in reset
    assert [each[SENDER] for each in (reset, info)] == [["drone-1", 3, 0], ["drone-1", 3, 12]]
    checks.take([reset, info])
    checks.check(transition(), info, 17)
    assert (checks.passed, checks.failed) == (1, 0) and "CRC check passed: transition 17" in caplog.text
    with pytest.raises(CrcFailed) as caught:
        checks.check(transition(with_pixel()), info, 17)
    text = str(caught.value)
    assert "transition 17 of MyMemory" in text and "drone-1 in episode 3, step 12" in text
    assert "new_obs['image'], index (40, 41)" in text
    assert (checks.passed, checks.failed) == (1, 1)


def test_what_travels_is_a_copy():
    original = transition()
    info = Marks(True).mark({}, original, 1, 1)
    original[3]["image"][:] = 0
    assert first_difference(info[SAMPLE], transition()) is None


def test_the_cheap_mode_sends_checksums_of_one_in_n():
    marks, checks = Marks(3, "w"), Checks(3)
    infos = [marks.mark({}, transition(), 1, step) for step in range(1, 10)]
    assert [SUMS in info for info in infos] == [False, False, True] * 3 and not any(SAMPLE in info for info in infos)
    checks.take(infos)
    for item, info in enumerate(infos):
        checks.check(transition(), info, item)
    assert checks.passed == 3
    with pytest.raises(CrcFailed, match=r"at new_obs\['image'\]: recorded as uint8\[84, 84\] with checksum"):
        checks.check(transition(with_pixel()), infos[2], 2)


def test_one_side_alone_is_refused_with_both_names():
    info = Marks(True, "drone-1").mark({}, transition(), 2, 5)
    with pytest.raises(CrcDebugMismatch, match="set for drone-1 in episode 2, step 5, but not for MyMemory"):
        Checks(False, "MyMemory").take([info])
    with pytest.raises(CrcDebugMismatch, match="set for MyMemory, but not for the worker"):
        Checks(True, "MyMemory").take([{}])
    Checks(False).take([{}])
    assert Marks(False).mark({"a": 1}, transition(), 1, 1) == {"a": 1}
    Checks(False).check(transition(), {}, 0)


@pytest.mark.parametrize("value", [-1, 0.5, "yes"])
def test_other_values_of_crc_debug_are_refused(value):
    with pytest.raises(ParameterError, match="crc_debug must be True or False, or n"):
        Marks(value)


# --- Samples of any pipeline as bytes, and through a server

leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=8),
    st.binary(max_size=8),
    arrays.arrays(st.sampled_from([np.float32, np.int64, np.uint8, np.bool_]), arrays.array_shapes(min_dims=0)),
    st.floats(width=32, allow_nan=False).map(np.float32),
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
    ),
    max_leaves=12,
)  # fmt: skip


@given(values)
def test_plain_values_come_back_with_their_types(value: Any) -> None:
    assert same(unpack_of_envelope(pack_of_envelope(value)), value)


def test_values_of_ones_own_travel_as_extensions() -> None:
    body = pack_of_envelope([1j, "text"], other=lambda value: Ext(9, b"i") if value == 1j else value)
    assert unpack_of_envelope(body, other=lambda code, data: (code, bytes(data))) == [(9, b"i"), "text"]
    with pytest.raises(DataError, match="unknown MessagePack extension 9"):
        unpack_of_envelope(body)


@given(st.binary(max_size=200))
def test_other_bytes_are_refused_and_run_nothing(body: bytes) -> None:
    with contextlib.suppress(DataError):
        unpack_of_envelope(body)


def test_a_value_that_does_not_travel_is_named_with_its_place() -> None:
    with pytest.raises(ParameterError, match=r"sample\['device'\].*object"):
        pack_of_envelope({"device": object()})
    with pytest.raises(ParameterError, match="an array of object"):
        pack_of_envelope(np.array([object()]))
    with pytest.raises(ParameterError, match="keys that are text"):
        pack_of_envelope({(1, 2): 3})


def test_containers_within_each_other_have_an_end() -> None:
    value: Any = 0
    for _ in range(MAX_DEPTH + 1):
        value = [value]
    with pytest.raises(ParameterError, match="containers within each other"):
        pack_of_envelope(value)


def episode(length: int, number: int = 1) -> list[Sample]:
    first = Sample(np.zeros(2, np.float32), (np.float32(1.0), 2.0), 0.0, False, False, {"a": 1}, True, number, 0)
    rest = [
        Sample(np.full(2, step, np.float32), (np.float32(step), 0.5), 1.5, step == length, False, {}, False, number,
               step, 1.5)
        for step in range(1, length + 1)
    ]  # fmt: skip
    return [first, *rest]


def test_samples_pass_a_server_unchanged_and_in_order_and_the_reset_is_no_step() -> None:
    with Server("tcp://127.0.0.1:0", tables={envelope.TABLE: samples_table()}) as server:
        sent = episode(5) + episode(3, 2)
        with connect(server.endpoint) as client:
            for part in (sent[:3], sent[3:6], sent[6:]):
                steps = sum(not each.is_reset for each in part)
                assert client.push_episode(columns_of(part), steps=steps, is_cut=part is not sent[6:])
            client.update()
            assert client.stats().steps == 8 and client.stats().episodes == 0
        with Reader([server.endpoint]) as reader:
            received = samples_of(reader.take(10, timeout=10.0))
        assert [tuple(each) for each in map(comparable, received)] == [tuple(each) for each in map(comparable, sent)]
        assert len({each.client for each in received}) == 1 and len(received[0].client) == 16


def comparable(sample: Sample) -> tuple[Any, ...]:
    return (pack_of_envelope(tuple(sample[:6])), *sample[6:-1])


def test_arrays_of_samples_that_were_read_are_the_callers_own() -> None:
    body = pack_of_envelope((np.zeros(2, np.float32), {}))
    first, second = unpack_of_envelope(body), unpack_of_envelope(body)
    second[0][:], second[1]["a"] = 7.0, 1
    assert (first[0].tolist(), first[1]) == ([0.0, 0.0], {})
    assert unpack_of_envelope(pack_of_envelope(second))[0].tolist() == [7.0, 7.0]


def test_buffers_are_of_one_worker_and_end_where_a_sample_is_missing() -> None:
    one, other = ([each._replace(client=client) for each in episode(4)] for client in (b"1" * 16, b"2" * 16))
    mixed = [*one[:2], *other[2:4], *one[2:4], *other[:1], *other[3:]]
    buffers = [[(each.client[:1], each.step) for each in buffer] for buffer in split_into_runs(mixed)]
    assert buffers == [[(b"1", 0), (b"1", 1)], [(b"2", 2), (b"2", 3)], [(b"1", 2), (b"1", 3)], [(b"2", 0)],
                     [(b"2", 3), (b"2", 4)]]  # fmt: skip
    assert len(split_into_runs([*one, *one])) == 1, "a reset begins an episode, and no buffer"
