"""EAGLE-1/2 heads, whether heads fit a target, and their calibrations.

The calibration beside a head says what its confidences are worth, greedy and sampled.
Either part may be missing; other keys say where the numbers come from:

    {"vocab_size": 2048,
     "greedy": {"kappa": 1.0, "exponents": [[0.4, 1.1], [0.5, 1.2]]},
     "sampled": {"kappa": 2.0, "sharpness": 1.2, "exponents": [[0.9, 1.0], [0.8, 1.1]]}}
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from eagle_jax.checkpoints import names
from eagle_jax.checkpoints.hf_config import head_config
from eagle_jax.checkpoints.load import load_params, shapes_of, weights_dtype
from eagle_jax.checkpoints.weights import Weights, open_weights
from eagle_jax.drafting.calibration import UNCALIBRATED, Calibration, Confidence
from eagle_jax.errors import InputError
from eagle_jax.models import eagle_head
from eagle_jax.models.eagle3_head import Eagle3HeadConfig, feature_layers
from eagle_jax.models.eagle_head import EagleHeadConfig, EagleHeadParams
from eagle_jax.models.hydra_heads import HydraConfig
from eagle_jax.models.medusa_heads import MedusaConfig
from eagle_jax.models.transformer import TransformerConfig, TransformerParams
from eagle_jax.parsing import read_json

Kind = Literal["greedy", "sampled"]
"""The kind of a text: greedy, or drawn above temperature 0 with noise drafts share."""

_FEWEST_LAYERS = 7
_DIGITS = 4
_KINDS: tuple[Kind, ...] = ("greedy", "sampled")


def load_head(
    folder: Path,
    target: TransformerConfig,
    target_params: TransformerParams,
    dtype: str | None = "float32",
    shardings: Any = None,
) -> tuple[EagleHeadConfig, EagleHeadParams]:
    """Loads an EAGLE-1/2 head.

    A head's own copy of the target's embedding table is dropped where it is equal,
    so that the table is in memory once.

    Args:
        folder: The head's folder, from `resolve`.
        target: The target's sizes.
        target_params: The target's weights.
        dtype: The dtype of the weights; `None` for the one they are stored in.
        shardings: A `jax.sharding.Sharding` for all weights, or one for each in an
            `EagleHeadParams`; `None` for the default device. An embedding table for
            which it names none is sharded as the target's.

    Returns:
        The head's sizes and weights.

    Raises:
        InputError: If the head cannot be used, or does not fit the target.
    """
    config = head_config(folder)
    check_pair(target, config)
    shapes = shapes_of(eagle_head.init_params, config)
    return config, load_weights(
        open_weights(folder),
        names.EAGLE_HEAD,
        shapes,
        config,
        dtype,
        shardings,
        target_params.embedding,
    )


def read_head(
    folder: Path, dtype: str | None = None
) -> tuple[EagleHeadConfig, EagleHeadParams]:
    """Loads an EAGLE-1/2 head as it is stored, without its target.

    Args:
        folder: The head's folder, from `resolve`.
        dtype: The dtype of the weights; `None` for the one they are stored in.

    Returns:
        The head's sizes and weights, with the embedding table if it has one.

    Raises:
        InputError: If the head cannot be used.
    """
    config = head_config(folder)
    shapes = shapes_of(eagle_head.init_params, config)
    return config, load_weights(
        open_weights(folder), names.EAGLE_HEAD, shapes, config, dtype
    )


def read_own_embedding(
    folder: Path, head: EagleHeadConfig | Eagle3HeadConfig, dtype: str
) -> jax.Array | None:
    """Loads the embedding table that a head's folder holds, and nothing else.

    Args:
        folder: The head's folder, from `resolve`.
        head: The head's sizes.
        dtype: The dtype of the table.

    Returns:
        The embedding table, `[V, E]`; `None` where there is none.

    Raises:
        InputError: If it is not of the size that `config.json` names.
    """
    files, name = open_weights(folder), names.EAGLE_HEAD["embedding"]
    if name not in files.names():
        return None
    for other in files.names() - {name}:
        files.forget(other)
    return load_params(files, name, _table_shape(head), jnp.dtype(dtype))


def load_weights(
    files: Weights,
    table: dict[str, str],
    shapes: Any,
    config: EagleHeadConfig | Eagle3HeadConfig,
    dtype: str | None,
    shardings: Any = None,
    target_table: jax.Array | None = None,
) -> Any:
    """Loads the weights of a head, without a table that equals the target's.

    Args:
        files: The checkpoint.
        table: The tensors' names, from `names`.
        shapes: The shapes of the weights, without an embedding table.
        config: The head's sizes.
        dtype: The dtype of the weights; `None` for the one they are stored in.
        shardings: The shardings that `load_head` takes.
        target_table: The target's embedding table, `[V, E]`; `None` without a target.
    """
    has_table = table["embedding"] in files.names()
    if has_table:
        shapes = with_table(shapes, config)
    if target_table is not None and not isinstance(shardings, Sharding | None):
        own: Any = shardings.embedding or target_table.sharding
        shardings = dataclasses.replace(shardings, embedding=own if has_table else None)
    wanted = names.tensor_names(shapes, table)
    params = load_params(files, wanted, shapes, weights_dtype(files, dtype), shardings)
    if target_table is None:
        return params
    return drop_equal_table(params, target_table)


def with_table(shapes: Any, config: Any) -> Any:
    """Returns the shapes of a head that has an embedding table of its own."""
    return dataclasses.replace(shapes, embedding=_table_shape(config))


def _table_shape(config: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape of a head's own embedding table."""
    shape = (config.vocab_size, config.layer.hidden_size)
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def drop_equal_table(params: Any, embedding: jax.Array) -> Any:
    """Returns a head's weights without an embedding table that equals the target's."""
    own = params.embedding
    if own is None:
        return params
    if own.is_fully_addressable and embedding.is_fully_addressable:
        is_equal = np.array_equal(np.asarray(own), np.asarray(embedding))
    else:  # No process has them whole.
        is_equal = bool(jnp.array_equal(own, embedding))
    return dataclasses.replace(params, embedding=None) if is_equal else params


