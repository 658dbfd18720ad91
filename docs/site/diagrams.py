"""Draws docs/diagrams: `python docs/site/diagrams.py`.

The pictures are 360 wide, so that they are legible on a telephone without scaling, and
bring a background of their own, which follows the reader's light or dark setting.
"""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from eagle_jax.tree import ancestor_mask

FOLDER = Path(__file__).resolve().parents[1] / "diagrams"
WIDTH = 360
STYLE = """
svg { font: 13px system-ui, "DejaVu Sans", sans-serif; --text: #1c2333; --faint: #566; }
svg { --page: #fff; --line: #7a86a8; --draft: #e6ebfa; --yes: #cdeed6; --own: #fde3b8; }
@media (prefers-color-scheme: dark) {
  svg { --text: #e8ebf4; --faint: #aab3c8; --page: #1e2129; --line: #8592b8; }
  svg { --draft: #2f3a63; --yes: #1f5a35; --own: #6b4a12; }
}
text { fill: var(--text); }
.faint { fill: var(--faint); font-size: 12px; }
.head { font-weight: 600; }
.token { font: 12px ui-monospace, "DejaVu Sans Mono", monospace; }
rect { stroke: var(--line); fill: var(--page); }
.page { stroke: none; }
.draft { fill: var(--draft); }
.yes { fill: var(--yes); }
.own { fill: var(--own); }
.lost { fill: var(--page); stroke-dasharray: 3 3; }
path { stroke: var(--line); fill: none; marker-end: url(#tip); }
.edge { marker-end: none; }
#tip path { fill: var(--line); stroke: none; marker-end: none; }
"""

# The example of several pictures, in level order: token, parent, column, row.
TREE = (
    *(("for", -1, 0, 1.2), ("i", 0, 1, 0.5), ("x", 0, 1, 2), ("in", 1, 2, 0.5)),
    *(("in", 2, 2, 2), ("range", 3, 3, 0), ("zip", 3, 3, 1)),
)
OWN = ("i", "in", "in", "zip", "range", "(", "(")
PATH = (0, 1, 3, 6)


def words(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    """Returns a line of text."""
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
    return f'<text {place} class="{kind}">{html.escape(text)}</text>'


def box(x: float, y: float, text: str, kind: str = "draft", width: float = 56) -> str:
    """Returns a token or a part of a model around a centre."""
    place = f'x="{x - width / 2:g}" y="{y - 12:g}" width="{width:g}" height="24"'
    label = words(x, y + 4, text, "" if "part" in kind else "token", "middle")
    return f'<rect {place} rx="5" class="{kind}"/>{label}'


def arrow(x: float, y: float, to_x: float, to_y: float, kind: str = "") -> str:
    """Returns an arrow, or an edge without a tip."""
    return f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g}" class="{kind}"/>'


def tree(
    nodes: Sequence[tuple[str, int, float, float]],
    kinds: Sequence[str],
    left: float,
    top: float,
    *,
    step: float = 88,
    width: float = 56,
) -> Iterable[str]:
    """Yields a tree that grows to the right: its edges, then its nodes."""
    places = [(left + step * column, top + 34 * row) for _, _, column, row in nodes]
    for (_, parent, _, _), (x, y) in zip(nodes, places, strict=True):
        if parent >= 0:
            above = places[parent]
            yield arrow(above[0] + width / 2, above[1], x - width / 2, y, "edge")
    for (text, *_), (x, y), kind in zip(nodes, places, kinds, strict=True):
        yield box(x, y, text, kind, width)


def picture(title: str, height: float, parts: Iterable[str]) -> str:
    """Returns the text of a picture."""
    frame = f'width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {frame} role="img">',
        f"<title>{html.escape(title)}</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"',
        'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height:g}" rx="8" class="page"/>',
        *parts,
        "</svg>\n",
    ]
    return "\n".join(lines)


