"""How much memory can peers make a server take, with requests of every kind at their largest?

A server with `message_bytes` of 4 MiB and `held_bytes` of 64 MiB, in a process of its own for each kind, and eight
connections that ask as fast as they are answered. Its anonymous memory may grow by `held_bytes`, what is on its way, one
`message_bytes` for each connection, and 10 % of that. What `/status` says of its holders adds up to the use of its
budget.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections import Counter

from _kit import end, say, table

MIB = 1 << 20
MESSAGE, HELD, CONNECTIONS = 4 * MIB, 64 * MIB, 8
SILENCE = 20
"""Seconds without a reply after which a peer gives up."""
MOST = 1.1 * (HELD + CONNECTIONS * MESSAGE + CONNECTIONS * MESSAGE)
"""Bytes of growth: of what is held, on its way (each connection has one request and its reply), and received."""


def serve(storage):
    import memoire
    from bytekit import ANSWERS
    from memoire import Server
    from memoire.limits import Limits

    limits = Limits(message_bytes=MESSAGE, held_bytes=HELD, request_bytes=MESSAGE)
    tables = {"prompts": memoire.Table(ANSWERS, storage="prompts", group=8)}
    if storage == "caches":
        tables = {"default": memoire.Table({"obs": "f4", "reward": "f4"})}
    with Server("tcp://127.0.0.1:*", tables=tables, limits=limits) as server:
        print(json.dumps({"endpoint": server.endpoint, "push": server.push_endpoint}), flush=True)
        while line := sys.stdin.readline():
            print(json.dumps(server.stats().holders), flush=True)
            if not line.strip():
                return


def anonymous(pid):
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def attack(endpoint, kind, number, until, counts):
    import zmq

    from bytekit import KINDS
    from memoire.limits import Limits
    from memoire.wire import messages
    from memoire.wire.frames import encode, parse
    from memoire.wire.identity import table_number

    limits = Limits(message_bytes=64 * MIB, request_bytes=64 * MIB)
    made = zmq.Context.instance().socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 0)
    made.connect(endpoint)
    requests, told = KINDS[kind](number, MESSAGE), None
    for sequence in range(1, 1 << 40):
        if time.monotonic() > until:
            break
        name, body, payload = requests.send(told) if sequence > 1 else next(requests)
        client, place = number.to_bytes(16, "little"), table_number(name) if name else 0
        frames = encode(body, client=client, sequence=sequence, table=place, payload=payload)
        made.send_multipart([b"", *frames])
        if not made.poll(1000 * SILENCE):
            counts["not answered"] += 1
            break
        told = parse(made.recv_multipart()[1:], limits).body
        counts[told.code if isinstance(told, messages.Refused) else "taken"] += 1
    made.close()


def measured(kind, seconds, storage):
    command = [sys.executable, __file__, "--serve", storage]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        where = json.loads(child.stdout.readline())
        before, counts, until = anonymous(child.pid), Counter(), time.monotonic() + seconds
        peers = [
            threading.Thread(target=attack, args=(where["endpoint"], kind, number, until, counts))
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
    parser.add_argument("--serve", help="in a child: the storage of its table")
    parser.add_argument("kinds", nargs="*", help="some of them alone")
    given = parser.parse_args()
    if given.serve:
        serve(given.serve)
        return 0
    rows, violations = [], []
    for kind in given.kinds or bytekit.KINDS:
        peak, counts, budget = measured(kind, given.seconds, "prompts")
        held = sum(budget.values())
        say(kind, f"{peak / MIB:.0f} MiB", dict(counts), budget)
        rows.append((kind.replace("_", " "), sum(counts.values()), counts["taken"], f"{peak / MIB:.0f}",
                     f"{held / MIB:.0f}"))  # fmt: skip
        if peak > MOST:
            violations.append(f"{kind}: grew by {peak / MIB:.0f} MiB; {MOST / MIB:.0f} are allowed")
    print(table(["", "requests", "granted", "growth, MiB", "held, MiB"], rows))
    return end(violations)


if __name__ == "__main__":
    sys.exit(main())
