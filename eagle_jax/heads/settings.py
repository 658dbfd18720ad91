"""Settings of new heads and of their losses that several kinds share.

A kind's own settings are a dataclass of its own, so that none can be given which would
change nothing: `[head]` and `[loss]` of a file for training know the keys of the kind
that `kind` in `[head]` names.
"""

import dataclasses
import math
from typing import Literal

from eagle_jax.config import require
from eagle_jax.errors import InputError
from eagle_jax.models.layers import LayerConfig
from eagle_jax.parsing import check_types

MOST_LEVELS = 16
"""The most levels that are drafted in training; each costs as much as the first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """The kind of a new head; its sizes are fields of the kind's own class.

    A size of `None` stands for the target's, or the published one. A head that is begun
    with keeps its own, and none may be set.

    Attributes:
        kind: The kind of head.
    """

    kind: str

    def __post_init__(self) -> None:
        """Refuses sizes below one."""
        check_types(self)
        for name, value in vars(self).items():
            is_size = type(value) is int
            require(not is_size or value >= 1, name, value, "at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSettings(HeadSettings):
    """The settings of a new head of one decoder layer.

    Attributes:
        intermediate_size: The width of the feed-forward layer.
        num_heads: The number of query heads.
        num_kv_heads: The number of key/value heads.
    """

    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None

    def layer(self, target: LayerConfig) -> LayerConfig:
        """Returns the sizes of the head's layer.

        Args:
            target: The sizes of the target's layers.

        Raises:
            InputError: If the attention heads that are set do not divide the target's
                width.
        """
        num_heads = self.num_heads or target.num_heads
        if target.hidden_size % (2 * num_heads):
            raise InputError(
                f"num_heads = {num_heads} must divide the target's hidden_size = "
                f"{target.hidden_size} into an even head_dim; set [head] num_heads"
            )
        num_kv_heads = self.num_kv_heads or min(target.num_kv_heads, num_heads)
        if num_heads % num_kv_heads:
            raise InputError(
                f"num_kv_heads = {num_kv_heads} must divide num_heads = {num_heads}"
            )
        return dataclasses.replace(
            target.plain,
            intermediate_size=self.intermediate_size or target.intermediate_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=target.hidden_size // num_heads,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureSettings(LayerSettings):
    """The settings of a new head that reads inner layers of its target.

    Attributes:
        feature_layers: The indices, such as "1 2 4", of the layers of the target whose
            inputs the head reads; `None` for the published ones (EAGLE-3: 2, half of
            the layers, and three before their end; DFlash: five spread over all).
    """

    feature_layers: str | None = None

    def __post_init__(self) -> None:
        """Refuses sizes below one, and what names no layers."""
        super().__post_init__()
        layers = self.feature_layers
        holds = layers is None or all(
            word.isdecimal() for word in layers.split() or "-"
        )
        require(holds, "feature_layers", layers, 'layers, such as "1 2 4"')

    @property
    def layers(self) -> tuple[int, ...] | None:
        """The indices of `feature_layers`."""
        layers = self.feature_layers
        return None if layers is None else tuple(map(int, layers.split()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LevelSettings(HeadSettings):
    """The settings of new heads that draft one level each.

    Attributes:
        draft_heads: The number of heads, one per drafted level; `None` for 5 of
            Medusa's and 4 of Hydra's.
        head_layers: The number of blocks of each head; `None` for 1 of Medusa's and 4
            of Hydra's.
    """

    draft_heads: int | None = None
    head_layers: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The settings of a loss.

    Attributes:
        reads_hidden: Whether it reads the target's last hidden states beside the
            features that the head does; no setting.
    """

    reads_hidden = False

    def __post_init__(self) -> None:
        """Refuses settings that lie outside their range."""
        check_types(self)
        for name, value in vars(self).items():
            if name == "decay":
                require(0 < value <= 1, name, value, "above 0 and at most 1")
            elif name == "alignment":
                holds = value is None or 1 <= value <= MOST_LEVELS
                require(holds, name, value, f"1 to {MOST_LEVELS}")
            elif isinstance(value, int | float):
                holds = math.isfinite(value) and value >= 0
                require(holds, name, value, "finite, 0 or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainLoss(LossSettings):
    """The settings of a loss over chains that are drafted from every position.

    Attributes:
        mask: The pairs that count: "next" for those whose *token* (`i + 1`) is to be
            predicted, so that the first draft after a prompt is trained; "official"
            for those whose feature (`i`) belongs to such a token.
        alignment: The number of levels drafted from every position of a text (HASS,
            section 3.2: its passes; EAGLE-3: the steps of its training-time test);
            `None` for 1, which is EAGLE-1's loss, and 7 for an EAGLE-3 head.
        token_loss: The loss between token distributions: "cross-entropy", as published,
            or "alpha", `-log(alpha)` of the rate at which drafts are accepted.
    """

    mask: Literal["next", "official"] = "next"
    alignment: int | None = None
    token_loss: Literal["cross-entropy", "alpha"] = "cross-entropy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LevelLoss(LossSettings):
    """The settings of the loss of heads that draft one level each.

    Attributes:
        decay: The weight of each head relative to the one before (Medusa, section 3.2).
        labels: What heads learn: "tokens" for the text's, as published for Medusa;
            "target" for the target's distributions, as published for Hydra; `None` for
            what was published.
    """

    decay: float = 0.8
    labels: Literal["tokens", "target"] | None = None
