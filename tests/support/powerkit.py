"""Power failures at any moment of a recorded process: writes that were not synced are lost at random.

A library that is loaded before all other libraries records each write, rename and sync of a process below one folder.
From that record `Disk` makes the folder as a power failure at a given moment may leave it. Synced data is there. Each
other write may be there, missing, or there up to a sector, in any order. Names are there if their folder was synced.
"""

import os
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

from memoire.disk.logs import text_of
from memoire.disk.snapshot_file import ContentCounts, EndRecord, SnapshotFile
from memoire.disk.state_folder import Store
from memoire.limits import Limits
from memoire.tables.base import LARGE_ROWS, LOSABLE_ROWS, SMALL_ROWS
from statekit import CLIENTS, RUN, lines_through, own_accounts, text_of_log

TESTS = Path(__file__).resolve().parents[1]
SECTOR = 512
WRITE, TRUNCATE, SYNC, CREATE, RENAME, UNLINK, MKDIR = range(7)

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int out = -2;
static const char *root;

static long raw_write(int fd, const void *data, size_t size) { return syscall(SYS_write, fd, data, size); }

static int ready(void) {
    if (out == -2) {
        root = getenv("POWER_FOLDER");
        const char *to = getenv("POWER_RECORD");
        out = to ? syscall(SYS_openat, AT_FDCWD, to, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    }
    return out >= 0;
}

static int below(const char *path) { return path && root && !strncmp(path, root, strlen(root)); }

static int name_of(int fd, char *path, size_t most) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, most - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return below(path);
}

static void note(int kind, const char *path, const char *other, uint64_t inode, uint64_t offset, const void *data, uint64_t size) {
    struct { uint32_t kind, path, other, zero; uint64_t inode, offset, size; } head =
        {kind, strlen(path), other ? strlen(other) : 0, 0, inode, offset, size};
    raw_write(out, &head, sizeof head);
    raw_write(out, path, head.path);
    if (other) raw_write(out, other, head.other);
    if (data) raw_write(out, data, size);
}

static uint64_t inode_of(int fd) { struct stat found; return fstat(fd, &found) ? 0 : found.st_ino; }

#define LOCKED(type, call) \
    pthread_mutex_lock(&lock); type result = (call); char path[4200]; int on = ready() && name_of(fd, path, sizeof path);
#define FREE pthread_mutex_unlock(&lock); return result;

ssize_t write(int fd, const void *data, size_t size) {
    LOCKED(ssize_t, raw_write(fd, data, size))
    if (on && result > 0)
        note(0, path, 0, inode_of(fd), syscall(SYS_lseek, fd, 0, SEEK_CUR) - result, data, result);
    FREE
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    LOCKED(ssize_t, syscall(SYS_pwrite64, fd, data, size, at))
    if (on && result > 0) note(0, path, 0, inode_of(fd), at, data, result);
    FREE
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return pwrite(fd, data, size, at); }
int ftruncate(int fd, off_t size) {
    LOCKED(int, syscall(SYS_ftruncate, fd, size))
    if (on && !result) note(1, path, 0, inode_of(fd), size, 0, 0);
    FREE
}
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }
int fsync(int fd) {
    LOCKED(int, syscall(SYS_fsync, fd))
    if (on && !result) note(2, path, 0, inode_of(fd), 0, 0, 0);
    FREE
}
int fdatasync(int fd) { return fsync(fd); }

