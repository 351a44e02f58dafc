"""The boards and rules of deploy/monitoring."""

import functools
import json
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
