"""Measure the English of pages, docstrings, messages and names.

    python tools/english.py [PATH ...]      tables for pages and for code; by default for all of the project
    python tools/english.py --long PATH     also print what to rewrite, with its line
    python tools/english.py --check         fail for a page beyond the bounds, or a figure above its ceiling
    python tools/english.py --record        lower the ceilings in tools/english.toml to the present figures

The sentences of a page have at most 15 words in the median. Nine in ten have at most 28 words, and none has more than
45. A line of a page has at most 100 columns; rows of tables, lines that are one link, and code may be longer. Code is
not measured as English: blocks between fences, and lines indented by four.

Each row of the second table is an area of the code:

* openings: docstrings (of modules, classes, functions, and of attributes before them) that begin with a word that
  makes a noun clause instead of a noun or a verb
* short: docstrings of four words or fewer
* awkward: words and phrases of `AWKWARD` in docstrings, and in other strings of two words or more
* names: bindings of the five participles that do not say what a variable holds

The figures help the writer. A text within all bounds can still be unclear.
"""

import argparse
import ast
import inspect
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CEILINGS = ROOT / "tools" / "english.toml"
MEDIAN, NINE_IN_TEN, LONGEST, COLUMNS = 15, 28, 45, 100
AWKWARD = re.compile(
    r"\b(anew|for ever|in vain|whoever|(?-i:or none)|goodbye|nobody|somebody|none but|there is none of|one too many"
    r"|must be absent beside|what there is none|nowhere to be)\b",
    re.IGNORECASE,
)
"""Archaic or literary words, and phrases of templates that produce unclear messages."""
OPENINGS = re.compile(r"(Of|What|Whether|Where|Those|Who|How)\b")
NAMES = {"made", "found", "given", "told", "said"}
AREAS = {
    "product": ("memoire", "dashboard"),
    "tests": ("tests",),
    "tools": ("tools", "benchmarks", "examples", "docs", "deploy", "setup.py"),
}
FOREIGN = re.compile(r"memoire/(classic|tmrl|sb3)|(?!memoire|dashboard)")
"""Files whose classes may have the name of another class: names of other libraries, and tests and tools."""
SHORT = 4
"""Greatest number of words of a short docstring."""
STRETCH = 10
"""Words of a stretch of text that should not be on two pages."""


def share(lengths: Iterable[int], part: float) -> int:
    """Return the length that this part of the sentences does not exceed."""
    ordered = sorted(lengths)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0


@dataclass
class Page:
    """Measures of a page."""

    path: str
    sentences: list[tuple[int, int, str]] = field(default_factory=list)
    """Words, line, text."""
    cells: list[tuple[int, int, str]] = field(default_factory=list)
    """Words, line and text of sentences in tables. Table cells count for the longest sentence only."""
    wide: list[tuple[int, int, str]] = field(default_factory=list)
    """Columns, line, text."""
    awkward: list[tuple[str, int, str]] = field(default_factory=list)
    """Word, line, text."""

    def share(self, part: float) -> int:
        """Return the number of words that this part of the sentences does not exceed."""
        return share((words for words, _, _ in self.sentences), part)

    @property
    def longest(self) -> int:
        """Words of the longest sentence."""
        return max((words for words, _, _ in (*self.sentences, *self.cells)), default=0)

    @property
    def is_plain(self) -> bool:
        """True if the page is within all bounds."""
        lengths = self.share(0.5) <= MEDIAN and self.share(0.9) <= NINE_IN_TEN and self.longest <= LONGEST
        return lengths and not self.wide and not self.awkward

    def faults(self) -> Iterator[str]:
        """Yield a line for each passage to rewrite."""
        for words, line, text in (*self.sentences, *self.cells):
            if words > NINE_IN_TEN:
                yield f"{self.path}:{line}: {words} words: {text}"
        for columns, line, text in self.wide:
            yield f"{self.path}:{line}: {columns} columns: {text[:60]}"
        for word, line, text in self.awkward:
            yield f"{self.path}:{line}: {word}: {text[:100]}"


def is_fence(line: str) -> bool:
    """Return True if a block of code begins or ends here."""
    return line.strip().startswith(("```", "~~~"))


def is_indented(line: str) -> bool:
    """Return True if a line is code by its indent. Items of lists go on with two or three spaces."""
    return line.startswith("    ")


