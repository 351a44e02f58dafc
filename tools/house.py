"""Draw memoire as a house, and measure it.

    python tools/house.py                       print the figures
    python tools/house.py --draw docs/house.svg also draw the house
    python tools/house.py --check docs/house.svg  fail if the drawing is out of date

A room is a folder of memoire/, or a file at its top. An arrow is an import between two rooms. A floor is the longest
chain of imports below a room: rooms on the ground floor import no other room.
"""

import argparse
import ast
import functools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FRONT_DOORS = {"__init__", "__main__"}
"""Files that only name what users import."""
CYTHON = (".pyx", ".pxd")
STATEMENT = re.compile(r"^(?:from \S+ )?c?import (?:\([^)]*\)|.*)$", re.MULTILINE)
"""An import or cimport that begins a line of a Cython source, with all of its names."""


@dataclass
class Room:
    """A folder, or a file at the top."""

    name: str
    lines: int = 0
    imports: set[str] = field(default_factory=set)
    """Names of the other rooms that it imports."""
    files: dict[str, set[str]] = field(default_factory=dict)
    """The files in it, without suffix, and which of its own files each one imports."""


@dataclass(frozen=True)
class Sizes:
    """Lines of functions, classes and files, docstrings and blank lines included."""

    functions: list[int]
    classes: dict[str, int]
    files: dict[str, int]


def sources(root: Path) -> list[Path]:
    """Python files and Cython sources of the package and the dashboard."""
    found = [path for folder in ("memoire", "dashboard") for path in (root / folder).rglob("*.p*")]
    return sorted(path for path in found if path.suffix in (".py", *CYTHON) and not is_through_a_link(path, root))


def is_through_a_link(path: Path, root: Path) -> bool:
    """Whether a file is reached by a linked folder: memoire/dashboard is the dashboard."""
    return any(parent.is_symlink() for parent in path.parents if parent != root and root in parent.parents)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The statements of a file; of a Cython source, its imports and cimports alone. Read once."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in CYTHON:
        text = "\n".join(re.sub(r"\bcimport\b", "import", found) for found in STATEMENT.findall(text))
    return ast.parse(text, str(path))


def place(path: Path, root: Path) -> tuple[str, ...]:
    """Dotted place of a file below memoire: ("server",), ("cluster", "node"), ("dashboard", "api")."""
    parts = path.relative_to(root).with_suffix("").parts
    return parts[1:] if parts[0] == "memoire" else parts


