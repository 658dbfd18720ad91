"""An EAGLE head for your own model: trained on texts that the model writes itself.

Training meets the target through its protocol, as decoding does: `forward` gives the
features to be learnt. Beside that it borrows two arrays, the embedding and the output
head, which `tables` finds in the target's parameters, whatever pytree they are.

Run it with `python -m examples.train_for_own_target`; docs/your-own-target.md explains
it.
"""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

import eagle_jax
from eagle_jax.heads.eagle import EagleLoss
from eagle_jax.heads.rows import PackedRows
from eagle_jax.testing import assert_same_tokens
from eagle_jax.training.config import OptimizerConfig
from eagle_jax.training.encode import EncodedExample
from eagle_jax.training.packing import pack, rows_at
from eagle_jax.training.step import StepConfig, init_state, train_step
from examples.own_target import TEXT, WIDTH, WORDS, OwnTarget, init_params, learn

LAYER = eagle_jax.LayerConfig(
    hidden_size=WIDTH,  # The target's: a head predicts its features.
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=eagle_jax.RopeConfig(theta=10000.0),
)
HEAD = eagle_jax.EagleHead(
    config=eagle_jax.EagleHeadConfig(
        layer=LAYER, vocab_size=len(WORDS), max_positions=len(TEXT)
    )
)
TREE = eagle_jax.TreeConfig(num_nodes=12, depth=5, width=3)
PROMPT = 7


def tables(params: Any) -> Any:
    """Returns the two arrays that the head borrows; the output head is `words.T`."""
    return SimpleNamespace(embedding=params["words"], output_head=None)


def requests_of(seeds: range, temperature: float | list[float]) -> eagle_jax.Requests:
    """Returns requests for the rest of the rhyme, one per seed."""
    return eagle_jax.make_requests(
        [TEXT[:PROMPT]] * len(seeds),
        max_new_tokens=len(TEXT) - PROMPT,
        temperature=temperature,
        seeds=seeds,
    )


def write_texts(params: Any, num_texts: int) -> PackedRows:
    """Returns texts that the target samples, in rows of one length."""
    decoder = eagle_jax.Decoder(target=OwnTarget())
    written = eagle_jax.autoregressive.generate(
        decoder, eagle_jax.Params(target=params), requests_of(range(num_texts), 1.0)
    )
    mask = np.arange(len(TEXT)) >= PROMPT  # What the target wrote is to be predicted.
    texts = np.asarray(written.tokens[:, : len(TEXT)])
    samples = [EncodedExample(tokens=text, loss_mask=mask) for text in texts]
    return pack(samples, len(TEXT))


def decode(params: Any, head: Any) -> list[float]:
    """Returns tokens per round, greedy and sampled; the text is plain decoding's."""
    drafter = eagle_jax.TreeDrafter(model=HEAD, tree=TREE)
    decoder = eagle_jax.Decoder(target=OwnTarget(), drafter=drafter)
    both = eagle_jax.Params(target=params, drafter=HEAD.join(head, tables(params)))
    requests = requests_of(range(1000, 1002), [0.0, 1.0])  # Seeds of no training text.
    drafted = eagle_jax.generate(decoder, both, requests)
    plain = eagle_jax.autoregressive.generate(decoder, both, requests)
    assert_same_tokens(drafted.tokens[:, : len(TEXT)], plain.tokens[:, : len(TEXT)])
    return (plain.num_rounds / drafted.num_rounds).tolist()


# In float32 one row and many give the same tokens; in fewer bits near ties differ.
@jax.default_matmul_precision("highest")
def main(num_steps: int = 200, num_texts: int = 24) -> None:
    """Trains a head and decodes with it, before and after."""
    params = learn(init_params(seed=0), num_steps=40)
    rows = write_texts(params, num_texts)
    config = StepConfig(
        target=OwnTarget(),
        head=HEAD,
        loss=EagleLoss(),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=num_steps // 10),
        steps=num_steps,
        tables=tables,
    )
    step = jax.jit(train_step, static_argnames="config", donate_argnames="state")
    state = init_state(config, seed=0)
    before = decode(params, state.params)
    for number in range(num_steps):
        batch = rows[rows_at(len(rows), number, 8, seed=0)]
        state, metrics = step(state, params, batch, None, config=config)
        if (number + 1) % (num_steps // 4) == 0:
            print(f"step {number + 1}: loss {metrics.loss:.3f}, ", end="")
            print(f"same most likely word {metrics.agreement:.2f}")
    after = decode(params, state.params)
    for row, name in enumerate(("temperature 0", "temperature 1")):
        print(f"{name}: identical tokens, tokens per round ", end="")
        print(f"{before[row]:.2f} before and {after[row]:.2f} after training")


if __name__ == "__main__":
    main()
