"""Server with a state folder that is killed and started again: everything that it has acknowledged is still there.

python examples/durable.py [PORT]
"""

import json
import subprocess
import sys
import tempfile
import urllib.request

import numpy as np

import memoire

ENDPOINT = f"tcp://127.0.0.1:{sys.argv[1] if len(sys.argv) > 1 else '5560'}"
SCHEMA = memoire.Schema({"obs": memoire.Column(np.float32, (2,), "state")})


def start_server(folder):
    """Start a server in a separate process; return the process and the address of the server's page, both ready."""
    command = [sys.executable, "-m", "memoire", "server", "--endpoint", ENDPOINT, "--schema", SCHEMA.to_json()]
    command += ["--name", "home", "--state-dir", folder]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    process.stdout.readline()
    return process, process.stdout.readline().split()[-1]


def play(client, episodes):
    writer, states = client.writer(), np.zeros((11, 2), np.float32)
    for _ in range(episodes):
        writer.reset(states[0])
        for step in range(10):
            writer.step(states[step], None, 0.0, step == 9, False, states[step + 1], {})


def show(words, page):
    with urllib.request.urlopen(page, timeout=10) as answer:
        stats = json.load(answer)["stats"]
    totals = stats["totals"]
    print(f"{words}: {totals['episodes']} episodes, {totals['steps']} steps, {stats['log_lines']} lines")


with tempfile.TemporaryDirectory() as folder:
    server, page = start_server(folder)
    with memoire.connect(ENDPOINT) as early:  # the early actor has ended by the time the server dies
        play(early, 3)
        early.log("I was here")
    with memoire.connect(ENDPOINT) as actor:
        play(actor, 5)
        actor.update(timeout=10.0)  # when update returns, the totals are on disk
        show("before", page)
        server.kill()
        server.communicate()
        play(actor, 2)  # the actor continues without the server, and sends its steps when the server is back
        server, page = start_server(folder)
        actor.update(timeout=30.0)
        show("after", page)
    server.terminate()
    server.communicate(timeout=20)
