"""The tables of a server in a file: what may be said there, and what is explained when it may not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memoire.errors import ParameterError
from memoire.nodes.roles import read_tables
from memoire.tables.table import Table
from netkit import SCHEMA

PROMPTS = {
    "group": 4, "at_least": 3, "required": ["tokens"], "score": "variance", "drop_dead": True, "on_stale": "pace",
    "lease": 60, "attempts": 2, "keep": 1, "replay_limit": 9,
}  # fmt: skip


def written(folder: Path, text: Any) -> str:
    path = folder / "tables.json"
    path.write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
    return str(path)


def test_tables_are_read_in_order_with_schema_and_settings(tmp_path: Path) -> None:
    (tmp_path / "demo.json").write_text(SCHEMA.to_json(), encoding="utf-8")
    tables = read_tables(
        written(
            tmp_path,
            {
                "online": {
                    "schema": json.loads(SCHEMA.to_json()),
                    "multi_step": 3,
                    "discount": [0.9],
                    "client_capacity": 500,
                },
                "demo": {
                    "schema": "demo.json",
                    "byte_limit": 12345,
                    "cache_limit": 7,
                    "parameters": {"priority_exponent": 1, "discount": 0.5, "prev": None},
                },
                "rollouts": {
                    "schema": "demo.json",
                    "storage": "rollouts",
                    "rollout_length": 128,
                    "capacity": 4096,
                    "on_full": "oldest",
                    "max_model_lag": 4,
                },
                "math": {
                    "schema": {
                        "columns": [["tokens", "<i4", [None], "plain"], ["reward", "<f4", [], "plain"]],
                        "tuples": [],
                    },
                    "storage": "prompts",
                    "max_model_lag": 2,
                    **PROMPTS,
                },
            },
        )
    )
    assert list(tables) == ["online", "demo", "rollouts", "math"]
    assert tables["online"] == Table(SCHEMA, multi_step=3, discount=0.9, client_capacity=500)
    assert tables["demo"].schema == SCHEMA and (tables["demo"].byte_limit, tables["demo"].cache_limit) == (12345, 7)
    parameters = tables["demo"].parameters
    assert (parameters.priority_exponent, parameters.discount, parameters.prev) == (1.0, (0.5,), None)
    made = {"storage": "rollouts", "rollout_length": 128, "capacity": 4096, "on_full": "oldest", "max_model_lag": 4}
    assert tables["rollouts"] == Table(SCHEMA, **made)
    columns = {"tokens": (np.int32, (None,)), "reward": np.float32}
    assert tables["math"] == Table(columns, storage="prompts", max_model_lag=2, **PROMPTS)
    assert tables["math"].own.group == 4 and tables["math"].own.score == "variance"


def test_a_schema_is_read_off_an_environment(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    tables = read_tables(written(tmp_path, {"agent-0": {"env": "CartPole-v1"}}))
    assert tables["agent-0"].schema["obs"].shape == (4,)


PLAIN = {"schema": json.loads(SCHEMA.to_json())}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "a JSON file:"),
        ("[]", "an object with a table under each name"),
        ({}, "an object with a table under each name"),
        ({"demo": 3}, "demo must be an object with the settings of a table"),
        ({"demo": {}}, '"schema" or "env", one of both'),
        ({"demo": {**PLAIN, "env": "CartPole-v1"}}, '"schema" or "env", one of both'),
        ({"demo": {**PLAIN, "multistep": 3}}, "demo takes no 'multistep'. Did you mean 'multi_step'"),
        ({"demo": {**PLAIN, "multi_step": 0}}, "demo must be .*multi_step must be"),
        ({"demo": {**PLAIN, "parameters": {"alpha": 1}}}, "demo must be .*priority_exponent"),
        ({"demo": {**PLAIN, "parameters": 7}}, "demo must be"),
        ({"demo": {"schema": "nowhere.json"}}, "nowhere.json"),
        ({"demo": {"schema": 7}}, "demo must be"),
        ({"demo": {"schema": {"columns": 7}}}, "not the JSON form of a schema"),
        ({"demo": {**PLAIN, "storage": "tapes"}}, "'caches', 'episodes'"),
        ({"demo": {**PLAIN, "on_full": "oldest"}}, "demo must be .*storage='rollouts'"),
    ],
)
def test_what_is_no_table_is_explained_with_its_name(tmp_path: Path, text: Any, words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        read_tables(written(tmp_path, text))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="a JSON file that can be read: .*No such file"):
        read_tables(str(tmp_path / "nothing.json"))
