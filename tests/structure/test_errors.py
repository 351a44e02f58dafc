"""Tree of errors: memoire raises only these on purpose; each survives pickling and is documented."""

import ast
import builtins
import copy
import importlib
import inspect
import pickle
import pkgutil
import re
from pathlib import Path

import pytest

import memoire
from memoire import errors
from memoire.errors import MemoireError
from memoire.models import model
from structure_imports import tree_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "memoire"
TREE = sorted(
    {
        kind
        for module in (errors, model)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, MemoireError)
    },
    key=lambda kind: kind.__name__,
)
FOREIGN = {
    "sb3.py": {"AttributeError"},  # Python's protocol for a module's attributes
    "__init__.py": {"AttributeError"},  # the same
    "building.py": {"AttributeError"},  # the same
    "tmrl/config/config_constants.py": {"AttributeError"},  # the same
    "nodes/settings.py": {"NotASize"},  # argparse turns the error into its own, or ParameterError
    "cli/options.py": {"ArgumentTypeError"},  # the same
    "replay/batch.py": {"AttributeError"},  # Python's protocol for attributes asks for the error
    "wire/messages.py": {"ValueError"},  # a parser turns the error into ProtocolError
    "wire/rows.py": {"ValueError"},  # the same
    "wire/frames.py": {"ValueError"},  # raised in the encoder: a mistake of memoire
    "disk/logs.py": {"OSError"},  # a short write, caught with failed writes
    "security/keys.py": {"ValueError"},  # a parser of keys raises KeyFileError or ParameterError
    "disk/database.py": {"ValueError"},  # a mistake of memoire
    "disk/records.py": {"ValueError"},  # damage becomes StateCorrupt
    "accounting/packing.py": {"ValueError"},  # a parser turns the error into StateCorrupt
    "client/reports.py": {"ValueError", "PermissionError"},  # the file catches the errors
    "replay/conversion.py": {"AssertionError", "MemoryError"},  # a mistake of memoire; no memory for a ragged value
    "tables/inspection.py": {"AssertionError"},  # a mistake of memoire
    "net/sockets.py": {"ValueError", "ZMQError"},  # the caller raises EndpointError instead
    "net/addresses.py": {"OSError", "TimeoutError"},  # a socket raises these errors; callers translate them
    "replay/steps.py": {"ValueError"},  # a parser turns the error into DataError
    "replay/writing.py": {"ValueError"},  # a parser turns the error into DataError
    "replay/writers.py": {"ValueError"},  # the same
    "wire/values.py": {"ValueError"},  # a parser turns the error into DataError
    "tmrl/__main__.py": {"ModuleNotFoundError"},  # Python's protocol for imports asks for the error
    "rl/samples.py": {"ValueError"},  # a parser turns the error into DataError
    "rl/worker.py": {"KeyboardInterrupt"},  # the usual effect of the signal
    "rl/demo/qlearning.py": {"ValueError"},  # the demo's network is no part of memoire's face
    "cli/doctor.py": {"StepFailed", "EOFError"},  # the doctor catches and prints the error
    "tq/client.py": {"ValueError", "RuntimeError"},  # errors that TransferQueue raises, and a parser's
    "tq/interface.py": {"ValueError", "RuntimeError", "AssertionError", "FileNotFoundError"},  # the same
    "tq/metadata.py": {"ValueError", "RuntimeError"},  # the same
    "nodes/http.py": {"EarlyAnswer"},  # the pages answer with the error
    "nodes/pages.py": {"EarlyAnswer", "ValueError"},  # the pages answer with the error, or a parser catches it
}  # fmt: skip
"""Further errors that a file may raise, each with its reason in a comment."""


def raised(path):
    """Yield line and name of each error that a file raises by name, not of `raise error` or a plain `raise`."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            what = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            name = what.attr if isinstance(what, ast.Attribute) else getattr(what, "id", "")
            if name[:1].isupper():
                yield node.lineno, name


def test_nothing_is_raised_that_is_no_error_of_memoire():
    known = {kind.__name__ for kind in TREE}
    others = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        for line, name in raised(path):
            if name not in known | FOREIGN.get(place, set()) | {"SystemExit", "StopIteration", "NotImplementedError"}:
                others.append(f"memoire/{place}:{line} raises {name}")
    assert not others, "raise a MemoireError, or add the error to FOREIGN with a reason"


def test_every_error_in_foreign_is_still_raised():
    for place, names in FOREIGN.items():
        assert names <= {name for _, name in raised(PACKAGE / place)}, place


def test_every_error_of_the_package_is_in_the_tree():
    for info in pkgutil.walk_packages(memoire.__path__, "memoire."):
        if not info.name.endswith("__main__"):
            try:
                importlib.import_module(info.name)
            except ModuleNotFoundError as error:  # the extra is not installed
                assert error.name and not error.name.startswith("memoire")
    everywhere, waiting = set(), [MemoireError]
    while waiting:
        kind = waiting.pop()
        if kind.__module__.startswith("memoire"):
            everywhere.add(kind)
        waiting += kind.__subclasses__()
    assert everywhere == set(TREE)


FACTS = {"str": "some words", "int": 3, "float": 0.5, "bool": True, "object": (1, 2), "bytes": b"x" * 16}


def example(kind):
    """Return an error of this kind, with invented facts."""
    if "__init__" not in vars(kind) and not any("__init__" in vars(base) for base in kind.__mro__[:-4]):
        return kind("some words")
    parameters = list(inspect.signature(kind).parameters.values())
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return kind("some words")
    values = []
    for parameter in parameters:
        annotation = str(parameter.annotation)
        values.append(
            ("one", "two")
            if annotation.startswith("tuple")
            else FACTS[annotation.partition(" |")[0].removeprefix("<class '").removesuffix("'>")]
        )
    return kind(*values)


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling_with_its_facts_and_words(kind):
    error = example(kind)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.args, str(again), vars(again)) == (error.args, str(error), vars(error))
    assert "some words" in str(error) or not error.args or not any(arg == "some words" for arg in error.args)


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_an_error_that_is_raised_again_as_its_text_keeps_class_and_sentence(kind):
    error = example(kind)
    for text in (str(error), f"{error} was raised from the environment creator for real-time-gym-v1"):
        again = type(error)(text)
        for each in (again, pickle.loads(pickle.dumps(again)), copy.copy(again), type(again)(str(again))):
            assert type(each) is kind and str(each) == text


@pytest.mark.parametrize("kind", [kind for kind in TREE if kind is not MemoireError], ids=lambda kind: kind.__name__)
def test_an_error_is_also_a_builtin(kind):
    own = [base for base in kind.__mro__ if base.__module__ == "builtins"]
    assert own[0] not in (Exception, BaseException, object), "derive it from the builtin that a caller would guess"


def test_the_page_lists_every_error_with_the_builtin_it_is():
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    table = page.partition("## Every call")[0]
    rows = re.findall(r"^\| `(\w+)` \(`(\w+)`\) \| ([^|]+) \| ([^|]+) \|$", table, re.MULTILINE)
    assert sorted(name for name, *_ in rows) == sorted(kind.__name__ for kind in TREE)
    known = {kind.__name__: kind for kind in TREE}
    for name, also, *_ in rows:
        parent = known.get(also) or getattr(builtins, also)
        assert issubclass(known[name], parent), name
