"""Sliding windows as `config.json` spells them."""

from pathlib import Path
from typing import Any

from eagle_jax.checkpoints.families import Family
from eagle_jax.checkpoints.fields import MOST_POSITIONS, flag_of, size_of
from eagle_jax.errors import InputError

_QWEN_FULL_LAYERS = 28
_SLIDING = "sliding_attention"
_LAYER_TYPES = ("full_attention", _SLIDING)


def read_windows(
    config: dict[str, Any], family: Family, num_layers: int, path: Path
) -> tuple[int | None, tuple[int, ...]]:
    """Returns the sliding window and the layers that have it.

    Args:
        config: The fields of `config.json`.
        family: Of the target.
        num_layers: `L`.
        path: Of that file, for refusals.

    Returns:
        Tokens that a layer looks back, `None` where no layer has a window, and the
        numbers of the layers that do.

    Raises:
        InputError: If fields contradict each other or are of another kind.
    """
    types = config.get("layer_types")
    is_list = isinstance(types, list) and len(types) == num_layers
    if types and (not is_list or any(name not in _LAYER_TYPES for name in types)):
        raise InputError(
            f"{path}: layer_types must name {' or '.join(_LAYER_TYPES)} for each of "
            f"{num_layers} layers, not {types!r}"
        )
    window = None
    is_on = not family.has_switch or flag_of(
        config, "use_sliding_window", path, default=False
    )
    # A field that is left out means the family's own; only null means none.
    if family.has_window and is_on and config.get("sliding_window", 0) is not None:
        default = family.window
        if default is not None or "sliding_window" in config:
            window = size_of(
                config, "sliding_window", path, default=default, most=MOST_POSITIONS
            )
    sliding = [number for number, name in enumerate(types or ()) if name == _SLIDING]
    if window is None and sliding:
        raise InputError(
            f"{path}: layer_types asks for sliding_attention, but there is no "
            "sliding_window"
        )
    is_everywhere = not types or len(sliding) == num_layers
    if window is not None and not family.has_switch and not is_everywhere:
        raise InputError(
            f"{path}: layer_types contradicts sliding_window = {window}, which this "
            "family has in every layer"
        )
    start = 0
    if family.has_switch:
        start = size_of(
            config, "max_window_layers", path, default=_QWEN_FULL_LAYERS, least=0
        )
    windowed = tuple(sliding if types else range(start, num_layers))
    if window is None or not windowed:
        return None, ()
    return window, windowed
