"""How the benchmarks measure: the sides of a comparison take turns in one run, and the ratio is what counts.

A shared machine is noisy, so that a figure alone says little; two figures taken a moment apart share the noise. Each
side is called often enough to fill a time slice, the slices of both alternate, and the ratio is taken in each round.
"""

import argparse
import json
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from aims import read
from aims import write as write_aims
from peers import NAMES, PATIENCE, Company, PeerUnavailable
from peers.tasks import clock, from_the_first

Side = Callable[[], object]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of what was measured."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if len(values) < 2:
            return cls.one(values[0])
        low, _, high = quantiles(values, n=4)
        return cls(low, median(values), high)

    @classmethod
    def one(cls, value: float) -> "Spread":
        """Of what was measured once."""
        return cls(value, value, value)


@dataclass(frozen=True)
class Result:
    """One row: what was done, how fast on both sides, and how they compare (above 1: memoire is faster)."""

    what: str
    unit: str
    ours: Spread
    theirs: Spread
    ratio: Spread
    baseline: str
    aim: str = ""
    """The row of aims.toml that this ratio answers."""


@dataclass
class Report:
    """The rows of one file, printed as they come; written as a page, a plot and figures at the end."""

    question: str
    facts: list[str]
    """Paragraphs below the table: what the workloads are, what follows."""
    place: str | None = None
    """A folder for the page, or the page, whose name the plot and the figures have, too. None: write nothing."""
    only: str = ""
    quick: bool = False
    better: str = "faster"
    """What a ratio above 1 says that memoire is."""
    company: Company = field(default_factory=lambda: Company("none"))
    results: list[Result] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def begin(
        cls, question: str, *facts: str, better: str = "faster", peers: bool = False, patience: float = PATIENCE
    ) -> "Report":
        """Read the flags, and print the head of the table.

        Args:
            peers: Whether there are peers to compare with.
            patience: Seconds in which a peer has to start, or to take a turn.
        """
        given = arguments(question, peers=peers)
        company = Company(given.peers if peers else "none", patience)
        print(f"{question}\n{machine()}\n\n{HEAD}", flush=True)
        return cls(question, list(facts), given.write, given.only, given.quick, better, company)

    def wants(self, what: str) -> bool:
        """Whether a row of this name is to be measured."""
        return self.only in what

    def add(self, *results: Result) -> None:
        self.results += results
        for result in results:
            print(line(result), flush=True)

    def compare(self, what: str, ours: Side, theirs: Mapping[str, Side], **settings: Any) -> dict[str, Side]:
        """Add a row for each baseline, by `contest`; returns the baselines without peers that failed."""
        theirs = dict(theirs)
        while True:
            try:
                self.add(*contest(what, ours, theirs, **settings))
                return theirs
            except PeerUnavailable as error:
                self.company.leave_out(error)
                theirs = {each: side for each, side in theirs.items() if NAMES[error.name] not in each}

    def finish(self, script: str) -> None:
        """Write a page, a plot and figures, and what follows for the aims.

        Args:
            script: Whose report this is, and what its page is called in a folder.
        """
        print(f"took {time.monotonic() - self.began:.0f} s")
        if self.place and self.results:
            path = Path(self.place) if self.place.endswith(".md") else Path(self.place, f"{script}.md")
            path.parent.mkdir(parents=True, exist_ok=True)
            rows, facts = "\n".join(map(line, self.results)), "\n\n".join([*self.facts, *self.company.facts()])
            where = path.stem.removeprefix(script).replace("-", " ").strip()
            told = {"question": self.question, "machine": machine(), "rows": rows, "facts": facts}
            told["title"] = f"benchmarks/{script}.py" + (f", {where}" if where else "")
            page = PAGE.format(name=path.stem, better=self.better, **told)
            path.write_text(page.rstrip() + "\n", encoding="utf-8")
            draw(self.results, path.with_suffix(".svg"), f"memoire is {self.better} by this factor")
            aims = {each.aim: each.ratio for each in self.results if each.aim}
            record(str(path.parent), path.stem, aims, self.results)
            print(f"written to {path}")


