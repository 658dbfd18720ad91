"""What a kind of head is: everything that is particular to it, in one object."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

import jax
import numpy as np

from eagle_jax.checkpoints.export_files import Export
from eagle_jax.checkpoints.hf_fields import Fields
from eagle_jax.checkpoints.weights import Weights
from eagle_jax.drafting.model import DraftModel
from eagle_jax.errors import InputError
from eagle_jax.heads.loss import Metrics
from eagle_jax.heads.rows import PackedRows
from eagle_jax.models.transformer import Tables, TransformerConfig


class HeadModel(DraftModel, Protocol):
    """A head of any kind as a draft model."""

    @property
    def config(self) -> Any:
        """The head's sizes."""
        ...

    def join(self, head: Any, target: Tables, /) -> Any:
        """Returns the drafter's parameters: a head, and the tables that it borrows."""
        ...


class Head(Protocol):
    """A kind of head; "heads" that draft one level each are one head together.

    A head's *sizes* are a frozen dataclass of the kind's own, its *weights* a pytree.
    What has a body here is what most kinds do.

    Attributes:
        name: The kind's name in settings of training.
        family: The `Weights.kind` of the methods that draft with it.
        title: What a folder of this kind holds, as refusals say it.
        config: The class of its sizes.
        settings: The class of the settings of a new one, the table `head`.
        loss_settings: The class of the settings of its loss, the table `loss`.
        init: The function from a typed PRNG key, sizes and a dtype ("float32" where it
            is left out) to random weights, without tables that the head borrows.
        loss: The function from weights in the dtype to compute in, a `Batch`, sizes and
            settings of the loss to the loss of the batch, and its parts. Both last
            arguments are static.
        files: The names of the file of safetensors and of the pickle in published
            folders.
        reads_hidden: Whether it learns from the target's last hidden states beside the
            features that it reads.
        is_ranked: Whether trees are grown by its confidences; else it has one part for
            each level, and a tree of one shape.
        has_published_table: Whether published folders hold an embedding table.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    title: ClassVar[str]
    config: ClassVar[type]
    settings: ClassVar[type]
    loss_settings: ClassVar[type]
    init: ClassVar[Callable[..., Any]]
    loss: ClassVar[Callable[..., tuple[jax.Array, Metrics]]]
    files: ClassVar[tuple[str, str]] = ("model.safetensors", "pytorch_model.bin")
    reads_hidden: ClassVar[bool] = False
    is_ranked: ClassVar[bool] = True
    has_published_table: ClassVar[bool] = False

    def is_in(self, fields: Fields) -> bool:
        """Returns whether a folder holds a head of this kind.

        Args:
            fields: The folder's `config.json`.
        """
        ...

    def read_config(self, folder: Path, target: TransformerConfig | None = None) -> Any:
        """Reads the sizes of the head in a folder.

        Args:
            folder: The folder, which holds `config.json`.
            target: The target's sizes, or others of the same layer and vocabulary,
                where the folder may leave them open.

        Raises:
            InputError: If a field is missing or asks for something that is not
                implemented.
        """
        ...

    def check(self, target: TransformerConfig, config: Any) -> None:
        """Refuses a head that was made for another target."""
        ...

    def describe(self, target: TransformerConfig, config: Any) -> str:
        """Returns in words how a head was read."""
        del target, config
        return self.title

    def model(self, config: Any, dtype: str = "float32") -> HeadModel:
        """Returns the draft model that runs the head.

        Args:
            config: The head's sizes.
            dtype: The type of its caches and features.
        """
        ...

    def new(self, target: TransformerConfig, settings: Any, length: int) -> Any:
        """Returns the sizes of a new head: those that are set, else published ones.

        Args:
            target: The target's sizes.
            settings: What is set, of the class `settings`.
            length: The number of positions that it is trained for.

        Raises:
            InputError: If what is set does not fit the target.
        """
        ...

    def layouts(self, config: Any) -> dict[str, dict[str, str]]:
        """Returns tables of tensor names by path in the weights, see `names`.

        The same head can be stored under several; exports have the first, unless
        another is asked for by its key.
        """
        ...

    def fields(self, config: Any, how: Export) -> dict[str, Any]:
        """Returns the published fields of `config.json`.

        Args:
            config: The head's sizes.
            how: How it is written.

        Raises:
            InputError: If the published layout cannot express the head.
        """
        ...

    def forget(self, files: Weights) -> None:
        """Leaves out tensors of a folder that are no part of the head."""

    def target(self, target: TransformerConfig, config: Any) -> TransformerConfig:
        """Returns the target, set to give the features that the head reads.

        Raises:
            InputError: If the target cannot give them.
        """
        del config
        return target

    def read_offsets(self, files: Weights, config: Any) -> jax.Array | None:
        """Takes the offsets of the head's tokens, if any, out of a folder's tensors."""
        del files, config
        return None

    def maps(self, config: Any, offsets: jax.Array | None) -> dict[str, np.ndarray]:
        """Returns the offsets of the head's tokens as they are stored."""
        del config, offsets
        return {}

    def vocabulary(self, rows: PackedRows, config: Any) -> np.ndarray | None:
        """Returns the tokens that a new head is to know, `[W]` int32; `None` for all.

        Args:
            rows: The rows to train on, `[R, T]` NumPy arrays.
            config: The head's sizes.

        Raises:
            InputError: If the rows have no token to choose by.
        """
        del rows, config
        return None

    def begin(self, params: Any, tables: Tables, tokens: jax.Array | None) -> Any:
        """Returns weights to begin with: output heads are copies of the target's.

        Args:
            params: Random weights.
            tables: The target's embedding and output head.
            tokens: `[W]` int32, the tokens from `vocabulary`; `None` for all.
        """
        del tables, tokens
        return params

    def tie(self, params: Any) -> Any:
        """Returns weights of which those are the same that published files repeat."""
        return params


def partition(params: Any) -> tuple[Any, Any]:
    """Returns weights without the offsets of their tokens, and these or `None`.

    No gradient reaches offsets, and their dtype stays what it is.
    """
    offsets = getattr(params, "offsets", None)
    if offsets is None:
        return params, None
    return dataclasses.replace(params, offsets=None), offsets


def combine(params: Any, offsets: Any) -> Any:
    """Returns weights with their offsets, the inverse of `partition`."""
    return params if offsets is None else dataclasses.replace(params, offsets=offsets)


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
