"""From logits to a token: filters beside other code's, and noise."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eagle_jax import sampling as sampling_module
from eagle_jax.sampling import (
    SamplingParams,
    distribution,
    drafting_keys,
    draw_tokens,
    keep_likely,
    position_noise,
    process_logits,
    rejection_noise,
)
from tests.helpers import make_draws, on_platform

VOCABULARY = 40
KEYS = jax.vmap(jax.random.key)(jnp.arange(3))


def kept(
    logits: np.ndarray,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
) -> np.ndarray:
    """Which tokens of each row are left."""
    sampling = make_draws(
        len(logits), temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p
    ).sampling
    processed = jax.jit(process_logits)(jnp.asarray(logits), sampling)
    return np.asarray(processed) > -np.inf


def judge(
    logits: np.ndarray, temperature: float, top_p: float, top_k: int, min_p: float
) -> np.ndarray:
    """Which tokens of one row are left: one token after the other, in float64."""
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    left = np.ones(len(probs), bool)
    if top_p < 1:
        for token, prob in enumerate(probs):
            left[token] = probs[probs > prob].sum() < top_p
    if top_k:
        for token, prob in enumerate(probs):
            left[token] &= (probs > prob).sum() < top_k
    return left & (probs >= np.float32(min_p) * probs.max())


def random_logits(rows: int, seed: int = 0) -> np.ndarray:
    shape = (rows, VOCABULARY)
    return (3 * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


@pytest.mark.torch
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
@pytest.mark.parametrize("min_p", [0.001, 0.05, 0.3, 0.9, 1.0])
def test_min_p_keeps_what_transformers_keeps(min_p: float, temperature: float) -> None:
    import torch
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper

    logits = random_logits(64)
    ids: Any = torch.zeros(64, 1, dtype=torch.long)
    given: Any = torch.tensor(logits)
    scores = TemperatureLogitsWarper(temperature)(ids, given)
    expected = torch.isfinite(MinPLogitsWarper(min_p)(ids, scores)).numpy()
    found = kept(logits, temperature=temperature, min_p=min_p)
    np.testing.assert_array_equal(found, expected)
    assert min_p == 1 or 64 < found.sum() < found.size


FILTERS = [
    (1.0, 0, 0.0),
    (0.8, 0, 0.0),
    (1.0, 5, 0.0),
    (1.0, 0, 0.1),
    (0.9, 5, 0.0),
    (0.9, 0, 0.1),
    (1.0, 5, 0.1),
    (0.95, 12, 0.02),
    (0.3, 2, 0.5),
    (1.0, VOCABULARY + 1, 1.0),
]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
@pytest.mark.parametrize(("top_p", "top_k", "min_p"), FILTERS)
@pytest.mark.parametrize("has_ties", [False, True])
def test_filters_keep_what_a_plain_judge_keeps(
    temperature: float, top_p: float, top_k: int, min_p: float, has_ties: bool
) -> None:
    logits = random_logits(32, seed=1)
    if has_ties:
        logits = np.round(logits)
    filters = {"top_k": top_k, "min_p": min_p}
    found = kept(logits, temperature=temperature, top_p=top_p, **filters)
    check = functools.partial(judge, temperature=temperature, **filters)
    for row, left in zip(logits, found, strict=True):
        assert left.any()
        bounds = [top_p - 1e-5, top_p + 1e-5] if top_p < 1 else [top_p] * 2
        least, most = (check(row, top_p=bound) for bound in bounds)
        # Where they differ the mass is the bound up to rounding: either will do.
        assert not (least & ~left).any() and not (left & ~most).any()


@functools.cache
def keep_in_parts(num_parts: int, platform: str = "default") -> Any:
    """The filters as they are traced where so many devices share a vocabulary."""

    def keep(*args: jax.Array) -> jax.Array:
        with on_platform(platform), pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling_module, "num_parts", lambda: num_parts)
            jitted: Any = sampling_module._threshold  # Of another platform's trace.
            patch.setattr(sampling_module, "_threshold", jitted.__wrapped__)
            return keep_likely(*args)

    return jax.jit(keep)


EVERYWHERE = ((1,), (2,), (4,), (8,), (64,), (1, "cuda"))
UNITS = 2**12
"""Probabilities are multiples of one part of so many, and their sums exact."""


@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(
        st.sampled_from([0, 1, 2, 3, 40, 41, 500]) | st.integers(0, 500),
        min_size=8,
        max_size=8,
    ),
    mass=st.integers(1, UNITS),
    top_k=st.integers(0, 9),
)
@example(counts=[512] * 8, mass=1, top_k=0)
@example(counts=[512] * 8, mass=UNITS, top_k=1)
@example(counts=[UNITS] + [0] * 7, mass=UNITS - 1, top_k=8)
@example(counts=[500, 41, 41, 40, 1, 1, 0, 0], mass=541, top_k=3)
def test_filters_keep_what_sorting_keeps_however_many_devices_share_a_vocabulary(
    counts: list[int], mass: int, top_k: int
) -> None:
    ranked = np.sort(counts)[::-1]
    by_mass, by_count = 0, 0
    if mass < UNITS and ranked.sum() >= mass:
        by_mass = ranked[np.argmax(ranked.cumsum() >= mass)]
    if 0 < top_k <= len(ranked):
        by_count = ranked[top_k - 1]
    expected = np.array(counts) >= max(by_mass, by_count)
    probs = jnp.array([counts], jnp.float32) / UNITS
    bounds = jnp.array([mass / UNITS], jnp.float32), jnp.array([top_k])
    for where in EVERYWHERE:
        found = keep_in_parts(*where)(probs, *bounds)
        np.testing.assert_array_equal(found[0], expected)


@pytest.mark.parametrize("where", EVERYWHERE)
def test_thresholds_are_found_to_their_last_bit(where: Any) -> None:
    most = np.float32(0.3)
    probs = jnp.array([[most, np.nextafter(most, np.float32(0)), 0.1, 0.2]])
    found = keep_in_parts(*where)(probs, jnp.ones(1), jnp.array([1]))
    assert found[0].tolist() == [True, False, False, False]


@pytest.mark.parametrize("shape", [0.0, 1.0, 8.0])
def test_a_draw_is_the_largest_sum_of_what_the_filters_keep(shape: float) -> None:
    """Also where the noise favours what they drop, and among ties."""
    source = np.random.default_rng(0)
    rows = 256
    logits = np.round(shape * source.normal(size=(rows, VOCABULARY)))
    logits[source.random(logits.shape) < 0.2] = -np.inf
    logits[:, 7] = 0
    noise = np.round(4 * source.gumbel(size=logits.shape))
    sampling = SamplingParams(
        temperature=jnp.asarray(source.choice([0.0, 0.5, 1.0], rows), jnp.float32),
        top_p=jnp.asarray(source.choice([1e-30, 0.3, 0.9, 1.0], rows), jnp.float32),
        top_k=jnp.asarray(source.choice([0, 1, 5, VOCABULARY], rows), jnp.int32),
        min_p=jnp.asarray(source.choice([0.0, 0.1, 1.0], rows), jnp.float32),
    )
    arrays = jnp.asarray(logits, jnp.float32), jnp.asarray(noise, jnp.float32)
    found = jax.jit(draw_tokens)(*arrays, sampling)
    expected = jnp.argmax(process_logits(arrays[0], sampling) + arrays[1], axis=-1)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9, "top_k": 5, "min_p": 0.1}])
def test_next_to_temperature_0_the_most_likely_token_is_certain(
    filters: dict[str, Any],
) -> None:
    """Down to the smallest number there is, whatever it is divided by."""
    temperatures = [1e-7, 1e-9, 1e-30, 1e-36, 1e-37, 1.2e-38, 1e-39, 1e-45]
    logits = jnp.asarray(30 * random_logits(len(temperatures)))
    sampling = make_draws(len(logits), temperature=temperatures, **filters).sampling
    processed = jax.jit(process_logits)(logits, sampling)
    assert not jnp.isnan(processed).any()
    assert (processed < jnp.inf).all()
    rows = jax.jit(jax.vmap(distribution, in_axes=(0, 0, None)))
    expected = jax.nn.one_hot(logits.argmax(axis=-1), VOCABULARY)
    found = rows(logits, sampling, sampling.any_filter)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name, value", [("top_p", 0.5), ("top_k", 1), ("min_p", 0.01)])
def test_any_one_filter_of_any_row_is_seen(name: str, value: float) -> None:
    sampling = make_draws(3).sampling
    field = getattr(sampling, name).at[1].set(value)
    assert dataclasses.replace(sampling, **{name: field}).any_filter


def test_rows_of_temperature_0_are_never_filtered() -> None:
    logits = random_logits(3)
    sampling = make_draws(
        3, temperature=[0.0, 1.0, 0.0], top_p=0.1, top_k=1, min_p=1.0
    ).sampling
    found = np.asarray(process_logits(jnp.array(logits), sampling))
    np.testing.assert_array_equal(found[[0, 2]], logits[[0, 2]])
    assert (found[1] > -np.inf).sum() == 1


MIXED = SamplingParams(
    temperature=jnp.array([0.0, 0.7, 1.5]),
    top_p=jnp.array([0.5, 0.9, 1.0]),
    top_k=jnp.array([1, 0, 7]),
    min_p=jnp.array([0.9, 0.0, 0.1]),
)


def row_of(sampling: SamplingParams, row: int) -> SamplingParams:
    return jax.tree.map(lambda x: x[row], sampling)


@pytest.mark.parametrize("nodes", [(), (5,), (2, 5)])
def test_a_batch_is_processed_as_its_rows_are(nodes: tuple[int, ...]) -> None:
    shape = (3, *nodes, VOCABULARY)
    logits = 3 * jax.random.normal(jax.random.key(0), shape)
    found = process_logits(logits, MIXED)
    for row in range(3):
        expected = process_logits(logits[row], row_of(MIXED, row))
        np.testing.assert_array_equal(found[row], expected)
    mapped = jax.vmap(process_logits, in_axes=(0, 0, None))
    np.testing.assert_array_equal(mapped(logits, MIXED, MIXED.any_filter), found)


POSITIONS = jnp.array([[3, 4, 5], [7, 8, 9], [3, 4, 5]])


def test_noise_is_a_function_of_key_and_position_alone() -> None:
    sampling = make_draws(3).sampling
    found = position_noise(KEYS, POSITIONS, sampling, VOCABULARY)
    assert found.shape == (3, 3, VOCABULARY) and found.dtype == jnp.float32
    for row in range(3):
        for place in range(3):
            key = jax.random.fold_in(KEYS[row], POSITIONS[row, place])
            expected = jax.random.gumbel(key, (VOCABULARY,), jnp.float32)
            np.testing.assert_array_equal(found[row, place], expected)
    # Neither of the filters and the temperature, nor of the rows and places beside it.
    filtered = make_draws(3, temperature=0.3, top_p=0.5, top_k=2, min_p=0.5).sampling
    again = position_noise(KEYS, POSITIONS, filtered, VOCABULARY)
    np.testing.assert_array_equal(again, found)
    turned = position_noise(KEYS[::-1], POSITIONS[::-1, ::-1], sampling, VOCABULARY)
    np.testing.assert_array_equal(turned, found[::-1, ::-1])
    alone = make_draws(1).sampling
    first = position_noise(KEYS[1:2], POSITIONS[1:2, 1:2], alone, VOCABULARY)
    np.testing.assert_array_equal(first[0, 0], found[1, 1])


def test_there_is_no_noise_at_temperature_0() -> None:
    noise = position_noise(KEYS, POSITIONS, MIXED, VOCABULARY)
    assert not noise[0].any()
    assert noise[1:].all()


def test_purposes_never_share_noise() -> None:
    key, rows = KEYS[0], []
    for position in range(3):
        coins, last = rejection_noise(key, jnp.int32(position), 4, VOCABULARY)
        assert coins.shape == (4,) and ((coins >= 0) & (coins < 1)).all()
        (drafting,) = drafting_keys(key[None], jnp.array([position]))
        drawn = jax.random.fold_in(key, position)
        rows += [last]
        rows += [jax.random.gumbel(key, (VOCABULARY,)) for key in (drafting, drawn)]
    assert len({np.asarray(row).tobytes() for row in rows}) == len(rows)


def test_draws_have_the_stated_distribution() -> None:
    draws, row = 20_000, 2
    logits = jnp.array(random_logits(1, seed=3)[0, :8])
    sampling = row_of(MIXED, row)
    stated = np.asarray(distribution(logits, sampling, sampling.any_filter))
    assert stated.sum() == pytest.approx(1, abs=1e-5)
    np.testing.assert_array_equal(
        stated > 0, judge(np.asarray(logits), 1.5, 1.0, 7, 0.1)
    )
    noise = jax.random.gumbel(KEYS[0], (draws, 8))
    many = jax.tree.map(lambda x: jnp.full(draws, x), sampling)
    found = draw_tokens(jnp.broadcast_to(logits, (draws, 8)), noise, many)
    shares = np.bincount(np.asarray(found), minlength=8) / draws
    spread = np.sqrt(stated * (1 - stated) / draws)
    assert (np.abs(shares - stated) <= 4.5 * spread).all()
    cold = distribution(logits, row_of(MIXED, 0), MIXED.any_filter)
    np.testing.assert_array_equal(cold, jax.nn.one_hot(jnp.argmax(logits), 8))
