"""Rules for Prometheus and boards for Grafana: they read, name only metrics that exist, and each alert says what to do."""

import functools
import json
import re
import shutil
import subprocess

import pytest

from pageskit import BOARDS, FOLDER, ROOT, board, rules

NAME = re.compile(r"\bmemoire[_:][a-zA-Z0-9_:]+")
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@functools.cache
def catalogue():
    """Names that a scrape can show, as the pages list them (each page is compared with the code elsewhere)."""
    rows = [
        row
        for page in ("metrics.md", "dashboard.md")
        for row in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
        if row.startswith("| `memoire_")
    ]
    names = {row.split("`")[1] for row in rows}
    return names | {
        row.split("`")[1] + end for row in rows if " histogram " in row for end in ("_bucket", "_sum", "_count")
    }


def alerts():
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def queries(file):
    """The PromQL of every panel."""
    return [target["expr"] for panel in board(file)["panels"] for target in panel.get("targets", ())]


def chosen(file):
    """By what its figures are chosen: the overview is of whole clusters."""
    return ["namespace", "release"] if file == "overview.json" else ["namespace", "release", "pod"]


def promtool(*arguments):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_name_only_metrics_that_exist():
    known = catalogue() | {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        assert set(NAME.findall(rule["expr"])) <= known, rule


def test_every_alert_says_how_bad_it_is_what_it_is_and_where_to_read_on():
    page = (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    assert list(sections) == list(alerts())  # alerts and sections match, in one order
    for name, rule in alerts().items():
        notes = rule["annotations"]
        assert name.startswith("Memoire") and rule["labels"]["severity"] in ("critical", "warning", "info"), name
        assert notes["summary"].endswith(".") and "{{" not in notes["summary"], name  # a constant text, to group by
        assert notes["description"].endswith(".") and "{{" in notes["description"], name
        assert notes["runbook_url"] == f"docs/alerts.md#{name.lower()}"
        assert all(f"**{word}:**" in sections[name] for word in ("Means", "Look at", "Do")), name


def test_runbooks_name_only_metrics_that_exist():
    known = catalogue() | {rule["record"] for rule in rules() if "record" in rule}
    assert set(NAME.findall((ROOT / "docs" / "alerts.md").read_text(encoding="utf-8"))) <= known


def test_every_rule_has_a_test():
    text = (FOLDER / "tests.yaml").read_text(encoding="utf-8")
    for rule in rules():
        assert rule.get("alert", rule.get("record")) in text, rule


@pytest.mark.slow
def test_promtool_takes_the_rules_and_their_tests_pass():
    promtool("test", "rules", "tests.yaml")


@pytest.mark.parametrize("file", BOARDS)
def test_a_board_can_be_imported_anywhere(file):
    read = board(file)
    assert read["id"] is None and read["uid"] == BOARDS[file] and read["tags"] == ["memoire"]
    variables = {variable["name"]: variable for variable in read["templating"]["list"]}
    assert list(variables) == ["datasource", *chosen(file)]
    # A cluster without these labels is found, because the value .* matches all clusters
    assert all(variables[name]["allValue"] == ".*" for name in chosen(file))
    assert "${DS_" not in json.dumps(read)
    ids = [panel["id"] for panel in read["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in read["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == DATASOURCE and panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert all(target["datasource"] == DATASOURCE for target in panel["targets"]), panel["title"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]


@pytest.mark.parametrize("file", BOARDS)
def test_queries_of_a_board_name_only_metrics_that_exist_and_follow_the_variables(file):
    matched = ", ".join(f'{label}=~"${label}"' for label in chosen(file))
    for query in queries(file):
        found = NAME.findall(query)
        assert found and set(found) <= catalogue(), query  # a board works without recording rules
        for name in (*found, *re.findall(r"\bprocess_\w+", query)):
            assert f"{name}{{{matched}" in query, query
        assert set(re.findall(r"\[(.*?)\]", query)) <= {"$__rate_interval"}, query


def test_promtool_reads_every_query_of_the_boards(tmp_path):
    read = [{"record": f"board:{n}", "expr": query.replace("$__rate_interval", "5m")}
            for n, query in enumerate(query for file in BOARDS for query in queries(file))]  # fmt: skip
    written = tmp_path / "queries.yaml"
    written.write_text(json.dumps({"groups": [{"name": "boards", "rules": read}]}), encoding="utf-8")
    promtool("check", "rules", str(written))
