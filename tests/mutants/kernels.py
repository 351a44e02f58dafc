"""Mistakes in the compiled modules: all are built in, and MEMOIRE_MUTANT selects the active one.

A statement with a planted mistake becomes `if planted(7): MISTAKE else: STATEMENT`. Numbers go through all modules. Each
module records which of its mistakes were reached, so that each is tried by the tests that reach it.
"""

import bisect
import functools
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

from places import ROOT, SWAPS, Place, numbered

FILES = tuple(sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "memoire").rglob("*.p[yx][xd]")))
"""Sources of the kernels: modules, and declarations with functions that several modules compile in."""
SWITCH_FILE = "memoire/_kernels/planted.pxd"
SWITCH = '''
cdef extern from *:
    """
    #include <stdlib.h>
    static int memoire_chosen = -1;
    static unsigned char memoire_met[4096];
    static inline int memoire_planted(int number) {
        if (memoire_chosen < 0) {
            const char *text = getenv("MEMOIRE_MUTANT");
            memoire_chosen = text ? atoi(text) : 0;
        }
        memoire_met[number] = 1;
        return number == memoire_chosen;
    }
    """
    bint planted "memoire_planted"(int number) noexcept nogil
    unsigned char met "memoire_met"[4096]
'''
"""Declarations of the switch, compiled into each module once."""
OF_DECLARATIONS = "from memoire._kernels.planted cimport planted\n"
OF_MODULES = '''
from memoire._kernels.planted cimport met, planted


def reached_mutants():
    """Numbers of the planted mistakes that were come by since the last call."""
    cdef int number
    found = [number for number in range(4096) if met[number]]
    for number in range(4096):
        met[number] = 0
    return found

'''
NEW = {**SWAPS, "*": "+", "%": "+", "+=": "-=", "-=": "+=", "True": "False", "False": "True"}
"""Sign that a mistake writes in place of each sign."""
SIGNS = {"comparison": "< <= > >= == !=", "arithmetic": "+ - * // % << >> += -=", "boolean": "and or True False"}
KIND_OF = {sign: kind for kind, signs in SIGNS.items() for sign in signs.split()}
WORDS = {"and", "or", "not", "if", "else", "in", "is", "return", "while", "elif", "lambda", "yield"}
OTHERS = frozenset(
    """
    cdef def cpdef class for with try except finally else import from raise pass assert global cimport @ del ctypedef yield
    """.split()  # noqa: SIM905
)
"""First words of statements that stay unchanged."""

Tokens = list[tokenize.TokenInfo]


def logical_lines(source: str) -> Iterator[Tokens]:
    line: Tokens = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            continue
        if token.type == tokenize.NEWLINE:
            if line:
                yield line
            line = []
        else:
            line.append(token)


def _opens_function(line: Tokens) -> bool:
    return (
        line[0].string in ("def", "cdef", "cpdef") and line[1].string != "class" and any(t.string == "(" for t in line)
    )


def _name(line: Tokens) -> str:
    """Return the name before the first bracket, or after `class`."""
    texts = [token.string for token in line]
    return texts[texts.index("class") + 1] if "class" in texts[:2] else texts[texts.index("(") - 1]


def statements(source: str) -> Iterator[tuple[str, Tokens]]:
    """Yield (function, statement) of each statement inside a function that a switch can select."""
    stack: list[tuple[int, str, bool]] = []  # column, name, True for a function
    for line in logical_lines(source):
        column = line[0].start[1]
        while stack and stack[-1][0] >= column:
            stack.pop()
        opens = line[-1].string == ":"
        if opens and line[0].string in ("def", "cdef", "cpdef", "class"):
            is_function = _opens_function(line)
            if is_function or "class" in (line[0].string, line[1].string):
                stack.append((column, _name(line), is_function))
        elif stack and stack[-1][2] and _can_be_chosen(line):
            yield ".".join(name for _, name, _ in stack), line


def _can_be_chosen(line: Tokens) -> bool:
    """Return True for a statement of its own, or for the whole first line of a block with a condition."""
    has_block = line[-1].string == ":"
    one_line = any(token.string == ":" and not _in_brackets(line, token) for token in line[:-1])
    return (line[0].string in ("if", "elif", "while")) == has_block and line[0].string not in OTHERS and not one_line


def _in_brackets(line: Tokens, token: tokenize.TokenInfo) -> bool:
    depth = 0
    for other in line:
        if other is token:
            return depth > 0
        depth += (other.string in "([{") - (other.string in ")]}") if other.type == tokenize.OP else 0
    return False


def _is_operand(token: tokenize.TokenInfo) -> bool:
    return (
        token.string in (")", "]")
        or token.type in (tokenize.NUMBER, tokenize.STRING)
        or (token.type == tokenize.NAME and token.string not in WORDS)
    )


def _changes(line: Tokens) -> Iterator[tuple[str, int, str]]:
    """Yield (kind, index of the token, new text) of each mistake in a statement."""
    cast = False
    for index, token in enumerate(line):
        binary = index > 0 and _is_operand(line[index - 1])
        if token.string == "<" and not binary:
            cast = True
        elif cast:
            cast = token.string != ">"
        elif token.type == tokenize.NUMBER and token.string.isdigit():
            yield "constant", index, str(int(token.string) + 1)
        elif token.type == tokenize.NUMBER and re.fullmatch(r"\d+\.\d+", token.string):
            yield "constant", index, repr(float(token.string) * 2 or 1.0)
        elif token.string in KIND_OF and (binary or token.string in ("True", "False")):
            yield KIND_OF[token.string], index, NEW[token.string]
        elif token.string == "not" and index and line[index - 1].string != "is" and line[index + 1].string != "in":
            yield "boolean", index, ""


