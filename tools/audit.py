"""Known weaknesses of all that is installed in .venv: asks the databases of pip-audit, and says what they do not know.

    python tools/audit.py                        exit status: 0 none is known; 1 some are; 3 not all could be looked up
    python tools/audit.py --unreachable FILE     ends with 0 in place of 3, and writes into the file what was not asked

pip-audit alone ends with "No known vulnerabilities found" also where its database knew none of the packages.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
AUDIT = ROOT / "build" / "audit"
"""Environment of its own: pip-audit brings thirty packages, which nothing else needs."""
SERVICES = ("osv", "pypi")
"""Databases, the better one first."""
OURS = "memoire-rl"
SECONDS = 120.0

Reports = Mapping[str, "dict[str, Any] | str"]
"""What each database said: pip-audit's JSON, or why there is none."""


def set_up() -> Path:
    """pip-audit in its own environment; where it is."""
    program = AUDIT / "bin" / "pip-audit"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", AUDIT], check=True)
        pip = [
            AUDIT / "bin" / "python",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "pip-audit>=2.7",
        ]
        subprocess.run(pip, check=True)
    return program


def ask(program: Path, packages: Path, service: str) -> dict[str, Any] | str:
    """What a database knows of the packages in a folder."""
    command = [program, "--path", packages, "--skip-editable", "-s", service, "-f", "json", "--timeout", "15"]
    command += ["--progress-spinner", "off"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        report: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return f"nothing came within {SECONDS:g} s"
    except ValueError:
        return (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:300]
    return report


def verdict(reports: Reports) -> tuple[int, list[str], list[str]]:
    """Exit status, what is to be said, and which packages no database was asked about."""
    weak: dict[str, str] = {}
    asked: set[str] = set()
    there: set[str] = set()
    lines = []
    for service, report in reports.items():
        if isinstance(report, str):
            lines.append(f"{service} could not be asked: {report}")
            continue
        for each in report["dependencies"]:
            if each["name"] == OURS:
                continue
            name = f"{each['name']} {each.get('version', '')}".strip()
            there.add(each["name"])
            if "skip_reason" not in each:
                asked.add(each["name"])
            for weakness in each.get("vulns", ()):
                mended = ", ".join(weakness["fix_versions"]) or "no version yet"
                weak[f"{name} {weakness['id']}"] = f"{name}: {weakness['id']}, mended in {mended}"
    left = sorted(there - asked)
    if not asked:
        left = [f"all {len(there) or ''} packages".replace("  ", " ")]
    lines += weak.values()
    lines.append(f"{len(asked)} packages were looked up, {len(weak)} weaknesses are known")
    lines += [f"NOT LOOKED UP: {', '.join(left)}"] if left else []
    return 1 if weak else 3 if left else 0, lines, left


def main() -> int:
    """Ask, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unreachable", type=Path, metavar="FILE")
    given = parser.parse_args()
    packages = Path(sysconfig.get_paths()["purelib"])
    reports: dict[str, dict[str, Any] | str] = {}
    try:
        program = set_up()
        for service in SERVICES:
            reports[service] = ask(program, packages, service)
            if not verdict(reports)[2]:
                break
    except subprocess.CalledProcessError as error:
        reports["pip-audit"] = f"it could not be installed: {error}"
    status, lines, left = verdict(reports)
    print("\n".join(lines))
    if given.unreachable is not None:
        text = f"{', '.join(left)}: no database could be asked" if status == 3 else ""
        given.unreachable.parent.mkdir(parents=True, exist_ok=True)
        given.unreachable.write_text(text, encoding="utf-8")
        return 0 if status == 3 else status
    return status


if __name__ == "__main__":
    sys.exit(main())
