"""One million hostile inputs: does anything come of them but what is promised, and does memory stay flat?

Every target of `tests/fuzz` is handed damaged inputs, from a seed that is new each day unless `--seed` says otherwise.
Memory is a target's process' after a tenth of its inputs, and at its end. A finding ends the script and says how to try
it again.
"""

import argparse
import json
import os
import subprocess
import sys
import time

from _kit import TESTS, end, table

SHARES = {
    "wire_message": 620_000,
    "container": 200_000,
    "key_file": 50_000,
    "log_line": 50_000,
    "http_request": 15_000,
    "schema_text": 10_000,
    "model_body": 10_000,
    "table_file": 10_000,
    "model_transfer": 6_000,
    "minari_data": 5_000,
    "dispatcher": 3_000,
    "prompts": 20_000,
    "snapshot_file": 1_500,
    "state_file": 300,
    "buffer_file": 20_000,
    "settings_file": 200,
}
"""Inputs of each target, of a million."""
MAX_GROWTH = 32 << 20


def run(name: str, rounds: int, seed: str, **environment: str) -> tuple[dict, str]:
    """What became of so many inputs of a target; and why it ended, where it did not end well."""
    command = [sys.executable, "-P", "-m", "fuzz.engine", name, "--rounds", str(rounds), "--seed", seed, "--json"]
    path = os.pathsep.join([environment.pop("PYTHONPATH", str(TESTS.parent)), str(TESTS)])
    done = subprocess.run(
        command, cwd=TESTS, env=os.environ | {"PYTHONPATH": path} | environment, capture_output=True, text=True
    )
    if done.returncode:
        return {}, f"{name}: status {done.returncode}: {done.stderr[-6000:]}"
    return json.loads(done.stdout), ""


def row(name: str, found: dict) -> list[object]:
    """Of a table: what the target came to."""
    words = ", ".join(f"{count} {verdict}" for verdict, count in sorted(found["verdicts"].items(), key=lambda e: -e[1]))
    return [name, found["inputs"], f"{found['seconds']:.0f}", f"{found['grown'] / 2**20:.1f}", words]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", default=time.strftime("%Y-%m-%d", time.gmtime()))
    given = parser.parse_args()
    rows, violations = [], []
    for name, share in SHARES.items():
        found, why = run(name, max(100, share * given.inputs // 1_000_000), given.seed)
        if why:
            violations.append(why)
            continue
        rows.append(row(name, found))
        if found["grown"] > MAX_GROWTH:
            violations.append(f"{name}: memory grew by {found['grown'] >> 20} MiB")
    print(f"Seed {given.seed}; {sum(row[1] for row in rows)} inputs, {len(violations)} findings.\n")
    print(table(["target", "inputs", "seconds", "MiB more", "came to"], rows))
    return end(violations)


if __name__ == "__main__":
    sys.exit(main())
