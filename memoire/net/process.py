"""What memoire changes in the process that it runs in. Nothing else in the package does such things.

    in every process    arrays of batches and caches lie in memory that earlier ones gave back, 128 MiB at most
                        (`_core.empty`); no other arrays do
                        in a process forked from a node's, the node has another class, whose methods raise ForkedError
                        instead of waiting for a lock that nobody will ever release (`leave_to_parent`)
    if it is tuned      the C library keeps freed blocks of megabytes (`_core.keep_freed_memory`)
                        at the interpreter's end `threading.excepthook` passes over Closed (`pass_over_in_threads`)
                        addresses that listen have a packet filter when nearly all descriptors are open, and the soft
                        limit of these is a little lower (`filter_packets`, `descriptors`)

A process is tuned when its first `Server`, `Proxy` or `Reader` with `tune_process=True` is made, which is the default,
or by a program of `memoire.nodes`. A `Buffer`, or a client in somebody's trainer, never tunes. It cannot be undone.
"""

from __future__ import annotations

import ctypes
import logging
import socket
import struct
import threading
from collections.abc import Iterable
from typing import Any, Final

from memoire import _core

_log = logging.getLogger(__name__)

_SO_ATTACH_FILTER: Final = 26
_SO_DETACH_FILTER: Final = 27
_NOTHING: Final = struct.pack("=HBBI", 0x06, 0, 0, 0)  # one instruction: BPF_RET with 0 bytes of the packet

_is_tuned = False  # set once


def tune() -> None:
    """Tune this process for a node that moves large messages or serves others; once is enough. From any thread."""
    global _is_tuned  # noqa: PLW0603
    if not _is_tuned:
        _is_tuned = True
        _core.keep_freed_memory()


def is_tuned() -> bool:
    """Whether a node of this process has asked for that."""
    return _is_tuned


def pass_over_in_threads(kind: type[BaseException]) -> None:
    """Print no traceback when a thread ends with an error of this kind. Only in a process that `tune` has tuned.

    All nodes are closed when the interpreter exits. Daemon threads that wait for a node then raise `Closed`, which is
    expected.
    """
    if _is_tuned:
        report = threading.excepthook
        threading.excepthook = lambda failed: None if failed.exc_type is kind else report(failed)


def leave_to_parent(nodes: Iterable[Any], forked: type) -> None:
    """In a forked child: have these objects answer as `forked` does from now on, which comes before their own class."""
    for node in nodes:
        kind = type(node)
        node.__class__ = type(kind.__name__, (forked, kind), {"__module__": kind.__module__})


def filter_packets(fd: int, on: bool) -> None:
    """Let no packet through to the socket that listens at this descriptor, or all of them again."""
    try:
        listening = socket.socket(fileno=fd)
    except OSError:
        return  # closed meanwhile
    try:
        if listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            if on:
                program = ctypes.create_string_buffer(_NOTHING, len(_NOTHING))
                what = struct.pack("@HP", 1, ctypes.addressof(program))
                listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, what)
            else:
                listening.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
    except OSError as error:
        _log.warning("an address could not be %s new connections: %s", "closed to" if on else "opened to", error)
    finally:
        listening.detach()  # it belongs to ZeroMQ
