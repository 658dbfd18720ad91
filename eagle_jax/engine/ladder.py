"""The trees that a pair chooses among, and the choice between stretches of rounds."""

import atexit
import dataclasses
import hashlib
import operator
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from eagle_jax.decoding.decoder import AcceptanceRule
from eagle_jax.drafting import RootOnly, TreeDrafter
from eagle_jax.engine.choice import STRETCH, TRIAL, Figures, Ladder, Stretch, choose
from eagle_jax.engine.config import AutoTree
from eagle_jax.engine.figures import read_figures, write_figures
from eagle_jax.files import kept_folder
from eagle_jax.interface import Drafter

if TYPE_CHECKING:
    from eagle_jax.engine.pair import Pair

ROOT = "root"
"""The label of rounds without drafts."""

_FEW_NODES = 8
_SIZES = ("num_nodes", "depth", "width")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rung:
    """A tree that rounds may draft; all of a ladder go on from one state.

    Attributes:
        label: Its sizes, as `60/6/10`; `ROOT` for plain decoding.
        drafter: What drafts it; `None` where nothing does.
    """

    label: str
    drafter: Drafter | None


def ladder_of(pair: "Pair", rule: AcceptanceRule) -> tuple[Rung, ...]:
    """Returns the trees that a pair chooses among under a rule, the largest last.

    There is one alone where the settings name its sizes, where the text would depend on
    the choice, and over several processes, whose clocks differ.
    """
    key = ladder_of, pair.make_drafter, pair.config.tree, rule
    if key not in pair.kept:
        pair.kept[key] = _make_ladder(pair, rule)
    return pair.kept[key]


def _make_ladder(pair: "Pair", rule: AcceptanceRule) -> tuple[Rung, ...]:
    config, own, full = pair.config, pair.config.own, pair.drafter_for(rule)
    largest = Rung(label=_label(own, full), drafter=full)
    is_fixed = not isinstance(config.tree, AutoTree) or jax.process_count() > 1
    if is_fixed or rule == "rejection" or full is None or full.depth == 0:
        return (largest,)
    rungs = {ROOT: Rung(label=ROOT, drafter=RootOnly(drafter=full))}
    for sizes in config.method_row.rungs or ():
        sizes = {**sizes, "depth": min(sizes["depth"], full.depth)}
        if sizes.get("width") == 1:
            sizes["num_nodes"] = min(sizes["num_nodes"], sizes["depth"] + 1)
        settings = dataclasses.replace(own, **sizes)
        drafter = pair.make_drafter(settings, rule)
        if isinstance(drafter, TreeDrafter):
            drafter = dataclasses.replace(drafter, shared_depth=full.depth)
        if 3 * num_nodes(drafter) <= 2 * num_nodes(full):
            label = _label(settings, drafter)
            rungs[label] = Rung(label=label, drafter=drafter)
    return (*rungs.values(), largest)


@dataclasses.dataclass(kw_only=True)
class Known:
    """What is known of the trees of a ladder, which all engines of a pair share."""

    figures: Figures = dataclasses.field(default_factory=Figures)


class Chooser:
    """Chooses among the trees of a ladder for the rows of one engine.

    Attributes:
        known: What is known of them.
    """

    def __init__(
        self, rungs: tuple[Rung, ...], known: Known, *, has_weights: bool
    ) -> None:
        """Begins with a small tree, or with none where drafts come without weights."""
        nodes = [num_nodes(rung.drafter) for rung in rungs]
        few = [place for place, count in enumerate(nodes) if count <= _FEW_NODES]
        self._ladder = Ladder(
            nodes=nodes,
            depths=[rung.drafter.depth if rung.drafter else 0 for rung in rungs],
            start=max(few[-1], 1) if has_weights else 0,
        )
        self.known = known
        self._tree = self._left = self._most = self._batch = 0
        self._stretch = Stretch()

    def next(
        self,
        batch: int,
        left: int,
        compile_seconds: Callable[[], Sequence[float]],
        has: Callable[[int], bool] = lambda tree: True,
    ) -> tuple[int, int]:
        """Returns the tree of the next rounds, and how many of them at most.

        Args:
            batch: The rows of the program.
            left: The tokens that the texts in hand may still get.
            compile_seconds: Says what the program of each tree would take to compile.
            has: Says whether a tree that is not compiled may be had now; otherwise
                another one goes on, if there is one.
        """
        if self._left <= 0 or batch != self._batch:
            self._take_in()
            figures, costs = self.known.figures, compile_seconds()
            tree, self._most = choose(
                self._ladder, figures, batch, left=left, compile_seconds=costs
            )
            others = [place for place, cost in enumerate(costs) if not cost]
            if others and costs[tree] and not has(tree):
                tree = self._tree if self._tree in others else others[-1]
                self._most = STRETCH
            self._tree, self._left, self._batch = tree, self._most, batch
            if costs[tree]:  # The first run of a program teaches nothing.
                return tree, 1
        return self._tree, self._left

    def record(self, part: Stretch, *, is_last: bool = False) -> None:
        """Takes in what rounds by the last tree took and brought.

        Args:
            part: What they took and brought.
            is_last: Whether no text runs on: there may be no more rounds.
        """
        sums: Any = map(operator.add, self._stretch, part)
        self._stretch = Stretch(*sums)
        # A text that ends without a round uses the stretch up all the same.
        self._left -= max(part.rounds, 1)
        if is_last:
            self._take_in()

    def _take_in(self) -> None:
        one, self._stretch = self._stretch, Stretch()
        self.known.figures = self.known.figures.after(
            self._tree, self._batch, one, is_trial=self._most == TRIAL
        )


def chooser_of(pair: "Pair", rule: AcceptanceRule) -> Chooser | None:
    """Returns what chooses among a ladder's trees; `None` where there is one alone."""
    rungs = ladder_of(pair, rule)
    if len(rungs) == 1:
        return None
    has_weights = pair.config.method_row.weights is not None
    key = Chooser, rungs, rule
    if key not in pair.kept:
        known = pair.kept[key] = Known()
        labels = [rung.label for rung in rungs]
        if (path := _kept_file(pair, labels, rule)) is not None:
            known.figures = read_figures(path, labels)
            # Ctrl-C and SIGTERM come by here, too.
            atexit.register(lambda: write_figures(path, labels, known.figures))
    return Chooser(rungs, pair.kept[key], has_weights=has_weights)


def _kept_file(pair: "Pair", labels: list[str], rule: AcceptanceRule) -> Path | None:
    """Returns the file of what a ladder's trees took here before, if any is kept."""
    folder = kept_folder()
    if folder is None:
        return None
    sizes = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), pair.params)
    parts = pair.placement and pair.placement.mesh.shape
    here = jax.devices()[0].device_kind, os.cpu_count(), parts, pair.config.method
    found = repr((here, pair.config.own, labels, rule, sizes))
    return folder / f"trees-{hashlib.sha256(found.encode()).hexdigest()[:16]}.json"


def num_nodes(drafter: Drafter | None) -> int:
    """Returns the number of nodes of a drafter's trees; 1 where it does not say it."""
    return getattr(drafter, "num_nodes", 1)


def _label(settings: Any, drafter: Drafter | None) -> str:
    """Returns the sizes of a tree, as `tune` writes them."""
    if drafter is None:
        return ROOT
    sizes = vars(settings) | {"depth": drafter.depth}
    names = [name for name in _SIZES if hasattr(settings, name)]
    sizes = [str(sizes[name]) for name in names]
    return "/".join(sizes) if len(sizes) > 1 else f"{num_nodes(drafter)} nodes"
