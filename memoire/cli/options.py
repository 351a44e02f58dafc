"""Options that several commands have, and what follows from them: addresses, keys, tokens, pages.

`Parser` reads a command line: commands in groups, an example in each help, and which word was meant.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from memoire.arguments import declared, hint
from memoire.errors import InsecureWarning
from memoire.nodes.settings import size
from memoire.security import access

if TYPE_CHECKING:
    from memoire.security.access import Tokens


HERE = "tcp://127.0.0.1:5560"
ELSEWHERE = '; for other machines "tcp://*:5560", which takes --keys or --insecure'
SCHEMA = "JSON file that describes an entry, or the JSON itself"
ENV = "Gymnasium environment, such as CartPole-v1, whose observations, actions and rewards are stored"
RUN = 'name of the experiment (default: the one that the state folder counted last, or "default")'


def storage(text: str) -> str:
    """The name of a kind of table that is known here."""
    from memoire.errors import ParameterError
    from memoire.tables import registry

    try:
        return registry.named(text).name
    except ParameterError as error:
        raise argparse.ArgumentTypeError(str(error.expected)) from error


class Commands:
    """What commands are added to: those below a parser."""

    def __init__(self, made: Any) -> None:
        self._made, self.helps = made, dict[str, str]()
        self.choices: Mapping[str, Parser] = made.choices

    def add_parser(self, name: str, *, help: str, **options: Any) -> Parser:
        """Another one; `help` is its line in the list."""
        self.helps[name] = help
        parser: Parser = self._made.add_parser(name, help=help, **options)
        return parser


class Parser(argparse.ArgumentParser):
    """argparse's, with a word about what was meant, and with examples.

    Attributes:
        options: What it takes, in order.
        lists: Names of those that may be repeated.
        alternatives: Groups of which the line says one at most, whose `required` says that it has to.
        examples: Whole command lines, shown below the help.
        groups: Names of commands by what they are for, in the order of the help; empty lists them as argparse does.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.options: list[argparse.Action] = []
        self.lists: set[str] = set()
        self.alternatives: list[tuple[Any, list[argparse.Action]]] = []
        self.examples: tuple[str, ...] = ()
        self.groups: Mapping[str, Sequence[str]] = {}
        self._below: Commands | None = None
        super().__init__(*arguments, **options)

    @property
    def commands(self) -> Mapping[str, Parser]:
        """Those that it has below it, by name."""
        return {} if self._below is None else self._below.choices

    def add_subparsers(self, **options: Any) -> Any:
        """As argparse does."""
        self._below = Commands(super().add_subparsers(**options))
        return self._below

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """As argparse does."""
        return self._noted(super().add_argument(*names, **options), options)

    def add_mutually_exclusive_group(self, **options: Any) -> Any:
        """As argparse does."""
        group, members = super().add_mutually_exclusive_group(**options), list[argparse.Action]()
        add, self.alternatives = group.add_argument, [*self.alternatives, (group, members)]

        def noted(*names: Any, **given: Any) -> argparse.Action:
            members.append(self._noted(add(*names, **given), given))
            return members[-1]

        group.add_argument = noted  # type: ignore[method-assign]
        return group

    def _noted(self, made: argparse.Action, options: Mapping[str, Any]) -> argparse.Action:
        if options.get("action") not in ("help", "version"):
            self.options.append(made)
        if options.get("action") == "append" or options.get("nargs") in ("*", "+"):
            self.lists.add(made.dest)
        return made

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
        known = ["--help", *(["--version"] if self.groups else [])]
        known += [option for each in self.options for option in each.option_strings]
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
        assert self._below is not None
        rows = {title: [(name, self._below.helps[name]) for name in names] for title, names in self.groups.items()}
        rows["options"] = [
            ("-h, --help", "show this help message and exit"),
            ("--version", "show the version and exit"),
        ]
        parts = [f"{title}:\n" + "\n".join(f"  {name:<12}{text}" for name, text in rows[title]) for title in rows]
        return "\n\n".join([self.format_usage().rstrip(), str(self.description), *parts, f"{self.epilog}\n"])


def add_settings(to: Parser, kind: type[Any], *names: str, **reads: Callable[[str], Any]) -> None:
    """A flag for each setting that a class declares, or for those of these names; `reads` makes values of text where
    its type does not say how.
    """
    every = declared(kind)  # type: ignore[arg-type]
    for each in map(every.__getitem__, names or every):
        text = each.help[:1].lower() + each.help[1:].removesuffix(".")
        if each.default and "(default" not in text and each.kind is not bool:
            text += " (default: %(default)s)"
        said, flag = each.setting, f"--{each.setting.flag or each.name.replace('_', '-')}"
        if each.kind is bool:
            to.add_argument(flag, action="store_true", help=text)
            continue
        read = size if said.unit == "bytes" else each.kind if each.kind in (int, float) else reads.get(each.name)
        show = said.show or {"s": "SECONDS", "bytes": "SIZE"}.get(said.unit) or ("N" if each.kind is int else None)
        options = {"choices": said.choices} if said.choices else {"type": read, "metavar": show}
        to.add_argument(flag, default=each.default, help=text, **options)


