"""The joint distribution of three tokens, and whether many draws have it."""

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.decoding import speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.interface import Drafter, Params
from eagle_jax.testing import ToyTarget
from tests.helpers import texts

DRAWN_TARGET = ToyTarget(vocab_size=4, sharpness=1.0)


def distribution_of(prompt: list[int], temperature: float, top_k: int) -> np.ndarray:
    """`[4, 4, 4]`: of the next three tokens, from the toy's logits alone."""

    paths = jnp.array([[*prompt, first, second] for first, second in np.ndindex(4, 4)])

    @jax.jit
    def run(paths: jax.Array) -> jax.Array:
        places = jnp.broadcast_to(jnp.arange(paths.shape[1]), paths.shape)
        nothing = DRAWN_TARGET.init_cache(len(paths), 0)
        output = DRAWN_TARGET.forward((), paths, places, None, nothing)
        return DRAWN_TARGET.unembed((), output.hidden)

    logits = np.asarray(run(paths))[:, -3:] / temperature
    if top_k:
        logits[logits < np.sort(logits)[..., -top_k, None]] = -np.inf
    probs = np.exp(logits - logits.max(-1, keepdims=True), dtype=np.float64)
    probs = (probs / probs.sum(-1, keepdims=True)).reshape(4, 4, 3, 4)
    # Each path tells the distributions after the prompt and after each of its tokens.
    return probs[0, 0, 0][:, None, None] * probs[:, 0, 1][:, :, None] * probs[:, :, 2]


def check_drawn_texts(
    drafter: Drafter,
    params: Params,
    *,
    rule: speculative.AcceptanceRule,
    temperature: float,
    top_k: int,
    num_draws: int,
) -> float:
    """Compares many drawn texts with their distribution; returns drafts accepted."""
    prompt = [1, 2, 3]
    requests = make_requests(
        [prompt] * num_draws,
        max_new_tokens=3,
        temperature=temperature,
        top_k=top_k,
        seeds=range(num_draws),
    )
    state = speculative.generate(
        Decoder(target=DRAWN_TARGET, drafter=drafter, acceptance=rule), params, requests
    )
    check_joint_distribution(
        texts(requests, state), distribution_of(prompt, temperature, top_k)
    )
    return float(state.accept_lengths.sum()) / num_draws


def check_joint_distribution(drawn: list[list[int]], probs: np.ndarray) -> None:
    """Compares texts of three tokens each with their distribution."""
    counts = np.zeros((4, 4, 4))
    np.add.at(counts, tuple(np.array(drawn).T), 1)
    assert counts[probs == 0].sum() == 0
    distance = 0.5 * np.abs(counts / len(drawn) - probs).sum()
    # Mean of the distance for such draws; its deviation is far smaller.
    expected = 0.5 * np.sqrt(2 / np.pi * probs * (1 - probs) / len(drawn)).sum()
    assert distance < 1.5 * expected
