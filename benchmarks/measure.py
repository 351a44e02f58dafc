"""Measurement and reports of the benchmarks: the sides of a comparison take turns in a run, and the result is a ratio.

A shared machine is noisy, so that a single figure says little; two figures measured a moment apart share the noise.
The calls of each side fill a time slice, the slices of all sides alternate, and each round gives a ratio.
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
from peers import ANSWER_TIMEOUT, NAMES, PeerGroup, PeerUnavailable
from peers.tasks import clock, from_the_first

Side = Callable[[], object]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of measured values."""

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
        """Return the spread of a value that was measured once."""
        return cls(value, value, value)


@dataclass(frozen=True)
class Result:
    """Row of a report: the operation, the rates of both sides, and their ratio (above 1: memoire is faster)."""

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
    """Rows of one benchmark, printed as soon as they are measured; written as a page, a plot and figures at the end."""

    question: str
    facts: list[str]
    """Paragraphs below the table, such as the workloads and the conclusions."""
    place: str | None = None
    """Folder for the page, or path of the page, whose name the plot and the figures share. None: write nothing."""
    only: str = ""
    quick: bool = False
    better: str = "faster"
    """Adjective for memoire that a ratio above 1 means."""
    peer_group: PeerGroup = field(default_factory=lambda: PeerGroup("none"))
    results: list[Result] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def begin(
        cls, question: str, *facts: str, better: str = "faster", peers: bool = False, patience: float = ANSWER_TIMEOUT
    ) -> "Report":
        """Parse the command line, print the head of the table, and return the empty report.

        Args:
            peers: True if the benchmark compares with peers.
            patience: Seconds in which a peer has to start, or to take a turn.
        """
        args = arguments(question, peers=peers)
        peer_group = PeerGroup(args.peers if peers else "none", patience)
        print(f"{question}\n{machine()}\n\n{HEAD}", flush=True)
        return cls(question, list(facts), args.write, args.only, args.quick, better, peer_group)

    def wants(self, what: str) -> bool:
        """Return True if --only selects a row of this name."""
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
                self.peer_group.leave_out(error)
                theirs = {each: side for each, side in theirs.items() if NAMES[error.name] not in each}

    def finish(self, script: str) -> None:
        """Write the page, the plot, the figures, and the table of all aims.

        Args:
            script: Name of the benchmark, which is also the name of its page in a folder.
        """
        print(f"took {time.monotonic() - self.began:.0f} s")
        if self.place and self.results:
            path = Path(self.place) if self.place.endswith(".md") else Path(self.place, f"{script}.md")
            path.parent.mkdir(parents=True, exist_ok=True)
            rows, facts = "\n".join(map(line, self.results)), "\n\n".join([*self.facts, *self.peer_group.facts()])
            where = path.stem.removeprefix(script).replace("-", " ").strip()
            parts = {"question": self.question, "machine": machine(), "rows": rows, "facts": facts}
            parts["title"] = f"benchmarks/{script}.py" + (f", {where}" if where else "")
            page = PAGE.format(name=path.stem, better=self.better, **parts)
            path.write_text(page.rstrip() + "\n", encoding="utf-8")
            draw(self.results, path.with_suffix(".svg"), f"memoire is {self.better} by this factor")
            aims = {each.aim: each.ratio for each in self.results if each.aim}
            record(str(path.parent), path.stem, aims, self.results)
            print(f"written to {path}")


def record(folder: str, name: str, aims: Mapping[str, Spread], results: Sequence[Result] = ()) -> None:
    """Write the figures that answer rows of aims.toml to `name`.json, and rewrite the table of all aims.

    Args:
        folder: docs/development/records, or another folder.
        name: Name of the benchmark.
        aims: Measured ratio by the key of its row.
        results: All rows of the benchmark, which are written to the same file.
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
    """Yield the axes of a plot, then write it as an SVG; the same figures give the same small file.

    Args:
        width, height: Size of the whole plot, in inches.
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
    """Draw a bar for the ratio of each row; `label` names the axis."""
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
    """Return a row of a Markdown table."""
    return f"| {' | '.join(map(str, values))} |"


def head(*names: str, left: int = 1) -> str:
    """Return the first two lines of a Markdown table, whose first `left` columns are text."""
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
    """Write a page without a table of ratios: a title, the question, the machine, and these parts."""
    path = Path(folder, f"{script}.md")
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = [f"# benchmarks/{script}.py", question, machine(), *parts]
    path.write_text("\n\n".join(part.strip() for part in whole) + "\n", encoding="utf-8")


def line(result: Result) -> str:
    """Return the line of a result in the report's table."""
    ratio = f"{result.ratio.middle:.2f} ({result.ratio.low:.2f} to {result.ratio.high:.2f})"
    ours, theirs = (f"{amount(side.middle)}{result.unit}" for side in (result.ours, result.theirs))
    aim = read()[result.aim] if result.aim else ""
    return cells(result.what, ours, theirs, ratio, aim, result.baseline)


