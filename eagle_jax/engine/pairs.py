"""Getting a target, its drafter and its tokenizer ready to run."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp

from eagle_jax import checkpoints
from eagle_jax.constraints import Constraint
from eagle_jax.constraints.automaton import AutomatonParams, TokenAutomaton
from eagle_jax.decoding.growth import bucket_sizes
from eagle_jax.decoding.speculative import AcceptanceRule
from eagle_jax.drafting import DraftModel, SmallModel
from eagle_jax.engine.config import PairConfig
from eagle_jax.engine.fit_check import FirstRounds
from eagle_jax.engine.tokenizer import load_tokenizer
from eagle_jax.errors import InputError
from eagle_jax.heads import find_head, open_head, open_whole
from eagle_jax.heads.eagle.vocabulary import read_vocabulary
from eagle_jax.interface import Drafter, Params
from eagle_jax.methods import METHODS, SMALL_MODEL, Context, Method, Weights
from eagle_jax.models import transformer
from eagle_jax.models.devices import check_memory, on_cpu
from eagle_jax.models.joined import join_products
from eagle_jax.models.transformer import (
    Transformer,
    TransformerConfig,
    TransformerParams,
)
from eagle_jax.parallel import PairSharding
from eagle_jax.parallel.placement import draft_shardings, target_shardings


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedPair:
    """A pair that is ready to run.

    Attributes:
        target: The target. Static.
        drafter: The drafter; `None` for plain decoding. Static.
        params: The weights of both.
        tokenizer: The `transformers` tokenizer, `None` where only ids are needed.
        stop_tokens: The token ids that end a text.
        sharding: The sharding of the pair's arrays; `None` for the default device.
        first_rounds: What the first rounds accepted; `None` for random weights and
            none.
        constraint: The constraint on texts, `None` without one. Static.
    """

    target: Transformer
    drafter: Drafter | None
    params: Params = dataclasses.field(repr=False)
    tokenizer: Any = dataclasses.field(repr=False)
    stop_tokens: tuple[int, ...]
    sharding: PairSharding | None = None
    first_rounds: FirstRounds | None = None
    constraint: Constraint | None = None

    def with_automaton(self, tables: AutomatonParams | None) -> Self:
        """Returns the pair, whose texts an automaton constrains; `None` for none."""
        if tables is None:
            return self
        if self.sharding is not None:
            tables = jax.device_put(tables, self.sharding.everywhere)
        return dataclasses.replace(
            self,
            constraint=TokenAutomaton(vocab_size=self.target.config.vocab_size),
            params=dataclasses.replace(self.params, constraint=tables),
        )


ReadDraft = Callable[[Any, PairSharding | None], Any]
"""Reads a draft model's weights: `(target_params, sharding) -> params`.

