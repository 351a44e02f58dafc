"""What launched processes print: behind their names on the terminal, and in their files."""

import io

import pytest

from memoire.errors import ParameterError
from memoire.nodes.output import ProcessOutput


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_lines_stand_behind_the_names_of_their_processes():
    shown = io.StringIO()
    with ProcessOutput(["learner", "actor-10"], terminal=shown) as output:
        output("learner", "one")
        output("actor-10", "two")
        output("proxy-0", "three")
    assert shown.getvalue() == "learner  | one\nactor-10 | two\nproxy-0  | three\n"


def test_names_have_colours_on_a_terminal_unless_nobody_wants_them(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = Terminal()
    ProcessOutput(["a", "b"], terminal=shown)("b", "line")
    assert shown.getvalue() == "\x1b[33mb |\x1b[0m line\n"
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    ProcessOutput(["a", "b"], terminal=plain)("b", "line")
    assert plain.getvalue() == "b | line\n"


def test_each_process_has_a_file_to_which_lines_are_added(tmp_path):
    for number in range(2):
        with ProcessOutput(["a"], str(tmp_path / "logs"), None) as output:
            output("a", f"line {number}")
            output("b", "other")
    assert (tmp_path / "logs" / "a.log").read_text() == "line 0\nline 1\n"
    assert (tmp_path / "logs" / "b.log").read_text() == "other\nother\n"


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ParameterError, match="--logs must be a folder that is there or can be made: File exists, got"):
        ProcessOutput(["a"], str(tmp_path / "file"))