def amount(value: float) -> str:
    """Return a value with its prefix of size: 1234567.0 becomes '1.23 M'."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g} "


def machine() -> str:
    """Return the processor, cores, load, system and versions of this machine, as text."""
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((text.split(":", 1)[1].strip() for text in file if text.startswith("model name")), model)
    libraries = ", ".join(f"{name} {installed(name)}" for name in ("numpy", "pyzmq", "msgspec", "memoire-rl"))
    load = os.getloadavg()[0]
    system = f"{platform.system()}, Python {platform.python_version()}"
    return f"{model}, {os.cpu_count()} cores, load {load:.1f}, {system}, {libraries}"


def installed(name: str) -> str:
    """Return the version of a distribution, or "from source" if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "from source"


def calls_per_slice(side: Side, seconds: float) -> int:
    """Return the calls of `side` that take about `seconds`, or `side.most` if the side has a fixed number."""
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
    """Measure memoire and its baselines in turns, and return a row for each baseline.

    Args:
        what: Name of the row: workload, shapes, dtypes.
        ours: Call of memoire. A side may have `prepare()`, called untimed before each turn, and `most`, the calls of a
            turn; a side in another process has `clock(count)`.
        theirs: Calls of the baselines, by their description.
        unit: Unit of the rates.
        per_call: Units of work in one call.
        rounds: Measured turns of each side.
        seconds: Approximate duration of a turn.
        aims: Keys of the rows of aims.toml that are answered, by the baseline.
    """

    def take(side: Side, count: int) -> float:
        getattr(side, "prepare", lambda: None)()
        return count * per_call / clock(side, count)

    counts = {side: calls_per_slice(side, seconds) for side in (ours, *theirs.values())}
    rates = measure_rounds([partial(take, side, count) for side, count in counts.items()], rounds)
    return results(what, rates, list(theirs), unit, aims)


def measure_rounds(takes: Sequence[Callable[[], Any]], rounds: int) -> list[list[Any]]:
    """Return the results of each call in each round; every other round runs in reverse order.

    A further round comes first and is not counted: afterwards connections are open, and caches are warm.
    """
    values: list[list[Any]] = [[] for _ in takes]
    for turn in range(rounds + 1):
        for place in list(range(len(takes)))[:: 1 if turn % 2 else -1]:
            values[place].append(takes[place]())
    return [each[1:] for each in values]


def results(
    what: str, rates: Sequence[Sequence[float]], baselines: Sequence[str], unit: str, aims: Mapping[str, str] | None
) -> list[Result]:
    """Return a row for each baseline; the first rates are memoire's, the rates of the baselines follow."""
    ours, *others = rates
    rows = []
    for baseline, theirs in zip(baselines, others, strict=True):
        ratio = Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])
        aim = (aims or {}).get(baseline, "")
        rows.append(Result(what, unit, Spread.of(ours), Spread.of(theirs), ratio, baseline, aim))
    return rows


def arguments(description: str, *, peers: bool = False, **numbers: int) -> argparse.Namespace:
    """Parse the flags that all benchmarks share; `peers` adds --peers, and each of `numbers` adds a flag of its name
    with its default.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--write", metavar="FOLDER", help="also write the table as a page there, or as FOLDER/PAGE.md")
    parser.add_argument("--only", default="", metavar="WORD", help="only the rows with this word in their name")
    parser.add_argument(
        "--quick", action="store_true", help="small memories and few rounds: a check that the benchmark runs"
    )
    if peers:
        known = ",".join(NAMES)
        parser.add_argument(
            "--peers", default=known, metavar="NAMES", help=f"peers to compare with: some of {known}; none for no peer"
        )
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    return parser.parse_args()


def resident(pid: int | str) -> int:
    """Return the resident memory of a process in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def spent_by(pids: Iterable[int]) -> float:
    """Return the CPU seconds that all threads of these processes have used."""
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def family_of(pid: int) -> list[int]:
    """Return the ids of a process and of all its descendants."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has just ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    family = [pid]
    for each in family:
        family += [child for child, parent in parents.items() if parent == each]
    return family


TCP = "tcp://127.0.0.1:0"


class Child:
    """Child process that runs `work` and takes orders over a pipe; None, or the end of this process, ends it."""

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
    """Send the same order to all children."""
    for child in children:
        child.tell(order)


def ask(children: Iterable[Child], order: Any, timeout: float = 120.0) -> list[Any]:
    """Send the same order to all children, and return their answers."""
    tell(children, order)
    return [child.answer(timeout) for child in children]


def close(*sides: Any) -> None:
    for side in sides:
        side.close()


class Embedded:
    """Side with a server in this process and actors in other processes; a turn is timed from its first batch on.

    Args:
        draw: Draws the next batch.
        act: Function of an actor's process, called with its pipe, the server's endpoint, `args`, and the actor's rank.
            An order over the pipe is the number of batches for which the actor has to insert.
    """

    def __init__(
        self, server: Any, draw: Callable[[], object], most: int, act: Callable[..., None], actors: int, *args: Any
    ) -> None:
        self.server, self.draw, self.most = server, draw, most
        self.children = [Child(act, server.endpoint, *args, rank) for rank in range(actors)]

    def clock(self, count: int) -> float:
        tell(self.children, count // len(self.children))
        return from_the_first(self.draw, count)

    def close(self) -> None:
        close(*self.children, self.server)


def serve(pipe: Any, serving: Any) -> None:
    """Send the endpoint of an open node over the pipe, and keep the node open until the pipe sends None."""
    with serving:
        pipe.send(serving.endpoint)
        while pipe.recv() is not None:
            pass