def check_pair(
    target: TransformerConfig,
    head: EagleHeadConfig | Eagle3HeadConfig | MedusaConfig | HydraConfig,
) -> None:
    """Refuses a head, or heads, made for another target.

    Raises:
        InputError: If widths or vocabularies differ, or the target has too few layers
            for an EAGLE-3 head.
    """
    if isinstance(head, Eagle3HeadConfig):
        check_eagle3_pair(target, head)
        return
    is_eagle = isinstance(head, EagleHeadConfig)
    width = head.layer.hidden_size if is_eagle else head.hidden_size
    check_size("hidden_size", width, target.layer.hidden_size)
    check_size("vocab_size", head.vocab_size, target.vocab_size)


def check_eagle3_pair(target: TransformerConfig, head: Eagle3HeadConfig) -> None:
    """Refuses an EAGLE-3 head that was made for another target.

    Raises:
        InputError: If the features or the vocabularies differ, or the target has too
            few layers.
    """
    width = eagle3_target(target, head.feature_layers).feature_size
    if head.feature_size != width:
        raise InputError(
            f"the head reads features of width {head.feature_size}, three hidden "
            f"states of the target have {width}; give the head that was trained for "
            "this target"
        )
    check_size("vocab_size", head.vocab_size, target.vocab_size)


def check_size(name: str, given: int, wanted: int) -> None:
    """Refuses a head whose size is not the target's.

    Args:
        name: The size as `config.json` names it.
        given: The head's.
        wanted: The target's.

    Raises:
        InputError: If they differ.
    """
    if given != wanted:
        raise InputError(
            f"the head's {name} is {given}, the target's is {wanted}; give the head "
            "that was trained for this target"
        )


