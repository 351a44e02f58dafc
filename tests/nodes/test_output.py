"""Tests of the output of launched processes: behind their names on the terminal, and in files."""

import contextlib
import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from memoire.cli import main
from memoire.errors import ChildDied, JobFailed, ParameterError, Refused
from memoire.nodes import settings
from memoire.nodes import supervision as output
from memoire.nodes.launcher import LONGEST_LINE, Child
from memoire.nodes.roles import ServersFile, read_tables, schema_of
from memoire.nodes.supervision import ProcessOutput
from memoire.replay.schema import Schema
from memoire.security.access import read_tokens


def test_each_process_has_a_file_to_which_lines_are_added(tmp_path):
    for number in range(2):
        with ProcessOutput(["a"], str(tmp_path / "logs"), None) as output:
            output("a", f"line {number}")
            output("b", "other")
    assert (tmp_path / "logs" / "a.log").read_text() == "line 0\nline 1\n"
    assert (tmp_path / "logs" / "b.log").read_text() == "other\nother\n"


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ParameterError, match="--logs: the folder '.*file' cannot be created: File exists"):
        ProcessOutput(["a"], str(tmp_path / "file"))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_text_that_a_terminal_lacks_is_shown_as_an_escape(encoding):
    raw = io.BytesIO()
    with contextlib.redirect_stdout(io.TextIOWrapper(raw, encoding)) as shown:
        output.accept_all_text()
        output.print_line("réseau … \udcff")
        shown.detach()
    expected = {"ascii": b"r\\xe9seau \\u2026 \\udcff\n", "latin-1": b"r\xe9seau \\u2026 \\udcff\n"}
    assert raw.getvalue() == expected.get(encoding, "réseau … \\udcff\n".encode())


def test_output_on_a_full_disk_is_lost_which_is_said_once(capsys):
    full = open("/dev/full", "w")  # noqa: SIM115 (closing fails, too)
    shown = ProcessOutput(["a"], terminal=full)
    for number in range(3):
        shown("a", f"line {number}")
    message = "memoire: output to /dev/full cannot be written, and is lost: No space left on device\n"
    assert capsys.readouterr().err == message
    with pytest.raises(OSError):
        full.close()


def test_a_reader_that_has_ended_ends_the_output():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        with pytest.raises(BrokenPipeError):
            output.print_line("line", closed)
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)


COMMANDS = {
    "memoire": ["plan", "--actors", "3"],
    "memoire.rl": ["--help"],
    "memoire.rl.demo.actor": ["--help"],
    "memoire.rl.demo.learner": ["--help"],
    "memoire.tmrl": ["--help"],
}


@pytest.mark.slow
@pytest.mark.parametrize("module", COMMANDS)
def test_a_command_works_without_docstrings_and_on_an_ascii_terminal(module):
    command = [sys.executable, "-OO", "-m", module, *COMMANDS[module]]
    done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, b"") and done.stdout.isascii() and done.stdout


@pytest.mark.slow
def test_a_command_whose_output_cannot_be_written_says_so_and_fails():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "memoire", "plan", "--actors", "3"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr == "memoire: the output cannot be written: No space left on device\n"


class Failing(io.FileIO):
    """File in which no more can be written after an error."""

    def write(self, data):
        raise self.error


@pytest.mark.parametrize(("number", "file"), [(errno.ENOSPC, None), (errno.ENOSPC, "a.txt"), (errno.EBADF, None)])
def test_a_command_names_what_cannot_be_written_and_hides_no_other_error(number, file, tmp_path, capsys):
    with Failing(tmp_path / "shown", "w") as shown, contextlib.redirect_stdout(shown):
        shown.error = OSError(number, "No space", file)
        with pytest.raises(OSError) if number == errno.EBADF else contextlib.nullcontext():
            assert main.main(["plan", "--actors", "3"]) == 1
            assert os.path.samestat(os.fstat(shown.fileno()), os.stat(os.devnull)) == (file is None)
            assert capsys.readouterr().err == f"memoire: {file or 'the output'} cannot be written: No space\n"


def lines_of(*pieces: bytes) -> list[bytes]:
    child = Child("a", ["-m", "a"], {})
    return [line.rstrip() for piece in pieces for line in child.lines("output", piece)]


def test_of_a_progress_bar_the_last_state_is_kept():
    bar = [b"\r%3d %%" % share for share in range(101)]
    assert lines_of(b"begins\r\n", *bar, b"\n", b"ends\n") == [b"begins", b"100 %", b"ends"]
    child = Child("a", ["-m", "a"], {})
    for _ in range(100):
        assert child.lines("output", b"\r" + b"#" * 1000) == []
    assert child.lines("output", b"\n") == [b"#" * 1000]


def test_a_line_without_an_end_ends_when_it_is_too_long():
    pieces = [b"x" * 1000] * (3 * LONGEST_LINE // 1000)
    lines = lines_of(*pieces)
    assert len(lines) == 2 and max(map(len, lines)) <= LONGEST_LINE + 1000


@pytest.mark.parametrize(
    "error",
    [
        Refused("tcp://a:1", "failed", "\x1b[2J\x9b2K\udcff"),
        JobFailed(3, "worker", "\x1b[2J\x9b2K\udcff"),
        ChildDied("a", 1, ("\x1b[2J\x9b2K\udcff",)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_control_characters_of_another_program_do_not_reach_the_terminal(error):
    assert r"\x1b[2J\x9b2K\udcff" in str(error)
    assert str(error).replace("\n", "").isprintable()


SCHEMA = Schema({"obs": "float32", "reward": "float32"}).to_json()
TEXT_FILES: dict[str, tuple[str, Callable[[str], object]]] = {
    "settings.json": ('{"server": {"capacity": 7}}', settings.read),
    "settings.toml": ("[server]\ncapacity = 7\n", settings.read),
    "tables.json": (json.dumps({"t": {"schema": json.loads(SCHEMA), "cache_limit": 7}}), read_tables),
    "schema.json": (SCHEMA, lambda path: schema_of(path, None)),
    "servers": ("tcp://a:5560\ntcp://b:5560\n", lambda path: ServersFile(path).read()),
    "tokens": ("a-token-of-thirty-two-characters-1\n", read_tokens),
}


@pytest.mark.parametrize("name", TEXT_FILES)
def test_a_byte_order_mark_before_a_text_is_skipped(name: str, tmp_path: Path):
    text, read = TEXT_FILES[name]
    contents = []
    for folder, mark in (("plain", b""), ("marked", b"\xef\xbb\xbf")):
        path = tmp_path / folder / name
        path.parent.mkdir()
        path.write_bytes(mark + text.encode())
        contents.append(read(str(path)))
    assert contents[0] == contents[1] and contents[0]
