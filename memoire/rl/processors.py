"""Which processors a thread runs on: training beside a device disturbs its clock."""

from __future__ import annotations

import os
from collections.abc import Collection

from memoire.errors import ParameterError


def pin(cpus: Collection[int]) -> None:
    """Have the calling thread run on these processors only.

    Raises:
        ParameterError: there are no such processors for this process, or the system cannot do so.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ParameterError("cpus", cpus, "None on this system, which cannot bind threads to processors")
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, ValueError, TypeError) as error:
        usable = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
        raise ParameterError("cpus", cpus, f"some of this process's processors ({usable})") from error
