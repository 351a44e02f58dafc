"""Defaults of all public calls, settings and commands, compared with defaults.txt.

An intended change is written by `python tests/structure/test_signatures.py`; the difference shows what users will
notice.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import msgspec

import memoire
from memoire.cli import main

AGREED = Path(__file__).with_name("defaults.txt")
WITH_TORCH = ("memoire.torch", "memoire.sb3")
"""Modules left out of the list, which must be equal with torch and without."""
INNER = re.compile(r"(^|\.)_(?!_init__)")


def modules():
    """Yield all modules except those of optional packages that are not installed."""
    for info in pkgutil.walk_packages(memoire.__path__, "memoire."):
        if INNER.search(info.name) or info.name.endswith("__main__") or info.name in WITH_TORCH:
            continue
        try:
            yield importlib.import_module(info.name)
        except ImportError:
            continue


def calls():
    """Yield (name, function) of each public function and method, from its defining module."""
    for module in modules():
        for name, value in sorted(vars(module).items()):
            if name.startswith("_") or getattr(value, "__module__", "") != module.__name__:
                continue
            if inspect.isfunction(value):
                yield f"{module.__name__}.{name}", value
            elif inspect.isclass(value):
                for inner, member in sorted(vars(value).items()):
                    member = getattr(member, "__func__", member)
                    if inspect.isfunction(member) and (inner == "__init__" or not inner.startswith("_")):
                        yield f"{module.__name__}.{name}.{inner}", member


def plain(value):
    """Return a default as text, equal on every machine."""
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value)).replace(str(Path.home()), "~")
    return f"<{type(value).__name__}>" if dataclasses.is_dataclass(value) or len(text) > 100 else text


def of_calls():
    for name, function in calls():
        for each in inspect.signature(function).parameters.values():
            if each.default is not each.empty:
                yield f"{name}({each.name}={plain(each.default)})"


def of_messages():
    for module in modules():
        for name, kind in sorted(vars(module).items()):
            if inspect.isclass(kind) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__:
                for each in msgspec.structs.fields(kind):
                    if each.default is not msgspec.NODEFAULT:
                        yield f"{module.__name__}.{name}({each.encode_name}={plain(each.default)})"


def of_commands(parser, name):
    for command, inner in parser.commands.items():
        yield from of_commands(inner, f"{name} {command}")
    for action in parser.options:
        asked = " ".join(action.option_strings) or action.dest
        yield f"{name} {asked}: {plain(action.default)}"


def defaults():
    return sorted({*of_calls(), *of_messages(), *of_commands(main.parser(), "memoire")})


def test_defaults_are_those_of_the_list():
    agreed = AGREED.read_text(encoding="utf-8").splitlines()
    current = defaults()
    there = tuple(f"{module.__name__}." for module in modules())  # other modules need a package that is not installed
    missing = [line for line in agreed if line not in current and line.startswith(("memoire ", *there))]
    assert (missing, [line for line in current if line not in agreed]) == ([], []), (
        "python tests/structure/test_signatures.py"
    )
    assert len(current) > 500


if __name__ == "__main__":
    AGREED.write_text("\n".join(defaults()) + "\n", encoding="utf-8")
