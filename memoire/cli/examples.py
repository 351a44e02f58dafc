"""Examples in the help of each command: whole command lines, which a test reads as the command does."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        "memoire demo --keep",
        "memoire up --env CartPole-v1",
        "memoire launch learner.py actor.py --actors 8 --env CartPole-v1",
        "memoire top tcp://127.0.0.1:5560",
    ),
    "demo": ("memoire demo --keep", "memoire demo --env Acrobot-v1 --actors 4 --servers 2 --proxies 2 --seconds 300"),
    "launch": (
        "memoire launch learner.py actor.py --actors 8 --env CartPole-v1",
        'memoire launch "learner.py --lr 1e-3" actor.py --actors 8 --logs logs',
        "memoire launch - actor.py --actors 32 --endpoint tcp://proxy:5560",
    ),
    "up": (
        "memoire up --env CartPole-v1",
        "memoire up --schema schema.json --servers 3 --proxies 2 --state-dir state",
        "memoire up --env CartPole-v1 --host '*' --keys keys",
    ),
    "server": (
        "memoire server --env CartPole-v1",
        "memoire server --schema schema.json --name server-0 --state-dir state --byte-limit 4GiB",
        "memoire server --endpoint 'tcp://*:5560' --keys keys/server --schema schema.json --http 127.0.0.1:8080",
    ),
    "proxy": (
        "memoire proxy tcp://server-0:5560 tcp://server-1:5560",
        "memoire proxy --endpoint 'tcp://*:5560' --keys keys/proxy --servers-file servers.txt",
    ),
    "relay": ("memoire relay tcp://proxy:5560", "memoire relay --endpoint ipc:///tmp/relay tcp://proxy:5560"),
    "dashboard": (
        "memoire dashboard tcp://127.0.0.1:5560",
        "memoire dashboard http://server-0:8080 http://proxy:8080 --history history.db",
        "memoire dashboard dns:memoire-server:8080 --listen '*:8265' --token-file token",
    ),
    "top": ("memoire top tcp://127.0.0.1:5560", "memoire top server-0:8080 proxy:8080 --once"),
    "logs": (
        "memoire logs tcp://127.0.0.1:5560 --follow",
        "memoire logs server-0:8080 server-1:8080 --text cuda --since 2h",
    ),
    "report": (
        "memoire report tcp://127.0.0.1:5560 --to tensorboard",
        "memoire report server-0:8080 server-1:8080 --to tensorboard --folder runs",
    ),
    "totals": ("memoire totals tcp://127.0.0.1:5560", "memoire totals tcp://proxy:5560 --run ant-7 --json"),
    "prompts": ("memoire prompts tcp://127.0.0.1:5560", "memoire prompts tcp://proxy:5560 --table math --json"),
    "doctor": ("memoire doctor tcp://127.0.0.1:5560", "memoire doctor tcp://proxy:5560 --roundtrip --keys keys/actor"),
    "run": ("memoire run ant-8 tcp://127.0.0.1:5560", "memoire run ant-8 tcp://proxy:5560 --finish"),
    "drain": (
        "memoire drain tcp://server-2:5560 --to tcp://server-0:5560 tcp://server-1:5560",
        "memoire drain tcp://server-{n}:5560 --keep 2",
    ),
    "snapshot": (
        "memoire snapshot tcp://proxy:5560 --to nightly",
        "memoire snapshot --show state/server-0/snapshots/nightly.snapshot --check",
    ),
    "keys": ("memoire keys new keys", "memoire keys list keys", "memoire keys revoke keys actor/team-b"),
    "keys new": (
        "memoire keys new keys",
        "memoire keys new team-b --role actor --name team-b --server keys/proxy",
        "memoire keys new --kubernetes ant",
    ),
    "keys list": ("memoire keys list keys/server",),
    "keys export": ("memoire keys export keys --kubernetes ant",),
    "keys authorize": ("memoire keys authorize keys team-b",),
    "keys revoke": ("memoire keys revoke keys actor/team-b",),
    "keys in-cluster": ("memoire keys in-cluster --secrets ant --tokens ant-tokens",),
    "keys check": ("memoire keys check /secrets --secrets ant --tokens ant-tokens",),
    "schema": ("memoire schema CartPole-v1", "memoire schema --env CartPole-v1"),
    "plan": (
        "memoire plan --actors 300 --learners 10",
        "memoire plan --env CartPole-v1 --storage episodes --capacity 10000000 --model-bytes 20MB",
    ),
}
"""By the words that name a command; "" is `memoire` itself."""
