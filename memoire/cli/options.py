"""Declarations of commands and their shared options: addresses, keys, tokens, pages.

`Parser` parses a command line: commands in groups, examples in each help, and suggestions for misspelled words. The
settings of a command are fields of a class; the class's docstring is the description of the command.

Each command accepts a node's request address or its page address, and asks the node for the other address:

    tcp://proxy:5560   ── HELLO ──▶  http://proxy:8080, http://server-0:8080, ...   for top, logs, dashboard
    http://proxy:8080  ── GET /status ──▶  tcp://proxy:5560                         for totals, run, doctor, ...

If the page of a proxy is the only address, top, logs and dashboard ask both ways in turn for the pages of its servers.

Questions and their answers are reported on standard error.
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
from memoire.nodes.supervision import print_note
from memoire.security import access
from memoire.security.access import Tokens

HERE = "tcp://127.0.0.1:5560"
ASK_TIMEOUT = 5.0
"""Seconds to wait for a node's answer."""
MAX_STATUS_BYTES = 16 << 20
REQUESTS = ("tcp://", "ipc://")
PAGES = ("http://",)
Say = Callable[[str], object]


def storage(text: str) -> str:
    """Return the name of a registered kind of table; the type of --storage for argparse."""
    from memoire.tables import registry

    try:
        return registry.require_kind(text).name
    except ParameterError as error:
        raise argparse.ArgumentTypeError(str(error.expected)) from error


class CommandOptions:
    """Base class of the settings of commands: each subclass is a frozen dataclass with keyword fields."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


Declaring: TypeAlias = type[Any] | Callable[["Parser"], None]
"""A class that declares settings, or a function that adds options to a parser."""


class Commands:
    """Commands below a parser: adds parsers with settings to argparse's subparsers."""

    def __init__(self, subparsers: Any) -> None:
        self._subparsers, self.helps = subparsers, dict[str, str]()
        self.choices: Mapping[str, Parser] = subparsers.choices

    def add(
        self,
        name: str,
        help_: str,
        run: str | Callable[[argparse.Namespace], int] | None,
        kind: type[Any],
        *declarations: Declaring,
        **reads: Callable[[str], Any],
    ) -> Parser:
        """Add a command.

        Args:
            help_: The command's line in the list of commands.
            run: Function that runs the command; or "MODULE.FUNCTION" of this package, which is imported when the
                command runs, and is called with the declared settings and keys; None if the command has subcommands.
            kind: Class of its settings; the docstring of the class is the description.
            declarations: Further declarations of options.
            reads: See `add_settings`.
        """
        self.helps[name] = help_
        parser: Parser = self._subparsers.add_parser(name, help=help_, description=kind.__doc__)
        for each in (kind, *declarations):
            if isinstance(each, type):
                add_settings(parser, each, **reads)
            else:
                each(parser)
        if run is not None:
            parser.set_defaults(command=functools.partial(_run_named, run) if isinstance(run, str) else run)
        return parser


def _run_named(name: str, args: argparse.Namespace) -> int:
    """Call "MODULE.FUNCTION" of this package with all settings of the command line."""
    module, _, function = name.partition(".")
    options = {name: value for name, value in vars(args).items() if name != "command"}
    status: int = getattr(importlib.import_module(f"memoire.cli.{module}"), function)(**options)
    return status


