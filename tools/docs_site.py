"""Builder of the documentation's site: every page of docs/, an API reference, the commands, and llms.txt.

    python tools/docs_site.py            into build/site/html, one folder for each version; then check every link
    python tools/docs_site.py --open     also serve it on this machine and open a browser, until Ctrl-C
    python tools/docs_site.py --into F   add this version to the site in the folder F

The lists of docs/README.md and docs/development/README.md are the site's menu. Pages link to each other, and to files
of the repository, as in a
checkout: each file that a page links to becomes a page, too. mkdocs-material and mkdocstrings build the site in an
environment of their own, with the versions pinned in deploy/requirements/docs.txt. The site loads nothing from other
hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import http.server
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import webbrowser
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import site_check

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "site"
TOOLS = ROOT / "build" / "site-tools"
"""Python environment that mkdocs is installed in."""
PINNED = ROOT / "deploy" / "requirements" / "docs.txt"
LINK = re.compile(r"(\]\()([^)\s]+)(?=\))|(^\[[^\]]+\]: )(\S+)$", re.MULTILINE)
"""A Markdown link or picture, with its target."""
LISTS = ("docs/README.md", "docs/development/README.md")
"""Pages whose lists are the site's menu: for readers, and for contributors."""
RECORDS = "docs/development/records/"
"""Folder of pages that scripts write; the site's search leaves them out."""
MARK = re.compile(r"\A(```\w*) [^\n]*")
"""First line of a fenced block with a note for tests after the language; mkdocs does not accept such a fence."""
ROW = re.compile(r"^\| \[[^\]]*\]\(([^)#]+)\) \| (.*) \|$")
"""A row of a list: the page and its purpose."""
CODE = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".md": "", ".sh": "bash"}
"""Language for syntax highlighting, by suffix."""


def repository_path(page: str, target: str) -> str:
    """Return the repository path of a page's link target."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def site_path(path: str) -> str:
    """Return the site path of a repository file: README.md is the front page, docs/ is the top."""
    if path == "README.md":
        return "index.md"
    if path == "docs/README.md":
        return "pages.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith(".md"):
        return f"project/{path}"
    return f"project/{path}.md" if "." in posixpath.basename(path) else f"project/{path}/index.md"


def relative(page: str, target: str) -> str:
    """Return the relative link from a page of the site to another one."""
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


@dataclass
class Stage:
    """Input folder of mkdocs: the pages of docs/ and the files that they link to."""

    root: Path
    folder: Path
    staged: set[str] = field(default_factory=set)
    """Repository paths that are already staged."""
    broken: list[str] = field(default_factory=list)
    """Messages about links whose target is missing."""

    def add(self, path: str) -> str:
        """Stage a file or folder of the repository and everything that it links to; return its path on the site."""
        place = path.removeprefix("docs/") if self._is_asset(path) else site_path(path)
        if path not in self.staged:
            self.staged.add(path)
            source, staged = self.root / path, self.folder / place
            staged.parent.mkdir(parents=True, exist_ok=True)
            if self._is_asset(path):
                shutil.copyfile(source, staged)
            else:
                staged.write_text(self._text(path, source, place), encoding="utf-8")
        return place

    def _is_asset(self, path: str) -> bool:
        """Return True if the file is a picture or a record, which is copied unchanged."""
        return path.startswith("docs/") and not path.endswith(".md")

    def _text(self, path: str, source: Path, place: str) -> str:
        if source.is_dir():
            return self._listing(path, place)
        text = source.read_text(encoding="utf-8")
        if source.suffix == ".md":
            head = "---\nsearch:\n  exclude: true\n---\n" if path.startswith(RECORDS) else ""
            return head + self._with_links(path, text, place)
        return f"# {path}\n\n````{CODE.get(source.suffix, '')}\n{text.rstrip()}\n````\n"

    def _listing(self, path: str, place: str) -> str:
        """Return a page that lists the files that git tracks in a folder."""
        names = subprocess.run(["git", "ls-files", path], cwd=self.root, capture_output=True, text=True, check=True)
        links = [(name, relative(place, self.add(name))) for name in names.stdout.split()]
        return f"# {path}\n\n" + "".join(f"* [{name}]({link})\n" for name, link in links)

    def _with_links(self, path: str, text: str, place: str) -> str:
        """Return the page with each link rewritten to its target's path on the site.

        Code blocks stay the same, except that notes for tests after the language are removed.
        """
        pieces = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
        pieces[::2] = [LINK.sub(lambda match: self._moved(path, place, match), piece) for piece in pieces[::2]]
        pieces[1::2] = [MARK.sub(r"\1", piece) for piece in pieces[1::2]]
        return "".join(pieces)

    def _moved(self, path: str, place: str, match: re.Match[str]) -> str:
        before, link = (match[1], match[2]) if match[1] else (match[3], match[4])
        target, mark, anchor = link.partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        wanted = repository_path(path, target)
        if not (self.root / wanted).exists():
            self.broken.append(f"{path} links to {link}, which is not there")
            return match[0]
        return f"{before}{relative(place, self.add(wanted))}{mark}{anchor}"


def sections(root: Path) -> dict[str, list[tuple[str, str]]]:
    """Return the lists of the pages `LISTS`: (page, purpose) pairs by heading."""
    menu: dict[str, list[tuple[str, str]]] = {}
    for page in LISTS:
        for line in (root / page).read_text(encoding="utf-8").splitlines():
            if line.startswith("## "):
                menu[line[3:]] = []
            elif row := ROW.match(line):
                menu[list(menu)[-1]].append((repository_path(page, row[1]), row[2]))
    return menu


def title(text: str) -> str:
    """Return a page's first heading without code marks; for a benchmark, its file name without the suffix."""
    heading = re.search(r"^# (?:benchmarks/)?(.+?)(?:\.py)?$", text, re.MULTILINE)
    return heading[1].replace("`", "") if heading else ""


