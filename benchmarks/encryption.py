"""How much of a server's ingest is left when everything is encrypted, and what do more I/O threads or proxies bring?"""

import tempfile
from pathlib import Path
from typing import Any

from measure import Report, arguments
from workloads import w1

from memoire.security import provision as key_writer
from wire import Ingest, compare

FOLLOWS = """Senders, proxies and server run on the same cores: both sides of each connection pay on them, and only
the ratios say something. Where one I/O thread already finds no further core, more threads and proxies bring little.
Encryption is the work of ZeroMQ's I/O threads, and a connection belongs to one of them: a server whose ingest it
bounds takes more threads (`--io-threads 4`, or `process=Process(context=zmq.Context(4))`) and as many connections
(actors, or proxies), on as many cores. `ipc://` from a relay to the actors of its pod is not encrypted and costs
nothing."""


def main() -> None:
    chosen = arguments(__doc__)
    report = Report(__doc__, [FOLLOWS])
    report.heading()
    pace: dict[str, Any] = {"count": 200, "rounds": 2} if chosen.quick else {"count": 1600, "rounds": 5}
    with tempfile.TemporaryDirectory() as folder:
        keys = str(Path(folder) / "keys")
        key_writer.write_cluster(Path(keys))
        for senders, threads, proxies in ((1, 1, 0), (2, 1, 0), (2, 2, 0), (2, 1, 1), (2, 1, 2), (2, 2, 2)):
            what = f"{senders} senders, {threads} I/O threads, {proxies} proxies"
            if chosen.only not in what:
                continue
            ours, theirs = (
                Ingest(w1(), senders=senders, threads=threads, proxies=proxies, keys=each) for each in (keys, None)
            )
            what, size = f"caches of {ours.message_bytes} bytes, encrypted, {what}", ours.message_bytes
            baseline = "the same without keys"
            report.add(compare(what, ours, theirs, per_message=size, unit="B/s", baseline=baseline, **pace))
            ours.close()
            theirs.close()
    report.finish(chosen.write, "encryption")


if __name__ == "__main__":
    main()
