"""Settings of training a head and of its texts; defaults are the EAGLE papers'.

Those of the head itself and of its loss are its kind's, in `eagle_jax.heads`.
"""

import dataclasses
import math
from typing import Any, Literal

from eagle_jax.config import TreeConfig, from_table, require, require_counts
from eagle_jax.heads import HEADS, Head
from eagle_jax.heads.eagle import EagleSettings
from eagle_jax.heads.settings import HeadSettings
from eagle_jax.models.transformer import TransformerConfig
from eagle_jax.parsing import check_types, value_at


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The settings of AdamW with linear warm-up and decay (EAGLE-1, section 4).

    Attributes:
        learning_rate: The learning rate at the end of the warm-up.
        weight_decay: The decoupled weight decay, on matrices and vectors alike.
        warmup_steps: The number of steps from rate 0 to `learning_rate`, cut to one
            less than those of the run.
        clip: The bound of the gradient's global norm.
    """

    learning_rate: float = 3e-5
    weight_decay: float = 0.01
    warmup_steps: int = 2000
    clip: float = 0.5

    def __post_init__(self) -> None:
        """Refuses values outside their range."""
        check_types(self)
        rate = self.learning_rate
        require(0 < rate < math.inf, "learning_rate", rate, "above 0 and finite")
        decay = self.weight_decay
        require(0 <= decay < math.inf, "weight_decay", decay, "0 or more and finite")
        require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "0 or more")
        require(0 < self.clip < math.inf, "clip", self.clip, "above 0 and finite")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The settings by which data becomes rows of tokens.

    Attributes:
        row_length: The number of tokens per row, `T`; samples are packed into rows, and
            longer ones are cut.
        held_out: The share of the samples that is evaluated on and not trained on.
        cache_features: Compute the target's features once and keep them on disk.
    """

    row_length: int = 2048
    held_out: float = 0.05
    cache_features: bool = False

    def __post_init__(self) -> None:
        """Refuses values outside their range."""
        check_types(self)
        require(self.row_length >= 4, "row_length", self.row_length, "at least 4")
        require(0 < self.held_out < 1, "held_out", self.held_out, "between 0 and 1")


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
        keep: The number of newest checkpoints kept, beside the best.
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
    keep: int = 2

    def __post_init__(self) -> None:
        """Refuses counts below one."""
        check_types(self)
        counts = [field.name for field in dataclasses.fields(self) if field.type is int]
        require_counts(self, **{name: 1 for name in counts if name != "seed"})
        require(0 <= self.seed < 2**31, "seed", self.seed, "0 to 2**31 - 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All settings of `eagle-jax train`, one TOML table per attribute.

    Attributes:
        loss: The settings of the loss of the kind of head; `None` for its defaults.
        optimizer: The settings of the optimizer.
        data: The settings of the data.
        head: The settings of the head, whose class is that of its kind.
        run: The settings of the run.
        tree: The tree that is grown where the head is evaluated.
    """

    loss: Any = None
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    head: HeadSettings = dataclasses.field(default_factory=EagleSettings)
    run: RunConfig = RunConfig()
    tree: TreeConfig = dataclasses.field(default_factory=TreeConfig)

    def __post_init__(self) -> None:
        """Refuses the loss of another kind of head."""
        wanted = self.kind.Loss
        if self.loss is None:
            object.__setattr__(self, "loss", wanted())
        holds = type(self.loss) is wanted
        require(holds, "loss", self.loss, f"of class {wanted.__name__}, as its head is")

    @property
    def kind(self) -> type[Head]:
        """The kind of head."""
        return HEADS[self.head.kind]

    @classmethod
    def from_table(cls, table: dict[str, Any], where: str) -> "TrainConfig":
        """See `config.from_table`: the kind of head says what its own tables hold."""
        named = str(value_at(table, "head", "kind") or cls().head.kind)
        require(
            named in HEADS, f"{where} [head]: kind", named, f"of {', '.join(HEADS)}"
        )
        own = HEADS[named]
        types = {"head": own.Settings, "loss": own.Loss}
        return from_table(cls, table, where, **types)


def new_head(target: TransformerConfig, config: TrainConfig) -> Head:
    """Returns a new head, whose sizes are those that are set, else published ones."""
    length = min(target.max_positions, config.data.row_length)
    sizes = config.kind.default_config(target, config.head, length)
    return config.kind(config=sizes)
