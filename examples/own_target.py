"""Your own language model as a target: the same text in fewer passes.

First comes a small transformer as anybody writes one: two functions over a dictionary
of arrays, which know nothing of eagle_jax. Then `OwnTarget` gives it the four methods
that eagle_jax asks for. The model learns a rhyme by heart, and prompt lookup drafts
what the rhyme repeats.

Run it with `python examples/own_target.py`; docs/your-own-target.md explains it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import eagle_jax
from eagle_jax.testing import assert_same_tokens, assert_valid_target

PARTS = (
    *("the house that Jack built", "the malt that lay in", "the rat that ate"),
    *("the cat that killed", "the dog that worried"),
    "the cow with the crumpled horn that tossed",
    "the maiden all forlorn that milked",
)
LINES = [("This is", *reversed(PARTS[: last + 1]), "\n") for last in range(len(PARTS))]
RHYME = " ".join(part for line in LINES for part in line).split(" ")
WORDS = sorted(set(RHYME))
TEXT = [WORDS.index(word) for word in RHYME]

LAYERS, WIDTH = 2, 64


def init_params(seed: int) -> dict[str, Any]:
    """Returns random parameters: two tables, and four matrices per layer."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(rows, columns)) / rows**0.5, jnp.float32)

    def layer() -> dict[str, jax.Array]:
        mix = {"qkv": matrix(WIDTH, 3 * WIDTH), "out": matrix(WIDTH, WIDTH)}
        return mix | {"up": matrix(WIDTH, 256), "down": matrix(256, WIDTH)}

    tables = {"words": matrix(len(WORDS), WIDTH), "places": matrix(len(TEXT), WIDTH)}
    return tables | {"layers": [layer() for _ in range(LAYERS)]}


def transformer(
    params: Any, tokens: jax.Array, positions: jax.Array, visible: jax.Array, past: Any
) -> tuple[jax.Array, Any]:
    """Returns hidden states `[B, T, E]`, and keys and values of every layer.

    `visible` `[B, T, S + T]` says which of the `S` slots of `past`, and which of the
    `T` new tokens, each new token sees.
    """
    x = params["words"][tokens] + params["places"][positions]
    entries = []
    for layer, (old_keys, old_values) in zip(params["layers"], past, strict=True):
        queries, keys, values = jnp.split(
            jax.nn.standardize(x) @ layer["qkv"], 3, axis=-1
        )
        entries.append((keys, values))
        keys = jnp.concatenate([old_keys, keys], axis=1)
        values = jnp.concatenate([old_values, values], axis=1)
        scores = jnp.einsum("bte,bse->bts", queries, keys) / WIDTH**0.5
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
        x += weights @ values @ layer["out"]
        x += jax.nn.gelu(jax.nn.standardize(x) @ layer["up"]) @ layer["down"]
    return jax.nn.standardize(x), entries


@dataclasses.dataclass(frozen=True)
class OwnTarget:
    """All that eagle_jax asks of a model; `eagle_jax.Target` says it in full.

    It is frozen, so that it is hashable: it is a static argument of `jax.jit`.
    """

    def init_cache(self, batch: int, capacity: int) -> dict[str, Any]:
        """Returns an empty cache; every array has the batch as axis 0."""
        kind = (batch, capacity, WIDTH), jnp.float32
        past = [(jnp.zeros(*kind), jnp.zeros(*kind)) for _ in range(LAYERS)]
        # A length for each row: rows accept different numbers of drafts.
        return {"length": jnp.zeros(batch, jnp.int32), "past": past}

    def forward(
        self, params: Any, tokens: Any, positions: Any, mask: Any, cache: Any
    ) -> eagle_jax.TargetOutput:
        """Runs the model over a prompt, one token or a tree; writes no cache."""
        batch, num_tokens = tokens.shape
        if mask is None:
            mask = jnp.tri(num_tokens, dtype=bool)
        num_slots = cache["past"][0][0].shape[1]
        is_text = jnp.arange(num_slots) < cache["length"][:, None, None]
        # Of the cache a token sees the text; of the other new tokens, its ancestors.
        old = jnp.broadcast_to(is_text, (batch, num_tokens, num_slots))
        new = jnp.broadcast_to(mask, (batch, num_tokens, num_tokens))
        visible = jnp.concatenate([old, new], axis=-1)
        hidden, entries = transformer(params, tokens, positions, visible, cache["past"])
        return eagle_jax.TargetOutput(hidden=hidden, features=hidden, entries=entries)

    def unembed(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Returns float32 logits."""
        return hidden @ params["words"].T

    def commit(
        self, cache: dict[str, Any], entries: Any, path: jax.Array, count: jax.Array
    ) -> dict[str, Any]:
        """Writes the accepted path's keys and values after each row's text."""

        def write(slots: jax.Array, new: jax.Array) -> jax.Array:
            accepted = jnp.take_along_axis(new, path[..., None], axis=1)
            return eagle_jax.append_rows(slots, accepted, cache["length"])

        past = jax.tree.map(write, cache["past"], entries)
        # What was written after the new length is no text: it is written over.
        return {"length": cache["length"] + count, "past": past}


def learn(params: Any, num_steps: int) -> Any:
    """Returns parameters that know most of `TEXT` by heart."""
    target, optimizer, tokens = OwnTarget(), optax.adam(3e-3), jnp.array([TEXT])

    def loss(params: Any) -> jax.Array:
        nothing, places = target.init_cache(1, 0), jnp.arange(len(TEXT) - 1)[None]
        output = target.forward(params, tokens[:, :-1], places, None, nothing)
        logits = target.unembed(params, output.hidden)
        labels = tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def step(params: Any, state: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(num_steps):
        params, state = step(params, state)
    return params


# In float32 one row and many give the same tokens; in fewer bits near ties differ.
@jax.default_matmul_precision("highest")
def main() -> None:
    """Decodes greedily and at temperature 1, with drafts and without."""
    target = OwnTarget()
    assert_valid_target(target, init_params(seed=0), vocab_size=len(WORDS))
    params = eagle_jax.Params(target=learn(init_params(seed=0), num_steps=40))
    drafter = eagle_jax.LookupDrafter(depth=10, num_matches=2)
    decoder = eagle_jax.Decoder(target=target, drafter=drafter)
    temperatures, prompt = (0.0, 1.0), TEXT[:7]
    requests = eagle_jax.make_requests(
        [prompt] * len(temperatures),
        max_new_tokens=len(TEXT) - len(prompt),
        temperature=temperatures,
    )
    drafted = eagle_jax.generate(decoder, params, requests)
    plain = eagle_jax.autoregressive.generate(decoder, params, requests)
    assert_same_tokens(drafted.tokens[:, : len(TEXT)], plain.tokens[:, : len(TEXT)])
    for row, temperature in enumerate(temperatures):
        words = (WORDS[token] for token in drafted.tokens[row, : len(TEXT)].tolist())
        passes = drafted.num_rounds[row], plain.num_rounds[row]
        print("", " ".join(words))
        print(f"temperature {temperature:g}: identical tokens, ", end="")
        print("{} passes instead of {}\n".format(*passes))


if __name__ == "__main__":
    main()
