"""Tests of a full, read-only or failing disk under a server's files, and of kills at every point of the store."""

import errno
import os
import re
import shutil
import sqlite3
import subprocess
from pathlib import Path

import numpy as np
import pytest

import powerkit
from memoire.disk.files import check_file_system
from memoire.disk.state_folder import Store
from memoire.errors import MemoireTimeout, Refused, StateLost, StateUnusable
from memoire.limits import Limits
from memoire.models.model import make
from memoire.prompts.calls import Prompts
from memoire.tables.table import Table
from netkit import QUICK, SCHEMA, until
from powerkit import check_state
from statekit import (
    CLIENTS,
    Faulty,
    Keeper,
    account,
    contents,
    failing,
    folder_in_memory,
    keeper_of_all,
    own_accounts,
    text_of_log,
)
from store_child import HITS, STEPS

pytestmark = pytest.mark.slow

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of one megabyte, and yield its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def room_left(disk, size):
    """Fill a disk until `size` bytes are free; return the file that fills it."""
    ballast = disk / "ballast"
    ballast.write_bytes(b"x" * max(0, shutil.disk_usage(disk).free - size))
    return ballast


@pytest.mark.parametrize("room", [0, 20_000, 60_000, 200_000])
def test_a_full_disk_delays_and_loses_nothing(small_disk, room):
    """`room` bytes are free at first, so that the disk becomes full at another place for each value."""
    keeper = Keeper(small_disk / "state", limits=Limits.of(log_bytes=1 << 20))
    ballast = room_left(small_disk, room)
    tickets = []
    for n in range(1, 100):
        lines = [(client, n, f"line {n} " + "x" * 400) for client in CLIENTS]
        models = [make("policy", bytes([n]) * 30_000, n)] if n % 3 == 0 else []
        tickets.append(keeper.post(accounts=[account(CLIENTS[0], n)], lines=lines, models=models))
        if not until(lambda: tickets[-1] in keeper.acknowledged or keeper.store.problem):
            break
        if not keeper.store.is_healthy:
            break
    until(lambda: not keeper.store.is_healthy)
    assert "the disk is full since" in keeper.store.problem and "nothing is acknowledged" in keeper.store.problem
    before = len(keeper.acknowledged)
    assert tickets[-1] not in keeper.acknowledged
    assert own_accounts(keeper.store) == [] or own_accounts(keeper.store)[0].report.episodes < n
    ballast.write_bytes(b"")
    until(lambda: tickets[-1] in keeper.acknowledged)
    assert len(keeper.acknowledged) > before and not keeper.failures
    assert keeper.store.is_healthy
    keeper.save(lines=[(CLIENTS[0], n + 1, "more")])
    saved = contents(keeper.store)
    assert keeper.close()
    with Store(small_disk / "state") as store:
        assert contents(store) == saved
        assert saved["accounts"][0].report.episodes == n and saved["count"] == 8 * n + 1
        assert text_of_log(small_disk / "state").count(b"\n") == saved["count"]


