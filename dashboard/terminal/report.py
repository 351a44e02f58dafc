"""The figures of a whole cluster to somebody else's tool while the run goes on: what `memoire report` does.

It asks the nodes and merges as the dashboard does, so names and numbers are those of its curves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from fnmatch import fnmatchcase

from memoire.dashboard.collect.aggregator import TIMEOUT, Aggregator
from memoire.dashboard.collect.history import History
from memoire.dashboard.collect.run_file import file_name
from memoire.dashboard.settings import Settings
from memoire.errors import ParameterError
from memoire.loggers import Logger
from memoire.security.tokens import Tokens

from .top import FIRST_RATES, INCOMPLETE, asked_once, node_address


def report(
    nodes: Sequence[str],
    open_logger: Callable[[str], Logger],
    *,
    node_token: Tokens | str | None = None,
    every: float = 10.0,
    only: Sequence[str] = (),
    once: bool = False,
    say: Callable[[str], object] = print,
) -> int:
    """Give a cluster's figures to a logger, again and again, until its run is finished or Ctrl-C. Blocks.

    Args:
        nodes: Where nodes' pages are; "dns:NAME:PORT" is every address of a name.
        open_logger: Called with the name of a run, for each run that begins; its logger is closed when the run ends.
        node_token: What the nodes ask for.
        every: Seconds between two looks.
        only: Patterns of names, such as "sample_*"; none takes every figure.
        once: Look once, and return.
        say: Takes a line at each beginning and end.

    Returns:
        The exit status: 0; 3 if a node did not answer at the last look.

    Raises:
        EndpointError: nobody answers, at the first look.
        ParameterError: a node's address is malformed, or `every` is not above 0.
    """
    if not every > 0.0:
        raise ParameterError("--every", every, "seconds above 0")
    settings = Settings(nodes=tuple(map(node_address, nodes)), node_token=node_token, poll_every=min(every, TIMEOUT))
    with closing(Aggregator(settings, History(None))) as watch:
        asked_once(watch, nodes)
        time.sleep(FIRST_RATES)
        watch.turn(settings.poll_every)
        while True:
            status, is_over = _follow(watch, open_logger, every, only, once, say)
            if is_over:
                return status


def _follow(
    watch: Aggregator,
    open_logger: Callable[[str], Logger],
    every: float,
    only: Sequence[str],
    once: bool,
    say: Callable[[str], object],
) -> tuple[int, bool]:
    """Give the figures of one run, until it ends: the exit status, and whether that is all."""
    seen = watch.turn(watch.settings.poll_every)
    run, looks = seen.run, 0
    with closing(open_logger(run)) as logger:
        say(f"run {run!r}: reporting every {every:g} s")
        while seen.run == run:
            figures = {name: point.mean for name, point in watch.figures.items()}
            logger.log(chosen(figures, only), int(seen.totals.steps))
            looks += 1
            if once or seen.finished:
                say(f"run {run!r}: {'finished' if seen.finished else 'reported'}, {looks} looks")
                return INCOMPLETE if seen.missing else 0, True
            time.sleep(every)
            seen = watch.turn(watch.settings.poll_every)
    say(f"run {run!r}: over, {looks} looks")
    return 0, False


def chosen(figures: Mapping[str, float], patterns: Iterable[str]) -> dict[str, float]:
    """Those whose name one of the patterns matches; all where there is no pattern."""
    wanted = list(patterns)
    return {
        name: value for name, value in figures.items() if not wanted or any(fnmatchcase(name, each) for each in wanted)
    }


def folder_name(run: str) -> str:
    """A run's name as that of a folder: without separators, and never empty, "." or ".."."""
    safe = file_name(run)
    return safe if safe.strip(".") else f"run{safe.replace('.', '_')}"
