"""What a target and a drafter return is checked once, as their prefill is traced."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests
from eagle_jax.errors import InputError
from eagle_jax.interface import Draws, Params, PromptChunk, TargetOutput, Verified
from eagle_jax.prefill import chunk_size

_TREE_TYPES = {
    "tokens": jnp.int32,
    "parents": jnp.int32,
    "log_values": jnp.float32,
    "is_node": jnp.bool_,
}


def check_protocols(
    decoder: Decoder, params: Params, requests: Requests, *, num_slots: int
) -> jax.ShapeDtypeStruct:
    """Calls every method of a decoder's target and drafter, and computes nothing.

    Returns:
        The shape of the target's hidden states of a chunk, `[B, C, E]`.

    Raises:
        InputError: If something that comes back has another shape, type or structure
            than the protocol wants; names the method.
    """
    walk = functools.partial(_call_all, decoder, num_slots)
    return jax.eval_shape(walk, params, requests)


def _call_all(
    decoder: Decoder, num_slots: int, params: Params, requests: Requests
) -> jax.Array:
    target, drafter, prompts = decoder.target, decoder.drafting, requests.prompts
    target_name, drafter_name = type(target).__name__, type(drafter).__name__
    batch, count = len(prompts), requests.prompt_lengths
    tokens = prompts[:, : chunk_size(prompts.shape[1])]
    rows = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cache = target.init_cache(batch, num_slots)
    check_batch(f"{target_name}.init_cache", cache, batch)
    output = target.forward(params.target, tokens, rows, None, cache)
    if not isinstance(output, TargetOutput):
        raise InputError(
            f"{target_name}.forward returns a {type(output).__name__}, but must "
            "return eagle_jax.TargetOutput(hidden=..., features=..., entries=...)"
        )
    hidden, features = output.hidden, output.features
    _check(f"{target_name}.forward", "hidden", hidden, (*tokens.shape, None))
    _check(f"{target_name}.forward", "features", features, (*tokens.shape, None))
    logits = target.unembed(params.target, hidden[:, 0])
    _check(f"{target_name}.unembed", "logits", logits, (batch, None), jnp.float32)
    _check_same(
        f"{target_name}.commit",
        cache,
        target.commit(cache, output.entries, rows, count),
    )

    state = drafter.init_state(batch, num_slots)
    check_batch(f"{drafter_name}.init_state", state, batch)
    begin = jnp.int32(0)
    chunk = PromptChunk(prompts=prompts, lengths=count, begin=begin, features=features)
    read = drafter.prefill_chunk(params.drafter, state, chunk)
    _check_same(f"{drafter_name}.prefill_chunk", state, read)
    noise = jnp.zeros((batch, decoder.depth + 1, logits.shape[1]))
    noise = noise if decoder.rule == "coupled" else None
    draws = Draws(sampling=requests.sampling, noise=noise, keys=requests.keys)
    tree, state = drafter.propose(params.drafter, read, tokens[:, 0], draws)
    nodes = (batch, tree.tokens.shape[-1])
    for name, dtype in _TREE_TYPES.items():
        _check(f"{drafter_name}.propose", name, getattr(tree, name), nodes, dtype)
    if tree.draft_logits is not None:
        _check(
            f"{drafter_name}.propose", "draft_logits", tree.draft_logits, (*nodes, None)
        )
    verified = Verified(
        tree=tree,
        logits=jnp.zeros((*nodes, logits.shape[1])),
        features=jnp.zeros((*nodes, features.shape[2]), features.dtype),
        path=jnp.zeros((batch, decoder.depth + 1), jnp.int32),
        count=count,
    )
    advanced = drafter.advance(params.drafter, state, verified)
    _check_same(f"{drafter_name}.advance", read, advanced)
    return hidden


def check_batch(where: str, tree: Any, batch: int) -> None:
    """Raises if a leaf of what `where` returns has another axis 0 than the batch."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        shape = (batch, *jnp.shape(leaf)[1:])
        _check(f"{where} (axis 0 is the batch)", _name(path), leaf, shape)


def _check_same(where: str, old: Any, new: Any) -> None:
    """Raises unless a cache or a state keeps its structure, its shapes and types."""
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise InputError(
            f"{where} returns the pytree {jax.tree.structure(new)}, but "
            f"was given {jax.tree.structure(old)}; return the same with other values"
        )
    leaves = jax.tree_util.tree_leaves_with_path(old)
    for (path, before), after in zip(leaves, jax.tree.leaves(new), strict=True):
        _check(where, _name(path), after, before.shape, before.dtype)


def _check(
    where: str,
    name: str,
    array: jax.Array,
    shape: tuple[int | None, ...],
    dtype: Any = None,
) -> None:
    """Raises if an array has another shape or type; `None` stands for any."""
    found, given_dtype = jnp.shape(array), jnp.result_type(array)
    dtype = given_dtype if dtype is None else jnp.dtype(dtype)
    fits = len(found) == len(shape) and all(
        size in (None, given) for size, given in zip(shape, found, strict=True)
    )
    if not fits or given_dtype != dtype:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise InputError(
            f"{where} returns {name} of shape {list(found)} {given_dtype}, "
            f"but must return [{wanted}] {dtype}"
        )


def _name(path: Any) -> str:
    """Returns what an error calls a leaf; a pytree may be one array."""
    return jax.tree_util.keystr(path) or "an array"
