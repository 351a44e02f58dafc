"""A network of this process' own, in which an address can be taken away and given back: partitions, without any tool.

Linux only; as root, or where user namespaces are allowed. A cut address is unreachable for everyone, also on open
connections, which hear nothing of it: as when a machine loses its network.
"""

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

NEW_USER, NEW_NET = 0x10000000, 0x40000000
SET_FLAGS, SET_ADDRESS, SET_MASK = 0x8914, 0x8916, 0x891C
UP, RUNNING = 1, 64


def own() -> str:
    """Move this process into a network of its own, with a loopback; "" or why that is not possible here.

    Before any thread is started: each thread has its own.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NEW_NET) != 0:
        if libc.unshare(NEW_USER | NEW_NET) != 0:
            return f"no network namespace can be made here ({os.strerror(ctypes.get_errno())})"
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path(f"/proc/self/{name}").write_text(text)
    _flags("lo", UP | RUNNING)
    return ""


class Addresses:
    """An address for each name, on the loopback of the own network."""

    def __init__(self, names: list[str]) -> None:
        self._numbers = {name: number for number, name in enumerate(names, start=1)}
        for name in names:
            self.mend(name)

    def __getitem__(self, name: str) -> str:
        return f"10.77.0.{self._numbers[name]}"

    def cut(self, name: str) -> None:
        """Nobody reaches this address from now on."""
        _flags(f"lo:{self._numbers[name]}", 0)

    def mend(self, name: str) -> None:
        """The address is there (again); connections that are still open go on."""
        interface = f"lo:{self._numbers[name]}"
        _set(SET_ADDRESS, interface, self[name])
        _set(SET_MASK, interface, "255.255.255.255")


def _set(what: int, interface: str, value: str) -> None:
    _ioctl(what, struct.pack("16sHH4s16x", interface.encode(), socket.AF_INET, 0, socket.inet_aton(value)))


def _flags(interface: str, flags: int) -> None:
    _ioctl(SET_FLAGS, struct.pack("16sH22x", interface.encode(), flags))


def _ioctl(what: int, request: bytes) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, what, request)