def draw_round() -> Iterable[str]:
    """Yields one round: draft, verify, accept, commit."""
    kinds = ["own", *["draft"] * 6]
    yield words(12, 24, "1  Draft: a tree of likely continuations", "head")
    yield from tree(TREE, kinds, 44, 52)
    yield words(12, 156, "2  Verify: all its nodes in one pass", "head")
    for node, (token, *_) in enumerate(TREE):
        x = 36 + 48 * node
        yield box(x, 184, token, kinds[node], 44)
        yield arrow(x, 197, x, 212, "edge")
        yield arrow(x, 238, x, 256)
        yield box(x, 270, OWN[node], "own", 44)
    yield box(180, 225, "target", "part", 332)
    yield words(
        12, 300, "The target says what it would write after each node.", "faint"
    )
    yield words(12, 334, "3  Accept: the path that the target follows", "head")
    for place, token in enumerate([TREE[node][0] for node in PATH] + [OWN[PATH[-1]]]):
        x = 40 + 70 * place
        kind = "yes" if 0 < place < 4 else "own"
        yield box(x, 362, token, kind, 52)
        if place:
            yield arrow(x - 44, 362, x - 27, 362)
    yield words(
        12, 394, "Three drafts and the target's own token: four tokens", "faint"
    )
    yield words(12, 411, "for one pass, the same that four passes write.", "faint")
    yield words(12, 445, "4  Commit: they join the cache", "head")
    yield words(12, 465, "The last of them is the root of the next round.", "faint")


def draw_mask() -> Iterable[str]:
    """Yields a tree, and the nodes that each of its nodes sees."""
    numbered = [
        (f"{node} {token}", parent, column, row)
        for node, (token, parent, column, row) in enumerate(TREE)
    ]
    yield words(12, 24, "A tree, its nodes numbered level by level", "head")
    yield from tree(numbered, ["own", *["draft"] * 6], 44, 52, width=64)
    yield words(12, 160, "Flattened: what each node sees", "head")
    mask = np.asarray(ancestor_mask(jnp.array([parent for _, parent, *_ in TREE])))
    yield words(312, 186, "position", "faint", "middle")
    for node, (label, _, depth, _) in enumerate(numbered):
        y = 206 + 26 * node
        yield words(24, y + 4, label, "token")
        yield words(312, y + 4, f"length + {depth:g}", "faint", "middle")
        yield words(103 + 26 * node, 186, str(node), "token", "middle")
        for seen in range(len(TREE)):
            kind = "yes" if mask[node, seen] else ""
            place = f'x="{91 + 26 * seen}" y="{y - 12}"'
            yield f'<rect {place} width="24" height="24" rx="4" class="{kind}"/>'
    yield words(
        12, 400, "The text, its ancestors and itself, never a sibling.", "faint"
    )


def draw_noise() -> Iterable[str]:
    """Yields one draw of target and draft under the same noise."""
    tokens = ("range", "zip", "items", "self", "map")
    draft = np.array([0.34, 0.26, 0.20, 0.12, 0.08])
    target = np.array([0.28, 0.30, 0.18, 0.16, 0.08])
    noise = np.random.default_rng(6).gumbel(size=(200_001, 2, 5))
    drafted = (np.log(draft) + noise[:, 0]).argmax(axis=1)
    shared = (drafted == (np.log(target) + noise[:, 0]).argmax(axis=1)).mean()
    apart = (drafted == (np.log(target) + noise[:, 1]).argmax(axis=1)).mean()
    shown = noise[0, 0]
    yield words(12, 24, "One noise g for draft q and target p", "head")
    columns = (44, 104, 152, 204, 262, 326)
    titles = ("token", "q", "p", "g", "log q + g", "log p + g")
    for x, title in zip(columns, titles, strict=True):
        yield words(x, 52, title, "faint", "middle")
    sums = np.log(draft) + shown, np.log(target) + shown
    for row, token in enumerate(tokens):
        y = 76 + 30 * row
        yield box(columns[0], y, token)
        numbers = (draft[row], target[row], shown[row])
        for x, number in zip(columns[1:4], numbers, strict=True):
            yield words(x, y + 4, f"{number:.2f}", "token", "middle")
        for x, values in zip(columns[4:], sums, strict=True):
            kind = "yes" if values.argmax() == row else "lost"
            yield box(x, y, f"{values[row]:.2f}", kind)
    yield words(12, 238, "The draft is the token that the target will draw", "faint")
    yield words(
        12,
        255,
        f"in {shared:.0%} of such draws; with noise apart in {apart:.0%}.",
        "faint",
    )


