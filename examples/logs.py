"""Log lines of many actors in one file at the server: numbered, resent until acknowledged, written once."""

import tempfile
from pathlib import Path

import numpy as np

import memoire

schema = memoire.Schema({"obs": memoire.Column(np.float32, (4,), "state")})

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "actors.log")
    with memoire.Server("tcp://127.0.0.1:0", schema) as server:
        server.set_logfile(path, "a")
        for number in range(1, 4):
            with memoire.connect(server.endpoint, input_uuid=number) as client:
                client.log(f"actor {number} begins")
                client.scalars({"epsilon": 0.1 * number})
                client.log("a line break\nbecomes an escape")
                client.update(timeout=10.0)  # returns when the server has the lines; the end of the block waits, too
        for client_stats in server.clients():
            print(f"{client_stats.label:08x} epsilon {client_stats.scalars['epsilon']:.1f}")
    # Time in ISO 8601, the actor's label, the message.
    print(path.read_text(), end="")
    print(f"{len(path.read_text().splitlines())} lines")
