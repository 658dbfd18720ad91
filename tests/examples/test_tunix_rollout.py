"""The rollout worker for tunix writes what tunix's own does; skipped without tunix."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
from eagle_jax.sampling import process_logits

pytest.importorskip("tunix", reason="needs the extra `examples`")
# The packages that tunix imports warn of much.
pytestmark = pytest.mark.filterwarnings("default")

PROMPTS = ["3 4 5", "3 4 5", "9", "9", "7 6 5 4 3", "7 6 5 4 3"]
TREE = eagle_jax.TreeConfig(num_nodes=4, depth=2, width=2)


@pytest.fixture(scope="module")
def config() -> Any:
    from tunix.rl.rollout.base_rollout import RolloutConfig

    return RolloutConfig(
        max_tokens_to_generate=12,
        max_prompt_length=6,
        kv_cache_size=32,
        temperature=1.0,
        return_logprobs=True,
        eos_tokens=[5, 6, 7, 8],  # Some texts end before the others.
    )


@pytest.fixture(scope="module")
def make_worker(config: Any) -> Any:
    from flax import nnx

    from examples import tunix_reinforce, tunix_target

    model = tunix_target.make_model()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    everywhere = jax.NamedSharding(mesh, jax.P())
    nnx.update(model, jax.device_put(nnx.state(model), everywhere))
    return functools.partial(
        tunix_reinforce.make_worker(model, TREE),
        rollout_actor=model,
        tokenizer=tunix_target.Numbers(),
        mesh=mesh,
        rollout_config=config,
        train_steps=2,
    )


@pytest.fixture(scope="module")
def worker(make_worker: Any) -> Any:
    return make_worker()


def assert_same(worker: Any, config: Any) -> Any:
    """Returns a worker's rollouts, which are those of tunix's own."""
    from tunix.rl.rollout.vanilla_rollout import VanillaRollout

    ours = worker.generate(PROMPTS, config)
    theirs = VanillaRollout.generate(worker, PROMPTS, config)
    assert ours.text == theirs.text
    np.testing.assert_array_equal(
        ours.left_padded_prompt_tokens, theirs.left_padded_prompt_tokens
    )
    for name in ["tokens"] + ["logprobs"] * config.return_logprobs:
        pairs = zip(getattr(ours, name), getattr(theirs, name), strict=True)
        for one, other in pairs:
            np.testing.assert_allclose(one, other, atol=1e-4)
    return ours


@pytest.mark.parametrize(
    "settings",
    [
        {"seed": None},
        {"seed": jax.random.PRNGKey(8)},
        {"seed": 7, "temperature": 0.7, "return_logprobs": False},
    ],
)
def test_texts_are_those_of_tunixs_own_worker(
    worker: Any, config: Any, settings: dict[str, Any]
) -> None:
    rollouts = assert_same(worker, dataclasses.replace(config, **settings))
    assert len({len(tokens) for tokens in rollouts.tokens}) > 1
    assert worker.rates[-1] > 1


def test_log_probabilities_of_other_temperatures_are_refused(
    worker: Any, config: Any
) -> None:
    with pytest.raises(ValueError, match=r"temperature = 0\.7 must be 1"):
        worker.generate(PROMPTS, dataclasses.replace(config, temperature=0.7))


def test_greedy_texts_and_their_log_probabilities(worker: Any, config: Any) -> None:
    rollouts = assert_same(worker, dataclasses.replace(config, top_p=None))
    padded = np.full((len(PROMPTS), config.max_tokens_to_generate), worker.pad_id())
    for row, tokens in zip(padded, rollouts.tokens, strict=True):
        row[: len(tokens)] = tokens
    prompts = jnp.asarray(rollouts.left_padded_prompt_tokens)
    found = worker.get_per_token_logps(prompts, jnp.asarray(padded))
    for own, all_of_row in zip(rollouts.logprobs, found, strict=True):
        np.testing.assert_allclose(own, all_of_row[: len(own)], atol=1e-4)


def test_new_parameters_are_drawn_from_and_compile_nothing(
    make_worker: Any, config: Any
) -> None:
    from flax import nnx

    worker = make_worker()
    before = assert_same(worker, config)
    programs: Any = eagle_jax.speculative.prefill, eagle_jax.speculative.decode
    compiled = [program._cache_size() for program in programs]
    policy = nnx.state(worker.model(), nnx.Param)
    worker.update_params(jax.tree.map(lambda x: x + 0.1, policy), (nnx.Param,))
    after = assert_same(worker, config)
    assert before.text != after.text
    assert compiled == [program._cache_size() for program in programs]


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.6}])
def test_filtered_texts_are_those_of_plain_decoding(
    worker: Any, make_worker: Any, config: Any, filters: dict[str, Any]
) -> None:
    plain = make_worker(tree=eagle_jax.TreeConfig(num_nodes=1, depth=0))
    filtered = dataclasses.replace(config, **filters)
    assert (
        worker.generate(PROMPTS, filtered).text
        == plain.generate(PROMPTS, filtered).text
    )
    assert plain.rates[-1] == 1


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.7}])
def test_filtered_texts_have_tunixs_distribution(filters: dict[str, Any]) -> None:
    from tunix.generate.sampler import sample_top_p

    logits, num_draws = jax.random.normal(jax.random.key(0), (1, 20)), 20_000
    every = jnp.broadcast_to(logits, (num_draws, 1, 20))
    given = {"top_p": 1.0, "top_k": None} | filters
    drawn, _ = sample_top_p(every, jax.random.PRNGKey(1), temperature=0.7, **given)
    requests = eagle_jax.make_requests(
        [[0]], max_new_tokens=1, temperature=0.7, **filters
    )
    wanted = jax.nn.softmax(process_logits(logits, requests.sampling))[0]
    found = jnp.bincount(drawn, length=20) / num_draws
    np.testing.assert_allclose(found, wanted, atol=0.015)
    np.testing.assert_array_equal(found > 0, wanted > 0)


def test_a_head_that_learns_on_follows_the_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from examples import tunix_reinforce

    tunix_reinforce.main(num_updates=5, num_lessons=6)
    shown = capsys.readouterr().out
    assert "identical texts" in shown
    lines = re.findall(r"^ +\d+ \|.* ([\d.]+) \| +([\d.]+)$", shown, re.MULTILINE)
    rates = np.array(lines, float)
    assert rates.shape == (5, 2)
    assert rates[0, 0] == rates[0, 1] > 2
    assert rates[-1, 0] < rates[-1, 1]
