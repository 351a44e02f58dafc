"""Do frames of a real Atari game arrive from actors of a user's image, as they were, and is each step counted once?

The image is built from tests/soak/atari, on memoire's small one, with ale-py; $MEMOIRE_ATARI_IMAGE names it (NAME:TAG). Two
actors play pong at random. A sample that a server holds has four different frames with a ball's field in them. At the end
every actor's own counts are compared with the cluster's.
"""

import base64
import contextlib
import json
import os
import sys

import numpy as np
from _kubernetes import Trial, kubekit, trial

IMAGE = os.environ.get("MEMOIRE_ATARI_IMAGE", "").rpartition(":")
SIDE, STACK, STEPS = 84, 4, 20_000
SCHEMA = {
    "columns": [["obs", "|u1", [SIDE, SIDE], "state"], ["action", "<i8", [], "plain"], ["reward", "<f4", [], "reward"]],
    "tuples": [],
}
ATARI = [
    *("--set", "learner.enabled=false,server.parameters.cache_size=256,server.heldBytes=256Mi"),
    *("--set-json", f"server.schema={json.dumps(SCHEMA)}"),
    *("--set-json", f'server.parameters={{"frame_stack":{STACK},"multi_step":3,"cache_size":256}}'),
    *("--set", f"actors.image.repository={IMAGE[0]},actors.image.tag={IMAGE[2]}"),
    *("--set-json", "actors.command=[]", "--set-json", "actors.args=[]"),
]  # fmt: skip


def play(release: Trial) -> None:
    release.install(*ATARI)
    release.note("installed")
    with release.last_words() as words:
        kubekit.until(lambda: release.steps() > STEPS, 600.0, f"{STEPS} steps of the game")
        release.note(f"{STEPS:,} steps of pong")
        look(release)
        release.install("--set", "actors.replicas=0", *ATARI)
        kubekit.until(lambda: not release.pods("actor"), 120.0, "no actor")
    for trouble in release.differences(words):
        release.check(False, trouble)
    release.note("actors, each counted exactly", len(words))
    totals = release.totals()
    release.note("bytes of a step as it was recorded", f"{totals['generated_bytes'] / totals['steps']:,.0f}")
    sent = totals["accepted_bytes"] / totals["accepted_samples"]
    release.note("bytes of a sample as it was sent, with its stacks of frames", f"{sent:,.0f}")


def look(release: Trial) -> None:
    """Check the frames of a sample that a server holds."""

    def sample() -> dict[str, object]:
        for pod in release.pods("server"):
            with contextlib.suppress(AssertionError):  # 404: a server that is no actor's home holds none
                return dict(json.loads(release.page(pod, "/sample"))["arrays"]["obs"])
        raise KeyError("obs")

    found = kubekit.until(sample, 60.0, "a sample that a server holds")
    frames = np.frombuffer(base64.b64decode(str(found["data"])), np.uint8).reshape(-1, SIDE, SIDE)
    release.check(len(frames) == STACK, f"{len(frames)} frames in a state")
    release.check(len(np.unique(frames)) > 2, "there is nothing to see in the frames")
    release.note("frames in the state of a sample", f"{len(frames)} of {SIDE} by {SIDE} pixels")


if __name__ == "__main__":
    sys.exit(trial(play, lambda: "" if IMAGE[0] else "MEMOIRE_ATARI_IMAGE names no image"))
