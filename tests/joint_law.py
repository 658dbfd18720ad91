"""The joint law of three tokens, and whether many draws have it."""

import jax.numpy as jnp
import numpy as np

from eagle_jax.testing import ToyTarget

LAW_TARGET = ToyTarget(vocab_size=4, sharpness=1.0)


def law_of(prompt: list[int], temperature: float, top_k: int) -> np.ndarray:
    """`[4, 4, 4]`: of the next three tokens, from the toy's logits alone."""

    def next_law(path: list[int]) -> np.ndarray:
        tokens = jnp.array([path])
        output = LAW_TARGET.forward(
            (),
            tokens,
            jnp.arange(len(path))[None],
            None,
            LAW_TARGET.init_cache(1, 0),
        )
        logits = np.asarray(LAW_TARGET.unembed((), output.hidden))[0, -1] / temperature
        if top_k:
            logits[logits < np.sort(logits)[-top_k]] = -np.inf
        law = np.exp(logits - logits.max(), dtype=np.float64)
        return law / law.sum()

    law = np.zeros((4, 4, 4))
    for first, p_first in enumerate(next_law(prompt)):
        for second, p_second in enumerate(next_law([*prompt, first])):
            law[first, second] = p_first * p_second * next_law([*prompt, first, second])
    return law


def check_joint_law(drawn: list[list[int]], law: np.ndarray) -> None:
    """Compares texts of three tokens each with their law."""
    counts = np.zeros((4, 4, 4))
    np.add.at(counts, tuple(np.array(drawn).T), 1)
    assert counts[law == 0].sum() == 0
    distance = 0.5 * np.abs(counts / len(drawn) - law).sum()
    # Mean of the distance for draws from the law itself; its spread is far smaller.
    expected = 0.5 * np.sqrt(2 / np.pi * law * (1 - law) / len(drawn)).sum()
    assert distance < 1.5 * expected
