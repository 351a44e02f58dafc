"""A call of a trainer or worker that is interrupted, as by Ctrl+C: samples come once, and other threads go on."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from interrupts import everywhere
from memoire.errors import Closed
from memoire.models.model import Model
from memoire.rl.envelope import Sample, columns_of
from memoire.rl.follower import ModelFollower
from memoire.rl.memory_experience import MemoryExperience, SampleTaker
from memoire.rl.trainer import DrawnBatches
from netkit import in_thread

ENDS = 20.0
"""Seconds in which a call of another thread ends."""


class Once:
    """A reader that has these samples, of two workers, and is closed then."""

    parameters = None

    def __init__(self, *workers: int) -> None:
        each = {k: [Sample(k, k, 1.0, False, False, {}, episode=1, step=step) for step in range(3)] for k in workers}
        self.left, self.steps = [each], [7]
        self.client = np.array([np.frombuffer(bytes([k]) * 16, np.uint8) for k in workers])
        self.lengths = np.full(len(workers), 3)
        self.columns = columns_of([sample for samples in each.values() for sample in samples])

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, wanted: int, patience: float, exact: bool) -> Any:
        if not self.left:
            raise Closed("this reader")
        self.left.clear()
        return self

    def totals(self) -> Any:
        if not self.steps:
            raise Closed("this reader")
        return SimpleNamespace(totals=SimpleNamespace(steps=self.steps.pop()))


class Memory(list[Any]):
    """What `GenericMemory` is for an experience."""

    append = list.extend


def taker() -> SampleTaker:
    made: Any = SampleTaker(Once(1, 2))  # type: ignore[arg-type]
    made.wait(ENDS)
    return made


def test_samples_that_came_are_in_the_memory_once_wherever_their_trainer_is_interrupted() -> None:
    for interrupted in everywhere():
        memory, kept = Memory(), []
        experience = MemoryExperience(taker(), memory, lambda samples, continues: samples, kept.append)
        place = interrupted(experience.update)
        experience.update()
        found = [(each.client[0], each.step) for each in memory]
        assert found == [(client, step) for client in (1, 2) for step in range(3)], place
        assert experience.received == 6 and len(kept) == 2, place
        assert experience.state()["last"] == [(b"\2" * 16).hex(), 1, 2], place


class Models:
    """One model, and then no more."""

    def __init__(self) -> None:
        self.left = [Model("policy", 3, b"weights", False, 0)]

    def wait(self, timeout: float, after: int) -> Model:
        if not self.left:
            raise Closed("this client")
        return self.left.pop()


def follower() -> ModelFollower:
    actor: Any = SimpleNamespace(prepare=lambda body, version: body)
    made = ModelFollower(Models(), actor, lambda body, version: None)  # type: ignore[arg-type]
    assert made.wait(2, ENDS)
    return made


def counts() -> DrawnBatches:
    made = DrawnBatches(Once(1), 2)  # type: ignore[arg-type]
    assert made.await_count(ENDS) == 7
    return made


WAITS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "samples": (taker, lambda each: each.wait(0.01)),
    "a model": (follower, lambda each: each.wait(3, 0.001)),
    "steps": (counts, lambda each: each.await_count(0.01)),
    "more steps": (counts, lambda each: each.wait(0.001)),
}


@pytest.mark.parametrize("name", WAITS)
def test_after_a_wait_that_is_interrupted_another_thread_can_wait(name: str) -> None:
    make, wait = WAITS[name]
    waited = make()
    for interrupted in everywhere():
        place = interrupted(lambda: wait(waited))
        thread, box = in_thread(wait, waited)
        thread.join(ENDS)
        assert "value" in box, f"interrupted at {place}: {box.get('error', 'no end')!r}"
