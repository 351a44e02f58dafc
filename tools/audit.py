"""Audit of the packages in .venv: known vulnerabilities by the databases of pip-audit, and packages not looked up.

    python tools/audit.py                        exit status: 0 none is known; 1 some are; 3 not all were looked up
    python tools/audit.py --unreachable FILE     exit with 0 instead of 3, and write the packages not looked up to FILE

pip-audit alone prints "No known vulnerabilities found" even if its database knew none of the packages.
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
"""Environment for pip-audit alone, which brings thirty packages that nothing else needs."""
SERVICES = ("osv", "pypi")
"""Databases, the preferred one first."""
OURS = "memoire-rl"
SECONDS = 120.0

Reports = Mapping[str, "dict[str, Any] | str"]
"""pip-audit's JSON by database, or the reason why a database gave no report."""


def set_up() -> Path:
    """Install pip-audit into its own environment if it is missing; return the program's path."""
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
    """Return a database's report on the packages in a folder, or the reason why the database gave no report."""
    command = [program, "--path", packages, "--skip-editable", "-s", service, "-f", "json", "--timeout", "15"]
    command += ["--progress-spinner", "off"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        report: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return f"no answer within {SECONDS:g} s"
    except ValueError:
        return (done.stderr.strip().splitlines() or ["pip-audit printed nothing"])[-1][:300]
    return report


def verdict(reports: Reports) -> tuple[int, list[str], list[str]]:
    """Return the exit status, the lines to print, and the packages that no database looked up."""
    known: dict[str, str] = {}
    asked: set[str] = set()
    installed: set[str] = set()
    lines = []
    for service, report in reports.items():
        if isinstance(report, str):
            lines.append(f"{service} could not be asked: {report}")
            continue
        for each in report["dependencies"]:
            if each["name"] == OURS:
                continue
            name = f"{each['name']} {each.get('version', '')}".strip()
            installed.add(each["name"])
            if "skip_reason" not in each:
                asked.add(each["name"])
            for weakness in each.get("vulns", ()):
                fixed_in = ", ".join(weakness["fix_versions"]) or "no version yet"
                known[f"{name} {weakness['id']}"] = f"{name}: {weakness['id']}, fixed in {fixed_in}"
    skipped = sorted(installed - asked)
    if not asked:
        skipped = [f"all {len(installed) or ''} packages".replace("  ", " ")]
    lines += known.values()
    lines.append(f"{len(asked)} packages were looked up, {len(known)} vulnerabilities are known")
    lines += [f"NOT LOOKED UP: {', '.join(skipped)}"] if skipped else []
    return 1 if known else 3 if skipped else 0, lines, skipped


def main() -> int:
    """Audit the environment, print the result and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unreachable", type=Path, metavar="FILE")
    args = parser.parse_args()
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
    status, lines, skipped = verdict(reports)
    print("\n".join(lines))
    if args.unreachable is not None:
        text = f"{', '.join(skipped)}: no database could be asked" if status == 3 else ""
        args.unreachable.parent.mkdir(parents=True, exist_ok=True)
        args.unreachable.write_text(text, encoding="utf-8")
        return 0 if status == 3 else status
    return status


if __name__ == "__main__":
    sys.exit(main())
