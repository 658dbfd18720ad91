"""A rollout worker for tunix, whose texts an EAGLE head drafts.

They are the texts of tunix's own worker for the same seed: keys that draw tunix's noise
at any place of any row let drafts share it. Between updates the head learns on from the
rollouts, and follows the policy.

`python -m examples.tunix_reinforce` trains a policy with it.
"""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import random as prng
from tunix.generate import utils
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig, RolloutOutput
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

import eagle_jax
from eagle_jax.decoding.rates import tokens_per_round
from eagle_jax.decoding.requests import bucket_prompt
from eagle_jax.heads.rows import PackedRows
from eagle_jax.training.step import (
    StepConfig,
    TrainState,
    init_state,
    read_target,
    train_step,
)


def _fold_in(key: jax.Array, position: jax.Array) -> jax.Array:
    folded = jax.random.fold_in(key[:2], key[3] + jnp.uint32(position))
    return jnp.concatenate([folded, key[2:]])


def _random_bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
    (size,) = shape
    assert width == 32, "noise is float32"
    counts = key[2] * jnp.uint32(size) + jnp.arange(size, dtype=jnp.uint32)
    bits = prng.threefry_2x32(key[:2], jnp.stack([jnp.zeros_like(counts), counts]))
    return bits[0] ^ bits[1]


def _refuse(*_: Any) -> Any:
    raise NotImplementedError("tunix's keys are folded, and nothing else")


# tunix draws an array `[B, V]` per step, and counts steps from its padded prompts. A
# key is tunix's own, then the row, then what is added to a position for the step.
TUNIX = prng.define_prng_impl(
    key_shape=(4,),
    seed=_refuse,
    split=_refuse,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="tunix",
)


def tables(policy: Any) -> Any:
    """Returns the two arrays that the head borrows."""
    head = policy.lm_head.w[...] if "lm_head" in policy else None
    embedding = policy.embedder.input_embedding[...]
    return SimpleNamespace(embedding=embedding, output_head=head)


@functools.partial(jax.jit, static_argnames=("config", "steps"))
def learn_texts(
    state: TrainState, policy: Any, rows: PackedRows, *, config: StepConfig, steps: int
) -> TrainState:
    """Returns a head's state after some steps on texts, as the policy reads them."""
    features = read_target(config, policy, rows)

    def step(_: jax.Array, state: TrainState) -> TrainState:
        return train_step(state, policy, rows, features, config=config)[0]

    return jax.lax.fori_loop(0, steps, step, state)


