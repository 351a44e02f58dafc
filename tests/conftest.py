"""Hooks and fixtures of all tests: the tested build, marks of folders, and no skip without a listed reason."""

import contextlib
import faulthandler
import os
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from memoire import _core
from memoire.net import addresses as resolver
from memoire.net.addresses import NameResolver
from memoire.server import build

if TYPE_CHECKING:
    from netkit import Cluster

# Timings mean nothing on a shared machine. CI tries fixed cases; developers' machines find new cases.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

TESTS = Path(__file__).parent
ALLOWED_SKIPS = TESTS / "allowed_skips.txt"
TRACES = "memoire-crash-{}-{}.txt"
"""Name of the file with the stacks of a crashed worker, by run and worker of pytest-xdist."""

ABOUT_ARRAYS = ("replay", "wire", "tables", "accounting", "classic", "reader", "samples")
"""Folders of tests that are repeated on the build that checks the bounds of arrays."""
NOT_ABOUT_ARRAYS = (
    "test_container.py",
    "test_contract_cluster.py",
    "test_exactness.py",
    "test_feedback.py",
    "test_interrupts.py",
    "test_ledger.py",
    "test_rate.py",
    "test_starts.py",
    "test_takes.py",
)
"""Files of these folders that are not repeated: about lines of Python, counts, statistics, processes or memory."""
MARKED = ("processes", "browser", "chart", "kubernetes")
"""Folders whose tests have their folder's name as a mark."""
SLOW = ("integration", "samples", "processes", "simulation", "protocol", "tools", "browser", "chart", "kubernetes")
"""Folders whose tests are marked `slow`: over real sockets, several folders together, or other programs. `make
test-quick` leaves them out. A test of another folder that takes longer than `QUICK_SECONDS` has the mark itself.
"""
QUICK_SECONDS = 1.5
"""Seconds that a quick test takes at most on two idle cores. A summary names slower tests; none fails for it."""
APART = ("browser", "chart", "kubernetes", "torch")
"""Marks of tests that need a browser, Helm, a cluster or torch, and run only if `-m` or a path names them."""


def folder_of(item: pytest.Item) -> str:
    return item.path.parent.name


def runs_elsewhere(item: pytest.Item, chosen: str, keyword: str) -> bool:
    """Return True if another command runs this test, by the choice of `-m` and `-k`; not used for named files."""
    if any(item.get_closest_marker(mark) is not None and mark not in chosen for mark in APART):
        return True
    is_about_arrays = folder_of(item) in ABOUT_ARRAYS and item.path.name not in NOT_ABOUT_ARRAYS
    return _core.CHECKED and not keyword and not is_about_arrays


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip folders that import torch, and slow folders for the quick half, unless `-m` or named files need them."""
    chosen = config.option.markexpr
    if collection_path.parent != TESTS or any("::" in argument or argument.endswith(".py") for argument in config.args):
        return None
    left_out = {*SLOW} if chosen == "not slow" else set()
    if "torch" not in chosen:
        left_out.add("frameworks")
    return True if collection_path.name in left_out else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if folder_of(item) in MARKED:
            item.add_marker(folder_of(item))
        if folder_of(item) in SLOW:
            item.add_marker("slow")
    if any("::" in argument or argument.endswith(".py") for argument in config.args):
        return  # named tests run in any case
    elsewhere = {item for item in items if runs_elsewhere(item, config.option.markexpr, config.option.keyword)}
    config.hook.pytest_deselected(items=[item for item in items if item in elsewhere])
    items[:] = [item for item in items if item not in elsewhere]


def pytest_report_header() -> str:
    return f"memoire._core: {'checked' if _core.CHECKED else 'plain'} build, {_core.__file__}"


def pytest_configure(config: pytest.Config) -> None:
    wanted = os.environ.get("MEMOIRE_CHECKED") == "1"
    if wanted != _core.CHECKED:
        raise pytest.UsageError(
            f"MEMOIRE_CHECKED asks for the {'checked' if wanted else 'plain'} build, but {_core.__file__} is the other one. "
            "Run `make test` or `make test-checked`."
        )


CRASH: pytest.StashKey[object] = pytest.StashKey()
"""Open file, of which faulthandler has only the descriptor."""


@pytest.hookimpl(trylast=True)  # after pytest's own hook, which writes far above the summary
def pytest_sessionstart(session: pytest.Session) -> None:
    worker = getattr(session.config, "workerinput", None)
    if worker is not None:
        path = Path(tempfile.gettempdir()) / TRACES.format(worker["testrunuid"], worker["workerid"])
        session.config.stash[CRASH] = file = path.open("w")
        faulthandler.enable(file)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name quick tests that were slow, and the stacks of crashed workers."""
    if "not slow" in terminalreporter.config.option.markexpr:
        name_slow_tests(terminalreporter)
    name_crashes(terminalreporter)


