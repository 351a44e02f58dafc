"""What commands are declared with, and what several of them have: addresses, keys, tokens, pages.

`Parser` reads a command line: commands in groups, an example in each help, and which word was meant. The settings of a
command are fields of a class, whose text is the description of the command.

One address for every command: that for requests and that of a node's pages lead to each other, by asking the node.

    tcp://proxy:5560   ── HELLO ──▶  http://proxy:8080, http://server-0:8080, ...   for top, logs, dashboard
    http://proxy:8080  ── GET /status ──▶  tcp://proxy:5560                         for totals, run, doctor, ...

The page of a proxy, given alone to top, logs or dashboard, leads to those of its servers by both ways in turn.

What was asked, and what came of it, goes to standard error.
"""

from __future__ import annotations

import argparse
import functools
import http.client
import importlib
import json
import os
import socket
import sys
import time
import urllib.parse
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn, TypeAlias

from memoire.arguments import Declared, Setting, declared, hint
from memoire.errors import AuthError, EndpointError, InsecureWarning, MemoireError, ParameterError
from memoire.nodes.settings import size
from memoire.nodes.supervision import note
from memoire.security import access
from memoire.security.access import Tokens

HERE = "tcp://127.0.0.1:5560"
ASK_TIMEOUT = 5.0
"""Seconds that a node has to answer."""
MAX_STATUS_BYTES = 16 << 20
REQUESTS = ("tcp://", "ipc://")
PAGES = ("http://",)
Say = Callable[[str], object]


def storage(text: str) -> str:
    """The name of a kind of table that is known here."""
    from memoire.tables import registry

    try:
        return registry.named(text).name
    except ParameterError as error:
        raise argparse.ArgumentTypeError(str(error.expected)) from error


