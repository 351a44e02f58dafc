"""Puts a world in the place of threads, clocks, sockets and chance, for as long as a trial runs.

The product's code is the one that users run: what it calls is replaced, in this process, one trial at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import inspect
import logging
import os
import random
import secrets
import socket
import sqlite3
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

import numpy as np
import zmq

import memoire.clock
from memoire.net import context, descriptors, poller, process, progress, thread
from memoire.reader import rounds, takes
from memoire.server import io_requests
from memoire.storage import saver

from . import network, threads
from .world import Process, World

RARER: Final = {
    (rounds, "RETRY_INTERVAL"): 0.5,
    (takes, "RETRY_INTERVAL"): 0.5,
    (saver, "SAVE_DELAY"): 0.5,
    (io_requests, "TOLD_INTERVAL"): 0.1,
    (thread, "IDLE_INTERVAL"): 5.0,
}
"""Seconds between two looks that find nothing, nearly always: of a reader that waits for samples, of a store to which nobody
has said anything, of a server that ends, and of a thread that has nothing to do. Each look takes a turn, and those of a reader messages to each server.
"""
NAMES: Final = ("Lock", "RLock", "Condition", "Event", "Thread")


class NoGuard:
    """The guard of descriptors of a process that has enough."""

    look_at = float("inf")

    def turn(self, now: float) -> None:
        """Nothing is due."""

    def forget(self, made: Any) -> None:
        """Nothing was known."""

    def trouble(self) -> str:
        """There is none."""
        return ""


@contextlib.contextmanager
def installed(world: World, net: network.Network) -> Iterator[None]:
    """Everything below is this world's until the end."""
    made = threads.Threads(world)
    contexts: dict[Any, network.Context] = {}

    def shared_context() -> network.Context:
        return contexts.setdefault(world.process, network.Context(net, world.process))

    rng = world.rng
    state, numpy_state = random.getstate(), np.random.default_rng
    random.seed(f"library {world.seed}")
    unseeded = np.random.default_rng(world.seed)

    def default_rng(seed: Any = None) -> np.random.Generator:
        return numpy_state(int(unseeded.integers(1 << 62)) if seed is None else seed)

    with contextlib.ExitStack() as stack:

        def put(where: Any, name: str, what: Any) -> None:
            stack.enter_context(mock.patch.object(where, name, what))

        put(
            logging, "time", types.SimpleNamespace(**vars(time))
        )  # a line that is logged or not takes no time of this world
        clocks = {time.monotonic: world.monotonic, time.time: world.wall}
        for function, positional, named in _functions_with_clocks():
            put(function, "__defaults__", tuple(_of_world(clocks, each) for each in positional))
            put(function, "__kwdefaults__", {name: _of_world(clocks, each) for name, each in named.items()})
        for name in (*NAMES, "current_thread", "get_ident"):
            put(threading, name, getattr(made, name))
        put(time, "monotonic", world.monotonic)
        put(time, "perf_counter", world.monotonic)
        put(time, "time", world.wall)
        put(time, "time_ns", lambda: int(world.wall() * 1e9))
        put(time, "sleep", lambda seconds: world.park(seconds))
        put(zmq, "Poller", lambda: network.Poller(world))
        put(poller, "Waker", lambda: network.Waker(world))
        put(descriptors, "shared_guard", NoGuard)
        put(descriptors, "guard_listener", lambda fd, listener: None)
        put(secrets, "token_bytes", lambda n=32: rng.randbytes(n))
        put(secrets, "token_hex", lambda n=32: rng.randbytes(n).hex())
        put(secrets, "randbits", rng.getrandbits)
        put(secrets, "randbelow", rng.randrange)
        put(np.random, "default_rng", default_rng)
        put(socket, "gethostname", lambda: world.process.name)
        put(os, "getpid", lambda: 1)
        put(process, "tune", lambda: None)
        put(progress, "waited_for_cores", lambda *tasks: 0.0)
        replaced = {
            "shared_context": (context, shared_context),
            "close_at_exit": (thread, lambda node: node._guard()),
            "wall_clock": (memoire.clock, world.wall),
        }
        for name, (home, what) in replaced.items():
            for module in _users_of(name, getattr(home, name)):
                put(module, name, what)
        for (module, name), seconds in RARER.items():
            put(module, name, seconds)
        _follow_files(world, put)
        gc.disable()  # what is taken apart has a say in the order of events, and the time for it depends on the past
        try:
            yield
        finally:
            gc.enable()
            random.setstate(state)


def _users_of(name: str, what: Any) -> list[Any]:
    """Modules of the product that have imported something by its name."""
    return [
        module
        for key, module in list(sys.modules.items())
        if key.startswith(("memoire.", "dashboard.")) and getattr(module, name, None) is what
    ]


@functools.cache
def _functions_with_clocks() -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Functions of the product that have a clock as a default, and their defaults."""
    modules = [each for key, each in sorted(sys.modules.items()) if key.startswith(("memoire.", "dashboard."))]
    places = [*modules, *(each for module in modules for each in vars(module).values() if inspect.isclass(each))]
    functions = {id(each): each for place in places for each in vars(place).values() if inspect.isfunction(each)}
    found = [(each, each.__defaults__ or (), each.__kwdefaults__ or {}) for each in functions.values()]
    clocks = [time.monotonic, time.time]
    return [
        each for each in found if any(value in clocks for value in (*each[1], *each[2].values()) if callable(value))
    ]


def _of_world(clocks: dict[Any, Any], default: Any) -> Any:
    return clocks.get(default, default) if callable(default) else default


class Database(sqlite3.Connection):
    """A database on the disk of a process, which may be full or broken when a transaction ends."""

    process: Process

    def execute(self, statement: str, *given: Any) -> sqlite3.Cursor:
        """As the real one, unless it is about to be on disk."""
        if statement == "COMMIT" and self.process.disk:
            raise failed(self.process.disk)
        return super().execute(statement, *given)


def failed(disk: str) -> sqlite3.OperationalError:
    """SQLite's error of a disk that is full, or fails in the middle of a sync."""
    error = sqlite3.OperationalError("database or disk is full" if disk == "full" else "disk I/O error")
    name = "SQLITE_FULL" if disk == "full" else "SQLITE_IOERR_FSYNC"
    error.sqlite_errorname, error.sqlite_errorcode = name, getattr(sqlite3, name)
    return error


def _follow_files(world: World, put: Any) -> None:
    """Whatever a killed process has open is closed by the system: databases without a commit, locks."""
    connect, lock = sqlite3.connect, fcntl.flock

    def connected(*given: Any, **named: Any) -> Any:
        made = connect(*given, **{**named, "check_same_thread": False, "factory": Database})
        made.process = world.process
        made.process.at_kill.append(made.close)
        return made

    def locked(opened: int, how: int) -> None:
        lock(opened, how)
        if how & fcntl.LOCK_EX:
            world.process.at_kill.append(lambda: _forget(opened))

    put(sqlite3, "connect", connected)
    put(fcntl, "flock", locked)


def _forget(opened: int) -> None:
    """Let go of a lock, and keep the number: whoever has it may still close it."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    with contextlib.suppress(OSError):
        os.fstat(opened)
        os.dup2(nothing, opened)
    os.close(nothing)
