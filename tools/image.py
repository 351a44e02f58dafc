"""Builder of the images that the chart needs, under the chart's names; prints how to load them into a cluster.

    python tools/image.py                  with docker
    python tools/image.py --engine podman  with another program that has docker's commands

No registry has memoire's images yet, so they have to be loaded into the cluster.
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
"""Stage of the Dockerfile by image name in values.yaml; None is the last stage."""
NEXT = """
The cluster needs the images {names}. Load them with one of:

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
    """Return the chart's default tag: its appVersion."""
    chart = (root / "deploy" / "helm" / "memoire" / "Chart.yaml").read_text(encoding="utf-8")
    (tag,) = re.findall(r'(?m)^appVersion: "(.*)"$', chart)
    return str(tag)


def commands(engine: str, tag: str) -> list[list[str]]:
    """Return the build command of each image."""
    return [
        [engine, "build", "--tag", f"{name}:{tag}", *(["--target", stage] if stage else []),
         "--build-arg", f"VERSION={tag}", "."]
        for name, stage in STAGES.items()
    ]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Build the images, print the next steps and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", default="docker", help="program that builds the images (default: %(default)s)")
    args = parser.parse_args(arguments)
    if shutil.which(args.engine) is None:
        print(f"{args.engine} is not on PATH: install it, or name another program with --engine", file=sys.stderr)
        return 1
    tag = version()
    for command in commands(args.engine, tag):
        print(*command, flush=True)
        if status := subprocess.run(command, cwd=ROOT, check=False).returncode:
            print(f"{args.engine} could not build {command[3]}: see above", file=sys.stderr)
            return status
    first, second = (f"{name}:{tag}" for name in STAGES)
    print(NEXT.format(engine=args.engine, names=f"{first} {second}", first=first, second=second))
    return 0


if __name__ == "__main__":
    sys.exit(main())
