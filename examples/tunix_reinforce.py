"""Reinforcement learning with tunix, whose rollouts an EAGLE head drafts.

A small policy knows a rhyme by heart and is rewarded for words in alphabetical order.
tunix trains it three times: with a head that stays as it is, with one that learns on
from the rollouts, and with a worker of its own. The texts are the same in each.

Run it with `python -m examples.tunix_reinforce`; it needs the extra `examples`.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3.model import Qwen3
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

import eagle_jax
from eagle_jax.heads.eagle import EagleLoss
from eagle_jax.training.config import OptimizerConfig
from eagle_jax.training.step import StepConfig
from examples.own_target import RHYME, WORDS
from examples.tunix_rollout import EagleRollout, tables
from examples.tunix_target import (
    HEADS,
    VOCABULARY,
    WIDTH,
    Numbers,
    make_model,
    make_target,
)


class Words(Numbers):
    """A tokenizer of the rhyme's words; the end of a line ends a text, and pads it."""

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        return [WORDS.index(word) for word in text.split(" ")]

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of some tokens, of which the model has more than words."""
        return " ".join(dict(enumerate(WORDS)).get(token, "?") for token in tokens)

    def eos_id(self) -> int:
        """The end of a line."""
        return WORDS.index("\n")

    pad_id = eos_id


PROMPTS = ["This is the", "the cow with the", "that ate the malt", "the dog"]
SAMPLES = 8
ROLLOUTS = RolloutConfig(
    max_tokens_to_generate=32,
    max_prompt_length=8,
    kv_cache_size=40,
    temperature=1.0,
    seed=0,
)


def make_worker(model: Qwen3, tree: eagle_jax.TreeConfig) -> functools.partial:
    """Returns a `rollout_engine` for a policy; only `train_steps` are missing."""
    layer = eagle_jax.LayerConfig(
        hidden_size=WIDTH,
        intermediate_size=64,
        rms_norm_eps=1e-6,
        rope=eagle_jax.RopeConfig(theta=10_000),
        **HEADS,
    )
    learning = StepConfig(
        target=make_target(model),
        head=eagle_jax.EagleHead(
            config=eagle_jax.EagleHeadConfig(
                layer=layer, vocab_size=VOCABULARY, max_positions=64
            )
        ),
        loss=EagleLoss(),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=10),
        steps=10**6,  # It learns for ever, and the rate hardly falls.
        tables=tables,
    )
    return functools.partial(EagleRollout, learning=learning, tree=tree)


def learn_rhyme(model: Qwen3, num_steps: int, length: int = 40) -> None:
    """Trains a policy on pieces of the rhyme."""
    text = np.array(Words().encode(" ".join(RHYME)))
    begins = np.random.default_rng(0).integers(len(text) - length, size=(num_steps, 16))
    pieces = text[begins[..., None] + np.arange(length)]
    places, mask = np.tile(np.arange(length), (16, 1)), np.tri(length, dtype=bool)[None]
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Qwen3, optimizer: nnx.Optimizer, texts: jax.Array) -> None:
        def loss(model: Qwen3) -> jax.Array:
            logits, _ = model(texts, places, None, mask)
            entropy = optax.softmax_cross_entropy_with_integer_labels
            return entropy(logits[:, :-1], texts[:, 1:]).mean()

        optimizer.update(model, nnx.grad(loss)(model))

    for texts in pieces:
        step(model, optimizer, texts)


def make_cluster(model: Qwen3, engine: Any, num_updates: int) -> RLCluster:
    """Returns tunix's cluster around a copy of a policy."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = (Role.ACTOR, Role.REFERENCE, Role.ROLLOUT)
    training = RLTrainingConfig(
        actor_optimizer=optax.adam(5e-3),
        eval_every_n_steps=num_updates,
        max_steps=num_updates,
    )
    config = ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine=engine,
        rollout_config=dataclasses.replace(ROLLOUTS),
        training_config=training,
    )
    return RLCluster(actor=nnx.clone(model), tokenizer=Words(), cluster_config=config)


def reinforce(cluster: RLCluster, num_updates: int) -> tuple[list[float], list[Any]]:
    """Rewards words in alphabetical order; returns each update's reward and texts."""
    rewards, texts = [], []

    def reward(prompts: Any, completions: list[str], **_: Any) -> list[float]:
        del prompts
        pairs = [list(itertools.pairwise(text.split())) for text in completions]
        found = [float(np.mean([a < b for a, b in some] or [0])) for some in pairs]
        rewards.append(float(np.mean(found)))
        texts.append(completions)
        return found

    learner = GRPOLearner(cluster, GRPOConfig(num_generations=SAMPLES, beta=0), reward)
    learner.train([{"prompts": np.array(PROMPTS)}] * num_updates)
    return rewards, texts


def main(num_updates: int = 10, num_lessons: int = 8) -> None:
    """Reinforces a policy with three workers, of which two draft."""
    # Workers run in tunix's threads, which no context of this one reaches.
    jax.config.update("jax_default_matmul_precision", "highest")
    model = make_model()
    learn_rhyme(model, num_steps=50)
    tree = eagle_jax.TreeConfig(num_nodes=12, depth=5, width=3)
    worker = make_worker(model, tree)
    cluster = make_cluster(
        model, functools.partial(worker, train_steps=40), num_updates
    )
    for seed in range(1, num_lessons + 1):
        cluster.cluster_config.rollout_config.seed = seed
        cluster.generate(np.repeat(PROMPTS, SAMPLES).tolist())
    worker = functools.partial(worker, head=cluster.rollout.head.params)
    programs = eagle_jax.speculative.prefill, eagle_jax.speculative.decode
    compiled = [program._cache_size() for program in programs]

    runs, rates = [], []
    for steps in (0, 20):
        engine = functools.partial(worker, train_steps=steps)
        cluster = make_cluster(model, engine, num_updates)
        runs.append(reinforce(cluster, num_updates))
        rates.append(cluster.rollout.rates)
    assert compiled == [program._cache_size() for program in programs]
    print("nothing that drafts was compiled again")
    runs.append(reinforce(make_cluster(model, "vanilla", num_updates), num_updates))
    assert runs[0] == runs[1] == runs[2], "texts differ"
    print("identical texts and rewards, with tunix's own worker too")
    print("update | reward | tokens per round: head as it was | head that learns on")
    for update, line in enumerate(zip(runs[0][0], *rates, strict=True)):
        print("{:6} | {:6.2f} | {:30.2f} | {:19.2f}".format(update, *line))


if __name__ == "__main__":
    main()
