"""Tests of a node's settings in file, environment and command line: precedence, errors, and tables in a file."""

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memoire.cli import main
from memoire.errors import ParameterError
from memoire.nodes import roles, settings
from memoire.nodes.roles import read_parameters, read_table, read_tables, schema_of
from memoire.tables.table import Table
from netkit import SCHEMA

ROOT = Path(__file__).parents[2]


TOKENS = {"columns": [["tokens", "<i4", [None], "plain"], ["reward", "<f4", [], "plain"]], "tuples": []}


def parsed(words, environment=None):
    return settings.parse(*main.parsers(), words, environment or {})


def written(folder, content, name="memoire.json"):
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def test_the_command_line_holds_over_the_environment_and_that_over_the_file(tmp_path):
    file = written(tmp_path, {"server": {"env": "X", "byte-limit": 1, "cache_limit": 1, "capacity": 1}})
    environment = {"MEMOIRE_SETTINGS": file, "MEMOIRE_CACHE_LIMIT": "2", "MEMOIRE_CAPACITY": "2"}
    args = parsed(["server", "--capacity", "3"], environment)
    assert (args.env, args.byte_limit, args.cache_limit, args.capacity) == ("X", 1, 2, 3)


def test_what_may_be_repeated_adds_up(tmp_path):
    file = written(tmp_path, {"server": {"env": "X", "set": {"multi_step": 3}}})
    args = parsed(["server", "--settings", file, "--set", "multi_step=7"], {"MEMOIRE_SET": "multi_step=5 beta=0.4"})
    assert args.set == ["multi_step=3", "multi_step=5", "beta=0.4", "multi_step=7"]  # the last value of a name holds


def test_a_parameter_that_is_text_is_read_as_on_the_command_line(tmp_path):
    file = written(tmp_path, {"server": {"env": "X", "set": {"priority_exponent": "0.7", "start": "repeat"}}})
    parameters = read_parameters(parsed(["server", "--settings", file]).set)
    assert (parameters.priority_exponent, parameters.start) == (0.7, "repeat")


def test_settings_of_prompts_are_said_as_parameters_are(tmp_path):
    wanted = {"group": 4, "at_least": 3, "required": ["tokens"], "lease": 60, "attempts": 2, "max_model_lag": 2}
    file = written(tmp_path, {"server": {"schema": TOKENS, "storage": "prompts", "set": wanted}})
    args = parsed(["server", "--settings", file, "--set", "lease=30.5"])
    own = read_table(args.set, args.storage)
    table = Table(schema_of(args.schema, None, args.storage), storage="prompts", **own)
    assert (table.own.group, table.own.at_least, table.own.required) == (4, 3, ["tokens"])
    assert (table.own.lease, table.own.attempts, table.parameters.max_model_lag) == (30.5, 2, 2)
    with pytest.raises(ParameterError, match="group must be omitted with storage='caches'"):
        Table(SCHEMA, **read_table(["group=4"]))
    with pytest.raises(ParameterError, match="Did you mean 'group'"):
        read_table(["grup=4"])


def test_of_alternatives_the_strongest_source_says_which(tmp_path):
    file = written(tmp_path, {"server": {"schema": json.loads(SCHEMA.to_json())}, "proxy": {"servers": ["tcp://a:1"]}})
    of_file = parsed(["server", "--settings", file])
    assert json.loads(of_file.schema) == json.loads(SCHEMA.to_json()) and of_file.env is None
    by_environment = parsed(["server", "--settings", file], {"MEMOIRE_TABLES": "t.json"})
    assert (by_environment.schema, by_environment.tables) == (None, "t.json")
    by_flag = parsed(["server", "--settings", file, "--env", "X"], {"MEMOIRE_TABLES": "t.json"})
    assert (by_flag.schema, by_flag.tables, by_flag.env) == (None, None, "X")
    assert parsed(["proxy", "--settings", file, "--servers-file", "f"]).servers == []
    assert parsed(["proxy", "--settings", file, "tcp://b:1"]).servers == ["tcp://b:1"]
    with pytest.raises(ParameterError, match=r"server\.schema and .*server\.env exclude each other"):
        parsed(["server", "--settings", written(tmp_path, {"server": {"schema": "s", "env": "X"}})])


def test_a_list_in_the_environment_has_blanks_between(tmp_path):
    environment = {"MEMOIRE_NODES": "http://a:1 dns:b:2", "MEMOIRE_ALLOW_HOST": "one", "MEMOIRE_INSECURE": "Yes"}
    args = parsed(["dashboard"], environment)
    assert (args.nodes, args.allow_host, args.insecure) == (["http://a:1", "dns:b:2"], ["one"], True)
    assert parsed(["dashboard", "n:1"], {"MEMOIRE_INSECURE": "0"}).insecure is False


