"""How much memory can peers make a server or an inference node take, with requests of every kind at their largest?

A server or node with `message_bytes` of 4 MiB and `held_bytes` of 64 MiB, in a process of its own for each kind, and
eight connections that ask as fast as they are answered, or push as fast as there is room. Its anonymous memory may grow
by `held_bytes`, what is on its way, one `message_bytes` for each connection, and 10 % of that; where models are
published, also by `model_bytes` for models and for uploads. Caches are as large as their table says. The C library of
the inference node gives freed blocks back at once (MALLOC_MMAP_THRESHOLD_): it would keep some tens of MiB of them.
What `/status` says of its holders adds up to the use of its budget.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter

from _kit import end, say, table

MIB = 1 << 20
MESSAGE, HELD, MODELS, CONNECTIONS = 4 * MIB, 64 * MIB, 4 * MIB, 8
SILENCE = 20
"""Seconds without a reply after which a peer gives up."""
MOST = 1.1 * (HELD + CONNECTIONS * MESSAGE + CONNECTIONS * MESSAGE)
"""Bytes of growth: of what is held, on its way (each connection has one request and its reply), and received."""


def started(kind):
    """A server for this kind, or an inference node, and the addresses for requests and pushes."""
    import bytekit
    from memoire import Server
    from memoire.inference.node import Inference
    from memoire.limits import Limits

    limits = Limits(message_bytes=MESSAGE, held_bytes=HELD, request_bytes=MESSAGE, model_bytes=MODELS)
    if kind in bytekit.NODE_KINDS:
        made = Inference("tcp://127.0.0.1:*", bytekit.ROWS, bytekit.ROWS, answered, limits=limits)
        return made, [made.endpoint, ""]
    made = Server("tcp://127.0.0.1:*", tables=bytekit.tables_of(kind, MESSAGE), limits=limits)
    return made, [made.endpoint, made.push_endpoint]


def answered(columns):
    """The rows of a batch again."""
    return {name: columns[name] for name in ("points", "points_length", "x")}


def serve(kind):
    made, addresses = started(kind)
    with made:
        print(json.dumps(addresses), flush=True)
        while line := sys.stdin.readline():
            stats = made.stats()
            print(json.dumps(stats.holders), flush=True)
            if not line.strip():
                return


def anonymous(pid):
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def attack(addresses, kind, number, until, counts):
    import zmq

    import bytekit
    from memoire.limits import Limits
    from memoire.wire import messages
    from memoire.wire.frames import parse

    limits = Limits(message_bytes=64 * MIB, request_bytes=64 * MIB)
    doors = {}
    for address, type_ in zip(addresses, (zmq.DEALER, zmq.PUSH), strict=True):
        if address:
            doors[type_] = made = zmq.Context.instance().socket(type_)
            made.setsockopt(zmq.LINGER, 0)
            made.setsockopt(zmq.SNDTIMEO, 1000 * SILENCE)
            made.setsockopt(zmq.SNDHWM, 2)
            made.connect(address)
    requests = (bytekit.KINDS | bytekit.NODE_KINDS)[kind](number, MESSAGE)
    request = next(requests)
    for sequence in range(1, 1 << 40):
        if time.monotonic() > until:
            break
        frames, told = bytekit.frames_of(request, number, sequence), None
        if isinstance(request[1], bytekit.PUSHED):
            doors[zmq.PUSH].send_multipart(frames)
            counts["pushed"] += 1
        else:
            doors[zmq.DEALER].send_multipart([b"", *frames])
            if kind in bytekit.UNREAD and sequence > 2:
                counts["not read"] += 1
                time.sleep(0.01)
                request = requests.send(None)
                continue
            if kind != "rows_that_wait" and not doors[zmq.DEALER].poll(1000 * SILENCE):
                counts["not answered"] += 1
                break
            while doors[zmq.DEALER].poll(50 if kind == "rows_that_wait" else 0):
                told = parse(doors[zmq.DEALER].recv_multipart()[1:], limits).body
                counts[told.code if isinstance(told, messages.Refused) else "taken"] += 1
        request = requests.send(told)
    for made in doors.values():
        made.close()


def measured(kind, seconds):
    import bytekit

    command = [sys.executable, __file__, "--serve", kind]
    gives_back = {"MALLOC_MMAP_THRESHOLD_": str(MIB)} if kind in bytekit.NODE_KINDS else {}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, **gives_back}, **pipes) as child:
        where = json.loads(child.stdout.readline())
        before, counts, until = anonymous(child.pid), Counter(), time.monotonic() + seconds
        peers = [
            threading.Thread(target=attack, args=(where, kind, number, until, counts))
            for number in range(1, 1 + CONNECTIONS)
        ]
        for peer in peers:
            peer.start()
        peak = 0
        while any(peer.is_alive() for peer in peers):
            peak = max(peak, anonymous(child.pid) - before)
            if peak > 8 * MOST:
                child.kill()
                break
            time.sleep(0.02)
        budget = {}
        if child.poll() is None:
            try:
                child.stdin.write("\n")
                child.stdin.flush()
                budget = json.loads(child.stdout.readline() or "{}")
            except (OSError, ValueError):
                pass
    return peak, counts, budget


def main() -> int:
    import bytekit

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each kind")
    parser.add_argument("--serve", help="in a child: the kind of requests that come")
    parser.add_argument("kinds", nargs="*", help="some of them alone")
    given = parser.parse_args()
    if given.serve:
        serve(given.serve)
        return 0
    rows, violations = [], []
    for kind in given.kinds or bytekit.KINDS | bytekit.NODE_KINDS:
        peak, counts, budget = measured(kind, given.seconds)
        held, most = sum(budget.values()), MOST + (2.2 * MODELS if kind.startswith("models") else 0)
        say(kind, f"{peak / MIB:.0f} MiB", dict(counts), budget)
        rows.append((kind.replace("_", " "), sum(counts.values()), counts["taken"] + counts["pushed"], f"{peak / MIB:.0f}",
                     f"{held / MIB:.0f}"))  # fmt: skip
        if peak > most:
            violations.append(f"{kind}: grew by {peak / MIB:.0f} MiB; {most / MIB:.0f} are allowed")
        if not counts["taken"] + counts["pushed"] and kind not in ("rows_that_wait", "rows_whose_answers_are_refused"):
            violations.append(f"{kind}: nothing was taken: {dict(counts)}")
    print(table(["", "requests", "granted", "growth, MiB", "held, MiB"], rows))
    return end(violations)


if __name__ == "__main__":
    sys.exit(main())
