"""Loggers: event files, functions of other tools, trackio and wandb."""

import contextlib
import functools
import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from history.ports import block
from memoire import loggers
from memoire.cli import main
from memoire.dashboard.terminal import log_tail as report
from memoire.errors import EndpointError, NotInstalled, ParameterError
from memoire.nodes.http import NodePages
from netkit import Cluster


@pytest.fixture(autouse=True)
def soon(times):
    times(report_rates=0.05)


class RowLogger:
    """A logger that stores the logged rows."""

    def __init__(self):
        self.rows, self.is_closed = [], False

    def log(self, figures, step):
        assert not self.is_closed
        self.rows.append((dict(figures), step))

    def close(self):
        self.is_closed = True


def part(field, content):
    """Return a text or message of a protocol buffer, of less than 128 bytes."""
    return bytes([field << 3 | 2, len(content)]) + content


def event(seconds, step, **figures):
    """Return a record of an event file; `step` is the bytes of a varint."""
    values = [part(1, part(1, name.encode()) + b"\x15" + struct.pack("<f", value)) for name, value in figures.items()]
    return b"\x09" + struct.pack("<d", seconds) + b"\x10" + step + part(5, b"".join(values))


def events(path):
    """Return the records of an event file after the first one, with their checksums compared."""
    data, records = path.read_bytes(), []
    while data:
        (length,) = struct.unpack_from("<Q", data)
        head, body = data[:8], data[12 : 12 + length]
        assert struct.unpack_from("<I", data, 8)[0] == loggers.mask_checksum(head)
        assert struct.unpack_from("<I", data, 12 + length)[0] == loggers.mask_checksum(body)
        records.append(body)
        data = data[16 + length :]
    assert records[0].endswith(part(3, b"brain.Event:2"))
    return records[1:]


def test_an_event_file_has_every_finite_figure_at_its_step_while_it_is_written(tmp_path):
    with contextlib.closing(loggers.TensorBoard(tmp_path / "runs" / "a", clock=lambda: 1234.5)) as logger:
        logger.log({"loss": 0.5, "näme": -2.0, "bad": math.nan, "huge": 1e300}, 7)
        assert logger.path.name.startswith("events.out.tfevents.1234.")
        first = event(1234.5, b"\x07", loss=0.5, näme=-2.0, huge=3.4028234663852886e38)
        assert events(logger.path) == [first]
        logger.log({"loss": 0.25}, 1 << 40)
        logger.log({"only": math.inf}, 9)
    logger.close()
    assert events(logger.path) == [first, event(1234.5, b"\x80\x80\x80\x80\x80\x20", loss=0.25)]


def test_a_step_that_no_event_file_has_is_refused(tmp_path):
    with contextlib.closing(loggers.TensorBoard(tmp_path)) as logger, pytest.raises(ParameterError, match="step"):
        logger.log({"loss": 1.0}, -1)


def test_functions_of_other_tools_are_a_logger_in_one_line():
    calls = []

    def log(data, step=None, commit=None):  # signature of wandb.log, mlflow.log_metrics and trackio.log
        calls.append((data, step))

    logger = loggers.Functions(log, lambda: calls.append("end"))
    logger.log({"loss": 1.0}, 3)
    logger.close()
    loggers.Functions(log).close()
    assert calls == [({"loss": 1.0}, 3), "end"]


def test_figures_of_a_node_are_all_its_numbers_by_name(cluster):
    figures = loggers.figures(cluster.servers_there[0].stats(), "server")
    assert figures["server.totals.steps"] == 40.0 and figures["server.tables.default.held_caches"] == 1.0
    assert all(isinstance(value, float) and math.isfinite(value) for value in figures.values())
    assert "server.finished" not in figures and "server.name" not in figures
    assert loggers.figures({"a": math.nan, "b": True, "c": [1], "d": 2}) == {"d": 2.0}


def test_trackio_gets_the_figures_that_were_asked_for(cluster, monkeypatch):
    calls = []
    run = SimpleNamespace(
        log=lambda metrics, step: calls.append((set(metrics), step)), finish=lambda: calls.append("end")
    )
    fake = SimpleNamespace(init=lambda project, name: calls.append((project, name)) or run)
    monkeypatch.setitem(sys.modules, "trackio", fake)
    arguments = [
        "report",
        *cluster.urls[:2],
        "--to",
        "trackio",
        "--project",
        "p",
        "--only",
        "ste*",
        "--only",
        "episodes",
    ]
    assert main.main([*arguments, "--once"]) == 0
    assert calls == [("p", "r-1"), ({"steps", "steps_per_second", "episodes"}, 80), "end"]


def test_a_node_that_is_away_is_said_by_the_exit_status_and_nobody_is_an_error(cluster, capsys):
    free = f"http://127.0.0.1:{block(1)}"
    kept = RowLogger()
    assert report.report([*cluster.urls[:2], free], lambda run: kept, once=True, say=lambda line: None) == 3
    assert kept.rows[0][1] == 80 and kept.is_closed
    with pytest.raises(EndpointError):
        report.report([free], lambda run: RowLogger())
    assert main.main(["report", *cluster.urls[:2], "--to", "tensorboard", "--every", "0"]) == 1
    assert "--every" in capsys.readouterr().err


