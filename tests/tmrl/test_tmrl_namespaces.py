"""Workers and a trainer in a network that refuses connections: only the server can be reached."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memoire.security.provision import write_cluster
from netkit import until

ROLES = Path(__file__).resolve().parents[1] / "support" / "tmrl_roles.py"
pytestmark = pytest.mark.slow


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20.0)


def needed(*command: str) -> None:
    """Run a command that namespaces need, and skip the test if the command fails."""
    if subprocess.run(command, capture_output=True, timeout=20.0, check=False).returncode:
        pytest.skip("network namespaces need root, ip and iptables")


@pytest.fixture
def networks() -> Iterator[tuple[str, str, str]]:
    """Yield the server's namespace, its address, and the namespace of the other roles, which refuses connections."""
    needed("which", "ip", "iptables")
    here, far, suffix = f"tm-s{os.getpid()}", f"tm-f{os.getpid()}", os.getpid() % 10000
    with contextlib.ExitStack() as stack:
        for name in (here, far):
            needed("ip", "netns", "add", name)
            stack.callback(ip, "netns", "del", name)
        ip("link", "add", f"va{suffix}", "netns", here, "type", "veth", "peer", "name", f"vb{suffix}", "netns", far)
        for name, link, address in ((here, f"va{suffix}", "10.99.7.1"), (far, f"vb{suffix}", "10.99.7.2")):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        rule = ["iptables", "-A", "INPUT", "-i", f"vb{suffix}", "-m", "conntrack", "--ctstate", "NEW", "-j", "DROP"]
        needed("ip", "netns", "exec", far, *rule)
        yield here, "10.99.7.1", far


def test_only_the_servers_ports_have_to_be_reachable(networks: tuple[str, str, str], tmp_path: Path) -> None:
    here, address, far = networks
    write_cluster(tmp_path / "keys")
    url, file = f"tcp://{address}:55555", tmp_path / "samples"

    def start(network: str, role: str, keys: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(ROLES), role, url, str(tmp_path / "state") if role == "server" else str(file)]
        environment = {**os.environ, "MEMOIRE_TMRL": str(tmp_path)}
        with (tmp_path / f"{role}.log").open("wb") as log:
            return subprocess.Popen(["ip", "netns", "exec", network, *command, str(tmp_path / "keys" / keys)],
                                    stdout=log, stderr=log, env=environment)  # fmt: skip

    with contextlib.ExitStack() as stack:
        processes = {}
        for network, role, keys in ((far, "trainer", "learner"), (far, "worker", "actor"), (here, "server", "server")):
            processes[role] = start(network, role, keys)
            stack.callback(processes[role].wait, 20.0)
            stack.callback(processes[role].kill)
        logs = lambda: "".join(path.read_text() for path in tmp_path.glob("*.log"))  # noqa: E731
        assert until(lambda: processes["trainer"].poll() is not None, 60.0)
        assert processes["trainer"].returncode == 0, logs()
        assert "trained 60" in logs() and file.read_text().count("\n") > 0
