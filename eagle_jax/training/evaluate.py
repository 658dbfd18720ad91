"""Evaluation of a head: its agreement on held-out rows, and real tokens per round."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.rates import tokens_per_round
from eagle_jax.decoding.requests import Requests, cache_slots, make_requests
from eagle_jax.drafting import TreeDrafter
from eagle_jax.heads.levels import PositionHeads, tie_weights
from eagle_jax.heads.loss import Metrics
from eagle_jax.heads.rows import PackedRows
from eagle_jax.interface import Params
from eagle_jax.parallel import DATA, PairSharding
from eagle_jax.parallel.sharding import Program
from eagle_jax.reporting import decimals
from eagle_jax.training.config import TrainConfig
from eagle_jax.training.data import TrainingData
from eagle_jax.training.step import StepConfig, as_type, eval_step
from eagle_jax.tree import MEDUSA_TREE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The figures of a head on held-out data.

    Attributes:
        loss: The loss without noise.
        agreement: The share of pairs whose most likely token is the target's.
        chain_length: The drafts of a chain that agree before one does not, with the
            text's own tokens and as many levels as are trained.
        tokens_per_round: The tokens per round with the run's tree, greedy; `None`
            where no round was needed.
    """

    loss: float
    agreement: float
    chain_length: float
    tokens_per_round: float | None

    def summary(self) -> str:
        """Returns the figures in one line."""
        return (
            f"loss {self.loss:.4f} | agreement {self.agreement:.3f} | "
            f"{decimals(self.tokens_per_round)} tokens/round"
        )


def make_evaluation(
    data: TrainingData,
    read: Program,
    *,
    config: TrainConfig,
    step_config: StepConfig,
    sharding: PairSharding,
) -> Callable[[Any, Any], Evaluation]:
    """Returns a function that measures a head on held-out data; it is compiled once.

    It takes the head's float32 parameters and the target's.

    Args:
        data: The run's data, with at least one prompt, all shorter than the target's
            positions.
        read: Returns the features of rows on the mesh, of the target's parameters.
        config: The run's settings; its tree is for an EAGLE head's `tokens_per_round`,
            with uncalibrated confidences.
        step_config: The static settings of a step.
        sharding: The shardings of target and head.
    """
    prompts, run = data.prompts, config.run
    num_parts = sharding.mesh.shape[DATA]
    num_rows = -(-len(prompts) // num_parts) * num_parts
    requests = make_requests(
        [prompts[number % len(prompts)] for number in range(num_rows)],
        max_new_tokens=run.eval_new_tokens,
        max_length=data.max_length,
        stop_tokens=data.stop_tokens,
    )
    decode = _decoder(step_config, sharding, requests, config.tree)

    def evaluate(params: Any, target_params: Any) -> Evaluation:
        measured = []
        for batch in _batches(data.held_out, run.batch_size):
            rows = sharding.put_rows(batch)
            given = params, target_params, rows, read(target_params, rows)
            measured.append(_eval_step(*given, config=step_config))
        metrics = _mean(measured)
        cast = as_type(tie_weights(params), step_config.dtype)
        joined = step_config.head.join(cast, step_config.tables(target_params))
        both = Params(target=target_params, drafter=joined)
        counts = sharding.fetch(decode(both, sharding.put_rows(requests)))
        num_rounds, new_tokens = (count[: len(prompts)].tolist() for count in counts)
        return Evaluation(
            loss=float(metrics.loss),
            agreement=float(metrics.agreement),
            chain_length=float(metrics.chain_length),
            tokens_per_round=tokens_per_round(new_tokens, sum(num_rounds)),
        )

    return evaluate


_eval_step = jax.jit(eval_step, static_argnames=("config",))


def _batches(rows: PackedRows, size: int) -> list[PackedRows]:
    """Returns rows as batches of one size; the last is filled with empty rows."""
    padding = -len(rows) % size
    padded = jax.tree.map(lambda x: np.pad(x, ((0, padding), (0, 0))), rows)
    return [padded[start : start + size] for start in range(0, len(rows), size)]


def _mean(metrics: Sequence[Metrics]) -> Metrics:
    """Returns the metrics of all batches, averaged by their number of pairs."""
    fetched = jax.device_get(metrics)
    pairs = np.array([m.pairs for m in fetched])
    weights = pairs / max(pairs.sum(), 1)
    return jax.tree.map(lambda *xs: np.sum(weights * np.array(xs)), *fetched)


def _decoder(
    config: StepConfig, sharding: PairSharding, requests: Requests, tree: TreeConfig
) -> Program:
    """Returns a program that decodes requests greedily.

    Of parameters and requests it returns each row's numbers of rounds and of new
    tokens, `[B]`. Heads that draft a level each have the published static tree, as
    their methods do; blocks have no more levels than rows.
    """
    head = dataclasses.replace(config.head, dtype=config.dtype)
    most = tree.depth if head.max_levels is None else head.max_levels
    shape = dataclasses.replace(tree.shape, depth=min(tree.depth, most))
    if isinstance(head, PositionHeads):
        shape = MEDUSA_TREE.cut(most)
    drafter = TreeDrafter(model=head, tree=shape)
    decoder = Decoder(target=config.target, drafter=drafter, acceptance="greedy")
    slots = cache_slots(requests, depth=drafter.depth)

    def decode(params: Params, requests: Requests) -> tuple[jax.Array, jax.Array]:
        state = speculative.prefill(decoder, params, requests, num_slots=slots)
        state = speculative.decode(decoder, params, state)
        return state.num_rounds, state.lengths - requests.prompt_lengths

    return sharding.shard(decode)
