"""Where the parts of an on-policy learner listen: its server, its inference node, and those of further ranks.

rank 0   5560 server   5561, 5562 entries and notices   5563 inference        rank 1   5570 ... 5573
"""

from __future__ import annotations

from typing import Final

PORTS: Final = 4
"""In a row, that one learner takes."""
BETWEEN_RANKS: Final = 10


def address_of_rank(endpoint: str, rank: int) -> str:
    """Where the learner of this rank has its server, if rank 0 has it at this one; ports 0 and "*" stay."""
    return _shifted(endpoint, BETWEEN_RANKS * rank)


def beside(endpoint: str) -> str:
    """Where the inference node of a server at this address listens: behind its three ports, or at .infer."""
    return _shifted(endpoint, PORTS - 1) if endpoint.startswith("tcp://") else f"{endpoint}.infer"


def _shifted(endpoint: str, by: int) -> str:
    place, colon, port = endpoint.rpartition(":")
    return f"{place}{colon}{int(port) + by}" if port.isdigit() and int(port) else endpoint
