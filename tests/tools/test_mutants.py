"""`make mutants`: the mistakes that it plants are mistakes, and the same ones after a change elsewhere."""

import ast
from pathlib import Path

import pytest

MUTANTS = Path(__file__).resolve().parents[1] / "mutants"


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(MUTANTS))
    import run

    return run


@pytest.fixture
def small(tool, monkeypatch, tmp_path):
    """A checkout of one file."""
    import places

    monkeypatch.setattr(places, "ROOT", tmp_path)
    (tmp_path / "memoire").mkdir()

    def found(text):
        (tmp_path / "memoire" / "small.py").write_text(text, encoding="utf-8")
        places._source_and_tree.cache_clear()
        return places, places.python_places("memoire/small.py")

    return found


SMALL = '''"""Words."""
LIMIT = 3


class Box:
    def fill(self, size: int = 2, *, é: bool = True) -> int:
        """Not a mistake: 1 < 2."""
        if size < LIMIT and é:
            self.size = size + 1
            self.put(size, LIMIT)
        assert size is not None, f"{size + 1} too many"
        return not self.size
'''


def test_each_place_is_another_program(small):
    places, found = small(SMALL)
    told = {(place.function, place.kind, place.old, place.new) for place in found}
    assert told == {
        ("", "constant", "3", "4"),
        ("", "default", "2", "3"),
        ("", "default", "True", "False"),
        ("Box.fill", "comparison", "<", "<="),
        ("Box.fill", "boolean", "and", "or"),
        ("Box.fill", "arithmetic", "+", "-"),
        ("Box.fill", "constant", "1", "2"),
        ("Box.fill", "dropped statement", "self.size = size + 1", "pass"),
        ("Box.fill", "dropped statement", "self.put(size, LIMIT)", "pass"),
        ("Box.fill", "swapped arguments", "size, LIMIT", "LIMIT, size"),
        ("Box.fill", "comparison", "is not", "is"),
        ("Box.fill", "return", "not self.size", "None"),
        ("Box.fill", "boolean", "not self.size", "(self.size)"),
    }
    for place in found:
        planted = place.planted(SMALL.encode())
        assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(SMALL))
        assert places.is_other_code(place)
        assert SMALL.splitlines()[place.line - 1].strip().startswith(place.statement) or not place.function


def test_a_draw_is_the_same_after_a_change_elsewhere(small):
    places, found = small(SMALL)
    before = [place.key for place in places.draw(1, found, 5)]
    assert len(before) == 5 == len({place.statement for place in places.draw(1, found, 5)})
    _, moved = small(f"NAME = 'a longer file'\n\n{SMALL}")
    assert [place.key for place in places.draw(1, moved, 5)] == before
    assert [place.key for place in places.draw(2, moved, 5)] != before


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
    said = f"memoire/_core.pyx:{owners.index(2) + 1}:8: Cannot do that"
    assert kernels.refused(said, {"memoire/_core.pyx": owners}) == {2}


def test_mistakes_are_numbered_through_all_kernels(tool):
    import kernels

    every = kernels.Kernels()
    chosen = [found[0] for source in every.sources.values() if (found := source.places())]
    planted = every.with_mistakes(chosen)
    assert {"memoire/_core.pyx", "memoire/tables/caches/_draw.pyx", "memoire/_kernels/tree.pxd"} <= {
        p.file for p in chosen
    }
    for number, place in enumerate(chosen, 1):
        text, owners = planted[place.file]
        assert f"planted({number})" in text and set(owners) == {0, number}
        assert ("def reached_mutants" in text) == place.file.endswith(".pyx")
    assert planted["memoire/_kernels/native.pxd"][0] == every.sources["memoire/_kernels/native.pxd"].text


def test_mistakes_by_hand_and_equivalent_ones_are_explained(tool):
    for row in tool.toml("by_hand.toml", "mistake"):
        assert set(row) <= {"file", "old", "new", "why", "tests"} and row["old"] != row["new"]
        assert (tool.ROOT / row["file"]).read_text(encoding="utf-8").count(row["old"]) == 1, row["why"]
    for row in tool.toml("equivalent.toml", "equivalent"):
        assert set(row) == {"key", "proof"} and row["proof"].endswith(".") and row["key"].count(" | ") == 5


@pytest.mark.parametrize(
    ("status", "output", "found", "by"),
    [
        (0, "3 passed", False, ""),
        (1, "FAILED tests/test_a.py::test_b[1] - assert 1 == 2\n1 failed", True, "tests/test_a.py::test_b[1]"),
        (1, "ERROR tests/test_a.py::test_b\n1 error", True, "tests/test_a.py::test_b"),
        (4, "ImportError while loading conftest", True, "an error while tests are imported"),
        (-11, "", True, "a crash, SIGSEGV"),
        (None, "", True, "a hang"),
    ],
)
def test_what_tests_said_is_understood(tool, status, output, found, by):
    import trial

    assert trial.verdict_of(status, output) == trial.Verdict(found, by, by == "a hang")


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