def num_rows(files: Weights, name: str) -> int:
    """Returns the first size of a tensor as files hold it; 0 where it has no axis.

    Args:
        files: The checkpoint.
        name: The tensor's name, one that is there.
    """
    shape, _ = files.parts(name)
    return sum(shape[:1])


def eagle3_target(
    target: TransformerConfig, layers: tuple[int, ...] | None = None
) -> TransformerConfig:
    """Returns a target that gives the features which an EAGLE-3 head reads.

    Args:
        target: The target's sizes.
        layers: The indices of the layers whose inputs are read, from a head's
            `feature_layers`; `None` for the published ones.

    Raises:
        InputError: If the target lacks one of the layers, or has too few for three
            different features where published ones are read.
    """
    known = target.num_layers
    if layers is None and known < _FEWEST_LAYERS:
        raise InputError(
            f"the target has {known} layers, and an EAGLE-3 head needs one of at least "
            f"{_FEWEST_LAYERS}: with fewer, two of its three features are the same; "
            "name three layers (feature_layers), or give an EAGLE-1/2 head"
        )
    layers = layers or feature_layers(known)
    is_rising = len(layers) == 3 and sorted({*layers}) == list(layers)
    if not is_rising or layers[0] < 0 or layers[-1] >= known:
        raise InputError(
            f"feature_layers = {list(layers)} must be three different layers of the "
            f"target's {known}, 0 to {known - 1}, ascending"
        )
    return dataclasses.replace(target, feature_layers=tuple(layers))


def load_calibration(
    path: Path, *, vocab_size: int, depth: int, kind: Kind
) -> Calibration:
    """Reads the calibration that `eagle-jax calibrate` or `eagle-jax train` wrote.

    Args:
        path: The calibration's file.
        vocab_size: The number of tokens the target knows, `V`.
        depth: The number of levels that will be drafted, `D`.
        kind: The kind of text whose part must be there.

    Returns:
        The calibration; a missing part leaves confidences of its kind as they are.

    Raises:
        InputError: If the file cannot be read, holds no calibration, or one for another
            vocabulary, fewer levels or the other kind of text.
    """
    content = read_json(path)
    try:
        found = content["vocab_size"]
        parts = {name: _read_part(content[name]) for name in _KINDS if name in content}
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f'{path} must hold "vocab_size" and, under "greedy" or "sampled", "kappa", '
            '"sharpness" and "exponents", a list of lists of numbers, as '
            f"eagle-jax calibrate writes it ({error!r})"
        ) from error
    if found != vocab_size:
        raise InputError(
            f"{path} was fitted to a vocabulary of {found} tokens, and the target has "
            f"{vocab_size}; fit one with eagle-jax calibrate"
        )
    if kind not in parts:
        known = " and ".join(parts) or "nothing"
        raise InputError(
            f"{path} calibrates {known}, not {kind} text; fit both kinds with "
            "eagle-jax calibrate, or leave the calibration out"
        )
    levels = len(parts[kind].exponents)
    if levels < depth:
        raise InputError(
            f"{path} was fitted to {levels} levels, but depth = {depth}; draft fewer, "
            "or fit deeper trees with eagle-jax calibrate --depth"
        )
    return dataclasses.replace(UNCALIBRATED, **parts)


def calibration_part(confidence: Confidence) -> dict[str, Any]:
    """Returns one part of a calibration, greedy or sampled, as its file holds it."""
    rows = [[round(entry, _DIGITS) for entry in row] for row in confidence.exponents]
    factors = {"kappa": confidence.kappa, "sharpness": confidence.sharpness}
    return factors | {"exponents": rows}


def _read_part(part: Any) -> Confidence:
    rows = tuple(tuple(float(entry) for entry in row) for row in part["exponents"])
    factors = {name: float(part[name]) for name in ("kappa", "sharpness")}
    return Confidence(**factors, exponents=rows)
