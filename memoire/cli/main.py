"""Entry point of the command `memoire`: parses the command line, imports and runs the command, and reports errors.

The module imports only argparse, and each command imports its own modules, so that `memoire doctor` works in an image
with only the client's three requirements.

Exit status: 0 success; 1 failure (the demo did not reach its goal, the doctor found a fault, an explained error);
2 a wrong command line; 128 + n the command was ended by signal n.

`EXAMPLES` has the examples in the help of each command. A test parses each of these command lines.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from memoire.errors import MemoireError
from memoire.version import VERSION

from . import operate, run, watch
from . import run as launch
from .options import Commands, Parser

Command = Callable[[argparse.Namespace], int]
GROUPS: Mapping[str, Sequence[Callable[[Commands], None]]] = {
    "on this machine": (run.add_demo, launch.add_launch, run.add_up),
    "nodes of a cluster": (run.add_server, run.add_proxies, watch.add_dashboard),
    "look at a cluster": (
        watch.add_top,
        watch.add_logs,
        watch.add_report,
        watch.add_totals,
        watch.add_prompts,
        watch.add_doctor,
    ),
    "change a cluster": (operate.add_run, operate.add_drain, operate.add_snapshot),
    "prepare a cluster": (operate.add_key_tool, operate.add_schema_printer, operate.add_plan),
}
"""Functions that add the commands, by the title of their group, in the order of the help."""


EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        "memoire demo --keep",
        "memoire up --env CartPole-v1",
        "memoire launch learner.py actor.py --actors 8 --env CartPole-v1",
        "memoire top tcp://127.0.0.1:5560",
    ),
    "demo": ("memoire demo --keep", "memoire demo --env Acrobot-v1 --actors 4 --servers 2 --proxies 2 --seconds 300"),
    "launch": (
        "memoire launch learner.py actor.py --actors 8 --env CartPole-v1",
        'memoire launch "learner.py --lr 1e-3" actor.py --actors 8 --logs logs',
        "memoire launch - actor.py --actors 32 --endpoint tcp://proxy:5560",
    ),
    "up": (
        "memoire up --env CartPole-v1",
        "memoire up --schema schema.json --servers 3 --proxies 2 --state-dir state",
        "memoire up --env CartPole-v1 --host '*' --keys keys",
    ),
    "server": (
        "memoire server --env CartPole-v1",
        "memoire server --schema schema.json --name server-0 --state-dir state --byte-limit 4GiB",
        "memoire server --endpoint 'tcp://*:5560' --keys keys/server --schema schema.json --http 127.0.0.1:8080",
    ),
    "proxy": (
        "memoire proxy tcp://server-0:5560 tcp://server-1:5560",
        "memoire proxy --endpoint 'tcp://*:5560' --keys keys/proxy --servers-file servers.txt",
    ),
    "relay": ("memoire relay tcp://proxy:5560", "memoire relay --endpoint ipc:///tmp/relay tcp://proxy:5560"),
    "dashboard": (
        "memoire dashboard tcp://127.0.0.1:5560",
        "memoire dashboard http://server-0:8080 http://proxy:8080 --history history.db",
        "memoire dashboard dns:memoire-server:8080 --listen '*:8265' --token-file token",
    ),
    "top": ("memoire top tcp://127.0.0.1:5560", "memoire top server-0:8080 proxy:8080 --once"),
    "logs": (
        "memoire logs tcp://127.0.0.1:5560 --follow",
        "memoire logs server-0:8080 server-1:8080 --text cuda --since 2h",
    ),
    "report": (
        "memoire report tcp://127.0.0.1:5560 --to tensorboard",
        "memoire report server-0:8080 server-1:8080 --to tensorboard --folder runs",
    ),
    "totals": ("memoire totals tcp://127.0.0.1:5560", "memoire totals tcp://proxy:5560 --run ant-7 --json"),
    "prompts": ("memoire prompts tcp://127.0.0.1:5560", "memoire prompts tcp://proxy:5560 --table math --json"),
    "doctor": ("memoire doctor tcp://127.0.0.1:5560", "memoire doctor tcp://proxy:5560 --roundtrip --keys keys/actor"),
    "run": ("memoire run ant-8 tcp://127.0.0.1:5560", "memoire run ant-8 tcp://proxy:5560 --finish"),
    "drain": (
        "memoire drain tcp://server-2:5560 --to tcp://server-0:5560 tcp://server-1:5560",
        "memoire drain tcp://server-{n}:5560 --keep 2",
    ),
    "snapshot": (
        "memoire snapshot tcp://proxy:5560 --to nightly",
        "memoire snapshot --show state/server-0/snapshots/nightly.snapshot --check",
    ),
    "keys": ("memoire keys new keys", "memoire keys list keys", "memoire keys revoke keys actor/team-b"),
    "keys new": (
        "memoire keys new keys",
        "memoire keys new team-b --role actor --name team-b --server keys/proxy",
        "memoire keys new --kubernetes ant",
    ),
    "keys list": ("memoire keys list keys/server",),
    "keys export": ("memoire keys export keys --kubernetes ant",),
    "keys authorize": ("memoire keys authorize keys team-b",),
    "keys revoke": ("memoire keys revoke keys actor/team-b",),
    "keys in-cluster": ("memoire keys in-cluster --secrets ant --tokens ant-tokens",),
    "keys check": ("memoire keys check /secrets --secrets ant --tokens ant-tokens",),
    "schema": ("memoire schema CartPole-v1", "memoire schema --env CartPole-v1"),
    "plan": (
        "memoire plan --actors 300 --learners 10",
        "memoire plan --env CartPole-v1 --storage episodes --capacity 10000000 --model-bytes 20MB",
    ),
}
"""Examples by the words of a command; "" is `memoire` itself."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; `arguments` are the words after "memoire", by default sys.argv's."""
    from memoire.nodes import settings, supervision
    from memoire.nodes import supervision as output

    output.accept_all_text()
    words = list(sys.argv[1:] if arguments is None else arguments)
    top, commands = parsers()
    if not words:
        top.print_help()
        return 0
    if words[0] == "help":
        words = [*words[1:], "--help"]
    try:
        args = settings.parse(top, commands, words, {} if supervision.LINE in os.environ else os.environ)
        command: Command = args.command
        status = command(args)
        sys.stdout.flush()  # print may raise BrokenPipeError
        return status
    except MemoireError as error:
        print(f"memoire: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the program that reads the output has ended, such as `head`
        output.discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in output.UNWRITABLE:
            raise
        if error.filename is None:
            output.discard_output()
        target = "the output" if error.filename is None else error.filename
        output.print_line(f"memoire: {target} cannot be written: {error.strerror}", sys.stderr)
    return 1


def parser() -> Parser:
    """Return the parser of the whole command line."""
    return parsers()[0]


def parsers() -> tuple[Parser, Mapping[str, Parser]]:
    """Return the parser of the whole command line, and each command's parser by name."""
    from memoire.nodes import settings

    top = Parser(
        prog="memoire",
        usage="memoire COMMAND [OPTIONS]",
        description="A distributed prioritized replay memory for reinforcement learning.",
        epilog="`memoire COMMAND --help` explains a command, with examples.",
    )
    top.add_argument("--version", action="version", version=f"memoire {VERSION}")
    commands = top.add_subparsers(title="commands", prog="memoire", required=True, metavar="COMMAND")
    top.groups = {title: _add_commands(commands, add) for title, add in GROUPS.items()}
    for name in settings.COMMANDS:
        settings.add_to(commands.choices[name])
    for path, examples in EXAMPLES.items():
        _find_parser(top, path.split()).examples = examples
    return top, top.commands


def _add_commands(commands: Commands, add: Sequence[Callable[[Commands], None]]) -> list[str]:
    before = set(commands.choices)
    for each in add:
        each(commands)
    return [name for name in commands.choices if name not in before]


def _find_parser(parser: Parser, path: Sequence[str]) -> Parser:
    for name in path:
        parser = parser.commands[name]
    return parser