def test_another_run_is_another_logger_and_a_finished_one_is_the_end():
    cluster = Cluster()
    server, opened = cluster.server(name="alone", run="first"), {}

    def opening(run):
        opened[run] = RowLogger()
        return opened[run]

    def say(line):
        if line.startswith("run 'first': reporting"):
            server.begin_run("second")
        if line.startswith("run 'second': reporting"):
            server.finish()

    with contextlib.closing(cluster), NodePages("127.0.0.1:0", server) as pages:
        assert report.report([pages.url], opening, every=0.05, say=say) == 0
    assert list(opened) == ["first", "second"] and all(each.is_closed for each in opened.values())
    assert opened["first"].rows and opened["second"].rows


@pytest.mark.parametrize(("run", "folder"), [("a/b", "a_b"), ("..", "run__"), ("", "run"), ("é" * 200, "_" * 80)])
def test_whatever_a_run_is_called_its_folder_stays_within(run, folder):
    assert report.folder_name(run) == folder


ON_A_SMALL_DISK = """
import logging, resource, signal, sys
from memoire import loggers
logging.basicConfig(format="%(message)s")
now = [0.0]
logger = getattr(loggers, sys.argv[1])(sys.argv[2], clock=lambda: now[0])
logger.log({"loss": 0.5}, 1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
size = logger.path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 7, resource.RLIM_INFINITY))
for step in range(2, 200):
    now[0] += 1.0
    logger.log({"loss": 0.5}, step)
assert logger.path.stat().st_size == size, "a part of a record was left"
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
logger.log({"loss": 0.5}, 200)
assert logger.path.stat().st_size > size
logger.close()
print(logger.path)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["TensorBoard", "JsonLines"])
def test_a_full_disk_loses_whole_records_with_a_warning_a_minute_and_training_goes_on(kind, tmp_path):
    command = [sys.executable, "-c", ON_A_SMALL_DISK, kind, str(tmp_path / "figures")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    path = done.stdout.strip()
    warnings = [f"{path}: {lost} records are lost so far: No space left on device" for lost in (1, 61, 121, 181)]
    assert done.stderr.splitlines() == warnings
    if kind == "JsonLines":
        assert [json.loads(line)["step"] for line in Path(path).read_text().splitlines()] == [1, 200]
    else:
        assert events(Path(path)) == [event(0.0, b"\x01", loss=0.5), event(198.0, b"\xc8\x01", loss=0.5)]


class FakeWandb:
    """Replacement for `wandb` that fails so many times."""

    def __init__(self, failures: int = 0) -> None:
        self.failures, self.keys, self.logged, self.options = failures, list[Any](), list[Any](), dict[str, Any]()

    def init(self, **options: Any) -> Any:
        self.keys.append(os.environ.get("WANDB_API_KEY"))
        if len(self.keys) <= self.failures:
            raise RuntimeError("no network, and a secret-key in the text")
        self.options = options
        return SimpleNamespace(log=lambda figures, step: self.logged.append((figures, step)), finish=lambda: None)


def use(monkeypatch: pytest.MonkeyPatch, fake: FakeWandb) -> FakeWandb:
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    return fake


def test_the_key_is_in_the_environment_of_the_call_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake = use(monkeypatch, FakeWandb(failures=1))
    logger = loggers.Wandb("p", entity="e", run_id="r", key="secret-key", fallback=tmp_path / "a.jsonl")
    logger.log({"loss": 1.5}, 3)
    logger.close()
    assert fake.keys == ["secret-key"] * 2 and "WANDB_API_KEY" not in os.environ
    assert fake.options["project"] == "p" and fake.logged == [({"loss": 1.5}, 3)]
    assert "secret-key" not in caplog.text + (tmp_path / "a.jsonl").read_text() + repr(fake.options)


def test_lines_of_json_go_on_where_wandb_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = use(monkeypatch, FakeWandb(failures=9))
    logger = loggers.Wandb("p", fallback=tmp_path / "runs" / "a.jsonl")
    for step in range(2):
        logger.log({"loss": step, "nan": float("nan")}, step)
    logger.close()
    assert len(fake.keys) == 3
    rows = [json.loads(line) for line in (tmp_path / "runs" / "a.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"], "nan" in row) for row in rows] == [(0, 0.0, False), (1, 1.0, False)]


@pytest.mark.parametrize(("name", "kind"), [("trackio", loggers.Trackio), ("wandb", loggers.Wandb)])
def test_a_tool_that_is_not_there_is_said_with_the_line_to_write(name: str, kind: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(NotInstalled, match=f"pip install {name}"):
        kind("mine")


def test_partials_are_described_by_keyword_and_arguments_without_names_are_refused() -> None:
    def training(agent: Any = None, rate: float = 0.0) -> None: ...

    def agent(gamma: float) -> None: ...

    partial = functools.partial(training, agent=functools.partial(agent, gamma=0.9), rate=0.5)
    assert loggers.keywords_of(partial) == {"agent": {"gamma": 0.9}, "rate": 0.5}
    with pytest.raises(ParameterError, match=r"training_cls\.agent.*keyword arguments only"):
        loggers.keywords_of(functools.partial(training, agent=functools.partial(agent, 0.9)))
