"""Heads of every kind in the published layouts: found, opened, read and written."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from eagle_jax.checkpoints import names
from eagle_jax.checkpoints.export_files import (
    Export,
    Tensors,
    host_tensors,
    write_export,
)
from eagle_jax.checkpoints.hf_fields import Fields
from eagle_jax.checkpoints.load import (
    check_shapes,
    load_params,
    open_target,
    shapes_of,
)
from eagle_jax.checkpoints.weights import Weights, open_weights
from eagle_jax.errors import InputError
from eagle_jax.heads.block import DFlashHead, DSparkHead
from eagle_jax.heads.eagle import EagleHead
from eagle_jax.heads.eagle3 import Eagle3Head
from eagle_jax.heads.head import Head, combine, partition
from eagle_jax.heads.hydra import HydraHeads
from eagle_jax.heads.medusa import MedusaHeads
from eagle_jax.models.transformer import TransformerConfig

_KINDS = MedusaHeads, HydraHeads, DFlashHead, DSparkHead, Eagle3Head, EagleHead
HEADS: dict[str, type[Head]] = {kind.name: kind for kind in _KINDS}
"""All kinds of heads by name."""

_TABLE = "embedding"
"""The path of a head's own embedding table in its weights, if it may have one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenHead:
    """A head whose sizes and tensors are known and checked, but whose weights not read.

    Attributes:
        head: The head.
        files: Its tensors.
        names: The tensors' names, as the weights' pytree.
        shapes: Their shapes, as the weights' pytree.
        offsets: The offsets of its tokens, `None` where it knows all of the target's.
    """

    head: Head
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
        place = shardings
        if not isinstance(shardings, Sharding | None):
            shardings, place = partition(shardings)
            if hasattr(shardings, _TABLE):
                theirs = shardings.embedding or (target and target.embedding.sharding)
                theirs = None if own_table is None else theirs
                shardings = dataclasses.replace(shardings, embedding=theirs)
        if offsets is not None:
            offsets = jax.device_put(offsets, place)
        kind = self.files.dtype(dtype)
        params = load_params(self.files, self.names, self.shapes, kind, shardings)
        if own_table is not None and target is not None:
            params = _drop_equal_table(params, target.embedding)
        return combine(params, offsets)

    def own_table(self, dtype: str) -> np.ndarray | None:
        """Returns the head's own embedding table, `[V, E]`; `None` for none."""
        name = getattr(self.names, _TABLE, None)
        return None if name is None else self.files.read(name).astype(jnp.dtype(dtype))


def find_head(folder: Path) -> type[Head] | None:
    """Returns the kind of head that a folder holds; `None` for a whole model.

    Args:
        folder: A folder that holds `config.json` and weights.

    Raises:
        InputError: If these cannot be read.
    """
    fields = Fields.read(folder)
    return next((kind for kind in HEADS.values() if kind.matches(fields)), None)


def open_whole(folder: Path) -> tuple[TransformerConfig, Weights]:
    """Opens a target, see `open_target`; a head that is given as one is called so."""
    try:
        return open_target(folder)
    except InputError as error:
        refusal = error
    with contextlib.suppress(InputError):
        if kind := find_head(folder):
            hint = "not a target; give it as `draft`, and its model as `target`"
            refusal = InputError(f"{folder} holds {kind.title}, {hint}")
    raise refusal


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
    kind, files = find_head(folder), open_weights(folder)
    if kind is None:
        raise InputError(f"{folder} holds a whole model; give a head here")
    head = kind(config=kind.read_config(folder, target))
    if target is not None:
        head.check_target(target)
    offsets = _read_offsets(files, head.config)
    shapes, wanted = _match(head, files)
    if target is not None and getattr(shapes, _TABLE, target) is None:
        width = head.config.layer.hidden_size
        if width != target.layer.hidden_size:
            raise InputError(
                f"{folder} lacks an embedding table: the target's is "
                f"{target.layer.hidden_size} wide and does not fit a head of {width}"
            )
    check_shapes(files, wanted, shapes)
    return OpenHead(
        head=head, files=files, names=wanted, shapes=shapes, offsets=offsets
    )


