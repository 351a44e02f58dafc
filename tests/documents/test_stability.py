"""The names that docs/stability.md calls public are there, and no others are given away by the front door."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs"
PAGE = (FOLDER / "stability.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `([a-z.0-9]+)` \| (`.*) \|$", PAGE, re.MULTILINE))

OTHERS = re.findall(r"^\| (`[A-Z_].*?) \| \[([a-z-]+\.md)\].*\|$", PAGE, re.MULTILINE)
"""Names that `memoire` has beside the eight, and the page that describes them."""


def names_of(row: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", row))


def test_the_front_door_gives_what_the_page_says() -> None:
    import memoire

    assert memoire.__all__ == re.findall(r"`(\w+)`", ROWS["memoire"])
    assert {name for name in dir(memoire) if not name.startswith("__")} == set(memoire.__all__)
    assert inspect.getdoc(memoire.Schema) and all(name in str(memoire.__doc__) for name in memoire.__all__)


def test_the_other_names_are_importable_and_each_is_described_on_its_page() -> None:
    import memoire

    listed = [name for row in OTHERS for name in re.findall(r"`(\w+)`", row[0])]
    assert {*listed} - {"__version__"} == set(memoire._HOMES) - set(memoire.__all__)
    assert len(listed) == len(set(listed)) and all(hasattr(memoire, name) for name in listed)
    assert all(name in str(memoire.__doc__) for name in listed if name != "__version__")
    for names, page in OTHERS:
        text = (FOLDER / page).read_text(encoding="utf-8")
        missing = [name for name in re.findall(r"`(\w+)`", names) if name not in text]
        assert not missing, f"{page} says nothing of {missing}"


@pytest.mark.parametrize("module", sorted(set(ROWS) - {"memoire"}))
def test_every_public_name_is_there(module: str) -> None:
    found = importlib.import_module(module)
    assert names_of(ROWS[module]) <= set(vars(found))
    assert names_of(ROWS[module]) == set(getattr(found, "__all__", names_of(ROWS[module])))
