"""A server of samples of any pipeline: one queue, from which trainers take each sample once."""

from __future__ import annotations

from typing import Any

from memoire.arguments import whole
from memoire.limits import Limits
from memoire.server.server import Server

from .envelope import TABLE, samples_table


def sample_server(
    endpoint: str, *, capacity: int, least: int, max_workers: int | None = None, **options: Any
) -> Server:
    """The server, which works on threads of its own until it is closed.

    Args:
        capacity, least: As of `envelope.samples_table`.
        max_workers: Workers at once; further ones wait until one leaves. None is no bound.
        options: What else `memoire.Server` takes.
    """
    limits = Limits(max_actors=0 if max_workers is None else whole("max_workers", max_workers, 1))
    return Server(endpoint, tables={TABLE: samples_table(capacity, least)}, limits=limits, **options)
