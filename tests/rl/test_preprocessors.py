"""A worker and a memory that preprocess observations differently are told of, once."""

import logging
from typing import Any

import pytest

from memoire.rl.preprocessors import MARK, PreprocessorCheck, digest


def halved(obs: Any) -> Any:
    return obs / 2.0


def doubled(obs: Any) -> Any:
    return obs * 2.0


@pytest.mark.parametrize(
    ("worker", "memory", "differ"),
    [(halved, halved, False), (None, None, False), (halved, doubled, True), (halved, None, True), (None, halved, True)],
)
def test_functions_that_differ_are_told_of_once(worker: Any, memory: Any, differ: bool, caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    check = PreprocessorCheck(memory)
    infos: list[dict[str, Any]] = [{MARK: digest(worker)} if worker else {}, {}]
    for _ in range(3):
        check.look(infos, [True, False])
    assert len(caplog.records) == differ and check.has_warned == differ
    assert not differ or "obs_preprocessor" in caplog.text


def test_samples_in_the_middle_of_an_episode_say_nothing(caplog: Any) -> None:
    PreprocessorCheck(halved).look([{}, {}], [False, False])
    assert not caplog.records


def test_byte_code_of_another_python_says_nothing(caplog: Any) -> None:
    PreprocessorCheck(halved).look([{MARK: "code-3.99:0123"}], [True])
    assert not caplog.records
