"""Planted mistakes in copies of the checkout, and the share of mistakes that the tests find: `make mutants`.

    python tests/mutants/run.py [--workers 2] [--quick] [--again] [--only WORD] [--write docs/development/records/mutants.md]

Places are drawn by a seed (places.py, kernels.py); by_hand.toml adds more. The first run records which tests enter
which function, which takes as long as `make test`. Each mistake is tried by the tests that enter its function, the
quickest first. Results are kept in build/mutants, so that an interrupted run continues. After tests were added,
`--again` repeats the mistakes that were not found. Remove build/mutants after changes of the code.
"""

import argparse
import ast
import json
import os
import shutil
import sys
import threading
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import kernels
from places import KERNELS, KINDS, NEEDS, QUOTAS, ROOT, Place, draw, drawn, folder_of
from trial import HERE, LEFT_OUT, LOOKING, MARKS, QUICK, SOUND, Recording, Tree, Verdict, copy_checkout, digest

SEED = 20250715
FOLDER = ROOT / "build" / "mutants"
FIRST_SECONDS = 6.0
"""Seconds that the first tests take together; these tests find most mistakes."""
FILES_AT_ONCE = 30
"""Number of test files that are recorded before the records are saved."""
ALL_SECONDS = 180.0
"""Seconds that all tests of a mistake take together."""
SURE_SECONDS = 1.0
"""Seconds beyond which a failure may be the machine's, so that the test is repeated without the mistake."""
WANTED_SHARE, EQUIVALENT_SHARE = 0.95, 0.05


def say(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)


def toml(name: str, table: str) -> list[dict[str, Any]]:
    return tomllib.loads((HERE / name).read_text(encoding="utf-8")).get(table, [])


def function_at(file: str, line: int) -> str:
    """Return the qualified name of the innermost function at a line of a Python file."""
    name = prefix = ""
    nodes: list[Any] = ast.parse((ROOT / file).read_text(encoding="utf-8")).body if file.endswith(".py") else []
    while inner := next((each for each in nodes if each.lineno <= line <= each.end_lineno), None):
        if isinstance(inner, ast.ClassDef):
            prefix += f"{inner.name}."
        elif isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            name = prefix + inner.name
            prefix = f"{name}.<locals>."
        nodes = [each for each in ast.iter_child_nodes(inner) if hasattr(each, "lineno")]
    return name


def place_by_hand(row: dict[str, Any]) -> Place | None:
    """Return the place of a row of by_hand.toml, or None if the file does not have its text exactly once."""
    source: Any = (ROOT / row["file"]).read_bytes()
    old, newline = row["old"].encode(), b"\n"
    if row["file"] in kernels.FILES:  # places in kernels count characters
        source, old, newline = source.decode(), row["old"], "\n"
    if source.count(old) != 1:
        return None
    start = source.index(old)
    line = source.count(newline, 0, start) + 1
    function = function_at(row["file"], line)
    return Place(row["file"], function, line, "by hand", row["old"], row["new"], start, start + len(old), row["why"])


def places_by_hand() -> list[Place]:
    """Return the places of by_hand.toml whose text is present."""
    return [place for row in toml("by_hand.toml", "mistake") if (place := place_by_hand(row))]


def kernels_built(tree: Tree, seed: int) -> list[Place]:
    """Build a copy's compiled modules with all mistakes that Cython accepts; return the mistakes from number 1 on."""
    sources, left_out = {file: kernels.Source(file) for file in kernels.FILES}, set()
    by_hand = [place for place in places_by_hand() if place.file in sources]

    def statement_of(place: Place) -> tuple[str, int]:
        return place.file, sources[place.file].statement_at(place.start)

    taken = {statement_of(place) for place in by_hand}
    every = [place for source in sources.values() for place in source.places() if statement_of(place) not in taken]
    while True:
        left = [place for place in every if place.key not in left_out]
        places = draw(seed, left, QUOTAS[KERNELS], lambda _: True) + by_hand
        numbers = {file: {n: place for n, place in enumerate(places, 1) if place.file == file} for file in sources}
        planted = {file: source.with_mistakes(numbers[file]) for file, source in sources.items()}
        output = kernels.build(tree.folder, {file: text for file, (text, _) in planted.items()})
        if not output:
            for file, source in sources.items():
                (tree.folder / file).write_text(source.text, encoding="utf-8")
            return places
        refused = kernels.refused(output, {file: owners for file, (_, owners) in planted.items()})
        if not refused:
            raise SystemExit(f"{tree.folder} cannot be built:\n{output[-3000:]}")
        if never := [places[number - 1].statement for number in refused if places[number - 1] in by_hand]:
            raise SystemExit(f"by_hand.toml: Cython refuses {', '.join(never)}:\n{output[-3000:]}")
        left_out |= {places[number - 1].key for number in refused}