def _can_be_dropped(line: Tokens) -> bool:
    """Return True if the statement sets no C variable, which would hold anything if it were never set."""
    texts = [token.string for token in line]
    if texts[0] in ("break", "continue"):
        return True
    if "=" in texts:
        target = texts[: texts.index("=")]
        return "," not in target and ("." in target or "[" in target)
    return texts[-1] == ")" and texts[0] != "return" or any(text in ("+=", "-=", "|=", "&=") for text in texts)


class Source:
    """Text of one source, and the positions at which its lines begin."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.text = (ROOT / file).read_text(encoding="utf-8")
        self._starts = [0]
        for line in self.text.split("\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)

    def at(self, where: tuple[int, int]) -> int:
        return self._starts[where[0] - 1] + where[1]

    def span(self, line: Tokens) -> tuple[int, int]:
        return self.at(line[0].start), self.at(line[-1].end)

    @functools.cached_property
    def _spans(self) -> dict[int, tuple[Tokens, int]]:
        """Tokens and end of each statement, by its start."""
        return {self.span(line)[0]: (line, self.span(line)[1]) for _, line in statements(self.text)}

    def statement_at(self, place: int) -> int:
        """Return the start of the statement that a character belongs to."""
        return self._starts_of[bisect.bisect_right(self._starts_of, place) - 1]

    @functools.cached_property
    def _starts_of(self) -> list[int]:
        return sorted(self._spans)

    def places(self) -> list[Place]:
        """Return all places; start and end count characters."""
        places = []
        for function, line in statements(self.text):
            start, end = self.span(line)
            head = self.text[start:end].partition("\n")[0]
            changes = [(kind, line[at].string, new, line[at : at + 1]) for kind, at, new in _changes(line)]
            if _can_be_dropped(line):
                changes.append(("dropped statement", " ".join(self.text[start:end].split()), "pass", line))
            places += [
                Place(self.file, function, part[0].start[0], kind, old, new, *self.span(part), head)
                for kind, old, new, part in changes
            ]
        return numbered(places)

    def with_mistakes(self, places: Mapping[int, Place]) -> tuple[str, list[int]]:
        """Return the text with all of these behind switches, and the number of the mistake in each line, or 0."""
        spans = self._spans
        by_statement = {self.statement_at(place.start): (number, place) for number, place in places.items()}
        pieces, owners, done = [], [0], 0
        for start, (number, place) in sorted(by_statement.items()):
            line, end = spans[start]
            pieces += [(self.text[done:start], 0), (self._switched(number, place, line, start, end), number)]
            done = end
        pieces.append((self.text[done:], 0))
        for text, number in pieces:
            owners[-1] = owners[-1] or number
            owners += [number] * text.count("\n")
        text = "".join(piece for piece, _ in pieces)
        switch = OF_MODULES if self.file.endswith(".pyx") else OF_DECLARATIONS if places else ""
        head = text.index('"""\n', 3) + 4  # behind the docstring
        above = text.count("\n", 0, head)
        return text[:head] + switch + text[head:], owners[:above] + [0] * switch.count("\n") + owners[above:]

    def _switched(self, number: int, place: Place, line: Tokens, start: int, end: int) -> str:
        old = self.text[start:end]
        new = old[: place.start - start] + place.new + old[place.end - start :]
        if line[-1].string == ":":
            word = line[0].string
            old, new = old[len(word) : -1].strip(), new[len(word) : -1].strip()
            return f"{word} ({new}) if planted({number}) else ({old}):"
        indent = "\n" + " " * line[0].start[1]
        return f"if planted({number}): {new}{indent}else: {old}"


def build(folder: Path, texts: Mapping[str, str]) -> str:
    """Build a copy's compiled modules from these texts, by file; return the output if the build fails, else ""."""
    for file, text in {**texts, SWITCH_FILE: SWITCH}.items():
        (folder / file).write_text(text, encoding="utf-8")
    commands = [
        [sys.executable, "-m", "cython", "-3", "-o", "build/kernel.c", file] for file in texts if file[-3:] == "pyx"
    ]
    (folder / "build").mkdir(exist_ok=True)
    # Cython alone finds the mistakes that Cython refuses in seconds; compiling the C of all modules takes minutes.
    commands.append([sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"])
    output = next(filter(None, (_output_of_failed(command, folder) for command in commands)), "")
    (folder / SWITCH_FILE).unlink()
    return output


def _output_of_failed(command: list[str], folder: Path) -> str:
    """Run a command in the folder; return its output if it failed, else ""."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def refused(output: str, owners: Mapping[str, list[int]]) -> set[int]:
    """Return the numbers of mistakes that Cython refuses, by its output; `owners` has each file's numbers by line."""
    lines = re.findall(r"(memoire/[\w/]+\.p(?:yx|xd)):(\d+):\d+:", output)
    return {owners[file][int(line) - 1] for file, line in lines} - {0}
