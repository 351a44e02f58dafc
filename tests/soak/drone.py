"""Does a drone learn to fly under a real clock, with commands and positions that arrive 20 to 50 ms late?

`examples/drone.py`: a server and a worker in one process, a trainer in another, a time step of 50 ms. The policy that does
nothing, a controller that flies straight to the target, and the learned policy are measured in the same run. It has to
come half way from the first to the second within ten minutes. Fewer than one in a hundred time steps may be late, if the
machine has nothing else to do.
"""

import argparse
import os
import re
import subprocess
import sys
import time

from _kit import CANNOT, ROOT, end, say, table

LATE = 1.0
"""Per cent."""
NUMBER = r"(-?[\d.]+)"
SAID = re.compile(
    rf"idle: {NUMBER}; a controller: {NUMBER}.*learned: {NUMBER} over five test episodes, wanted {NUMBER}; "
    rf"late steps {NUMBER} %",
    re.DOTALL,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    given = parser.parse_args()
    tried = subprocess.run([sys.executable, "-c", "import torch, gymnasium"], capture_output=True, check=False)
    if tried.returncode:
        print("torch and gymnasium are needed: PYTHONPATH=build/torch, see `make setup-torch`.")
        return CANNOT
    load, began = os.getloadavg()[0], time.monotonic()
    command = [sys.executable, str(ROOT / "examples" / "drone.py"), str(given.seconds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.monotonic() - began
    say(done.stdout)
    found = SAID.search(done.stdout)
    if found is None:
        return end([f"it ended with {done.returncode}, and said {done.stdout!r}"])
    idle, controlled, learned, wanted, late = map(float, found.groups())
    print(table(["mean return of an episode", ""], [
        ("does nothing", idle), ("a controller", controlled), ("half way", wanted), ("learned", learned),
    ]))  # fmt: skip
    print(
        f"\n{seconds:.0f} s with all three measured; {late:.2f} % of the time steps were late; load before: {load:.1f}."
    )
    violations = [f"the learned policy returns {learned}, wanted {wanted}"] * (learned < wanted or done.returncode != 0)
    return end([*violations, *[f"{late} % of the time steps were late"] * (late >= LATE)])


if __name__ == "__main__":
    sys.exit(main())
