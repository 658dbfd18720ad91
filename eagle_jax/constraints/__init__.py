"""What may follow a text: rules over its tokens, automata, expressions and schemas."""

from eagle_jax.constraints.constraint import (
    Constraint,
    Guide,
    find_forbidden,
    follow,
    process,
    process_nodes,
    prune,
)

__all__ = [
    "Constraint",
    "Guide",
    "find_forbidden",
    "follow",
    "process",
    "process_nodes",
    "prune",
]
