"""The documentation's site: each page is listed and linked, and a link that leads nowhere is found."""

import subprocess
from pathlib import Path

import pytest

import docs_site
import site_check

ROOT = Path(__file__).resolve().parents[2]

DOCS = ROOT / "docs"
LISTED = docs_site.sections(ROOT)


def listed_pages():
    return [path for pages in LISTED.values() for path, _ in pages]


def test_every_page_is_in_the_menu_once():
    pages = {page.relative_to(ROOT).as_posix() for page in DOCS.rglob("*.md")} - {*docs_site.LISTS}
    assert sorted(pages) == sorted(path for path in listed_pages() if path.startswith("docs/"))
    assert list(LISTED) == ["Learn", "Do", "Operate", "Look up", "Understand", "Contributors", "Records"]


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("README.md", "index.md"),
        ("docs/README.md", "pages.md"),
        ("docs/guide.md", "guide.md"),
        ("docs/development/records/wire.md", "development/records/wire.md"),
        ("CONTRIBUTING.md", "project/CONTRIBUTING.md"),
        ("examples/sb3_dqn.py", "project/examples/sb3_dqn.py.md"),
        ("deploy/examples/actor", "project/deploy/examples/actor/index.md"),
    ],
)
def test_each_file_has_its_place(path, place):
    assert docs_site.site_path(path) == place


@pytest.fixture
def checkout(tmp_path):
    """A small checkout: two pages, a picture, an example and a folder."""
    root = tmp_path / "checkout"
    for name, text in {
        "README.md": "# One\n\nFor everybody.\n\nSee [a page](docs/a.md#part), ![it](docs/p.svg), [out](https://e.org).\n",
        "docs/README.md": "# All\n\n## Start\n\n| [../README.md](../README.md) | what it *is* |\n| [a.md](a.md) | `a` |\n",
        "docs/development/README.md": "# Development\n\n## Records\n\n| [records/r.md](records/r.md) | a record |\n",
        "docs/development/records/r.md": "# benchmarks/r.py\n\n[a](../../a.md)\n",
        "docs/a.md": "# The `a`\n\n## Part\n\n[x](../examples/x.py) [f](../examples) [home][h]\n\n```\n[no](link)\n```\n\n```sh docker\nls\n```\n\n[h]: ../README.md\n",
        "docs/p.svg": "<svg/>",
        "examples/x.py": "print('```')\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    return root


def test_links_lead_to_where_their_targets_are_on_the_site(checkout, tmp_path):
    menu, broken = docs_site.stage(tmp_path / "pages", checkout)
    assert not broken and menu == {
        "Start": [("One", "index.md"), ("The a", "a.md")],
        "Records": [("r", "development/records/r.md")],
    }
    record = (tmp_path / "pages/development/records/r.md").read_text()
    assert record == "---\nsearch:\n  exclude: true\n---\n# benchmarks/r.py\n\n[a](../../a.md)\n"
    assert "[a page](a.md#part), ![it](p.svg), [out](https://e.org)" in (tmp_path / "pages/index.md").read_text()
    page = (tmp_path / "pages/a.md").read_text()
    assert "[x](project/examples/x.py.md) [f](project/examples/index.md)" in page
    assert "[h]: index.md" in page and "[no](link)" in page, "code stays as it is"
    assert "\n```sh\nls\n```\n" in page, "tests are told what is behind the language"
    assert "````python\nprint('```')\n````" in (tmp_path / "pages/project/examples/x.py.md").read_text()
    assert "* [examples/x.py](x.py.md)" in (tmp_path / "pages/project/examples/index.md").read_text()


def test_a_link_to_a_file_that_is_not_there_is_named(checkout, tmp_path):
    (checkout / "docs" / "a.md").write_text("# A\n\n[gone](gone.md)\n", encoding="utf-8")
    assert docs_site.stage(tmp_path / "pages", checkout)[1] == ["docs/a.md links to gone.md, which is not there"]


def test_llms_txt_names_each_page_with_what_it_is_for(checkout):
    text = docs_site.llms(docs_site.sections(checkout), checkout)
    readers = "## Start\n\n- [One](index.md): what it is\n- [The a](a.md): a\n"
    assert (
        text == f"# memoire\n\n> For everybody.\n\n{readers}\n## Records\n\n- [r](development/records/r.md): a record\n"
    )


def test_every_public_name_has_a_place_in_the_api_reference():
    names = docs_site.public_names((DOCS / "reference.md").read_text(encoding="utf-8"))
    pages = dict(docs_site.api_pages(names))
    assert names["memoire"][:3] == ["Schema", "Column", "Buffer"] and "__version__" not in names
    for name in ("Buffer", "Server", "connect", "Reader", "ReplayMemory", "MemoireError"):
        assert f"::: memoire.{name}\n" in pages[f"api/memoire.{name}.md"]
    assert '"load"' in pages["api/memoire.dataset.md"] and "::: memoire.errors\n" in pages["api/memoire.errors.md"]
    assert {"memoire.torch", "memoire.sb3", "memoire.minari", "memoire.nodes.http"} <= set(names)


def test_every_command_is_on_the_page_of_commands():
    import site_commands

    page = site_commands.page()
    assert page.startswith("# Commands\n")
    for command in ("memoire server", "memoire dashboard", "memoire keys", "memoire doctor"):
        assert f"\n## {command}" in page
    assert "--endpoint" in page


PAGE = '<a href="b.html#there">b</a> <a href="https://example.org">out</a> <img src="p.svg"> <h2 id="top">a</h2>'


def site(folder, **pages):
    (folder / "p.svg").touch()
    for name, text in {"a": PAGE, "b": '<h2 id="there">b</h2><a href="a.html#top">a</a>', **pages}.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    site_check.read.cache_clear()
    return site_check.faults(folder)


def test_a_site_whose_links_lead_somewhere_has_no_faults(tmp_path):
    assert site(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('<a href="gone.html">x</a>', "links to gone.html, which is not there"),
        ('<a href="a.html#nowhere">x</a>', "that page has no such heading"),
        ('<a href="#nowhere">x</a>', "that page has no such heading"),
        ('<a href="../out.html">x</a>', "which is not there"),
        ('<script src="https://cdn.example.org/x.js"></script>', "loads https://cdn.example.org/x.js from elsewhere"),
        ('<link rel="stylesheet" href="//fonts.example.org/x.css">', "from elsewhere"),
        ('<img src="https://example.org/badge.svg">', "from elsewhere"),
    ],
)
def test_what_is_wrong_with_a_page_is_named(tmp_path, text, words):
    (found,) = site(tmp_path, c=text)
    assert found.startswith("c.html ") and words in found
