"""The methods of generation: every one a row, by whose name nothing else decides.

A new method is a file with its drafter and its settings, a row here, a case in the
tests of all drafters and a line in the README.
"""

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eagle_jax import assets
from eagle_jax.checkpoints.draft_files import find_calibration, read_choices
from eagle_jax.config import ChainConfig, PlainConfig, StaticConfig, TreeConfig
from eagle_jax.drafting import (
    DraftModel,
    LookaheadConfig,
    LookaheadDrafter,
    LookupConfig,
    LookupDrafter,
    RecyclingConfig,
    RecyclingDrafter,
    SwitchConfig,
    SwitchDrafter,
    TreeDrafter,
)
from eagle_jax.drafting.calibration import UNCALIBRATED, Calibration
from eagle_jax.drafting.rest import RestConfig, RestDrafter, make_rest
from eagle_jax.errors import InputError, did_you_mean
from eagle_jax.interface import Drafter
from eagle_jax.tree import EAGLE1_TREE, MEDUSA_TREE, RECYCLING_TREE, Topology, chain

COPIED = 16
"""The most tokens that the switch copies after a match, and the longest match it seeks.

Every round pays for the longest path: its noise, and its place in the head's call. The
embedded pair (26 nodes, 128 tokens, greedy) writes 6.05 tokens per round with no copy,
5.98 with copies of 8, 7.26 of 16, 7.58 of 25; the published 40 exceed that tree.
"""


