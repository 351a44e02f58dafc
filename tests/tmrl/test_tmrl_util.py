"""Partials, whose errors name wrong arguments, and cached properties, which are kept outside of their object."""

import copy
import functools
import gc
import pickle
import weakref

import pytest

from memoire.errors import NotSettable, WrongType
from memoire.rl import pipeline
from memoire.tmrl.util import cached_property, partial, prod


class Tool:
    def __init__(self, size, colour="red", *, sharp=False):
        self.size, self.colour, self.sharp = size, colour, sharp


class Box:
    def __init__(self, tool=Tool, place=None):
        self.tool, self.place = tool(3), place


def test_a_partial_is_completed_later_and_the_later_argument_counts():
    make_tool = partial(Tool, colour="blue", sharp=True)
    assert isinstance(make_tool, functools.partial)
    tool = make_tool(4)
    assert (tool.size, tool.colour, tool.sharp) == (4, "blue", True)
    assert partial(make_tool, colour="green")(1).colour == "green"
    assert partial(Tool, 5)().size == 5


def test_a_partial_without_a_class_takes_the_default_of_the_outer_one():
    assert partial(Box, tool=partial(None, colour="blue"))().tool.colour == "blue"
    with pytest.raises(WrongType, match="place must be a partial of a class, since Box has no class as its default"):
        partial(Box, place=partial(None, colour="blue"))


def test_a_partial_survives_pickling_and_copying():
    for copied in (
        pickle.loads(pickle.dumps(partial(Tool, colour="blue"))),
        copy.deepcopy(partial(Tool, colour="blue")),
    ):
        assert copied(1).colour == "blue"


def test_what_is_no_argument_of_the_class_is_refused_where_it_is_given():
    with pytest.raises(WrongType, match=r"Tool must be called as Tool\(size.*got \(color='blue'\)"):
        partial(Tool, color="blue")
    with pytest.raises(WrongType, match=r"missing a required argument: 'size'.*got \(colour='blue'\)"):
        partial(Tool, colour="blue")()
    with pytest.raises(WrongType, match="func must be a class or another callable, got int"):
        partial(3)
    with pytest.raises(WrongType) as caught:
        partial(Tool, 1, sharp="x" * 1000, other=1)
    assert len(str(caught.value)) < 400, "long values are shown in short"


def test_a_mistake_within_the_class_is_not_called_one_of_its_arguments():
    class Broken:
        def __init__(self, size):
            size + "x"

    with pytest.raises(TypeError, match="unsupported operand"):
        partial(Broken, size=1)()


def test_callables_without_a_signature_are_left_to_the_call():
    assert partial(dict, a=1)(b=2) == {"a": 1, "b": 2}
    assert issubclass(pipeline.Partial, functools.partial)


def test_prod_is_the_product():
    assert prod(s for s in (2, 3, 4)) == 24
    assert prod([]) == 1


class Owner:
    calls = 0

    @cached_property
    def value(self):
        Owner.calls += 1
        return [Owner.calls]

    other = cached_property(lambda self: (self.value, 1))


def test_a_cached_property_is_computed_once_for_each_object_and_lies_outside_of_it():
    first, second = Owner(), Owner()
    assert first.value is first.value and first.value is not second.value
    assert first.other[0] is first.value
    assert first.__dict__ == {}
    assert copy.copy(first).value != first.value
    assert isinstance(Owner.value, cached_property)


def test_a_cached_property_is_set_by_nobody_and_computed_again_when_deleted():
    owner = Owner()
    before = owner.value
    with pytest.raises(NotSettable, match="value of a Owner cannot be set.*Delete it"):
        owner.value = 3
    del owner.value
    del owner.value
    assert owner.value != before


def test_the_value_leaves_with_its_object():
    class Held:
        pass

    class Holder:
        held = cached_property(lambda self: Held())

    holder = Holder()
    gone = weakref.ref(holder.held)
    del holder
    gc.collect()
    assert gone() is None
