"""How long does `make demo-ppo` take to land, beside Stable-Baselines3's PPO with the same settings on the same cores?

Both learn LunarLander-v3 until the newest 50 episodes return 200 on average, 360 s at most. A run counts from the start
of its first process to that. memoire has a learner and two collectors of eight environments, and one collector is
killed half way. Runs take turns; what has run already is kept in build/lander, so that each run can have a call of its
own: --runs 1.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from measure import Report, results

HERE = Path(__file__).resolve().parent
KEPT = HERE.parent / "build" / "lander"
SEEDS = range(3)
SECONDS = 360.0
"""That a run may take; one that does not land counts so many."""
SIDES = {
    "memoire": ["-m", "memoire.rl.demo.ppo", "--seed", "{seed}"],
    "sb3": [str(HERE / "peers" / "lander_with_sb3.py"), "{seed}", "dummy"],
}
FACTS = """Settings of both: 16 environments, 8192 steps an iteration, 6 epochs of minibatches of 256, Adam with
0.001, discount 0.995, lambda 0.95, entropy coefficient 0.005, two layers of 64 for the policy and for
the value. Stable-Baselines3 steps its environments in its own process, with two threads of torch:
that was faster than a process for each environment."""
RETURNED = re.compile(r"return(?:ed)? (-?[0-9.]+)")


def run(side: str, seed: int) -> dict[str, float]:
    """Seconds until a run lands, its last mean return, and its steps a second."""
    folder = os.environ.get("MEMOIRE_TORCH", str(HERE.parent / "build" / "torch"))
    command = [sys.executable, *(word.format(seed=seed) for word in SIDES[side])]
    path = str(HERE.parent) if side == "memoire" else os.pathsep.join([folder, str(HERE.parent)])
    began, mean, steps, landed = time.monotonic(), float("-inf"), 0, SECONDS
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if (found := RETURNED.search(line)) is None:
                continue
            mean = float(found[1])
            if counted := re.search(r"([0-9,]+) steps", line):
                steps = int(counted[1].replace(",", ""))
            if mean >= 200.0 and "steps" in line:
                landed = min(landed, time.monotonic() - began)
    return {"seconds": landed, "mean": mean, "steps": float(steps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", metavar="FOLDER", help="write the page there once all runs are done")
    parser.add_argument("--runs", type=int, default=2 * len(SEEDS), help="how many to do now")
    given = parser.parse_args()
    KEPT.mkdir(parents=True, exist_ok=True)
    files = {(side, seed): KEPT / f"{side}-{seed}.json" for seed in SEEDS for side in SIDES}
    missing = [key for key, file in files.items() if not file.exists()]
    for side, seed in missing[: given.runs]:
        done = run(side, seed) | {"load": os.getloadavg()[0]}
        files[side, seed].write_text(json.dumps(done), encoding="utf-8")
        print(f"{side}, seed {seed}: {done}", flush=True)
    if any(not file.exists() for file in files.values()):
        return
    found = {key: json.loads(file.read_text()) for key, file in files.items()}
    rates = [[1.0 / found[side, seed]["seconds"] for seed in SEEDS] for side in ("memoire", "sb3")]
    rows = [f"| {side} | {seed} | {each['seconds']:.0f} | {each['mean']:.1f} | {each['steps']:,.0f} |"
            for (side, seed), each in found.items()]  # fmt: skip
    table = "\n".join(["| side | seed | seconds | last return | steps |", "| --- | ---: | ---: | ---: | ---: |", *rows])
    report = Report(__doc__.partition("\n")[0], [FACTS, table])
    report.heading()
    name = "Stable-Baselines3's PPO"
    report.add(*results("landings a second", rates, [name], unit="/s", aims={name: "lander-sb3"}))
    report.finish(given.write, "lander")


if __name__ == "__main__":
    main()
