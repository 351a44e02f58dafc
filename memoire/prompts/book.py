"""Prompts of one table by name and by state, and their changes. Pure: no lock, no clock.

    add ──▶ waiting ⇄ leased ──▶ answered ──▶ ready ──▶ drawn ──▶ committed        dropped: from any state before drawn

`move` is the only way from one state to another, so that the counts of states always add up to the prompts.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from sys import getsizeof

import msgspec

from memoire.errors import ProtocolError

from .columns import Key
from .rows import AnswerRow, PromptQueue, PromptRow, PromptRules, PromptState, row_size

MAX_CONSUMERS = 256
"""Consumers of the list of changes whose cursors are kept."""
EPOCH_BYTES = 512
"""Approximate bytes that an epoch in `finished` or `forgotten` takes beside the name of its data set."""


class TableFacts(msgspec.Struct, kw_only=True):
    """State of a table of prompts beside its prompts, saved as one record."""

    session: str = ""
    """Session of the trainer that may draw; "" before the first trainer."""
    former: list[str] = []
    """Former sessions, the newest last."""
    committed: int = -1
    """Newest committed step; -1 before the first."""
    newest_model: int = 0
    shares: dict[str, float] = {}
    finished: list[tuple[str, int]] = []
    """Data sets and epochs to which no more prompts are added."""
    forgotten: dict[str, dict[int, int]] = {}
    """Number of prompts that were removed, by data set and epoch."""
    cursors: dict[str, int] = {}
    """Cursor of each consumer: the number of the last change that it has seen."""
    listeners: dict[str, bytes] = {}
    """Id of the client that is each consumer, and that alone moves the consumer's cursor."""
    leased: dict[str, int] = {}
    """Prompts of each data set that were leased since the shares were last set."""
    drawn: dict[str, int] = {}
    """Groups of each data set that were drawn since the shares were last set."""
    step_groups: int = 0
    """Groups of a step in the trainer's newest draw; 0 before the first draw."""
    replayable: int = 0
    """Number of groups that were ever kept for replay."""


