"""Tests of checked files and logs of records: whole or refused by name after damage, cuts, full disks and kills."""

import os
import shutil
import stat

import pytest

from faultkit import FailAt, in_child
from memoire.disk.record_file import FileKind
from memoire.disk.record_log import RecordLog
from memoire.errors import Closed, DataError, ForkedError
from memoire.replay.files import replace_file, replacing

KIND = FileKind(b"memotest", 3, "a file of a test")


def open_log(folder, at=lambda step: None):
    return RecordLog(folder, KIND, ".rec", at=at)


def read(folder):
    with open_log(folder) as log:
        return [tuple(record) for record in log.records()]


def sizes(folder):
    return {path.name: path.stat().st_size for path in folder.glob("*.rec")}


@pytest.mark.parametrize("stays", [False, True])
def test_a_failed_append_is_cut_back_before_the_next_try(tmp_path, stays):
    steps = FailAt()
    log = open_log(tmp_path / "a", steps)
    log.append([(1, b"one")])
    good, begun = sizes(tmp_path / "a"), len(steps.steps)
    log.append([(2, b"two")])
    expected, tried = sizes(tmp_path / "a"), steps.steps[begun:]
    log.close()
    for number in range(1, len(tried) + 1):
        folder = tmp_path / f"{number}-{stays}"
        fault = FailAt(stays=stays)

        def at(step, folder=folder, fault=fault):
            if step == "write" and len(fault.steps) + 1 == fault.number:
                with next(folder.glob("*.rec")).open("ab") as file:
                    file.write(b"a part of a record")
            fault(step)

        log = open_log(folder, at)
        log.append([(1, b"one")])
        fault.number = len(fault.steps) + number
        with pytest.raises(OSError, match="No space left"):
            log.append([(2, b"two")])
        if not stays:
            assert sizes(folder) == good
        else:
            with pytest.raises(OSError, match="No space left"):
                log.append([(2, b"two")])
        fault.number = -1
        log.append([(2, b"two")])
        assert sizes(folder) == expected
        log.close()
        assert read(folder) == [(1, b"one"), (2, b"two")]


def test_what_was_written_since_the_last_sync_may_be_zeros_or_gone(tmp_path):
    copies, folder, is_copied = [], tmp_path / "a", []

    def at(step):
        if is_copied:
            copies.append(tmp_path / f"{len(copies)}-{step}")
            shutil.copytree(folder, copies[-1])

    log = open_log(folder, at)
    log.append([(1, bytes(range(256)) * 20)])
    counted = (folder / "000000000000000.rec").stat().st_size
    is_copied.append(True)
    log.append([(2, bytes(range(256)) * 20)])
    log.close()
    assert {"write", "sync", "count", "sync counter"} == {copy.name.partition("-")[2] for copy in copies}
    for copy in copies:
        content, is_synced = (
            (copy / "000000000000000.rec").read_bytes(),
            copy.name.partition("-")[2].startswith(("count", "sync counter")),
        )
        for tail in (0, 512, 4096, len(content)):
            keep = max(counted, len(content) - (0 if is_synced else tail))
            for damaged in (content[:keep], content[:keep] + bytes(len(content) - keep)):
                shutil.copytree(copy, tmp_path / "damaged")
                (tmp_path / "damaged" / "000000000000000.rec").write_bytes(damaged)
                tags = [tag for tag, _ in read(tmp_path / "damaged")]
                shutil.rmtree(tmp_path / "damaged")
                assert tags in ([1], [1, 2])
                assert tags == [1, 2] or not is_synced


def test_a_fork_writes_nothing_and_does_not_hold_the_folder(tmp_path):
    log = open_log(tmp_path)
    log.append([(1, b"one")])

    def use():
        for act in (lambda: log.append([(2, b"child")]), lambda: log.remove(1)):
            with pytest.raises(ForkedError, match="belongs to process"):
                act()
        log.close()

    assert in_child(use) == 0
    with pytest.raises(OSError, match="full"):
        log.append(iter_then_fail())
    assert in_child(use) == 0
    log.append([(2, b"two")])
    log.close()
    assert read(tmp_path) == [(1, b"one"), (2, b"two")]
    log = open_log(tmp_path)
    assert in_child(lambda: (log.close(), None)) == 0
    with pytest.raises(Exception, match="in use"):
        open_log(tmp_path)
    log.close()


def iter_then_fail():
    yield 2, b"never"
    raise OSError("the disk is full")


def test_a_file_whose_name_is_no_number_is_refused(tmp_path):
    with open_log(tmp_path) as log:
        log.append([(1, b"one")])
    next(tmp_path.glob("*.rec")).rename(tmp_path / "mine.rec")
    with pytest.raises(DataError, match="its name is not the number"):
        open_log(tmp_path)


def test_files_that_are_changed_while_the_log_is_open_are_refused(tmp_path):
    log = open_log(tmp_path)
    log.append([(1, b"one"), (2, b"two")])
    path = tmp_path / "000000000000000.rec"
    content = bytearray(path.read_bytes())
    for damaged in (content[:-1], content[:48], b"", content[:-1] + b"x"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="rec "):
            list(log.records())


def test_a_closed_log_takes_nothing(tmp_path):
    log = open_log(tmp_path)
    log.append([(1, b"one")])
    log.close()
    log.close()
    with pytest.raises(Closed, match="the log .* is closed"):
        log.append([(2, b"two")])


def test_a_file_begins_when_it_is_asked_for_and_the_oldest_go(tmp_path):
    log = open_log(tmp_path)
    log.begin_file()
    for tag in range(6):
        log.append([(tag, b"x")])
        if tag % 2:
            log.begin_file()
            log.begin_file()
    assert [(file.first, file.tags) for file in log.files] == [(0, [0, 1]), (2, [2, 3]), (4, [4, 5])]
    log.remove(0)
    log.remove(2)
    log.remove(9)
    assert [tag for tag, _ in log.records()] == [4, 5]
    log.close()
    assert read(tmp_path) == [(4, b"x"), (5, b"x")]
    assert [path.name for path in tmp_path.glob("*.rec")] == ["000000000000004.rec"]


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
