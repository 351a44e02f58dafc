"""Generator of the outputs below each `$ memoire plan` in docs/operations.md; run it when its arithmetic changes."""

import contextlib
import io
import pathlib
import shlex

from memoire.cli import main

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "operations.md"
PROMPT, COMMAND, INDENT = "    $ ", "    $ memoire plan ", "    "


def printed(command):
    program, *words = shlex.split(command)
    assert program == "memoire"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main.main(words) == 0, command
    return [INDENT + line for line in out.getvalue().splitlines()]


def lines(text):
    is_output = False
    for line in text.splitlines():
        if line.startswith(COMMAND):
            yield line
            yield from printed(line.removeprefix(PROMPT))
            is_output = True
        elif not (is_output and line.startswith(INDENT)):
            is_output = False
            yield line


def page(text):
    return "\n".join(lines(text)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
