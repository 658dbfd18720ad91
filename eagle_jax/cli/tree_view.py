"""Drawings of draft trees in the terminal, like the paper's figure 7."""

import math
from typing import Any

import jax
from rich.text import Text
from rich.tree import Tree

from eagle_jax.decoding.speculative import Round


def draw_tree(done: Round, row: int, tokenizer: Any) -> Tree:
    """Returns one verified tree: tokens, values, and the accepted path marked.

    Args:
        done: The round that verified the tree.
        row: The tree's row in the batch.
        tokenizer: The tokenizer that gives the tokens' texts.
    """
    tree, accepted = jax.tree.map(
        lambda x: x[row], jax.device_get((done.tree, done.acceptance))
    )
    on_path = set(accepted.path[: accepted.num_accepted + 1].tolist())
    drawn: dict[int, Tree] = {}
    for node in range(len(tree.tokens)):
        if not tree.is_node[node]:
            continue
        is_accepted = node in on_path
        style = "bold green" if is_accepted else "dim"
        mark = "✓ " if is_accepted else ""
        token = repr(tokenizer.decode([int(tree.tokens[node])]))
        label = Text(f"{mark}{token} ({math.exp(tree.log_values[node]):.3f})", style)
        parent = int(tree.parents[node])
        drawn[node] = Tree(label) if parent < 0 else drawn[parent].add(label)
    following = repr(tokenizer.decode([int(accepted.next_token)]))
    last = drawn[int(accepted.path[accepted.num_accepted])]
    last.add(Text(f"→ {following} (the target's own)", "bold cyan"))
    return drawn[0]