class Users:
    """Users of a server that keeps prompts and caches in a state folder."""

    def __init__(self, cluster, folder):
        self._cluster, self.folder = cluster, folder
        self.server = self.start()
        client = Prompts(self.server.endpoint, table="p", timeout=100.0, context=cluster.context, limits=QUICK)
        self.prompts = prompts = cluster.keep(client)
        local, self.reader = (
            self.server.table("p").calls(),
            cluster.reader([self.server], table="default", limits=QUICK),
        )
        prompts.add({0: b"x"})
        lease = prompts.lease()[0]
        self.calls = {
            "add": lambda t: prompts.add({1: bytes(100_000)}, timeout=t),
            "answer": lambda t: prompts.answer(lease, 0, {"reward": 1.0}, timeout=t),
            "draw": lambda t: prompts.draw(0, 1, timeout=t),
            "commit": lambda t: prompts.commit(0, timeout=t),
            "counts": lambda t: prompts.counts(timeout=t),
            "finish": lambda t: prompts.finish(timeout=t),
            "here": lambda t: local.add({2: b"y"}, timeout=t),
            "publish": lambda t: self.reader.publish("t", b"model", timeout=t),
            "configure": lambda t: self.reader.configure(cache_size=7, timeout=t),
        }

    def start(self):
        table = Table({"reward": np.float32}, storage="prompts", group=1)
        tables = {"p": table, "default": Table(SCHEMA)}
        return self._cluster.server(schema=None, tables=tables, name="home", state=self.folder, limits=QUICK)

    def check_refused(self, trouble):
        """Check that each call that has to save is refused with the trouble and the folder."""
        for name, call in self.calls.items():
            for timeout in (0.3, 3.0, 30.0):  # a busy machine may report the cause late
                with pytest.raises((Refused, MemoireTimeout, StateLost)) as caught:
                    call(timeout)
                if match := re.search(trouble, str(caught.value)):
                    break
            assert match, caught.value
            assert str(self.folder) in str(caught.value), name
        (reason,) = re.findall(trouble, self.server.readiness()[0])
        assert reason and re.search(trouble, self.server.stats().folder.trouble)

    def check_kept(self):
        """Check that after a restart the acknowledged prompt is present, and no refused one."""
        counts = self.start().table("p").calls().counts()
        assert sum(counts[state] for state in ("waiting", "leased", "answered", "ready", "drawn", "committed")) == 1

    def check_going_on(self):
        until(lambda: not self.server.readiness())
        assert self.prompts.counts()["waiting"] in (0, 1)
        assert [self.calls[name](100.0) for name in ("add", "answer", "finish")]
        assert self.prompts.draw(0, 1).step == 0
        self.prompts.commit(0)
        assert self.reader.publish("t", b"model") >= 1


def test_users_of_a_server_whose_disk_is_full_hear_that_and_where_and_go_on_when_there_is_room(small_disk, cluster):
    users = Users(cluster, small_disk / "state")
    ballast = room_left(small_disk, 0)
    users.check_refused(r"the disk is full since .* Make room there")
    ballast.write_bytes(b"")
    users.check_going_on()


@pytest.mark.parametrize(
    ("number", "trouble"),
    [
        (errno.EDQUOT, r"the disk quota is used up since .* Make room there, or raise the quota, and it goes on"),
        (errno.EROFS, r"the file system is read-only since .* Mount it writable, and it goes on"),
        (errno.EIO, r"could not be saved: .*Input/output error. Nothing is acknowledged .* start the server again"),
    ],
)
def test_users_of_a_server_whose_disk_fails_hear_why_and_nothing_acknowledged_is_lost(
    tmp_path, cluster, store_by, number, trouble
):
    fault = Faulty("before commit")
    store_by(fault.open_store)
    users = Users(cluster, tmp_path / "state")
    fault.error = OSError(number, os.strerror(number))
    users.check_refused(trouble)
    fault.error = None
    if number != errno.EIO:
        users.check_going_on()
        return
    users.check_refused(trouble)
    users.server.close()
    users.check_kept()


