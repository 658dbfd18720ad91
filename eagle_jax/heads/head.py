"""What a kind of head is: everything that is particular to it, in one class."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.checkpoints.export_files import Export
from eagle_jax.checkpoints.hf_fields import Fields
from eagle_jax.drafting.model import DraftModel
from eagle_jax.errors import InputError
from eagle_jax.heads.loss import Batch, Metrics
from eagle_jax.models.quantized import LAYER_MATRICES, quantize_layers
from eagle_jax.models.transformer import Tables, TransformerConfig, output_head


@struct.dataclass(kw_only=True)
class HeadParams:
    """A head of any kind, and the tables that it may borrow from the target.

    Attributes:
        head: The weights of the head.
        embedding: `[V, E]`, the embedding table, the target's or the head's own.
        output_head: `[E, V]`, the target's output head, or `[E, W]` of its columns;
            `None` where it is the embedding's transpose, or the head has its own.
        offsets: `[W]` int32, how much higher each token of these columns is in the
            target's vocabulary, see `Eagle3HeadParams`; `None` where all are there.
    """

    head: Any
    embedding: jax.Array
    output_head: jax.Array | None = None
    offsets: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head(DraftModel):
    """A head: a draft model that is stored, trained and drafts with its target.

    Each kind of head is a class; "heads" that draft one level each are one head
    together. Its *weights* are a pytree. What has a body here is what most kinds do.

    Attributes:
        name: The kind's name in settings of training. Of the class, as all that follow
            but the last two.
        title: What a folder of this kind holds, as refusals say it.
        files: The names of the file of safetensors and of the pickle in published
            folders.
        Config: The class of its sizes, a frozen dataclass.
        Settings: The class of the settings of a new one, the table `head`.
        Loss: The class of the settings of its loss, the table `loss`.
        borrows_output_head: Whether it drafts with the target's output head, unless its
            weights hold an `output_head` of their own.
        config: Its sizes.
        dtype: The type of its caches and features.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    files: ClassVar[tuple[str, str]] = ("model.safetensors", "pytorch_model.bin")
    Config: ClassVar[type]
    Settings: ClassVar[type]
    Loss: ClassVar[type]
    borrows_output_head: ClassVar[bool] = True
    config: Any
    dtype: str = "float32"

    @classmethod
    def matches(cls, fields: Fields) -> bool:
        """Returns whether a folder holds a head of this kind.

        Args:
            fields: The folder's `config.json`.
        """
        raise NotImplementedError

    @classmethod
    def read_config(cls, folder: Path, target: TransformerConfig | None = None) -> Any:
        """Reads the sizes of the head in a folder.

        Args:
            folder: The folder, which holds `config.json`.
            target: The target's sizes, or others of the same layer and vocabulary,
                where the folder may leave them open.

        Raises:
            InputError: If a field is missing or asks for something that is not
                implemented.
        """
        raise NotImplementedError

    @classmethod
    def default_config(
        cls, target: TransformerConfig, settings: Any, length: int
    ) -> Any:
        """Returns the sizes of a new head: those that are set, else published ones.

        Args:
            target: The target's sizes.
            settings: What is set, of the class `Settings`.
            length: The number of positions that it is trained for.

        Raises:
            InputError: If what is set does not fit the target.
        """
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """The number of tokens the target knows, `V`."""
        return self.config.vocab_size

    def check_target(self, target: TransformerConfig) -> None:
        """Refuses a head that was made for another target."""
        sizes = getattr(self.config, "layer", None) or self.config
        check_size("hidden_size", sizes.hidden_size, target.layer.hidden_size)
        check_size("vocab_size", self.vocab_size, target.vocab_size)

    def with_features(self, target: TransformerConfig) -> TransformerConfig:
        """Returns the target, set to give the features that the head reads.

        Raises:
            InputError: If the target cannot give them.
        """
        return target

    def describe(self, target: TransformerConfig) -> str:
        """Returns in words how a head was read."""
        return self.title

    def tensor_names(self) -> dict[str, dict[str, str]]:
        """Returns tables of tensor names by path in the weights, see `names`.

        The same head can be stored under several layouts; exports have the first,
        unless another is asked for by its key. A key that ends with a dot is what the
        names begin with inside a whole model, of which nothing else is read. Nothing is
        read either at paths that begin with "target": these are copies of its tables.
        """
        raise NotImplementedError

    def to_hf_config(self, how: Export) -> dict[str, Any]:
        """Returns the published fields of `config.json`.

        Args:
            how: How it is written.

        Raises:
            InputError: If the published layout cannot express the head.
        """
        raise NotImplementedError

    def truncate(self, state: Any, length: jax.Array) -> Any:
        """See `Truncating`; what waits is known when the next chunk is read."""
        cache = dataclasses.replace(state.cache, length=length)
        return dataclasses.replace(state, cache=cache, count=jnp.zeros_like(length))

    def init(self, key: jax.Array, dtype: str = "float32") -> Any:
        """Returns random weights, without tables that the head borrows.

        Args:
            key: A typed PRNG key.
            dtype: The type of the weights.
        """
        raise NotImplementedError

    def init_from_target(
        self, params: Any, tables: Tables, tokens: jax.Array | None
    ) -> Any:
        """Returns weights to begin with: output heads are copies of the target's.

        Args:
            params: Random weights.
            tables: The target's embedding and output head.
            tokens: `[W]` int32, the tokens that the head is to know, see
                `rows.known_tokens`; `None` for all.
        """
        return params

    def loss(
        self, /, params: Any, batch: Batch, settings: Any
    ) -> tuple[jax.Array, Metrics]:
        """Returns the loss of a batch, and its parts.

        Args:
            params: The weights, in the type to compute in.
            batch: The texts, and what the target says of them.
            settings: The settings of the loss, of the class `Loss`. Static.
        """
        raise NotImplementedError

    @classmethod
    def join(cls, head: Any, target: Tables) -> HeadParams:
        """Joins a head with the tables of its target: the drafter's parameters.

        Nothing is copied, unless the head has an embedding table of its own and the
        target's output head, which is borrowed, is the target's table.

        Args:
            head: The weights of the head.
            target: The target's tables.
        """
        own, output = getattr(head, "embedding", None), None
        if own is not None:
            head = dataclasses.replace(head, embedding=None)
        if cls.borrows_output_head and getattr(head, "output_head", None) is None:
            output = target.output_head if own is None else output_head(target)
        return HeadParams(
            head=head,
            embedding=target.embedding if own is None else own,
            output_head=output,
        )


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


def quantize_head(params: HeadParams) -> HeadParams:
    """Returns the weights of a head of which every matrix has 8 bits.

    Embedding, norms and biases stay as they are. The output head is a copy: the target
    keeps its own. What is drafted never changes the text.

    Args:
        params: The drafter's weights, from `join`.
    """
    if getattr(params.head, "output_head", None) is None:
        params = dataclasses.replace(params, output_head=output_head(params))
    return quantize_layers(params, 8, (*LAYER_MATRICES, "fc", "output_head"))


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