class Parser(argparse.ArgumentParser):
    """argparse's parser with examples, and with suggestions for unknown commands and options.

    Attributes:
        options: The parser's options, in order.
        lists: Destinations of options that take several values.
        alternatives: Mutually exclusive groups with their members; `required` of a group asks for one of them.
        examples: Whole command lines, shown below the help.
        groups: Names of commands by the title of their group, in the order of the help; empty uses argparse's list.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.options: list[argparse.Action] = []
        self.lists: set[str] = set()
        self.alternatives: list[tuple[Any, list[argparse.Action]]] = []
        self.examples: tuple[str, ...] = ()
        self.groups: Mapping[str, Sequence[str]] = {}
        self._subcommands: Commands | None = None
        super().__init__(*arguments, **options)

    @property
    def commands(self) -> Mapping[str, Parser]:
        """Subcommands of this parser, by name."""
        return {} if self._subcommands is None else self._subcommands.choices

    def add_subparsers(self, **options: Any) -> Any:
        """Add subparsers as argparse does, and return them as `Commands`."""
        self._subcommands = Commands(super().add_subparsers(**options))
        return self._subcommands

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Add an argument as argparse does, and record it in `options` and `lists`."""
        return self._record(super().add_argument(*names, **options), options)

    def add_mutually_exclusive_group(self, **options: Any) -> Any:
        """Add a group as argparse does, and record it in `alternatives`."""
        group, members = super().add_mutually_exclusive_group(**options), list[argparse.Action]()
        add, self.alternatives = group.add_argument, [*self.alternatives, (group, members)]

        def add_member(*names: Any, **options: Any) -> argparse.Action:
            members.append(self._record(add(*names, **options), options))
            return members[-1]

        group.add_argument = add_member  # type: ignore[method-assign]
        return group

    def _record(self, action: argparse.Action, options: Mapping[str, Any]) -> argparse.Action:
        if options.get("action") not in ("help", "version"):
            self.options.append(action)
        if options.get("action") == "append" or options.get("nargs") in ("*", "+"):
            self.lists.add(action.dest)
        return action

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse a command line as argparse does; report unknown commands and options before missing ones."""
        words = sys.argv[1:] if args is None else list(args)
        self.check(words)
        return super().parse_args(words, namespace)

    def check(self, words: Iterable[str]) -> None:
        """Reject the first unknown command or option, of which argparse would only report missing ones.

        Raises:
            SystemExit: a command or option is unknown.
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
        """Exit with an error if `name` is neither an option nor the beginning of one."""
        known = ["--help", *(["--version"] if self.groups else [])]
        known += [option for each in self.options for option in each.option_strings]
        if not any(each.startswith(name) for each in known):
            self.error(f"there is no option {name}{hint(name, known)}")

    def command(self, name: str) -> Parser:
        """Return the subcommand's parser; exit with an error if the name is unknown."""
        if name not in self.commands:
            self.error(f"there is no command {name!r}{hint(name, self.commands)}: {', '.join(self.commands)}")
        return self.commands[name]

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and a few lines: the usage of a command with thirty options would hide the error."""
        lines = [f"{self.prog}: {message}"]
        lines += [f"For example: {self.examples[0]}"] if self.examples else []
        self.exit(2, "\n".join([*lines, f"`{self.prog} --help` shows all.\n"]))

    def format_help(self) -> str:
        """Return usage, description, commands or options, and examples."""
        text = self._format_groups() if self.groups else super().format_help()
        lines = [f"  {example}" for example in self.examples]
        return "\n".join([text, "examples:", *lines, ""]) if lines else text

    def _format_groups(self) -> str:
        assert self._subcommands is not None
        helps = self._subcommands.helps
        rows = {title: [(name, helps[name]) for name in names] for title, names in self.groups.items()}
        rows["options"] = [
            ("-h, --help", "show this help message and exit"),
            ("--version", "show the version and exit"),
        ]
        parts = [f"{title}:\n" + "\n".join(f"  {name:<12}{text}" for name, text in rows[title]) for title in rows]
        return "\n\n".join([self.format_usage().rstrip(), str(self.description), *parts, f"{self.epilog}\n"])


def add_settings(to: Parser, kind: type[Any], *names: str, **reads: Callable[[str], Any]) -> None:
    """Add a flag or positional argument for each setting that a class declares, or for those in `names`; `reads` has
    parsers of their values by name.
    """
    every, groups = declared(kind), dict[str, Any]()  # type: ignore[arg-type]
    for each in map(every.__getitem__, names or every):
        setting, options = each.setting, _argparse_options(each, reads.get(each.name))
        if setting.group and setting.group not in groups:
            groups[setting.group] = to.add_mutually_exclusive_group(required=setting.needed)
        flags = [flag for flag in (setting.short, f"--{setting.flag or each.name.replace('_', '-')}") if flag]
        groups.get(setting.group, to).add_argument(*([each.name] if setting.place else flags), **options)


def _argparse_options(each: Declared, read: Callable[[str], Any] | None) -> dict[str, Any]:
    setting, text = each.setting, each.help.removesuffix(".")
    text = text if text[1:2].isupper() else text[:1].lower() + text[1:]
    if each.kind is bool:
        return {"action": "store_true", "help": text}
    if each.default and "(default" not in text:
        text += " (default: %(default)s)"
    options: dict[str, Any] = {"help": text, "default": list(each.default or ()) if setting.several else each.default}
    show = setting.show or {"s": "SECONDS", "bytes": "SIZE"}.get(setting.unit) or ("N" if each.kind is int else None)
    if not setting.choices:
        options["type"] = size if setting.unit == "bytes" else each.kind if each.kind in (int, float) else read
    if show or not setting.choices:
        options["metavar"] = show or (each.name.upper() if setting.place else None)
    if setting.several:
        options["action" if setting.several == "append" else "nargs"] = setting.several
    elif setting.place and not each.is_required:
        options["nargs"] = "?"
    if setting.needed and not setting.group:
        options["required"] = True
    return options | ({"choices": setting.choices} if setting.choices else {})


def changed_settings(args: argparse.Namespace, kind: type[Any]) -> dict[str, Any]:
    """Return the settings that a class declares, by name, without those that equal their defaults."""
    return {name: value for name, value in all_of(args, kind).items() if value != declared(kind)[name].default}  # type: ignore[arg-type]


def all_of(args: argparse.Namespace, kind: type[Any]) -> dict[str, Any]:
    """Return all settings that a class declares, by name."""
    every = declared(kind).values()  # type: ignore[arg-type]
    return {each.name: getattr(args, (each.setting.flag or each.name).replace("-", "_")) for each in every}


class DashboardOptions(CommandOptions):
    """Options of commands that start a dashboard beside their nodes."""

    no_dashboard: Annotated[bool, Setting()] = False
    """Start no dashboard; by default one runs on a free port of this machine if its extra is installed."""


class NodePageOptions(CommandOptions):
    """Nodes whose pages are read, and the token for them."""

    nodes: Annotated[tuple[str, ...], Setting(place=True, several="+", show="NODE")] = ()
    """Address of a node's pages (its --http), such as server-0:8080; dns:NAME:PORT stands for every address of a name;
    a tcp:// address, or a single proxy, is asked for the pages of the servers behind it."""
    token_file: Annotated[str | None, Setting(show="FILE")] = None
    """A file with the token that the nodes ask for."""


