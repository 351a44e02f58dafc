"""The names that docs/stability.md calls public are there, and no others are given away by the front door."""

import importlib
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "stability.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `([a-z.0-9]+)` \| (`.*) \|$", PAGE, re.MULTILINE))


def names_of(row: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", row))


def test_the_front_door_gives_what_the_page_says() -> None:
    import memoire

    assert set(memoire.__all__) == names_of(ROWS["memoire"])
    assert all(hasattr(memoire, name) for name in memoire.__all__)


@pytest.mark.parametrize("module", sorted(set(ROWS) - {"memoire"}))
def test_every_public_name_is_there(module: str) -> None:
    found = importlib.import_module(module)
    assert names_of(ROWS[module]) <= set(vars(found))
    assert names_of(ROWS[module]) == set(getattr(found, "__all__", names_of(ROWS[module])))
