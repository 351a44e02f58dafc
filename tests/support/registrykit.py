"""An OCI registry on loopback, Debian's docker-registry, for as long as a test takes."""

import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import time

import pytest

PROGRAM = "docker-registry"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class Registry:
    """A registry that runs.

    Args:
        port: Where it listens, on 127.0.0.1.
    """

    def __init__(self, port):
        self.address = f"127.0.0.1:{port}"

    def url(self, name):
        """What helm calls a chart here."""
        return f"oci://{self.address}/{name}"

    def manifest(self, name, version):
        """(digest, content) of a chart's manifest, as anybody reads it."""
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=10.0)) as connection:
            connection.request("GET", f"/v2/{name}/manifests/{version}", headers={"Accept": MANIFEST})
            answer = connection.getresponse()
            body = answer.read()
            assert answer.status == 200, body
            return answer.headers["Docker-Content-Digest"], json.loads(body)

    def is_up(self):
        with contextlib.suppress(OSError), contextlib.closing(http.client.HTTPConnection(self.address)) as connection:
            connection.request("GET", "/v2/")
            return connection.getresponse().status == 200
        return False


@contextlib.contextmanager
def registry(folder):
    """A registry that keeps everything in this folder; skips the test where there is no program for it."""
    if shutil.which(PROGRAM) is None:
        pytest.skip(f"{PROGRAM} is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        made = Registry(free.getsockname()[1])
    config = {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(folder / "registry")}},
        "http": {"addr": made.address},
    }
    file = folder / "registry.json"
    file.write_text(json.dumps(config), encoding="utf-8")  # which is YAML, too
    with (folder / "registry.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen([PROGRAM, "serve", str(file)], stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 30.0
            while not made.is_up():
                assert process.poll() is None, (folder / "registry.log").read_text(encoding="utf-8")
                assert time.monotonic() < deadline, "the registry did not start within 30 s"
                time.sleep(0.05)
            yield made
        finally:
            process.kill()
            process.wait()
