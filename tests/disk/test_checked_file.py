"""Files that memoire replaces or checks: whole or refused by name, whatever was damaged, cut off, full or killed."""

import os
import stat
import struct
import threading

import pytest

from faultkit import FailAt, in_child
from memoire.disk import record_file as checked_file
from memoire.disk.record_file import CheckedFile, FileKind
from memoire.errors import DataError, ForkedError, ParameterError
from memoire.replay.files import replace_file, replacing
from memoire.wire import _bytes

KIND = FileKind(b"memotest", 3, "a file of a test")
RECORDS = [(7, b"hello"), (0, b""), (9, bytes(range(40)))]
LARGE = [(1, bytes(1 << 20)), (2, b"x" * (3 << 19))]
"""Written in several steps."""


def read(path, kind=KIND):
    with CheckedFile(path, kind) as file:
        return [tuple(record) for record in file.records()]


def make(path, records=RECORDS, **options):
    checked_file.write(path, KIND, records, **options)
    return path.read_bytes()


def steps(path):
    counter = FailAt()
    make(path, LARGE, at=counter)
    path.unlink()
    return counter.steps


def test_what_was_written_is_read_in_its_order(tmp_path):
    make(tmp_path / "a")
    assert read(tmp_path / "a") == RECORDS
    with CheckedFile(tmp_path / "a", KIND) as file:
        assert (file.num_records, file.predecessor, len(file.id)) == (3, 0, 16)


def test_a_payload_of_several_pieces_is_read_and_its_last_bit_is_checked(tmp_path):
    records = [(1, bytes(9 << 20)), (2, b"x" * (4 << 20)), (3, os.urandom((4 << 20) + 1))]
    content = bytearray(make(tmp_path / "a", iter(records)))
    assert read(tmp_path / "a") == records
    content[-33] ^= 1  # the last byte of a payload: behind it are the 32 bytes of the end
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError, match="damaged within"):
        CheckedFile(tmp_path / "a", KIND)


def test_records_that_are_moved_doubled_or_left_out_are_refused(tmp_path):
    checked_file.write(tmp_path / "a", KIND, [(1, b"one"), (2, b"two")])
    content = (tmp_path / "a").read_bytes()
    head, size = 48, 32 + 3
    one, two, end = content[head : head + size], content[head + size : head + 2 * size], content[head + 2 * size :]
    for order in ((two, one), (one, one, two), (one,), (two,), ()):
        (tmp_path / "a").write_bytes(content[:head] + b"".join(order) + end)
        with pytest.raises(DataError):
            CheckedFile(tmp_path / "a", KIND)


def test_kind_and_form_are_told_before_anything_else(tmp_path):
    make(tmp_path / "a")
    with pytest.raises(DataError, match="is not a snapshot"):
        CheckedFile(tmp_path / "a", FileKind(b"memosnap", 3, "a snapshot"))
    with pytest.raises(DataError, match="of form 3, .* reads form 4"):
        CheckedFile(tmp_path / "a", FileKind(KIND.magic, 4, "a file of a test"))
    with pytest.raises(DataError, match="cannot be read"):
        CheckedFile(tmp_path / "missing", KIND)


def test_a_claim_of_more_than_the_file_has_allocates_nothing(tmp_path):
    content = make(tmp_path / "a")
    head = content[:48]
    facts = struct.pack("<IIQQ", 1, 0, 1 << 50, 0)
    chain = _bytes.checksum(facts, int.from_bytes(head[-8:], "little"))
    (tmp_path / "a").write_bytes(head + facts + chain.to_bytes(8, "little") + content[48:])
    with pytest.raises(DataError, match="cannot be"):
        CheckedFile(tmp_path / "a", KIND)


def test_a_file_that_is_replaced_while_it_is_read_is_read_to_its_end(tmp_path):
    make(tmp_path / "a")
    with CheckedFile(tmp_path / "a", KIND) as file:
        checked_file.write(tmp_path / "a", KIND, [(1, b"other")])
        assert [tuple(record) for record in file.records()] == RECORDS
    assert read(tmp_path / "a") == [(1, b"other")]


def test_a_file_that_is_changed_while_it_is_read_is_refused(tmp_path):
    content = bytearray(make(tmp_path / "a"))
    with CheckedFile(tmp_path / "a", KIND) as file:
        content[-40] ^= 1
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(DataError):
            list(file.records())


