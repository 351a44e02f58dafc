"""Page with the help of every command, for the documentation's site."""

from __future__ import annotations

from collections.abc import Iterator

from memoire.cli import main
from memoire.cli.options import Parser


def parsers(parser: Parser) -> Iterator[Parser]:
    """Yield a command's parser, then its subcommands' parsers; a command with several names only once."""
    yield parser
    for below in dict.fromkeys(parser.commands.values()):
        yield from parsers(below)


def page() -> str:
    """Return the page as Markdown."""
    parts = ["# Commands\n\nFor people who want every option of a command. This is what `--help` prints.\n"]
    parts += [f"## {each.prog}\n\n```text\n{each.format_help().rstrip()}\n```\n" for each in parsers(main.parser())]
    return "\n".join(parts)
