"""The boards and rules of deploy/monitoring."""

import functools
import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FOLDER = ROOT / "deploy" / "monitoring"

BOARDS = {"overview.json": "memoire-overview", "servers-and-proxies.json": "memoire-nodes"}


@functools.cache
def rules():
    """All rules, in order."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    read = yaml.safe_load((FOLDER / "memoire.rules.yaml").read_text(encoding="utf-8"))
    return [rule for group in read["groups"] for rule in group["rules"]]


def board(file):
    return json.loads((FOLDER / file).read_text(encoding="utf-8"))


@functools.cache
def metric_kinds(role):
    """The metrics of a scrape of this role, without what every Python process has: name -> counter, gauge or histogram.
    Of "" those of every node.
    """
    from memoire.figures import catalogue  # noqa: PLC0415

    tool = runpy.run_path(str(ROOT / "tools" / "metrics_docs.py"))
    found = [tool["BUILD_INFO"]]
    for each in dict.fromkeys(("", role)):
        found += [sources[0].figure for sources in catalogue(tool["SECTIONS"][each][1]).values()]
    return {figure.full_name: figure.kind for figure in found}
