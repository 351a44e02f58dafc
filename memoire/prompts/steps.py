"""Which groups a trainer gets at each step, what it has trained on for good, and its way back. Pure.

draw(7)   ready a, b, c ──▶ drawn by step 7: a, b        draw(7) again: a, b
commit(7) a, b are committed; their columns are kept for `keep` commits, and for replay
rewind(5) what steps up to 5 drew is committed; what 6 and 7 drew comes back in front: ready if its columns are
          kept, else waiting. A new session begins: whoever drew in the former one is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from memoire.building import PriorityTree
from memoire.errors import ProtocolError

from .book import PromptBook
from .columns import Key
from .rows import NO_STEP, RESTORED, PromptRow, PromptState, StepRow

MAX_SESSIONS: Final = 64
"""Former sessions that are known by name, the newest. An older one is refused like a stranger, and may take the table
over by `rewind` as any new session may.
"""
NO_PLACE: Final = -1
MIN_WEIGHT: Final = 1e-6
"""Of a committed group that is replayed by its score."""


class ReplayRing:
    """The newest committed groups whose columns stay, drawn by their scores.

    Args:
        size: Groups; 0 keeps none.
    """

    def __init__(self, size: int) -> None:
        self._tree = PriorityTree(size) if size else None
        self._slots: list[PromptRow | None] = [None] * size
        self._places: dict[Key, int] = {}
        self.next = 0
        """Groups that were ever added."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, row: PromptRow) -> bool:
        return row.key in self._places

    def add(self, row: PromptRow) -> PromptRow | None:
        """Keep a group; returns the one that leaves for it. With a size of 0 it is the group itself."""
        if self._tree is None:
            return row
        former = self._slots[self.next % len(self._slots)]
        if former is not None:
            self.discard(former.key)
        row.place, self.next = self.next, self.next + 1
        self._put(row)
        return former

    def restore(self, row: PromptRow) -> bool:
        """Put a group where it was, after `next` was restored; False if there are fewer places now."""
        if self._tree is None or row.place < self.next - len(self._slots):
            return False
        self._put(row)
        return True

    def _put(self, row: PromptRow) -> None:
        assert self._tree is not None
        slot = row.place % len(self._slots)
        self._slots[slot], self._places[row.key] = row, slot
        self._tree.set([slot], [max(row.score, MIN_WEIGHT)])

    def discard(self, key: Key) -> None:
        """Keep a group no longer, if it is kept."""
        slot = self._places.pop(key, None)
        if slot is not None and self._tree is not None:
            row, self._slots[slot] = self._slots[slot], None
            self._tree.set([slot], [0.0])
            assert row is not None
            row.place = NO_PLACE

    def score(self, row: PromptRow) -> None:
        """The score of a group has changed."""
        slot = self._places.get(row.key)
        if slot is not None and self._tree is not None:
            self._tree.set([slot], [max(row.score, MIN_WEIGHT)])

    def draw(self, count: int, seed: int) -> tuple[list[PromptRow], list[float]]:
        """At most so many groups, each once, and the importance of each: (N P)^-1 over the largest one."""
        count = min(count, len(self))
        if not count or self._tree is None:
            return [], []
        total, rng = self._tree.total, np.random.default_rng([seed & (2**63 - 1), len(self)])
        slots, weights = [], []
        for fraction in rng.random(count):
            slot = int(self._tree.draw([fraction])[0])
            weights.append(float(self._tree.get([slot])[0]))
            slots.append(slot)
            self._tree.set([slot], [0.0])  # no group comes twice into one step
        self._tree.set(slots, weights)
        importance = [total / (len(self) * weight) for weight in weights]
        rows = [row for slot in slots if (row := self._slots[slot]) is not None]
        return rows, [each / max(importance) for each in importance]