def test_null_and_an_empty_variable_say_nothing(tmp_path):
    file = written(tmp_path, {"server": {"env": "X", "name": None}})
    assert parsed(["server", "--settings", file], {"MEMOIRE_RUN": ""}).name is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"sever": {}}, "sever must be a section (server, proxy, relay, dashboard) or a flag, got 'sever'"),
        ({"server": 3}, "server must be a section: an object with flags of memoire server, got 3"),
        ({"proxy": {"http_prot": "x"}}, "proxy.http_prot must be one of beside, endpoint, http"),
        ({"server": {"settings": "x"}}, "server.settings must be one of"),
        ({"server": {"capacity": "many"}}, "server.capacity must be a whole number, got 'many'"),
        ({"server": {"byte-limit": "many"}}, "server.byte-limit must be a size in bytes, such as 1GiB"),
        ({"server": {"byte-limit": 1.5}}, "500MB or 4096, got 1.5"),
        ({"server": {"capacity": True}}, "server.capacity must be a number, got True"),
        ({"server": {"snapshot-every": "soon"}}, "server.snapshot-every must be a number, got 'soon'"),
        ({"server": {"storage": "tapes"}}, "'rollouts', 'prompts', 'keyed', got 'tapes'"),
        ({"server": {"name": ["a"]}}, "server.name must be text, got ['a']"),
        ({"server": {"snapshot-caches": "yes"}}, "server.snapshot-caches must be true or false, got 'yes'"),
        ({"server": {"restore": "a"}}, "server.restore must be a list, got 'a'"),
        ([1], "--settings must be an object with a section for each of server, proxy"),
        ("{\n 1}", "line 2 column 2"),
    ],
)
def test_a_wrong_file_is_explained_with_name_and_key(tmp_path, content, words):
    file = written(tmp_path, content)
    with pytest.raises(ParameterError) as error:
        parsed(["server", "--settings", file, "--env", "X"])
    assert words in str(error.value)
    assert file in str(error.value)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("MEMOIRE_BYTE_LIMIT", "1GX", r"\$MEMOIRE_BYTE_LIMIT must be a size in bytes, .*, got '1GX'"),
        ("MEMOIRE_SNAPSHOT_CACHES", "maybe", r"\$MEMOIRE_SNAPSHOT_CACHES must be true or false"),
        ("MEMOIRE_SET", "'", r"\$MEMOIRE_SET must be words separated by blanks"),
        ("MEMOIRE_SETTINGS", "/no/such.toml", r"--settings '/no/such.toml' is not a readable TOML .*No such file"),
    ],
)
def test_a_wrong_variable_is_explained_by_its_name(variable, value, words):
    with pytest.raises(ParameterError, match=words):
        parsed(["server", "--env", "X"], {variable: value})


def test_a_toml_file_s_mistake_is_explained_with_its_line(tmp_path, capsys):
    assert main.main(["server", "--settings", written(tmp_path, "[server]\nenv = \n", "a.toml")]) == 1
    assert "Invalid value (at line 2, column 7)" in capsys.readouterr().err


