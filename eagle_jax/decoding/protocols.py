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
    named, drafting = type(target).__name__, type(drafter).__name__
    batch, count = len(prompts), requests.prompt_lengths
    tokens = prompts[:, : chunk_size(prompts.shape[1])]
    rows = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cache = target.init_cache(batch, num_slots)
    check_batch(f"{named}.init_cache", cache, batch)
    output = target.forward(params.target, tokens, rows, None, cache)
    if not isinstance(output, TargetOutput):
        raise InputError(
            f"{named}.forward returns a {type(output).__name__}, but must return "
            "eagle_jax.TargetOutput(hidden=..., features=..., entries=...)"
        )
    hidden, features = output.hidden, output.features
    found = {"hidden": hidden, "features": features}
    wanted = {name: _like(array, *tokens.shape) for name, array in found.items()}
    _check(f"{named}.forward", wanted, found)
    logits = target.unembed(params.target, hidden[:, 0])
    wanted = {"logits": _like(logits, batch, dtype=jnp.float32)}
    _check(f"{named}.unembed", wanted, {"logits": logits})
    committed = target.commit(cache, output.entries, rows, count)
    _check(f"{named}.commit", cache, committed)

    state = drafter.init_state(batch, num_slots)
    check_batch(f"{drafting}.init_state", state, batch)
    begin = jnp.int32(0)
    chunk = PromptChunk(prompts=prompts, lengths=count, begin=begin, features=features)
    read = drafter.prefill_chunk(params.drafter, state, chunk)
    _check(f"{drafting}.prefill_chunk", state, read)
    noise = jnp.zeros((batch, decoder.depth + 1, logits.shape[1]))
    noise = noise if decoder.rule == "coupled" else None
    draws = Draws(sampling=requests.sampling, noise=noise, keys=requests.keys)
    tree, state = drafter.propose(params.drafter, read, tokens[:, 0], draws)
    nodes = (batch, tree.tokens.shape[-1])
    found = {name: getattr(tree, name) for name in _TREE_TYPES}
    wanted = {
        name: jax.ShapeDtypeStruct(nodes, dtype) for name, dtype in _TREE_TYPES.items()
    }
    if (drawn := tree.draft_logits) is not None:
        found["draft_logits"], wanted["draft_logits"] = drawn, _like(drawn, *nodes)
    _check(f"{drafting}.propose", wanted, found)
    verified = Verified(
        tree=tree,
        logits=jnp.zeros((*nodes, logits.shape[1])),
        features=jnp.zeros((*nodes, features.shape[2]), features.dtype),
        path=jnp.zeros((batch, decoder.depth + 1), jnp.int32),
        count=count,
    )
    advanced = drafter.advance(params.drafter, state, verified)
    _check(f"{drafting}.advance", read, advanced)
    return hidden


def check_batch(where: str, found: Any, batch: int) -> None:
    """Raises if a leaf of what `where` returns has another axis 0 than the batch."""
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((batch, *jnp.shape(x)[1:]), jnp.result_type(x)),
        found,
    )
    _check(f"{where} (axis 0 is the batch)", wanted, found)


def _like(array: jax.Array, *shape: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """Returns this shape with the last axis of an array behind it."""
    return jax.ShapeDtypeStruct((*shape, *array.shape[-1:]), dtype or array.dtype)


def _check(where: str, wanted: Any, found: Any) -> None:
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