def record(folder: str, name: str, aims: Mapping[str, Spread], results: Sequence[Result] = ()) -> None:
    """Write the figures that answer rows of aims.toml to `name`.json, and the table of all aims anew.

    Args:
        folder: docs/benchmarks, or another.
        name: The benchmark's.
        aims: By the row's key what was measured: a ratio as the row wants it.
        results: All rows of the benchmark, kept with them.
    """
    figures = {
        "machine": machine(),
        "aims": {key: [round(value, 4) for value in asdict(spread).values()] for key, spread in aims.items()},
        "rows": [[each.what, each.baseline, float(f"{each.ratio.middle:.4g}")] for each in results],
    }
    Path(folder, f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    write_aims(Path(folder))


@contextmanager
def plot(path: Path, width: float, height: float, **grid: int) -> Iterator[Any]:
    """The axes of a plot, which is written at the end as an SVG; the same figures give the same small file.

    Args:
        width, height: Of all, in inches.
        grid: `nrows` and `ncols`, for several axes.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": path.stem, "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(**grid, figsize=(width, height), layout="constrained")
    yield axes
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def draw(results: Sequence[Result], path: Path, label: str) -> None:
    """A bar for each row: the ratio, which `label` says the meaning of."""
    names = list(dict.fromkeys(each.baseline.split()[0] for each in results))
    labels = [f"{each.what}: {each.baseline.split(',')[0]}" for each in results]
    with plot(path, 4.0 + 0.075 * max(map(len, labels)), 0.28 * len(results) + 1.0) as axes:
        for place, each in enumerate(results[::-1]):
            ratio, name = each.ratio.middle, each.baseline.split()[0]
            axes.barh(place, ratio - 1.0, left=1.0, color=f"C{names.index(name) % 10}")
            text = f"{ratio:.3g}" if ratio < 1000 else f"{ratio:.0f}"
            axes.annotate(text, (max(1.0, ratio) * 1.08, place), va="center")
        axes.set_yticks(range(len(results)), labels[::-1])
        axes.axvline(1.0, color="black", linewidth=0.8)
        middles = [each.ratio.middle for each in results]
        axes.set(xscale="log", xlim=(min(0.5, *middles), 3.0 * max(1.0, *middles)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.figure.supxlabel(label, fontsize="medium")
        axes.margins(y=0.01)


def cells(*values: object) -> str:
    """A row of a table."""
    return f"| {' | '.join(map(str, values))} |"


def head(*names: str, left: int = 1) -> str:
    """The first two lines of a table, whose first `left` columns are text."""
    return cells(*names) + "\n" + cells(*["---"] * left, *["---:"] * (len(names) - left))


HEAD = "| what | memoire | baseline | ratio (quartiles) | aim | baseline is |\n| --- | ---: | ---: | --- | ---: | --- |"
PAGE = f"""# {{title}}

{{question}}

{{machine}}

Medians; the sides took turns in one run, and the ratio was taken in each round: above 1, memoire is {{better}}.

{HEAD}
{{rows}}

![ratios]({{name}}.svg)

{{facts}}
"""


def write_page(folder: str | Path, script: str, question: str, *parts: str) -> None:
    """A page that has no table of ratios: a title, the question, the machine, and these parts."""
    path = Path(folder, f"{script}.md")
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = [f"# benchmarks/{script}.py", question, machine(), *parts]
    path.write_text("\n\n".join(part.strip() for part in whole) + "\n", encoding="utf-8")


def line(result: Result) -> str:
    """A row of the table."""
    ratio = f"{result.ratio.middle:.2f} ({result.ratio.low:.2f} to {result.ratio.high:.2f})"
    ours, theirs = (f"{amount(side.middle)}{result.unit}" for side in (result.ours, result.theirs))
    aim = read()[result.aim] if result.aim else ""
    return cells(result.what, ours, theirs, ratio, aim, result.baseline)


def amount(value: float) -> str:
    """1234567.0 -> '1.23 M'."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g} "


def machine() -> str:
    """What this ran on."""
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((text.split(":", 1)[1].strip() for text in file if text.startswith("model name")), model)
    libraries = ", ".join(f"{name} {installed(name)}" for name in ("numpy", "pyzmq", "msgspec", "memoire-rl"))
    load = os.getloadavg()[0]
    system = f"{platform.system()}, Python {platform.python_version()}"
    return f"{model}, {os.cpu_count()} cores, load {load:.1f}, {system}, {libraries}"


def installed(name: str) -> str:
    """The version of a distribution."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "from source"


def calls_per_slice(side: Side, seconds: float) -> int:
    """How often to call `side` to fill about `seconds`, or `side.most` times where it says that there is no more."""
    most = getattr(side, "most", None)
    if most is not None:
        return int(most)
    side()
    count = 1
    while True:
        taken = clock(side, count)
        if taken >= seconds / 4:
            return max(1, round(count * seconds / taken))
        count *= 4


def contest(
    what: str,
    ours: Side,
    theirs: Mapping[str, Side],
    *,
    unit: str = "/s",
    per_call: float = 1.0,
    rounds: int = 15,
    seconds: float = 0.05,
    aims: Mapping[str, str] | None = None,
) -> list[Result]:
    """Let memoire and its baselines take turns.

    Args:
        what: What a row is called: workload, shapes, dtypes.
        ours: Does the thing once with memoire. A side may have `prepare()`, called before each turn, and `most`, the
            calls of a turn; one in another process has `clock(count)`.
        theirs: Do the same, by what they are in words.
        unit: What is counted per second.
        per_call: How many of them one call does.
        rounds: How often each side has its turn.
        seconds: About how long one turn takes.
        aims: The rows of aims.toml that are answered, by the baseline.
    """

    def take(side: Side, count: int) -> float:
        getattr(side, "prepare", lambda: None)()
        return count * per_call / clock(side, count)

    counts = {side: calls_per_slice(side, seconds) for side in (ours, *theirs.values())}
    rates = in_turns([partial(take, side, count) for side, count in counts.items()], rounds)
    return results(what, rates, list(theirs), unit, aims)


def in_turns(takes: Sequence[Callable[[], Any]], rounds: int) -> list[list[Any]]:
    """What each returned in each round; every other round goes the other way, so that nobody is always first.

    One more round comes before these, and is not counted: connections are there then, and caches are warm.
    """
    found: list[list[Any]] = [[] for _ in takes]
    for turn in range(rounds + 1):
        for place in list(range(len(takes)))[:: 1 if turn % 2 else -1]:
            found[place].append(takes[place]())
    return [each[1:] for each in found]


def results(
    what: str, rates: Sequence[Sequence[float]], baselines: Sequence[str], unit: str, aims: Mapping[str, str] | None
) -> list[Result]:
    """A row for each baseline; the first rates are memoire's, the others' follow."""
    ours, *others = rates
    found = []
    for baseline, theirs in zip(baselines, others, strict=True):
        ratio = Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])
        aim = (aims or {}).get(baseline, "")
        found.append(Result(what, unit, Spread.of(ours), Spread.of(theirs), ratio, baseline, aim))
    return found


def arguments(description: str, *, peers: bool = False, **numbers: int) -> argparse.Namespace:
    """The flags that every benchmark has; `peers` adds whom to compare with, `numbers` flags of their names with their
    defaults.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--write", metavar="FOLDER", help="also write the table as a page there, or as FOLDER/PAGE.md")
    parser.add_argument("--only", default="", metavar="WORD", help="only the rows with this word in their name")
    parser.add_argument("--quick", action="store_true", help="small memories and few rounds: to see that it runs")
    if peers:
        known = ",".join(NAMES)
        parser.add_argument("--peers", default=known, metavar="NAMES", help=f"whom to compare with: {known}, or none")
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{default}, if it is left out")
    return parser.parse_args()


def resident(pid: int | str) -> int:
    """Bytes of memory that a process has."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def spent_by(pids: Iterable[int]) -> float:
    """Seconds of CPU that these processes have taken, all of their threads together."""
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def family_of(pid: int) -> list[int]:
    """A process and all that descend from it."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    family = [pid]
    for each in family:
        family += [child for child, parent in parents.items() if parent == each]
    return family


TCP = "tcp://127.0.0.1:0"


class Child:
    """A process that does one thing each time it is told how often; it ends with this one."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()
        self.first_answer = self.answer()

    def answer(self, timeout: float = 120.0) -> Any:
        if not self.pipe.poll(timeout):
            raise TimeoutError(f"no answer from {self.process.name} within {timeout} s")
        return self.pipe.recv()

    @property
    def pid(self) -> int:
        return int(self.process.pid or 0)

    def tell(self, order: Any) -> None:
        self.pipe.send(order)

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()


def tell(children: Iterable[Child], order: Any) -> None:
    """Give all of them the same order."""
    for child in children:
        child.tell(order)


def ask(children: Iterable[Child], order: Any, timeout: float = 120.0) -> list[Any]:
    """Give all of them the same order; returns their answers."""
    tell(children, order)
    return [child.answer(timeout) for child in children]


def close(*sides: Any) -> None:
    for side in sides:
        side.close()


class Embedded:
    """A server in this process, its actors in others: a side whose turn is so many batches, from the first on.

    Args:
        draw: Takes the next batch.
        act: An actor's process, called with its pipe, the server's endpoint, what is given, and the actor's number. It
            is told for how many batches it has to insert.
    """

    def __init__(
        self, server: Any, draw: Callable[[], object], most: int, act: Callable[..., None], actors: int, *given: Any
    ) -> None:
        self.server, self.draw, self.most = server, draw, most
        self.children = [Child(act, server.endpoint, *given, rank) for rank in range(actors)]

    def clock(self, count: int) -> float:
        tell(self.children, count // len(self.children))
        return from_the_first(self.draw, count)

    def close(self) -> None:
        close(*self.children, self.server)


def serve(pipe: Any, serving: Any) -> None:
    """Keep this open in a process of its own, and say where it is, until the pipe says None."""
    with serving:
        pipe.send(serving.endpoint)
        while pipe.recv() is not None:
            pass
