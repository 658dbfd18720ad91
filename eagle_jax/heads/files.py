"""Heads of every kind in the published layouts: opened, read and written."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from eagle_jax.checkpoints import names
from eagle_jax.checkpoints.export_files import Export, host_tensors, write_export
from eagle_jax.checkpoints.load import (
    check_shapes,
    load_params,
    shapes_of,
)
from eagle_jax.checkpoints.weights import Weights, open_weights
from eagle_jax.errors import InputError
from eagle_jax.heads.head import Head, combine, partition
from eagle_jax.heads.kinds import find_head, head_of
from eagle_jax.models.transformer import TransformerConfig

_TABLE = "embedding"
"""The path of a head's own embedding table in its weights, if it may have one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenHead:
    """A head whose sizes and tensors are known and checked, but whose weights not read.

    Attributes:
        folder: The folder that holds it.
        head: Its kind.
        config: Its sizes.
        files: Its tensors.
        names: The tensors' names, as the weights' pytree.
        shapes: Their shapes, as the weights' pytree.
        offsets: The offsets of its tokens, `None` where it knows all of the target's.
    """

    folder: Path
    head: Head
    config: Any
    files: Weights
    names: Any
    shapes: Any
    offsets: jax.Array | None

    def load(
        self,
        target: Any = None,
        dtype: str | None = "float32",
        shardings: Any = None,
    ) -> Any:
        """Reads the weights.

        A head's own copy of the target's embedding table is dropped where it is equal,
        so that the table is in memory once.

        Args:
            target: The target's weights; `None` to take the head as it is stored.
            dtype: The dtype of the weights; `None` for the one they are stored in.
            shardings: A `jax.sharding.Sharding` for all weights, or a pytree of one for
                each; `None` for the default device. An embedding table for which it
                names none is sharded as the target's.

        Raises:
            InputError: If a tensor cannot be read, or does not fit into `dtype`.
        """
        offsets, own_table = self.offsets, getattr(self.shapes, _TABLE, None)
        if not isinstance(shardings, Sharding | None):
            shardings, place = partition(shardings)
            if offsets is not None:
                offsets = jax.device_put(offsets, place)
            if hasattr(shardings, _TABLE):
                place = shardings.embedding or (target and target.embedding.sharding)
                place = None if own_table is None else place
                shardings = dataclasses.replace(shardings, embedding=place)
        elif shardings is not None and offsets is not None:
            offsets = jax.device_put(offsets, shardings)
        kind = self.files.dtype(dtype)
        params = load_params(self.files, self.names, self.shapes, kind, shardings)
        if own_table is not None and target is not None:
            params = _drop_equal_table(params, target.embedding)
        return combine(params, offsets)

    def own_table(self, dtype: str) -> np.ndarray | None:
        """Returns the head's own embedding table, `[V, E]`; `None` for none."""
        name = getattr(self.names, _TABLE, None)
        return None if name is None else self.files.read(name).astype(jnp.dtype(dtype))


def open_head(folder: Path, target: TransformerConfig | None = None) -> OpenHead:
    """Opens the head in a folder, without reading its weights.

    Args:
        folder: The folder, from `resolve`.
        target: The target's sizes; `None` to open it without its target, which heads
            do not allow whose files leave a size open.

    Raises:
        InputError: If the folder holds no head, one that cannot be used or was made for
            another target, or tensors are missing, unexpected or misshapen.
    """
    head, files = find_head(folder), open_weights(folder)
    if head is None:
        raise InputError(f"{folder} holds a whole model; give a head here")
    config = head.read_config(folder, target)
    if target is not None:
        head.check(target, config)
    head.forget(files)
    offsets = head.read_offsets(files, config)
    shapes, wanted = _match(head, config, files.names())
    if target is not None and getattr(shapes, _TABLE, target) is None:
        width = config.layer.hidden_size
        if width != target.layer.hidden_size:
            raise InputError(
                f"{folder} lacks an embedding table: the target's is "
                f"{target.layer.hidden_size} wide and does not fit a head of {width}"
            )
    check_shapes(files, wanted, shapes)
    return OpenHead(
        folder=folder,
        head=head,
        config=config,
        files=files,
        names=wanted,
        shapes=shapes,
        offsets=offsets,
    )


def export_head(
    folder: Path,
    config: Any,
    params: Any,
    how: Export | None = None,
    layout: str | None = None,
) -> None:
    """Writes a head in the layout of the published ones.

    The same weights give the same bytes, whatever the folder's name.

    Args:
        folder: The folder to write: `config.json`, a file of safetensors and, where
            torch is installed, the pickle that the official code reads.
        config: The head's sizes.
        params: The head's weights; an embedding table among them is written, too.
        how: How it is written.
        layout: The names of the tensors, a key of `Head.layouts`; `None` for the
            published ones.

    Raises:
        InputError: If the layout cannot express the head, a weight does not fit its
            sizes or the dtype, or the folder cannot be written.
    """
    head, how = head_of(config), how or Export()
    params, offsets = partition(params)
    table = _layout(head, config, layout)
    has_table = getattr(params, _TABLE, None) is not None
    shapes = _shapes(head, config, has_table=has_table)
    maps = head.maps(config, offsets)
    write_export(
        folder,
        head.fields(config, how),
        host_tensors(params, shapes, table, how.dtype) | maps,
        config,
        lambda new: head.read_config(new, config),
        dataclasses.replace(how, files=head.files),
    )


def _match(head: Head, config: Any, stored: set[str]) -> tuple[Any, Any]:
    """Returns the shapes and names of weights in the layout that most tensors have."""
    found = []
    for table in head.layouts(config).values():
        shapes = _shapes(head, config, has_table=table.get(_TABLE) in stored)
        wanted = names.tensor_names(shapes, table)
        num_common = len(stored.intersection(jax.tree.leaves(wanted)))
        found.append((num_common, shapes, wanted))
    _, shapes, wanted = max(found, key=lambda match: match[0])
    return shapes, wanted


def _layout(head: Head, config: Any, layout: str | None) -> dict[str, str]:
    layouts = head.layouts(config)
    if layout is None:
        return next(iter(layouts.values()))
    if layout not in layouts:
        raise InputError(f"prefix = {layout!r} must be {' or '.join(layouts)}")
    return layouts[layout]


def _shapes(head: Head, config: Any, *, has_table: bool) -> Any:
    """Returns the shapes of a head's weights, with or without an embedding table."""
    shapes, _ = partition(shapes_of(head.init, config))
    if not has_table:
        return shapes
    shape = (config.vocab_size, config.layer.hidden_size)
    table = jax.ShapeDtypeStruct(shape, jnp.float32)
    return dataclasses.replace(shapes, embedding=table)


def _drop_equal_table(params: Any, embedding: jax.Array) -> Any:
    """Returns a head's weights without an embedding table that equals the target's."""
    own = params.embedding
    if own.is_fully_addressable and embedding.is_fully_addressable:
        is_equal = np.array_equal(np.asarray(own), np.asarray(embedding))
    else:  # No process has them whole.
        is_equal = bool(jnp.array_equal(own, embedding))
    return dataclasses.replace(params, embedding=None) if is_equal else params