_SHAPES = ("num_nodes", "depth", "width", "choices", "level", "window", "guesses")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """A kind of weights that methods draft with.

    Attributes:
        kinds: The kinds of heads that these weights may be, see `HEADS`; of weights
            that are no head, their name.
        description: What these weights are, in words.
        embedded: The folder of the embedded pair's own; `None` if it has none.
        shared: The names of the settings of all methods that change what they are.
    """

    kinds: tuple[str, ...]
    description: str
    embedded: Path | None = None
    shared: tuple[str, ...] = ()

    @property
    def option(self) -> str:
        """The setting that names them where a run may need several kinds."""
        return "draft" if self is EAGLE else self.kinds[0].replace("-", "_")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """What a drafter is made for.

    Attributes:
        vocab_size: The number of tokens the target knows, `V`.
        encode: The function from a text to its token ids, without special tokens.
        rule: The acceptance rule (`decoding.AcceptanceRule`).
        model: The draft model; `None` for a method without weights.
        folder: The draft model's folder, which may hold a calibration; `None` for none.
    """

    vocab_size: int
    encode: Callable[[str], list[int]]
    rule: str = "greedy"
    model: DraftModel | None = None
    folder: Path | None = None


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of generation.

    Attributes:
        name: Its name.
        settings: Its own settings, a frozen dataclass.
        make: The function from such settings to its drafter; `None` decodes plainly.
        weights: The weights that it drafts with; `None` without any.
        rungs: The sizes of the smaller trees that a tree of its own chooses among,
            ascending, see `engine.ladder`; `None` where there is nothing to choose.
        trials: The settings that `eagle-jax tune` tries; a method that has none, as one
            whose tree is static, is not tuned.
        has_confidence: Whether all its drafts have probabilities: those of a model, not
            of earlier text.
    """

    name: str
    settings: type
    make: Callable[[Any, Context], Drafter] | None
    weights: Weights | None = None
    rungs: tuple[Mapping[str, int], ...] | None = ()
    trials: tuple[Any, ...] = ()
    has_confidence: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether this is plain decoding, one token per pass."""
        return self.make is None

    @property
    def own_settings(self) -> tuple[str, ...]:
        """The names of its own settings."""
        return tuple(field.name for field in dataclasses.fields(self.settings))

    @property
    def shapes(self) -> tuple[str, ...]:
        """The names of those that say how large its tree is."""
        return tuple(name for name in self.own_settings if name in _SHAPES)

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of all settings of drafts that change something."""
        shared = () if self.is_plain else ("acceptance",)
        shared += () if self.weights is None else self.weights.shared
        return self.own_settings + shared

    def drafter(self, settings: Any, context: Context) -> Drafter | None:
        """Returns the drafter, or `None` for plain decoding and without its weights.

        Raises:
            InputError: If the settings name a calibration or choices that cannot be
                used, or are deeper than there are heads.
        """
        if self.make is None or (self.weights is not None and context.model is None):
            return None
        return self.make(settings, context)

    def check_draft(self, draft: str | None) -> None:
        """Refuses a method whose weights are not given, and warns of some not read.

        Args:
            draft: The folder or hub name of the weights; `None` where none is given.

        Raises:
            InputError: If the method drafts with weights and none are given.
        """
        if draft is None and self.weights is not None:
            free = [name for name, method in METHODS.items() if method.weights is None]
            raise InputError(
                f"method {self.name} needs `draft`, {self.weights.description}; or "
                f"choose one of {', '.join(free)}, which need none"
            )
        if draft is not None and self.weights is None:
            told = f"drafts without weights: `draft` {draft} is not read"
            warnings.warn(f"method {self.name} {told}", stacklevel=2)


def _tree_drafter(
    shape: TreeConfig | Topology,
    settings: TreeConfig | StaticConfig | ChainConfig,
    context: Context,
    calibration: Calibration = UNCALIBRATED,
) -> TreeDrafter:
    """Returns the drafter of a tree, of whose settings the noise alone is read.

    Under the rule "rejection" static trees draw their children instead of taking the
    most likely: EAGLE-1 and standard speculative sampling as published. A dynamic
    tree's shape would depend on what was drawn, so it never samples.
    """
    is_static = isinstance(shape, Topology)
    assert context.model is not None
    return TreeDrafter(
        model=context.model,
        tree=shape,
        calibration=calibration,
        shares_noise=settings.shared_noise,
        # Each draw is tested given those before it, so none may be missing.
        sampled=context.rule == "rejection" and is_static and shape.has_every_rank,
    )


def _dynamic(settings: TreeConfig, context: Context) -> TreeDrafter:
    assert context.model is not None
    is_shared = context.rule == "coupled" and settings.shared_noise
    calibration = find_calibration(
        settings,
        context.model.vocab_size,
        context.folder,
        kind="sampled" if is_shared else "greedy",
    )
    return _tree_drafter(settings.shape, settings, context, calibration)


def _static(own: Topology) -> Callable[[StaticConfig, Context], TreeDrafter]:
    def make(settings: StaticConfig, context: Context) -> TreeDrafter:
        assert context.model is not None
        deepest = own.cut(context.model.max_levels or own.depth)
        shape = read_choices(settings.choices, deepest)
        return _tree_drafter(shape, settings, context)

    return make


def _chain(settings: ChainConfig, context: Context) -> TreeDrafter:
    return _tree_drafter(chain(settings.depth), settings, context)


def _tree_or_chain(settings: TreeConfig, context: Context) -> TreeDrafter:
    if settings.width > 1:
        return _dynamic(settings, context)
    return _tree_drafter(chain(settings.levels), settings, context)


def _block(settings: TreeConfig, context: Context) -> TreeDrafter:
    most = context.model.max_levels if context.model else None
    if settings.depth == TreeConfig.depth and most is not None:
        # Nobody asked for a depth that a short block lacks.
        settings = dataclasses.replace(settings, depth=min(settings.depth, most))
    return _tree_or_chain(settings, context)


def _switch(settings: SwitchConfig, context: Context) -> SwitchDrafter:
    return SwitchDrafter(
        first=LookupDrafter(
            depth=min(COPIED, settings.num_nodes - 1),
            max_ngram=max(COPIED, settings.min_match),
        ),
        second=_dynamic(settings, context),
        min_match=settings.min_match,
    )


def _lookup(settings: LookupConfig, context: Context) -> LookupDrafter:
    return LookupDrafter(
        depth=settings.levels,
        num_matches=settings.num_matches,
        max_ngram=settings.max_ngram,
    )


def _lookahead(settings: LookaheadConfig, context: Context) -> LookaheadDrafter:
    return LookaheadDrafter(vocab_size=context.vocab_size, **vars(settings))


def _recycling(settings: RecyclingConfig, context: Context) -> RecyclingDrafter:
    shape = read_choices(settings.choices, RECYCLING_TREE)
    return RecyclingDrafter(vocab_size=context.vocab_size, tree=shape)


def _rest(settings: RestConfig, context: Context) -> RestDrafter:
    return make_rest(settings, context.encode)


def _sizes(
    kind: type,
    sizes: str,
    names: str = "num_nodes/depth/width",
    **values: tuple[int, ...],
) -> tuple[Any, ...]:
    """Returns settings by sizes such as `8/7/1`, each with each of other values."""
    keys = (*names.split("/"), *values)
    numbers = [[int(number) for number in part.split("/")] for part in sizes.split()]
    return tuple(
        kind(**dict(zip(keys, (*size, *others), strict=True)))
        for size in numbers
        for others in itertools.product(*values.values())
    )


_TREES = (
    "3/2/1 5/4/1 8/7/1 6/3/2 10/5/2 16/7/2 10/4/4 16/5/4 26/6/4 32/6/6 48/7/6 60/6/10"
)
EAGLE = Weights(
    kinds=("eagle3", "eagle2"),
    description="the EAGLE head of this target",
    embedded=assets.HEAD,
    shared=("draft_vocabulary", "draft_quantization"),
)
MEDUSA = Weights(kinds=("medusa",), description="the Medusa heads of this target")
HYDRA = Weights(kinds=("hydra",), description="the Hydra heads of this target")
DFLASH = Weights(kinds=("dflash",), description="the DFlash head of this target")
DSPARK = Weights(kinds=("dspark",), description="the DSpark head of this target")
SMALL_MODEL = Weights(
    kinds=("small-model",),
    description="a smaller model with the target's tokenizer",
    embedded=assets.SMALL,
)

_TRIALS = _sizes(TreeConfig, _TREES)
_RUNGS = tuple(
    {"num_nodes": num_nodes, "depth": depth, "width": width}
    for num_nodes, depth, width in ((4, 3, 1), (7, 6, 1), (26, 6, 4))
)
# The published chain of lookup has 10 tokens.
_LOOKUPS = _sizes(LookupConfig, "3/2/1 6/5/1 11/10/1 17/16/1", max_ngram=(2, 3, 5))
_LOOKAHEADS = _sizes(  # The paper's largest, for an A100, are 5/15/15.
    LookaheadConfig, "2/2/2 3/3/3 4/3/3 5/5/5 5/7/7 5/15/15", "level/window/guesses"
)
_CHAINS = _sizes(ChainConfig, "1 2 3 4 5 6 8 10", "depth")
_SWITCHES = _sizes(SwitchConfig, "8/7/1 10/4/4 26/6/4 60/6/10", min_match=(3, 5, 8))

# In the order of EAGLE-2's Table 1; what it does not have stands last.
_ROWS = (
    Method("autoregressive", PlainConfig, None, rungs=None),
    Method("small-model", TreeConfig, _tree_or_chain, SMALL_MODEL, _RUNGS, _TRIALS),
    Method("lookup", LookupConfig, _lookup, None, _RUNGS, _LOOKUPS, False),
    Method("medusa", StaticConfig, _static(MEDUSA_TREE), MEDUSA),
    Method("lookahead", LookaheadConfig, _lookahead, None, (), _LOOKAHEADS, False),
    Method("hydra", StaticConfig, _static(MEDUSA_TREE), HYDRA),
    Method("chain", ChainConfig, _chain, EAGLE, ({"depth": 3},), _CHAINS),
    Method("eagle1", StaticConfig, _static(EAGLE1_TREE), EAGLE),
    Method("eagle2", TreeConfig, _dynamic, EAGLE, _RUNGS, _TRIALS),
    Method("dflash", TreeConfig, _block, DFLASH, _RUNGS, _TRIALS),
    Method("dspark", TreeConfig, _block, DSPARK, _RUNGS, _TRIALS),
    Method("recycling", RecyclingConfig, _recycling, has_confidence=False),
    Method("eagle2+lookup", SwitchConfig, _switch, EAGLE, (), _SWITCHES, False),
    Method("rest", RestConfig, _rest, has_confidence=False),
)

METHODS: Mapping[str, Method] = {row.name: row for row in _ROWS}
"""Every method by its name."""

WEIGHTS = tuple(dict.fromkeys(row.weights for row in _ROWS if row.weights is not None))
"""Every kind of weights that methods draft with."""

PLAIN = METHODS["autoregressive"]
"""Plain decoding, which others are compared with."""


def find_method(name: str) -> Method:
    """Returns a method by its name."""
    if name not in METHODS:
        known = f"{', '.join(METHODS)}{did_you_mean(name, METHODS)}"
        raise InputError(f"method = {name!r} is no method; known are {known}")
    return METHODS[name]
