"""Samples come back from a journal as they came, in whatever write it was killed; old files leave with the memory."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from memoire.errors import DataError, ParameterError
from memoire.rl.memory import GenericMemory
from memoire.rl.sample_journal import Files, KeptBuffer, SampleJournal
from memoire.rl.sample_records import packed, unpacked
from memoire.rl.trees import leaves_of, structure_of


def sample(number, done=False, **info):
    return np.float32([number]), (np.float32([number, 0.5]), {"n": number}), float(number), done, info


def buffer(first, size=5, **options):
    return SimpleNamespace(memory=[sample(first + place, place == size - 1) for place in range(size)], **options)


def numbers(journal):
    return [each[1][1]["n"] for kept in journal.buffers() for each in kept.memory]


def same(first, second):
    assert structure_of(first) == structure_of(second)
    for one, other in zip(leaves_of(first), leaves_of(second), strict=True):
        assert type(one) is type(other)
        if isinstance(one, np.ndarray | np.generic):
            assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_array_equal(one, other)


plain = (
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
)
arrays = hnp.arrays(
    st.sampled_from([np.float32, np.uint8, np.bool_, np.int64, "<U3"]),
    hnp.array_shapes(min_dims=0, max_dims=2, max_side=3),
)
values = st.recursive(
    plain | arrays | st.sampled_from([np.float32(0.5), np.bool_(True)]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=6,
)


@settings(max_examples=40)
@given(st.lists(values, max_size=3), st.integers(1, 3))
def test_plain_values_and_arrays_come_back_with_their_types(samples, repeats):
    given_ = samples * repeats
    found = unpacked(bytearray(packed(given_)))
    assert len(found) == len(given_)
    for one, other in zip(given_, found, strict=True):
        same(one, other)


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(body):
    for given_ in (body, len(body).to_bytes(4, "little") + body):
        try:
            unpacked(given_)
        except DataError:
            pass


def test_a_record_that_is_cut_short_is_refused():
    body = packed([sample(1), sample(2)])
    for size in range(len(body)):
        with pytest.raises(DataError):
            unpacked(body[:size])
    with pytest.raises(DataError, match="belong to no column"):
        unpacked(body + b"x")


@pytest.mark.parametrize("wrong", [object(), 2**70, np.array([object()])])
def test_what_cannot_be_stored_is_named_with_its_place(wrong, tmp_path):
    with pytest.raises(ParameterError, match=r"sample\[1\]\['x'\] must be plain values"):
        packed([(1, {"x": wrong})])


def test_a_memory_is_rebuilt_by_its_own_append_buffer(tmp_path):
    journal, memory = SampleJournal(tmp_path, 100), GenericMemory(100)
    for first in range(0, 60, 5):
        given_ = buffer(first, starts=[place == 0 for place in range(5)], continues=first == 10)
        memory.append(given_.memory, given_.starts, continues=given_.continues)
        journal.keep(given_)
    journal.commit()
    again = GenericMemory(100)
    for kept in SampleJournal(tmp_path, 100).buffers():
        again.append(kept.memory, kept.starts, continues=kept.continues)
    assert len(again) == len(memory)
    for item in range(len(memory)):
        same(memory.transition(item), again.transition(item))


def test_buffers_come_back_with_what_was_said_of_them(tmp_path):
    journal = SampleJournal(tmp_path, 1000)
    journal.keep(buffer(0))
    journal.keep(buffer(5, starts=[True, False, False, False, False], continues=True))
    journal.commit()
    first, second = SampleJournal(tmp_path, 1000).buffers()
    assert (first.starts, first.continues, len(first)) == (None, False, 5)
    assert (second.starts, second.continues) == ([True, False, False, False, False], True)
    assert isinstance(first, KeptBuffer)


def test_only_news_are_written_and_files_leave_with_what_the_memory_forgot(tmp_path):
    journal, sizes = SampleJournal(tmp_path, 640), []
    for first in range(0, 3200, 5):
        journal.keep(buffer(first))
        if first % 640 == 635:
            journal.commit()
            sizes.append(len(journal))
    journal.commit()
    assert numbers(journal) == list(range(3200 - len(journal), 3200))
    assert 640 <= len(journal) <= 640 * 1.25 and max(sizes) <= 640 * 1.25
    assert journal.size == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert len(SampleJournal(tmp_path, 640)) == len(journal)


class Killed(BaseException):
    """Stands for kill -9: nobody catches it."""


class Killing(Files):
    """Is killed in its n-th operation: a write gets as far as `share` of its bytes."""

    def __init__(self, at, share):
        self.left, self.share = at, share

    def step(self):
        self.left -= 1
        return self.left < 0

    def append(self, path, data):
        is_last = self.step()
        super().append(path, data[: int(len(data) * self.share)] if is_last else data)
        if is_last:
            raise Killed

    def sync(self, path):
        if self.step():  # what a killed process wrote stays: no test needs the disk
            raise Killed

    def cut(self, path, size):
        if self.step():
            raise Killed
        super().cut(path, size)

    def remove(self, path):
        if self.step() and self.share < 1:
            raise Killed
        super().remove(path)
        if self.left < 0:
            raise Killed


def test_it_survives_a_kill_in_each_of_its_writes(tmp_path):
    is_over, at = False, 0
    while not is_over:
        for share in (0.0, 0.01, 0.99, 1.0):
            folder = tmp_path / f"{at}-{share}"
            kept = committed = 0
            try:
                journal = SampleJournal(folder, 20, files=Killing(at, share))
                for first in range(0, 60, 5):
                    kept = first + 5
                    journal.keep(buffer(first))
                    if first % 15 == 10:
                        journal.commit()
                        committed = kept
                is_over = True
            except Killed:
                pass
            again = SampleJournal(folder, 20)
            found = numbers(again)
            # Whole buffers, in order, without a gap: all that was committed, and nothing that never came.
            assert found == list(range(found[0], found[-1] + 1)) if found else not committed
            assert not found or (committed <= found[-1] + 1 <= kept and found[0] <= max(0, found[-1] + 1 - 20))
            after = found[-1] + 1 if found else 0
            again.keep(buffer(after))
            again.commit()
            assert numbers(SampleJournal(folder, 20))[-6:] == list(range(max(0, after - 1), after + 5))[-6:]
        at += 1
    assert at > 20


def test_damage_is_found_when_it_is_read_and_cut_only_at_the_end(tmp_path):
    journal = SampleJournal(tmp_path, 640)
    for first in range(0, 60, 5):
        journal.keep(buffer(first))
    journal.commit()
    files = sorted(tmp_path.iterdir())
    assert len(files) > 2
    body = bytearray(files[0].read_bytes())
    body[40] ^= 1
    files[0].write_bytes(body)
    with pytest.raises(DataError, match=r"000000000000000.samples, byte 0 is damaged: its checksum is wrong"):
        numbers(SampleJournal(tmp_path, 640))
    (tmp_path / "other.samples").write_bytes(b"")
    with pytest.raises(DataError, match="its name is no number"):
        SampleJournal(tmp_path, 640)


def test_replaying_holds_one_record_at_a_time(tmp_path):
    journal = SampleJournal(tmp_path, 64_000)
    picture = np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)
    for first in range(0, 4000, 100):
        journal.keep(SimpleNamespace(memory=[(0, picture + np.uint8(first % 251), 0.0, False, {}) for _ in range(100)]))
    journal.keep(SimpleNamespace(memory=[(0, picture ^ np.uint8(n % 7), 0.0, False, {}) for n in range(2000)]))
    journal.commit()
    tracemalloc.start()
    for _ in SampleJournal(tmp_path, 64_000).buffers():
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * journal.size / 2
