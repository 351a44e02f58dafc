"""Sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memoire.errors import ParameterError
from memoire.nodes import roles, tables_file
from memoire.nodes.settings import NotASize, size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0), ("4096", 4096), ("17B", 17), ("1GiB", 1 << 30), ("1Gi", 1 << 30), ("1 GiB", 1 << 30),
        ("1gib", 1 << 30), ("500MB", 500_000_000), ("64k", 64_000), ("64Ki", 65536), ("1.5GiB", 3 << 29),
        ("0.5KiB", 512), ("2TB", 2 * 10**12), ("  3MiB ", 3 << 20), ("1.0", 1), ("0.001kB", 1), ("1e6", 1_000_000), ("2.5e3", 2500),
    ],
)  # fmt: skip
def test_a_size_is_a_number_with_a_unit(text, expected):
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.5", "1.25 B", "1PiB", "1 GiBs", "0x10", "1iB", "1,5GB", "٣GB"])
def test_what_is_no_size_is_refused_with_examples(text):
    with pytest.raises(NotASize, match="a size in bytes, such as 1GiB, 500MB or 4096, got "):
        size(text)


@given(st.integers(0, 1 << 50), st.sampled_from(["", "k", "Ki", "M", "Mi", "G", "Gi", "T", "Ti"]))
def test_a_size_is_its_number_times_its_unit(number, unit):
    factor = (1024 if unit.endswith("i") else 1000) ** " kmgt".index(unit[:1].lower() or " ")
    assert size(f"{number}{unit}B") == number * factor


def test_limits_and_tables_take_the_same():
    assert roles.read_limits(["model_bytes=2GiB", "new_clients=7"]).model_bytes == 2 << 30
    with pytest.raises(
        ParameterError, match=r"--limit must be a size in bytes, such as .*, behind the =, got 'model_b"
    ):
        roles.read_limits(["model_bytes=tons"])
    with pytest.raises(ParameterError, match="--limit must be a number behind the ="):
        roles.read_limits(["new_clients=1GiB"])
    schema = '{"columns": [["obs", "<f4", [4], "state"], ["reward", "<f4", [], "reward"]]}'
    tables = tables_file.read_tables('{"one": {"schema": ' + schema + ', "byte_limit": "64MiB"}}')
    assert tables["one"].byte_limit == 64 << 20
    with pytest.raises(ParameterError, match="such as 1GiB"):
        tables_file.read_tables('{"one": {"schema": ' + schema + ', "byte_limit": "much"}}')
