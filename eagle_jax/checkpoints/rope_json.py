"""Rotary embeddings as `config.json` spells them, in transformers 4 and 5."""

from pathlib import Path
from typing import Any

from eagle_jax.checkpoints.fields import (
    MOST_POSITIONS,
    number_of,
    size_of,
    warn_once,
)
from eagle_jax.errors import InputError
from eagle_jax.models.rope import RopeConfig

_ROPE_FIELDS = {
    *("rope_type", "type", "rope_theta", "factor", "low_freq_factor"),
    *("high_freq_factor", "original_max_position_embeddings"),
}


def read_rope(
    config: dict[str, Any],
    path: Path,
    *,
    default_theta: float = 10000.0,
    is_head: bool = False,
) -> RopeConfig:
    """Reads `rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`.

    Args:
        config: The fields of `config.json`.
        path: Of that file, for refusals.
        default_theta: What a file without `rope_theta` means.
        is_head: Whether it describes a head.

    Raises:
        InputError: If a field is missing, contradicts another or is not implemented.
    """
    scaling = _rope_scaling(config, path)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    outer, inner = config.get("rope_theta"), scaling.get("rope_theta")
    if outer is None and inner is None:
        if kind == "llama3" or config.get("rope_parameters"):
            raise InputError(
                f"{path}: rope_theta is missing beside its rope parameters"
            )
        theta = default_theta
        if not is_head:  # Published heads name none and mean 10000.
            warn_once(
                f"{path} names no rope_theta; taking {theta:g}, which this family "
                "means by that"
            )
    elif None not in (outer, inner) and outer != inner:
        raise InputError(f"{path}: rope_theta is both {outer} and {inner}")
    else:
        theta = number_of(config if inner is None else scaling, "rope_theta", path)
    if kind in ("linear", "llama3") and "factor" not in scaling:
        raise InputError(f"{path}: rope type {kind!r} needs a factor")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(
            theta=theta, kind=kind, factor=number_of(scaling, "factor", path)
        )
    if kind == "llama3":
        wanted = ("low_freq_factor", "high_freq_factor")
        missing = [
            name
            for name in (*wanted, "original_max_position_embeddings")
            if name not in scaling
        ]
        if missing:
            raise InputError(f"{path}: rope type 'llama3' needs {', '.join(missing)}")
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=number_of(scaling, "factor", path),
            low_freq_factor=number_of(scaling, "low_freq_factor", path),
            high_freq_factor=number_of(scaling, "high_freq_factor", path),
            original_max_positions=size_of(
                scaling,
                "original_max_position_embeddings",
                path,
                most=MOST_POSITIONS,
            ),
        )
    raise InputError(
        f"{path}: rope type {kind!r} is not supported; known are default, linear and "
        "llama3"
    )


def _rope_scaling(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns what either spelling says beside the base; `{}` where neither does."""
    names = [n for n in ("rope_parameters", "rope_scaling") if config.get(n)]
    for name in names:
        if not isinstance(config[name], dict):
            raise InputError(f"{path}: {name} = {config[name]!r} must be an object")
        unknown = sorted(set(config[name]) - _ROPE_FIELDS)
        if unknown:
            raise InputError(
                f"{path}: the field {unknown[0]!r} of {name} is not supported"
            )
    scalings = [config[name] for name in names]
    if len(scalings) == 2 and scalings[0] != scalings[0] | scalings[1]:
        raise InputError(
            f"{path}: rope_parameters and rope_scaling contradict each other; leave "
            "out one of them"
        )
    return scalings[0] if scalings else {}
