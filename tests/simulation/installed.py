"""Replacement of threads, clocks, sockets and random numbers by those of a world, while a trial runs.

The product's code is unchanged. The code's dependencies are replaced, in this process, for one trial at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import inspect
import logging
import os
import queue
import random
import secrets
import socket
import sqlite3
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import zmq

import memoire.limits
from memoire.client import pushes
from memoire.disk import state_folder
from memoire.net import poller, process, sockets, thread
from memoire.proxy import io as io_backend
from memoire.reader import directory, rounds
from memoire.replay import memory
from memoire.server import io_requests
from memoire.tables import registry
from memoire.tables.rollouts import far as takes

from . import network, threads
from .disk import Disk
from .rarely import Rarely
from .world import World

for _kind in registry.known_kinds():  # imported now: a late import in a trial would change the trial
    _kind.pool_class(), _kind.record_bodies()
    if _kind.answers:
        registry.import_object(_kind.answers)
    if _kind.actor:
        pushes.side_of(_kind.name)

RARER: Final = {
    (rounds, "MIN_RETRY_INTERVAL"): 0.1,
    (rounds, "RETRY_INTERVAL"): 1.0,
    (takes, "RETRY_INTERVAL"): 1.0,
    (directory, "HELLO_INTERVAL"): 4.0,
    (io_backend, "HELLO_INTERVAL"): 4.0,
    (state_folder, "SAVE_DELAY"): 1.0,
    (io_requests, "FINISH_CHECK_INTERVAL"): 0.1,
    (thread, "IDLE_INTERVAL"): 5.0,
}
"""Longer intervals in seconds between polls that nearly always find no news: of readers that wait for samples, of
readers and proxies that look for servers, of a store, of a server that ends, and of an idle thread. Each poll takes a
turn, and those of readers and proxies send messages to each server.
"""


NO_GUARD: Final = types.SimpleNamespace(
    due_at=float("inf"), tick=lambda now: None, forget=lambda socket: None, problem=lambda: ""
)
"""Descriptor guard of a process with enough descriptors."""


@contextlib.contextmanager
def installed(world: World, net: network.Network, rarely: Rarely) -> Iterator[None]:
    """Replace the clocks, threads, sockets and random generators until the end of the context."""
    replacements = threads.Threads(world)
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
            stack.callback(setattr, where, name, getattr(where, name))
            setattr(where, name, what)

        # Logging takes no time of the simulated world.
        put(logging, "time", types.SimpleNamespace(**vars(time)))
        clocks = {time.monotonic: world.monotonic, time.time: world.wall}
        for function, positional, named in _functions_with_clocks():
            put(function, "__defaults__", tuple(_of_world(clocks, each) for each in positional))
            put(function, "__kwdefaults__", {name: _of_world(clocks, each) for name, each in named.items()})
        for name in ("Lock", "RLock", "Thread", "current_thread", "get_ident"):
            put(threading, name, getattr(replacements, name))
        put(threading, "_allocate_lock", replacements.Lock)
        put(threading, "_time", world.monotonic)
        put(queue, "SimpleQueue", queue.Queue)  # the original is not made of locks of `threading`
        put(time, "monotonic", world.monotonic)
        put(time, "perf_counter", world.monotonic)
        put(time, "time", world.wall)
        put(time, "time_ns", lambda: int(world.wall() * 1e9))
        put(time, "sleep", lambda seconds: world.park(seconds))
        put(zmq, "Poller", lambda: network.Poller(world))
        put(poller, "Waker", lambda: network.Waker(world))
        put(process, "shared_guard", lambda: NO_GUARD)
        put(process, "guard_listener", lambda fd, listener: None)
        put(secrets, "token_bytes", lambda n=32: rng.randbytes(n))
        put(secrets, "token_hex", lambda n=32: rng.randbytes(n).hex())
        put(secrets, "randbits", rng.getrandbits)
        put(secrets, "randbelow", rng.randrange)
        put(np.random, "default_rng", default_rng)
        put(socket, "gethostname", lambda: world.process.name)
        put(os, "getpid", lambda: 1)
        put(Path, "absolute", lambda path: path)  # errors name trial folders; the product stays in its folder
        put(process, "tune", lambda: None)
        put(thread, "waited_for_cores", lambda *tasks: 0.0)
        replaced = {
            "shared_context": (sockets, shared_context),
            "close_at_exit": (thread, lambda node: node._guard()),
            "wall_clock": (memoire.limits, world.wall),
        }
        for name, (home, what) in replaced.items():
            for module in _users_of(name, getattr(home, name)):
                put(module, name, what)
        for (module, name), seconds in RARER.items():
            put(module, name, seconds)
        rarely.put(put)
        disk = Disk(world)
        put(sqlite3, "connect", disk.connect)
        put(fcntl, "flock", disk.lock)
        put(os, "fsync", disk.sync)
        _set_memories(world, put)
        gc.disable()  # finalizers affect the order of events, at times that depend on earlier trials
        try:
            yield
        finally:
            gc.enable()
            random.setstate(state)


def _users_of(name: str, what: Any) -> list[Any]:
    """Return the product's modules that import this object under this name."""
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
    functions = [inspect.unwrap(each) for place in places for each in vars(place).values() if inspect.isfunction(each)]
    unique = {id(each): each for each in functions}.values()
    candidates = [
        (each, each.__defaults__ or (), each.__kwdefaults__ or {}) for each in unique if inspect.isfunction(each)
    ]
    clocks = [time.monotonic, time.time]
    return [
        each
        for each in candidates
        if any(value in clocks for value in (*each[1], *each[2].values()) if callable(value))
    ]


def _of_world(clocks: dict[Any, Any], default: Any) -> Any:
    return clocks.get(default, default) if callable(default) else default


def _set_memories(world: World, put: Any) -> None:
    """Set the C clocks of memories at each turn; they stand still within a turn."""
    begin = memory.Memory.__init__

    def begun(self: Any, *args: Any, **named: Any) -> None:
        begin(self, *args, **named)
        self.set_clock(world.wall())
        world.process.at_turn.append(self.set_clock)

    put(memory.Memory, "__init__", begun)
