"""Steps of a trainer: drawn, replayed and committed groups, and the return to an earlier step. Pure.

draw(7)   ready a, b, c ──▶ drawn by step 7: a, b        draw(7) again: a, b
commit(7) a, b are committed; their columns are kept for `keep` commits, and for replay
rewind(5) prompts drawn by steps up to 5 are committed; prompts drawn by 6 and 7 come back in front: ready if their
          columns are kept, else waiting. A new session begins, and the former one may not draw any more.
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
"""Newest former sessions that are kept by name. An older session is refused as an unknown one, and may take over the
table by `rewind`, as any new session may.
"""
NO_PLACE: Final = -1
MIN_WEIGHT: Final = 1e-6
"""Least weight of a committed group that is replayed by its score."""


class ReplayRing:
    """Ring of the newest committed groups whose columns are kept, drawn by their scores.

    Args:
        size: Largest number of groups; 0 keeps none.
    """

    def __init__(self, size: int) -> None:
        self._tree = PriorityTree(size) if size else None
        self._slots: list[PromptRow | None] = [None] * size
        self._places: dict[Key, int] = {}
        self.next = 0
        """Number of groups that were ever added."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, row: PromptRow) -> bool:
        return row.key in self._places

    def add(self, row: PromptRow) -> PromptRow | None:
        """Add a group; return the group that leaves the ring for it, which is the added one if the size is 0."""
        if self._tree is None:
            return row
        former = self._slots[self.next % len(self._slots)]
        if former is not None:
            self.discard(former.key)
        row.place, self.next = self.next, self.next + 1
        self._put(row)
        return former

    def restore(self, row: PromptRow) -> bool:
        """Put a group at its former place after `next` was restored. Return False if the ring has become too small."""
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
        """Remove a group if the ring holds it."""
        slot = self._places.pop(key, None)
        if slot is not None and self._tree is not None:
            row, self._slots[slot] = self._slots[slot], None
            self._tree.set([slot], [0.0])
            assert row is not None
            row.place = NO_PLACE

    def score(self, row: PromptRow) -> None:
        """Update the weight of a group after its score changed."""
        slot = self._places.get(row.key)
        if slot is not None and self._tree is not None:
            self._tree.set([slot], [max(row.score, MIN_WEIGHT)])

    def draw(self, count: int, seed: int) -> tuple[list[PromptRow], list[float]]:
        """Draw at most `count` different groups. Return them with their importance, (N P)^-1 over its maximum."""
        count = min(count, len(self))
        if not count or self._tree is None:
            return [], []
        total, rng = self._tree.total, np.random.default_rng([seed & (2**63 - 1), len(self)])
        slots, weights = [], []
        for fraction in rng.random(count):
            slot = int(self._tree.draw([fraction])[0])
            weights.append(float(self._tree.get([slot])[0]))
            slots.append(slot)
            self._tree.set([slot], [0.0])  # draw no group twice in one step
        self._tree.set(slots, weights)
        importance = [total / (len(self) * weight) for weight in weights]
        rows = [row for slot in slots if (row := self._slots[slot]) is not None]
        return rows, [each / max(importance) for each in importance]


