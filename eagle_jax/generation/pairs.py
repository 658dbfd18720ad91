"""Getting a target, its drafter and its tokenizer ready to run."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle_jax import checkpoints
from eagle_jax.checkpoints.load import shapes_of
from eagle_jax.config import Method, TreeConfig
from eagle_jax.decoding.speculative import AcceptanceRule
from eagle_jax.drafting import (
    DraftModel,
    Eagle3Head,
    EagleHead,
    SmallModel,
    TreeDrafter,
)
from eagle_jax.generation.devices import check_product, on_cpu
from eagle_jax.generation.methods import lookup_drafter, tree_drafter
from eagle_jax.generation.placing import draft_shardings, target_shardings, with_drafter
from eagle_jax.generation.room import (
    check_depth,
    check_rounds,
    check_weights,
    first_slots,
)
from eagle_jax.interface import Drafter, Params
from eagle_jax.models import eagle3_head, eagle_head, transformer
from eagle_jax.models.transformer import (
    Transformer,
    TransformerConfig,
    TransformerParams,
)
from eagle_jax.parallel import Placement

DrafterOf = Callable[[TreeConfig, AcceptanceRule], Drafter | None]

LoadDraft = Callable[..., Any]
"""Reads a draft model's weights: `(target_params, placement=None)` -> its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftSource:
    """A draft model that is opened, but whose weights are not read.

    Attributes:
        model: What drafts.
        load: Reads its weights.
        folder: Of its files.
    """

    model: DraftModel
    load: LoadDraft
    folder: Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedPair:
    """A pair ready to run.

    Attributes:
        target: Static.
        drafter: Static; `None` for plain decoding.
        params: Of both.
        tokenizer: A `transformers` tokenizer, `None` where only ids are needed.
        stop_tokens: Ids that end a text.
        drafter_of: From a tree and an acceptance rule to another drafter of the same
            draft model.
        placement: Where its weights lie; `None` for the default device.
    """

    target: Transformer
    drafter: Drafter | None
    params: Params
    drafter_of: DrafterOf
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
        drafter: Static; `None` for plain decoding.
        read_tokenizer: Reads the tokenizer, once, and the date of its chat template.
        load: Reads or makes the weights, on the devices of a placement or, given
            `None`, on the default device.
        bits: Of the matrices of the target's layers, `None` if they are not quantized.
        folder: Of the target's files, `None` if it has none.
    """

    config: TransformerConfig
    dtype: str
    drafter: Drafter | None
    read_tokenizer: Callable[[], tuple[Any, str | None]]
    load: Callable[..., LoadedPair]
    bits: int | None = None
    folder: Path | None = None

    @property
    def tokenizer(self) -> Any:
        """A `transformers` tokenizer, `None` where only ids are needed.

        Read when it is first asked for: settings can be refused before.

        Raises:
            InputError: If there is none.
        """
        return self.read_tokenizer()[0]

    @property
    def date(self) -> str | None:
        """ISO, what the chat template takes for today's; `None` if it asks for none."""
        return self.read_tokenizer()[1]

    def check_room(
        self, *, batch_size: int, max_length: int, grows: bool = True
    ) -> None:
        """Refuses rounds that cannot be in memory, before any weight is read.

        Args:
            batch_size: `B`.
            max_length: Prompt plus output.
            grows: Whether the caches begin small, see `decoding.growth`.

        Raises:
            InputError: If they cannot fit.
        """
        slots = first_slots(max_length, self.drafter) if grows else max_length
        check_rounds(
            self.config,
            self.dtype,
            self.bits,
            self.drafter,
            batch_size=batch_size,
            num_slots=slots,
        )