class EagleRollout(VanillaRollout):
    """tunix's own worker, but for `generate`.

    With a `top_p` below 1 or a `top_k`, tunix gives its noise to tokens by rank, which
    nobody knows before the target runs. Then texts are others of the same distribution
    (but for both at once, which here filter side by side).

    Log-probabilities are the policy's own, without filters and temperature: tunix's at
    temperature 1. Those of other temperatures are refused.

    Attributes:
        head: The head's training state.
        rates: The tokens per round of each call.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: jax.sharding.Mesh,
        rollout_config: RolloutConfig,
        *,
        learning: StepConfig,
        tree: eagle_jax.TreeConfig,
        train_steps: int,
        head: Any = None,
    ) -> None:
        """Prepares to draft; all after the first four make a `rollout_engine`.

        Args:
            rollout_actor: The policy.
            tokenizer: The tokenizer, as tunix takes it.
            mesh: The policy's mesh; each of its devices has the whole head.
            rollout_config: The settings of calls, of which the cache's size is read.
            learning: The policy as a target, its head, and how that learns. Workers
                with the same target share programs.
            tree: The tree that the head drafts.
            train_steps: The steps that it takes before each call on the last call's
                texts, with the features of the policy that has learned from them.
            head: The weights to begin with; `None` for random ones.
        """
        names = ("num_layers", "num_kv_heads", "head_dim")
        sizes = {name: getattr(rollout_actor.config, name) for name in names}
        cache = CacheConfig(cache_size=rollout_config.kv_cache_size, **sizes)
        super().__init__(rollout_actor, tokenizer, cache)
        policy = self._sampler.transformer_state
        self._shardings = jax.tree.map(lambda x: x.sharding, policy)
        self._everywhere = jax.sharding.NamedSharding(
            mesh, jax.sharding.PartitionSpec()
        )
        self._model: Any = learning.head
        self._decoder = eagle_jax.Decoder(
            target=learning.target,
            drafter=eagle_jax.TreeDrafter(model=self._model, tree=tree),
            logprobs=eagle_jax.LogprobsConfig(),
        )
        self._learning = {"config": learning, "steps": train_steps}
        self._texts: PackedRows | None = None
        state = init_state(learning, seed=0, params=head)
        self.head = jax.device_put(state, self._everywhere)
        self.rates: list[float | None] = []

    def generate(
        self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        """Returns what tunix's worker does."""
        del kwargs
        divisor = 1 if rollout_config.top_p is None else rollout_config.temperature
        if rollout_config.return_logprobs and divisor != 1:
            raise ValueError(f"temperature = {divisor} must be 1 for return_logprobs")
        # A trainer's shardings may be others, for which all would be compiled again.
        policy = self._sampler.transformer_state
        policy = jax.tree.map(jax.device_put, policy, self._shardings)
        if self._texts is not None and self._learning["steps"]:
            learnt = learn_texts(self.head, policy, self._texts, **self._learning)
            self.head = jax.device_put(learnt, self._everywhere)

        ids = [self._sampler.tokenize(prompt).tolist() for prompt in prompts]
        longest, width = max(map(len, ids)), rollout_config.max_prompt_length or 0
        width = width if width >= longest else utils.next_power_of_2(longest)
        samples = len(ids) // len(set(map(tuple, ids)))
        is_grouped = ids == [x for x in ids[::samples] for _ in range(samples)]
        length = width + rollout_config.max_tokens_to_generate
        drafter = self._model.join(self.head.params, tables(policy))
        state = eagle_jax.generate(
            self._decoder,
            eagle_jax.Params(target=policy, drafter=drafter),
            make_requests(ids, width, rollout_config, self.eos_id()),
            num_slots=eagle_jax.round_up_slots(length, self._decoder.depth),
            num_samples=samples if is_grouped else 1,
        )
        self._texts = as_rows(state, length)
        assert state.logprobs is not None
        arrays = state.tokens, state.logprobs.own, state.lengths, state.stop_reason
        tokens, logprobs, ends, reasons = jax.device_get(arrays)
        counts = (ends - [len(prompt) for prompt in ids]).tolist()
        self.rates.append(tokens_per_round(counts, int(state.num_rounds.sum())))
        # tunix's texts end before the token that ends them.
        ends = ends - (reasons == eagle_jax.StopReason.STOP_TOKEN)
        places = [
            (row, slice(len(prompt), end))
            for row, (prompt, end) in enumerate(zip(ids, ends.tolist(), strict=True))
        ]
        pad = functools.partial(utils.pad_to_length, pad_value=self.pad_id(), left=True)
        decode = self._sampler.tokenizer.decode
        return RolloutOutput(
            text=[decode(tokens[place].tolist()) for place in places],
            logits=[],
            tokens=[tokens[place] for place in places],
            left_padded_prompt_tokens=np.stack([pad(np.array(x), width) for x in ids]),
            logprobs=[logprobs[place].tolist() for place in places]
            if rollout_config.return_logprobs
            else None,
        )


def make_requests(
    ids: list[list[int]], width: int, config: RolloutConfig, eos_id: int
) -> eagle_jax.Requests:
    """Returns requests with tunix's noise, for prompts that it pads to a width."""
    requests = eagle_jax.make_requests(
        ids,
        max_new_tokens=config.max_tokens_to_generate,
        stop_tokens=config.eos_tokens or eos_id,
        # Without `top_p` tunix takes the most likely token at any temperature.
        temperature=0.0 if config.top_p is None else config.temperature,
        top_p=1.0 if config.top_p is None else config.top_p,
        top_k=config.top_k or 0,
        prompt_bucket=bucket_prompt(width),
    )
    seed = 0 if config.seed is None else config.seed
    key = jax.random.PRNGKey(seed) if isinstance(seed, int) else seed
    data = np.zeros((len(ids), 4), np.uint32)
    data[:, :2], data[:, 2] = jax.random.key_data(key), np.arange(len(ids))
    data[:, 3] = np.array([width - 1 - len(prompt) for prompt in ids]).astype(np.uint32)
    keys = jax.random.wrap_key_data(jnp.asarray(data), impl=TUNIX)
    return dataclasses.replace(requests, keys=keys)


def as_rows(state: eagle_jax.DecodeState, length: int) -> PackedRows:
    """Returns texts as a head learns from them, one in each row."""
    places = jnp.broadcast_to(jnp.arange(length), (len(state.lengths), length))
    is_text = places < state.lengths[:, None]
    return PackedRows(
        tokens=state.tokens[:, :length],
        segments=is_text.astype(jnp.int32),
        positions=places * is_text,
        loss_mask=is_text & (places >= state.rows.prompt_lengths[:, None]),
    )
