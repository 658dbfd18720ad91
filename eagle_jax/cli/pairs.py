"""Getting a target, its drafter and its tokenizer ready to run."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax import checkpoints
from eagle_jax.checkpoints.pair import shapes_of
from eagle_jax.cli.methods import lookup_drafter, tree_drafter
from eagle_jax.cli.placing import (
    draft_shardings,
    target_shardings,
    with_drafter,
)
from eagle_jax.config import Method, TreeConfig
from eagle_jax.drafting import (
    DraftModel,
    Eagle3Head,
    EagleHead,
    SmallModel,
    TreeDrafter,
)
from eagle_jax.errors import InputError
from eagle_jax.interface import Drafter, Params
from eagle_jax.models import eagle3_head, eagle_head, transformer
from eagle_jax.models.eagle_head import EagleHeadConfig
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.linear import linear
from eagle_jax.models.quantised import GROUP_SIZE, quantise, quantise_layers
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import (
    Transformer,
    TransformerConfig,
    TransformerParams,
)
from eagle_jax.parallel import Placement

RANDOM_SIZES = {
    "tiny": "hidden=64,layers=2,heads=4,intermediate=172,vocabulary=258",
    "50m": "hidden=512,layers=8,heads=8,intermediate=1408,vocabulary=32000",
    "llama2-7b": "hidden=4096,layers=32,heads=32,intermediate=11008,vocabulary=32000",
    "llama2-13b": "hidden=5120,layers=40,heads=40,intermediate=13824,vocabulary=32000",
    "llama3-8b": "hidden=4096,layers=32,heads=32,kv_heads=8,intermediate=14336,"
    "vocabulary=128256",
}
"""Named sizes of random pairs."""

LoadDraft = Callable[..., Any]
"""Reads a draft model's weights: `(target_params, placement=None)` -> its own."""

_REQUIRED_SIZES = ("hidden", "layers", "heads", "vocabulary")
_NUM_BYTES = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedPair:
    """A pair ready to run.

    Attributes:
        target: Static.
        drafter: Static; `None` for plain decoding.
        params: Of both.
        tokenizer: A `transformers` tokenizer, `None` where only ids are needed.
        stop_tokens: Ids that end a text.
        placement: Where its weights lie; `None` for the default device.
    """

    target: Transformer
    drafter: Drafter | None
    params: Params
    tokenizer: Any
    stop_tokens: tuple[int, ...]
    placement: Placement | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairSource:
    """A pair whose settings are read and checked, but not its weights.

    Reading weights takes minutes for a large target; prompts and lengths can be
    refused before.

    Attributes:
        config: Sizes of the target.
        dtype: Of weights and caches; what "auto" came to.
        tokenizer: A `transformers` tokenizer, `None` where only ids are needed.
        load: Reads or makes the weights, on the devices of a placement or, given
            `None`, on the default device.
        bits: Of the matrices of the target's layers, `None` if they are not quantised.
    """

    config: TransformerConfig
    dtype: str
    tokenizer: Any
    load: Callable[..., LoadedPair]
    bits: int | None = None


def open_pair(
    target_name: str,
    draft_name: str | None,
    *,
    tree: TreeConfig,
    dtype: str,
    method: Method = "eagle2",
    sampled: bool = False,
    bits: int | None = None,
) -> PairSource:
    """Opens a target and what drafts for it.

    Args:
        target_name: Folder or hub name.
        draft_name: Likewise, of an EAGLE head or, for the method "small-model", of a
            smaller target; `None` for plain decoding and prompt lookup.
        tree: Shape of the tree.
        dtype: Of weights and caches; "auto" for float32 on CPUs and the target's own
            elsewhere.
        method: What the draft is, and how it drafts.
        sampled: See `methods.tree_drafter`.
        bits: Of the target's matrices, see `checkpoints.load_target`.

    Raises:
        InputError: If something is missing or does not fit.
    """
    folder = checkpoints.resolve(target_name)
    config = checkpoints.target_config(folder)
    # Says what is broken before anything is read.
    bits = checkpoints.target_bits(checkpoints.open_weights(folder), config, bits)
    if dtype == "auto":
        dtype = "float32" if _on_cpu() else checkpoints.stored_dtype(folder)
    load_drafter = open_drafter(
        draft_name, config, tree=tree, dtype=dtype, method=method, sampled=sampled
    )
    check_product(bits, dtype)
    tokenizer = checkpoints.load_tokenizer(folder, config.vocab_size)

    def load(placement: Placement | None = None) -> LoadedPair:
        shardings = target_shardings(placement, config, bits)
        _, target_params = checkpoints.load_target(folder, dtype, shardings, bits)
        drafter, drafter_params = load_drafter(target_params, placement)
        target = Transformer(config=config, dtype=dtype)
        return LoadedPair(
            target=with_features(target, drafter),
            drafter=drafter,
            params=Params(target=target_params, drafter=drafter_params),
            tokenizer=tokenizer,
            stop_tokens=checkpoints.stop_tokens(folder),
            placement=with_drafter(placement, drafter, drafter_params),
        )

    return PairSource(
        config=config, dtype=dtype, tokenizer=tokenizer, load=load, bits=bits
    )