def slow_ones(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Return a line for each test that took longer than a quick one may, the slowest first."""
    took: Counter[str] = Counter()
    for report in reports:
        took[report.nodeid] += report.duration
    return [f"{seconds:.1f} s: {name}" for name, seconds in took.most_common() if seconds > QUICK_SECONDS]


def name_slow_tests(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [each for group in terminalreporter.stats.values() for each in group if hasattr(each, "duration")]
    if lines := slow_ones(reports):
        terminalreporter.section(f"took longer than {QUICK_SECONDS:g} s: mark these `slow`, or make them faster")
        terminalreporter.write("".join(f"{line}\n" for line in lines))


def name_crashes(terminalreporter: pytest.TerminalReporter) -> None:
    workers = getattr(terminalreporter.config.pluginmanager.get_plugin("dsession"), "nodemanager", None)
    if workers is None:
        return
    for path in sorted(Path(tempfile.gettempdir()).glob(TRACES.format(workers.testrunuid, "*"))):
        if stacks := path.read_text(encoding="utf-8", errors="replace"):
            terminalreporter.section(path.stem.rpartition("-")[2] + " crashed")
            terminalreporter.write_line(stacks)
        path.unlink()


def _refused(*_args: object, **_options: object) -> None:
    raise AssertionError("what decides opens no socket, and does not wait")


@pytest.fixture
def keep() -> Iterator[Callable[[Any], Any]]:
    """Return a function that enters a context and returns its value; all contexts end with the test, newest first."""
    with contextlib.ExitStack() as stack:
        yield stack.enter_context


@pytest.fixture
def cluster() -> Iterator["Cluster"]:
    """Nodes and clients in this process that end with the test."""
    with contextlib.closing(_new_cluster()) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator["Cluster"]:
    """Nodes and clients in this process that end with the last test of a module."""
    with contextlib.closing(_new_cluster()) as nodes:
        yield nodes


def _new_cluster() -> "Cluster":
    from netkit import Cluster  # imported late: tests of the memory alone need no sockets

    return Cluster()


@pytest.fixture(scope="module")
def without_io() -> Iterator[None]:
    """Forbid sockets and pauses in a module's tests, for parts that decide and leave both to other parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "socket", _refused)
        patch.setattr(time, "sleep", _refused)
        yield


TIMES = {
    "keys_reread": (
        "memoire.security.keys.REREAD_INTERVAL",
        "memoire.net.link.REREAD_INTERVAL",
        "memoire.net.curve_server.KEYS_INTERVAL",
    ),
    "refused_pause": ("memoire.net.link.REFUSED_PAUSE",),
    "refused_max_pause": ("memoire.net.link.MAX_REFUSED_PAUSE",),
    "denied": ("memoire.net.channel.DENIED_TIMEOUT",),
    "second_key": ("memoire.net.curve_server.SECOND_KEY",),
    "channel_renewed": ("memoire.net.channel.RENEW_TIMEOUT",),
    "heartbeat": ("memoire.client.session.HEARTBEAT_INTERVAL",),
    "home_away": ("memoire.client.session.AWAY_TIMEOUT",),
    "server_away": ("memoire.proxy.io.AWAY_TIMEOUT",),
    "left_out": ("memoire.tables.calls.LEFT_OUT_TIMEOUT",),
    "proxy_hello": ("memoire.proxy.io.HELLO_INTERVAL",),
    "reader_hello": ("memoire.reader.directory.HELLO_INTERVAL",),
    "unheard": ("memoire.models.topics.UNHEARD_TIMEOUT",),
    "lookup": ("memoire.cli.drain.LOOKUP_TIMEOUT",),
    "unreported": ("memoire.server.io_requests.UNREPORTED_TIMEOUT",),
    "client_end": ("memoire.client.client.END_TIMEOUT",),
    "log_flush": ("memoire.disk.logs.LOG_FLUSH_INTERVAL",),
    "thread_idle": ("memoire.net.thread.IDLE_INTERVAL",),
    "thread_runnable": ("memoire.net.thread.RUNNABLE_TIMEOUT",),
    "wrong_token": ("memoire.dashboard.web.api.WRONG_TOKEN_DELAY",),
    "handshake": ("memoire.net.sockets.HANDSHAKE_TIMEOUT",),
    "address_taken": ("memoire.net.sockets.PATIENCE",),
    "api_server": ("memoire.cli.keys.RETRY_INTERVAL",),
    "page_asked": ("memoire.cli.options.ASK_TIMEOUT",),
    "listen_note": ("memoire.nodes.local.LISTEN_NOTE_DELAY",),
    "restart_pause": ("memoire.nodes.launcher.MIN_PAUSE",),
    "browser_request": ("memoire.dashboard.web.serve.REQUEST_TIMEOUT",),
    "browser_body": ("memoire.dashboard.web.access.BODY_TIMEOUT",),
    "node_answer": ("memoire.dashboard.collect.aggregator.TIMEOUT",),
    "top_answer": ("memoire.dashboard.terminal.top.TIMEOUT",),
    "top_rates": ("memoire.dashboard.terminal.top.FIRST_RATES",),
    "report_rates": ("memoire.dashboard.terminal.log_tail.FIRST_RATES",),
}
"""Constants of the library with seconds that no user sets, by short names. Tests over real sockets change some, to wait
for less time or not to be overtaken; parts that decide get theirs as arguments."""


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that changes some of `TIMES` for the test: `times(heartbeat=0.1)`."""

    def change(**seconds: float) -> None:
        for name, value in seconds.items():
            for place in TIMES[name]:
                monkeypatch.setattr(place, value)

    return change


@pytest.fixture
def resolve_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[NameResolver], None]:
    """Return a function that replaces the look-up of names in this process for the test."""
    return lambda names: monkeypatch.setattr(resolver, "_names", names)


@pytest.fixture
def store_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Return a function that replaces the opening of servers' state folders for the test."""
    return lambda open_store: monkeypatch.setattr(build, "open_store", open_store)


def allowed_skips() -> list[str]:
    """Return allowed starts of reasons for skips: the list's lines, and the tools that `.ci/run` could not install,
    which MEMOIRE_WITHOUT names."""
    lines = (line.strip() for line in ALLOWED_SKIPS.read_text(encoding="utf-8").splitlines())
    absent = [f"{tool} is not installed" for tool in os.environ.get("MEMOIRE_WITHOUT", "").split()]
    return [line for line in lines if line and not line.startswith("#")] + absent


def unexplained(reasons: list[str]) -> list[str]:
    """Return the skip reasons that the list of allowed ones does not have."""
    allowed = allowed_skips()
    return [reason for reason in reasons if not any(reason.startswith(known) for known in allowed)]


def skip_reasons(config: pytest.Config) -> list[str]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:  # a worker of pytest-xdist: the controller sees all reports
        return []
    reports = reporter.stats.get("skipped", [])
    return [
        str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports if isinstance(report.longrepr, tuple)
    ]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a run in CI that skips a test for a reason outside the list."""
    surprising = unexplained(skip_reasons(session.config))
    if surprising and os.environ.get("CI") and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        for reason in surprising:
            print(f"\nskipped for a reason that {ALLOWED_SKIPS.name} does not list: {reason}")
