"""How fast are log lines saved and searched, and how fast does a server start over many of them?

Half a million lines of 300 clients in one run, saved in groups of 5000, and searched from the beginning: what is found
at the very end, or not at all, has looked at every line.
"""

import argparse
import sys
import time

from _kit import end, folder, say, table

from memoire.accounting.logbook import LineFilter, LogEntry
from memoire.accounting.runs import RunFacts, SavedGroup
from memoire.disk.state_folder import Store
from memoire.limits import Limits
from memoire.wire.messages import Line


def timed(work: object) -> tuple[float, object]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.0, help="ignored: the number of lines decides")
    parser.add_argument("--lines", type=int, default=500_000)
    given = parser.parse_args()
    clients = [n.to_bytes(16, "big") for n in range(300)]
    text = "episode {} of {} steps ended with a return of {:.2f}, and some words more to fill the line"

    def entry(n: int) -> LogEntry:
        return LogEntry(n, clients[n % 300], float(n), Line(n, float(n), n % 300, text.format(n, n % 997, n * 0.37)))

    rows, violations = [], []
    with folder() as place:
        store = Store(place / "state", "home", limits=Limits(log_bytes=1 << 30))
        store.save(SavedGroup(runs=[RunFacts("run")]))

        def fill() -> None:
            for start in range(1, given.lines + 1, 5000):
                ends = min(start + 5000, given.lines + 1)
                store.save(SavedGroup(lines=[("run", entry(n)) for n in range(start, ends)]))

        seconds, _ = timed(fill)
        rows.append((f"save {given.lines:,} lines", f"{seconds:.1f} s", f"{given.lines / seconds:,.0f} lines/s"))
        say(rows[-1])
        searches = {
            "a text that is nowhere": (LineFilter(text="nowhere"), 0),
            "a text in the last line": (LineFilter(text=f"episode {given.lines} of"), 1),
            "a client that is nowhere": (LineFilter(client=b"x" * 16), 0),
            "the newest 100 of a client": (LineFilter(client=clients[7]), 100),
            "the last hundred seconds": (LineFilter(since=given.lines - 99.0), 100),
        }
        for name, (asked, expected) in searches.items():
            seconds, found = timed(
                lambda name=name, asked=asked: store.search("run", asked, newest_first="newest" in name)
            )
            rows.append((f"search: {name}", f"{1e3 * seconds:.1f} ms", f"{len(found)} found"))
            if len(found) != expected:
                violations.append(f"{name}: {len(found)} lines, expected {expected}")
        store.close()
        seconds, store = timed(lambda: Store(place / "state"))
        rows.append(("start, everything checked", f"{1e3 * seconds:.0f} ms", f"{store.line_count('run'):,} lines"))
        store.close()
    print(table(["", "time", ""], rows))
    return end(violations)


if __name__ == "__main__":
    sys.exit(main())