def paragraphs(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield first line, words and whether it is a cell of a table, of each paragraph, list item, heading and cell."""
    begun, words, is_code = 0, [], False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        bare = line.strip()
        if is_fence(line):
            is_code = not is_code
        ends = is_code or not bare or is_indented(line) or bare.startswith(("```", "~~~", "|", "#", "<", "!["))
        if words and (ends or re.match(r"([*+-]|\d+\.) ", bare)):
            yield begun, " ".join(words), False
            words = []
        if not is_code and bare.startswith("|") and not re.fullmatch(r"[|:\- ]+", bare):
            yield from ((number, cell.strip(), True) for cell in re.split(r"(?<!\\)\|", bare.strip("|")))
        elif not ends:
            begun = begun if words else number
            words.append(re.sub(r"^([*+-]|\d+\.|>) +", "", bare))


def plain(text: str) -> str:
    """Return a paragraph with one word for each piece of code, link or formula."""
    text = re.sub(r"`[^`]*`", "CODE", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"https?://\S+", "LINK", text).replace("*", "").replace("e.g.", "eg").replace("i.e.", "ie")


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a paragraph."""
    yield from (each for each in re.split(r"(?<=[.!?:])[)\"]?\s+(?=[\"(A-Z0-9])", plain(text)) if each.strip())


def words_of(sentence: str) -> list[str]:
    return re.findall(r"[A-Za-z0-9][\w'.-]*", sentence)


def look(path: Path) -> Page:
    """Measure a page."""
    text = path.read_text(encoding="utf-8")
    page = Page(path.resolve().relative_to(ROOT).as_posix())
    for line, paragraph, is_cell in paragraphs(text):
        for sentence in sentences(paragraph):
            (page.cells if is_cell else page.sentences).append((len(words_of(sentence)), line, sentence))
        page.awkward += [(word, line, paragraph) for word in AWKWARD.findall(paragraph)]
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        is_code = is_code != is_fence(line)
        is_prose = not (is_code or is_indented(line) or line.startswith(("|", "<")))
        if len(line) > COLUMNS and is_prose and " " in line.strip("*-[]() ")[:COLUMNS]:
            page.wide.append((len(line), number, line))
    return page


def pages() -> list[Path]:
    """Return the pages that people write."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    return [*top, *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "development").glob("*.md"))]


def of_menu() -> list[Path]:
    """Return the pages of the site's menu, without their index and the list of generated signatures."""
    return [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in ("README.md", "reference.md")]


def doubled(paths: Iterable[Path]) -> dict[str, set[str]]:
    """Map each stretch of `STRETCH` words that is on two pages or more to these pages."""
    places: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        for _, paragraph, _ in paragraphs(path.read_text(encoding="utf-8")):
            words = words_of(plain(paragraph).lower())
            for start in range(len(words) - STRETCH + 1):
                places[" ".join(words[start : start + STRETCH])].add(path.name)
    return {stretch: names for stretch, names in places.items() if len(names) > 1}


# -------------------------------------------------------------------------------------------------------- code


@dataclass
class Code:
    """Measures of an area of the code, each with the places that count."""

    docstrings: list[tuple[str, str]] = field(default_factory=list)
    """Place and text."""
    modules: list[tuple[str, str]] = field(default_factory=list)
    """Place and text of the docstrings of modules."""
    texts: list[tuple[str, str]] = field(default_factory=list)
    """Place and text of other strings of two words or more."""
    names: list[tuple[str, str]] = field(default_factory=list)
    """Place and name of bindings that are in `NAMES`."""
    classes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Places of the definitions of each public class, outside of packages with the names of other libraries."""

    def read(self, path: Path) -> None:
        """Add a Python file."""
        place = path.resolve().relative_to(ROOT).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        seen = set()
        for node in ast.walk(tree):
            for statement in documented(node):
                seen.add(statement.value)
                text = (f"{place}:{statement.lineno}", inspect.cleandoc(ast.literal_eval(statement.value)))
                self.docstrings.append(text)
                if isinstance(node, ast.Module) and statement is node.body[0]:
                    self.modules.append(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not FOREIGN.match(place):
                self.classes[node.name].append(f"{place}:{node.lineno}")
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node not in seen
                and " " in node.value
            ):
                self.texts.append((f"{place}:{node.lineno}", " ".join(node.value.split())))
            for name in bound(node):
                if name in NAMES:
                    self.names.append((f"{place}:{node.lineno}", name))

    @property
    def faults(self) -> dict[str, list[tuple[str, str]]]:
        """Place and text of each passage or name that a figure counts, by the name of the figure."""
        texts = (*self.docstrings, *self.texts)
        long = [(place, each) for place, text in self.docstrings for each in sentences_of(text)]
        return {
            "openings": [each for each in self.docstrings if OPENINGS.match(each[1])],
            "openings_of_modules": [each for each in self.modules if OPENINGS.match(each[1])],
            "short": [each for each in self.docstrings if len(each[1].split()) <= SHORT],
            "awkward": [each for each in texts if AWKWARD.search(each[1])],
            "long_sentences": [each for each in long if len(words_of(each[1])) > LONGEST],
            "names": self.names,
            "classes_of_one_name": [
                (", ".join(all_places), name) for name, all_places in self.classes.items() if all_places[1:]
            ],
        }

    def figures(self) -> dict[str, int]:
        """Return the number of these places for each figure."""
        return {name: len(places) for name, places in self.faults.items()}


def sentences_of(docstring: str) -> Iterator[str]:
    """Yield the sentences of a docstring: of its paragraphs, and of its entries for arguments and errors."""
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|[\w., ]+:) )", docstring):
        is_code = all(line.startswith("    ") for line in block.splitlines()) and not re.match(r"\s+[\w., ]+: ", block)
        if not is_code and not re.search(r"\S {3,}\S", block):
            yield from sentences(" ".join(block.split()))


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def documented(node: ast.AST) -> Iterator[ast.Expr]:
    """Yield the docstrings in the body of a module, class or function: its own and those of attributes."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return
    for number, statement in enumerate(node.body):
        is_attribute = number > 0 and isinstance(node.body[number - 1], ast.Assign | ast.AnnAssign)
        if is_text(statement) and (number == 0 or is_attribute):
            assert isinstance(statement, ast.Expr)
            yield statement


def bound(node: ast.AST) -> list[str]:
    """Return the names that a node binds, as a target of an assignment or as an argument."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    return [node.arg] if isinstance(node, ast.arg) else []


def sources(names: Iterable[str]) -> Iterator[Path]:
    """Yield the Python files of folders."""
    for name in names:
        path = ROOT / name
        yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


def areas(chosen: list[Path]) -> dict[str, Code]:
    """Measure the areas of the code, or only these files and folders in these areas."""
    wanted = [path.resolve() for path in chosen]
    measured = {}
    for area, names in AREAS.items():
        code = Code()
        for path in sources(names):
            if not wanted or any(path == each or each in path.parents for each in wanted):
                code.read(path)
        if code.docstrings or code.names:
            measured[area] = code
    return measured


# -------------------------------------------------------------------------------------------------------- command


def ceilings() -> dict[str, dict[str, int]]:
    """Read the ceilings."""
    return tomllib.loads(CEILINGS.read_text(encoding="utf-8"))


def record(figures: dict[str, dict[str, int]]) -> None:
    """Write the figures that are lower than their ceilings."""
    former = ceilings() if CEILINGS.exists() else {}
    lines = ["# Ceilings of the figures that tools/english.py prints; `--record` lowers them.\n"]
    for area, row in figures.items():
        lines.append(f"\n[{area}]\n")
        lines += [f"{name} = {min(value, former.get(area, {}).get(name, value))}\n" for name, value in row.items()]
    CEILINGS.write_text("".join(lines), encoding="utf-8")


def print_pages(looked: list[Page]) -> None:
    """Print a row for each page."""
    print("| page | sentences | median | 90 % | longest | wide lines | awkward words |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for page in looked:
        row = len(page.sentences), page.share(0.5), page.share(0.9), page.longest, len(page.wide), len(page.awkward)
        print(f"| {page.path} | {' | '.join(map(str, row))} |")


def print_code(measured: dict[str, Code]) -> None:
    """Print a row for each area."""
    print("\n| area | docstrings | median | 90 % |", " | ".join(Code().figures()), "|")
    print("| --- |", "---: | " * (3 + len(Code().figures())))
    for area, code in measured.items():
        lengths = [len(words_of(each)) for _, text in code.docstrings for each in sentences_of(text)]
        row = len(code.docstrings), share(lengths, 0.5), share(lengths, 0.9), *code.figures().values()
        print(f"| {area} | {' | '.join(map(str, row))} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="pages, files and folders")
    parser.add_argument("--long", action="store_true", help="also print what to rewrite")
    parser.add_argument(
        "--check", action="store_true", help="fail for a page beyond the bounds, or a figure above its ceiling"
    )
    parser.add_argument("--record", action="store_true", help="lower the ceilings to the present figures")
    args = parser.parse_args()
    of_pages = [path for path in args.paths if path.suffix == ".md"]
    of_code = [path for path in args.paths if path.suffix != ".md"]
    looked = [look(path) for path in (of_pages if args.paths else pages())]
    measured = areas(of_code) if of_code or not args.paths else {}
    print_pages(looked)
    print_code(measured)
    for page in looked if args.long else ():
        print(*page.faults(), sep="\n")
    for code in measured.values() if args.long else ():
        for kind, places in code.faults.items():
            print(*(f"{place}: {kind}: {text[:100]}" for place, text in places), sep="\n")
    if args.paths:
        return int(args.check and not all(page.is_plain for page in looked))
    figures = {area: code.figures() for area, code in measured.items()}
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in of_menu())
    figures["pages"] = {"stretches_on_two_pages": len(doubled(pages())), "pages": len(of_menu()), "words": words}
    print(figures["pages"])
    if args.record:
        record(figures)
    most = ceilings()
    above = [(area, name) for area, row in figures.items() for name in row if row[name] > most[area][name]]
    for area, name in above:
        print(f"{area}: {name} is {figures[area][name]}; the ceiling is {most[area][name]}")
    return int(args.check and (bool(above) or not all(page.is_plain for page in looked)))


if __name__ == "__main__":
    sys.exit(main())