def public_names(stability: str) -> dict[str, list[str]]:
    """Return the names that docs/reference.md calls public, by module.

    The names of `memoire` come from several rows, its first eight names first.
    """
    names: dict[str, list[str]] = {}
    head = ""
    for row in re.findall(r"^\| (.*) \| (.*) \|$", stability, re.MULTILINE):
        if row[0].startswith(("import", "names in")):
            head = row[0]
        elif head == "import":
            for module in re.findall(r"[\w.]+", row[0]):
                names[module] = re.findall(r"`([A-Za-z]\w*)`", row[1])
        elif head.startswith("names in"):
            names["memoire"] += re.findall(r"`([A-Za-z]\w*)`", row[0])
    return names


def api_pages(names: Mapping[str, list[str]]) -> Iterator[tuple[str, str]]:
    """Yield path and text of each page of the API reference: a class or function of `memoire`, or a module."""
    for name in names.get("memoire", ()):
        yield f"api/memoire.{name}.md", f"::: memoire.{name}\n    options: {{heading_level: 1}}\n"
    for module in sorted(set(names) - {"memoire"}):
        chosen = f", members: {json.dumps(names[module])}" if names[module] else ""
        yield f"api/{module}.md", f"::: {module}\n    options: {{heading_level: 1{chosen}}}\n"


