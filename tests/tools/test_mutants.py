"""`make mutants`: mistakes in kernels, by hand and without effect, verdicts of tests, and the page of results."""

from pathlib import Path

import pytest

MUTANTS = Path(__file__).resolve().parents[1] / "mutants"


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(MUTANTS))
    import run

    return run


def test_kernels_choose_between_a_statement_and_its_mistake(tool, monkeypatch):
    import kernels

    source = kernels.Source("memoire/_core.pyx")
    every = source.places()
    loop = next(place for place in every if place.kind == "comparison" and place.statement.startswith("while "))
    call = next(place for place in every if place.kind == "dropped statement")
    text, owners = source.with_mistakes({1: loop, 2: call})
    lines = text.splitlines()
    chosen = [line.strip() for line in lines if "planted(" in line and "cdef" not in line]
    assert any(line.startswith("while (") and "if planted(1) else (" in line for line in chosen)
    assert "if planted(2): pass" in chosen
    assert len(owners) == len(text.split("\n"))
    assert {owners[number] for number, line in enumerate(lines) if "planted(1)" in line} == {1}
    output = f"memoire/_core.pyx:{owners.index(2) + 1}:8: Cannot do that"
    assert kernels.refused(output, {"memoire/_core.pyx": owners}) == {2}


def test_mistakes_by_hand_and_equivalent_ones_are_explained(tool):
    for row in tool.toml("by_hand.toml", "mistake"):
        assert set(row) <= {"file", "old", "new", "why", "tests"} and row["old"] != row["new"]
        assert (tool.ROOT / row["file"]).read_text(encoding="utf-8").count(row["old"]) == 1, row["why"]
    for row in tool.toml("equivalent.toml", "equivalent"):
        assert set(row) == {"key", "proof"} and row["proof"].endswith(".") and row["key"].count(" | ") == 5


@pytest.mark.parametrize(
    ("status", "output", "is_found", "by"),
    [
        (0, "3 passed", False, ""),
        (1, "FAILED tests/test_a.py::test_b[1] - assert 1 == 2\n1 failed", True, "tests/test_a.py::test_b[1]"),
        (1, "ERROR tests/test_a.py::test_b\n1 error", True, "tests/test_a.py::test_b"),
        (4, "ImportError while loading conftest", True, "an error while tests are imported"),
        (-11, "", True, "a crash, SIGSEGV"),
        (None, "", True, "a hang"),
    ],
)
def test_what_tests_said_is_understood(tool, status, output, is_found, by):
    import trial

    assert trial.verdict_of(status, output) == trial.Verdict(is_found, by, by == "a hang")


def test_the_page_counts_what_was_found(tool):
    place = tool.Place("memoire/wire/messages.py", "f", 3, "constant", "1", "2", 0, 1, "x = 1")
    other = tool.Place("dashboard/web/api.py", "g", 4, "return", "x", "None", 0, 1, "return x")
    hand = tool.Place("dashboard/web/api.py", "g", 4, "by hand", "x", "y", 0, 1, "A figure of two servers.")
    same = tool.Place("dashboard/web/api.py", "g", 4, "boolean", "x", "not x", 0, 1, "if x:")
    rows = {
        place.key: {"found": True, "by": "tests/t.py::a[x|y]"},
        other.key: {"found": False},
        hand.key: {"found": True, "by": "b"},
    }
    proofs = {same.key: "It is never false."}
    all_of_them = [hand, place, other, same]
    states = {each.key: tool.state_of(each, rows, proofs) for each in all_of_them}
    text = tool.pages_text(7, all_of_them, states, rows, proofs)
    assert "**2 of 3 were found (66.7 %); 1 change nothing" in text
    assert "| dashboard/web | 2 | 0 | 1 | 1 |" in text and "| constant | 1 | 1 | 0 | 0 |" in text
    assert "* `dashboard/web/api.py` `g`, return: `x` became `None` in `return x`\n" in text
    assert "in `if x:`. It is never false.\n" in text
    assert "| A figure of two servers. | `dashboard/web/api.py` | `b` |" in text
    assert tool.report(7, all_of_them, rows, proofs, None) == 1
