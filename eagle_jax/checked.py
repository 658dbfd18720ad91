"""Calls of targets and drafters that check, as they are traced, what comes back.

Nothing of it is in the compiled program.
"""

from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.errors import InputError
from eagle_jax.interface import (
    Cache,
    Drafter,
    Draws,
    Entries,
    PromptChunk,
    Target,
    TargetOutput,
)
from eagle_jax.tree import DraftTree


def init_cache(target: Target, batch: int, capacity: int) -> Cache:
    """Calls `Target.init_cache`, and checks what comes back as it is traced.

    Raises:
        InputError: If the batch is not axis 0 of every leaf.
    """
    cache = target.init_cache(batch, capacity)
    _check_batch(target, "init_cache", cache, batch)
    return cache


def forward(
    target: Target,
    params: Any,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array | None,
    cache: Cache,
) -> TargetOutput:
    """Calls `Target.forward`, and checks what comes back as it is traced.

    Raises:
        InputError: If it is no `TargetOutput`, or `hidden` or `features` have another
            shape than the protocol's.
    """
    output = target.forward(params, tokens, positions, mask, cache)
    if not isinstance(output, TargetOutput):
        raise InputError(
            f"{type(target).__name__}.forward returns a {type(output).__name__}, but "
            "must return eagle_jax.TargetOutput(hidden=..., features=..., entries=...)"
        )
    for name, array in (("hidden", output.hidden), ("features", output.features)):
        _check(target, "forward", name, array, (*tokens.shape, None))
    return output


def unembed(target: Target, params: Any, hidden: jax.Array) -> jax.Array:
    """Calls `Target.unembed`, and checks what comes back as it is traced.

    Raises:
        InputError: If the logits are not `[..., V]` float32.
    """
    logits = target.unembed(params, hidden)
    shape = (*hidden.shape[:-1], None)
    _check(target, "unembed", "logits", logits, shape, jnp.float32)
    return logits


def commit(
    target: Target, cache: Cache, entries: Entries, path: jax.Array, count: jax.Array
) -> Cache:
    """Calls `Target.commit`, and checks what comes back as it is traced.

    Raises:
        InputError: If the cache has become another pytree or another size.
    """
    written = target.commit(cache, entries, path, count)
    _check_same(target, "commit", cache, written)
    return written


def init_state(drafter: Drafter, batch: int, capacity: int) -> Any:
    """Calls `Drafter.init_state`, and checks what comes back as it is traced.

    Raises:
        InputError: If the batch is not axis 0 of every leaf.
    """
    state = drafter.init_state(batch, capacity)
    _check_batch(drafter, "init_state", state, batch)
    return state


def prefill_chunk(drafter: Drafter, params: Any, state: Any, chunk: PromptChunk) -> Any:
    """Calls `Drafter.prefill_chunk`, and checks what comes back as it is traced.

    Raises:
        InputError: If the state has become another pytree or another size.
    """
    new = drafter.prefill_chunk(params, state, chunk)
    _check_same(drafter, "prefill_chunk", state, new)
    return new


def propose(
    drafter: Drafter, params: Any, state: Any, root: jax.Array, draws: Draws
) -> tuple[DraftTree, Any]:
    """Calls `Drafter.propose`, and checks what comes back as it is traced.

    What the constraint forbids is dropped from the tree.

    Raises:
        InputError: If a field of the tree is not `[B, N]`, with one `N` for all.
    """
    tree, state = drafter.propose(params, state, root, draws)
    shape = (*root.shape, tree.tokens.shape[-1])
    for name, dtype in (
        *(("tokens", jnp.int32), ("parents", jnp.int32)),
        *(("log_values", jnp.float32), ("is_node", jnp.bool_)),
    ):
        _check(drafter, "propose", name, getattr(tree, name), shape, dtype)
    if tree.draft_logits is not None:
        _check(drafter, "propose", "draft_logits", tree.draft_logits, (*shape, None))
    if draws.guide is not None:
        tree = draws.guide.prune(tree, drafter.depth)
    return tree, state


def check_round(drafter: Drafter, before: Any, after: Any) -> None:
    """Checks the state that a round leaves, as it is traced.

    Args:
        drafter: The drafter.
        before: The state that `Drafter.propose` was given.
        after: The state that `Drafter.advance` returned.

    Raises:
        InputError: If the state has become another pytree or another size.
    """
    _check_same(drafter, "advance", before, after)


def _check_batch(owner: object, method: str, tree: Any, batch: int) -> None:
    """Refuses a pytree with a leaf that has anything but the batch as axis 0."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        shape = list(jnp.shape(leaf))
        if shape[:1] != [batch]:
            raise InputError(
                f"{type(owner).__name__}.{method} returns {_name(path)} of shape "
                f"{shape}; axis 0 must be the batch of {batch}, so that rows can be "
                "inserted and taken out"
            )


def _check_same(owner: object, method: str, old: Any, new: Any) -> None:
    """Refuses a pytree that is not, leaf for leaf, as it was; shardings may differ."""
    name = f"{type(owner).__name__}.{method}"
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise InputError(
            f"{name} returns the pytree {jax.tree.structure(new)}, but was given "
            f"{jax.tree.structure(old)}; return the same with other values"
        )
    leaves = jax.tree_util.tree_leaves_with_path(old)
    for (path, before), after in zip(leaves, jax.tree.leaves(new), strict=True):
        shape, dtype = jnp.shape(after), jnp.result_type(after)
        if (shape, dtype) != (before.shape, before.dtype):
            raise InputError(
                f"{name} returns {_name(path)} of shape {list(shape)} {dtype}, but was "
                f"given {list(before.shape)} {before.dtype}; it changes no shape and "
                "no type"
            )


def _name(path: Any) -> str:
    """Returns what an error calls a leaf; a pytree may be one array."""
    return jax.tree_util.keystr(path) or "an array"


def _check(
    owner: object,
    method: str,
    name: str,
    array: jax.Array,
    shape: tuple[int | None, ...],
    dtype: Any = None,
) -> None:
    """Refuses an array of another shape or type; `None` stands for any."""
    fits = len(array.shape) == len(shape) and all(
        size in (None, given) for size, given in zip(shape, array.shape, strict=True)
    )
    if not fits or dtype not in (None, array.dtype):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        kind = "" if dtype is None else f" {jnp.dtype(dtype).name}"
        raise InputError(
            f"{type(owner).__name__}.{method} returns {name} of shape "
            f"{list(array.shape)} {array.dtype}, but must return [{wanted}]{kind}"
        )
