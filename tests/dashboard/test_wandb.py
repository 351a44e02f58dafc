"""Figures to wandb and to lines of JSON: what is tried, and where the key is."""

import functools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memoire import loggers
from memoire.errors import NotInstalled, ParameterError


class FakeWandb:
    """`wandb`, which fails so many times."""

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


def test_wandb_that_is_not_there_is_said_with_the_line_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(NotInstalled, match="pip install wandb"):
        loggers.Wandb("p")


def test_partials_are_described_by_keyword_and_arguments_without_names_are_refused() -> None:
    def training(agent: Any = None, rate: float = 0.0) -> None: ...

    def agent(gamma: float) -> None: ...

    given = functools.partial(training, agent=functools.partial(agent, gamma=0.9), rate=0.5)
    assert loggers.keywords_of(given) == {"agent": {"gamma": 0.9}, "rate": 0.5}
    with pytest.raises(ParameterError, match=r"training_cls\.agent.*keywords only"):
        loggers.keywords_of(functools.partial(training, agent=functools.partial(agent, 0.9)))