def all_but_compiled(folder: str, names: list[str]) -> set[str]:
    """Return the names that `shutil.copytree` ignores: links, and files that are not compiled modules."""
    paths = (Path(folder, name) for name in names)
    return {path.name for path in paths if path.is_symlink() or (path.is_file() and path.suffix != ".so")}


def set_up(workers: int, seed: int) -> list[Tree]:
    """Make a copy for each worker, all with the same compiled modules; reuse those of an earlier run if possible."""
    trees = [Tree(FOLDER / f"tree{number}") for number in range(workers)]
    by_hand = [(row["why"], row["new"]) for row in toml("by_hand.toml", "mistake") if row["file"] in kernels.FILES]
    texts = sorted(path for form in ("*.pyx", "*.pxd", "*.h") for path in (ROOT / "memoire").rglob(form))
    key = f"{seed} {' '.join(map(digest, texts))} {QUOTAS[KERNELS]} {by_hand}"
    listed, modules = FOLDER / "kernels.json", FOLDER / "compiled"
    built = json.loads(listed.read_text()) if listed.exists() else {}
    if built.get("key") != key:
        say("building the kernels with their mistakes")
        copy_checkout(trees[0].folder)
        places = kernels_built(trees[0], seed)
        shutil.rmtree(modules, ignore_errors=True)
        shutil.copytree(trees[0].folder / "memoire", modules, ignore=all_but_compiled)
        listed.write_text(json.dumps({"key": key, "places": [vars(place) for place in places]}))
        (FOLDER / "recorded.json").unlink(missing_ok=True)  # the numbers of the kernels' places have changed
    for tree in trees:
        copy_checkout(tree.folder)
        shutil.copytree(modules, tree.folder / "memoire", dirs_exist_ok=True)
    return trees


def kernel_places() -> list[Place]:
    return [Place(**row) for row in json.loads((FOLDER / "kernels.json").read_text())["places"]]


