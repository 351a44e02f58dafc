"""A worker and a memory that preprocess observations differently are refused."""

import contextlib
from typing import Any

import pytest

from memoire.errors import ParameterError
from memoire.rl.preprocessors import MARK, PreprocessorCheck, digest


def halved(obs: Any) -> Any:
    return obs / 2.0


def doubled(obs: Any) -> Any:
    return obs * 2.0


@pytest.mark.parametrize(
    ("worker", "memory", "differ"),
    [(halved, halved, False), (None, None, False), (halved, doubled, True), (halved, None, True), (None, halved, True)],
)
def test_functions_that_differ_are_refused_by_both_names(worker: Any, memory: Any, differ: bool) -> None:
    check = PreprocessorCheck(memory)
    infos: list[dict[str, Any]] = [{MARK: digest(worker)} if worker else {}, {}]
    both = [digest(each) or None for each in (worker, memory)]
    says = "^obs_preprocessor must be {}, as a worker has it: give both the same function, got {!r}".format(*both)
    with pytest.raises(ParameterError, match=says) if differ else contextlib.nullcontext():
        check.look(infos, [True, False])


def test_samples_in_the_middle_of_an_episode_say_nothing() -> None:
    PreprocessorCheck(halved).look([{}, {}], [False, False])


def test_byte_code_of_another_python_is_told_of_once(caplog: Any) -> None:
    check = PreprocessorCheck(halved)
    for _ in range(3):
        check.look([{MARK: "code-3.99:0123"}], [True])
    assert len(caplog.records) == 1 and "cannot compare a worker's obs_preprocessor code-3.99:0123" in caplog.text