class PromptSteps:
    """Steps of one table's trainer. Not thread-safe."""

    def __init__(self, book: PromptBook) -> None:
        self.steps: dict[int, StepRow] = {}
        """Steps whose groups are fixed, by number."""
        self.dirty: dict[int, StepRow | None] = {}
        """Steps that changed since the last save; None for a removed step."""
        self.stale = 0
        """Number of groups that were too old when a step was to draw them."""
        self.ring = ReplayRing(book.rules.replay_limit)
        self._book = book
        self._kept: dict[int, list[PromptRow]] = {}  # committed groups by step, while `keep` holds the groups' columns
        self._leaving: dict[Key, PromptRow] = {}  # groups that left the ring, while a known step replays the groups

    def restore(self) -> None:
        """Restore the ring and the kept groups, after the book and `steps` were restored."""
        self.ring.next = self._book.facts.replayable
        replayed = self._replayed()
        for row in self._book.rows.values():
            if row.key in replayed and row.has_columns and not self.ring.restore(row):
                self._leaving[row.key] = row
            elif row.key not in replayed:
                self.keep_restored_columns(row)
        self._release_old()

    def remove_damaged(self, row: PromptRow, *, is_over: bool) -> None:
        """Remove a damaged prompt from the steps, before `restore`: no step draws or replays it any more.

        Args:
            is_over: True if the prompt stays in its own step.
        """
        for step in self.steps.values():
            if row.key in step.replayed:
                place = step.replayed.index(row.key)
                del step.replayed[place], step.importance[place]
                self.dirty[step.step] = step
        drawn_by = self.steps.get(row.step)
        if not is_over:
            row.step = NO_STEP
            if drawn_by is not None and row.key in drawn_by.keys:
                drawn_by.keys.remove(row.key)
                self.dirty[drawn_by.step] = drawn_by
        row.place = NO_PLACE

    def _replayed(self) -> set[Key]:
        """Return the groups that steps which may be drawn again have replayed."""
        return {key for step in self.steps.values() for key in step.replayed}

    def check_not_replayed(self, dataset: str, epoch: int) -> None:
        """Raise ProtocolError (code "busy") if a step that is not committed replays a group of this epoch."""
        for step in self.steps.values():
            if step.step > self._book.facts.committed and any(key[:2] == (dataset, epoch) for key in step.replayed):
                text = (
                    f"groups of epoch {epoch} of {dataset!r} are replayed by step {step.step}, which is not committed"
                )
                raise ProtocolError("busy", text)

    def _sorted_by_step(self, rows: Iterable[PromptRow]) -> list[PromptRow]:
        """Return rows in the order in which their steps drew them."""
        places = {key: (step.step, i) for step in self.steps.values() for i, key in enumerate(step.keys)}
        return sorted(rows, key=lambda row: places.get(row.key, (row.step, row.order)))

    def keep_restored_columns(self, row: PromptRow) -> None:
        """Keep the columns of a restored prompt as long as those of other prompts."""
        if row.state is not PromptState.COMMITTED or not row.has_columns:
            return
        if row.place == NO_PLACE:
            self._keep(row)
        elif not self.ring.restore(row):
            self._book.release(row)

    # Sessions

    def admit_session(self, session: str) -> None:
        """Let a session draw if it is the first. Raise ProtocolError (code "session") if another one may draw."""
        facts = self._book.facts
        if facts.session == session:
            return
        if facts.session or session in facts.former:
            raise ProtocolError("session", self._session_text(session))
        facts.session, self._book.has_new_facts = session, True

    def _session_text(self, session: str) -> str:
        facts = self._book.facts
        if session in facts.former:
            return f"session {session!r} ended: session {facts.session!r} has rewound this table. Stop this trainer"
        return f"session {facts.session!r} draws from this table; rewind(step) or resume(step) takes over"

    def rewind(self, step: int, session: str, newest_model: int | None = None) -> int:
        """Go back to a step, in a new session. Return how many prompts came back; a repeated call changes nothing.

        Raises:
            ProtocolError: (code "session") this session has ended.
        """
        facts = self._book.facts
        if session == facts.session:
            return 0
        if session in facts.former:
            raise ProtocolError("session", self._session_text(session))
        if facts.session not in ("", RESTORED):
            facts.former = [*facts.former, facts.session][-MAX_SESSIONS:]
        facts.session, facts.committed, self._book.has_new_facts = session, step, True
        if newest_model is not None:
            facts.newest_model = newest_model
        back = [row for row in self._book.rows.values() if row.step > step]
        for row in self._book.rows.values():
            if row.state is PromptState.DRAWN and row.step <= step:
                self._commit_row(row)
        self._return_drawn(back)
        for number in [number for number in self.steps if number > step]:
            del self.steps[number]
            self.dirty[number] = None
        self._kept = {number: rows for number, rows in self._kept.items() if number <= step}
        self._release_old()
        return len(back)

    def _return_drawn(self, rows: list[PromptRow]) -> None:
        rows = self._sorted_by_step(rows)
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
        """Return the groups of a step if they are fixed. A server without groups of the step has no row of it."""
        self.admit_session(session)
        drawn = self.steps.get(step)
        if drawn is None and step <= self._book.facts.committed - self._book.rules.keep:
            raise self._gone_error(step)
        return drawn

    def _gone_error(self, step: int) -> ProtocolError:
        newest = self._book.facts.committed
        return ProtocolError("value", f"the groups of step {step} are gone: all steps up to {newest} are committed")

    def draw(
        self, step: int, count: int, session: str, *, replay: float = 0.0, is_last: bool = False
    ) -> StepRow | None:
        """Return the groups of a step: its fixed ones, or `count` ready groups drawn now. None if fewer are ready.

        Args:
            replay: Share of committed groups in the step, drawn by score.
            is_last: True draws ready groups even if they are fewer, and closes the step.
        """
        drawn = self.find(step, session) or StepRow(step)
        if step not in self.steps and step <= self._book.facts.committed:
            raise self._gone_error(step)
        missing = count - len(drawn.keys) - len(drawn.replayed)
        if drawn.is_closed or (step in self.steps and missing <= 0):
            return self._fix(drawn, count, is_last) if is_last and not drawn.is_closed else drawn
        is_begun = bool(drawn.keys or drawn.replayed)
        replayed, importance = ([], []) if is_begun else self.ring.draw(round(replay * count), self._seed(step))
        rows = self._take(missing - len(replayed), is_last)
        if rows is None:
            return None
        if replayed:
            drawn.replayed, drawn.importance = [row.key for row in replayed], importance
        for row in rows:
            row.step = step
            self._book.move(row, PromptState.DRAWN)
        drawn.keys = [*drawn.keys, *(row.key for row in rows)]
        return self._fix(drawn, count, is_last)

    def _fix(self, drawn: StepRow, count: int, is_last: bool) -> StepRow:
        drawn.wanted, drawn.is_closed = count, is_last
        self.steps[drawn.step] = self.dirty[drawn.step] = drawn
        return drawn

    def _seed(self, step: int) -> int:
        return step * 1_000_003 + len(self._book.facts.former)

    def _take(self, count: int, is_last: bool) -> list[PromptRow] | None:
        """Take `count` ready groups out of their queue. Return None, and leave them there, if fewer are ready."""
        queue, rows = self._book.ready, list[PromptRow]()
        if len(queue) < count and not is_last:
            self._pass_over_all()
            return None
        while len(rows) < count and (row := queue.pop()) is not None:
            if self._is_stale(row):
                queue.uncount_taken(row)
                self._pass_over(row)
            else:
                rows.append(row)
        if len(rows) < count and not is_last:
            for row in rows:
                queue.uncount_taken(row)
                queue.push(row)
            return None
        return rows

    def _is_stale(self, row: PromptRow) -> bool:
        lag, newest = self._book.rules.max_model_lag, self._book.facts.newest_model
        return lag is not None and newest > 0 and row.version < newest - lag

    def _pass_over_all(self) -> None:
        """Pass over all stale groups before a draw waits, so that new ones replace them. Few groups are ready then."""
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
        """Return True if the columns of all groups of a step are kept."""
        rows = self._book.rows
        return all(key in rows and rows[key].has_columns for key in (*step.keys, *step.replayed))

    # Commits

    def commit(self, step: int, session: str) -> int:
        """Commit all groups that steps up to `step` drew, and return their number."""
        self.admit_session(session)
        facts = self._book.facts
        if step <= facts.committed:
            return 0
        numbers = [number for number in self.steps if facts.committed < number <= step]
        rows = [self._book.rows[key] for number in sorted(numbers) for key in self.steps[number].keys]
        drawn = [row for row in rows if row.state is PromptState.DRAWN]
        for row in drawn:
            self._commit_row(row)
        facts.committed, self._book.has_new_facts = step, True
        self._release_old()
        return len(drawn)

    def _commit_row(self, row: PromptRow) -> None:
        self._book.move(row, PromptState.COMMITTED)
        self._keep(row)

    def _keep(self, row: PromptRow) -> None:
        self._kept.setdefault(row.step, []).append(row)

    def _release_old(self) -> None:
        """Release the columns of committed groups, except those of the last `keep` steps, those in the ring, and those
        that a step replays which may be drawn again.
        """
        least = self._book.facts.committed - self._book.rules.keep
        for step in sorted(number for number in self._kept if number <= least):
            for row in self._sorted_by_step(self._kept.pop(step)):
                if row.key not in self._book.rows:  # the epoch was removed, and with it the group
                    continue
                leaving = self.ring.add(row)
                if leaving is not row:
                    self._book.facts.replayable, self._book.has_new_facts = self.ring.next, True
                    self._book.mark_unsaved(row)
                if leaving is not None:
                    self._leaving[leaving.key] = leaving
        for step in [number for number in self.steps if number <= least]:
            del self.steps[step]
            self.dirty[step] = None
        replayed = self._replayed()
        for key, row in list(self._leaving.items()):
            if self._book.rows.get(key) is not row:  # the epoch was removed, and with it the row
                del self._leaving[key]
            elif key in replayed:
                self._book.mark_unsaved(row)  # save that the group has left the ring
            else:
                del self._leaving[key]
                self._book.release(row)

    def update_scores(self, scores: Mapping[Key, float]) -> int:
        """Set the scores of groups, and return how many are known."""
        known = 0
        for key, score in scores.items():
            row = self._book.rows.get(key)
            if row is None or not math.isfinite(score) or score < 0.0:
                continue
            row.score = score
            self.ring.score(row)
            self._book.touch(row)
            known += 1
        return known

    def check_invariants(self) -> None:
        """Raise AssertionError if the parts disagree. For tests."""
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
