"""Tests of figures, each declared on its field: their metrics, and their sums over tables and servers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any

import pytest

from memoire.figures import (
    BOUNDS,
    MAX_LABELS,
    Timing,
    adding,
    by,
    catalogue,
    counter,
    gauge,
    histogram,
    shown,
    summed_fields,
    total,
    within,
)
from memoire.server.stats import RecentEpisodes
from memoire.tables.inspection import SampleFreshness

ANSWERS = counter("answers", "Answers", "Answers, by outcome.", label="outcome")


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    seen: Annotated[int, counter("part_seen", "Seen", "What a part saw.")]
    oldest: Annotated[float | None, gauge("part_age_seconds", "Age", "Age of the newest.", adds="max")] = None
    good: Annotated[int, ANSWERS("good"), counter("good_answers", "Good", "Good answers.", of="cluster")] = 0
    bad: Annotated[int, ANSWERS("bad")] = 0


@dataclasses.dataclass(frozen=True)
class Place:
    name: str
    depth: Annotated[int, gauge("place_depth", "Depth", "Depth of a place.")]


@dataclasses.dataclass(frozen=True)
class Whole:
    name: Annotated[str, gauge("whole_info", "Name", "1, with its name.", label="name", adds="last")]
    own: Annotated[Part, within("own_")]
    far: Annotated[Part | None, within("far_", "a part", "a far part")]
    parts: Annotated[Mapping[str, Part], by("part")]
    listed: Annotated[tuple[Place, ...], by("place", "name")]
    times: Annotated[dict[str, Timing], histogram("time_seconds", "Time", "Seconds.", label="type")]
    trouble: Annotated[str, gauge("troubled", "Trouble", "1 while there is trouble.", adds="any")]
    people: Annotated[tuple[str, ...], gauge("people", "People", "Who is there.", adds="join")]
    topics: Annotated[dict[str, int], gauge("newest", "Newest", "Newest version.", label="topic", adds="max")]
    mean: Annotated[float, shown("Mean", "Mean of what was seen.", adds="weighed by count")] = math.nan
    count: Annotated[int, adding("sum")] = 0

    @property
    def is_calm(self) -> Annotated[bool, gauge("calm", "Calm", "1 while there is no trouble.")]:
        return not self.trouble


def timing(seconds: float, first: int) -> Timing:
    return Timing(seconds, (first, *[0] * len(BOUNDS)))


def whole(**changes: Any) -> Whole:
    facts = {
        "name": "one", "own": Part("own", 1, None, 5, 6), "far": None, "parts": {"x": Part("x", 2), "y": Part("y", 3, 4.0)},
        "listed": (Place("l", 7),), "times": {"A": timing(2.0, 3)}, "trouble": "", "people": ("ann", "bob"),
        "topics": {f"topic-{number:03}": number for number in range(100)},
    }  # fmt: skip
    return Whole(**facts | changes)


def values(stats: Any, of: str = "") -> dict[str, dict[tuple[str, ...], Any]]:
    """Return each value with its labels, by metric."""
    return {
        name: {labels: value for source in sources for labels, value in source.values(stats)}
        for name, sources in catalogue(type(stats), of).items()
    }


def test_each_metric_shows_the_field_that_declares_it() -> None:
    metrics = values(whole())
    assert metrics["part_seen"] == {("x",): 2, ("y",): 3} and metrics["place_depth"] == {("l",): 7}
    assert metrics["own_part_seen"] == {(): 1} and metrics["own_answers"] == {("good",): 5, ("bad",): 6}
    assert metrics["part_age_seconds"] == {("y",): 4.0} and metrics["far_part_seen"] == {}
    assert metrics["whole_info"] == {("one",): 1} and metrics["people"] == {(): 2}
    assert (metrics["troubled"], metrics["calm"]) == ({(): 0.0}, {(): 1.0})
    assert metrics["time_seconds"] == {("A",): timing(2.0, 3)}
    assert len(metrics["newest"]) == MAX_LABELS and "mean" not in metrics


def test_metrics_of_a_cluster_take_the_place_of_those_of_a_node() -> None:
    assert "good_answers" not in values(Part("p", 1))
    metrics = values(Part("p", 1, None, 5, 6), "cluster")
    assert metrics["cluster_good_answers"] == {(): 5} and metrics["cluster_answers"] == {("bad",): 6}


def test_what_lies_within_has_its_own_words() -> None:
    assert catalogue(Whole)["far_part_seen"][0].figure.help == "What a far part saw."
    assert catalogue(Whole)["part_seen"][0].labels == ("part",)


def test_parts_add_up_as_their_figures_say() -> None:
    other = whole(
        name="two", parts={"y": Part("y", 10, 1.0), "z": Part("z", 1)}, times={"A": timing(1.0, 1), "B": timing(4.0, 2)},
        trouble="no disk", people=("cid",), topics={"topic-000": 9}, far=Part("f", 1), mean=4.0, count=3,
    )  # fmt: skip
    one = dataclasses.replace(whole(), mean=1.0, count=1, topics={"topic-000": 2})
    both = total(Whole, [one, dataclasses.asdict(other)])
    assert (both.name, both.own.seen, both.mean, both.count) == ("one", 2, 3.25, 4)
    assert both.parts == {"x": Part("x", 2), "y": Part("y", 13, 4.0), "z": Part("z", 1)}
    assert both.times == {"A": timing(3.0, 4), "B": timing(4.0, 2)}
    assert (both.trouble, both.people, both.topics) == ("no disk", ["ann", "bob", "cid"], {"topic-000": 9})
    assert both.far == Part("f", 1)


def test_figures_of_several_nodes_are_those_of_all_episodes_and_of_the_worst_batch() -> None:
    one = RecentEpisodes(1, return_mean=2.0, length_mean=10.0)
    both = total(RecentEpisodes, [one, RecentEpisodes(3, return_mean=6.0, length_mean=50.0)])
    assert (both.return_mean, both.length_mean) == (5.0, 40.0)
    assert total(SampleFreshness, [SampleFreshness(effective=0.9), SampleFreshness(effective=0.4)]).effective == 0.4


def test_a_part_of_an_older_version_adds_nothing_to_what_it_does_not_know() -> None:
    assert summed_fields(Part, [{"name": "old", "seen": 3}, {"name": "new", "seen": 4, "oldest": 2.0, "bad": 1}]) == {
        "name": "old", "seen": 7, "oldest": 2.0, "bad": 1,
    }  # fmt: skip
    assert total(Part, [{"name": "empty"}]) == Part("empty", 0)


def test_fields_that_make_up_one_metric_have_one_kind_and_the_same_labels() -> None:
    @dataclasses.dataclass(frozen=True)
    class Wrong:
        good: Annotated[int, ANSWERS("good")]
        bad: Annotated[int, counter("answers", "Answers", "Answers.")]

    with pytest.raises(AssertionError, match="parts of answers differ"):
        catalogue(Wrong)
