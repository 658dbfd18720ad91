"""The examples of the documentation run, and the pages say what is there."""

import re
from pathlib import Path

import pytest

from examples import own_drafter, own_target, train_for_own_target

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "eagle_jax/assets/README.md"]
PAGES += sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))

_EXCERPT = re.compile(r"<!-- excerpt: (\S+) -->\n```python\n(.*?)```", re.DOTALL)
_FOLDERS = "eagle_jax|examples|tests|docs|scripts|configs"
_NAMED = re.compile(rf"`((?:{_FOLDERS})/[\w./-]*)")
_LINKED = re.compile(r"\]\((?!https?:)([^)#\s]*)")


def test_a_model_of_somebody_else_writes_its_own_text_in_fewer_passes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own_target.main()
    shown = capsys.readouterr().out
    greedy, sampled = re.findall(
        r"temperature [01]: identical tokens, (\d+) passes instead of (\d+)", shown
    )
    for passes, tokens in (greedy, sampled):
        assert int(passes) < int(tokens) == len(own_target.TEXT) - 8
    assert shown.startswith(" This is the house that Jack built")


def test_a_head_learns_from_the_texts_of_somebody_elses_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train_for_own_target.main(num_steps=24, num_texts=8)
    shown = capsys.readouterr().out
    rates = re.findall(
        r"identical tokens, .* ([\d.]+) before and ([\d.]+) after", shown
    )
    assert len(rates) == 2
    for before, after in rates:
        assert 1 <= float(before) < float(after) <= train_for_own_target.TREE.depth + 1


def test_a_drafter_of_somebody_else_leaves_the_text_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own_drafter.main(max_new_tokens=48)
    shown = capsys.readouterr().out
    (counts,) = re.findall(r"identical tokens, (\d+) passes instead of (\d+): ", shown)
    passes, tokens = map(int, counts)
    assert passes < tokens
    assert shown.count("|") == passes


@pytest.mark.parametrize(
    "page", ["your-own-target.md", "your-own-drafter.md", "other-stacks.md"]
)
def test_what_a_page_quotes_stands_in_the_file(page: str) -> None:
    excerpts = _EXCERPT.findall((ROOT / "docs" / page).read_text())
    assert len(excerpts) >= 4
    for file, excerpt in excerpts:
        assert excerpt in (ROOT / file).read_text(), excerpt


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_or_links_exists(page: str) -> None:
    path = ROOT / page
    text = path.read_text()
    named = [name for name in _NAMED.findall(text) if not (ROOT / name).exists()]
    linked = [
        name for name in _LINKED.findall(text) if not (path.parent / name).exists()
    ]
    assert not named + linked


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index, page.name