def test_files() -> list[Path]:
    return sorted((ROOT / "tests").rglob("test_*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def record(tree: Tree, workers: int, marks: str) -> Recording:
    """Record the test files that have changed since they were recorded; return all records."""
    noted, folder = FOLDER / "recorded.json", FOLDER / "recorded"
    folder.mkdir(exist_ok=True)
    former = json.loads(noted.read_text()) if noted.exists() else {}
    files = [path for path in test_files() if name_of(path) not in LEFT_OUT]
    now = {name_of(path): digest(path) for path in files}
    forget(folder, {name for name in former if former[name] != now.get(name)})
    stale = [name for name, value in now.items() if former.get(name) != value]
    while stale:
        some, stale = stale[:FILES_AT_ONCE], stale[FILES_AT_ONCE:]
        say(f"recording {len(some)} test files, {len(stale)} are left")
        forget(folder, set(some))
        more = [
            "-n",
            str(2 * workers),
            "--dist",
            "worksteal",
            "-p",
            "recorder",
            "-m",
            marks,
            "--tb=short",
            "-rf",
            *some,
        ]
        status, output = tree.pytest(more, 3600, MEMOIRE_RECORD=str(folder))
        (FOLDER / "recording.txt").write_text(output)
        say(output[-1000:])
        if status not in (0, 1, 5):  # pytest leaves out failed tests; 5: no test has these marks
            raise SystemExit(f"the tests could not be recorded: see {FOLDER / 'recording.txt'}")
        former |= {name: now[name] for name in some}
        noted.write_text(json.dumps({name: value for name, value in former.items() if name in now}))
    return Recording.read(folder)


def forget(folder: Path, files: set[str]) -> None:
    """Drop the records of these test files."""
    for path in folder.glob("*.jsonl"):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(line for line in lines if json.loads(line)["test"].partition("::")[0] not in files))


def mentioning(file: str, recording: Recording) -> set[str]:
    """Return tests in files that name this module, for functions that only killed child processes call."""
    stem = Path(file).stem
    named = {name_of(path) for path in test_files() if stem in path.read_text(encoding="utf-8")}
    return {test for test in recording.seconds if test.partition("::")[0] in named}


class Examiner:
    """Trials of mistakes in one copy of the checkout."""

    def __init__(self, tree: Tree, recording: Recording) -> None:
        self._tree, self._recording = tree, recording
        self._unreliable: set[str] = set()

    def examine(self, place: Place, number: int, tests: list[str] | None, seconds: float) -> tuple[Verdict, int]:
        """Return the verdict on a mistake and the number of tests tried; `seconds` bounds their time together.

        Args:
            number: Number of a mistake in the kernels; 0 for other mistakes.
            tests: Tests to run; None chooses by the records.
        """
        source = (ROOT / place.file).read_bytes()
        if not number:
            self._tree.write(place.file, place.planted(source))
        try:
            if tests is not None:
                return self._tree.try_tests(tests, 120.0, MEMOIRE_MUTANT=str(number)), len(tests)
            return self._search(place, number, seconds)
        finally:
            self._tree.write(place.file, source)

    def _candidates(self, place: Place, number: int) -> list[str]:
        known = (
            self._recording.kernels[number] if number else self._recording.functions[f"{place.file}|{place.function}"]
        )
        chosen = known or (set() if number else mentioning(place.file, self._recording))
        looking = set()
        if not place.function and not number:  # runs when the module is imported, before any test
            looking = {test for test in self._recording.seconds if test.startswith(LOOKING)}
        chosen = {test for test in chosen if test in self._recording.seconds} | looking
        return self._recording.nearest(place.file, chosen, looking)

    def _search(self, place: Place, number: int, most: float) -> tuple[Verdict, int]:
        waiting, tried, spent = self._candidates(place, number), 0, 0.0
        while waiting and spent < most:
            some = self._some(waiting, most if spent else min(most, FIRST_SECONDS))
            each = [self._recording.seconds[test] for test in some]
            seconds = sum(each)
            verdict = self._tree.try_tests(some, seconds, max(each), MEMOIRE_MUTANT=str(number))
            if verdict.found and self._is_sure(verdict, place):
                return verdict, tried + len(some)
            waiting = [test for test in waiting if test not in set(some) or (verdict.found and test != verdict.by)]
            waiting = [test for test in waiting if test not in self._unreliable]
            tried, spent = tried + len(some), spent + seconds
        return Verdict(False, ""), tried

    def _some(self, waiting: list[str], share: float) -> list[str]:
        total, some = 0.0, []
        for test in waiting:
            total += self._recording.seconds[test] + 0.01
            if some and total > share:
                break
            some.append(test)
        return some

    def _is_sure(self, verdict: Verdict, place: Place) -> bool:
        """Return True unless the failed test depends on the machine and fails without the mistake, too."""
        seconds = self._recording.seconds.get(verdict.by)
        if seconds is None or (seconds < SURE_SECONDS and not verdict.is_late):
            return True
        mistaken = (self._tree.folder / place.file).read_bytes()
        self._tree.write(place.file, (ROOT / place.file).read_bytes())
        again = self._tree.try_tests([verdict.by], seconds, seconds)
        self._tree.write(place.file, mistaken)
        if again.found:
            self._unreliable.add(verdict.by)
        return not again.found


class Results:
    """Results of tried mistakes, kept in a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self.rows: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def put(self, key: str, row: dict[str, Any]) -> None:
        with self._lock:
            self.rows[key] = row
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(self.rows, indent=1))
            os.replace(part, self._path)

    def is_open(self, key: str, limit: float) -> bool:
        """Return True if the mistake was neither found nor tried for that long."""
        row = self.rows.get(key)
        return row is None or not (row["found"] or row["limit"] >= limit)

    def forget(self, keys: list[str]) -> None:
        """Drop results of mistakes that were not found, so that these are tried again."""
        for key in keys:
            if key in self.rows and not self.rows[key]["found"]:
                del self.rows[key]


Job = tuple[Place, int, list[str] | None]


def jobs_of(seed: int) -> list[Job]:
    """Return all mistakes: in Python, in the kernels with their numbers, and by hand."""
    by_hand: list[Job] = []
    named: dict[str, list[str]] = {}
    for row in toml("by_hand.toml", "mistake"):
        place = place_by_hand(row)
        if place is not None and place.file in kernels.FILES:  # the file is compiled, and so among the kernels' places
            named |= {row["why"]: row["tests"]} if "tests" in row else {}
            continue
        if place is None:
            say(f"by_hand.toml: {row['file']} does not have exactly once: {row['old']!r}")
        else:
            by_hand.append((place, 0, row.get("tests")))
    python: list[Job] = [(place, 0, None) for place in drawn(seed)]
    built = [
        (place, number, named.get(place.statement) if place.kind == "by hand" else None)
        for number, place in enumerate(kernel_places(), 1)
    ]
    return python + built + by_hand


def in_parallel(trees: list[Tree], recording: Recording, jobs: list[Job], results: Results, limit: float) -> None:
    """Try these mistakes, each in a free copy."""
    free: SimpleQueue[Examiner] = SimpleQueue()
    for tree in trees:
        free.put(Examiner(tree, recording))

    def work(job: Job) -> None:
        (place, number, tests), examiner, began = job, free.get(), time.monotonic()
        try:
            verdict, tried = examiner.examine(place, number, tests, limit)
        finally:
            free.put(examiner)
        seconds = time.monotonic() - began
        row = {"found": verdict.found, "by": verdict.by, "tried": tried, "limit": limit, "seconds": round(seconds, 1)}
        results.put(place.key, row)
        words = f"found by {verdict.by}" if verdict.found else f"NOT FOUND by {tried} tests"
        say(f"{place.file}:{place.line} {place.kind}: {place.old[:60]} -> {place.new[:60]}: {words} ({seconds:.0f} s)")

    with ThreadPoolExecutor(len(trees)) as pool:
        list(pool.map(work, jobs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--workers", type=int, default=2, choices=(1, 2, 3, 4))
    parser.add_argument("--again", action="store_true", help="try again the mistakes that were not found")
    parser.add_argument("--only", default="", metavar="WORD", help="only places whose file or line has this in it")
    parser.add_argument("--quick", action="store_true", help="leave out tests that start processes")
    parser.add_argument("--write", type=Path, help="page to write the results to")
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    trees = set_up(args.workers, args.seed)
    for tree in trees:
        if tree.try_tests([SOUND], 10.0).found:  # otherwise every mistake seems found
            raise SystemExit(f"{SOUND} fails without any mistake in {tree.folder}: see build/output.txt there")
    recording = record(trees[0], args.workers, MARKS + QUICK * args.quick)
    results = Results(FOLDER / "results.json")
    jobs = [job for job in jobs_of(args.seed) if args.only in job[0].key]
    proofs = {row["key"]: row["proof"] for row in toml("equivalent.toml", "equivalent")}
    open_jobs = [job for job in jobs if job[0].key not in proofs]
    if args.again:
        results.forget([job[0].key for job in open_jobs])
    for limit in (FIRST_SECONDS, ALL_SECONDS):
        left = [job for job in open_jobs if results.is_open(job[0].key, limit)]
        say(f"{len(left)} of {len(jobs)} mistakes to try, by tests that take {limit:g} s together")
        in_parallel(trees, recording, left, results, limit)
    return report(args.seed, [place for place, _, _ in jobs], results.rows, proofs, args.write)


def state_of(place: Place, rows: dict[str, dict[str, Any]], proofs: dict[str, str]) -> str:
    if place.key in proofs:
        return "equivalent"
    row = rows.get(place.key)
    return "not tried" if row is None else "found" if row["found"] else "not found"


def report(
    seed: int, places: list[Place], rows: dict[str, dict[str, Any]], proofs: dict[str, str], page: Path | None
) -> int:
    """Report the results; return 1 unless enough mistakes were found."""
    states = {place.key: state_of(place, rows, proofs) for place in places}
    count = Counter(states.values())
    text = pages_text(seed, places, states, rows, proofs)
    if page:
        page.write_text(text, encoding="utf-8")
    say(", ".join(f"{number} {state}" for state, number in sorted(count.items())))
    tried = count["found"] + count["not found"]
    enough = count["found"] >= WANTED_SHARE * tried and count["equivalent"] <= EQUIVALENT_SHARE * len(places)
    return 0 if enough and not count["not tried"] else 1


HEAD = """# Planted mistakes

For contributors who change tests: results of `make mutants`. It plants one mistake at a time in a copy of the code and looks
whether a test fails. {count} places were drawn by the seed {seed}; `tests/mutants/by_hand.toml` names {by_hand} more.
Annotations, messages and log lines for debugging are left alone, and so are files whose tests need a package that is not
installed ({absent}). A mistake is tried by the tests that enter its function.

**{found} of {tried} were found ({share:.1f} %); {equivalent} change nothing visible.**
"""


def line_of(place: Place) -> str:
    old, new = (" ".join(text.split()).replace("`", "'")[:110] for text in (place.old, place.new))
    statement = " ".join(place.statement.split()).replace("`", "'")
    return f"`{place.file}` `{place.function or 'module'}`, {place.kind}: `{old}` became `{new}` in `{statement}`"


def table(title: str, names: list[str], of: Any, places: list[Place], states: dict[str, str]) -> list[str]:
    lines = ["", f"| {title} | mistakes | found | not found | equivalent |", "| --- | ---: | ---: | ---: | ---: |"]
    for name in names:
        count = Counter(states[place.key] for place in places if of(place) == name)
        if count:
            cells = [sum(count.values()), count["found"], count["not found"], count["equivalent"]]
            lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    return lines


def pages_text(
    seed: int, places: list[Place], states: dict[str, str], rows: dict[str, dict[str, Any]], proofs: dict[str, str]
) -> str:
    by_hand = [place for place in places if place.kind == "by hand"]
    others = [place for place in places if place.kind != "by hand"]
    count = Counter(states.values())
    tried = count["found"] + count["not found"]
    head = HEAD.format(
        count=len(others),
        seed=seed,
        by_hand=len(by_hand),
        found=count["found"],
        tried=tried,
        share=100 * count["found"] / max(1, tried),
        equivalent=count["equivalent"],
        absent=", ".join(file for file, package in NEEDS.items() if not find_spec(package)) or "none here",
    )
    lines = table("folder", list(QUOTAS), lambda place: folder_of(place.file), others, states)
    lines += table("kind", list(KINDS), lambda place: place.kind, others, states)
    missed = [place for place in places if states[place.key] == "not found"]
    lines += ["", "## Not found", "", *([f"* {line_of(place)}" for place in missed] or ["None."])]
    same = [place for place in places if states[place.key] == "equivalent"]
    lines += ["", "## Equivalent", "", *([f"* {line_of(place)}. {proofs[place.key]}" for place in same] or ["None."])]
    lines += ["", "## Planted by hand", "", "| mistake | file | found by |", "| --- | --- | --- |"]
    for place in by_hand:
        by = rows.get(place.key, {}).get("by", "") or states[place.key]
        lines.append(f"| {place.statement} | `{place.file}` | `{by.replace('|', '/')}` |")
    lines += ["", "Next: [CONTRIBUTING.md](../../../CONTRIBUTING.md) has the other commands."]
    return head + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
