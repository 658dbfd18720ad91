"""Gemma 3 of the package gemma as a target: it writes its own cache.

Its sliding windows read the positions that it stores in the cache, so that they are
right in a tree too. The weights are random; prompt lookup drafts what repeats.

Run it with `python examples/gemma_target.py` where the extra `examples` is installed.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gemma import gm

import eagle_jax
from eagle_jax.adapters import CacheWritingTarget
from eagle_jax.sampling import draw_tokens, position_noise
from eagle_jax.testing import assert_same_tokens, programs

VOCABULARY, START, LENGTH = 64, 8, 60
PROMPT = list(range(1, START + 1))  # Gemma takes token 0 for padding.


def make_target(model: gm.nn.Transformer) -> CacheWritingTarget:
    """Returns a model as a target; make it once, for it is static under `jax.jit`."""

    def apply(params: Any, tokens: Any, positions: Any, layers: Any, mask: Any) -> Any:
        inputs = {"positions": positions, "cache": layers, "attention_mask": mask}
        output = model.apply(params, tokens, **inputs, return_hidden_states=True)
        return output.hidden_states, output.hidden_states, output.cache

    def project(params: Any, hidden: jax.Array) -> jax.Array:
        logits = hidden @ params["params"]["embedder"]["input_embedding"].T
        cap = model.config.final_logit_softcap
        return logits if cap is None else jnp.tanh(logits / cap) * cap

    def empty(batch: int, slots: int) -> Any:
        sizes = {"batch_size": batch, "cache_length": slots}
        return model.init_cache(**sizes, dtype=model.dtype)

    return CacheWritingTarget(apply=apply, project=project, empty=empty)


def make_model() -> tuple[gm.nn.Transformer, Any]:
    """Returns a tiny model and its random parameters."""
    config = dataclasses.replace(
        gm.nn.Gemma3_1B.config,
        **{"num_embed": VOCABULARY, "embed_dim": 32, "hidden_dim": 48, "head_dim": 8},
        attention_types=gm.nn.Gemma3_1B.config.attention_types[4:6],
        sliding_window_size=16,
        final_logit_softcap=30.0,  # As in Gemma 2.
    )
    model = gm.nn.Transformer(config=config, dtype=jnp.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    rng = np.random.default_rng(0)
    drawn = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / 4), shapes)
    return model, drawn


class NoTokens:
    """No token ends a text."""

    EOS = END_OF_TURN = BEGIN_OF_TOOL_RESPONSE = -1


class Numbers(gm.text.Gemma3Tokenizer):
    """A tokenizer whose texts are the numbers of their tokens."""

    special_tokens = NoTokens

    def encode(self, text: str, *, add_bos: bool = False) -> list[int]:
        """Returns the tokens of a text."""
        return [int(number) for number in text.split()]

    def decode(self, tokens: Any) -> str:
        """Returns the text of some tokens."""
        return " ".join(map(str, tokens))


def own_texts(model: gm.nn.Transformer, weights: Any) -> jax.Array:
    """Returns the greedy text of gemma's own sampler, a row `[1, LENGTH - START]`."""
    sampler = gm.text.Sampler(
        model=model,
        params=weights["params"],
        tokenizer=Numbers(),
        cache_length=LENGTH,
        max_out_length=LENGTH - START,
        pad_length=START,
    )
    return sampler.sample([Numbers().decode(PROMPT)], return_state=True).tokens


# In float32 one row and many give the same tokens; in fewer bits near ties differ.
@jax.default_matmul_precision("highest")
def main() -> None:
    """Decodes with drafts and without, and as gemma does: its sampler, no cache."""
    model, weights = make_model()
    drafter = eagle_jax.LookupDrafter(depth=4, num_matches=2)
    decoder = eagle_jax.Decoder(target=make_target(model), drafter=drafter)
    params = eagle_jax.Params(target=weights)
    requests = eagle_jax.make_requests(
        [PROMPT] * 2, max_new_tokens=LENGTH - START, temperature=[0, 1]
    )
    drafted = eagle_jax.generate(decoder, params, requests)
    plain = eagle_jax.autoregressive.generate(decoder, params, requests)
    tokens = drafted.tokens[:, :LENGTH]
    assert_same_tokens(tokens, plain.tokens[:, :LENGTH])

    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
    causal = jnp.broadcast_to(jnp.tri(LENGTH, dtype=bool), (2, LENGTH, LENGTH))
    inputs = {"positions": positions, "attention_mask": causal}
    logits = model.apply(weights, tokens, **inputs).logits
    sampling, places = requests.sampling, positions[:, START:]
    noise = position_noise(requests.keys, places, sampling, VOCABULARY)
    draw = jax.vmap(draw_tokens, in_axes=(1, 1, None), out_axes=1)
    drawn = draw(logits[:, START - 1 : -1], noise, sampling)
    assert_same_tokens(drawn, tokens[:, START:])
    assert_same_tokens(tokens[:1, START:], own_texts(model, weights))
    print("gemma's own sampler: identical tokens")
    for row, name in enumerate(["greedy", "sampled"]):
        passes = f"{drafted.num_rounds[row]} passes instead of {plain.num_rounds[row]}"
        print(f"{name}: identical tokens, {passes}")

    state = eagle_jax.speculative.prefill(decoder, params, requests, num_slots=128)
    program = eagle_jax.speculative.decode_round.lower(decoder, params, state)
    lines = programs.every_line(program.compile().as_text())
    shape = state.target_cache.layers["layer_0"]["k"].shape
    print(f"{len(programs.find_copies(lines, shape))} copies of a cache in a round")


if __name__ == "__main__":
    main()