class Options:
    """What a command takes, declared as settings in a class below this one."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


Declaring: TypeAlias = type[Any] | Callable[["Parser"], None]
"""A class that declares settings, or what adds options by itself."""


class Commands:
    """What commands are added to: those below a parser."""

    def __init__(self, made: Any) -> None:
        self._made, self.helps = made, dict[str, str]()
        self.choices: Mapping[str, Parser] = made.choices

    def add(
        self,
        name: str,
        help_: str,
        run: str | Callable[[argparse.Namespace], int] | None,
        kind: type[Any],
        *more: Declaring,
        **reads: Callable[[str], Any],
    ) -> Parser:
        """Add a command.

        Args:
            help_: Its line in the list.
            run: What it does; or "MODULE.FUNCTION" of this package, which is imported then, and called with what was
                said of the declared settings and keys; None if further words say what.
            kind: Declares its settings; its text is the description.
            more: Declare further ones.
            reads: As of `add_settings`.
        """
        self.helps[name] = help_
        parser: Parser = self._made.add_parser(name, help=help_, description=kind.__doc__)
        for each in (kind, *more):
            if isinstance(each, type):
                add_settings(parser, each, **reads)
            else:
                each(parser)
        if run is not None:
            parser.set_defaults(command=functools.partial(_run_named, run) if isinstance(run, str) else run)
        return parser


def _run_named(name: str, given: argparse.Namespace) -> int:
    """Call a function of a module of this package with all that was said."""
    module, _, function = name.partition(".")
    said = {name: value for name, value in vars(given).items() if name != "command"}
    status: int = getattr(importlib.import_module(f"memoire.cli.{module}"), function)(**said)
    return status


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
    """A flag or place for each setting that a class declares, or for those of these names; `reads` makes values of text
    where its type does not say how.
    """
    every, groups = declared(kind), dict[str, Any]()  # type: ignore[arg-type]
    for each in map(every.__getitem__, names or every):
        said, options = each.setting, _options(each, reads.get(each.name))
        if said.group and said.group not in groups:
            groups[said.group] = to.add_mutually_exclusive_group(required=said.needed)
        flags = [flag for flag in (said.short, f"--{said.flag or each.name.replace('_', '-')}") if flag]
        groups.get(said.group, to).add_argument(*([each.name] if said.place else flags), **options)


def _options(each: Declared, read: Callable[[str], Any] | None) -> dict[str, Any]:
    """How argparse is told of a setting."""
    said, text = each.setting, each.help.removesuffix(".")
    text = text if text[1:2].isupper() else text[:1].lower() + text[1:]
    if each.kind is bool:
        return {"action": "store_true", "help": text}
    if each.default and "(default" not in text:
        text += " (default: %(default)s)"
    options: dict[str, Any] = {"help": text, "default": list(each.default or ()) if said.several else each.default}
    show = said.show or {"s": "SECONDS", "bytes": "SIZE"}.get(said.unit) or ("N" if each.kind is int else None)
    if not said.choices:
        options["type"] = size if said.unit == "bytes" else each.kind if each.kind in (int, float) else read
    if show or not said.choices:
        options["metavar"] = show or (each.name.upper() if said.place else None)
    if said.several:
        options["action" if said.several == "append" else "nargs"] = said.several
    elif said.place and not each.is_required:
        options["nargs"] = "?"
    if said.needed and not said.group:
        options["required"] = True
    return options | ({"choices": said.choices} if said.choices else {})


def said_of(given: argparse.Namespace, kind: type[Any]) -> dict[str, Any]:
    """What was said of the settings that a class declares, by name; without those that are as usual."""
    return {name: value for name, value in all_of(given, kind).items() if value != declared(kind)[name].default}  # type: ignore[arg-type]


def all_of(given: argparse.Namespace, kind: type[Any]) -> dict[str, Any]:
    """All settings that a class declares, by name."""
    every = declared(kind).values()  # type: ignore[arg-type]
    return {each.name: getattr(given, (each.setting.flag or each.name).replace("-", "_")) for each in every}


class Board(Options):
    """Of commands that start a dashboard beside their nodes."""

    no_dashboard: Annotated[bool, Setting()] = False
    """Start none; otherwise there is one on a free port of this machine, where its extra is installed."""


class ReadPages(Options):
    """Whose pages are read, and the token for them."""

    nodes: Annotated[tuple[str, ...], Setting(place=True, several="+", show="NODE")] = ()
    """Where a node's pages are (its --http), such as server-0:8080; dns:NAME:PORT is every address of a name; a tcp://
    address, or a proxy alone, is asked for the pages of the servers behind it."""
    token_file: Annotated[str | None, Setting(show="FILE")] = None
    """A file with the token that the nodes ask for."""


class NodeOptions(Options):
    """Of commands that run one node."""

    probes: Annotated[str | None, Setting(show="HOST:PORT")] = None
    """Where /livez, /readyz and /metrics are answered to everybody, and nothing else (default: at --http)."""
    limit: Annotated[tuple[str, ...], Setting(several="append", show="NAME=VALUE")] = ()
    """A timeout or bound of the library, such as new_clients=100000; may be given again (docs/settings.md has all)."""


class Stored(Options):
    """What is stored, in one table or several, and how it is sampled."""

    schema: Annotated[str | None, Setting(show="FILE", group="stored")] = None
    """JSON file that describes an entry, or the JSON itself."""
    env: Annotated[str | None, Setting(group="stored")] = None
    """A Gymnasium environment, such as CartPole-v1, whose observations, actions and rewards are stored."""
    tables: Annotated[str | None, Setting(show="FILE", group="stored")] = None
    """JSON file with several named memories, or the JSON itself: {"online": {"schema": "online.json", "multi_step": 3},
    ...}."""
    set: Annotated[tuple[str, ...], Setting(several="append", show="NAME=VALUE")] = ()
    """A parameter of sampling, such as multi_step=3 or samples_per_insert=8, or of prompts, such as group=8; may be
    repeated."""


def add_keys(to: argparse.ArgumentParser) -> None:
    """The keys folder of the process."""
    to.add_argument(
        "--keys",
        metavar="FOLDER",
        default=os.environ.get("MEMOIRE_KEYS") or None,
        help="this process' keys folder, or a cluster's: see `memoire keys` (default: $MEMOIRE_KEYS; without it none)",
    )


def check_endpoint(given: argparse.Namespace, option: str, endpoint: str) -> None:
    """Refuse an address that would be open to everybody, unless somebody said so."""
    if given.keys is None and not given.insecure:
        access.refuse(option, endpoint, guard="keys (--keys)")


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
    return None if path is None else Tokens(path)


def pages_of(addresses: Sequence[str], keys: str | None = None, *, say: Say = note) -> list[str]:
    """Where the pages of nodes are: each address as it is, or what the node at an address for requests says of itself,
    and of all servers behind it. The page of a proxy that is given alone is asked for its servers, too.

    Args:
        keys: This process' keys folder; None is that of $MEMOIRE_KEYS, if it is set.

    Raises:
        EndpointError: nobody answers there, or no node there shows pages.
    """
    if len(addresses) == 1 and (behind := _behind(addresses[0], keys, say)):
        return behind
    found: dict[str, None] = {}
    for address in addresses:
        if not address.startswith(REQUESTS):
            found[address] = None
            continue
        pages = _asked(address, keys)
        say(f"asked {address} for pages: {', '.join(pages)}")
        found |= dict.fromkeys(pages)
    return list(found)


def endpoint_of(address: str, *, say: Say = note) -> str:
    """The address for requests: as it is, or as the page of a node says.

    Raises:
        EndpointError: nobody answers there, or it is no server, proxy or relay.
    """
    if not address.startswith(PAGES):
        return address
    endpoint = _requests(address, _facts(address))
    say(f"asked {address} for its address: {endpoint}")
    return endpoint


def _behind(page: str, keys: str | None, say: Say) -> list[str]:
    """Pages of a proxy and of its servers; [] where a page is of another node, or does not answer."""
    place = urllib.parse.urlsplit(page if "://" in page else f"http://{page}")
    if place.scheme != "http" or page.startswith("dns:"):
        return []
    try:
        facts = _facts(f"http://{place.netloc}")
    except MemoireError:
        return []  # the command says why when it reads the page
    if facts.get("role") not in ("proxy", "relay"):
        return []
    try:
        pages = _asked(_requests(place.geturl(), facts), keys)
    except EndpointError as error:
        say(f"only {page} is looked at, and no server behind it: {error}")
        return []
    say(f"asked {page} for pages: {', '.join(pages)}")
    return pages


def _asked(address: str, keys: str | None) -> list[str]:
    from memoire.net.addresses import page_seen_from
    from memoire.security.keys import Keys
    from memoire.wire import messages

    from . import doctor

    own = Keys.of(keys, "learner")
    hello = messages.Hello(role="pages", host=socket.gethostname()[:256], pid=os.getpid())
    try:
        with doctor.RequestSocket(address, ASK_TIMEOUT, own) as asker:
            answer = asker.ask(hello)[0].body
    except doctor.StepFailed as sick:
        if isinstance(sick.__cause__, AuthError):
            raise sick.__cause__ from None
        raise EndpointError(address, "ask", sick.found, f"an address that answers. {sick.advice.rstrip('.')}") from sick
    pages = answer.pages if isinstance(answer, messages.Welcome) else []
    if not pages:
        instead = "the address of its pages (--http), or start it with --http 127.0.0.1:8080"
        raise EndpointError(address, "find the pages of", "no node there shows any", instead)
    return [page_seen_from(address, page) for page in pages]


def _requests(address: str, facts: Mapping[str, Any]) -> str:
    """The address for requests of the node whose page said these facts."""
    from memoire.net.addresses import seen_from

    endpoint = facts.get("endpoints", {}).get("request", "")
    if not isinstance(endpoint, str) or not endpoint:
        raise EndpointError(address, "find requests at", "that is no server, proxy or relay", "another node")
    return seen_from(f"tcp://{urllib.parse.urlsplit(address).netloc}", endpoint)


def _facts(address: str) -> Mapping[str, Any]:
    """What a node's page says of it."""
    place = urllib.parse.urlsplit(address)
    if place.port is None or not place.hostname:
        raise ParameterError("ADDRESS", address, "http://HOST:PORT of a node's pages, or its tcp:// address")
    try:
        status, facts = _status(place.hostname, place.port)
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = str(error) or "no answer in time"
        raise EndpointError(address, "ask", reason, "an address that answers, such as tcp://proxy:5560") from error
    if status != http.client.OK:
        raise EndpointError(address, "ask", f"it answers with status {status}", "the tcp:// address of this node")
    return facts if isinstance(facts, dict) else {}


def _status(host: str, port: int) -> tuple[int, Any]:
    from memoire.net.addresses import connect_before

    connection = http.client.HTTPConnection(host, port)
    connection.sock = connect_before(host, port, time.monotonic() + ASK_TIMEOUT)
    try:
        connection.request("GET", "/status?clients=no")
        answer = connection.getresponse()
        body = answer.read(MAX_STATUS_BYTES)
        return answer.status, json.loads(body) if answer.status == http.client.OK else None
    finally:
        connection.close()
