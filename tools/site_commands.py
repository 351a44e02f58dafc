"""A page with the help of every command, for the documentation's site."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from memoire.cli import main


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A command, then those below it; each once, however many names it has."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in dict.fromkeys(action.choices.values()):
                yield from parsers(below)


def page() -> str:
    """The whole page."""
    parts = ["# Commands\n\nFor people who want every option of a command. This is what `--help` prints.\n"]
    parts += [f"## {each.prog}\n\n```text\n{each.format_help().rstrip()}\n```\n" for each in parsers(main.parser())]
    return "\n".join(parts)
