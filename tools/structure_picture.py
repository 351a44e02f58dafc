"""Drawing of memoire's packages, layers and imports, as an SVG."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from structure_imports import Package, layers_of, packages_of

WIDTH, MARGIN, GAP, HEIGHT, ROW_HEIGHT = 1200, 24, 10, 40, 92
LEGEND = (
    ("package", "package: a folder of memoire/"),
    ("file", "package: a file at the top"),
    ("import", "import of a lower package"),
)
"""Class and description of each mark."""
STYLE = """
    text { font: 13px system-ui, sans-serif; fill: #1f2328; text-anchor: middle; }
    .small { font-size: 10px; fill: #59636e; }
    .layer, .legend { font-size: 11px; fill: #59636e; text-anchor: start; }
    .package { fill: #f6f8fa; stroke: #8c959f; }
    .file { fill: #ffffff; stroke: #8c959f; }
    .import { fill: none; stroke: #0a6cbd; stroke-opacity: 0.28; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; }
      .small, .layer, .legend { fill: #9198a1; }
      .package { fill: #161b22; stroke: #6e7681; }
      .file { fill: #0d1117; stroke: #6e7681; }
      .import { stroke: #58a6ff; stroke-opacity: 0.35; }
    }
"""


@dataclass(frozen=True)
class Box:
    """Rectangle of a package, in the drawing's units."""

    left: float
    top: float
    width: float

    @property
    def middle(self) -> float:
        """Horizontal middle of the box."""
        return self.left + self.width / 2


def boxes_of(packages: Mapping[str, Package], layers: Mapping[str, int]) -> dict[str, Box]:
    """Return a box for each package: layers from 0 up, each in rows of the drawing's width."""
    boxes: dict[str, Box] = {}
    rows: list[list[tuple[str, float]]] = []
    for layer in range(max(layers.values()) + 1):
        rows.append([])
        for name in sorted(name for name in layers if layers[name] == layer):
            width = max(44.0, 7.6 * len(name) + 14, round(packages[name].lines, -2) / 30)
            if sum(each + GAP for _, each in rows[-1]) + width > WIDTH - 2 * MARGIN - 50:
                rows.append([])
            rows[-1].append((name, width))
    for number, row in enumerate(rows):
        top = (len(rows) - 1 - number) * ROW_HEIGHT + MARGIN
        left = 50 + (WIDTH - 50 - sum(width + GAP for _, width in row)) / 2
        for name, width in row:
            boxes[name] = Box(left, top, width)
            left += width + GAP
    return boxes


def drawing(root: Path) -> str:
    """Return an SVG of the packages in layers, with their imports; each stands above the packages that it imports."""
    packages = packages_of(root)
    layers = layers_of(packages)
    boxes = boxes_of(packages, layers)
    bottom = max(box.top for box in boxes.values()) + HEIGHT + MARGIN
    height = bottom + 2 * MARGIN
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="title" '
        f'viewBox="0 0 {WIDTH} {height:.0f}">',
        '  <title id="title">The packages of memoire, each above the packages that it imports</title>',
        f"  <style>{STYLE}  </style>",
    ]
    for name in sorted(layers):
        for target in sorted(packages[name].imports.keys() & layers.keys()):
            parts.append(f"  {import_line(boxes[name], boxes[target])}")
    for top in sorted({box.top for box in boxes.values()}):
        layer = next(layers[name] for name, box in boxes.items() if box.top == top)
        parts.append(f'  <text class="layer" x="{MARGIN / 2:.0f}" y="{top + HEIGHT / 2 + 4:.0f}">{layer}</text>')
    for name in sorted(layers):
        parts += [f"  {part}" for part in drawn(packages[name], boxes[name])]
    parts += [f"  {part}" for part in legend(bottom + MARGIN)]
    return "\n".join([*parts, "</svg>", ""])


def import_line(start: Box, end: Box) -> str:
    first, last = start.top + HEIGHT, end.top
    bend = (last - first) / 2
    curve = f"M{start.middle:.0f} {first:.0f}c0 {bend:.0f} {end.middle - start.middle:.0f} {bend:.0f}"
    return f'<path class="import" d="{curve} {end.middle - start.middle:.0f} {last - first:.0f}"/>'


def legend(middle: float) -> list[str]:
    """Return the parts of a line that explains the marks, at this height."""
    texts = [*LEGEND, ("layer", "number at the left: layer; a package imports only packages of lower layers")]
    parts, left = [], 50.0
    for kind, text in texts:
        if kind == "import":
            parts.append(f'<path class="import" d="M{left:.0f} {middle:.0f}h24"/>')
        elif kind != "layer":
            parts.append(f'<rect class="{kind}" x="{left:.0f}" y="{middle - 7:.0f}" width="24" height="14" rx="3"/>')
        left += 30 * (kind != "layer")
        parts.append(f'<text class="legend" x="{left:.0f}" y="{middle + 4:.0f}">{escape(text)}</text>')
        left += 6 * len(text) + 30
    return parts


def drawn(package: Package, box: Box) -> list[str]:
    kind = "package" if package.files else "file"
    size = f"{package.lines / 1000:.1f}k"  # rounded: few changes of the code change the drawing
    words = f"{len(package.files)} files, {size} lines" if package.files and box.width > 90 else size
    return [
        f'<rect class="{kind}" x="{box.left:.0f}" y="{box.top:.0f}" width="{box.width:.0f}" height="{HEIGHT}" rx="4"/>',
        f'<text x="{box.middle:.0f}" y="{box.top + 17:.0f}">{escape(package.name + "/" * bool(package.files))}</text>',
        f'<text class="small" x="{box.middle:.0f}" y="{box.top + 32:.0f}">{words}</text>',
    ]