class PromptSteps:
    """The steps of one table's trainer. Not thread-safe."""

    def __init__(self, book: PromptBook) -> None:
        self.steps: dict[int, StepRow] = {}
        """Those whose groups are known."""
        self.dirty: dict[int, StepRow | None] = {}
        """Steps that changed since they were saved; None: they are gone."""
        self.stale = 0
        """Groups that were too old when they were to be drawn."""
        self.ring = ReplayRing(book.rules.replay_limit)
        self._book = book
        self._kept: dict[int, list[PromptRow]] = {}  # committed groups of each step whose columns wait for `keep`
        self._leaving: dict[Key, PromptRow] = {}  # groups that left the ring, until no step that is known replays them

    def restore(self) -> None:
        """After the book and `steps` were restored: know again what is kept."""
        self.ring.next = self._book.facts.replayable
        replayed = self._replayed()
        for row in self._book.rows.values():
            if row.key in replayed and row.has_columns and not self.ring.restore(row):
                self._leaving[row.key] = row
            elif row.key not in replayed:
                self.hold(row)
        self._let_go()

    def lose(self, row: PromptRow, *, is_over: bool) -> None:
        """Before `restore`: a prompt can be drawn by no step any more, and be replayed by none.

        Args:
            is_over: Whether its own step keeps it.
        """
        for step in self.steps.values():
            if row.key in step.replayed:
                place = step.replayed.index(row.key)
                del step.replayed[place], step.importance[place]
                self.dirty[step.step] = step
        own = self.steps.get(row.step)
        if not is_over:
            row.step = NO_STEP
            if own is not None and row.key in own.keys:
                own.keys.remove(row.key)
                self.dirty[own.step] = own
        row.place = NO_PLACE

    def _replayed(self) -> set[Key]:
        """Groups that steps which may be drawn again have drawn from the ring."""
        return {key for step in self.steps.values() for key in step.replayed}

    def check_not_replayed(self, dataset: str, epoch: int) -> None:
        """Raise ProtocolError (code "busy") if a step that is not committed replays a group of this epoch."""
        for step in self.steps.values():
            if step.step > self._book.facts.committed and any(key[:2] == (dataset, epoch) for key in step.replayed):
                text = (
                    f"groups of epoch {epoch} of {dataset!r} are replayed by step {step.step}, which is not committed"
                )
                raise ProtocolError("busy", text)

    def _by_step(self, rows: Iterable[PromptRow]) -> list[PromptRow]:
        """Rows in the order in which their steps drew them."""
        places = {key: (step.step, i) for step in self.steps.values() for i, key in enumerate(step.keys)}
        return sorted(rows, key=lambda row: places.get(row.key, (row.step, row.order)))

    def hold(self, row: PromptRow) -> None:
        """A prompt was restored: keep its columns for as long as those of others."""
        if row.state is not PromptState.COMMITTED or not row.has_columns:
            return
        if row.place == NO_PLACE:
            self._keep(row)
        elif not self.ring.restore(row):
            self._book.release(row)

    # Sessions

    def enter(self, session: str) -> None:
        """A trainer speaks. Raises ProtocolError (code "session"): it is not the one that may draw."""
        facts = self._book.facts
        if facts.session == session:
            return
        if facts.session or session in facts.former:
            raise ProtocolError("session", self._other_session(session))
        facts.session, self._book.has_new_facts = session, True

    def _other_session(self, session: str) -> str:
        facts = self._book.facts
        if session in facts.former:
            return f"session {session!r} ended when session {facts.session!r} began by a rewind: this trainer is over"
        return f"session {facts.session!r} draws from this table; rewind(step) or resume(step) takes its place"

    def rewind(self, step: int, session: str, newest_model: int | None = None) -> int:
        """Go back to a step, in a new session; returns how many prompts came back. Said again, it changes nothing.

        Raises:
            ProtocolError: (code "session") this session has ended.
        """
        facts = self._book.facts
        if session == facts.session:
            return 0
        if session in facts.former:
            raise ProtocolError("session", self._other_session(session))
        if facts.session not in ("", RESTORED):
            facts.former = [*facts.former, facts.session][-MAX_SESSIONS:]
        facts.session, facts.committed, self._book.has_new_facts = session, step, True
        if newest_model is not None:
            facts.newest_model = newest_model
        back = [row for row in self._book.rows.values() if row.step > step]
        for row in self._book.rows.values():
            if row.state is PromptState.DRAWN and row.step <= step:
                self._commit_row(row)
        self._take_back(back)
        for number in [number for number in self.steps if number > step]:
            del self.steps[number]
            self.dirty[number] = None
        self._kept = {number: rows for number, rows in self._kept.items() if number <= step}
        self._let_go()
        return len(back)

    def _take_back(self, rows: list[PromptRow]) -> None:
        rows = self._by_step(rows)
        self._book.put_first(rows)
        for row in rows:
            self.ring.discard(row.key)
            self._leaving.pop(row.key, None)
            row.step = NO_STEP
            if row.has_columns:
                self._book.move(row, PromptState.READY)
            else:
                row.reset()
                self._book.move(row, PromptState.WAITING)

    # Draws

    def find(self, step: int, session: str) -> StepRow | None:
        """The groups of a step, if they are known. A server that gave none to it knows none."""
        self.enter(session)
        found = self.steps.get(step)
        if found is None and step <= self._book.facts.committed - self._book.rules.keep:
            raise self._gone(step)
        return found

    def _gone(self, step: int) -> ProtocolError:
        newest = self._book.facts.committed
        return ProtocolError("value", f"step {step} is committed, as are all up to {newest}, and its groups are gone")

    def draw(
        self, step: int, count: int, session: str, *, replay: float = 0.0, is_last: bool = False
    ) -> StepRow | None:
        """The groups of a step: those that it has, or else so many that are ready, from now on drawn by it. None while
        fewer are ready.

        Args:
            replay: Share of them that are committed groups, drawn by score.
            is_last: Take those that are ready, also if they are fewer; the step never gets more.
        """
        found = self.find(step, session) or StepRow(step)
        if step not in self.steps and step <= self._book.facts.committed:
            raise self._gone(step)
        missing = count - len(found.keys) - len(found.replayed)
        if found.is_closed or (step in self.steps and missing <= 0):
            return self._fix(found, count, is_last) if is_last and not found.is_closed else found
        is_begun = bool(found.keys or found.replayed)
        chosen, importance = ([], []) if is_begun else self.ring.draw(round(replay * count), self._seed(step))
        rows = self._take(missing - len(chosen), is_last)
        if rows is None:
            return None
        if chosen:
            found.replayed, found.importance = [row.key for row in chosen], importance
        for row in rows:
            row.step = step
            self._book.move(row, PromptState.DRAWN)
        found.keys = [*found.keys, *(row.key for row in rows)]
        return self._fix(found, count, is_last)

    def _fix(self, found: StepRow, count: int, is_last: bool) -> StepRow:
        found.wanted, found.is_closed = count, is_last
        self.steps[found.step] = self.dirty[found.step] = found
        return found

    def _seed(self, step: int) -> int:
        return step * 1_000_003 + len(self._book.facts.former)

    def _take(self, count: int, is_last: bool) -> list[PromptRow] | None:
        """So many ready groups, out of their queue; None if fewer are ready, and none was taken."""
        queue, rows = self._book.ready, list[PromptRow]()
        if len(queue) < count and not is_last:
            self._pass_over_all()
            return None
        while len(rows) < count and (row := queue.pop()) is not None:
            if self._is_stale(row):
                queue.undo(row)
                self._pass_over(row)
            else:
                rows.append(row)
        if len(rows) < count and not is_last:
            for row in rows:
                queue.undo(row)
                queue.push(row)
            return None
        return rows

    def _is_stale(self, row: PromptRow) -> bool:
        lag, newest = self._book.rules.max_model_lag, self._book.facts.newest_model
        return lag is not None and newest > 0 and row.version < newest - lag

    def _pass_over_all(self) -> None:
        """Let stale groups go before a draw waits, so that others come in their place. Few are ready then."""
        if self._book.rules.max_model_lag is not None:
            stale = [row for row in self._book.ready.rows() if self._is_stale(row)]
            for row in sorted(stale, key=lambda row: (-row.priority, row.order)):
                self._pass_over(row)

    def _pass_over(self, row: PromptRow) -> None:
        self.stale += 1
        if self._book.rules.on_stale == "wait":
            self._book.put_first([row])
            self._book.release(row)
            row.reset()
            self._book.move(row, PromptState.WAITING)
        else:
            self._book.move(row, PromptState.DROPPED, "stale")

    def is_kept(self, step: StepRow) -> bool:
        """Whether the columns of all groups of a step are kept."""
        rows = self._book.rows
        return all(key in rows and rows[key].has_columns for key in (*step.keys, *step.replayed))

    # Commits

    def commit(self, step: int, session: str) -> int:
        """Everything that was drawn by steps up to this one is trained on for good; returns how many prompts."""
        self.enter(session)
        facts = self._book.facts
        if step <= facts.committed:
            return 0
        numbers = [number for number in self.steps if facts.committed < number <= step]
        rows = [self._book.rows[key] for number in sorted(numbers) for key in self.steps[number].keys]
        drawn = [row for row in rows if row.state is PromptState.DRAWN]
        for row in drawn:
            self._commit_row(row)
        facts.committed, self._book.has_new_facts = step, True
        self._let_go()
        return len(drawn)

    def _commit_row(self, row: PromptRow) -> None:
        self._book.move(row, PromptState.COMMITTED)
        self._keep(row)

    def _keep(self, row: PromptRow) -> None:
        self._kept.setdefault(row.step, []).append(row)

    def _let_go(self) -> None:
        """Columns of committed groups stay for the last `keep` steps, then only those that may be replayed, or are
        replayed by a step that may be drawn again.
        """
        least = self._book.facts.committed - self._book.rules.keep
        for step in sorted(number for number in self._kept if number <= least):
            for row in self._by_step(self._kept.pop(step)):
                if row.key not in self._book.rows:  # it was forgotten
                    continue
                leaving = self.ring.add(row)
                if leaving is not row:
                    self._book.facts.replayable, self._book.has_new_facts = self.ring.next, True
                    self._book.note(row)
                if leaving is not None:
                    self._leaving[leaving.key] = leaving
        for step in [number for number in self.steps if number <= least]:
            del self.steps[step]
            self.dirty[step] = None
        replayed = self._replayed()
        for key, row in list(self._leaving.items()):
            if self._book.rows.get(key) is not row:  # it was forgotten
                del self._leaving[key]
            elif key in replayed:
                self._book.note(row)  # it has no place any more
            else:
                del self._leaving[key]
                self._book.release(row)

    def update_scores(self, scores: Mapping[Key, float]) -> int:
        """Set scores of groups; returns how many are known."""
        found = 0
        for key, score in scores.items():
            row = self._book.rows.get(key)
            if row is None or not math.isfinite(score) or score < 0.0:
                continue
            row.score = score
            self.ring.score(row)
            self._book.touch(row)
            found += 1
        return found

    def check_invariants(self) -> None:
        """Raise AssertionError where the parts disagree. For tests."""
        rows, committed = self._book.rows, self._book.facts.committed
        fixed = [key for step in self.steps.values() for key in step.keys]
        assert len(fixed) == len(set(fixed)), "a prompt is in two steps"
        for step in self.steps.values():
            for row in (rows[key] for key in step.keys if key in rows):
                assert row.step == step.step
                assert row.state is (PromptState.COMMITTED if step.step <= committed else PromptState.DRAWN)
            if step.step > committed:
                assert self.is_kept(step), "a step that is not committed cannot be drawn again"
        for row in rows.values():
            if row.state is PromptState.DRAWN:
                assert row.has_columns and (row.step not in self.steps or row.key in self.steps[row.step].keys)
            if row.state is PromptState.READY:
                assert row.has_columns
