"""Generator of files in the chart's folder: values, their JSON schema and README, rules and boards.

    python tools/chart.py [--check]

`values.schema.yaml` declares each value once, with type, default and meaning. The appVersion comes from the package,
the icon from the dashboard, rules and boards from deploy/monitoring. --check writes nothing, and fails if a generated
file is out of date.
"""

import base64
import json
import re
import sys
from pathlib import Path

import yaml

from memoire.arguments import declared
from memoire.limits import Room

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy" / "helm" / "memoire"
MONITORING = ROOT / "deploy" / "monitoring"
ICON = ROOT / "memoire" / "dashboard" / "static" / "icon.svg"
NOTICE = "tools/chart.py writes this file from values.schema.yaml: change it there, and run `make chart`."
WIDTH = 118


def schema():
    """Return the schema with YAML's anchors filled in, after the values of each component's own."""
    read = yaml.safe_load((CHART / "values.schema.yaml").read_text(encoding="utf-8"))
    anchors = read.pop("x-anchors")
    shared = {**anchors["program"], **anchors["pod"]}
    for section in read["properties"].values():
        own = section.get("properties", {})
        own |= {name: as_declared(value) for name, value in own.items() if "setting" in value}
        for name in [name for name in shared if name in own]:
            own[name] = own.pop(name)
    return read


def as_declared(value):
    """Return the schema of a table's setting (`setting: NAME`): memoire's declaration, overridden by the chart's."""
    argument = declared(Room)[value["setting"]]
    kind = {"enum": list(argument.setting.choices)} if argument.setting.choices else {"type": "integer", "minimum": 0}
    text = argument.help.partition(" (default")[0].removesuffix(".")
    entry = kind | {"default": argument.default, "description": f"{text}."}
    return entry | {name: each for name, each in value.items() if name != "setting"}


def whole(section):
    """Return the section with a list of required values: those that have a default.

    Only `helm upgrade --reuse-values` leaves such values out: it takes the former chart's defaults instead of the new
    ones. Helm then names the missing values before it renders a template.
    """
    if is_section(section):
        properties = {name: whole(value) for name, value in section["properties"].items()}
        demanded = [name for name, value in properties.items() if is_section(value) or value.get("default") is not None]
        nullable = [name for name in demanded if "null" in properties[name].get("type", ())]
        return {**section, "properties": properties, "required": [name for name in demanded if name not in nullable]}
    return section


def is_section(value):
    """Return True if a value of the schema consists of named values."""
    return "properties" in value


def json_schema():
    return json.dumps(whole(schema()), indent=1) + "\n"


def wrapped(text, indent):
    """Return a text as a YAML comment, in lines of at most `WIDTH` columns."""
    lines, room = [""], WIDTH - indent - 2
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > room:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return "".join(f"{' ' * indent}# {line}\n" for line in lines)


def values():
    """Return the text of values.yaml: every default below its description."""
    return f"# {NOTICE}\n" + "".join(_values(schema(), 0))


def _values(section, indent):
    for name, value in section["properties"].items():
        if not is_section(value) and "default" not in value:
            continue
        yield "\n" if indent == 0 else ""
        yield wrapped(value.get("description", ""), indent) if value.get("description") else ""
        if is_section(value):
            yield f"{' ' * indent}{name}:\n"
            yield from _values(value, indent + 2)
        else:
            yield f"{' ' * indent}{name}: {json.dumps(value['default'])}\n"


def readme():
    """Return the text of README.md: the handwritten head, then the table of values."""
    path = CHART / "README.md"
    head = path.read_text(encoding="utf-8").partition("\n## Values\n")[0] if path.exists() else "# memoire\n"
    parts = {}  # of the chart, by what they share: the name within the part, such as ".ioThreads", default and meaning
    for name, value, text in _rows(schema(), ""):
        part, dot, rest = name.partition(".")
        parts.setdefault((dot + rest or name, cell(value), text), []).append(part if dot else "")
    rows = "".join(f"| `{_one_of(of)}{name}` | {value} | {text} |\n" for (name, value, text), of in parts.items())
    return (
        f"{head}\n## Values\n\n<!-- {NOTICE} -->\n\n`{{server,proxy}}.ioThreads` stands for `server.ioThreads` and "
        f"`proxy.ioThreads`.\n\n| value | default | meaning |\n|---|---|---|\n{rows}"
    )


def _one_of(names):
    """Return several names as one, such as `{server,proxy}`; a single name unchanged."""
    return names[0] if len(names) == 1 else f"{{{','.join(names)}}}"


def cell(value):
    return f"`{json.dumps(value)}`".replace("|", "\\|") if value != "" else '`""`'


def _rows(section, prefix):
    for name, value in section["properties"].items():
        if is_section(value):
            yield from _rows(value, f"{prefix}{name}.")
        elif "default" in value:
            yield f"{prefix}{name}", value["default"], value.get("description", "").replace("|", "\\|")


def version():
    return re.search(r'^VERSION = "(.*)"', (ROOT / "memoire" / "version.py").read_text(encoding="utf-8"), re.M)[1]


def chart_yaml():
    text = (CHART / "Chart.yaml").read_text(encoding="utf-8")
    text = re.sub(r"^appVersion: .*$", f'appVersion: "{version()}"', text, flags=re.M)
    text = re.sub(r"^icon: .*$", f'icon: "{icon()}"', text, flags=re.M)
    return re.sub(r"^( +image: .*):.*$", rf"\1:{version()}", text, flags=re.M)


def icon():
    """Return the dashboard's icon as a data URL."""
    return "data:image/svg+xml;base64," + base64.b64encode(ICON.read_bytes()).decode()


def files():
    """Yield each generated file and its text."""
    yield CHART / "values.schema.json", json_schema()
    yield CHART / "values.yaml", values()
    yield CHART / "README.md", readme()
    yield CHART / "Chart.yaml", chart_yaml()
    for source in (MONITORING / "memoire.rules.yaml", *sorted(MONITORING.glob("*.json"))):
        yield CHART / "files" / source.name, source.read_text(encoding="utf-8")


def main(arguments):
    stale = [(path, text) for path, text in files() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path, text in stale:
        print(f"{path.relative_to(ROOT)} is {'out of date: run `make chart`' if arguments else 'written'}")
        if not arguments:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return 1 if arguments and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
