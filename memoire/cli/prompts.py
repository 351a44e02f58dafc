"""How a table of prompts stands, as a person or a script reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from memoire.prompts.listening import STATES
from memoire.reader.prompts import Prompts
from memoire.security.keyfolder import Given


def show(
    endpoints: Sequence[str],
    table: str | None = None,
    *,
    timeout: float = 10.0,
    keys: Given = None,
    as_json: bool = False,
    say: Callable[[str], object] = print,
) -> int:
    """Print the states of all prompts of a table, added up over its servers; returns 0.

    Raises:
        MemoireTimeout: a server did not answer.
        ParameterError: the table stores something else.
    """
    with Prompts(endpoints, table, timeout=timeout, keys=keys) as prompts:
        figures, name, servers = prompts.figures(), prompts.table, prompts.servers
    if as_json:
        say(json.dumps({"table": name, "servers": servers, **figures}))
    else:
        for line in lines(name, servers, figures):
            say(line)
    return 0


def lines(table: str, servers: Sequence[str], figures: Mapping[str, int]) -> list[str]:
    """The figures as text."""
    states = (*STATES, "forgotten")
    shown = [f"table {table!r} at {', '.join(servers)}: {figures['given']:,} prompts"]
    shown += [f"  {name:<18}{figures[name]:>16,}" for name in states]
    shown.append("of these, and since the servers began")
    return shown + [f"  {name.replace('_', ' '):<18}{figures[name]:>16,}" for name in figures if name not in states]
