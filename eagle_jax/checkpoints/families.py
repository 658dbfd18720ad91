"""What the name of a family of targets says, and `config.json` does not."""

import dataclasses

from eagle_jax.models.transformer import TransformerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`.

    Attributes:
        architecture: Its entry in `architectures`.
        qkv_bias: Whether q, k and v have biases.
        qk_norm: Whether queries and keys are normalised.
        is_mixture: Whether each layer is a sparse mixture of experts.
        has_window: Whether `sliding_window` means something.
        window: What it is where the field is left out; `None` for no window.
        has_switch: Whether it counts only with `use_sliding_window`, and from layer
            `max_window_layers` on.
        head_dim: What `head_dim` is where it is left out; `None` for the width over
            the number of heads.
        rope_theta: What `rope_theta` is where it is left out.
        rms_norm_eps: What `rms_norm_eps` is where it is left out.
    """

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    is_mixture: bool = False
    has_window: bool = False
    window: int | None = None
    has_switch: bool = False
    head_dim: int | None = None
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    @property
    def fields(self) -> set[str]:
        """What `config.json` may name in this family only."""
        switch = {"use_sliding_window", "max_window_layers"}
        mixture = {"num_local_experts", "num_experts_per_tok"}
        # These two change training only.
        mixture |= {"router_aux_loss_coef", "router_jitter_noise"}
        return (switch if self.has_switch else set()) | (
            mixture if self.is_mixture else set()
        )


FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM"),
    "mistral": Family(architecture="MistralForCausalLM", has_window=True, window=4096),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        has_window=True,
        is_mixture=True,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        qkv_bias=True,
        has_window=True,
        window=4096,
        has_switch=True,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        qk_norm=True,
        has_window=True,
        window=4096,
        has_switch=True,
        head_dim=128,
    ),
}
"""Target families by `model_type`."""


def family_of(config: TransformerConfig) -> str:
    """Returns the family that a model is exported as."""
    layer = config.layer
    if layer.qk_norm:
        return "qwen3"
    if layer.qkv_bias:
        return "qwen2"
    if layer.num_experts:
        return "mixtral"
    return "llama" if config.sliding_window is None else "mistral"