class NodeOptions(CommandOptions):
    """Options of commands that run one node."""

    probes: Annotated[str | None, Setting(show="HOST:PORT")] = None
    """Address that answers only /livez, /readyz and /metrics, without a token (default: that of --http)."""
    limit: Annotated[tuple[str, ...], Setting(several="append", show="NAME=VALUE")] = ()
    """A timeout or bound of the library, such as new_clients=100000; may be repeated (docs/settings.md lists all)."""


class TableOptions(CommandOptions):
    """Schema and sampling of one table or several."""

    schema: Annotated[str | None, Setting(show="FILE", group="stored")] = None
    """JSON file that describes an entry, or the JSON itself."""
    env: Annotated[str | None, Setting(group="stored")] = None
    """A Gymnasium environment, such as CartPole-v1, whose observations, actions and rewards are stored."""
    tables: Annotated[str | None, Setting(show="FILE", group="stored")] = None
    """JSON file with several named tables, or the JSON itself: {"online": {"schema": "online.json", "multi_step": 3},
    ...}."""
    set: Annotated[tuple[str, ...], Setting(several="append", show="NAME=VALUE")] = ()
    """A parameter of sampling, such as multi_step=3 or samples_per_insert=8, or of prompts, such as group=8; may be
    repeated."""


def add_keys(to: argparse.ArgumentParser) -> None:
    """Add --keys, the keys folder of the process."""
    to.add_argument(
        "--keys",
        metavar="FOLDER",
        default=os.environ.get("MEMOIRE_KEYS") or None,
        help="this process' keys folder, or a cluster's: see `memoire keys` (default: $MEMOIRE_KEYS if set, else none)",
    )


def check_endpoint(args: argparse.Namespace, option: str, endpoint: str) -> None:
    """Raise an error if other machines can reach `endpoint` and neither --keys nor --insecure is given."""
    if args.keys is None and not args.insecure:
        access.refuse(option, endpoint, guard="keys (--keys)")