static int opened(int from, const char *name, int flags, int mode) {
    pthread_mutex_lock(&lock);
    int is_new = (flags & O_CREAT) && syscall(SYS_faccessat, from, name, F_OK) != 0;
    int fd = syscall(SYS_openat, from, name, flags, mode);
    char path[4200];
    if (fd >= 0 && ready() && name_of(fd, path, sizeof path)) {
        if (is_new) note(3, path, 0, inode_of(fd), 0, 0, 0);
        else if (flags & O_TRUNC) note(1, path, 0, inode_of(fd), 0, 0, 0);
    }
    pthread_mutex_unlock(&lock);
    return fd;
}
#define MODE int mode = 0; if (flags & O_CREAT) { va_list rest; va_start(rest, flags); mode = va_arg(rest, int); va_end(rest); }
int open(const char *name, int flags, ...) { MODE return opened(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE return opened(AT_FDCWD, name, flags, mode); }
int openat(int from, const char *name, int flags, ...) { MODE return opened(from, name, flags, mode); }
int openat64(int from, const char *name, int flags, ...) { MODE return opened(from, name, flags, mode); }

int rename(const char *from, const char *to) {
    pthread_mutex_lock(&lock);
    int result = syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
    if (!result && ready() && below(from)) note(4, from, to, 0, 0, 0, 0);
    pthread_mutex_unlock(&lock);
    return result;
}
int unlink(const char *name) {
    pthread_mutex_lock(&lock);
    int result = syscall(SYS_unlinkat, AT_FDCWD, name, 0);
    if (!result && ready() && below(name)) note(5, name, 0, 0, 0, 0, 0);
    pthread_mutex_unlock(&lock);
    return result;
}
int mkdir(const char *name, mode_t mode) {
    pthread_mutex_lock(&lock);
    int result = syscall(SYS_mkdirat, AT_FDCWD, name, mode);
    if (!result && ready() && below(name)) note(6, name, 0, 0, 0, 0, 0);
    pthread_mutex_unlock(&lock);
    return result;
}
"""
HEAD = struct.Struct("<IIIIQQQ")


def python(*arguments, library="", **variables):
    """Run a Python program that can import tests' modules, with `library` loaded first; return its result."""
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS), str(TESTS / "support")])
    environment = os.environ | {"PYTHONPATH": paths, "LD_PRELOAD": str(library)} | variables
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        timeout=100,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def compiled(source, work):
    """Compile C source to a library and return its path."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler
    (work / "shim.c").write_text(source)
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", work / "shim.so", work / "shim.c", "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return work / "shim.so"


def record(folder, work, script, *arguments):
    """Run a script that works below `folder`; return the events that the library recorded there."""
    to = work / "record"
    python(script, *arguments, library=compiled(SHIM, work), POWER_FOLDER=str(folder), POWER_RECORD=str(to))
    return list(events(to.read_bytes()))


def events(content):
    at = 0
    while at < len(content):
        kind, path, other, _, inode, offset, size = HEAD.unpack_from(content, at)
        at += HEAD.size
        names = content[at : at + path].decode(), content[at + path : at + path + other].decode()
        at += path + other
        data = content[at : at + size] if kind == WRITE else b""
        at += size if kind == WRITE else 0
        yield kind, *names, inode, offset, data


class File:
    """Content of a file that is safely on disk, and later changes."""

    def __init__(self):
        self.synced, self.since = bytearray(), []

    def sync(self):
        for change in self.since:
            apply(self.synced, *change)
        self.since = []

    def after_failure(self, rng):
        """Return the content after a failure: each unsynced change may be there or not, in part, and in any order."""
        content, lost = bytearray(self.synced), rng.random()
        for kind, offset, data in rng.sample(self.since, len(self.since)) if rng.random() < 0.5 else self.since:
            if rng.random() >= lost:
                if kind == WRITE and rng.random() < 0.2:  # the disk writes whole sectors
                    data = data[: max(0, rng.randrange(0, len(data) + SECTOR, SECTOR) - offset % SECTOR)]
                apply(content, kind, offset, data)
        return bytes(content)


def apply(content, kind, offset, data):
    if kind == TRUNCATE:
        content[offset:] = bytes(max(0, offset - len(content)))
    else:
        content.extend(bytes(max(0, offset - len(content))))
        content[offset : offset + len(data)] = data


class Disk:
    """Folder as a power failure would leave it, while `do` follows the recorded events."""

    def __init__(self, root):
        self.root = str(root)
        self.files = {}  # files by inode
        self.names, self.safe_names = {}, {}  # name -> file (None: a folder)
        self.folders = {}  # folder -> unsynced changes of its names

    def do(self, event):
        kind, path, other, inode, offset, data = event
        if kind in (WRITE, TRUNCATE):
            self.names[path].since.append((kind, offset, data))
        elif kind == SYNC:
            if self.names.get(path) is not None:
                self.names[path].sync()
            else:
                for change in self.folders.pop(path, []):
                    rename(self.safe_names, *change)
        else:
            args = {CREATE: (path, File()), MKDIR: (path, None), RENAME: (path, other), UNLINK: (path, "")}[kind]
            change = (kind, *args)
            rename(self.names, *change)
            self.folders.setdefault(os.path.dirname(path), []).append(change)

    def fail(self, to, rng):
        """Write the folder to `to` as a failure may leave it."""
        names = dict(self.safe_names)
        for changes in self.folders.values():
            for change in changes[: rng.randrange(len(changes) + 1)]:  # names change in the folder's order
                rename(names, *change)
        shutil.rmtree(to, ignore_errors=True)
        to.mkdir()
        for name, file in sorted(names.items()):
            place = to / os.path.relpath(name, self.root)
            if not place.parent.is_dir():
                continue
            if file is None:
                place.mkdir(exist_ok=True)
            else:
                place.write_bytes(file.after_failure(rng))


def rename(names, kind, path, what):
    if kind in (CREATE, MKDIR):
        names[path] = what
    elif path in names:
        file = names.pop(path)
        if kind == RENAME:
            names[what] = file


def failures(recorded, root, to, count, seed):
    """Yield (moment, number of acknowledged steps) after a power failure at each of `count` moments, in order."""
    rng = random.Random(seed)
    moments = sorted(rng.randrange(len(recorded)) for _ in range(count))
    disk, acknowledged, done = Disk(root), 0, 0
    for moment in moments:
        for event in recorded[done : moment + 1]:
            if event[1].endswith("/acks"):
                acknowledged += len(event[5])
            else:
                disk.do(event)
        done = moment + 1
        disk.fail(to, rng)
        yield moment, acknowledged


def check_state(folder, acknowledged):
    if (snapshot := folder / "memory.snapshot").exists():
        with SnapshotFile(snapshot) as file:
            assert not file.verify() and file.end == EndRecord(tables=[ContentCounts(clients=1)])
    with Store(folder, "home", limits=Limits.of(log_bytes=600)) as store:
        step = int(store.settings().get("step", "0"))
        assert acknowledged <= step <= acknowledged + 1
        assert store.line_count(RUN) == 2 * step
        names = [facts.name for facts in store.runs()]
        assert names in ([], [RUN], [RUN, *(f"run {n}" for n in range(1, step + 1))])
        if step:
            accounts = {one.client: one.report for one in own_accounts(store)}
            for client in CLIENTS[1:]:
                newest = max([n for n in range(1, step + 1) if CLIENTS[n % 8] == client], default=None)
                assert newest is None or (accounts[client].episodes, accounts[client].steps) == (newest, newest**2)
            assert accounts[CLIENTS[0]].episodes == step
            assert lines_through(store) == {CLIENTS[0]: 2 * step}
            big, small = store.models(RUN)
            assert (big.version, big.value, small.value) == (step, bytes([step % 256]) * 20_000, f"{step}")
        stored = {(kind, key): body for kind, key, body in store.rows("t")}
        payloads = {(LARGE_ROWS[0], b"%d" % n): bytes([n % 256]) * 70_000 for n in range(max(1, step - 1), step + 1)}
        answers = {(LOSABLE_ROWS[0], b"%d" % n): b"answer %d" % n for n in range(max(1, step - 2), step + 1)}
        assert stored == ({(SMALL_ROWS[0], b"newest"): b"%d" % step} if step else {}) | payloads | answers
        entries = store.search(RUN, most=10_000)
        assert [entry.line.number for entry in entries] == list(range(2 * step - len(entries) + 1, 2 * step + 1))
        assert text_of_log(folder).endswith(b"".join(map(text_of, entries)))
    return step
