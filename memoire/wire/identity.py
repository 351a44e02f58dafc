"""What names become on the wire: runs and homes, tables, topics, and the client that is nobody."""

import hashlib
from typing import Final

NO_CLIENT: Final = bytes(16)


def name_hash(name: str) -> int:
    """What headers say for a run or a home: the first 8 bytes of BLAKE2b of its name, never 0 (0: not assigned)."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") or 1


DEFAULT_TABLE: Final = "default"
"""Name of the table of a server that has one and was told no name."""
ROUNDTRIP: Final = "memoire:roundtrip"
"""A small table that every server has beside its own, for `memoire doctor --roundtrip`: no learner meets what is pushed
there. It is found by name and number, but is none of the tables that a server lists, shows and saves."""


def table_number(name: str) -> int:
    """What headers say for a table: 0 for `DEFAULT_TABLE`, else 4 bytes of BLAKE2b of its name, never 0. All servers of
    a cluster agree on it, whatever the order of their tables.
    """
    if name == DEFAULT_TABLE:
        return 0
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") or 1


NEWS_FRAME: Final = b"\x00"
"""Subscription and first frame of NEWS: no topic has it, since a topic has at least one character before its zero."""


def topic_frame(topic: str) -> bytes:
    """The subscription and first frame of a topic; the zero byte keeps "a" from matching "ab"."""
    return topic.encode() + b"\x00"