def page_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a node's pages: `http`, `http_token`, `probes`.

    Raises an error if other machines can reach an address without keys or token, unless --insecure is given.
    """
    check_endpoint(args, "--endpoint", args.endpoint)
    if args.insecure:
        warnings.simplefilter("ignore", InsecureWarning)  # the node reports open addresses when the node binds
    http, token = (None if args.http == "off" else str(args.http)), tokens(args.http_token_file)
    if http is not None and ":" in http and token is None and not args.insecure:
        access.refuse("--http", http, guard="a token (--http-token-file; --probes has a port of its own)")
    return {"http": http, "http_token": token, "probes": args.probes}


def tokens(path: str | None) -> Tokens | None:
    """Return the tokens of a file, or None without a path; raise an error at once if the file cannot be used."""
    return None if path is None else Tokens(path)


def pages_of(addresses: Sequence[str], keys: str | None = None, *, say: Say = print_note) -> list[str]:
    """Return the addresses of nodes' pages.

    The node at a request address is asked for its own page and those of all servers behind it; other addresses stay as
    they are. If the page of a proxy is the only address, the proxy is asked for the pages of its servers, too.

    Args:
        keys: Keys folder of this process; None is that of $MEMOIRE_KEYS, if it is set.

    Raises:
        EndpointError: no node answers at an address, or the node has no pages.
    """
    if len(addresses) == 1 and (pages := _pages_behind(addresses[0], keys, say)):
        return pages
    all_pages: dict[str, None] = {}
    for address in addresses:
        if not address.startswith(REQUESTS):
            all_pages[address] = None
            continue
        pages = _ask_pages(address, keys)
        say(f"asked {address} for pages: {', '.join(pages)}")
        all_pages |= dict.fromkeys(pages)
    return list(all_pages)


def endpoint_of(address: str, *, say: Say = print_note) -> str:
    """Return the request address of a node; the address of a page is replaced by asking the page.

    Raises:
        EndpointError: no node answers, or the node is not a server, proxy or relay.
    """
    if not address.startswith(PAGES):
        return address
    endpoint = _request_address(address, _facts(address))
    say(f"asked {address} for its address: {endpoint}")
    return endpoint


def _pages_behind(page: str, keys: str | None, say: Say) -> list[str]:
    """Return the pages of a proxy and of its servers; [] if the page is not a proxy's, or does not answer."""
    place = urllib.parse.urlsplit(page if "://" in page else f"http://{page}")
    if place.scheme != "http" or page.startswith("dns:"):
        return []
    try:
        facts = _facts(f"http://{place.netloc}")
    except MemoireError:
        return []  # the command reports the error when it reads the page
    if facts.get("role") not in ("proxy", "relay"):
        return []
    try:
        pages = _ask_pages(_request_address(place.geturl(), facts), keys)
    except EndpointError as error:
        say(f"reading only {page}, not the servers behind it: {error}")
        return []
    say(f"asked {page} for pages: {', '.join(pages)}")
    return pages


def _ask_pages(address: str, keys: str | None) -> list[str]:
    from memoire.net.addresses import page_seen_from
    from memoire.security.keys import Keys
    from memoire.wire import messages

    from . import doctor

    process_keys = Keys.from_setting(keys, "learner")
    hello = messages.Hello(role="pages", host=socket.gethostname()[:256], pid=os.getpid())
    try:
        with doctor.RequestSocket(address, ASK_TIMEOUT, process_keys) as requests:
            answer = requests.ask(hello)[0].body
    except doctor.StepFailed as failure:
        if isinstance(failure.__cause__, AuthError):
            raise failure.__cause__ from None
        instead = f"an address that answers. {failure.advice.rstrip('.')}"
        raise EndpointError(address, "ask", failure.finding, instead) from failure
    pages = answer.pages if isinstance(answer, messages.Welcome) else []
    if not pages:
        instead = "the address of its pages (--http), or start the node with --http 127.0.0.1:8080"
        raise EndpointError(address, "find the pages of", "the node has no pages", instead)
    return [page_seen_from(address, page) for page in pages]


def _request_address(address: str, facts: Mapping[str, Any]) -> str:
    from memoire.net.addresses import seen_from

    endpoint = facts.get("endpoints", {}).get("request", "")
    if not isinstance(endpoint, str) or not endpoint:
        instead = "the page of a server, proxy or relay"
        raise EndpointError(address, "find a request address at", "the node there takes no requests", instead)
    return seen_from(f"tcp://{urllib.parse.urlsplit(address).netloc}", endpoint)


def _facts(address: str) -> Mapping[str, Any]:
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
