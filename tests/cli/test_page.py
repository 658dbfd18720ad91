"""The page and the picture of decoded texts, which others may have written."""

import html.parser
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from eagle_jax.cli.page import page, picture
from eagle_jax.cli.tree_view import Drawing, lay_out

PROMPT = "<script>alert('1')</script>" + 200 * "x"
TEXT = " 5 < 6 && \"a\" </pre> '{{ 7 * 7 }}' é!"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
VOID = {"meta", "br"}


@pytest.fixture(scope="module")
def record(tokenizer: Any) -> dict[str, Any]:
    """Two texts whose rounds accepted 2, 0, 1, ... of four drafts, the last one cut."""
    prompt = tokenizer(PROMPT).input_ids
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    run = {"prompt": PROMPT, "prompt_ids": prompt, "generated_ids": ids}
    trees, begin = [], 1
    while begin < len(ids):
        path = [[0, 2, 3], [0], [0, 1]][len(trees) % 3]
        after = [*ids[begin - 1 : begin + len(path)], *ids[:3]]
        tokens = {0: after[0], **dict(zip(path, after, strict=False))}
        trees.append(
            {
                "tokens": [tokens.get(node, 60) for node in range(5)],
                "parents": [-1, 0, 0, 2, 2],
                "depths": [0, 1, 1, 2, 2],
                "log_values": [0.0, -0.1, -2.4, -2.5, -5.0],
                "path": path,
                "next_token": after[len(path)],
                "seconds": 0.02,
            }
        )
        begin += len(path)
    run |= {"trees": trees, "tokens_per_round": (len(ids) - 1) / len(trees)}
    return {
        "settings": {
            **{"target": "a <b>", "draft": "c & d", "tree": {"num_nodes": 5}},
            "pair": {"method": "eagle2", "dtype": "float32", "batch_size": 2},
            "request": {"temperature": 0.0},
        },
        "device": "cpu",
        "runs": [run, run],
        "totals": {
            **{"tokens": 2, "rounds": 1, "compile_seconds": 0.0},
            **{"tokens_per_round": 1.0, "tokens_per_second": None, "speedup": None},
            "speedups": [0.0],
            **{"autoregressive_tokens_per_second": 200.0, "identical": True},
        },
    }


class Parsed(html.parser.HTMLParser):
    """A page whose tags all close: its links by their texts, its tags and ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.ids = [], set[str](), []
        self.attributes: list[tuple[str, str | None]] = []
        self.links: list[tuple[str | None, str]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]
        if tag == "a":
            self.links.append((dict(attrs).get("href"), ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "a":
            target, text = self.links[-1]
            self.links[-1] = target, text + data


def test_every_token_stands_once_in_order_and_leads_to_its_round(
    record: dict[str, Any], tokenizer: Any
) -> None:
    parsed = Parsed(page(record, tokenizer))
    half = len(parsed.links) // 2
    assert parsed.links[:half] != parsed.links[half:]  # Their rounds are their own.
    for links in (parsed.links[:half], parsed.links[half:]):
        assert len(links) == len(record["runs"][0]["generated_ids"])
        assert "".join(text for _, text in links) == TEXT
        targets = [target for target, _ in links if target]  # The prefill has none.
        counts = [targets.count(one) for one in dict.fromkeys(targets)]
        assert counts[:4] == [3, 1, 2, 3]
        assert all(target[1:] in parsed.ids for target in targets)
    assert len(set(parsed.ids)) == len(parsed.ids)
    assert "20.0 ms = 2.0 plain passes" in page(record, tokenizer)


def test_nothing_of_a_text_is_markup_and_nothing_is_fetched(
    record: dict[str, Any], tokenizer: Any
) -> None:
    parsed = Parsed(page(record, tokenizer))
    assert not parsed.tags & {"script", "link", "img", "iframe", "object"}
    names = {name for name, _ in parsed.attributes}
    assert not names & {"src", "srcset", "data", "action"}
    assert not any(name.startswith("on") for name in names)
    links = [value for name, value in parsed.attributes if name == "href"]
    assert all(link and link.startswith("#") for link in links)
    assert "url(" not in page(record, tokenizer)


def test_a_picture_shows_a_pass_per_token_of_the_longest_round(
    record: dict[str, Any], tokenizer: Any
) -> None:
    root = ElementTree.fromstring(picture(record, tokenizer))
    texts = [text for one in root.iter() if (text := (one.text or "").strip())]
    assert [text for text in texts if text.startswith("pass ")] == [
        *("pass 1", "pass 2", "pass 3")
    ]
    assert "One round: 1 pass checks 4 drafts, 3 tokens" in texts


def places(drawing: Drawing) -> list[tuple[float, float]]:
    return [(node.x, node.y) for node in drawing.nodes]


def test_no_node_lies_over_another_and_likelier_children_lie_higher(
    record: dict[str, Any], tokenizer: Any
) -> None:
    drawing = lay_out(record["runs"][0]["trees"][0], tokenizer)
    found = places(drawing)
    assert len(set(found)) == len(found) == 6
    rows = [round((y - found[0][1]) / 42) for _, y in found]
    assert rows == [0, 0, 1, 1, 2, 1]
    for node in drawing.nodes[1:]:
        assert node.start and node.start[0] < node.x
        assert node.x + node.width <= drawing.width and node.y < drawing.height
    kinds = " ".join(node.kind for node in drawing.nodes)
    assert kinds == "accepted rejected accepted accepted rejected own"
    assert [node.below for node in drawing.nodes][1:4] == ["90%", "9%", "90%"]
    copied = record["runs"][0]["trees"][0] | {"log_values": 5 * [0.0]}
    below = [node.below for node in lay_out(copied, tokenizer).nodes]
    assert below == ["root", *4 * ["draft"], "target"]


@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_the_page_without_scrolling_sideways(
    record: dict[str, Any], tokenizer: Any, tmp_path: Path, width: int
) -> None:
    found = [path for name in BROWSERS if (path := shutil.which(name))]
    if not found:
        pytest.skip(f"needs a browser; none of {', '.join(BROWSERS)} is installed")
    inner = page(record, tokenizer).replace("&", "&amp;").replace('"', "&quot;")
    outer = tmp_path / "outer.html"
    outer.write_text(
        f'<iframe style="width:{width}px;height:900px" srcdoc="{inner}"></iframe>'
        "<script>onload = () => {"
        "const inner = document.querySelector('iframe').contentDocument;"
        "const tree = inner.querySelector('details[open] svg');"
        "document.body.textContent = [inner.documentElement.scrollWidth,"
        "tree.getBoundingClientRect().height, inner.querySelectorAll('pre a').length]"
        "};</script>"
    )
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        [found[0], *flags, profile, outer.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    measured = re.search(r"<body>([\d.]+),([\d.]+),(\d+)</body>", done.stdout)
    assert measured, done.stdout + done.stderr
    assert float(measured[1]) <= width
    assert float(measured[2]) > 100
    assert int(measured[3]) == 2 * len(record["runs"][0]["generated_ids"])