def test_what_is_required_may_come_from_anywhere_but_has_to_come(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parsed(["dashboard"])
    assert parsed(["dashboard"], {"MEMOIRE_NODES": "n:1"}).nodes == ["n:1"]
    assert parsed(["server"], {"MEMOIRE_ENV": "X"}).env == "X"


def test_a_part_names_one_of_several_servers_counted_from_1():
    assert [roles.parse_part(part) for part in (None, "1/1", "2/3")] == [(0, 1), (0, 1), (1, 3)]


def test_all_that_holds_is_shown_with_its_source(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MEMOIRE_NAME", "server-0")
    file = written(tmp_path, {"http": "*:8080", "server": {"schema": "s.json"}})
    assert main.main(["server", "--settings", file, "--show-settings", "--run", "r", "--env", "X"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert f'http = "*:8080"  # {file}: http' in shown
    assert 'name = "server-0"  # $MEMOIRE_NAME' in shown
    assert 'run = "r"  # command line' in shown and 'env = "X"  # command line' in shown
    assert "schema = null  # default" in shown and "set = []  # default" in shown


def test_other_commands_and_launched_processes_read_neither_file_nor_environment(monkeypatch, capsys):
    assert parsed(["totals", "tcp://a:1"], {"MEMOIRE_TIMEOUT": "x", "MEMOIRE_SETTINGS": "/no/such"}).timeout == 10.0
    monkeypatch.setenv("MEMOIRE_TETHER", "0")
    monkeypatch.setenv("MEMOIRE_BYTE_LIMIT", "nonsense")
    assert main.main(["server"]) == 1
    assert "Give the table's columns: --schema FILE" in capsys.readouterr().err


def test_the_docs_have_every_setting_as_the_command_line_explains_it():
    page = runpy.run_path(str(ROOT / "tools" / "settings_docs.py"))["page"]
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert text == page(text), "run tools/settings_docs.py"


def test_the_example_in_the_docs_is_one(tmp_path):
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    file = written(tmp_path, text.partition("```toml\n")[2].partition("```")[0], "memoire.toml")
    args = parsed(["server", "--settings", file, "--run", "ant-7"], {"MEMOIRE_NAME": "server-0"})
    assert (args.http, args.byte_limit, args.name, args.run) == ("*:8080", 4_000_000_000, "server-0", "ant-7")
    assert schema_of(args.schema, None)["obs"].shape == (4,)
    assert read_parameters(args.set).multi_step == 3
    assert (
        len(parsed(["proxy", "--settings", file]).servers) == len(parsed(["dashboard", "--settings", file]).nodes) == 2
    )


def test_every_setting_has_a_flag_that_a_file_can_spell():
    for name in settings.COMMANDS:
        for action in settings.settings_of(main.parsers()[1][name]):
            assert not action.option_strings or action.option_strings[-1] == "--" + settings.key_of(action)


@pytest.mark.parametrize("ports", ["5561", "5561,", "5561,x", "1,65536", "1,2,3", "-1,2"])
def test_ports_beside_the_endpoint_are_two(ports):
    with pytest.raises(ParameterError, match=r"--beside must be two ports such as 5561,5562"):
        roles.relay("tcp://127.0.0.1:0", ["tcp://127.0.0.1:9"], beside=ports)
    with pytest.raises(ParameterError, match="with a tcp:// address"):
        roles.relay("ipc:///run/relay", ["tcp://127.0.0.1:9"], beside="1,2")


# --- The tables of a server in a file

PROMPTS = {
    "group": 4, "at_least": 3, "required": ["tokens"], "score": "variance", "drop_dead": True, "on_stale": "pace",
    "lease": 60, "attempts": 2, "keep": 1, "replay_limit": 9,
}  # fmt: skip


PLAIN = {"schema": json.loads(SCHEMA.to_json())}


def test_tables_are_read_in_order_with_schema_and_settings(tmp_path: Path) -> None:
    (tmp_path / "demo.json").write_text(SCHEMA.to_json(), encoding="utf-8")
    own = {"priority_exponent": 1, "discount": 0.5, "prev": None}
    rollouts = {
        "storage": "rollouts",
        "rollout_length": 128,
        "capacity": 4096,
        "on_full": "drop_oldest",
        "max_model_lag": 4,
    }
    content = {
        "online": PLAIN | {"multi_step": 3, "discount": [0.9], "client_capacity": 500},
        "demo": {"schema": "demo.json", "byte_limit": "64MiB", "cache_limit": 7, "parameters": own},
        "rollouts": {"schema": "demo.json"} | rollouts,
        "math": {"schema": TOKENS, "storage": "prompts", "max_model_lag": 2} | PROMPTS,
    }
    tables = read_tables(written(tmp_path, content))
    assert list(tables) == ["online", "demo", "rollouts", "math"]
    assert tables["online"] == Table(SCHEMA, multi_step=3, discount=0.9, client_capacity=500)
    assert tables["demo"].schema == SCHEMA and (tables["demo"].byte_limit, tables["demo"].cache_limit) == (64 << 20, 7)
    parameters = tables["demo"].parameters
    assert (parameters.priority_exponent, parameters.discount, parameters.prev) == (1.0, (0.5,), None)
    assert tables["rollouts"] == Table(SCHEMA, **rollouts)
    columns = {"tokens": (np.int32, (None,)), "reward": np.float32}
    assert tables["math"] == Table(columns, storage="prompts", max_model_lag=2, **PROMPTS)
    assert tables["math"].own.group == 4 and tables["math"].own.score == "variance"


def test_a_schema_is_read_off_an_environment(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    tables = read_tables(written(tmp_path, {"agent-0": {"env": "CartPole-v1"}}))
    assert tables["agent-0"].schema["obs"].shape == (4,)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not valid JSON:"),
        ("[]", "an object with a table under each name"),
        ({}, "an object with a table under each name"),
        ({"demo": 3}, "demo must be an object with the settings of a table"),
        ({"demo": {}}, 'either "schema" or "env"'),
        ({"demo": {**PLAIN, "env": "CartPole-v1"}}, 'either "schema" or "env"'),
        ({"demo": {**PLAIN, "multistep": 3}}, "demo takes no 'multistep'. Did you mean 'multi_step'"),
        ({"demo": {**PLAIN, "multi_step": 0}}, "demo has invalid settings: multi_step must be"),
        ({"demo": {**PLAIN, "parameters": {"alpha": 1}}}, "demo has invalid settings: .*priority_exponent"),
        ({"demo": {**PLAIN, "parameters": 7}}, "demo has invalid settings: parameters must be"),
        ({"demo": {**PLAIN, "byte_limit": "much"}}, "such as 1GiB"),
        ({"demo": {"schema": "nowhere.json"}}, "nowhere.json"),
        ({"demo": {"schema": 7}}, "demo has invalid settings"),
        ({"demo": {"schema": {"columns": 7}}}, "not the JSON form of a schema"),
        ({"demo": {**PLAIN, "storage": "tapes"}}, "'caches', 'episodes'"),
        ({"demo": {**PLAIN, "on_full": "drop_oldest"}}, "demo has invalid settings: .*storage='rollouts'"),
    ],
)
def test_what_is_no_table_is_explained_with_its_name(tmp_path: Path, text: Any, words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        read_tables(written(tmp_path, text))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="--tables '.*' cannot be read: .*No such file"):
        read_tables(str(tmp_path / "nothing.json"))
