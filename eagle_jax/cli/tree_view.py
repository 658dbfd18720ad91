"""Drawings of draft trees, like the paper's figure 7: in the terminal and as SVG."""

import dataclasses
import math
from typing import Any

from rich.text import Text
from rich.tree import Tree

_LETTER, _PAD, _GAP, _HEIGHT, _ROW = 8, 10, 20, 34, 42  # In pixels of an SVG.
_LEAST_LETTERS, _MOST_LETTERS = 5, 12


def draw_tree(tree: dict[str, Any], tokenizer: Any) -> Tree:
    """Returns one verified tree: tokens, values, and the accepted path marked.

    Args:
        tree: What `results.tree_record` says of it.
        tokenizer: The tokenizer that gives the tokens' texts.
    """
    drawn: list[Tree] = []
    for node, (token, parent, value) in enumerate(
        zip(tree["tokens"], tree["parents"], tree["log_values"], strict=True)
    ):
        is_accepted = node in tree["path"]
        style = "bold green" if is_accepted else "dim"
        mark = "✓ " if is_accepted else ""
        name = repr(tokenizer.decode([token]))
        label = Text(f"{mark}{name} ({math.exp(value):.3f})", style)
        drawn.append(Tree(label) if parent < 0 else drawn[parent].add(label))
    following = repr(tokenizer.decode([tree["next_token"]]))
    last = drawn[tree["path"][-1]]
    last.add(Text(f"→ {following} (the target's own)", "bold cyan"))
    return drawn[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    """A node of a drawing, in pixels.

    Attributes:
        x: Its left side.
        y: Its middle.
        width: Its width.
        start: The right side and the middle of its parent; `None` for the root.
        name: The token's text, short and visible.
        below: The draft's confidence in it, given its parent, or what else it is.
        title: The same in a sentence.
        kind: "accepted", "rejected", or "own" for the token that the target added.
    """

    x: float
    y: float
    width: float
    start: tuple[float, float] | None
    name: str
    below: str
    title: str
    kind: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawing:
    """A tree with its root at the left, likelier children above the others.

    Attributes:
        width: Its width, in pixels.
        height: Its height.
        nodes: The nodes, parents first.
    """

    width: float
    height: float
    nodes: list[Node]


def lay_out(tree: dict[str, Any], tokenizer: Any) -> Drawing:
    """Places what `draw_tree` takes, and the target's own token after its path."""
    last, logs = tree["path"][-1], tree["log_values"]
    parents, depths = [*tree["parents"], last], tree["depths"]
    depths = [*depths, depths[last] + 1]
    names = [visible(tokenizer, id_) for id_ in [*tree["tokens"], tree["next_token"]]]
    rows = _rows(parents, [*logs, -math.inf])
    widths = [0.0] * (max(depths) + 1)
    for name, depth in zip(names, depths, strict=True):
        letters = max(len(name), _LEAST_LETTERS)
        widths[depth] = max(widths[depth], letters * _LETTER + _PAD)
    lefts = [sum(widths[:depth]) + depth * _GAP for depth in range(len(widths))]
    nodes: list[Node] = []
    for node, (parent, depth) in enumerate(zip(parents, depths, strict=True)):
        above = nodes[parent] if node else None
        kind = "accepted" if node in tree["path"] else "rejected"
        below, title = "root", "the last token before the round"
        if node == len(logs):
            kind, below, title = "own", "target", "the target's own token"
        elif node and not any(logs):  # What copies earlier text has none.
            below, title = "draft", "a draft without a confidence"
        elif node:
            confidence, value = logs[node] - logs[parent], logs[node]
            below = f"{math.exp(confidence):.0%}"
            title = f"{below} after its parent, {math.exp(value):.1%} with all before"
        nodes.append(
            Node(
                x=lefts[depth],
                y=rows[node] * _ROW + _HEIGHT / 2,
                width=widths[depth],
                start=above and (above.x + above.width, above.y),
                name=names[node],
                below=below,
                title=title,
                kind=kind,
            )
        )
    height = max(rows) * _ROW + _HEIGHT
    return Drawing(width=lefts[-1] + widths[-1], height=height, nodes=nodes)


def visible(tokenizer: Any, token: int) -> str:
    """Returns a token's text on one short line, its spaces and line ends visible."""
    text = repr(tokenizer.decode([token]))[1:-1].replace("\\n", "⏎").replace(" ", "·")
    is_long = len(text) > _MOST_LETTERS
    return text[: _MOST_LETTERS - 1] + "…" if is_long else text


def _rows(parents: list[int], logs: list[float]) -> list[int]:
    """Returns the row of each node: a first child's is its parent's own."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    rows, free, waiting = [0] * len(parents), 0, [0]
    while waiting:
        node = waiting.pop()
        children[node].sort(key=lambda child: logs[child])
        waiting += children[node]  # The likeliest is the next.
        free += node > 0 and children[parents[node]][-1] != node
        rows[node] = free
    return rows
