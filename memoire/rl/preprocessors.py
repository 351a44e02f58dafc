"""Whether workers and a memory preprocess observations alike: digests of both functions are compared."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from memoire.errors import ParameterError

from .codec import digest_of

_log = logging.getLogger(__name__)

MARK: Final = "__memoire_obs_preprocessor"
"""Key in `info` of a reset's sample: digest of the function that its worker calls; without one there is none."""


def digest(function: Callable[..., Any] | None) -> str:
    """Of a function; "" of none."""
    return "" if function is None else digest_of(function)


class PreprocessorCheck:
    """Compares a memory's function with those of workers.

    Args:
        function: The memory's; None is none.
    """

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self._digest = digest(function)
        self.has_warned = False

    def look(self, infos: Sequence[Mapping[str, Any]], starts: Sequence[bool]) -> None:
        """Look at samples that come. Warns once of functions that cannot be compared.

        Args:
            starts: For each, whether a reset gave it.

        Raises:
            ParameterError: a worker has another function, or only one of both has one.
        """
        for info, is_reset in zip(infos, starts, strict=True):
            told = info.get(MARK, "")
            if not is_reset or told == self._digest:
                continue
            if _are_comparable(told, self._digest):
                expected = f"{told or 'None'}, as a worker has it: give both the same function"
                raise ParameterError("obs_preprocessor", self._digest or None, expected)
            if not self.has_warned:
                self.has_warned = True
                _log.warning("cannot compare a worker's obs_preprocessor %s with %s here", told, self._digest)


def _are_comparable(one: str, other: str) -> bool:
    """Whether digests are of the same kind: of source, of one Python's byte code, or there is none."""
    return not one or not other or one.partition(":")[0] == other.partition(":")[0]
