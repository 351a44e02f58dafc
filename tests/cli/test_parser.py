"""Tests of the command line: its help, its examples, and its errors for unknown words."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from memoire.cli import main
from memoire.cli.options import Parser
from memoire.nodes import settings


def leaves(parser: Parser, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command that has no subcommands."""
    if not parser.commands and path:
        yield path
    for name, command in parser.commands.items():
        yield from leaves(command, (*path, name))


ALL = [" ".join(path) for path in leaves(main.parser())]


def test_every_command_is_listed_in_one_group_of_the_help() -> None:
    top, commands = main.parsers()
    assert sorted(name for names in top.groups.values() for name in names) == sorted(commands)
    text = top.format_help()
    assert all(f"\n  {name} " in text for name in commands)
    assert [text.index(f"\n{title}:") for title in top.groups] == sorted(text.index(f"\n{t}:") for t in top.groups)


@pytest.mark.parametrize("command", ALL)
def test_the_help_of_each_command_has_examples_that_it_takes(command: str) -> None:
    examples = main.EXAMPLES[command]
    for line in examples:
        words = shlex.split(line)
        assert words[: 1 + len(command.split())] == ["memoire", *command.split()]
        assert callable(settings.parse(*main.parsers(), words[1:], {}).command)
    parser = main.parser()
    for name in command.split():
        parser = parser.commands[name]
    assert parser.format_help().endswith("".join(f"\n  {line}" for line in examples) + "\n")


def test_nothing_but_memoire_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: memoire COMMAND") and "on this machine:" in text and "memoire demo --keep" in text
    with pytest.raises(SystemExit) as ended:
        main.main(["help", "keys", "new"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: memoire keys new")


@pytest.mark.parametrize(
    ("words", "who", "meant"),
    [
        (["sever"], "memoire", "there is no command 'sever' (did you mean 'server'?)"),
        (["--verison"], "memoire", "there is no option --verison (did you mean '--version'?)"),
        (["keys", "revok", "a", "b"], "memoire keys", "there is no command 'revok' (did you mean 'revoke'?)"),
        (["server", "--evn", "X"], "memoire server", "there is no option --evn (did you mean '--env'"),
        (["keys", "new", "--roll=actor"], "memoire keys new", "there is no option --roll (did you mean '--role'?)"),
        (["server", "--byte-limit", "tons", "--env", "X"], "memoire server", "such as 1GiB, 500MB or 4096, got 'tons'"),
    ],
)
def test_a_word_that_there_is_none_of_is_told_which_was_meant(
    words: list[str], who: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(words)
    first, *rest = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert first.startswith(f"{who}: ") and meant in first
    assert rest == [f"For example: {main.EXAMPLES[who[8:]][0]}", f"`{who} --help` shows all."]


def test_a_beginning_that_only_one_option_has_is_taken_and_what_follows_two_dashes_is_not_read() -> None:
    assert main.parser().parse_args(["keys", "new", "--rol=actor", "x"]).role == "actor"
    main.parser().check(["up", "--env", "X", "--", "--what-is-this"])


LIST_MODULES = """
import json, sys
from memoire.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print("\\n" + json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


@pytest.mark.parametrize(
    "words", [[], ["--help"], ["--version"], ["server", "--help"], ["launch", "--help"], ["sever"]]
)
def test_help_and_mistakes_wait_for_no_library(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIST_MODULES, *words], capture_output=True, text=True, timeout=100, check=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("COV")},
    )  # fmt: skip
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert not loaded & {"numpy", "zmq", "msgspec", "fastapi", "gymnasium", "rich", "prometheus_client"}
