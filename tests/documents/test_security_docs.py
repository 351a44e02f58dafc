"""docs/security.md has every threat; what it says of defaults and roles is so."""

import re
from pathlib import Path

import pytest

from memoire.cli.main import parser
from memoire.security import roles as permissions

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
POLICY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
THREATS = re.findall(r"^\| (T\d+) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)


def test_threats_are_numbered_and_whole():
    assert [row[0] for row in THREATS] == [f"T{number}" for number in range(1, len(THREATS) + 1)]
    assert len(THREATS) == len(re.findall(r"^\| T\d+", PAGE, re.MULTILINE)) >= 13


def test_every_role_has_its_row():
    described = PAGE.partition("## Keys")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| (\w+) \| ", described, re.MULTILINE)) - {"role"} == set(permissions.ROLES)


@pytest.mark.parametrize("page", [PAGE, POLICY], ids=["docs/security.md", "SECURITY.md"])
def test_options_that_are_named_exist(page):
    lines = parser().format_help() + "".join(
        each.format_help() for action in parser()._actions if action.choices for each in action.choices.values()
    )
    assert not [option for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page)) if option not in lines]


def test_the_policy_says_how_to_report_and_invents_no_address():
    assert "private advisory" in POLICY and "docs/security.md" in POLICY
    assert not re.findall(r"\S+@\S+\.\S+", POLICY + PAGE)
