"""Rotary position embeddings in the rotate-half layout of Hugging Face's Llama."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """The base and the scaling of the rotary frequencies.

    Attributes:
        theta: The base of the frequencies.
        kind: The kind of scaling: "default", "linear", "llama3", "yarn" or "longrope".
        factor: The stretch of the context, for "linear", "llama3" and "yarn".
        low_freq_factor: The turns in the original context below which a frequency is
            fully stretched, for "llama3".
        high_freq_factor: The turns in the original context above which a frequency is
            left alone, for "llama3".
        original_max_positions: The length of the original context, in positions, for
            "llama3", "yarn" and "longrope".
        beta_slow: The turns in the original context below which a frequency is fully
            stretched, for "yarn" (section 3.2 of its paper, alpha).
        beta_fast: The turns above which it is left alone, for "yarn" (beta).
        truncate: Whether these borders are moved outwards to whole dimensions, for
            "yarn".
        attention_factor: The factor of rotated queries and keys, for "yarn" and
            "longrope".
        factors: The stretch of each frequency, for "longrope": those for texts within
            the original context.
        fraction: The part of a head's dimensions that is rotated, the first ones (Phi).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    truncate: bool = True
    attention_factor: float = 1.0
    factors: tuple[float, ...] = ()
    fraction: float = 1.0

    def width(self, head_dim: int) -> int:
        """Returns how many of a head's dimensions are rotated."""
        return int(head_dim * self.fraction)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Returns the angle that each pair of dimensions turns per position.

    Args:
        config: The base and the scaling.
        head_dim: The width of a head, `A`, even.

    Returns:
        The angles `[A / 2]` float32 in radians per position, a constant of the trace;
        fewer where only a fraction of the head is rotated.
    """
    head_dim = config.width(head_dim)
    # Rounded to float32 where transformers does: at position 2,500 the last bit of a
    # frequency changes logits by 1e-4.
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = config.theta ** exponents.astype(np.float64)
    frequencies = 1 / powers.astype(np.float32)
    if config.kind == "linear":
        frequencies = frequencies / config.factor
    elif config.kind == "yarn":
        kept = 1 - _yarn_ramp(config, head_dim)
        frequencies = kept * frequencies + (1 - kept) * frequencies / config.factor
    elif config.kind == "llama3":
        turns = config.original_max_positions * frequencies / (2 * math.pi)
        low, high = config.low_freq_factor, config.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequencies = kept * frequencies + (1 - kept) * frequencies / config.factor
    elif config.kind == "longrope":
        frequencies = frequencies / np.array(config.factors)
    return frequencies.astype(np.float32)


def _yarn_ramp(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Returns how far each frequency is stretched, `[A / 2]`, 0 for not at all.

    It rises over the dimensions, not over the turns as in the paper, as transformers
    does it.
    """

    def dimension(turns: float) -> float:
        length = config.original_max_positions / (2 * math.pi * turns)
        return head_dim * math.log(length) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    wide = high - low or 0.001
    return np.clip((np.arange(head_dim // 2) - low) / wide, 0.0, 1.0)


def rotary_tables(
    positions: jax.Array, config: RopeConfig, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine of every position's angles, once per model call.

    Args:
        positions: `[B, T]` int32, absolute positions.
        config: The base and the scaling. Static.
        head_dim: The width of a head, `A`. Static.

    Returns:
        The two tables `[B, T, 1, A / 2]` float32, times the attention factor, of fewer
        angles where only a fraction is rotated; bfloat16 cannot tell position 256 from
        257.
    """
    frequencies = jnp.asarray(inverse_frequencies(config, head_dim))
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    tables = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    factor, width = np.float32(config.attention_factor), config.width(head_dim)

    def product(tables: jax.Array) -> jax.Array:
        one = np.eye(width, dtype=np.float32) * factor
        return jnp.matmul(tables, one, precision=jax.lax.Precision.HIGHEST)

    # A product with ones and zeros is exact. Without it XLA, which takes cosines for
    # cheap, computes them anew in every layer and head, an optimization barrier or not:
    # 5% of a round of 60 nodes on a CPU. For GPUs they are cheap.
    tables = jax.lax.platform_dependent(
        tables, cuda=lambda tables: tables * factor, default=product
    )
    cos, sin = jnp.split(tables, 2, axis=-1)
    return cos, sin


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns queries or keys by their positions.

    Args:
        x: `[B, T, heads, A]`, queries or keys.
        tables: The tables that `rotary_tables` returned.

    Returns:
        The rotated queries or keys, in the same shape and dtype.
    """
    cos, sin = tables
    half = cos.shape[-1]
    first, second, rest = jnp.split(x.astype(jnp.float32), [half, 2 * half], axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