def commands_page(python: Path) -> str:
    """Return a page with the help text of every command."""
    asked = "import sys; sys.path.insert(0, 'tools'); import site_commands; print(site_commands.page(), end='')"
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
    done = subprocess.run([python, "-c", asked], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def stage(folder: Path, root: Path = ROOT) -> tuple[dict[str, list[tuple[str, str]]], list[str]]:
    """Stage every page except the API's and the commands'; return the menu, and messages about broken links."""
    shutil.rmtree(folder, ignore_errors=True)
    staging, menu = Stage(root, folder), {}
    for page in LISTS:
        staging.add(page)
    for section, pages in sections(root).items():
        menu[section] = [(title((root / path).read_text(encoding="utf-8")), staging.add(path)) for path, _ in pages]
    return menu, staging.broken


def llms(listed: Mapping[str, list[tuple[str, str]]], root: Path = ROOT) -> str:
    """Return llms.txt: a summary of memoire and a list of every page with its purpose, as Markdown."""
    readme = (root / "README.md").read_text(encoding="utf-8")
    summary = " ".join(readme.split("\n\n")[1].split())
    lines = ["# memoire", "", f"> {summary}"]
    for section, pages in listed.items():
        lines += ["", f"## {section}", ""]
        for path, what in pages:
            name = title((root / path).read_text(encoding="utf-8"))
            lines.append(f"- [{name}]({site_path(path)}): {re.sub(r'[*`]', '', what)}")
    return "\n".join(lines) + "\n"


def nav(menu: Mapping[str, list[tuple[str, str]]], api: list[str]) -> list[object]:
    """Return the menu of mkdocs: the sections of the pages `LISTS`, with API and commands first in "Look up"."""
    entries: list[object] = []
    for section, pages in menu.items():
        rows: list[object] = [{name: place} for name, place in pages]
        if section == "Look up":
            rows = [{"API": [{Path(page).stem: page} for page in api]}, {"Commands": "commands.md"}, *rows]
        entries.append({section: rows})
    entries.append({"All pages": ["pages.md", "development/README.md"]})
    return entries


def tools() -> Path:
    """Install the pinned versions of mkdocs and its plugins if needed; return the folder of their programs."""
    stamp, wanted = TOOLS / "pinned", hashlib.sha256(PINNED.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(TOOLS, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", TOOLS], check=True)
        pip = [TOOLS / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--require-hashes", "--only-binary", ":all:", "-r", PINNED], check=True)
        stamp.write_text(wanted, encoding="utf-8")
    return TOOLS / "bin"


def versions(site: Path) -> list[dict[str, object]]:
    """Return the entries of the site's menu of versions, the newest first."""
    folders = [path.name for path in site.iterdir() if (path / "index.html").exists() and not path.is_symlink()]
    folders.sort(key=lambda name: [int(part) for part in re.findall(r"\d+", name)], reverse=True)
    return [{"version": name, "title": name, "aliases": ["latest"] * (name == folders[0])} for name in folders]


FRONT = '<!doctype html><meta charset="utf-8"><title>memoire</title><meta http-equiv="refresh" content="0; url={0}/">'


def version() -> str:
    """Return the version of the checkout without its last number: every 0.1.x shares the pages of 0.1."""
    text = (ROOT / "memoire" / "version.py").read_text(encoding="utf-8")
    (number,) = re.findall(r'^VERSION = "(\d+\.\d+)', text, re.MULTILINE)
    return str(number)


def build(site: Path) -> list[str]:
    """Stage, build and check the site; return messages about what is wrong."""
    pages = BUILD / "pages"
    menu, broken = stage(pages)
    if broken:
        return broken
    api = dict(api_pages(public_names((ROOT / "docs" / "reference.md").read_text(encoding="utf-8"))))
    for place, text in {**api, "commands.md": commands_page(Path(sys.executable))}.items():
        (pages / place).parent.mkdir(exist_ok=True)
        (pages / place).write_text(text, encoding="utf-8")
    shutil.copyfile(ROOT / "dashboard" / "static" / "icon.svg", pages / "favicon.svg")
    config = {"INHERIT": "../../mkdocs.yml", "docs_dir": "pages", "nav": nav(menu, list(api))}
    (BUILD / "mkdocs.yml").write_text(json.dumps(config, indent=1), encoding="utf-8")  # JSON is YAML
    target = site / version()
    os.environ["NO_MKDOCS_2_WARNING"] = "1"  # it advertises
    command = [tools() / "mkdocs", "build", "--quiet", "--strict", "--config-file", BUILD / "mkdocs.yml"]
    if subprocess.run([*command, "--site-dir", target], cwd=BUILD, check=False).returncode:
        return ["mkdocs failed or warned: see its output above"]
    shutil.copytree(pages, target, ignore=lambda _, names: [n for n in names if not is_text(n)], dirs_exist_ok=True)
    (target / "llms.txt").write_text(llms(sections(ROOT)), encoding="utf-8")
    entries = versions(site)
    (site / "versions.json").write_text(json.dumps(entries) + "\n", encoding="utf-8")
    (site / "index.html").write_text(FRONT.format(entries[0]["version"]), encoding="utf-8")
    return site_check.faults(target)


def is_text(name: str) -> bool:
    """Return True if a staged name is a Markdown page, which programs find through llms.txt, or a folder."""
    return name.endswith(".md") or "." not in name


def show(site: Path) -> None:
    """Serve the site and open it in a browser; the search does not work in pages opened from files."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}/{version()}/"
        print(f"{url} until Ctrl-C", flush=True)
        webbrowser.open(url)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def main(arguments: list[str] | None = None) -> int:
    """Build the site and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--into",
        type=Path,
        default=BUILD / "html",
        metavar="FOLDER",
        help="folder of the site, one folder in it for each version (default: %(default)s)",
    )
    parser.add_argument("--open", action="store_true", help="serve the site and open it in a browser")
    args = parser.parse_args(arguments)
    args.into.mkdir(parents=True, exist_ok=True)
    wrong = build(args.into.resolve())
    print("\n".join(wrong) or f"{args.into / version()}: every link has a target, nothing is loaded from other hosts")
    if args.open and not wrong:
        show(args.into)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
