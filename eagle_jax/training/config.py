"""Settings of training a head and of its texts; defaults are the EAGLE papers'."""

import dataclasses
import math
from typing import Literal

from eagle_jax.config import SamplingConfig, TreeConfig, require, require_int32
from eagle_jax.parsing import check_types

MOST_LEVELS = 16
"""The most levels that are drafted in training; each costs as much as the first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The settings of the loss that a head is trained with (EAGLE-1, section 3.2).

    Three settings also know the official code's rule, where it differs from the
    paper's. Medusa's and Hydra's heads learn tokens alone and without noise, and of
    these settings take the last two.

    Attributes:
        feature_weight: The weight of the Smooth L1 loss between features.
        token_weight: The weight of the cross-entropy between token distributions,
            `w_cls`.
        noise: The half width of the uniform noise on input features.
        noise_scale: The scale of the noise: "constant" as in the paper, or "official"
            for times 512 / the length of the sample.
        mask: The pairs that count: "next" for those whose *token* (`i + 1`) is to be
            predicted, so that the first draft after a prompt is trained; "official"
            for those whose feature (`i`) belongs to such a token.
        normalize: The divisor of the summed loss: "tokens" for the pairs that count,
            "official" (its DeepSpeed trainer) for all positions, padding included.
        alignment: The number of levels drafted from every position of a text (HASS,
            section 3.2: its passes; EAGLE-3: the steps of its training-time test);
            `None` for 1, which is EAGLE-1's loss, and 7 for an EAGLE-3 head.
        top_k_loss: The number of the target's most likely tokens in HASS's top-K loss;
            0 for none, 10 as published.
        top_k_weight: The weight of the top-K loss.
        token_loss: The loss between token distributions: "cross-entropy", as published,
            or "alpha", of the rate at which drafts are accepted, see `loss.token_loss`.
        decay: The weight of each head of Medusa and Hydra, and of each level of an
            EAGLE-3 head, relative to the one before (Medusa, section 3.2).
        labels: What Medusa's and Hydra's heads learn: "tokens" for the text's, as
            published for Medusa; "target" for the target's distributions, as published
            for Hydra; `None` for what was published.
    """

    feature_weight: float = 1.0
    token_weight: float = 0.1
    noise: float = 0.1
    noise_scale: Literal["constant", "official"] = "constant"
    mask: Literal["next", "official"] = "next"
    normalize: Literal["tokens", "official"] = "tokens"
    alignment: int | None = None
    top_k_loss: int = 0
    top_k_weight: float = 1.0
    token_loss: Literal["cross-entropy", "alpha"] = "cross-entropy"
    decay: float = 0.8
    labels: Literal["tokens", "target"] | None = None

    def __post_init__(self) -> None:
        """Refuses weights and noise below zero."""
        check_types(self)
        for name in ("feature_weight", "token_weight", "noise", "top_k_weight"):
            value = getattr(self, name)
            holds = math.isfinite(value) and value >= 0
            require(holds, name, value, "finite, 0 or more")
        levels = self.alignment
        holds = levels is None or 1 <= levels <= MOST_LEVELS
        require(holds, "alignment", levels, f"1 to {MOST_LEVELS}")
        require(self.top_k_loss >= 0, "top_k_loss", self.top_k_loss, "0 or more")
        require(0 < self.decay <= 1, "decay", self.decay, "above 0 and at most 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The settings of AdamW with linear warm-up and decay (EAGLE-1, section 4).

    Attributes:
        learning_rate: The learning rate at the end of the warm-up.
        b1: The decay of Adam's first moment.
        b2: The decay of Adam's second moment.
        weight_decay: The decoupled weight decay, on matrices and vectors alike.
        warmup_steps: The number of steps from rate 0 to `learning_rate`, cut to one
            less than those of the run.
        final_fraction: The fraction of the learning rate that is left when all steps
            are done.
        clip: The bound of the gradient.
        clip_by: What is bounded: "norm" for the global norm, "value" for each entry
            (official code).
    """

    learning_rate: float = 3e-5
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.01
    warmup_steps: int = 2000
    final_fraction: float = 0.0
    clip: float = 0.5
    clip_by: Literal["norm", "value"] = "norm"

    def __post_init__(self) -> None:
        """Refuses values outside their range."""
        check_types(self)
        rate = self.learning_rate
        require(0 < rate < math.inf, "learning_rate", rate, "above 0 and finite")
        for name in ("b1", "b2"):
            value = getattr(self, name)
            require(0 <= value < 1, name, value, "at least 0 and below 1")
        decay = self.weight_decay
        require(0 <= decay < math.inf, "weight_decay", decay, "0 or more and finite")
        require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "0 or more")
        fraction = self.final_fraction
        require(0 <= fraction <= 1, "final_fraction", fraction, "between 0 and 1")
        require(0 < self.clip < math.inf, "clip", self.clip, "above 0 and finite")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The settings by which data becomes rows of tokens.

    Attributes:
        row_length: The number of tokens per row, `T`; samples are packed into rows.
        too_long: What becomes of longer samples: "cut" into pieces, "drop" or
            "refuse".
        held_out: The share of the samples that is evaluated on and not trained on.
        max_malformed: The share of malformed records that is passed over.
        cache_features: Compute the target's features once and keep them on disk.
    """

    row_length: int = 2048
    too_long: Literal["cut", "drop", "refuse"] = "cut"
    held_out: float = 0.05
    max_malformed: float = 0.01
    cache_features: bool = False

    def __post_init__(self) -> None:
        """Refuses values outside their range."""
        check_types(self)
        require(self.row_length >= 4, "row_length", self.row_length, "at least 4")
        require(0 < self.held_out < 1, "held_out", self.held_out, "between 0 and 1")
        share = self.max_malformed
        require(0 <= share <= 1, "max_malformed", share, "between 0 and 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The kind and the sizes of a new head; `None` stands for the target's.

    A head that is begun with keeps its own sizes, biases and recycling: what
    differs here from the defaults must agree with them.

    Attributes:
        kind: The kind of head: "eagle2" for EAGLE-1/2, whose heads are the same,
            "eagle3", "medusa", or "hydra" for Hydra++ with its prefix layer.
        draft_heads: The number of Medusa's or Hydra's heads, one per drafted level;
            `None` for 5 and 4.
        head_layers: The number of blocks of each of Medusa's or Hydra's heads; `None`
            for 1 and 4.
        draft_vocab_size: The number of tokens that an EAGLE-3 head knows, those most
            frequent in its data; `None` for 32,000, or all where there are fewer.
        feature_layers: The indices, such as "1 2 4", of the three layers of the target
            whose inputs an EAGLE-3 head reads; `None` for the published ones, 2, half
            of the layers, and three before their end.
        recycles_normed: Whether an EAGLE-3 head continues drafts from its normalised
            output, as some heads of speculators do.
        intermediate_size: The width of the feed-forward layer.
        num_heads: The number of query heads.
        num_kv_heads: The number of key/value heads.
        fc_bias: Whether the fusing layer has a bias.
        include_embedding: Export the target's embedding table with an EAGLE-1/2 head,
            as the official code expects.
    """

    kind: Literal["eagle2", "eagle3", "medusa", "hydra"] = "eagle2"
    draft_heads: int | None = None
    head_layers: int | None = None
    draft_vocab_size: int | None = None
    feature_layers: str | None = None
    recycles_normed: bool = False
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    fc_bias: bool = True
    include_embedding: bool = True

    def __post_init__(self) -> None:
        """Refuses sizes below one."""
        check_types(self)
        for name in (
            *("intermediate_size", "num_heads", "num_kv_heads"),
            *("draft_heads", "head_layers", "draft_vocab_size"),
        ):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "at least 1")
        layers = self.feature_layers
        words = [] if layers is None else layers.split()
        holds = len(words) == 3 and all(word.isdecimal() for word in words)
        wanted = 'three layers, such as "1 2 4"'
        require(layers is None or holds, "feature_layers", layers, wanted)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The settings of a run's length, evaluations and checkpoints.

    Attributes:
        steps: The number of optimizer steps.
        batch_size: The number of rows per step over all devices, `B`.
        seed: The seed of initial weights, order and noise.
        dtype: The type of target and arithmetic; the head's own weights stay float32.
            "auto" for float32 on CPUs and bfloat16 elsewhere: in float16 the gradients
            of the loss would vanish.
        log_every: The number of steps between lines of the log.
        eval_every: The number of steps between held-out evaluations and checkpoints.
        eval_rows: The largest number of held-out rows.
        eval_prompts: The number of held-out prompts that are decoded to count tokens
            per round.
        eval_new_tokens: The number of tokens decoded per prompt.
        eval_prompt_tokens: The number of first tokens that a plain text's prompt has.
        calibrate: Whether the head gets a calibration, fitted on the held-out prompts.
        keep: The number of newest checkpoints kept, beside the best.
        explode: Stop when the loss is this many times its running mean, or before there
            is one, the first loss; or the held-out loss that of the evaluation before.
    """

    steps: int = 10_000
    batch_size: int = 8
    seed: int = 0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    log_every: int = 20
    eval_every: int = 1000
    eval_rows: int = 64
    eval_prompts: int = 8
    eval_new_tokens: int = 64
    eval_prompt_tokens: int = 16
    calibrate: bool = True
    keep: int = 2
    explode: float = 10.0

    def __post_init__(self) -> None:
        """Refuses counts below one."""
        check_types(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and field.name != "seed":
                require(value >= 1, field.name, value, "at least 1")
                require_int32(field.name, value)
        require(0 <= self.seed < 2**31, "seed", self.seed, "0 to 2**31 - 1")
        require(
            1 < self.explode < math.inf, "explode", self.explode, "above 1 and finite"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All settings of `eagle-jax train`, one TOML table per attribute."""

    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    head: HeadConfig = HeadConfig()
    run: RunConfig = RunConfig()
    tree: TreeConfig = dataclasses.field(default_factory=TreeConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegenerationConfig:
    """The settings of regenerated texts: their beginnings, limits and arithmetic.

    Attributes:
        max_new_tokens: The largest number of tokens to generate per answer.
        max_length: The largest number of tokens of prompt and output together; `None`
            for the target's positions.
        batch_size: The number of texts decoded together; it changes no text.
        min_prefix: The fewest tokens kept of a document, its start token not counted.
        max_prefix: The most tokens kept of a document, its start token not counted.
        max_malformed: The share of the data's records that may be malformed and left
            out.
        dtype: The type of weights, caches and activations; "auto" for float32 on CPUs
            and the checkpoint's own elsewhere.
    """

    max_new_tokens: int = 512
    max_length: int | None = None
    batch_size: int = 16
    min_prefix: int = 1
    max_prefix: int = 64
    max_malformed: float = 0.01
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"

    def __post_init__(self) -> None:
        """Refuses counts out of range."""
        check_types(self)
        for name in ("max_new_tokens", "batch_size"):
            value = getattr(self, name)
            require(value >= 1, name, value, "at least 1")
            require_int32(name, value)
        length = self.max_length
        is_long = length is None or length >= 2
        require(is_long, "max_length", length, "at least 2 (prompt + output)")
        is_between = 0 <= self.min_prefix <= self.max_prefix
        bounds = f"0 to max_prefix = {self.max_prefix}"
        require(is_between, "min_prefix", self.min_prefix, bounds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """All settings of `eagle-jax regenerate`, one TOML table per attribute."""

    tree: TreeConfig = dataclasses.field(default_factory=TreeConfig)
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    regeneration: RegenerationConfig = RegenerationConfig()
