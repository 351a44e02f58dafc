"""The clock of the machine: the default of everything that takes a clock."""

import time
from collections.abc import Callable

wall_clock: Callable[[], float] = time.time  # noqa: TID251
"""Seconds since 1970."""