def draw_eagle_tree() -> Iterable[str]:
    """Yields a dynamic tree, of whose candidates the best stay."""
    nodes = (
        *(("root", -1, 0, 1.5), (".6", 0, 1, 0.5), (".3", 0, 1, 2.5)),
        *((".5", 1, 2, 0), (".1", 1, 2, 1), (".2", 2, 2, 2), (".05", 2, 2, 3)),
        *((".4", 3, 3, 0), (".06", 5, 3, 2)),
    )
    kinds = ["own", *["draft"] * 3, "draft", "draft", "lost", "draft", "lost"]
    yield box(68, 24, "target's features", "own part", 120)
    yield arrow(129, 24, 151, 24)
    yield box(194, 24, "EAGLE head", "part", 84)
    yield words(246, 28, "one call a level", "faint")
    yield from tree(nodes, kinds, 40, 66, step=92, width=48)
    yield words(12, 200, "The best stay, by the probability of their paths.", "faint")


def draw_eagle_chain() -> Iterable[str]:
    """Yields the static shapes of an EAGLE head."""
    yield box(68, 24, "target's features", "own part", 120)
    yield arrow(129, 24, 151, 24)
    yield box(194, 24, "EAGLE head", "part", 84)
    yield words(246, 28, "one call a level", "faint")
    chain = [("root", -1, 0, 0), *(("1st", i, i + 1, 0) for i in range(3))]
    yield words(12, 62, "chain", "head")
    yield from tree(chain, ["own", *["draft"] * 3], 40, 84, step=92, width=48)
    static = (
        *(("root", -1, 0, 1), ("1st", 0, 1, 0), ("2nd", 0, 1, 1), ("3rd", 0, 1, 2)),
        *(("1st", 1, 2, 0), ("2nd", 1, 2, 1), ("1st", 4, 3, 0)),
    )
    yield words(12, 122, "eagle1: always these ranks", "head")
    yield from tree(static, ["own", *["draft"] * 6], 40, 146, step=92, width=48)


def draw_level_heads(told: tuple[str, str], *, read_drafts: bool) -> Iterable[str]:
    """Yields heads that each draft one level, of which some read what is above it."""
    yield box(80, 24, "target's last feature", "own part", 142)
    for head in range(3):
        x = 132 + 92 * head
        yield arrow(70 + 20 * head, 37, x, 58)
        yield box(x, 71, f"head {head + 1}", "part", 64)
        yield arrow(x, 84, x, 102)
        if head and read_drafts:
            yield arrow(x - 78, 104, x - 24, 85)
    nodes = (
        *(("root", -1, 0, 1), ("a", 0, 1, 0), ("b", 0, 1, 2), ("c", 1, 2, 0)),
        *(("d", 1, 2, 1), ("f" if read_drafts else "c", 2, 2, 2)),
        ("e", 3, 3, 0),
    )
    yield from tree(nodes, ["own", *["draft"] * 6], 40, 118, step=92, width=48)
    for number, line in enumerate(told):
        yield words(12, 222 + 17 * number, line, "faint")


def draw_medusa() -> Iterable[str]:
    """Yields heads that each see one position further."""
    first = "No head knows what stands before its own position:"
    second = "head 2 drafts c after a and after b alike."
    yield from draw_level_heads((first, second), read_drafts=False)


def draw_hydra() -> Iterable[str]:
    """Yields heads that read the drafts before them."""
    first = "Each head reads the path above it:"
    second = "after b it drafts f, which would not follow a."
    yield from draw_level_heads((first, second), read_drafts=True)


def draw_small_model() -> Iterable[str]:
    """Yields a smaller model that reads the text itself."""
    yield box(52, 24, "the text", "own", 84)
    yield arrow(95, 24, 124, 24)
    yield box(180, 24, "smaller model", "part", 108)
    yield words(246, 28, "one call a level", "faint")
    nodes = (
        *(("root", -1, 0, 1), ("a", 0, 1, 0.5), ("b", 0, 1, 2), ("c", 1, 2, 0)),
        *(("d", 1, 2, 1), ("f", 2, 2, 2), ("e", 3, 3, 0)),
    )
    yield from tree(nodes, ["own", *["draft"] * 6], 40, 66, step=92, width=48)
    yield words(
        12, 168, "It has a cache of its own and the target's tokenizer.", "faint"
    )