def export_head(
    folder: Path,
    head: Head,
    params: Any,
    how: Export | None = None,
    layout: str | None = None,
) -> None:
    """Writes a head in the layout of the published ones.

    The same weights give the same bytes, whatever the folder's name.

    Args:
        folder: The folder to write: `config.json`, a file of safetensors and, where
            torch is installed, the pickle that the official code reads.
        head: The head.
        params: Its weights; an embedding table among them is written, too.
        how: How it is written.
        layout: The names of the tensors, a key of `Head.tensor_names`; `None` for the
            published ones.

    Raises:
        InputError: If the layout cannot express the head, a weight does not fit its
            sizes or the dtype, or the folder cannot be written.
    """
    how, layouts = how or Export(), head.tensor_names()
    params, offsets = partition(params)
    if layout is None:
        layout = next(iter(layouts))
    if layout not in layouts:
        raise InputError(f"prefix = {layout!r} must be {' or '.join(layouts)}")
    shapes = _shapes(head, has_table=getattr(params, _TABLE, None) is not None)
    tensors = host_tensors(params, shapes, layouts[layout], how.dtype)
    write_export(
        folder,
        head.to_hf_config(how),
        tensors | _token_maps(head.config, offsets),
        head.config,
        lambda new: head.read_config(new, head.config),
        dataclasses.replace(how, files=head.files),
    )


def _match(head: Head, files: Weights) -> tuple[Any, Any]:
    """Returns the shapes and names of weights in the layout that most tensors have.

    What that layout says is no part of the head is left out of the files.
    """
    found, stored = [], files.names()
    for prefix, table in head.tensor_names().items():
        shapes = _shapes(head, has_table=table.get(_TABLE) in stored)
        wanted = names.tensor_names(shapes, table)
        num_common = len(stored.intersection(jax.tree.leaves(wanted)))
        found.append((num_common, prefix, table, shapes, wanted))
    _, prefix, table, shapes, wanted = max(found, key=lambda match: match[0])
    if prefix.endswith("."):
        others = [name for name in stored if not name.startswith(prefix)]
        files.leave_out(others, "they are no part of the heads")
    copies = {path: name for path, name in table.items() if path.startswith("target.")}
    told = "these tables" if "target.output_head" in copies else "that table"
    files.leave_out(copies.values(), f"the target has {told}")
    return shapes, wanted


def _shapes(head: Head, *, has_table: bool) -> Any:
    """Returns the shapes of a head's weights, with or without an embedding table."""
    shapes, _ = partition(shapes_of(head.init))
    if not has_table:
        return shapes
    shape = (head.vocab_size, head.config.layer.hidden_size)
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


def _token_maps(config: Any, offsets: jax.Array | None) -> Tensors:
    """Returns `d2t`, `[W]` int64, and `t2d`, `[V]` bool, by name; none for `None`."""
    if offsets is None:
        return {}
    to_target = np.asarray(offsets, np.int64)
    tokens = np.arange(len(to_target)) + to_target
    is_known = np.isin(np.arange(config.vocab_size), tokens)
    return dict(zip(names.MAPS, (to_target, is_known), strict=True))


def _read_offsets(files: Weights, config: Any) -> jax.Array | None:
    """Takes `d2t`, `[W]` int32, out of a head's files, and `t2d`, which must fit it.

    It is `None` where both vocabularies are the same.
    """
    vocab_size = config.vocab_size
    num_known = getattr(config, "draft_vocab_size", None)
    if num_known is None:
        return None
    offsets, is_known = (
        files.read(name) if name in files.names() else None for name in names.MAPS
    )
    for name in names.MAPS:
        files.forget(name)
    if offsets is None:
        if num_known == vocab_size:
            return None
        raise InputError(
            f"{files.folder} lacks d2t, which says where the head's {num_known} tokens "
            f"stand among the target's {vocab_size}"
        )
    if offsets.shape != (num_known,) or offsets.dtype.kind not in "iu":
        raise InputError(
            f"{files.folder}: d2t holds {offsets.dtype} {offsets.shape}, no integer "
            f"for each of draft_vocab_size = {num_known} tokens"
        )
    tokens = np.arange(num_known) + offsets.astype(np.int64)
    if tokens[0] < 0 or tokens[-1] >= vocab_size or (np.diff(tokens) <= 0).any():
        raise InputError(
            f"{files.folder}: d2t must lead to ascending tokens of the target, 0 to "
            f"{vocab_size - 1}; it holds offsets, not tokens"
        )
    in_head = np.isin(np.arange(vocab_size), tokens)
    if is_known is not None and not np.array_equal(is_known.astype(bool), in_head):
        raise InputError(
            f"{files.folder}: d2t and t2d name different tokens; the checkpoint is "
            "damaged"
        )
    return None if num_known == vocab_size else jnp.asarray(offsets, jnp.int32)