def open_pair(
    target_name: str,
    draft_name: str | None,
    *,
    tree: TreeConfig,
    dtype: str,
    method: Method = "eagle2",
    rule: AcceptanceRule = "greedy",
    bits: int | None = None,
    date: str | None = None,
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
        rule: How drafts are accepted, see `methods.tree_drafter`.
        bits: Of the target's matrices, see `checkpoints.load_target`.
        date: For the chat template, see `checkpoints.fix_date`.

    Raises:
        InputError: If something is missing or does not fit.
    """
    folder = checkpoints.resolve(target_name)
    # Says what is broken before anything is read.
    config, files = checkpoints.open_target(folder)
    check_depth(tree, config)
    bits = checkpoints.target_bits(files, config, bits)
    if dtype == "auto":
        dtype = "float32" if on_cpu() else checkpoints.stored_dtype(folder)
    check_weights(config, dtype, bits)
    drafter_of, load_drafter = open_drafter(
        draft_name, config, dtype=dtype, method=method
    )
    drafter = drafter_of(tree, rule)
    check_product(bits, dtype)

    @functools.cache
    def read_tokenizer() -> tuple[Any, str | None]:
        tokenizer = checkpoints.load_tokenizer(folder, config.vocab_size)
        return tokenizer, checkpoints.fix_date(tokenizer, date)

    def load(placement: Placement | None = None) -> LoadedPair:
        shardings = target_shardings(placement, config, bits)
        _, target_params = checkpoints.load_target(folder, dtype, shardings, bits)
        drafter_params = load_drafter(target_params, placement)
        target = Transformer(config=config, dtype=dtype)
        return LoadedPair(
            target=with_features(target, drafter),
            drafter=drafter,
            params=Params(target=target_params, drafter=drafter_params),
            tokenizer=read_tokenizer()[0],
            stop_tokens=checkpoints.stop_tokens(folder),
            drafter_of=drafter_of,
            placement=with_drafter(placement, drafter, drafter_params),
        )

    return PairSource(
        config=config,
        dtype=dtype,
        drafter=drafter,
        read_tokenizer=read_tokenizer,
        load=load,
        bits=bits,
        folder=folder,
    )


def open_drafter(
    draft_name: str | None,
    target: TransformerConfig,
    *,
    dtype: str,
    method: Method,
) -> tuple[DrafterOf, Callable[[TransformerParams, Placement | None], Any]]:
    """Opens what drafts for a target that is opened already.

    Arguments are those of `open_pair`, but `dtype` is not "auto" here.

    Returns:
        What makes a drafter, and what reads its weights: from the target's parameters
        and where they lie to its own parameters.

    Raises:
        InputError: If something is missing or does not fit.
    """
    if method == "lookup":
        return lambda tree, _: lookup_drafter(tree), lambda *_: ()
    if draft_name is None or method == "autoregressive":
        return lambda *_: None, lambda *_: ()
    source = open_draft_model(draft_name, target, dtype=dtype, method=method)

    def drafter_of(tree: TreeConfig, rule: AcceptanceRule) -> Drafter:
        folder = source.folder
        return tree_drafter(method, source.model, tree, rule=rule, folder=folder)

    return drafter_of, source.load


def open_draft_model(
    name: str, target: TransformerConfig, *, dtype: str, method: Method
) -> DraftSource:
    """Opens a model that drafts for a target that is opened already.

    Args:
        name: Folder or hub name of an EAGLE head or, for the method "small-model", of
            a smaller target.
        target: Sizes of the target.
        dtype: Of the weights; not "auto".
        method: One that drafts with a model.

    Raises:
        InputError: If something is missing or does not fit.
    """
    folder = checkpoints.resolve(name)
    if method == "small-model":
        small, _ = checkpoints.open_target(folder)
        checkpoints.check_small_model(target, small)

        def load_small(_: TransformerParams, placement: Placement | None = None) -> Any:
            shapes = shapes_of(transformer.init_params, small)
            shardings = draft_shardings(placement, small.layer, shapes)
            return checkpoints.load_target(folder, dtype, shardings)[1]

        decoder = Transformer(config=small, dtype=dtype)
        model = SmallModel(decoder=decoder)
        return DraftSource(model=model, load=load_small, folder=folder)
    if checkpoints.is_eagle3(folder):
        return _open_eagle3(folder, target, dtype)
    head = checkpoints.head_config(folder)
    checkpoints.check_pair(target, head)
    checkpoints.open_weights(folder)

    def load(
        target_params: TransformerParams, placement: Placement | None = None
    ) -> Any:
        shapes = shapes_of(eagle_head.init_params, head)
        shardings = draft_shardings(placement, head.layer, shapes)
        _, params = checkpoints.load_head(
            folder, target, target_params, dtype, shardings
        )
        return EagleHead.join(params, target_params)

    return DraftSource(
        model=EagleHead(config=head, dtype=dtype), load=load, folder=folder
    )


def _open_eagle3(folder: Path, target: TransformerConfig, dtype: str) -> DraftSource:
    head = checkpoints.eagle3_config(folder)
    checkpoints.check_eagle3_pair(target, head)
    checkpoints.open_weights(folder)

    def load(
        target_params: TransformerParams, placement: Placement | None = None
    ) -> Any:
        shapes = shapes_of(eagle3_head.init_params, head)
        shardings = draft_shardings(placement, head.layer, shapes)
        _, params = checkpoints.load_eagle3_head(
            folder, target, target_params, dtype, shardings
        )
        return Eagle3Head.join(params, target_params)

    return DraftSource(
        model=Eagle3Head(config=head, dtype=dtype), load=load, folder=folder
    )


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
