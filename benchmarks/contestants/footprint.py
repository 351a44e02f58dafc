"""How much memory a program has, with all that it has started."""

from collections import defaultdict
from pathlib import Path


def memory_of(pid: int, processes: Path = Path("/proc")) -> int:
    """Bytes of a process and of all that come from it. What n of them share counts in each as an n-th."""
    children = defaultdict(list)
    for folder in processes.glob("[0-9]*"):
        children[parent_of(folder)].append(folder.name)
    found, total = [str(pid)], 0
    for each in found:
        found += children[each]
        total += proportional(processes / each)
    return total


def parent_of(folder: Path) -> str:
    """The number of the process that started this one; "" if it is gone."""
    try:
        return (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[1]
    except OSError:
        return ""


def proportional(folder: Path) -> int:
    """Its proportional set size in bytes; 0 if it is gone."""
    try:
        lines = (folder / "smaps_rollup").read_text("utf-8").splitlines()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
