"""docs/tmrl.md has every row of the pipeline's description, and names tests that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = {f"C{number}" for number in range(1, 89)} | {"H17"}


def rows() -> list[tuple[set[str], str, str]]:
    """Of each line of the table: the rows that it is about, how they are here, and its tests."""
    _, _, text = (ROOT / "docs" / "tmrl.md").read_text(encoding="utf-8").partition("## Row by row")
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and re.match(r"[CH]\d", cells[0]):
            names = set(re.findall(r"\b[CH]\d+", cells[0]))
            for first, last in re.findall(r"C(\d+) to C(\d+)", cells[0]):
                names |= {f"C{number}" for number in range(int(first), int(last) + 1)}
            found.append((names, cells[1], cells[2]))
    return found


def test_every_row_has_its_place_once() -> None:
    named = [name for names, *_ in rows() for name in names]
    assert sorted(named) == sorted(ROWS)
    assert all(how for _, how, _ in rows())


def test_every_row_names_tests_that_are_there() -> None:
    for names, _, tests in rows():
        files = re.findall(r"`([\w/]+\.py)`", tests)
        assert files, f"{names} name no test"
        for file in files:
            assert "def test_" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{names}: {file}"
