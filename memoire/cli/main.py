"""The command `memoire`: reads the command line, imports what it asks for, and explains what goes wrong.

Only argparse is needed to get here, and each command imports its own, so that `memoire doctor` works in an image that
has nothing but the client's three requirements.

Exit status: 0 it worked; 1 it did not (the demo did not reach its goal, the doctor found something wrong, an error
that is explained); 2 the command line is wrong; 128 + n it was ended by signal n before it was done.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from memoire.errors import MemoireError
from memoire.version import VERSION

from . import launch, operate, run, watch
from .examples import EXAMPLES
from .options import Commands
from .parser import Parser

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
"""What each command is for, in the order of the help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. `arguments` are the words after "memoire"; None takes the process' own."""
    from memoire.nodes import output, settings, supervision

    output.accept_all_text()
    words = list(sys.argv[1:] if arguments is None else arguments)
    top, commands = parsers()
    if not words:
        top.print_help()
        return 0
    if words[0] == "help":
        words = [*words[1:], "--help"]
    try:
        given = settings.parse(top, commands, words, {} if supervision.LINE in os.environ else os.environ)
        command: Command = given.command
        status = command(given)
        sys.stdout.flush()  # what reads it may have ended: see below
        return status
    except MemoireError as error:
        print(f"memoire: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # what reads the output has ended, such as `head`
        output.discard()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in output.UNWRITABLE:
            raise
        if error.filename is None:
            output.discard()
        written = "the output" if error.filename is None else error.filename
        output.say(f"memoire: {written} cannot be written: {error.strerror}", sys.stderr)
    return 1


def parser() -> Parser:
    """The whole command line."""
    return parsers()[0]


def parsers() -> tuple[Parser, Mapping[str, Parser]]:
    """The whole command line, and each command's part of it."""
    from memoire.nodes import settings

    top = Parser(
        prog="memoire",
        usage="memoire COMMAND [OPTIONS]",
        description="A distributed prioritized replay memory for reinforcement learning.",
        epilog="`memoire COMMAND --help` explains a command, with examples.",
    )
    top.add_argument("--version", action="version", version=f"memoire {VERSION}")
    commands = top.add_subparsers(title="commands", prog="memoire", required=True, metavar="COMMAND")
    top.groups = {title: _added(commands, add) for title, add in GROUPS.items()}
    for name in settings.COMMANDS:
        settings.add_to(commands.choices[name])
    for path, examples in EXAMPLES.items():
        _at(top, path.split()).examples = examples
    return top, top.commands


def _added(commands: Commands, add: Sequence[Callable[[Commands], None]]) -> list[str]:
    """Add commands; their names."""
    before = set(commands.choices)
    for each in add:
        each(commands)
    return [name for name in commands.choices if name not in before]


def _at(parser: Parser, path: Sequence[str]) -> Parser:
    for name in path:
        parser = parser.commands[name]
    return parser
