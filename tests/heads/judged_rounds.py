"""The trees that a pair proposes, round by round, and what they were made from."""

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from eagle_jax.decoding import speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.engine import Pair
from eagle_jax.engine.open import open_pair
from eagle_jax.tree import MEDUSA_TREE
from tests.helpers import settings_of

Logits = Callable[[np.ndarray, list[int]], np.ndarray]
"""The judge: hidden states `[T, E]`, a path of tokens from the root on -> `[V]`."""

ROUNDS = 4


def load(target: Path, draft: Path, method: str) -> Pair:
    """The pair, in float32."""
    return open_pair(str(target), str(draft), settings_of(method=method)).load()


def check_trees(pair: Pair, prompt: list[int], judge: Logits) -> None:
    """Every node of mc_sim_7b_63 is the judge's, greedy, after the prompt and later."""
    target, drafter = pair.target, pair.drafter
    requests = make_requests([prompt], max_new_tokens=40, prompt_bucket=16)
    decoder = Decoder(target=target, drafter=drafter, acceptance="greedy")
    state = speculative.prefill(decoder, pair.params, requests, num_slots=96)
    for _ in range(ROUNDS):
        text = state.tokens[:, : int(state.lengths[0])]
        state, done = speculative.decode_round(decoder, pair.params, state)
        positions = jnp.arange(text.shape[1])[None]
        empty = target.init_cache(1, 0)
        read = target.forward(pair.params.target, text, positions, None, empty)
        # The root is not read yet: what is known is what stands before it.
        hidden = np.array(read.hidden[0, :-1])
        tokens: dict[tuple[int, ...], int] = {(): int(text[0, -1])}
        children: dict[tuple[int, ...], np.ndarray] = {}
        for path in MEDUSA_TREE.paths:
            above = path[:-1]
            if above not in children:
                drafted = [tokens[path[:n]] for n in range(len(path))]
                children[above] = np.argsort(-judge(hidden, drafted), kind="stable")
            tokens[path] = int(children[above][path[-1]])
        order = [(), *MEDUSA_TREE.paths]
        parents = [-1, *(order.index(path[:-1]) for path in order[1:])]
        assert done.tree.tokens[0].tolist() == [tokens[path] for path in order]
        assert done.tree.parents[0].tolist() == parents