def open_drafter(
    draft_name: str | None,
    target: TransformerConfig,
    *,
    tree: TreeConfig,
    dtype: str,
    method: Method,
    sampled: bool = False,
) -> Callable[[TransformerParams, Placement | None], tuple[Drafter | None, Any]]:
    """Opens what drafts for a target that is opened already.

    Arguments are those of `open_pair`, but `dtype` is not "auto" here.

    Returns:
        What reads the weights: from the target's parameters and where they lie to the
        drafter and its own parameters.

    Raises:
        InputError: If something is missing or does not fit.
    """
    if method == "lookup":
        return lambda *_: (lookup_drafter(tree), ())
    if draft_name is None or method == "autoregressive":
        return lambda *_: (None, ())
    model, load_params = open_draft_model(
        draft_name, target, dtype=dtype, method=method
    )
    drafter = tree_drafter(method, model, tree, sampled=sampled)
    return lambda params, placement: (drafter, load_params(params, placement))


def open_draft_model(
    name: str, target: TransformerConfig, *, dtype: str, method: Method
) -> tuple[DraftModel, LoadDraft]:
    """Opens a model that drafts for a target that is opened already.

    Args:
        name: Folder or hub name of an EAGLE head or, for the method "small-model", of
            a smaller target.
        target: Sizes of the target.
        dtype: Of the weights; not "auto".
        method: One that drafts with a model.

    Returns:
        The model, and what reads its parameters.

    Raises:
        InputError: If something is missing or does not fit.
    """
    folder = checkpoints.resolve(name)
    if method == "small-model":
        small = checkpoints.target_config(folder)
        checkpoints.check_small_model(target, small)
        checkpoints.check_weights(folder)

        def load_small(_: TransformerParams, placement: Placement | None = None) -> Any:
            shapes = shapes_of(transformer.init_params, small)
            shardings = draft_shardings(placement, small.layer, shapes)
            return checkpoints.load_target(folder, dtype, shardings)[1]

        return SmallModel(decoder=Transformer(config=small, dtype=dtype)), load_small
    if checkpoints.is_eagle3(folder):
        return _open_eagle3(folder, target, dtype)
    head = checkpoints.head_config(folder)
    checkpoints.check_pair(target, head)
    checkpoints.check_weights(folder)

    def load(
        target_params: TransformerParams, placement: Placement | None = None
    ) -> Any:
        shapes = shapes_of(eagle_head.init_params, head)
        shardings = draft_shardings(placement, head.layer, shapes)
        _, params = checkpoints.load_head(
            folder, target, target_params, dtype, shardings
        )
        return EagleHead.params(params, target_params)

    return EagleHead(config=head, dtype=dtype), load


def _open_eagle3(
    folder: Path, target: TransformerConfig, dtype: str
) -> tuple[DraftModel, LoadDraft]:
    head = checkpoints.eagle3_config(folder)
    checkpoints.check_eagle3_pair(target, head)
    checkpoints.check_weights(folder)

    def load(
        target_params: TransformerParams, placement: Placement | None = None
    ) -> Any:
        shapes = shapes_of(eagle3_head.init_params, head)
        shardings = draft_shardings(placement, head.layer, shapes)
        _, params = checkpoints.load_eagle3_head(
            folder, target, target_params, dtype, shardings
        )
        return Eagle3Head.params(params, target_params)

    return Eagle3Head(config=head, dtype=dtype), load


def with_features(target: Transformer, drafter: Drafter | None) -> Transformer:
    """Returns the target, giving the features that a drafter reads.

    Raises:
        InputError: If it cannot give them.
    """
    if not isinstance(drafter, TreeDrafter) or not isinstance(
        drafter.model, Eagle3Head
    ):
        return target
    config = checkpoints.eagle3_target(target.config)
    return dataclasses.replace(target, config=config)


