"""The command `memoire`: reads the command line, imports what it asks for, and explains what goes wrong.

Only argparse is needed to get here, and each command imports its own, so that `memoire doctor` works in an image that
has nothing but the client's three requirements.

Exit status: 0 it worked; 1 it did not (the demo did not reach its goal, the doctor found something wrong, an error
that is explained); 2 the command line is wrong; 128 + n it was ended by signal n before it was done.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence

import memoire
from memoire.errors import MemoireError

from . import operate, run, watch

HERE = "tcp://127.0.0.1:5560"
ELSEWHERE = '; for other machines "tcp://*:5560", which takes --keys or --insecure'
ROLES = ("actor", "server", "learner", "reader", "proxy")
"""What a key may be for, as `memoire.security.permissions` knows them; a test compares."""
Command = Callable[[argparse.Namespace], int]
EXTRAS = {
    "gymnasium": "demo",
    "rich": "demo",
    "lz4": "lz4",
    "fastapi": "dashboard",
    "uvicorn": "dashboard",
    "prometheus_client": "server",
}
"""What installs a module that may be missing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. `arguments` are the words after "memoire"; None takes the process' own."""
    from memoire.nodes import settings, supervision

    top, commands = parsers()
    try:
        words = sys.argv[1:] if arguments is None else arguments
        given = settings.parse(top, commands, words, {} if supervision.LINE in os.environ else os.environ)
        command: Command = given.command
        return command(given)
    except MemoireError as error:
        print(f"memoire: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(f"memoire: this needs {error.name}: pip install 'memoire-rl[{extra}]'", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return 1


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    return parsers()[0]


def parsers() -> "tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]":
    """The whole command line, and each command's part of it."""
    from memoire.nodes import settings

    top = argparse.ArgumentParser(prog="memoire", description="A distributed prioritized replay memory.")
    top.add_argument("--version", action="version", version=f"memoire {memoire.__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run.add_server(commands)
    operate.add_schema_printer(commands)
    run.add_proxies(commands)
    run.add_up(commands)
    run.add_demo(commands)
    operate.add_run(commands)
    watch.add_dashboard(commands)
    watch.add_top(commands)
    watch.add_report(commands)
    watch.add_logs(commands)
    watch.add_doctor(commands)
    watch.add_totals(commands)
    operate.add_plan(commands)
    operate.add_drain(commands)
    operate.add_snapshot(commands)
    operate.add_key_tool(commands)
    for name in settings.COMMANDS:
        settings.add_to(commands.choices[name])
    return top, commands.choices
