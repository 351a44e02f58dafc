"""Does PPO learn from pictures that collectors without torch send: MiniGrid's DoorKey-5x5, 95 of 100 episodes?

`examples/learning/door_key.py` as a user runs it, with three seeds. torch lies where MEMOIRE_TORCH says; minigrid and
pygame are installed into build/minigrid if they are not there.
"""

import importlib.util
import os
import re
import subprocess
import sys
import time

from _kit import CANNOT, ROOT, end, say, table

SEEDS, SECONDS = range(3), 600.0
PLACE = ROOT / "build" / "minigrid"


def search_path() -> list[str]:
    """Folders with torch and minigrid, for PYTHONPATH."""
    if not (PLACE / "minigrid").exists() and importlib.util.find_spec("minigrid") is None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(PLACE), "--no-deps"]
        subprocess.run([*command, "minigrid==3.2.0", "pygame==2.6.1"], check=True)
    return [str(PLACE), os.environ.get("MEMOIRE_TORCH", str(ROOT / "build" / "torch"))]


def main() -> int:
    try:
        path = search_path()
    except subprocess.CalledProcessError as error:
        say(f"minigrid cannot be installed: {error}")
        return CANNOT
    rows, violations = [], []
    for seed in SEEDS:
        began = time.monotonic()
        command = [sys.executable, ROOT / "examples" / "learning" / "door_key.py", f"--seed={seed}"]
        surroundings = os.environ | {"PYTHONPATH": os.pathsep.join(path), "SDL_VIDEODRIVER": "dummy"}
        done = subprocess.run(
            command, env=surroundings, stdout=subprocess.PIPE, text=True, timeout=SECONDS + 120.0, check=False
        )
        seconds = time.monotonic() - began
        found = re.search(r"success ([0-9.]+) after (\d+) steps", done.stdout)
        if found is None:
            violations.append(f"seed {seed} ended with status {done.returncode} and said nothing of success")
            continue
        rows.append([seed, found[1], f"{int(found[2]):,}", f"{seconds:.0f}"])
        say(rows[-1])
        if float(found[1]) < 0.95:
            violations.append(f"seed {seed}: {found[1]} of the newest 100 episodes succeeded, 0.95 are wanted")
    print(table(["seed", "success", "steps", "seconds"], rows))
    return end(violations)


if __name__ == "__main__":
    sys.exit(main())
