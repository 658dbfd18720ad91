"""All settings of a pair, whatever its method."""

import dataclasses
from typing import Any, Literal

from eagle_jax.config import (
    Acceptance,
    DraftQuantization,
    Dtype,
    Quantization,
    Range,
    check_known,
    from_table,
    made,
    require,
    require_counts,
)
from eagle_jax.engine.request import Request
from eagle_jax.errors import InputError, did_you_mean
from eagle_jax.methods import METHODS, PLAIN, Method, find_method
from eagle_jax.parsing import check_types, hints_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoTree:
    """A tree that chooses itself, by what its rounds take and bring.

    Attributes:
        settings: The method's settings, with the largest tree.
    """

    settings: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairConfig:
    """All settings of a pair: what drafts, arithmetic, and what requests begin with.

    A TOML file has them in three tables: `[tree]` holds the method's own settings,
    `[request]` fields of `Request`, and `[pair]` all others. There `tree = "auto"`
    makes the tree of `[tree]` the largest one.

    Attributes:
        method: The method that drafts: dynamic, static or chained trees of an EAGLE
            head, static ones of Medusa or Hydra heads, the tree of a smaller model (a
            chain at width 1), earlier text, tokens that the target held likely after
            others, or none.
        tree: The method's own settings (`Method.settings`). "auto", as which `None`
            counts, becomes an `AutoTree` of those before or of their defaults: among
            the root alone and trees up to theirs, what pays is chosen as the text goes
            on. Where the text depends on the tree (`acceptance` "rejection"), and over
            several processes, it is the largest one.
        acceptance: The acceptance rule above temperature 0: "coupled" gives the very
            tokens of plain decoding with the same seed; "rejection" gives the same
            distribution with other tokens, and static trees and chains then draw their
            nodes from the draft, as published.
        max_length: The largest number of tokens of prompt and output together; `None`
            for the smaller of the model's positions and what the request needs.
        batch_size: The number of prompts decoded together, `B`.
        dtype: The type of weights, caches and activations; "auto" for float32 on CPUs
            and the checkpoint's own elsewhere.
        quantization: The type that the matrices of the target's layers are rounded to
            as they are read; "none" takes them as they are stored.
        draft_vocabulary: The tokens that an EAGLE-1/2 head drafts: "8192@texts.txt" for
            as many of the most frequent tokens of a text; "none" for all; `None` for
            the head's own, see `--loss-vocab-size`, or all. The text stays the same.
        draft_quantization: "int8" to round the matrices of an EAGLE head, and its copy
            of the output head, to integers; "none" to take them as they are stored. The
            text stays the same.
        request: The settings of requests where they say nothing themselves.
    """

    method: str = "eagle2"
    tree: Any = None
    acceptance: Acceptance = "coupled"
    max_length: int | None = None
    batch_size: int = 1
    dtype: Dtype = "auto"
    quantization: Quantization = "none"
    draft_vocabulary: str | None = None
    draft_quantization: DraftQuantization = "none"
    request: Request = dataclasses.field(default_factory=Request)

    def __post_init__(self) -> None:
        """Refuses counts below one, and a tree of another method."""
        check_types(self)
        require_counts(self, batch_size=1)
        if self.max_length is not None:
            least = Range(2, wanted="at least 2 (prompt + output)")
            least.check("max_length", self.max_length)
        row = self.method_row
        if self.tree is None or self.tree == "auto":
            object.__setattr__(self, "tree", AutoTree(settings=row.settings()))
        if row.rungs is None:  # There is nothing to choose.
            object.__setattr__(self, "tree", self.own)
        if type(self.own) is not row.settings:
            raise InputError(
                f"tree = {type(self.own).__name__} is not of method {self.method}, "
                f"which has {row.settings.__name__}"
            )

    @classmethod
    def from_table(
        cls, table: dict[str, Any], where: str, method: str | None = None
    ) -> "PairConfig":
        """See `config.from_table`: the method says what its own table holds.

        Args:
            table: The tables of the settings.
            where: The file that they are from.
            method: The method that is asked for. Where the tables name none it is
                theirs, if it has all that they set; `None` for the default.
        """
        tables = ("tree", "pair", "request")
        check_known(table, tables, where)
        for name, values in table.items():
            if not isinstance(values, dict):
                raise InputError(f"{where}: {name!r} must be a table, not {values!r}")
        tree, pair, asked = (table.get(name, {}) for name in tables)
        others = [name for name in hints_of(cls) if name not in tables]
        check_known(pair, [*others, "tree"], f"{where} [pair]")
        said = pair.get("tree", "auto")
        require(said == "auto", f"{where} [pair]: `tree`", repr(said), '"auto"')
        check_known(asked, hints_of(Request), f"{where} [request]")
        row = METHODS.get(method or "")
        if "method" not in pair and row and {*tree} <= {*row.own_settings}:
            pair = pair | {"method": row.name}
        row = METHODS.get(str(pair.get("method", cls.method)), PLAIN)
        own = from_table(row.settings, tree, f"{where} [tree]")
        is_fixed = "tree" not in pair and {*tree} & {*row.shapes}
        parts = {
            "tree": own if is_fixed else AutoTree(settings=own),
            "request": made(Request, asked, f"{where} [request]"),
        }
        return made(cls, pair | parts, f"{where} [pair]")

    @property
    def method_row(self) -> Method:
        """The row of the method that drafts."""
        return find_method(self.method)

    @property
    def own(self) -> Any:
        """The method's own settings, of whatever tree."""
        return self.tree.settings if isinstance(self.tree, AutoTree) else self.tree

    @property
    def fixed(self) -> "PairConfig":
        """The same with the largest tree in every round."""
        return dataclasses.replace(self, tree=self.own)

    @property
    def rule(self) -> Literal["greedy"] | Acceptance:
        """The rule that requests are accepted by: "greedy" at temperature 0."""
        return "greedy" if self.request.temperature == 0 else self.acceptance

    @property
    def bits(self) -> int | None:
        """The bits per weight of a quantized target; `None` for weights as stored."""
        return {"none": None, "int8": 8, "int4": 4}[self.quantization]

    def with_method(self, name: str) -> "PairConfig":
        """Returns the settings with another method, which keeps those that it reads."""
        if name == self.method:
            return self
        method = find_method(name)
        if method.settings is self.method_row.settings:
            return dataclasses.replace(self, method=name)
        shared = set(method.own_settings) & set(vars(self.own))
        tree = method.settings(**{key: getattr(self.own, key) for key in shared})
        # Plain decoding has no tree that anybody could have named.
        if isinstance(self.tree, AutoTree) or self.method_row.rungs is None:
            tree = AutoTree(settings=tree)
        return dataclasses.replace(self, method=name, tree=tree)

    def with_(self, **settings: Any) -> "PairConfig":
        """Returns these settings with others instead.

        Args:
            **settings: Fields of this class, of the method's own settings or of
                `Request`; `None` stands for what holds already.

        Raises:
            InputError: If one is unknown or outside its range, or of another method.
        """
        given = {name: value for name, value in settings.items() if value is not None}
        config = self.with_method(given.pop("method", self.method))
        common, own, asked = (
            {name: given.pop(name) for name in names if name in given}
            for names in (vars(config), vars(config.own), vars(config.request))
        )
        for name in given:
            config.check_reads(name)
        shapes = [name for name in own if name in config.method_row.shapes]
        if common.get("tree") == "auto":
            if shapes:
                raise InputError(
                    f'tree = "auto" chooses `{shapes[0]}` itself; leave one of them out'
                )
            common["tree"] = AutoTree(settings=config.own)
        config = dataclasses.replace(config, **common)
        tree = dataclasses.replace(config.own, **own)
        if isinstance(config.tree, AutoTree) and not shapes:
            tree = AutoTree(settings=tree)
        request = dataclasses.replace(config.request, **asked)
        return dataclasses.replace(config, tree=tree, request=request)

    def check_reads(self, name: str) -> None:
        """Refuses a setting that the method does not read, or that there is none of."""
        if name in self.method_row.reads:
            return
        readers = [one for one, row in METHODS.items() if name in row.reads]
        if readers:
            raise InputError(
                f"method {self.method} does not read `{name}`; leave it out, or "
                f"choose {', '.join(readers)}",
                setting=name,
            )
        known = [*vars(self), *self.method_row.own_settings, *vars(self.request)]
        told = f"{name!r} is no setting; known are {', '.join(known)}"
        raise InputError(told + did_you_mean(name, known))
