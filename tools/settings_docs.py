"""Generator of the tables in docs/settings.md, from the command line's own options: run it when those change."""

import pathlib

from memoire.arguments import declared
from memoire.cli import main
from memoire.limits import GiB, KiB, Limits, MiB, Tuning
from memoire.nodes import settings
from memoire.nodes.settings import size

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "settings.md"
BEGIN = "<!-- From here on written by tools/settings_docs.py. -->\n"


def kind(command, action):
    if action.nargs == 0:
        return "true or false"
    if action.dest in command.lists:
        return "list"
    if action.choices:
        return ", ".join(action.choices)
    return {int: "whole number", float: "number", size: "size"}.get(action.type, "text")


def row(command, action):
    key = settings.key_of(action)
    text = (action.help % {"default": action.default}).replace("|", "\\|")
    unit = f" ({action.metavar})" if action.metavar in ("BYTES", "SECONDS", "HOST:PORT") else ""
    return f"| `{key}` | `{settings.PREFIX}{action.dest.upper()}` | {kind(command, action)}{unit} | {text} |"


def tables():
    commands = main.parsers()[1]
    for name in settings.COMMANDS:
        yield f"\n## memoire {name}\n\n| key | variable | value | what it is |\n| --- | --- | --- | --- |\n"
        yield from (row(commands[name], action) + "\n" for action in settings.settings_of(commands[name]))


def value_of(each):
    """Return a default as users write it."""
    if each.setting.unit != "bytes" or not each.default:
        return f"{each.default:g}" if each.kind is float else str(each.default)
    size, unit = next(
        (size, unit)
        for size, unit in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB"), (1, "bytes"))
        if each.default % size == 0
    )
    return f"{each.default // size} {unit}"


def limits():
    for title, kind, about in (
        ("Limits", Limits, "What a user has a reason to set: `Limits(NAME=...)`. Times are seconds."),
        ("Tuning", Tuning, "The others, of `limits.tuning`, for tests and experts: `Limits.of(NAME=...)`."),
    ):
        yield f"\n## {title}\n\n{about}\n\n| name | default | what it is |\n| --- | --- | --- |\n"
        yield from (f"| `{each.name}` | {value_of(each)} | {each.help} |\n" for each in declared(kind).values())


def page(text):
    return text.partition(BEGIN)[0] + BEGIN + "".join([*limits(), *tables()])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
