"""The memory against its model: any schema, size, lanes and order of calls, everything compared after each step."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from memoire import _core
from memory_walk import Walk

pytestmark = pytest.mark.slow


class MemoryMachine(RuleBasedStateMachine):
    @initialize(data=st.data())
    def begin(self, data):
        self.data = data
        self.walk = Walk(lambda options: self.data.draw(st.sampled_from(options)))

    @invariant()
    def memory_and_model_agree(self):
        self.walk.check()


def _rule(name: str):
    @rule(data=st.data())
    def step(self, data):
        self.data = data
        getattr(self.walk, name)()

    step.__name__ = name
    return step


for _name in sorted(set(Walk.STEPS)):
    setattr(MemoryMachine, f"do_{_name}", _rule(_name))

TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(
    max_examples=16 if _core.CHECKED else 8,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


# Most of them on the build that also checks bounds.
@pytest.mark.parametrize("seed", range(24 if _core.CHECKED else 8))
def test_a_long_walk_ends_where_the_model_does(seed):
    walk = Walk(random.Random(seed).choice)
    for _ in range(60):
        walk.step()