A head borrows tables of the target's weights.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftSource:
    """A draft model that is opened, but whose weights are not read.

    Attributes:
        model: The draft model.
        read: The function that reads or makes its weights, to be laid out by a
            sharding or, given `None`, on the default device.
        folder: The folder of its files, `None` if it has none.
        tokens: The tokens that it chooses among, ascending; `None` for all.
        description: What it was read as, in words.
    """

    model: DraftModel
    read: ReadDraft
    folder: Path | None = None
    tokens: tuple[int, ...] | None = None
    description: str = "a smaller model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairSource:
    """A pair whose settings are read and checked, but not its weights.

    Reading the weights of a large target takes minutes; prompts and lengths can be
    refused before.

    Attributes:
        config: The target's sizes.
        dtype: The type of weights and caches, never "auto".
        method: The method that drafts.
        draft: The model that it drafts with, `None` if there is none.
        read_target: The function that reads or makes the target's weights, with the
            shardings that it is given or, given `None`, on the default device.
        read_tokenizer: The function that reads the tokenizer, once.
        stop_tokens: The token ids that end a text.
        bits: The bits of the matrices of the target's layers, 8 or 4; `None` if they
            are not quantized.
        folder: The folder of the target's files, `None` if it has none.
        drafter: The drafter; `None` for plain decoding. Static.
        made: The drafters by settings and acceptance rule.
    """

    config: TransformerConfig
    dtype: str
    method: Method
    draft: DraftSource | None
    read_target: Callable[[Any], TransformerParams]
    read_tokenizer: Callable[[], Any]
    stop_tokens: tuple[int, ...]
    bits: int | None = None
    folder: Path | None = None
    drafter: Drafter | None = None
    made: dict[Any, Drafter | None] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def tokenizer(self) -> Any:
        """The `transformers` tokenizer, `None` where only ids are needed.

        It is read when it is first asked for: settings can be refused before.

        Raises:
            InputError: If the folder holds no usable one.
        """
        return self.read_tokenizer()

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, as it would go on after others."""
        if self.tokenizer is None:
            raise InputError("a pair without a tokenizer reads no text")
        return self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    def make_drafter(self, settings: Any, rule: AcceptanceRule) -> Drafter | None:
        """Returns the drafter of the method's settings, made once; `None` for none."""
        if (key := (settings, rule)) not in self.made:
            context = Context(
                vocab_size=self.config.vocab_size,
                encode=self.encode,
                rule=rule,
                model=self.draft and self.draft.model,
                folder=self.draft and self.draft.folder,
            )
            self.made[key] = self.method.drafter(settings, context)
        return self.made[key]

    def check_memory(self, *, batch_size: int, max_length: int) -> None:
        """Refuses caches that cannot be in memory, before any weight is read.

        They are counted as they begin, see `decoding.growth`.

        Args:
            batch_size: The number of rows, `B`.
            max_length: The largest number of tokens of prompt and output together.
        """
        depth = 0 if self.drafter is None else self.drafter.depth
        check_memory(
            self.config,
            self.dtype,
            self.bits,
            self.drafter,
            batch_size=batch_size,
            num_slots=bucket_sizes(max_length, prompt=1, depth=depth)[0],
        )

    def with_settings(self, settings: PairConfig) -> "PairSource":
        """Returns the pair with its drafter, and the tokens that it chooses among."""
        draft = self.draft
        if draft is not None:
            tokens = read_vocabulary(
                settings.draft_vocabulary,
                draft.model,
                vocab_size=self.config.vocab_size,
                stop_tokens=self.stop_tokens,
                read_tokenizer=self.read_tokenizer,
            )
            draft = dataclasses.replace(draft, tokens=tokens)
        drafter = self.make_drafter(settings.tree, settings.rule)
        return dataclasses.replace(self, draft=draft, drafter=drafter)

    def with_target(self, params: TransformerParams) -> "PairSource":
        """Returns the source of a pair whose target is that of a loaded one."""
        return dataclasses.replace(self, read_target=lambda _: params)

    def load(self, sharding: PairSharding | None = None) -> LoadedPair:
        """Reads or makes the weights and returns the pair, ready to run.

        Args:
            sharding: The target's sharding, from `shard_pair`; `None` for the default
                device.

        Raises:
            InputError: If the weights or the tokenizer cannot be read.
        """
        shardings = target_shardings(sharding, self.config, self.bits)
        target_params = _ready_to_run(self.read_target(shardings), sharding)
        target = Transformer(config=self.config, dtype=self.dtype)
        drafter_params: Any = ()
        if self.draft is not None:
            drafter_params = self._read_draft(self.draft, target_params, sharding)
            model: Any = self.draft.model
            if not isinstance(model, SmallModel):  # It reads features of the target's.
                config = model.with_features(self.config)
                target = dataclasses.replace(target, config=config)
            if sharding is not None:
                layer = getattr(_sizes(model), "layer", None)
                sharding = sharding.with_drafter(layer, drafter_params)
        return LoadedPair(
            target=target,
            drafter=self.drafter,
            params=Params(target=target_params, drafter=drafter_params),
            tokenizer=self.tokenizer,
            stop_tokens=self.stop_tokens,
            sharding=sharding,
            first_rounds=FirstRounds() if self.draft and self.draft.folder else None,
        )

    def _read_draft(
        self, draft: DraftSource, target_params: Any, sharding: PairSharding | None
    ) -> Any:
        """Returns a draft model's weights, for the tokens that it chooses among."""
        params = _ready_to_run(draft.read(target_params, sharding), sharding)
        if draft.tokens is None:
            return params
        model: Any = draft.model
        params = model.narrow(params, jnp.asarray(draft.tokens, jnp.int32))
        if sharding is None:
            return params
        # Devices that cannot share as many columns hold all of them each.
        layer = getattr(_sizes(model), "layer", None)
        places = sharding.with_drafter(layer, params).drafter_shardings(params)
        return jax.device_put(params, places)


def open_pair(
    target_name: str, draft_name: str | None, settings: PairConfig
) -> PairSource:
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

    return PairSource(
        config=config,
        dtype=dtype,
        method=method,
        draft=draft,
        read_target=read_target,
        read_tokenizer=read_tokenizer,
        stop_tokens=stop_tokens,
        bits=bits,
        folder=folder,
    ).with_settings(settings)


def _sizes(model: Any) -> Any:
    """Returns the sizes of a draft model, of a small one those of its decoder."""
    return getattr(model, "target", model).config


def _ready_to_run(params: Any, sharding: PairSharding | None) -> Any:
    """Returns weights that were just read, their products joined on a single device."""
    return join_products(params, donate=True) if sharding is None else params


def _open_draft(
    name: str, target: TransformerConfig, dtype: str, weights: Weights
) -> DraftSource:
    """Opens a model that drafts for a target that is opened already."""
    folder = checkpoints.resolve(name)
    head = find_head(folder)
    fits = head.name in weights.kinds if head else weights is SMALL_MODEL
    if not fits:
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
        return DraftSource(model=drafted, read=read_small, folder=folder)
    opened = open_head(folder, target)
    model = dataclasses.replace(opened.head, dtype=dtype)

    def read_head(
        target_params: TransformerParams, sharding: PairSharding | None
    ) -> Any:
        shardings = draft_shardings(sharding, model.init, model.config)
        params = opened.load(target_params, dtype, shardings)
        return model.join(params, target_params)

    said = model.describe(target)
    return DraftSource(model=model, read=read_head, folder=folder, description=said)
