"""The pages say what is there: names, links, anchors, excerpts, what code prints."""

import functools
import re
from pathlib import Path

import pytest

import eagle_jax

ROOT = Path(__file__).resolve().parents[2]
FILES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "eagle_jax/assets/README.md"]
PAGES = FILES + sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))

_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_PYTHON = re.compile(
    r"(?:<!-- excerpt: (\S+) -->\n)?```python\n(.*?)```(?:\n\n```\n(.*?)```)?",
    re.DOTALL,
)
_FOLDERS = "eagle_jax|examples|tests|docs|scripts|configs"
_NAMED = re.compile(rf"`((?:{_FOLDERS})/[\w./-]*)")
_LINKED = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub and mkdocs give to a page's headings."""
    headings = _HEADING.findall(_FENCED.sub("", path.read_text()))
    words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {word.replace(" ", "-") for word in words}


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_or_links_exists(page: str) -> None:
    path = ROOT / page
    text = path.read_text()
    wrong = [name for name in _NAMED.findall(text) if not (ROOT / name).exists()]
    for name, anchor in _LINKED.findall(_FENCED.sub("", text)):
        linked = path.parent / name if name else path
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            wrong.append(f"{name}#{anchor}")
    assert not wrong


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_quotes_stands_in_the_file(page: str) -> None:
    for file, code, _ in _PYTHON.findall((ROOT / page).read_text()):
        assert code in (ROOT / file).read_text() if file else code.startswith("import")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python\nimport" in (ROOT / page).read_text()]
)
def test_what_a_page_runs_prints_what_it_shows(
    page: str,
    tiny_pair: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if page != "README.md":  # The README shows what the embedded pair itself writes.
        names = str(tiny_pair / "target"), str(tiny_pair / "head")
        tree = {"num_nodes": 6, "depth": 2, "width": 3}
        small = functools.partial(eagle_jax.load_pair, *names, **tree)
        monkeypatch.setattr(eagle_jax, "load_embedded_pair", small, raising=False)
    for file, code, shown in _PYTHON.findall((ROOT / page).read_text()):
        if not file:
            exec(code, {})
            assert capsys.readouterr().out == shown or not shown


def test_every_page_is_in_an_index() -> None:
    for folder in (ROOT / "docs", ROOT / "docs" / "results"):
        index = (folder / "README.md").read_text()
        for page in folder.glob("*.md"):
            assert page.name == "README.md" or f"]({page.name})" in index, page.name


def test_the_readme_and_guides_are_short() -> None:
    most = dict.fromkeys((ROOT / "docs").glob("*.md"), 200)
    for page, lines in (most | {ROOT / "README.md": 150}).items():
        assert len(page.read_text().splitlines()) <= lines, page.name


def test_the_readmes_commands_fit_the_first_page() -> None:
    blocks = _FENCED.findall((ROOT / "README.md").read_text())
    assert blocks and all(len(x) <= 110 for block in blocks for x in block.split("\n"))
