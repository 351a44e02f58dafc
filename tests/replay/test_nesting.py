"""Names with dots become dicts and tuples, and values of that form fall apart into leaves and come together again."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memoire.errors import SchemaError
from memoire.replay.columns import Column, allowing_nan, build, collect, tree_of, with_tuples


def leaves_of(tree: Any, value: Any) -> list[Any]:
    found: list[Any] = []
    collect(tree, value, found)
    return found


def test_dots_nest_columns_and_the_order_stays() -> None:
    assert tree_of(["b", "a.y.q", "a.x"]) == {"b": "b", "a": {"y": {"q": "a.y.q"}, "x": "a.x"}}
    assert list(tree_of(["b", "a.y", "a.x"])["a"]) == ["y", "x"]


@pytest.mark.parametrize(
    ("names", "words"), [(["a", "a.x"], "lies within another column"), (["a.x", "a"], "holds other columns")]
)
def test_no_column_lies_within_another_one(names: list[str], words: str) -> None:
    with pytest.raises(SchemaError, match=words):
        tree_of(names)


def test_a_dict_whose_parts_are_numbered_can_be_a_tuple_at_any_depth() -> None:
    names = ["a.0", "a.1.0", "b.x"]
    tree = tree_of(names)
    assert with_tuples(tree, names, {"a", "a.1"}) == {"a": ("a.0", ("a.1.0",)), "b": {"x": "b.x"}}
    assert with_tuples(tree, names, {"a"})["a"] == ("a.0", {"0": "a.1.0"})
    assert with_tuples(tree, names, set()) == tree


@pytest.mark.parametrize(
    ("tuples", "words"),
    [
        ({"c"}, "'c' is said to be a tuple, but no column"),
        ({"a.0"}, "'a.0' is said"),
        ({"b"}, "its parts are called x"),
    ],
)
def test_a_tuple_has_numbered_parts(tuples: set[str], words: str) -> None:
    names = ["a.0", "a.1", "b.x"]
    with pytest.raises(SchemaError, match=words):
        with_tuples(tree_of(names), names, tuples)


nested_values = st.recursive(
    st.integers(),
    lambda inner: st.dictionaries(st.sampled_from("xyz"), inner, min_size=1) | st.lists(inner, min_size=1).map(tuple),
    max_leaves=8,
)


def named(value: Any, path: str, tuples: set[str]) -> dict[str, int]:
    if isinstance(value, int):
        return {path: value}
    if isinstance(value, tuple):
        tuples.add(path)
    parts = enumerate(value) if isinstance(value, tuple) else value.items()
    return {name: leaf for key, part in parts for name, leaf in named(part, f"{path}.{key}", tuples).items()}


@given(nested_values)
def test_what_is_taken_apart_is_put_together_again(value: Any) -> None:
    tuples: set[str] = set()
    expected = named(value, "a", tuples)
    tree = with_tuples(tree_of(expected), list(expected), tuples)["a"]
    assert leaves_of(tree, value) == list(expected.values())
    assert build(tree, expected) == value


class Graph(NamedTuple):
    nodes: Any
    edges: Any


def test_a_graph_without_edges_has_none_of_them() -> None:
    assert leaves_of({"nodes": "g.nodes", "edges": "g.edges"}, Graph([1], None)) == [[1], ()]


@pytest.mark.parametrize("value", [{"x": 1}, 7, None, np.zeros(2)])
def test_a_value_of_another_form_is_refused_and_says_what_is_missing(value: Any) -> None:
    with pytest.raises(SchemaError, match=r"should have 'y' \(for 'a.y.0'\)"):
        leaves_of({"y": ("a.y.0", "a.y.1"), "x": "a.x"}, value)


def test_nan_is_allowed_in_every_leaf_of_a_nested_space() -> None:
    column = Column(np.float32, (2,), "state")
    allowed = allowing_nan({"a": (column, column)})
    assert [each.nan for each in allowed["a"]] == ["allow", "allow"] and column.nan == "refuse"
    assert allowed["a"][0].shape == (2,) and not allowed["a"][0].is_finite
