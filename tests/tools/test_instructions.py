"""Instruction counts: how a dump of callgrind is read, and when a count is too much."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

DUMP = """# callgrind format
version: 1
creator: callgrind-3.19.0
desc: Trigger: Client Request: draw 256
positions: line
events: Ir
ob=/somewhere/memoire/_core.abi3.so
fl=_core.c
fn=tree_find
0 100
cfn=pow
cob=/usr/lib/libm.so.6
calls=3 0
0 999
0 20
ob=/usr/lib/libm.so.6
fn=pow
0 999
ob=/somewhere/memoire/pool/_draw.abi3.so
fn=gather
0 8
ob=/somewhere/msgspec/_core.cpython-311-x86_64-linux-gnu.so
fn=decode
0 4
ob=/usr/lib/libpython3.11.so.1.0
fn=eval
0 40
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("instructions", BENCHMARKS / "instructions.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["instructions"] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_what_a_function_called_is_counted_once(script: ModuleType) -> None:
    name, counts = script.read_dump(DUMP)
    assert name == "draw 256"
    assert counts == {
        ("_core.abi3.so", "tree_find"): 120,
        ("libm.so.6", "pow"): 999,
        ("_draw.abi3.so", "gather"): 8,
        ("_core.cpython-311-x86_64-linux-gnu.so", "decode"): 4,
        ("libpython3.11.so.1.0", "eval"): 40,
    }


def test_libraries_that_choose_by_processor_are_left_out(script: ModuleType) -> None:
    case = script.Case("draw 256", lambda: None, calls=2)
    assert script.summed(case, script.read_dump(DUMP)[1]) == {"engine": 64, "with Python": 86}


HERE = {"compiler": "x86_64, gcc 12", "python": "3.11.7", "numpy": "2.4.6"}
RECORD = {"machine": HERE, "instructions": {"draw": {"engine": 1000, "with Python": 2000}}}


@pytest.mark.parametrize(
    ("here", "kinds", "said"),
    [
        (HERE, ["engine", "with Python"], ""),
        (HERE | {"numpy": "3.0.0"}, ["engine"], "only the engine was compared, the record is of numpy 2.4.6, here 3.0"),
        (HERE | {"compiler": "arm64, clang"}, [], "nothing was compared, the record is of compiler x86_64, gcc 12"),
    ],
)
def test_only_counts_of_equal_versions_are_compared(
    script: ModuleType, here: dict[str, str], kinds: list[str], said: str
) -> None:
    found, why = script.comparable(RECORD, here)
    assert found == kinds and why.startswith(said)


def test_more_than_the_tolerance_is_too_much(script: ModuleType) -> None:
    kinds = ["engine", "with Python"]
    assert script.too_many(RECORD, {"draw": {"engine": 1040, "with Python": 1500}}, kinds) == []
    (said,) = script.too_many(RECORD, {"draw": {"engine": 1100, "with Python": 2000}}, kinds)
    assert said == "draw: 1100 instructions (engine), 10.0% more than 1000"
    assert script.too_many(RECORD, {"draw": {"engine": 9999, "with Python": 9999}}, []) == []
    assert script.too_many(RECORD, {"new": {"engine": 1, "with Python": 1}}, ["engine"]) == ["new: not in the record"]
