"""Build the images that the chart asks for, under the names that it gives them, and say how a cluster gets them.

    python tools/image.py                  by docker
    python tools/image.py --engine podman  by another program with docker's commands

There is no registry that has memoire's images yet, so a cluster has to be given them.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGES = {"memoire": None, "memoire-demo": "demo"}
"""Names of images as values.yaml has them, and the stage of the Dockerfile that each is made of: None is the last."""
NEXT = """
The cluster has to find {names}. One of these gives them to it:

  kind       kind load docker-image {names}
  minikube   minikube image load {first} && minikube image load {second}
  k3s        {engine} save {names} | sudo k3s ctr images import -
  a registry {engine} tag {first} REGISTRY/{first} && {engine} push REGISTRY/{first}
             {engine} tag {second} REGISTRY/{second} && {engine} push REGISTRY/{second}
             and add to the next command: --set image.registry=REGISTRY

Then:

  helm install memoire deploy/helm/memoire --namespace rl --create-namespace
"""


def version(root: Path = ROOT) -> str:
    """The tag that the chart takes unless it is told another one: its appVersion."""
    chart = (root / "deploy" / "helm" / "memoire" / "Chart.yaml").read_text(encoding="utf-8")
    (found,) = re.findall(r'(?m)^appVersion: "(.*)"$', chart)
    return str(found)


def commands(engine: str, tag: str) -> list[list[str]]:
    """What builds each image."""
    return [
        [engine, "build", "--tag", f"{name}:{tag}", *(["--target", stage] if stage else []),
         "--build-arg", f"VERSION={tag}", "."]
        for name, stage in STAGES.items()
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Build, and say what comes next."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", default="docker", help="program that builds (default: %(default)s)")
    given = parser.parse_args(arguments)
    if shutil.which(given.engine) is None:
        print(f"there is no {given.engine} on PATH to build images with: install it, or give --engine", file=sys.stderr)
        return 1
    tag = version()
    for command in commands(given.engine, tag):
        print(*command, flush=True)
        if status := subprocess.run(command, cwd=ROOT, check=False).returncode:
            print(f"{given.engine} could not build {command[3]}: see above", file=sys.stderr)
            return status
    first, second = (f"{name}:{tag}" for name in STAGES)
    print(NEXT.format(engine=given.engine, names=f"{first} {second}", first=first, second=second))
    return 0


if __name__ == "__main__":
    sys.exit(main())