class PromptBook:
    """All prompts of one table, with queues by state and a list of changes. Not thread-safe.

    Args:
        first: First number of changes and leases. A reopened table must not reuse former numbers.
    """

    def __init__(self, rules: PromptRules, first: int = 1) -> None:
        self.rules = rules
        """Rules of the table; they may be replaced."""
        self.facts = TableFacts()
        self.rows: dict[Key, PromptRow] = {}
        self.bytes = 0
        """Bytes of the prompts without payloads and columns, and of the epochs that are finished or forgotten."""
        self.counts = dict.fromkeys(PromptState, 0)
        """Number of prompts in each state."""
        self.evaluations = dict.fromkeys(PromptState, 0)
        """Number of evaluation prompts in each state; these are never trained on."""
        self.reasons: Counter[str] = Counter()
        """Number of dropped prompts, by reason."""
        self.waiting, self.ready = PromptQueue(), PromptQueue()
        self.dirty: dict[Key, PromptRow] = {}
        """Prompts that changed since the last save."""
        self.has_new_facts = False
        self.removed: list[Key] = []
        """Names of removed prompts; the caller frees their bytes and clears this list."""
        self.released: list[PromptRow] = []
        """Prompts whose answers' columns are not needed any more; the caller frees the bytes and clears this list."""
        self.numbers = itertools.count(first)
        self._newest_order = 0
        self._front = 0  # lowest order of `put_first`, which counts down
        self._open: Counter[tuple[str, int]] = Counter()  # prompts of each epoch that is not finished
        self._changes: list[tuple[int, PromptRow]] = []  # (number, row) of each change of a row

    # Prompts

    def find(self, key: Key) -> PromptRow:
        """Return the prompt of a key. Raise ProtocolError (code "missing") if the table does not hold it."""
        row = self.rows.get(key)
        if row is None:
            dataset, epoch, index = key
            raise ProtocolError("missing", f"no prompt {index} of data set {dataset!r} in epoch {epoch} is held here")
        return row

    def was_added(self, key: Key) -> bool:
        """Return True if this prompt was ever added, even if it was removed since."""
        return key in self.rows or key[1] in self.facts.forgotten.get(key[0], {})

    def add(
        self,
        key: Key,
        size: int,
        priority: float = 0.0,
        is_evaluation: bool = False,
        tags: Mapping[str, str] | None = None,
    ) -> bool:
        """Add a prompt. Return False if it is known. Raise ProtocolError (code "value") if its epoch is finished."""
        if self.was_added(key):
            return False
        if key[:2] in _finished(self.facts) and not is_evaluation:
            text = f"epoch {key[1]} of data set {key[0]!r} is finished, so prompt {key[2]} cannot be added"
            raise ProtocolError("value", text)
        row = PromptRow(*key, number=self._next_order(), priority=priority, is_evaluation=is_evaluation)
        row.tags, row.size, row.order = dict(tags or {}), size, row.number
        row.answers = [AnswerRow() for _ in range(self.rules.group)]
        self._hold(row)
        self.touch(row)
        return True

    def size_of(self, key: Key, tags: Mapping[str, str]) -> int:
        """Return the approximate bytes that a new prompt would take."""
        return row_size(key, self.rules.group, tags)

    def update_bytes(self, row: PromptRow) -> None:
        """Update the bytes that a prompt counts for, after its answers changed."""
        self.bytes += (size := row.memory_bytes) - row.counted
        row.counted = size

    def recount_facts(self) -> None:
        """Compute the bytes again after `facts` were replaced."""
        self.bytes = sum(row.counted for row in self.rows.values()) + _facts_size(self.facts)

    def _hold(self, row: PromptRow) -> None:
        self.rows[row.key] = row
        row.counted = 0
        self.update_bytes(row)
        self.counts[row.state] += 1
        self.evaluations[row.state] += row.is_evaluation
        self._open[row.key[:2]] += not row.is_evaluation
        self._enqueue(row)

    def restore(self, row: PromptRow) -> None:
        """Add a saved prompt in its former state. The prompts of a table may come in any order."""
        self._hold(row)
        self._newest_order = max(self._newest_order, row.number, row.order)
        self._front = min(self._front, row.order)
        if row.state is PromptState.DROPPED:
            self.reasons[row.reason] += 1

    def mark_unsaved(self, row: PromptRow) -> None:
        """Mark a prompt to be saved again, without a change that listeners see."""
        self.dirty[row.key] = row

    def note_turns(self) -> None:
        """Record the turns of the data sets in their shares, to be saved."""
        turns = self.waiting.taken_counts, self.ready.taken_counts
        if turns != (self.facts.leased, self.facts.drawn):
            (self.facts.leased, self.facts.drawn), self.has_new_facts = turns, True

    def restore_facts(self, facts: TableFacts) -> None:
        """Restore the saved counters and cursors after all prompts were restored."""
        self.facts, turns = facts, (facts.leased, facts.drawn)
        self.recount_facts()
        self._changes = sorted(((row.changed, row) for row in self.rows.values()), key=lambda each: each[0])
        newest = self._changes[-1][0] if self._changes else 0
        self.numbers = itertools.count(max(next(self.numbers), newest + 1))
        self.set_shares(facts.shares)
        self.waiting.taken_counts, self.ready.taken_counts = turns

    # States

    def move(self, row: PromptRow, state: PromptState, reason: str = "") -> None:
        """Move a prompt from its state to another one."""
        self.waiting.discard(row)
        self.ready.discard(row)
        self.counts[row.state] -= 1
        self.evaluations[row.state] -= row.is_evaluation
        row.state, row.reason = state, reason
        self.counts[state] += 1
        self.evaluations[state] += row.is_evaluation
        self._enqueue(row)
        if state is PromptState.DROPPED:
            self.reasons[reason] += 1
            self.release(row)
        self.touch(row)

    def _enqueue(self, row: PromptRow) -> None:
        if row.state is PromptState.WAITING:
            self.waiting.push(row)
        elif row.state is PromptState.READY and not row.is_evaluation:
            self.ready.push(row)

    def _next_order(self) -> int:
        self._newest_order += 1
        return self._newest_order

    def put_last(self, row: PromptRow) -> None:
        """Put a ready prompt behind all other prompts."""
        row.order = self._next_order()

    def put_first(self, rows: list[PromptRow]) -> None:
        """Put prompts before all other prompts, in this order."""
        self._front -= len(rows)
        for place, row in enumerate(rows):
            row.order = self._front + place

    def release(self, row: PromptRow) -> None:
        """Mark the columns of a prompt's answers as not needed any more."""
        if row.has_columns:
            row.has_columns = False
            self.released.append(row)
            self.touch(row)

    def training_count(self, state: PromptState) -> int:
        """Return the number of prompts in a state that are to be trained on."""
        return self.counts[state] - self.evaluations[state]

    @property
    def pending(self) -> int:
        """Number of prompts whose groups are not ready yet but may become so."""
        return sum(map(self.training_count, (PromptState.WAITING, PromptState.LEASED, PromptState.ANSWERED)))

    # Orders

    def prioritise(self, row: PromptRow, priority: float) -> None:
        """Change the priority of a prompt."""
        row.priority = priority
        self._enqueue(row)
        self.touch(row)

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Set the shares in which data sets are leased and drawn from now on."""
        self.facts.shares, self.has_new_facts = dict(shares), True
        self.waiting.set_shares(shares)
        self.ready.set_shares(shares)

    def finish(self, dataset: str, epoch: int, room: int) -> None:
        """Mark an epoch as finished: no more prompts are added to it.

        Args:
            room: Bytes that are free for the name of the epoch.

        Raises:
            ProtocolError: (code "busy") `room` is too small.
        """
        if (dataset, epoch) not in _finished(self.facts):
            if room < (size := _epoch_size(dataset)):
                raise ProtocolError("busy", f"{room} bytes are free, but a finished epoch takes {size}")
            self.facts.finished.append((dataset, epoch))
            self.bytes += size
            self.has_new_facts = True

    @property
    def is_finished(self) -> bool:
        """True if no more prompts are added: an epoch is finished, and so are all that have training prompts."""
        finished = _finished(self.facts)
        return bool(finished) and all(epoch in finished for epoch, rows in self._open.items() if rows)

    def forget(self, dataset: str, epoch: int) -> list[PromptRow]:
        """Remove the prompts of an epoch and return them. Evaluation prompts among them may still be leased.

        Raises:
            ProtocolError: (code "busy") some prompts are neither committed nor dropped.
        """
        over = (PromptState.COMMITTED, PromptState.DROPPED)
        rows = [row for row in self.rows.values() if (row.dataset, row.epoch) == (dataset, epoch)]
        if any(row.state not in over and not row.is_evaluation for row in rows):
            open_rows = sum(row.state not in over for row in rows)
            text = f"{open_rows} prompts of epoch {epoch} of {dataset!r} are neither committed nor dropped"
            raise ProtocolError("busy", text)
        if rows:
            epochs = self.facts.forgotten.setdefault(dataset, {})
            self.bytes += 0 if epoch in epochs else _epoch_size(dataset)
            epochs[epoch] = epochs.get(epoch, 0) + len(rows)
            self.has_new_facts = True
        for row in rows:
            self._remove(row)
        return rows

    def _remove(self, row: PromptRow) -> None:
        self.waiting.discard(row)
        self.ready.discard(row)
        self.counts[row.state] -= 1
        self.evaluations[row.state] -= row.is_evaluation
        self._open[row.key[:2]] -= not row.is_evaluation
        del self.rows[row.key]
        self.bytes -= row.counted
        row.changed = 0
        self.dirty.pop(row.key, None)
        self.removed.append(row.key)

    @property
    def forgotten(self) -> int:
        """Number of prompts that were removed."""
        return sum(sum(epochs.values()) for epochs in self.facts.forgotten.values())

    # Changes

    def touch(self, row: PromptRow) -> None:
        """Give a prompt the next number of a change, and mark it to be saved."""
        row.changed = next(self.numbers)
        self.dirty[row.key] = row
        self._changes.append((row.changed, row))
        if len(self._changes) > 1024 + 4 * len(self.rows):
            self._changes = [each for each in self._changes if each[0] == each[1].changed]

    def move_cursor(self, consumer: str, client: bytes, since: int | None) -> int:
        """Return the cursor of a consumer, after moving it to `since`.

        None leaves the cursor, and makes the client the consumer from now on.

        Raises:
            ProtocolError: another client is this consumer (code "session"), or there are too many consumers ("value").
        """
        cursors, listeners = self.facts.cursors, self.facts.listeners
        if consumer not in cursors and len(cursors) >= MAX_CONSUMERS:
            raise ProtocolError(
                "value", f"the table keeps the cursors of {MAX_CONSUMERS} consumers; forget one with forget_consumer"
            )
        if since is None:
            since = cursors.get(consumer, 0)
        elif listeners.get(consumer, client) != client:
            text = f"another client is the consumer {consumer!r} now; list without since= to replace it"
            raise ProtocolError("session", text)
        if (cursors.get(consumer), listeners.get(consumer)) != (since, client):
            cursors[consumer], listeners[consumer], self.has_new_facts = since, client, True
        return since

    def forget_consumer(self, consumer: str) -> None:
        """Remove the cursor of a consumer."""
        self.facts.listeners.pop(consumer, None)
        if self.facts.cursors.pop(consumer, None) is not None:
            self.has_new_facts = True

    def changed_since(self, cursor: int) -> Iterator[PromptRow]:
        """Yield the prompts that changed after the change of this number, in order; each once, in its present state."""
        place = bisect.bisect_right(self._changes, cursor, key=lambda each: each[0])
        for number, row in itertools.islice(self._changes, place, None):
            if number == row.changed:
                yield row

    def check_invariants(self) -> None:
        """Raise AssertionError if the parts disagree. For tests."""
        states = Counter(row.state for row in self.rows.values())
        assert all(states[state] == count for state, count in self.counts.items()), (states, self.counts)
        assert sum(self.counts.values()) == len(self.rows)
        evaluations = Counter(row.state for row in self.rows.values() if row.is_evaluation)
        assert all(evaluations[state] == count for state, count in self.evaluations.items())
        for row in self.rows.values():
            assert (row in self.waiting) == (row.state is PromptState.WAITING)
            assert (row in self.ready) == (row.state is PromptState.READY and not row.is_evaluation)
            assert (row.lease != 0) == (row.state is PromptState.LEASED) == (row.until < math.inf)
            assert (row.step >= 0) == (row.state in (PromptState.DRAWN, PromptState.COMMITTED)), row
            assert len(row.answers) == self.rules.group and bool(row.reason) == (row.state is PromptState.DROPPED)
            assert not (row.is_evaluation and row.step >= 0)
        assert self.bytes == sum(row.counted for row in self.rows.values()) + _facts_size(self.facts)
        assert len(self.waiting) == self.counts[PromptState.WAITING]
        assert len(self.ready) == self.training_count(PromptState.READY)
        numbers = [number for number, row in self._changes if number == row.changed]
        assert numbers == sorted(numbers) and len(numbers) == len(self.rows)


def _epoch_size(dataset: str) -> int:
    """Return the approximate bytes of a finished or forgotten epoch."""
    return EPOCH_BYTES + getsizeof(dataset)


def _facts_size(facts: TableFacts) -> int:
    forgotten = sum(_epoch_size(dataset) * len(epochs) for dataset, epochs in facts.forgotten.items())
    return forgotten + sum(_epoch_size(dataset) for dataset, _ in facts.finished)


def _finished(facts: TableFacts) -> set[tuple[str, int]]:
    return {(dataset, epoch) for dataset, epoch in facts.finished}


def nothing_waits(book: PromptBook) -> str:
    """Return the reason why no prompt can be leased, if none is waiting."""
    if not book.rows:
        return "no prompt was added yet"
    over = " and no more are added" if book.is_finished else ""
    return (
        f"no prompt waits: {book.counts[PromptState.LEASED]} are leased, {book.counts[PromptState.READY]} ready{over}"
    )
