"""Options that several commands have, and what follows from them: addresses, keys, tokens, pages."""

import argparse
import os
import warnings
from typing import TYPE_CHECKING, Any, TypeAlias

from memoire.errors import InsecureWarning
from memoire.security import exposure

if TYPE_CHECKING:
    from memoire.security.tokens import Tokens

    from .parser import Parser


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
"""What a command is added to."""
HERE = "tcp://127.0.0.1:5560"
ELSEWHERE = '; for other machines "tcp://*:5560", which takes --keys or --insecure'
SCHEMA = "JSON file that describes an entry, or the JSON itself"
ENV = "Gymnasium environment, such as CartPole-v1, whose observations, actions and rewards are stored"
RUN = 'name of the experiment (default: the one that the state folder counted last, or "default")'


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
        "(docs/guarantees.md has all)",
    )


def add_io_threads(to: argparse.ArgumentParser) -> None:
    """Threads of ZeroMQ."""
    to.add_argument(
        "--io-threads",
        type=int,
        default=1,
        metavar="N",
        help="threads that move and encrypt bytes, each for connections of its own: more on more cores, where "
        "encryption bounds what comes in (default: %(default)s)",
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


def add_env(to: argparse._ActionsContainer) -> None:
    """The environment that says what an entry is."""
    to.add_argument("--env", metavar="ENV", help=ENV)


def add_state(to: argparse.ArgumentParser, what: str) -> None:
    """The state folder; `what` says what it is for."""
    to.add_argument("--state-dir", metavar="FOLDER", help=f"{what} (default: everything is in memory)")


def add_http(to: argparse.ArgumentParser) -> None:
    """Where a node's pages are, and who may read them."""
    to.add_argument(
        "--http",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help='where /livez, /readyz, /metrics and /status are answered; port 0 takes a free one, "off" opens none '
        "(default: %(default)s)",
    )
    to.add_argument(
        "--http-token-file",
        metavar="FILE",
        help="a file with the token that these pages ask for, but for /livez, /readyz and /metrics; read again when it "
        "changes, and may hold an old and a new one, a line each",
    )
    add_probes(to, "--http")


def add_beside(to: argparse.ArgumentParser) -> None:
    """The two ports beside that of requests."""
    to.add_argument(
        "--beside",
        metavar="PORT,PORT",
        help="ports for caches and for notices, 0 for any free one (default: the next two after that of --endpoint)",
    )


def add_insecure(to: argparse.ArgumentParser) -> None:
    """Leave to listen beyond this machine without keys."""
    to.add_argument(
        "--insecure",
        action="store_true",
        help="listen beyond this machine without keys and tokens: "
        "anybody who can reach it may push, draw, read, and end the process",
    )


def check_endpoint(given: argparse.Namespace, option: str, endpoint: str) -> None:
    """Refuse an address that would be open to everybody, unless somebody said so."""
    if given.keys is None and not given.insecure:
        exposure.refuse(option, endpoint, guard="keys (--keys)")


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
        exposure.refuse("--http", http, guard="a token (--http-token-file; --probes has a port of its own)")
    return {"http": http, "http_token": token, "probes": given.probes}


def tokens(path: str | None) -> "Tokens | None":
    """Those of a file; a wrong one is said now."""
    from memoire.security.tokens import Tokens

    return None if path is None else Tokens(path)


def add_counts(to: argparse.ArgumentParser) -> None:
    """How many servers and proxies."""
    to.add_argument("--servers", type=int, default=1, metavar="N", help="server processes (default: %(default)s)")
    to.add_argument("--proxies", type=int, default=1, metavar="N", help="proxy processes (default: %(default)s)")
