"""What a cluster has counted, as a person or a script reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from memoire.accounting.merge import ClusterTotals
from memoire.reader.reader import Reader
from memoire.security.keyfolder import Given

INCOMPLETE = 3
"""Exit status when a server did not answer."""


def show(
    endpoints: Sequence[str],
    run: str | None = None,
    *,
    timeout: float = 10.0,
    keys: Given = None,
    as_json: bool = False,
    say: Callable[[str], object] = print,
) -> int:
    """Print the merged totals of all servers behind these addresses; the exit status.

    Raises:
        MemoireTimeout: nobody answered.
        Refused: no server knows the run.
    """
    with Reader(endpoints, timeout=timeout, keys=keys) as reader:
        totals = reader.totals(run, timeout)
    if as_json:
        say(json.dumps(asdict(totals)))
    else:
        for line in lines(totals):
            say(line)
    return INCOMPLETE if totals.missing else 0


def lines(totals: ClusterTotals) -> list[str]:
    """The totals as text."""
    state = "finished" if totals.finished else "not finished"
    where = "on disk" if totals.durable else "in memory"
    shown = [f"run {totals.run!r} ({state}), {where} at {', '.join(totals.servers)}"]
    shown += [f"  {name.replace('_', ' '):<18}{value:>16,}" for name, value in asdict(totals.totals).items()]
    if len(totals.runs) > 1:
        shown.append(f"other runs: {', '.join(name for name in totals.runs if name != totals.run)}")
    for name in totals.missing:
        shown.append(f"{name} did not answer: what it alone has counted is missing above")
    return shown
