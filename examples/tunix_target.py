"""A model of tunix as a target: Qwen3, which writes its own cache.

The EAGLE head borrows the model's two tables. All weights are random, so it drafts
badly; prompt lookup drafts what repeats.

Run it with `python examples/tunix_target.py` where the extra `examples` is installed.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen3.model import ModelConfig, Qwen3

import eagle_jax
from eagle_jax.adapters import CacheWritingTarget
from eagle_jax.heads.head import HeadParams
from eagle_jax.sampling import draw_tokens, position_noise
from eagle_jax.testing import assert_same_tokens

WIDTH, VOCABULARY, START, LENGTH = 32, 64, 8, 60
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


def make_target(model: Qwen3) -> CacheWritingTarget:
    """Returns a model as a target; make it once, for it is static under `jax.jit`."""
    graph = nnx.graphdef(model)

    def apply(params: Any, tokens: Any, positions: Any, layers: Any, mask: Any) -> Any:
        model, written = nnx.merge(graph, params), {}
        x = model.embedder.encode(tokens)
        for number, layer in enumerate(model.layers):
            name = f"layer_{number}"
            written[name], x = layer(x, positions, layers[name], mask)
        hidden = model.final_norm(x)
        return hidden, hidden, written

    def project(params: Any, hidden: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        is_tied = model.config.use_tied_embedding
        return model.embedder.decode(hidden) if is_tied else model.lm_head(hidden)

    def empty(batch: int, slots: int) -> Any:
        return model.init_cache(batch, slots, model.config.dtype)

    return CacheWritingTarget(apply=apply, project=project, empty=empty)


def make_model() -> Qwen3:
    """Returns a tiny model with random weights."""
    sizes = {"vocab_size": VOCABULARY, "embed_dim": WIDTH, "hidden_dim": 48, **HEADS}
    config = ModelConfig(num_layers=2, rope_theta=1_000_000, norm_eps=1e-6, **sizes)
    graph, params = nnx.split(Qwen3(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    drawn = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / 4), params)
    return nnx.merge(graph, drawn)


def make_drafter(model: Qwen3) -> tuple[eagle_jax.Drafter, HeadParams]:
    """Returns prompt lookup with an EAGLE head beside it, and the head's weights."""
    rope = eagle_jax.RopeConfig(theta=10_000)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "rms_norm_eps": 1e-6}
    config = eagle_jax.EagleHeadConfig(
        layer=eagle_jax.LayerConfig(**sizes, **HEADS, rope=rope),
        vocab_size=VOCABULARY,
        max_positions=2048,
    )
    head = eagle_jax.EagleHead(config=config)
    params = HeadParams(
        head=head.init(jax.random.key(0)),
        embedding=model.embedder.input_embedding[...],
        output_head=model.lm_head.w[...],
    )
    tree = eagle_jax.TreeConfig(num_nodes=8, depth=3, width=2)
    lookup = eagle_jax.LookupDrafter(depth=4)
    second = eagle_jax.TreeDrafter(model=head, tree=tree)
    return eagle_jax.SwitchDrafter(first=lookup, second=second, min_match=2), params


class Numbers:
    """A tokenizer whose texts are the numbers of their tokens; no token is special."""

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        return [int(number) for number in text.split()]

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of some tokens."""
        return " ".join(map(str, tokens))

    def bos_id(self) -> None:
        """No token begins a text."""

    def eos_id(self) -> int:
        """No token ends a text."""
        return -1

    pad_id = eos_id


def own_texts(model: Qwen3) -> list[np.ndarray]:
    """Returns the greedy text of tunix's own sampler, a row `[LENGTH - START]`."""
    config = CacheConfig(cache_size=LENGTH, num_layers=2, num_kv_heads=2, head_dim=8)
    sampler = Sampler(model, Numbers(), config)
    prompt = Numbers().decode(list(range(START)))
    return sampler(prompt, LENGTH - START, max_prompt_length=START).tokens


# In float32 one row and many give the same tokens; in fewer bits near ties differ.
@jax.default_matmul_precision("highest")
def main() -> None:
    """Decodes with drafts and without, and as tunix does: its sampler, no cache."""
    model = make_model()
    drafter, head = make_drafter(model)
    decoder = eagle_jax.Decoder(target=make_target(model), drafter=drafter)
    params = eagle_jax.Params(target=nnx.state(model), drafter=head)
    requests = eagle_jax.make_requests(
        [list(range(START))] * 2, max_new_tokens=LENGTH - START, temperature=[0, 1]
    )
    drafted = eagle_jax.generate(decoder, params, requests)
    plain = eagle_jax.autoregressive.generate(decoder, params, requests)
    tokens = drafted.tokens[:, :LENGTH]
    assert_same_tokens(tokens, plain.tokens[:, :LENGTH])

    positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
    logits, _ = model(tokens, positions, None, jnp.tri(LENGTH, dtype=bool)[None])
    sampling, places = requests.sampling, positions[:, START:]
    noise = position_noise(requests.keys, places, sampling, VOCABULARY)
    draw = jax.vmap(draw_tokens, in_axes=(1, 1, None), out_axes=1)
    drawn = draw(logits[:, START - 1 : -1], noise, sampling)
    assert_same_tokens(drawn, tokens[:, START:])
    assert_same_tokens(tokens[:1, START:], own_texts(model))
    print("tunix's own sampler: identical tokens")
    for row, name in enumerate(["greedy", "sampled"]):
        passes = f"{drafted.num_rounds[row]} passes instead of {plain.num_rounds[row]}"
        print(f"{name}: identical tokens, {passes}")


if __name__ == "__main__":
    main()
