"""From the target's logits to a token; both decoding paths call the same code.

Noise is a function of the request's key and the absolute position alone, so a text
depends on neither drafts, nor rounds, nor the rest of the batch.
"""

import jax
import jax.numpy as jnp

from eagle_jax.decoding.requests import Requests
from eagle_jax.interface import Sampling
from eagle_jax.logits import is_filtered, process_logits

# Folds that no position reaches, so that purposes never share noise.
_REJECTION = 2**32 - 1
_DRAFTING = 2**32 - 2


def draw_token(
    logits: jax.Array,
    key: jax.Array,
    position: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array,
    top_k: jax.Array,
    is_filtered: jax.Array,
) -> jax.Array:
    """Draws the token at an absolute position; the same call gives the same token.

    Args:
        logits: `[V]` float32.
        key: The request's key, not consumed.
        position: `[]` int32, absolute position of the token that is drawn.
        temperature: `[]` float32; 0 takes the argmax.
        top_p: `[]` float32.
        top_k: `[]` int32.
        is_filtered: `[]` bool, not mapped.

    Returns:
        `[]` int32.
    """
    processed = process_logits(logits, temperature, top_p, top_k, is_filtered)
    noise = jax.random.gumbel(jax.random.fold_in(key, position), logits.shape)
    noisy = processed + jnp.where(temperature > 0, noise, 0.0)
    return jnp.argmax(noisy).astype(jnp.int32)


def target_law(
    logits: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array,
    top_k: jax.Array,
    is_filtered: jax.Array,
) -> jax.Array:
    """Returns the law that a token is drawn from: `[V]` float32 probabilities."""
    processed = process_logits(logits, temperature, top_p, top_k, is_filtered)
    one_hot = jax.nn.one_hot(jnp.argmax(logits), logits.shape[0])
    return jnp.where(temperature > 0, jax.nn.softmax(processed), one_hot)


def choose_tokens(
    requests: Requests, logits: jax.Array, positions: jax.Array, *, greedy: bool
) -> jax.Array:
    """Chooses one token per row, as plain decoding does.

    Args:
        requests: `B` rows.
        logits: `[B, V]` float32.
        positions: `[B]` int32, absolute positions of the chosen tokens.
        greedy: Take the argmax and compile no sampling. Static.

    Returns:
        `[B]` int32.
    """
    if greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.vmap(draw_token, in_axes=(0, 0, 0, 0, 0, 0, None))(
        logits,
        requests.keys,
        positions,
        requests.temperature,
        requests.top_p,
        requests.top_k,
        is_filtered(requests.top_p, requests.top_k),
    )


def rejection_noise(
    key: jax.Array, root_position: jax.Array, num_nodes: int, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the coins `[N]` and the Gumbel noise `[V]` of one verification.

    Args:
        key: The request's key, not consumed.
        root_position: `[]` int32, absolute: what a round draws must not depend on
            how many rounds came before.
        num_nodes: `N`. Static.
        vocab_size: `V`. Static.
    """
    key = jax.random.fold_in(jax.random.fold_in(key, _REJECTION), root_position)
    coin_key, noise_key = jax.random.split(key)
    coins = jax.random.uniform(coin_key, (num_nodes,))
    return coins, jax.random.gumbel(noise_key, (vocab_size,))


def draft_sampling(requests: Requests, root_positions: jax.Array) -> Sampling:
    """Returns what drafters draw with; its noise is apart from all other noise.

    Args:
        requests: `B` rows.
        root_positions: `[B]` int32, absolute.
    """

    def fold(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, _DRAFTING), position)

    return Sampling(
        keys=jax.vmap(fold)(requests.keys, root_positions),
        temperature=requests.temperature,
        top_p=requests.top_p,
        top_k=requests.top_k,
    )
