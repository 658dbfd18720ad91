"""The joint distribution of three tokens, and whether many draws have it."""

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

    def next_distribution(path: list[int]) -> np.ndarray:
        tokens = jnp.array([path])
        output = DRAWN_TARGET.forward(
            (),
            tokens,
            jnp.arange(len(path))[None],
            None,
            DRAWN_TARGET.init_cache(1, 0),
        )
        logits = (
            np.asarray(DRAWN_TARGET.unembed((), output.hidden))[0, -1] / temperature
        )
        if top_k:
            logits[logits < np.sort(logits)[-top_k]] = -np.inf
        probs = np.exp(logits - logits.max(), dtype=np.float64)
        return probs / probs.sum()

    probs = np.zeros((4, 4, 4))
    for first, p_first in enumerate(next_distribution(prompt)):
        for second, p_second in enumerate(next_distribution([*prompt, first])):
            probs[first, second] = (
                p_first * p_second * next_distribution([*prompt, first, second])
            )
    return probs


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