def test_a_disk_that_is_full_at_any_step_leaves_the_former_file_and_no_draft(tmp_path):
    content = make(tmp_path / "a")
    expected = steps(tmp_path / "steps")
    assert {"write", "sync", "replace", "sync folder"} == set(expected)
    for number in range(1, expected.index("sync folder") + 1):
        with pytest.raises(OSError, match="No space left"):
            make(tmp_path / "a", LARGE, at=FailAt(number))
        assert (tmp_path / "a").read_bytes() == content
        assert os.listdir(tmp_path) == ["a"]
    with pytest.raises(OSError, match="No space left"):
        make(tmp_path / "a", LARGE, at=FailAt(len(expected)))
    assert read(tmp_path / "a") == LARGE  # whole, but perhaps not yet under its name on disk
    assert os.listdir(tmp_path) == ["a"]


def test_an_interrupt_or_an_error_of_the_records_leaves_no_draft(tmp_path):
    content = make(tmp_path / "a")

    def records():
        yield 1, b"one"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checked_file.write(tmp_path / "a", KIND, records())
    assert (tmp_path / "a").read_bytes() == content
    assert os.listdir(tmp_path) == ["a"]


def test_the_draft_of_another_writer_and_files_of_other_names_stay(tmp_path):
    (tmp_path / "a.new").write_bytes(b"the user's")
    (tmp_path / ".a.draft").write_bytes(b"the user's")
    with replacing(tmp_path / "a") as file:
        file.write(b"first")
        replace_file(tmp_path / "a", b"second")
        assert (tmp_path / "a").read_bytes() == b"second"
    assert (tmp_path / "a").read_bytes() == b"first"
    assert sorted(os.listdir(tmp_path)) == [".a.draft", "a", "a.new"]
    assert (tmp_path / "a.new").read_bytes() == (tmp_path / ".a.draft").read_bytes() == b"the user's"


def test_writers_at_the_same_time_leave_the_whole_file_of_one_of_them(tmp_path):
    payloads = [bytes([number]) * 300_000 for number in range(4)]
    threads = [
        threading.Thread(target=lambda p=p: [checked_file.write(tmp_path / "a", KIND, [(1, p)]) for _ in range(5)])
        for p in payloads
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    [(tag, payload)] = read(tmp_path / "a")
    assert tag == 1
    assert payload in payloads
    assert os.listdir(tmp_path) == ["a"]


def test_mode_and_link_stay(tmp_path):
    replace_file(tmp_path / "a", b"one", mode=0o600)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    (tmp_path / "a").chmod(0o640)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "a")
    replace_file(tmp_path / "folder" / "link", b"two", mode=0o666)
    assert (tmp_path / "folder" / "link").is_symlink()
    assert (tmp_path / "a").read_bytes() == b"two"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
    replace_file(tmp_path / ("n" * 255), b"longest name")


def test_a_path_that_is_no_file_is_refused_by_name(tmp_path):
    for path in (tmp_path, "/dev/null"):
        with pytest.raises(ParameterError, match="path of a file"):
            replace_file(path, b"")


def test_a_fork_writes_nothing(tmp_path):
    def use(file, act):
        try:
            act(file)
            file.flush()
        except ForkedError as error:
            os._exit(17 if "the draft of" in str(error) else 1)

    with replacing(tmp_path / "a") as file:
        file.write(b"begun, ")
        assert in_child(lambda: use(file, lambda file: file.write(b"child"))) == 17
        assert in_child(lambda: use(file, lambda file: file.write(b"child" * 1_000_000))) == 17
        file.write(b"ended")
    assert (tmp_path / "a").read_bytes() == b"begun, ended"

    def leave_block_in_both():
        with replacing(tmp_path / "a") as file:
            file.write(b"child")
            child = os.fork()
            if child:
                os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    assert in_child(leave_block_in_both) == 1  # the grandchild's ForkedError
    assert (tmp_path / "a").read_bytes() == b"begun, ended"
    assert len(os.listdir(tmp_path)) == 2  # the grandchild left its parent's draft, which a replacement removes
    replace_file(tmp_path / "a", b"new")
    assert os.listdir(tmp_path) == ["a"]
