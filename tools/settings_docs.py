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
    """Return the key, the kind of value and the help of a flag."""
    text = (action.help % {"default": action.default}).replace("|", "\\|")
    unit = f" ({action.metavar})" if action.metavar in ("BYTES", "SECONDS", "HOST:PORT") else ""
    return settings.key_of(action), f"{kind(command, action)}{unit}", text


def tables():
    commands, users = main.parsers()[1], {}
    for name in settings.COMMANDS:
        for action in settings.settings_of(commands[name]):
            users.setdefault(row(commands[name], action), []).append(name)
    yield "\n## Several commands\n\n| key | commands | value | description |\n| --- | --- | --- | --- |\n"
    for (key, value, text), names in users.items():
        if len(names) > 1:
            users_of = "all" if len(names) == len(settings.COMMANDS) else ", ".join(names)
            yield f"| `{key}` | {users_of} | {value} | {text} |\n"
    for name in settings.COMMANDS:
        own = [row for row, names in users.items() if names == [name]]
        if own:
            yield f"\n## memoire {name}\n\n| key | value | description |\n| --- | --- | --- |\n"
            yield from (f"| `{key}` | {value} | {text} |\n" for key, value, text in own)


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
        ("Limits", Limits, "Limits that users set: `Limits(NAME=...)`. Times are seconds."),
        ("Tuning", Tuning, "Further limits, for tests and experts: `Limits.of(NAME=...)`."),
    ):
        yield f"\n## {title}\n\n{about}\n\n| name | default | description |\n| --- | --- | --- |\n"
        yield from (f"| `{each.name}` | {value_of(each)} | {each.help} |\n" for each in declared(kind).values())


def page(text):
    return text.partition(BEGIN)[0] + BEGIN + "".join([*limits(), *tables()])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
