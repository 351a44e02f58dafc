"""Measure the English of pages: how long sentences and lines are, and words that readers trip over.

    python tools/english.py [PAGE ...]     a row for each page; by default those at the top and in docs/
    python tools/english.py --long PAGE    also print what is too long or not plain, with its line
    python tools/english.py --check        fail for a page beyond the bounds

A sentence has at most 15 words in the median of a page, nine in ten have at most 28, and none has more than 45. A line
has at most 100 columns, but for rows of tables, lines that are one link, and code, which is not English either: blocks
between fences, and lines indented by four.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MEDIAN, NINE_IN_TEN, LONGEST, COLUMNS = 15, 28, 45, 100
AWKWARD = re.compile(r"\b(anew|for ever|in vain|whoever|or none|goodbye)\b", re.IGNORECASE)
"""Words of another century, and of another kind of text."""
RECORDED = {"docs/soak.md", "docs/mutants.md"}
"""Pages that record what commands printed."""


@dataclass
class Page:
    """What was found on a page."""

    path: str
    sentences: list[tuple[int, int, str]] = field(default_factory=list)
    """Words, line, text."""
    cells: list[tuple[int, int, str]] = field(default_factory=list)
    """The same of sentences in tables, which bound the longest alone."""
    wide: list[tuple[int, int, str]] = field(default_factory=list)
    """Columns, line, text."""
    awkward: list[tuple[str, int, str]] = field(default_factory=list)
    """Word, line, text."""

    def share(self, part: float) -> int:
        """Words that this part of the sentences has at most."""
        words = sorted(words for words, _, _ in self.sentences)
        return words[min(len(words) - 1, int(part * len(words)))] if words else 0

    @property
    def longest(self) -> int:
        """Words of the longest sentence."""
        return max((words for words, _, _ in (*self.sentences, *self.cells)), default=0)

    @property
    def is_plain(self) -> bool:
        """Whether the page is within all bounds."""
        lengths = self.share(0.5) <= MEDIAN and self.share(0.9) <= NINE_IN_TEN and self.longest <= LONGEST
        return lengths and not self.wide and not self.awkward

    def faults(self) -> Iterator[str]:
        """What to rewrite, a line each."""
        for words, line, text in (*self.sentences, *self.cells):
            if words > NINE_IN_TEN:
                yield f"{self.path}:{line}: {words} words: {text}"
        for columns, line, text in self.wide:
            yield f"{self.path}:{line}: {columns} columns: {text[:60]}"
        for word, line, text in self.awkward:
            yield f"{self.path}:{line}: {word}: {text[:100]}"


def is_fence(line: str) -> bool:
    """Whether a block of code begins or ends here."""
    return line.strip().startswith(("```", "~~~"))


def is_indented(line: str) -> bool:
    """Whether a line is code by its indent. Items of lists go on with two or three."""
    return line.startswith("    ")


def paragraphs(text: str) -> Iterator[tuple[int, str, bool]]:
    """First line, words and whether it is a table's cell, of each paragraph, item of a list, heading and cell."""
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


def sentences(text: str) -> Iterator[str]:
    """Sentences of a paragraph; a piece of code, a link's target or a formula is one word."""
    plain = re.sub(r"`[^`]*`", "CODE", text)
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain)
    plain = re.sub(r"https?://\S+", "LINK", plain).replace("*", "").replace("e.g.", "eg").replace("i.e.", "ie")
    yield from (each for each in re.split(r"(?<=[.!?:])[)\"]?\s+(?=[\"(A-Z0-9])", plain) if each.strip())


def look(path: Path) -> Page:
    """Measure a page."""
    text = path.read_text(encoding="utf-8")
    page = Page(path.resolve().relative_to(ROOT).as_posix())
    for line, words, is_cell in paragraphs(text):
        for sentence in sentences(words):
            found = (len(re.findall(r"[A-Za-z0-9][\w'.-]*", sentence)), line, sentence)
            (page.cells if is_cell else page.sentences).append(found)
        page.awkward += [(word, line, words) for word in AWKWARD.findall(words)]
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        is_code = is_code != is_fence(line)
        is_prose = not (is_code or is_indented(line) or line.startswith(("|", "<")))
        if len(line) > COLUMNS and is_prose and " " in line.strip("*-[]() ")[:COLUMNS]:
            page.wide.append((len(line), number, line))
    return page


def pages() -> list[Path]:
    """Those that people write."""
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted(
        (ROOT / "docs").glob("*.md")
    )
    return [path for path in found if path.relative_to(ROOT).as_posix() not in RECORDED]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--long", action="store_true", help="also print what to rewrite")
    parser.add_argument("--check", action="store_true", help="fail for a page beyond the bounds")
    chosen = parser.parse_args()
    looked = [look(path) for path in chosen.pages or pages()]
    print("| page | sentences | median | 90 % | longest | wide lines | awkward words |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for page in looked:
        figures = (
            len(page.sentences),
            page.share(0.5),
            page.share(0.9),
            page.longest,
            len(page.wide),
            len(page.awkward),
        )
        print(f"| {page.path} | {' | '.join(map(str, figures))} |")
    for page in looked if chosen.long else ():
        print(*page.faults(), sep="\n")
    return int(chosen.check and not all(page.is_plain for page in looked))


if __name__ == "__main__":
    sys.exit(main())