def said_of(given: argparse.Namespace, kind: type[Any]) -> dict[str, Any]:
    """What was said of the settings that a class declares, by name; without those that are as usual."""
    found = {}
    for each in declared(kind).values():  # type: ignore[arg-type]
        value = getattr(given, (each.setting.flag or each.name).replace("-", "_"))
        if value != each.default:
            found[each.name] = value
    return found


def add_no_dashboard(parser: argparse.ArgumentParser) -> None:
    """Of commands that start a dashboard beside their nodes."""
    parser.add_argument(
        "--no-dashboard",
        action="store_true",
        help="start none; otherwise there is one on a free port of this machine, where its extra is installed",
    )


def add_nodes(to: argparse.ArgumentParser) -> None:
    """Whose pages are read, and the token for them."""
    to.add_argument(
        "nodes",
        nargs="+",
        metavar="NODE",
        help="where a node's pages are (its --http), such as server-0:8080; dns:NAME:PORT is every address of a name; "
        "a tcp:// address, or a proxy alone, is asked for the pages of the servers behind it",
    )
    to.add_argument("--token-file", metavar="FILE", help="a file with the token that the nodes ask for")


def add_keys(to: argparse.ArgumentParser) -> None:
    """The keys folder of the process."""
    to.add_argument(
        "--keys",
        metavar="FOLDER",
        default=os.environ.get("MEMOIRE_KEYS") or None,
        help="this process' keys folder, or a cluster's: see `memoire keys` (default: $MEMOIRE_KEYS; without it none)",
    )


def add_limits(to: argparse.ArgumentParser) -> None:
    """Bounds of the library."""
    to.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a timeout or bound of the library, such as new_clients=100000; may be given again "
        "(docs/settings.md has all)",
    )


def add_schema(to: argparse.ArgumentParser, *, is_required: bool = True) -> None:
    """What is stored, in one table or several, and how it is sampled."""
    source = to.add_mutually_exclusive_group(required=is_required)
    source.add_argument("--schema", metavar="FILE", help=SCHEMA)
    add_env(source)
    source.add_argument(
        "--tables",
        metavar="FILE",
        help="JSON file with several named memories, or the JSON itself: "
        '{"online": {"schema": "online.json", "multi_step": 3}, ...}',
    )
    to.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter of sampling, such as multi_step=3 or samples_per_insert=8, or of prompts, such as group=8; "
        "may be repeated",
    )


def add_env(to: Any) -> None:
    """The environment that says what an entry is."""
    to.add_argument("--env", metavar="ENV", help=ENV)


def add_state(to: argparse.ArgumentParser, what: str) -> None:
    """The state folder; `what` says what it is for."""
    to.add_argument("--state-dir", metavar="FOLDER", help=f"{what} (default: everything is in memory)")


def check_endpoint(given: argparse.Namespace, option: str, endpoint: str) -> None:
    """Refuse an address that would be open to everybody, unless somebody said so."""
    if given.keys is None and not given.insecure:
        access.refuse(option, endpoint, guard="keys (--keys)")


def add_probes(to: argparse.ArgumentParser, main: str) -> None:
    """A port for probes alone; `main` is the option that names the usual one."""
    to.add_argument(
        "--probes",
        metavar="HOST:PORT",
        help=f"where /livez, /readyz and /metrics are answered to everybody, and nothing else (default: at {main})",
    )


def page_options(given: argparse.Namespace) -> dict[str, Any]:
    """Where a node's pages are, and what they ask for; an address that is open to everybody is refused."""
    check_endpoint(given, "--endpoint", given.endpoint)
    if given.insecure:
        warnings.simplefilter("ignore", InsecureWarning)  # what is open is said when it is known
    http, token = (None if given.http == "off" else str(given.http)), tokens(given.http_token_file)
    if http is not None and ":" in http and token is None and not given.insecure:
        access.refuse("--http", http, guard="a token (--http-token-file; --probes has a port of its own)")
    return {"http": http, "http_token": token, "probes": given.probes}


def tokens(path: str | None) -> Tokens | None:
    """Those of a file; a wrong one is said now."""
    from memoire.security.access import Tokens

    return None if path is None else Tokens(path)
