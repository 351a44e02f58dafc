"""How a command line is read: commands in groups, an example in each help, and which word was meant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from memoire.suggestions import hint


class Parser(argparse.ArgumentParser):
    """argparse's, with a word about what was meant, and with examples.

    Attributes:
        examples: Whole command lines, shown below the help.
        groups: Names of commands by what they are for, in the order of the help; empty lists them as argparse does.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.examples: tuple[str, ...] = ()
        self.groups: Mapping[str, Sequence[str]] = {}

    @property
    def commands(self) -> Mapping[str, Parser]:
        """Those that it has below it, by name."""
        found = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        return next((action.choices for action in found), {})

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse does; a command or option that there is none of is told apart from those that are missing."""
        words = sys.argv[1:] if args is None else list(args)
        self.check(words)
        return super().parse_args(words, namespace)

    def check(self, words: Iterable[str]) -> None:
        """Refuse the first unknown command or option: argparse would speak of what is missing beside it.

        Raises:
            SystemExit: there is one.
        """
        parser = self
        for word in words:
            if word == "--":
                return
            if word.startswith("--"):
                parser.check_option(word.partition("=")[0])
            elif parser.commands and not word.startswith("-"):
                parser = parser.command(word)

    def check_option(self, name: str) -> None:
        """Refuse an option that is none, nor the beginning of one."""
        known = self._option_string_actions
        if not any(each.startswith(name) for each in known):
            self.error(f"there is no option {name}{hint(name, known)}")

    def command(self, name: str) -> Parser:
        """The command of this name."""
        if name not in self.commands:
            self.error(f"there is no command {name!r}{hint(name, self.commands)}: {', '.join(self.commands)}")
        return self.commands[name]

    def error(self, message: str) -> NoReturn:
        """End with status 2 and few lines: the usage of a command with thirty options would hide what is wrong."""
        lines = [f"{self.prog}: {message}"]
        lines += [f"For example: {self.examples[0]}"] if self.examples else []
        self.exit(2, "\n".join([*lines, f"`{self.prog} --help` shows all.\n"]))

    def format_help(self) -> str:
        """Usage, description, commands or options, and examples."""
        text = self._grouped() if self.groups else super().format_help()
        lines = [f"  {example}" for example in self.examples]
        return "\n".join([text, "examples:", *lines, ""]) if lines else text

    def _grouped(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        listed = [action for group in self._action_groups for action in group._group_actions]
        above = next(action for action in listed if isinstance(action, argparse._SubParsersAction))
        for title, names in self.groups.items():
            formatter.start_section(title)
            formatter.add_arguments([each for each in above._get_subactions() if each.dest in names])
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments([action for action in listed if action is not above])
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()
