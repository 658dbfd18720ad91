"""Another stack's random numbers: texts are what they are in a process of our own."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.drafting import TreeDrafter
from eagle_jax.heads.eagle import EagleHead
from eagle_jax.interface import Params
from eagle_jax.prng import make_key, own_keys
from eagle_jax.sampling import position_noise
from eagle_jax.testing import ToyModel, ToyTarget, assert_same_tokens
from eagle_jax.tree import from_paths
from tests import tiny
from tests.helpers import make_draws, texts
from tests.joint_distribution import check_drawn_texts

TARGET = ToyTarget(vocab_size=8)
DRAFTER = TreeDrafter(model=ToyModel(vocab_size=8), tree=TreeConfig(depth=3, width=3))
DECODER = Decoder(target=TARGET, drafter=DRAFTER)
PARAMS = Params(target=(), drafter=jnp.float32(0.7))
DRAWN_TREE = from_paths([(0,), (1,), (0, 0)])
ROWS = 4


@pytest.fixture(params=["rbg", "unsafe_rbg"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """The implementation that the process makes keys with."""
    with jax.default_prng_impl(request.param):
        yield request.param


def asked() -> Requests:
    return make_requests(
        [[1, 2, 3]] * ROWS, max_new_tokens=9, temperature=1.0, seeds=range(ROWS)
    )


def check_texts(requests: Requests) -> list[list[int]]:
    """Returns the texts, which are plain decoding's, alone and together."""
    drafted = texts(requests, speculative.generate(DECODER, PARAMS, requests))
    plain = texts(requests, autoregressive.generate(DECODER, PARAMS, requests))
    assert_same_tokens(drafted, plain)
    last = jax.tree.map(lambda leaf: leaf[-1:], requests)
    alone = texts(last, speculative.generate(DECODER, PARAMS, last))
    assert_same_tokens(alone, drafted[-1:])
    assert len(set(map(tuple, drafted))) == ROWS
    return drafted


def test_texts_of_seeds_are_the_same_under_any_default(implementation: str) -> None:
    found = check_texts(asked())
    with jax.default_prng_impl("threefry2x32"):
        assert_same_tokens(found, check_texts(asked()))


@pytest.mark.parametrize(
    ("implementation", "is_typed"),
    [("threefry2x32", False), ("rbg", False), ("unsafe_rbg", True)],
    indirect=["implementation"],
)
def test_texts_of_a_stacks_own_keys_are_plain_decodings(
    implementation: str, is_typed: bool
) -> None:
    key = jax.random.key(7) if is_typed else jax.random.PRNGKey(7)
    keys = jax.random.split(key, ROWS)
    found = check_texts(dataclasses.replace(asked(), keys=keys))
    again = check_texts(dataclasses.replace(asked(), keys=own_keys(keys)))
    assert_same_tokens(found, again)


def test_a_stacks_own_keys_enter_a_state_of_texts(implementation: str) -> None:
    """A slot of a state holds keys of one type, whoever asks for a text in it."""
    rows = dataclasses.replace(asked(), keys=jax.random.split(jax.random.key(7), ROWS))
    assert rows.settings().keys.dtype == make_key(0).dtype


def test_sixty_draws_of_an_even_distribution_are_mostly_distinct(
    implementation: str,
) -> None:
    for keys in (
        make_requests([[1]] * 60, max_new_tokens=1, seeds=range(60)).keys,
        jax.random.split(jax.random.key(3), 60),
    ):
        positions = jnp.zeros((60, 1), jnp.int32)
        noise = position_noise(keys, positions, make_draws(60).sampling, 1000)
        assert len(set(noise.argmax(axis=-1)[:, 0].tolist())) > 50


def test_drawn_drafts_and_coins_leave_the_distribution_as_it_is(
    implementation: str,
) -> None:
    model = ToyModel(vocab_size=4, sharpness=1.0, seed=7)
    accepted = check_drawn_texts(
        TreeDrafter(model=model, tree=DRAWN_TREE, sampled=True),
        PARAMS,
        rule="rejection",
        temperature=1.0,
        top_k=0,
        num_draws=2048,
    )
    assert accepted > 1 / 4  # Drafts did take part.


def test_random_weights_of_one_stack_are_independent(implementation: str) -> None:
    keys = jax.random.split(jax.random.key(1), 2)

    def weights(key: jax.Array) -> jax.Array:
        return EagleHead(config=tiny.HEAD).init(key).fc

    each = jnp.stack([weights(key) for key in keys])
    # Other draws differ by 0.02; programs of other shapes round in another way.
    np.testing.assert_allclose(jax.vmap(weights)(keys), each, rtol=1e-5, atol=1e-7)


def test_keys_are_made_in_one_place_alone() -> None:
    """One that takes the process's default would change texts of other stacks."""
    makers = {f"jax.random.{name}" for name in ("key", "PRNGKey", "wrap_key_data")}
    for path in (Path(__file__).parents[1] / "eagle_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and path.stem != "prng":
                assert ast.unparse(node) not in makers, path
