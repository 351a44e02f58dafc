"""All prompts of a table by name and by state, and what has changed of them. Pure: no lock, no clock.

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
"""Names of listeners whose cursors are kept."""
EPOCH_BYTES = 512
"""What the name of an epoch takes beside that of its data set, about."""


class TableFacts(msgspec.Struct, kw_only=True):
    """What a table of prompts knows beside its prompts: saved as one."""

    session: str = ""
    """Of the trainer that may draw; "" before the first one."""
    former: list[str] = []
    """Sessions that ended, the newest last."""
    committed: int = -1
    """The newest step that is committed."""
    newest_model: int = 0
    shares: dict[str, float] = {}
    finished: list[tuple[str, int]] = []
    """Data sets and epochs of which no more prompts come."""
    forgotten: dict[str, dict[int, int]] = {}
    """Prompts that left the table, by data set and epoch."""
    cursors: dict[str, int] = {}
    """Of each consumer."""
    listeners: dict[str, bytes] = {}
    """Client that each of them is, by whom alone its cursor is moved."""
    leased: dict[str, int] = {}
    """Prompts that were leased of each data set, since the shares are as they are."""
    drawn: dict[str, int] = {}
    """And groups that were drawn."""
    step_groups: int = 0
    """Groups of a step, as the trainer said last; 0 before it has."""
    replayable: int = 0
    """Groups that were ever kept for replay."""


class PromptBook:
    """The prompts of one table. Not thread-safe.

    Args:
        first: Of the numbers of changes and leases. Those of a table that was opened again must not be those of before.
    """

    def __init__(self, rules: PromptRules, first: int = 1) -> None:
        self.rules = rules
        """That are followed from now on."""
        self.facts = TableFacts()
        self.rows: dict[Key, PromptRow] = {}
        self.bytes = 0
        """That prompts take, without payloads and columns, and the epochs that are finished or forgotten."""
        self.counts = dict.fromkeys(PromptState, 0)
        """Prompts in each state."""
        self.evaluations = dict.fromkeys(PromptState, 0)
        """Those of them that never train."""
        self.reasons: Counter[str] = Counter()
        """Prompts that were dropped, by reason."""
        self.waiting, self.ready = PromptQueue(), PromptQueue()
        self.dirty: dict[Key, PromptRow] = {}
        """Prompts that changed since they were saved."""
        self.has_new_facts = False
        self.gone: list[Key] = []
        """Prompts that left; whoever keeps their bytes empties this list."""
        self.let_go: list[PromptRow] = []
        """Prompts whose answers' columns are not wanted any more; likewise."""
        self.numbers = itertools.count(first)
        self._newest_order = 0
        self._front = 0  # places before all others, which count down
        self._open: Counter[tuple[str, int]] = Counter()  # prompts of each epoch that is not finished
        self._changes: list[tuple[int, PromptRow]] = []  # by number; a row that changed later is there once more

    # Prompts

    def find(self, key: Key) -> PromptRow:
        """The prompt of this name. Raises ProtocolError (code "missing")."""
        row = self.rows.get(key)
        if row is None:
            dataset, epoch, index = key
            raise ProtocolError("missing", f"there is no prompt {index} of data set {dataset!r} in epoch {epoch} here")
        return row

    def knows(self, key: Key) -> bool:
        """Whether this prompt was given, also if it was forgotten since."""
        return key in self.rows or key[1] in self.facts.forgotten.get(key[0], {})

    def add(
        self,
        key: Key,
        size: int,
        priority: float = 0.0,
        is_evaluation: bool = False,
        tags: Mapping[str, str] | None = None,
    ) -> bool:
        """One more prompt; False if it is known. Raises ProtocolError (code "value"): its epoch is finished."""
        if self.knows(key):
            return False
        if key[:2] in _finished(self.facts) and not is_evaluation:
            text = f"epoch {key[1]} of data set {key[0]!r} is finished: no prompt {key[2]} can be added to it"
            raise ProtocolError("value", text)
        row = PromptRow(*key, number=self._next_order(), priority=priority, is_evaluation=is_evaluation)
        row.tags, row.size, row.order = dict(tags or {}), size, row.number
        row.answers = [AnswerRow() for _ in range(self.rules.group)]
        self._hold(row)
        self.touch(row)
        return True

    def size_of(self, key: Key, tags: Mapping[str, str]) -> int:
        """Bytes that a new prompt would take."""
        return row_size(key, self.rules.group, tags)

    def recount(self, row: PromptRow) -> None:
        """A prompt takes other bytes than before."""
        self.bytes += (size := row.memory_bytes) - row.counted
        row.counted = size

    def recount_facts(self) -> None:
        """What is known beside prompts was replaced."""
        self.bytes = sum(row.counted for row in self.rows.values()) + _facts_size(self.facts)

    def _hold(self, row: PromptRow) -> None:
        self.rows[row.key] = row
        row.counted = 0
        self.recount(row)
        self.counts[row.state] += 1
        self.evaluations[row.state] += row.is_evaluation
        self._open[row.key[:2]] += not row.is_evaluation
        self._enqueue(row)

    def restore(self, row: PromptRow) -> None:
        """Hold a prompt that was saved, in the state that it was in. Those of a table come in any order."""
        self._hold(row)
        self._newest_order = max(self._newest_order, row.number, row.order)
        self._front = min(self._front, row.order)
        if row.state is PromptState.DROPPED:
            self.reasons[row.reason] += 1

    def note(self, row: PromptRow) -> None:
        """A prompt is to be saved again; nothing that is seen of it has changed."""
        self.dirty[row.key] = row

    def note_turns(self) -> None:
        """Have it saved how far the data sets have come in their shares."""
        turns = self.waiting.turns, self.ready.turns
        if turns != (self.facts.leased, self.facts.drawn):
            (self.facts.leased, self.facts.drawn), self.has_new_facts = turns, True

    def go_on(self, facts: TableFacts) -> None:
        """After all prompts were restored: go on from what was saved beside them."""
        self.facts, turns = facts, (facts.leased, facts.drawn)
        self.recount_facts()
        self._changes = sorted(((row.changed, row) for row in self.rows.values()), key=lambda each: each[0])
        newest = self._changes[-1][0] if self._changes else 0
        self.numbers = itertools.count(max(next(self.numbers), newest + 1))
        self.share_out(facts.shares)
        self.waiting.turns, self.ready.turns = turns

    # States

    def move(self, row: PromptRow, state: PromptState, reason: str = "") -> None:
        """Bring a prompt from its state to another one."""
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
        """The next place among those that are ready is this one's, behind all others."""
        row.order = self._next_order()

    def put_first(self, rows: list[PromptRow]) -> None:
        """These places are before all others, in this order."""
        self._front -= len(rows)
        for place, row in enumerate(rows):
            row.order = self._front + place

    def release(self, row: PromptRow) -> None:
        """The columns of a prompt's answers are not wanted any more."""
        if row.has_columns:
            row.has_columns = False
            self.let_go.append(row)
            self.touch(row)

    def training(self, state: PromptState) -> int:
        """Prompts in a state that are to be trained on."""
        return self.counts[state] - self.evaluations[state]

    @property
    def pending(self) -> int:
        """Prompts of which a group may still come."""
        return sum(map(self.training, (PromptState.WAITING, PromptState.LEASED, PromptState.ANSWERED)))

    # Orders

    def prioritise(self, row: PromptRow, priority: float) -> None:
        """Give a prompt another priority."""
        row.priority = priority
        self._enqueue(row)
        self.touch(row)

    def share_out(self, shares: Mapping[str, float]) -> None:
        """Lease and draw data sets in these shares from now on."""
        self.facts.shares, self.has_new_facts = dict(shares), True
        self.waiting.share_out(shares)
        self.ready.share_out(shares)

    def finish(self, dataset: str, epoch: int, room: int) -> None:
        """No more prompts of this epoch come.

        Args:
            room: Bytes that there are for its name.

        Raises:
            ProtocolError: (code "busy") that is not enough.
        """
        if (dataset, epoch) not in _finished(self.facts):
            if room < (size := _epoch_size(dataset)):
                raise ProtocolError("busy", f"{room} bytes are free for the name of an epoch, which takes {size}")
            self.facts.finished.append((dataset, epoch))
            self.bytes += size
            self.has_new_facts = True

    @property
    def is_finished(self) -> bool:
        """Whether no more prompts come: every epoch that has some is finished."""
        finished = _finished(self.facts)
        return bool(finished) and all(epoch in finished for epoch, rows in self._open.items() if rows)

    def forget(self, dataset: str, epoch: int) -> list[PromptRow]:
        """Let the prompts of an epoch leave; returns them. Evaluations among them may still be under a lease.

        Raises:
            ProtocolError: (code "busy") some of them are neither committed nor dropped.
        """
        over = (PromptState.COMMITTED, PromptState.DROPPED)
        rows = [row for row in self.rows.values() if (row.dataset, row.epoch) == (dataset, epoch)]
        if any(row.state not in over and not row.is_evaluation for row in rows):
            open_rows = sum(row.state not in over for row in rows)
            raise ProtocolError("busy", f"{open_rows} prompts of epoch {epoch} of {dataset!r} are not over yet")
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
        self.gone.append(row.key)

    @property
    def forgotten(self) -> int:
        """Prompts that left."""
        return sum(sum(epochs.values()) for epochs in self.facts.forgotten.values())

    # Changes

    def touch(self, row: PromptRow) -> None:
        """A prompt has changed."""
        row.changed = next(self.numbers)
        self.dirty[row.key] = row
        self._changes.append((row.changed, row))
        if len(self._changes) > 1024 + 4 * len(self.rows):
            self._changes = [each for each in self._changes if each[0] == each[1].changed]

    def go_on_from(self, consumer: str, client: bytes, since: int | None) -> int:
        """The cursor of a consumer, which it moves to `since`. None leaves it there, and the client is it from now on.

        Raises:
            ProtocolError: another client is this consumer (code "session"), or there are too many of them ("value").
        """
        cursors, listeners = self.facts.cursors, self.facts.listeners
        if consumer not in cursors and len(cursors) >= MAX_CONSUMERS:
            raise ProtocolError(
                "value", f"{len(cursors)} consumers have cursors here, the most. forget_consumer lets one go"
            )
        if since is None:
            since = cursors.get(consumer, 0)
        elif listeners.get(consumer, client) != client:
            text = f"another client is the consumer {consumer!r}; list without since takes its place"
            raise ProtocolError("session", text)
        if (cursors.get(consumer), listeners.get(consumer)) != (since, client):
            cursors[consumer], listeners[consumer], self.has_new_facts = since, client, True
        return since

    def forget_consumer(self, consumer: str) -> None:
        """Let the cursor of a consumer go."""
        self.facts.listeners.pop(consumer, None)
        if self.facts.cursors.pop(consumer, None) is not None:
            self.has_new_facts = True

    def changed_since(self, cursor: int) -> Iterator[PromptRow]:
        """Prompts that changed after the change of this number, in order; each once, as it is now."""
        place = bisect.bisect_right(self._changes, cursor, key=lambda each: each[0])
        for number, row in itertools.islice(self._changes, place, None):
            if number == row.changed:
                yield row

    def check_invariants(self) -> None:
        """Raise AssertionError where the parts disagree. For tests."""
        found = Counter(row.state for row in self.rows.values())
        assert all(found[state] == count for state, count in self.counts.items()), (found, self.counts)
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
        assert len(self.ready) == self.training(PromptState.READY)
        numbers = [number for number, row in self._changes if number == row.changed]
        assert numbers == sorted(numbers) and len(numbers) == len(self.rows)


def _epoch_size(dataset: str) -> int:
    """Bytes that the name of an epoch takes which is finished or forgotten, about."""
    return EPOCH_BYTES + getsizeof(dataset)


def _facts_size(facts: TableFacts) -> int:
    forgotten = sum(_epoch_size(dataset) * len(epochs) for dataset, epochs in facts.forgotten.items())
    return forgotten + sum(_epoch_size(dataset) for dataset, _ in facts.finished)


def _finished(facts: TableFacts) -> set[tuple[str, int]]:
    return {(dataset, epoch) for dataset, epoch in facts.finished}


def nothing_waits(book: PromptBook) -> str:
    """Why no prompt can be leased: none waits."""
    if not book.rows:
        return "no prompt was given yet"
    over = " and no more come" if book.is_finished else ""
    return (
        f"no prompt waits: {book.counts[PromptState.LEASED]} are leased, {book.counts[PromptState.READY]} ready{over}"
    )