def imports(path: Path, package: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Line and dotted name of everything that a file of this package imports, wherever in the file."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) + 1 - node.level]) if node.level else []
            base += node.module.split(".") if node.module else []
            yield from ((node.lineno, [*base, alias.name]) for alias in node.names)


def imported(path: Path, root: Path) -> Iterator[tuple[str, ...]]:
    """Dotted places below memoire that a file imports, wherever in it."""
    for _, name in imports(path, ("memoire", *place(path, root)[:-1])):
        if name[0] == "memoire" and len(name) > 1:
            yield tuple(name[1:])


def rooms_of(root: Path) -> dict[str, Room]:
    """All rooms by name."""
    rooms: dict[str, Room] = {}
    for path in sources(root):
        room, *rest = place(path, root)
        if room not in FRONT_DOORS:
            made = rooms.setdefault(room, Room(room))
            made.lines += len(path.read_text(encoding="utf-8").splitlines())
            if rest:
                made.files.setdefault(rest[0], set())
    for path in sources(root):
        room, *rest = place(path, root)
        if room in rooms:
            for target, *inside in imported(path, root):
                if target in rooms and target != room:
                    rooms[room].imports.add(target)
                elif target == room and rest and inside and inside[0] in rooms[room].files and inside[0] != rest[0]:
                    rooms[room].files[rest[0]].add(inside[0])
    return rooms


def floors_of(imports: dict[str, set[str]]) -> dict[str, int]:
    """The floor of each name, 0 is the ground; names that import each other in a circle get none."""
    floors: dict[str, int] = {}
    while ready := [name for name in imports if name not in floors and imports[name] <= floors.keys()]:
        floors |= {name: 1 + max((floors[target] for target in imports[name]), default=-1) for name in ready}
    return floors


def floors_of_rooms(rooms: dict[str, Room]) -> dict[str, int]:
    """The floor of each room."""
    return floors_of({room.name: room.imports for room in rooms.values()})


def circles(rooms: dict[str, Room]) -> list[str]:
    """Names of rooms, and of files inside of rooms, that import each other in a circle."""
    stuck = sorted(rooms.keys() - floors_of_rooms(rooms).keys())
    for room in rooms.values():
        inside = {name: targets - {"__init__"} for name, targets in room.files.items() if name != "__init__"}
        stuck += sorted(f"{room.name}/{name}" for name in inside.keys() - floors_of(inside).keys())
    return stuck


def sizes_of(root: Path) -> Sizes:
    """Sizes of what is written in Python."""
    made = Sizes([], {}, {})
    for path in sources(root):
        if path.suffix == ".py":
            name = path.relative_to(root).as_posix()
            made.files[name] = len(path.read_text(encoding="utf-8").splitlines())
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    made.functions.append(lines(node))
                elif isinstance(node, ast.ClassDef):
                    made.classes[f"{name} {node.name}"] = lines(node)
    return made


def lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def figures(root: Path) -> str:
    """What there is, as a table in Markdown."""
    rooms, sizes = rooms_of(root), sizes_of(root)
    floors = floors_of_rooms(rooms)
    functions = sorted(sizes.functions)
    large = sorted((size, name) for name, size in sizes.classes.items() if size > 400)[::-1]
    long = sorted((size, name) for name, size in sizes.files.items() if size > 500)[::-1]
    rows = {
        "rooms": len(rooms),
        "floors": 1 + max(floors.values(), default=-1),
        "arrows between rooms": sum(len(room.imports) for room in rooms.values()),
        "rooms and files in circles": ", ".join(circles(rooms)) or "none",
        "functions": len(functions),
        "lines of a function, median": functions[len(functions) // 2],
        "lines of a function, 90th percentile": functions[9 * len(functions) // 10],
        "classes above 400 lines": f"{len(large)}: " + ", ".join(f"{name.split()[1]} {size}" for size, name in large),
        "files above 500 lines": f"{len(long)}: " + ", ".join(f"{name} {size}" for size, name in long),
    }
    return "\n".join(["| what | figure |", "| --- | --- |", *(f"| {what} | {value} |" for what, value in rows.items())])


# ------------------------------------------------------------------------------------------------------- the drawing

WIDTH, MARGIN, GAP, HEIGHT, STOREY = 1200, 24, 10, 40, 92
STYLE = """
    text { font: 13px system-ui, sans-serif; fill: #1f2328; text-anchor: middle; }
    .small { font-size: 10px; fill: #59636e; }
    .floor { font-size: 11px; fill: #59636e; text-anchor: start; }
    .room { fill: #f6f8fa; stroke: #8c959f; }
    .file { fill: #ffffff; stroke: #8c959f; }
    .arrow { fill: none; stroke: #0a6cbd; stroke-opacity: 0.28; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; }
      .small, .floor { fill: #9198a1; }
      .room { fill: #161b22; stroke: #6e7681; }
      .file { fill: #0d1117; stroke: #6e7681; }
      .arrow { stroke: #58a6ff; stroke-opacity: 0.35; }
    }
"""


@dataclass(frozen=True)
class Box:
    """Where a room is drawn, in the drawing's units."""

    left: float
    top: float
    width: float

    @property
    def middle(self) -> float:
        """The box's middle, from the left."""
        return self.left + self.width / 2


def boxes_of(rooms: dict[str, Room], floors: dict[str, int]) -> dict[str, Box]:
    """A box for each room: floors from the ground up, each in rows of the drawing's width."""
    boxes: dict[str, Box] = {}
    rows: list[list[tuple[str, float]]] = []
    for floor in range(max(floors.values()) + 1):
        rows.append([])
        for name in sorted(name for name in floors if floors[name] == floor):
            width = max(44.0, 7.6 * len(name) + 14, round(rooms[name].lines, -2) / 30)
            if sum(each + GAP for _, each in rows[-1]) + width > WIDTH - 2 * MARGIN - 50:
                rows.append([])
            rows[-1].append((name, width))
    for number, row in enumerate(rows):
        top = (len(rows) - 1 - number) * STOREY + MARGIN
        left = 50 + (WIDTH - 50 - sum(width + GAP for _, width in row)) / 2
        for name, width in row:
            boxes[name] = Box(left, top, width)
            left += width + GAP
    return boxes


def drawing(root: Path) -> str:
    """The house as an SVG: rooms stand above the rooms that they import."""
    rooms = rooms_of(root)
    floors = floors_of_rooms(rooms)
    boxes = boxes_of(rooms, floors)
    height = max(box.top for box in boxes.values()) + HEIGHT + MARGIN
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="title" '
        f'viewBox="0 0 {WIDTH} {height:.0f}">',
        '  <title id="title">The rooms of memoire, each above the rooms that it imports</title>',
        f"  <style>{STYLE}  </style>",
    ]
    for name in sorted(floors):
        for target in sorted(rooms[name].imports & floors.keys()):
            parts.append(f"  {arrow(boxes[name], boxes[target])}")
    for top in sorted({box.top for box in boxes.values()}):
        floor = next(floors[name] for name, box in boxes.items() if box.top == top)
        parts.append(f'  <text class="floor" x="{MARGIN / 2:.0f}" y="{top + HEIGHT / 2 + 4:.0f}">{floor}</text>')
    for name in sorted(floors):
        parts += [f"  {part}" for part in drawn(rooms[name], boxes[name])]
    return "\n".join([*parts, "</svg>", ""])


def arrow(start: Box, end: Box) -> str:
    begin, stop = start.top + HEIGHT, end.top
    bend = (stop - begin) / 2
    way = f"M{start.middle:.0f} {begin:.0f}c0 {bend:.0f} {end.middle - start.middle:.0f} {bend:.0f}"
    return f'<path class="arrow" d="{way} {end.middle - start.middle:.0f} {stop - begin:.0f}"/>'


def drawn(room: Room, box: Box) -> list[str]:
    kind = "room" if room.files else "file"
    size = f"{room.lines / 1000:.1f}k"  # so that few changes of the code make the drawing another one
    words = f"{len(room.files)} files, {size} lines" if room.files and box.width > 90 else size
    return [
        f'<rect class="{kind}" x="{box.left:.0f}" y="{box.top:.0f}" width="{box.width:.0f}" height="{HEIGHT}" rx="4"/>',
        f'<text x="{box.middle:.0f}" y="{box.top + 17:.0f}">{escape(room.name)}{"/" if room.files else ""}</text>',
        f'<text class="small" x="{box.middle:.0f}" y="{box.top + 32:.0f}">{words}</text>',
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to look at")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="write the drawing there")
    parser.add_argument("--check", type=Path, metavar="FILE", help="fail unless this is the drawing")
    chosen = parser.parse_args()
    if chosen.check:
        if chosen.check.read_text(encoding="utf-8") == drawing(chosen.root):
            return 0
        print(f"{chosen.check} is out of date: python tools/house.py --draw {chosen.check}", file=sys.stderr)
        return 1
    print(figures(chosen.root))
    if chosen.draw:
        chosen.draw.write_text(drawing(chosen.root), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
