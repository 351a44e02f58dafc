"""Journal of samples: contents after a kill in any write, and old files that leave with the memory."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from memoire.errors import DataError, ParameterError
from memoire.rl.memory import GenericMemory
from memoire.rl.samples import KeptBuffer, SampleJournal, packed_buffer, unpacked_buffer
from memoire.wire.values import pack
from rlkit import same


def sample(number, done=False, **info):
    return np.float32([number]), (np.float32([number, 0.5]), {"n": number}), float(number), done, info


def buffer(first, size=5, **options):
    return SimpleNamespace(memory=[sample(first + place, place == size - 1) for place in range(size)], **options)


def numbers(journal):
    return [each[1][1]["n"] for kept in journal.buffers() for each in kept.memory]


def test_samples_of_any_form_come_back_with_their_types():
    odd = [(1, np.zeros(())), [2**70, np.bool_(True)], {}, (), None, np.array(["a", "bc"]), (np.zeros(2), 0.5)]
    odd.append((None, b"x"))
    samples = [*odd, *(sample(number) for number in range(9)), (np.zeros(3), 0.5), (np.float32(1), 1), *odd]
    unpacked = unpacked_buffer(packed_buffer(KeptBuffer(samples, None, True)))
    assert (unpacked.starts, unpacked.continues, len(unpacked)) == (None, True, len(samples))
    assert same(samples, unpacked.memory)


ONE = (2, None, [(0, pack([1.0, 2.0]))])


@pytest.mark.parametrize(
    "parts",
    [
        None, 5, {}, (), ([ONE],), ([ONE], [], False), ([ONE], [True], True), ([ONE], None, 1), ([3], None, True),
        ([(3, *ONE[1:])], None, True), ([(2, (None, None), ONE[2])], None, True), ([(2, None, [])], None, True),
        ([(2, None, [(1, pack([1.0, 2.0]))])], None, True), ([(2, None, [(0, b"x")])], None, True),
        ([(-1, (), [])], [True], True), ([("2", (), [])], None, True), ([(2**63, (), [])], None, True),
    ],
)  # fmt: skip
def test_a_record_that_contradicts_itself_is_refused(parts):
    assert unpacked_buffer(pack(([ONE], None, True))) == KeptBuffer([1.0, 2.0], None, True)
    with pytest.raises(DataError, match="a record of samples"):
        unpacked_buffer(pack(parts))


def test_arrays_of_one_form_take_little_more_than_their_values():
    few, many = (packed_buffer(KeptBuffer([sample(number) for number in range(count)])) for count in (100, 200))
    assert len(many) - len(few) <= 100 * (4 + 8 + 3 + 9 + 1)


def test_a_record_that_is_cut_short_is_refused():
    body = packed_buffer(KeptBuffer([sample(1), sample(2)]))
    for given_ in (*(body[:size] for size in range(len(body))), body + b"x"):
        with pytest.raises(DataError, match="a record of samples"):
            unpacked_buffer(given_)


@pytest.mark.parametrize("wrong", [object(), np.array([object()]), np.zeros(1, [("a", int)])])
def test_what_cannot_be_stored_is_named_with_its_place(wrong):
    with pytest.raises(ParameterError, match=r"sample\[1\]\['x'\] must be (plain values|arrays of numbers)"):
        packed_buffer(KeptBuffer([(1, {"x": wrong})]))


def test_a_memory_is_rebuilt_by_its_own_append_buffer(tmp_path):
    memory, again = GenericMemory(100), GenericMemory(100)
    with SampleJournal(tmp_path, 100) as journal:
        for first in range(0, 60, 5):
            given_ = buffer(first, starts=[place == 0 for place in range(5)], continues=first == 10)
            memory.append(given_.memory, given_.starts, continues=given_.continues)
            journal.keep(given_)
        journal.commit()
    for kept in SampleJournal(tmp_path, 100).buffers():
        again.append(kept.memory, kept.starts, continues=kept.continues)
    assert len(again) == len(memory)
    for item in range(len(memory)):
        assert same(memory.transition(item), again.transition(item))


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
    assert journal.size == sum(path.stat().st_size for path in tmp_path.glob("*.samples"))
    journal.close()
    assert len(SampleJournal(tmp_path, 640)) == len(journal)


def test_what_is_left_of_a_damaged_journal_is_read_only_when_it_is_asked_for(tmp_path):
    with SampleJournal(tmp_path, 320) as journal:  # 10 samples per file
        for first in range(0, 60, 5):
            journal.keep(buffer(first))
            journal.commit()
    files = sorted(tmp_path.glob("*.samples"))
    damaged = bytearray(files[1].read_bytes())
    damaged[100] ^= 1  # the change hits the first of two payloads
    files[1].write_bytes(damaged)
    files[3].unlink()
    with pytest.raises(DataError, match=files[1].name):
        SampleJournal(tmp_path, 320)
    missing = []
    kept = [sample[1][1]["n"] for each in SampleJournal.salvage(tmp_path, missing) for sample in each.memory]
    assert kept == [*range(10), *range(15, 30), *range(40, 60)]
    assert ["is damaged within" in str(missing[0]), "those from 6 on are missing" in str(missing[1])] == [True, True]
    assert len(missing) == 2
    assert {*tmp_path.glob("*.samples")} == {*files} - {files[3]}


def test_replaying_holds_one_record_at_a_time(tmp_path):
    journal = SampleJournal(tmp_path, 64_000)
    picture = np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)
    for first in range(0, 4000, 100):
        journal.keep(SimpleNamespace(memory=[(0, picture + np.uint8(first % 251), 0.0, False, {}) for _ in range(100)]))
    journal.keep(SimpleNamespace(memory=[(0, picture ^ np.uint8(n % 7), 0.0, False, {}) for n in range(2000)]))
    journal.commit()
    journal.close()
    tracemalloc.start()
    for _ in SampleJournal(tmp_path, 64_000).buffers():
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * journal.size / 2
