"""The README's drawings are made from what was recorded, and from nothing else."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pictures

RECORD = {
    "solved": 475.0,
    "curves": {
        "by priority": [[[500, 10.0], [1000, 500.0]], [[500, 30.0], [1000, 400.0]], [[500, 20.0], [1000, 450.0]]],
        "uniformly": [[[500, 10.0], [1000, 100.0]], [[500, 10.0], [1000, 300.0]], [[500, 10.0], [1000, 200.0]]],
    },
}
ROWS = [
    [pictures.COMPARED, "cpprb 11.0.0", 4.5],
    [pictures.COMPARED, "NumPy, indexing", 0.9],
    ["other", "Reverb 1", 7.0],
]


def test_the_pictures_are_as_their_records_say():
    assert pictures.main(["--check"]) == 0, "make pictures"


def test_a_curve_is_the_median_of_its_seeds_between_their_quartiles():
    assert pictures.quartiles(RECORD["curves"]["by priority"]) == [(500, 15.0, 20.0, 25.0), (1000, 425.0, 450.0, 475.0)]
    drawn = pictures.learning(RECORD)
    assert "quartiles of 3 seeds" in drawn and "drawn by priority" in drawn and "drawn uniformly" in drawn


def test_bars_are_the_recorded_ratios_of_one_row():
    assert pictures.ratios({"rows": ROWS}) == [("cpprb", 4.5), ("NumPy, indexing alone", 0.9)]
    drawn = pictures.speed({"rows": ROWS})
    assert ">4.5<" in drawn and ">0.9<" in drawn and ">7<" not in drawn
    assert drawn.index("NumPy") < drawn.index(">memoire<") < drawn.index("cpprb"), "in the order of their length"


def test_a_picture_that_differs_from_its_record_is_found(tmp_path):
    same, other, missing = (tmp_path / name for name in ("same.svg", "other.svg", "missing.svg"))
    same.write_text("<svg/>", encoding="utf-8")
    other.write_text("<svg/>", encoding="utf-8")
    assert pictures.stale({same: "<svg/>", other: "<g/>", missing: "<svg/>"}) == {other: "<g/>", missing: "<svg/>"}


def test_drawings_are_whole_and_follow_the_theme():
    for drawn in (pictures.learning(RECORD), pictures.speed({"rows": ROWS})):
        root = ElementTree.fromstring(drawn)
        assert root.attrib["aria-label"] and "prefers-color-scheme: dark" in drawn
        assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "")


def test_the_readme_shows_a_dashboard_a_curve_and_bars():
    shown = re.findall(r"!\[[^\]]{20,}\]\((docs/pictures/[^)]+)\)", (pictures.ROOT / "README.md").read_text("utf-8"))
    assert [Path(name).name for name in shown] == ["overview.png", "learning.svg", "speed.svg"]
    head = (pictures.PICTURES / "overview.png").read_bytes()[:24]
    assert head.startswith(b"\x89PNG") and int.from_bytes(head[16:20], "big") >= 1000, "wide enough to be read"