def draw_lookup() -> Iterable[str]:
    """Yields an earlier match and what followed it."""
    text = ("for", "i", "in", "zip", "(", "n", "...", "for", "i", "in")
    kinds = ("yes", "yes", "yes", *["draft"] * 3, "lost", "own", "own", "own")
    yield words(12, 24, "The text ends as it went on before", "head")
    for place, (token, kind) in enumerate(zip(text, kinds, strict=True)):
        yield box(22 + 35 * place, 52, token, kind, 33)
    yield '<path d="M302 66 C 302 100, 57 100, 57 67"/>'
    yield words(180, 110, "matches", "faint", "middle")
    yield words(12, 142, "What followed is drafted", "head")
    chain = [("in", -1, 0, 0), ("zip", 0, 1, 0), ("(", 1, 2, 0), ("n", 2, 3, 0)]
    yield from tree(chain, ["own", *["draft"] * 3], 44, 168)


def draw_recycling() -> Iterable[str]:
    """Yields the matrix of likely followers, and a tree that it fills."""
    yield words(12, 24, "What the target last held likely after a token", "head")
    rows = (
        ("for", "i", "x", "key"),
        ("i", "in", ",", "="),
        ("in", "range", "self", "x"),
    )
    for row, (token, *after) in enumerate(rows):
        y = 50 + 30 * row
        yield box(50, y, token, "own")
        yield arrow(80, y, 108, y)
        for rank, likely in enumerate(after):
            yield box(140 + 62 * rank, y, likely)
    yield words(12, 148, "fills a static tree", "head")
    nodes = (
        *(("for", -1, 0, 1), ("i", 0, 1, 0), ("x", 0, 1, 2), ("in", 1, 2, 0)),
        *((",", 1, 2, 1), ("range", 3, 3, 0), ("self", 3, 3, 1)),
    )
    yield from tree(nodes, ["own", *["draft"] * 6], 44, 176)


def draw_block() -> Iterable[str]:
    """Yields a block of masks that one pass fills, and the tree of its guesses."""
    yield box(44, 24, "root", "own")
    for mask in range(3):
        yield box(132 + 88 * mask, 24, "mask", "lost")
    for place in range(4):
        yield arrow(44 + 88 * place, 37, 44 + 88 * place, 54)
    yield box(180, 67, "drafter: one pass, with the target's features", "part", 332)
    likely = (("a", "b"), ("c", "d"), ("e", "f"))
    for place, tokens in enumerate(likely):
        x = 132 + 88 * place
        yield arrow(x, 80, x, 98)
        for rank, token in enumerate(tokens):
            yield box(x, 112 + 28 * rank, token)
    yield words(12, 116, "each position's", "faint")
    yield words(12, 132, "likely tokens", "faint")
    yield words(12, 178, "The most probable paths through them", "head")
    nodes = (
        *(("root", -1, 0, 1), ("a", 0, 1, 0), ("b", 0, 1, 2), ("c", 1, 2, 0)),
        *(("d", 1, 2, 1), ("c", 2, 2, 2), ("e", 3, 3, 0)),
    )
    yield from tree(nodes, ["own", *["draft"] * 6], 44, 204)


PICTURES = {
    "round": ("One round of speculative decoding", 478, draw_round),
    "tree-mask": ("A tree and its ancestor mask", 412, draw_mask),
    "shared-noise": ("Draft and target under the same noise", 268, draw_noise),
    "eagle-tree": ("EAGLE-2 drafts a dynamic tree", 212, draw_eagle_tree),
    "eagle-chain": ("EAGLE drafts a chain or a static tree", 232, draw_eagle_chain),
    "medusa": ("Medusa: a head per position", 252, draw_medusa),
    "hydra": ("Hydra: heads that read the drafts", 252, draw_hydra),
    "small-model": ("A smaller model drafts", 182, draw_small_model),
    "lookup": ("Prompt lookup copies what followed", 194, draw_lookup),
    "recycling": ("Token Recycling fills a tree", 262, draw_recycling),
    "block": ("A block drafter fills masks in one pass", 290, draw_block),
}

if __name__ == "__main__":
    for name, (title, height, draw) in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(picture(title, height, draw()))
