"""What targets and drafters return is checked as the first programs are traced.

A prefill sees every method of a target, a round those of a drafter; nothing of it is in
the compiled programs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.errors import InputError
from eagle_jax.interface.protocols import TargetOutput
from eagle_jax.tree import DraftTree

TREE_TYPES = {
    "tokens": np.int32,
    "parents": np.int32,
    "log_values": np.float32,
    "is_node": np.bool_,
}
"""The fields that every tree has, and their types."""


def check_output(where: str, output: Any, tokens: jax.Array) -> None:
    """Raises unless a target's output is one, for tokens `[B, T]`."""
    if not isinstance(output, TargetOutput):
        raise InputError(
            f"{where} returns a {type(output).__name__}, but must return "
            "eagle_jax.TargetOutput(hidden=..., features=..., entries=...)"
        )
    found = {"hidden": output.hidden, "features": output.features}
    wanted = {name: _like(array, *tokens.shape) for name, array in found.items()}
    check(where, wanted, found)


def check_logits(where: str, logits: jax.Array, batch: int) -> None:
    """Raises unless logits are `[B, V]` float32."""
    wanted = {"logits": _like(logits, batch, dtype=jnp.float32)}
    check(where, wanted, {"logits": logits})


def check_tree(where: str, tree: DraftTree, batch: int) -> None:
    """Raises unless the fields of a tree are `[B, N]`, with one `N` for all."""
    nodes = (batch, tree.tokens.shape[-1])
    found = {name: getattr(tree, name) for name in TREE_TYPES}
    wanted = {
        name: jax.ShapeDtypeStruct(nodes, dtype) for name, dtype in TREE_TYPES.items()
    }
    if (drawn := tree.draft_logits) is not None:
        found["draft_logits"], wanted["draft_logits"] = drawn, _like(drawn, *nodes)
    check(where, wanted, found)


def check_batch(where: str, found: Any, batch: int) -> None:
    """Raises if a leaf of what `where` returns has another axis 0 than the batch."""
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((batch, *jnp.shape(x)[1:]), jnp.result_type(x)),
        found,
    )
    check(f"{where} (axis 0 is the batch)", wanted, found)


def _like(array: jax.Array, *shape: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """Returns this shape with the last axis of an array behind it."""
    return jax.ShapeDtypeStruct((*shape, *array.shape[-1:]), dtype or array.dtype)


def check(where: str, wanted: Any, found: Any) -> None:
    """Raises unless a pytree has the structure, the shapes and the types wanted."""
    if jax.tree.structure(found) != jax.tree.structure(wanted):
        raise InputError(
            f"{where} returns the pytree {jax.tree.structure(found)}, but must return "
            f"{jax.tree.structure(wanted)}, as it was given"
        )
    leaves = jax.tree_util.tree_leaves_with_path(found)
    for (path, leaf), like in zip(leaves, jax.tree.leaves(wanted), strict=True):
        shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
        if (shape, dtype) != (like.shape, like.dtype):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise InputError(
                f"{where} returns {name or 'an array'} of shape {list(shape)} "
                f"{dtype}, but must return {list(like.shape)} {like.dtype}"
            )
