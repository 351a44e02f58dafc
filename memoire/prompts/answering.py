"""The calls of workers, who lease prompts and answer them, and of those who amend answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from memoire import arguments
from memoire.arguments import text, whole
from memoire.errors import ParameterError, WrongType
from memoire.suggestions import checked_names

from .rows import Key
from .users import TableCalls, checked_keys
from .worker import Lease


class WorkerCalls(TableCalls):
    """Leases prompts and answers them."""

    @checked_names()
    def lease(
        self, count: int = 1, seconds: float | None = None, timeout: float | None = None, *, version: int | None = None
    ) -> list[Lease]:
        """Prompts for this worker: at least one, at most `count`.

        Args:
            seconds: For which they are leased, above 0; None is what the table says.
            timeout: Seconds to wait until there is one.
            version: Of the worker's model. With `max_model_lag`, one that is too old gets nothing.

        Raises:
            MemoireTimeout: none came in that time; it says why.
        """
        wanted, lasting = whole("count", count, 1, 1024), _lasting(seconds)
        acting = None if version is None else arguments.model_version(version, "version")
        return self._worker.lease(wanted, lasting, acting, self._patience(timeout))

    def renew(self, lease: Lease, seconds: float | None = None, timeout: float | None = None) -> bool:
        """Go on with a prompt for so many seconds from now; False if it is not wanted of this worker any more."""
        return self._worker.keep("renew", [checked_lease(lease)], _lasting(seconds), self._patience(timeout))[0]

    def release(self, lease: Lease, timeout: float | None = None) -> bool:
        """Give a prompt back, so that another worker gets it at once. Answers that are whole stay."""
        return self._worker.keep("release", [checked_lease(lease)], 0.0, self._patience(timeout))[0]

    @checked_names()
    def answer(
        self,
        lease: Lease,
        index: int,
        columns: Mapping[str, Any],
        version: int = 0,
        *,
        piece: int | None = None,
        last: bool = True,
        timeout: float | None = None,
    ) -> bool:
        """Answer a prompt; whether this answer counts. It does not if the same one came before, from whoever had a
        lease of the prompt.

        Args:
            index: Which answer of the group, from 0.
            columns: Values by the schema's columns, not all of them. Of a ragged column an array [L, *F].
            version: Of the model that made it; 0 is unknown, which `max_model_lag` refuses. A group is as old as its
                oldest piece.
            piece: Number of a piece of an answer that comes in several; None counts them. Ragged columns are appended.
            last: Whether the answer is whole with this piece.

        Raises:
            EntryError, NoSuchField: a value does not fit its column.
        """
        return self.answers(lease, {index: columns}, version, piece=piece, last=last, timeout=timeout)[0]

    @checked_names()
    def answers(
        self,
        lease: Lease,
        answers: Mapping[int, Mapping[str, Any]],
        version: int = 0,
        *,
        piece: int | None = None,
        last: bool = True,
        timeout: float | None = None,
    ) -> list[bool]:
        """Several answers to one prompt in one request, by their places in the group; for each whether it counts."""
        return self.answer_all([(lease, answers)], version, piece=piece, last=last, timeout=timeout)[0]

    @checked_names()
    def answer_all(
        self,
        answers: Iterable[tuple[Lease, Mapping[int, Mapping[str, Any]]]],
        version: int = 0,
        *,
        piece: int | None = None,
        last: bool = True,
        timeout: float | None = None,
    ) -> list[list[bool]]:
        """Answers to several prompts, each with its lease, in as few requests as they fit into: the quickest way if a
        worker has several groups at once. For each prompt whether its answers count.
        """
        patience = self._patience(timeout)
        given = [(checked_lease(lease), arguments.mapping("answers", each)) for lease, each in answers]
        for _, each in given:
            for index in each:
                whole("index", index, 0)
        facts: dict[str, Any] = {
            "version": arguments.model_version(version, "version"),
            "piece": piece,
            "is_last": last,
        }
        return self._worker.answer(given, self.schema, patience=patience, **facts)

    def fail(self, lease: Lease, index: int, reason: str, *, again: bool = True, timeout: float | None = None) -> bool:
        """Tell that an answer does not come; whether it was still wanted.

        Args:
            again: Whether somebody may try once more. Without it the answer has failed for good, and its group is
                closed with the others, if those are `at_least` so many.
        """
        return self._worker.fail(
            checked_lease(lease), whole("index", index, 0), text("reason", str(reason)), again, self._patience(timeout)
        )

    def amend(self, key: Key, index: int, columns: Mapping[str, Any], timeout: float | None = None) -> bool:
        """Bring columns of an answer from elsewhere, such as a reward model; whether they came in time: before the
        group was ready.
        """
        patience = self._patience(timeout)
        return self._worker.amend(checked_keys([key])[0], whole("index", index, 0), columns, self.schema, patience)


def _lasting(seconds: float | None) -> float:
    """Seconds of a lease as they travel: 0 for what the table says. Raises ParameterError."""
    if seconds is None:
        return 0.0
    if not (found := arguments.seconds(seconds, 0.0)):
        raise ParameterError("seconds", seconds, "above 0, or None for what the table says (`lease`)")
    return found


def checked_lease(lease: Any) -> Lease:
    """The lease itself. Raises WrongType."""
    if not isinstance(lease, Lease):
        raise WrongType("lease", "a Lease, as lease() returns them", type(lease).__name__)
    return lease