def open_random(
    sizes: str,
    *,
    tree: TreeConfig,
    dtype: str,
    with_tokenizer: bool,
    method: Method = "eagle2",
    sampled: bool = False,
    bits: int | None = None,
) -> PairSource:
    """Prepares a pair with random weights: for timing, and for a first look.

    Args:
        sizes: A name of `RANDOM_SIZES`, or `hidden=512,layers=8,...`.
        tree: Shape of the tree.
        dtype: Of weights and caches; "auto" for float32 on CPUs, bfloat16 elsewhere.
        with_tokenizer: Add a tokenizer of bytes; needs a vocabulary of at least 258.
        method: What drafts; there is no random small model.
        sampled: See `methods.tree_drafter`.
        bits: 8 or 4 to quantise the matrices of the target's layers.

    Raises:
        InputError: If a size is missing, unknown or impossible.
    """
    if method == "small-model":
        raise InputError(
            "--random makes an EAGLE head, no small model; give --target FOLDER and "
            "--draft FOLDER"
        )
    config = _random_config(sizes)
    if with_tokenizer and config.vocab_size < _NUM_BYTES + 2:
        raise InputError(
            f"--random vocabulary={config.vocab_size} must be at least "
            f"{_NUM_BYTES + 2}: the bytes, <s> and </s>"
        )
    if dtype == "auto":
        dtype = "float32" if _on_cpu() else "bfloat16"
    bits = checkpoints.target_bits(None, config, bits)
    check_product(bits, dtype)
    tokenizer = _byte_tokenizer() if with_tokenizer else None
    head = EagleHeadConfig(
        layer=config.layer,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
    )

    def load(placement: Placement | None = None) -> LoadedPair:
        shardings = target_shardings(placement, config, bits)
        target_params = jax.jit(
            _random_target, static_argnums=(1, 2, 3), out_shardings=shardings
        )(jax.random.key(0), config, dtype, bits)
        shapes = shapes_of(eagle_head.init_params, head)
        shardings = draft_shardings(placement, head.layer, shapes)
        head_params = jax.jit(
            eagle_head.init_params, static_argnums=(1, 2), out_shardings=shardings
        )(jax.random.key(1), head, dtype)
        drafter, drafter_params = lookup_drafter(tree), ()
        if method != "lookup":
            model = EagleHead(config=head, dtype=dtype)
            drafter = tree_drafter(method, model, tree, sampled=sampled)
            drafter_params = EagleHead.params(head_params, target_params)
        return LoadedPair(
            target=Transformer(config=config, dtype=dtype),
            drafter=drafter,
            params=Params(target=target_params, drafter=drafter_params),
            tokenizer=tokenizer,
            stop_tokens=(_NUM_BYTES + 1,) if with_tokenizer else (),
            placement=with_drafter(placement, drafter, drafter_params),
        )

    return PairSource(
        config=config, dtype=dtype, tokenizer=tokenizer, load=load, bits=bits
    )


def check_product(bits: int | None, dtype: str) -> None:
    """Tries a tiny product, before the long work of a whole model.

    Args:
        bits: Of quantised matrices, `None` where there are none.
        dtype: Of what they are multiplied with.

    Raises:
        InputError: If this device cannot compute it.
    """
    if bits is None:
        return
    try:
        weight = quantise(jnp.ones((GROUP_SIZE, 8)), bits)
        jax.block_until_ready(jax.jit(linear)(jnp.ones((1, GROUP_SIZE), dtype), weight))
    except Exception as error:  # Compilers have many kinds.
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"{jax.devices()[0].device_kind} cannot multiply {dtype} with int{bits} "
            f"weights: {reason}; choose another --quantization or --dtype"
        ) from error


def _random_target(
    key: jax.Array, config: TransformerConfig, dtype: str, bits: int | None
) -> TransformerParams:
    params = transformer.init_params(key, config, dtype)
    return params if bits is None else quantise_layers(params, bits)


def _on_cpu() -> bool:
    """Returns whether float32 is the quicker choice: bfloat16 is slow on CPUs."""
    return jax.devices()[0].platform == "cpu"


def _random_config(sizes: str) -> TransformerConfig:
    text = RANDOM_SIZES.get(sizes, sizes)
    pairs = re.findall(r"(\w+)=(\d+)", text)
    values = {name: int(value) for name, value in pairs}
    known = (*_REQUIRED_SIZES, "kv_heads", "intermediate")
    well_formed = ",".join(f"{name}={value}" for name, value in pairs) == text
    missing = [name for name in _REQUIRED_SIZES if not values.get(name)]
    if not well_formed or missing or not set(values) <= set(known):
        raise InputError(
            f"--random {sizes!r} must be one of {', '.join(RANDOM_SIZES)} or sizes "
            f"like hidden=512,layers=8,heads=8,vocabulary=32000; known are "
            f"{', '.join(known)}"
        )
    hidden, heads = values["hidden"], values["heads"]
    kv_heads = values.get("kv_heads", heads)
    if hidden % (2 * heads) or heads % kv_heads:
        raise InputError(
            f"--random {sizes!r}: hidden must be an even multiple of heads, and heads "
            "a multiple of kv_heads"
        )
    layer = LayerConfig(
        hidden_size=hidden,
        intermediate_size=values.get("intermediate", 4 * hidden),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
    )
    return TransformerConfig(
        layer=layer,
        num_layers=values["layers"],
        vocab_size=values["vocabulary"],
        max_positions=4096,
    )


def _byte_tokenizer() -> Any:
    """Returns a tokenizer whose ids are bytes, with `<s>` 256 and `</s>` 257."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )
