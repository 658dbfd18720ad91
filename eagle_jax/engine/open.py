"""Pairs from names or folders: what is opened and checked before weights are read."""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from reprlib import repr as short
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp

from eagle_jax import assets, checkpoints
from eagle_jax.config import CONFIGS, load_config
from eagle_jax.decoding.decoder import AcceptanceRule
from eagle_jax.drafting import DraftModel, SmallModel
from eagle_jax.engine.config import PairConfig
from eagle_jax.engine.fit_check import FitCheck
from eagle_jax.engine.keywords import PairKeywords, shown
from eagle_jax.engine.pair import Pair
from eagle_jax.engine.request import checkpoint_defaults
from eagle_jax.engine.wording import load_tokenizer
from eagle_jax.errors import InputError
from eagle_jax.heads import find_head, open_head, open_whole
from eagle_jax.heads.eagle.vocabulary import read_vocabulary
from eagle_jax.heads.head import quantize_head
from eagle_jax.interface import Drafter, Params
from eagle_jax.methods import METHODS, SMALL_MODEL, Context, Weights
from eagle_jax.models import transformer
from eagle_jax.models.devices import check_memory, on_cpu
from eagle_jax.models.joined import join_products
from eagle_jax.models.transformer import (
    Transformer,
    TransformerConfig,
    TransformerParams,
)
from eagle_jax.parallel import MeshShape, PairSharding, shard_pair
from eagle_jax.parallel.placement import draft_shardings, target_shardings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """A draft model that is opened, but whose weights are not read.

    Attributes:
        model: The draft model.
        read: The function that reads or makes its weights, `(target_params, sharding)
            -> params`, on the default device without a sharding. A head borrows tables
            of the target's.
        folder: The folder of its files, `None` if it has none.
        tokens: The tokens that it chooses among, ascending; `None` for all.
        description: What it was read as, in words.
    """

    model: DraftModel
    read: Callable[[Any, PairSharding | None], Any] = dataclasses.field(repr=False)
    folder: Path | None = None
    tokens: tuple[int, ...] | None = None
    description: str = ""


@shown(PairKeywords)
def load_pair(
    target: str,
    draft: str | None = None,
    config: PairConfig | None = None,
    *,
    mesh: MeshShape | None = None,
    is_lazy: bool = False,
    generation_config: Literal["auto", "none"] = "auto",
    **settings: Unpack[PairKeywords],
) -> Pair:
    """Loads a target and its drafter.

    Args:
        target: The target's Hugging Face folder or hub name.
        draft: The folder or hub name of the weights that the method drafts with: an
            EAGLE head, Medusa or Hydra heads, or a smaller model; `None` for a method
            without weights.
        config: The method, its settings, and those that a later call does not give;
            `None` for the defaults.
        mesh: The shape of the mesh that the models are sharded over, of which `data`
            divides the batch size of a `config` that is given; `None` for the default
            device.
        is_lazy: Whether weights are read when they are first needed, so that prompts
            and limits can be refused before.
        generation_config: Whether requests draw as the target's
            `generation_config.json` says where they say nothing ("auto"), or by the
            defaults of `Request` ("none").
        **settings: Settings that differ from `config`: fields of `PairConfig`
            (`method`, `dtype`, `quantization`, `draft_vocabulary`, ...), the method's
            own (`num_nodes`, `depth`, `width`, ...), or of `Request`.

    Raises:
        InputError: If something is missing or does not fit, or a package that reading
            it needs is not installed.
    """
    rows = config and config.batch_size
    config = (config or PairConfig()).with_(**settings)
    config.method_row.check_draft(draft)
    try:
        pair, placement = open_pair(target, draft, config), None
        if mesh is not None:
            rows = mesh.data if rows is None else rows
            placement = shard_pair(mesh, pair.sizes, batch_size=rows)
        defaults: dict[str, Any] = {}
        if pair.folder is not None and generation_config == "auto":
            defaults = checkpoint_defaults(pair.folder, pair.vocab_size)
        if defaults:
            said = ", ".join(f"{name} {short(x)}" for name, x in defaults.items())
            warnings.warn(
                f"{target} asks for {said} (generation_config.json), which holds where "
                'a request says nothing else; generation_config="none" ignores it',
                stacklevel=2,
            )
        pair = dataclasses.replace(pair, placement=placement, defaults=defaults)
        return pair if is_lazy else pair.load()
    except ModuleNotFoundError as error:
        raise InputError(
            f"the package {error.name} is not installed, which reading checkpoints "
            "needs; pip install '.[hf]' in the clone brings it"
        ) from error


@shown(PairKeywords)
def load_embedded_pair(**settings: Unpack[PairKeywords]) -> Pair:
    """Loads the small pair that comes with the package, which writes Python.

    >>> pair = load_embedded_pair()  # doctest: +SKIP
    >>> pair.generate("def main():")[0].text  # doctest: +SKIP

    Args:
        **settings: Settings that differ from configs/embedded.toml, see `load_pair`.

    Raises:
        InputError: If a setting cannot be used, or the pair has no such weights.
    """
    config = load_config(CONFIGS / "embedded.toml", PairConfig).with_(**settings)
    weights = config.method_row.weights
    draft = weights and weights.embedded
    return load_pair(str(assets.TARGET), draft and str(draft), config)


def open_pair(target_name: str, draft_name: str | None, settings: PairConfig) -> Pair:
    """Opens a target and its draft model, without reading their weights.

    Args:
        target_name: The target's folder or hub name.
        draft_name: The folder or hub name of the weights that the method drafts with;
            `None` for a method without weights.
        settings: The method and its settings.
    """
    method = settings.method_row
    folder = checkpoints.resolve(target_name)
    # Says what is broken before anything is read.
    config, _ = open_whole(folder)
    bits = settings.bits
    checkpoints.check_bits(config, bits)
    dtype: str = settings.dtype
    if dtype == "auto":
        dtype = "float32" if on_cpu() else checkpoints.stored_dtype(folder)
    check_memory(config, dtype, bits)
    draft = None
    if draft_name is not None and method.weights is not None:
        draft = _open_draft(draft_name, config, dtype, method.weights)

    stop_tokens = checkpoints.stop_tokens(folder)

    @functools.cache
    def read_tokenizer() -> Any:
        return load_tokenizer(folder, config.vocab_size, stop_tokens)

    def read_target(shardings: Any) -> TransformerParams:
        return checkpoints.load_target(folder, dtype, shardings, bits)[1]

    return make_pair(
        Transformer(config=config, dtype=dtype),
        settings,
        draft,
        read_target=read_target,
        read_tokenizer=read_tokenizer,
        stop_tokens=stop_tokens,
        bits=bits,
        folder=folder,
    )


def make_pair(
    target: Transformer,
    settings: PairConfig,
    draft: Draft | None,
    *,
    read_target: Callable[[Any], TransformerParams],
    read_tokenizer: Callable[[], Any] = lambda: None,
    stop_tokens: tuple[int, ...] = (),
    **more: Any,
) -> Pair:
    """Returns a pair of models that are opened, or have random weights.

    Args:
        target: The target, as its own files describe it. Static.
        settings: The method and its settings.
        draft: The model that the method drafts with, `None` if there is none.
        read_target: The function that reads or makes the target's weights, with the
            shardings that it is given or, given `None`, on the default device.
        read_tokenizer: See `Pair`.
        stop_tokens: The token ids that end a text.
        **more: Other fields of `Pair`.

    Raises:
        InputError: If the method cannot draft with these settings.
    """
    config, method = target.config, settings.method_row
    if settings.draft_quantization != "none" and not method.is_plain:
        settings.check_reads("draft_quantization")
    if draft is not None:
        tokens = read_vocabulary(
            settings.draft_vocabulary,
            draft.model,
            folder=draft.folder,
            vocab_size=config.vocab_size,
            stop_tokens=stop_tokens,
            read_tokenizer=read_tokenizer,
        )
        draft = dataclasses.replace(draft, tokens=tokens)
        model: Any = draft.model
        if not isinstance(model, SmallModel):  # It reads features of the target's.
            config = model.with_features(config)

    def encode(text: str) -> list[int]:
        if (tokenizer := read_tokenizer()) is None:
            raise InputError("a pair without a tokenizer reads no text")
        # As it would go on after others.
        return tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    def make_drafter(tree: Any, rule: AcceptanceRule) -> Drafter | None:
        context = Context(
            vocab_size=config.vocab_size,
            encode=encode,
            rule=rule,
            model=draft and draft.model,
            folder=draft and draft.folder,
        )
        return method.drafter(tree, context)

    pair = Pair(
        target=dataclasses.replace(target, config=config),
        config=settings,
        make_drafter=make_drafter,
        read_params=functools.partial(_read_params, read_target),
        read_tokenizer=read_tokenizer,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        stop_tokens=stop_tokens,
        draft=draft,
        fit_check=FitCheck() if draft and draft.folder else None,
        **more,
    )
    _ = pair.drafter  # Refuses what it cannot be made of.
    return pair


def with_target(pair: Pair, params: TransformerParams) -> Pair:
    """Returns a pair whose target's weights are those of a loaded one."""
    read = functools.partial(_read_params, lambda _: params)
    return dataclasses.replace(pair, read_params=read, kept={})


def _read_params(
    read_target: Callable[[Any], TransformerParams], pair: Pair
) -> tuple[Params, PairSharding | None]:
    """Reads or makes the weights of a pair's models."""
    sharding, draft = pair.placement, pair.draft
    shardings = target_shardings(sharding, pair.sizes, pair.bits)
    target = _ready_to_run(read_target(shardings), sharding)
    if draft is None:
        return Params(target=target), sharding
    params = _ready_to_run(draft.read(target, sharding), sharding)
    model: Any = draft.model
    sizes = getattr(model, "target", model).config  # A small one's are its decoder's.
    if draft.tokens is not None:
        params = model.narrow(params, jnp.asarray(draft.tokens, jnp.int32))
    if pair.config.draft_quantization != "none":
        params = quantize_head(params)
    if sharding is not None:
        layer = getattr(sizes, "layer", None)
        sharding = sharding.with_drafter(layer, params)
        # Devices that cannot share as many columns hold all of them each.
        places = sharding.drafter_shardings(params)
        if draft.tokens is not None or pair.config.draft_quantization != "none":
            params = jax.device_put(params, places)
    return Params(target=target, drafter=params), sharding


def _ready_to_run(params: Any, sharding: PairSharding | None) -> Any:
    """Returns weights that were just read, their products joined on a single device."""
    return join_products(params, donate=True) if sharding is None else params


def _open_draft(
    name: str, target: TransformerConfig, dtype: str, weights: Weights
) -> Draft:
    """Opens a model that drafts for a target that is opened already."""
    folder = checkpoints.resolve(name)
    head = find_head(folder)
    if not (head.name in weights.kinds if head else weights is SMALL_MODEL):
        methods = [row.name for row in METHODS.values() if row.weights is weights]
        needs = "methods {} need" if len(methods) > 1 else "method {} needs"
        raise InputError(
            f"{folder} holds {head.title if head else 'a whole model'}; "
            f"{needs.format(', '.join(methods))} {weights.description}"
        )
    if head is None:
        small, _ = checkpoints.open_target(folder)
        if small.vocab_size != target.vocab_size:
            raise InputError(
                f"the small model has {small.vocab_size} tokens, the target "
                f"{target.vocab_size}; give a model with the target's tokenizer"
            )

        def read_small(_: TransformerParams, sharding: PairSharding | None) -> Any:
            init = functools.partial(transformer.init_params, config=small)
            shardings = draft_shardings(sharding, init, small)
            return checkpoints.load_target(folder, dtype, shardings)[1]

        decoder = Transformer(config=small, dtype=dtype)
        drafted = SmallModel(target=decoder, vocab_size=small.vocab_size)
        return Draft(model=drafted, read=read_small, folder=folder)
    opened = open_head(folder, target)
    model = dataclasses.replace(opened.head, dtype=dtype)

    def read_head(
        target_params: TransformerParams, sharding: PairSharding | None
    ) -> Any:
        shardings = draft_shardings(sharding, model.init, model.config)
        params = opened.load(target_params, dtype, shardings)
        return model.join(params, target_params)

    said = model.describe(target)
    return Draft(model=model, read=read_head, folder=folder, description=said)