@pytest.fixture
def failing_disk(tmp_path):
    """Yield the folder of an ext4 file system, a function that makes it read-only by an error, and its mount command."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 16 << 20)
    done = subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True, check=False) if MKFS else None
    mount = ["mount", "-o", "loop,errors=remount-ro", str(image), str(folder)]
    if done is None or done.returncode or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    device = subprocess.run(["findmnt", "-no", "SOURCE", str(folder)], capture_output=True, text=True, check=True)
    trigger = Path("/sys/fs/ext4", Path(device.stdout.strip()).name, "trigger_fs_error")
    yield folder, lambda: trigger.write_text("1"), mount
    subprocess.run(["umount", "-l", str(folder)], check=True)


MKFS = shutil.which("mkfs.ext4")


def test_a_file_system_that_becomes_read_only_loses_nothing_and_is_gone_on_with_after_its_repair(failing_disk, cluster):
    folder, fail, mount = failing_disk
    users = Users(cluster, folder / "state")
    fail()
    users.check_refused(r"the file system is read-only since .* Mount it writable, and it goes on by itself")
    with pytest.raises(StateUnusable, match="its file system is read-only. Mount it writable, and start again"):
        Store(folder / "other")
    users.server.close()
    subprocess.run(["umount", str(folder)], check=True)
    subprocess.run(["e2fsck", "-p", str(folder.parent / "image")], capture_output=True, check=False)
    subprocess.run(mount, check=True)
    users.check_kept()


def in_checkpoint(keeper, disk):
    """Fill the disk so that the database cannot take over its log, which keeps the value."""
    keeper.save(settings={"a": "x" * 200_000})
    ballast = room_left(disk, 0)
    with pytest.raises(sqlite3.OperationalError, match="disk is full"):
        keeper.store._file.checkpoint()
    assert keeper.store.settings()["a"] == "x" * 200_000
    ballast.write_bytes(b"")


def in_backup(keeper, disk):
    """Fill the disk so that a backup fails and the former one stays."""
    keeper.store.back_up()
    keeper.save(settings={"a": "x" * 200_000})
    former = (disk / "state" / "state.db.backup-1").read_bytes()
    ballast = room_left(disk, 60_000)
    with pytest.raises((OSError, sqlite3.OperationalError), match=r"disk is full|No space left"):
        keeper.store.back_up()
    assert (disk / "state" / "state.db.backup-1").read_bytes() == former
    ballast.write_bytes(b"")
    keeper.store.back_up()


@pytest.mark.parametrize("fill", [in_checkpoint, in_backup])
def test_a_real_disk_that_is_full_at_a_write_of_sqlite_loses_nothing(small_disk, fill):
    keeper = Keeper(small_disk / "state")
    keeper.save(accounts=[account(CLIENTS[0], 1)], settings={"b": "before"})
    fill(keeper, small_disk)
    keeper.save(accounts=[account(CLIENTS[0], 2)])
    saved = contents(keeper.store)
    assert not keeper.failures and keeper.close()
    with Store(small_disk / "state") as store:
        assert contents(store) == saved and store.settings() == {"a": "x" * 200_000, "b": "before"}
        assert [one.report.episodes for one in own_accounts(store)] == [2]


def test_a_folder_on_a_full_disk_is_refused_and_opens_when_there_is_room(small_disk):
    for name in ("new", "old"):
        folder = small_disk / name
        folder.mkdir()
        if name == "old":
            keeper_of_all(folder).close()
        before = {path.name: path.read_bytes() for path in folder.glob("state.db")}
        ballast = room_left(small_disk, 0)
        with pytest.raises(StateUnusable, match="disk is full"):
            Store(folder, "home")
        assert {path.name: path.read_bytes() for path in folder.glob("state.db")} == before
        ballast.write_bytes(b"")
        with Store(folder, "home") as store:
            assert len(own_accounts(store)) == (8 if name == "old" else 0)


def test_a_full_disk_is_found_whatever_says_so(tmp_path):
    for number, (point, error) in enumerate(
        [
            ("before commit", failing(sqlite3.SQLITE_FULL, "SQLITE_FULL")),
            ("before model", OSError(28, "No space left on device")),
            ("before begin", failing(sqlite3.SQLITE_BUSY_SNAPSHOT, "SQLITE_BUSY_SNAPSHOT")),
            ("before begin", failing(sqlite3.SQLITE_LOCKED, "SQLITE_LOCKED")),
        ]
    ):
        fault = Faulty(point)
        with Keeper(tmp_path / str(number), at=fault) as keeper:
            fault.error = error
            ticket = keeper.post(accounts=[account(CLIENTS[0], 3)], models=[make("m", b"x" * 20_000, 1)])
            until(lambda keeper=keeper: not keeper.store.is_healthy)
            assert ticket not in keeper.acknowledged
            fault.error = None
            until(lambda ticket=ticket, keeper=keeper: ticket in keeper.acknowledged)
            assert keeper.store.is_healthy and keeper.store.problem == ""
            assert [one.report.episodes for one in own_accounts(keeper.store)] == [3]


def test_closing_with_a_full_disk_ends_in_time_and_says_that_something_is_unsaved(tmp_path):
    fault = Faulty("before commit")
    keeper = Keeper(tmp_path, at=fault)
    fault.error = failing(sqlite3.SQLITE_FULL, "SQLITE_FULL")
    ticket = keeper.post(accounts=[account(CLIENTS[0], 3)])
    until(lambda: fault.raised)
    assert not keeper.close(timeout=0.5)
    assert ticket not in keeper.acknowledged
    with Store(tmp_path) as store:
        assert own_accounts(store) == []


def test_text_that_cannot_be_written_holds_nobody_up_and_is_completed(tmp_path):
    fault = Faulty("before text")
    with Keeper(tmp_path, at=fault) as keeper:
        keeper.save(lines=[(CLIENTS[0], 1, "one")])
        shutil.rmtree(tmp_path / "log")
        (tmp_path / "log").write_text("in the way")
        keeper.save(lines=[(CLIENTS[0], 2, "two")])
        assert "cannot be written" in keeper.store.problem and keeper.store.is_healthy
        (tmp_path / "log").unlink()
        until(lambda: keeper.store.problem == "")
        keeper.save(lines=[(CLIENTS[0], 3, "three")])
    assert b"two" in text_of_log(tmp_path) and b"three" in text_of_log(tmp_path)


@pytest.mark.parametrize("name", ["SQLITE_IOERR_FSYNC", "SQLITE_IOERR_WRITE", "SQLITE_CORRUPT"])
def test_after_an_error_of_the_disk_nothing_is_acknowledged_any_more(tmp_path, name):
    fault = Faulty("before commit")
    keeper = Keeper(tmp_path, at=fault)
    fault.error = failing(getattr(sqlite3, name), name)
    ticket = keeper.post(accounts=[account(CLIENTS[0], 3)])
    until(lambda: keeper.failures)
    fault.error = None
    assert isinstance(keeper.failures[0], StateLost) and name in str(keeper.failures[0])
    assert str(keeper.failures[0]) == keeper.store.problem and not keeper.store.is_healthy
    later = keeper.post(accounts=[account(CLIENTS[0], 4)])
    assert not keeper.close()
    assert not {ticket, later} & set(keeper.acknowledged) and len(keeper.failures) == 1
    with Store(tmp_path) as store:
        assert own_accounts(store) == []


COMPILER = shutil.which("gcc") or shutil.which("cc")
SHIM = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <unistd.h>
static int failing(void) { return access(FLAG, F_OK) == 0; }
int fsync(int fd) { if (failing()) { errno = EIO; return -1; } return syncfs(fd); }
int fdatasync(int fd) { return fsync(fd); }
"""
VICTIM = """
import sys
from pathlib import Path
from statekit import *
keeper = Keeper(Path(sys.argv[1]))
keeper.save(accounts=[account(CLIENTS[0], 1)])
Path(sys.argv[2]).touch()
ticket = keeper.post(accounts=[account(CLIENTS[0], 2)])
until(lambda: keeper.failures)
assert ticket not in keeper.acknowledged and not keeper.close()
print(keeper.failures[0])
"""


@pytest.mark.skipif(not COMPILER, reason="no C compiler to make a failing disk with")
def test_an_error_of_the_systems_own_sync_is_never_forgiven(tmp_path):
    """A preloaded library makes fdatasync fail, as a dying disk would."""
    library = powerkit.compiled(SHIM.replace("FLAG", f'"{tmp_path}/flag"'), tmp_path)
    done = powerkit.python("-c", VICTIM, tmp_path / "state", tmp_path / "flag", library=library)
    assert "SQLITE_IOERR_FSYNC" in done.stdout
    with Store(tmp_path / "state") as store:
        assert own_accounts(store)[0].report.episodes >= 1


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, request):
    folder = tmp_path / "state"
    Store(folder, "a").close()
    if os.getuid():
        folder.chmod(0o500)
        for path in folder.iterdir():
            path.chmod(0o500 if path.is_dir() else 0o400)
    else:
        bound = subprocess.run(["mount", "--bind", str(folder), str(folder)], capture_output=True, check=False)
        if bound.returncode:
            pytest.skip("mounting a small disk needs root")
        request.addfinalizer(lambda: subprocess.run(["umount", "-l", str(folder)], check=True))
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
    with pytest.raises(StateUnusable, match="read-only|may not write"):
        Store(folder, "a")


@pytest.mark.parametrize(
    ("kind", "is_refused"),
    [("ext4", False), ("overlay", False), ("fuseblk", False), ("nfs4", True), ("cifs", True), ("fuse.sshfs", True)],
)
def test_network_file_systems_are_refused(kind, is_refused):
    mounts = (
        "22 1 254:0 / / rw,relatime - ext4 /dev/root rw\n"
        f"30 22 0:1 / /no\\040where rw shared:1 - {kind} server:/x rw\n"
        "31 22 0:2 / /no rw - tmpfs none rw\n"
    )
    check_file_system(Path("/no/where else"), mounts)
    check_file_system(Path("/no where2"), mounts)
    if not is_refused:
        check_file_system(Path("/no where/state"), mounts)
        return
    with pytest.raises(StateUnusable, match=rf"network or user-space file system \({kind}\).*local disk"):
        check_file_system(Path("/no where/state"), mounts)


# --- SIGKILL at every point between two steps of the store: acknowledged data stays, and no step is half done

POINTS = [
    "before create", "after create", "before epoch", "before begin", "before commit", "after commit", "before text",
    "after text", "before model", "after model", "before backups", "between backups", "after backups", "before forgetting",
    "before checkpoint", "after checkpoint",
]  # fmt: skip
OF_FILES = ["write", "sync", "replace", "sync folder"]
"""Steps of replacing a file, here a snapshot."""


@pytest.fixture
def in_memory():
    with folder_in_memory() as folder:
        yield folder


def check(folder):
    """Check that the folder holds whole steps, all acknowledged ones among them; return their number."""
    return check_state(folder / "state", (folder / "acks").stat().st_size)


@pytest.mark.parametrize(
    "points", [POINTS[::3], POINTS[1::3], [*POINTS[2::3], *OF_FILES]], ids=["some", "others", "the rest"]
)
def test_a_kill_at_any_point_loses_nothing_that_was_acknowledged(in_memory, points):
    powerkit.python(TESTS / "support" / "store_child.py", "points", in_memory, *points)
    folders = sorted(in_memory.iterdir())
    assert len(folders) == len(points) * len(HITS)
    killed = {folder.name.rpartition("-")[0] for folder in folders if (folder / "status").read_text() == "-9"}
    assert killed == {point.replace(" ", "_") for point in points}, "a point was never reached"
    for folder in folders:
        assert (folder / "status").read_text() in ("-9", "0"), folder.name
        step = check(folder)
        assert step == STEPS or (folder / "status").read_text() == "-9"


def test_every_point_of_the_store_is_tried():
    others = ("replay/files.py", "tq/interface.py")  # test_every_file.py kills the process at each point of these files
    package = TESTS.parent / "memoire"
    paths = [path for path in package.rglob("*.py") if path.relative_to(package).as_posix() not in others]
    sources = "".join(path.read_text() for path in paths)
    assert set(re.findall(r'\b_?at\("([^"]+)"\)', sources)) == set(POINTS)


@pytest.mark.skipif(not COMPILER, reason="no C compiler to make a failing disk with")
def test_a_power_failure_at_any_moment_loses_nothing_that_was_acknowledged(in_memory, tmp_path):
    """Unsynced writes are lost, in part or as a whole, and in any order."""
    recorded = powerkit.record(in_memory, tmp_path, TESTS / "support" / "store_child.py", "steps", in_memory, 3)
    assert len(recorded) > 250
    counts = [
        check_state(in_memory / "after" / "state", acknowledged)
        for _, acknowledged in powerkit.failures(recorded, in_memory, in_memory / "after", 40, seed=1)
    ]
    assert counts == sorted(counts) and counts[-1] >= 5
