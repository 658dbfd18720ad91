"""Settings of a run as frozen dataclasses, and the strict reader of `configs/`.

A TOML file states only what differs from the defaults, one table per class:

```toml
[tree]
num_nodes = 50
```
"""

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal, TypeVar

from eagle_jax.errors import InputError, did_you_mean
from eagle_jax.parsing import check_type, check_types, hints_of, read_toml

Settings = TypeVar("Settings")

Acceptance = Literal["coupled", "rejection"]
"""Names of the rules of acceptance above temperature 0."""

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
"""Names of the types of weights and caches; "auto" chooses one for the devices."""

Quantization = Literal["none", "int8", "int4"]
"""Names of the types that the matrices of a target's layers are rounded to."""

CONFIGS = Path(__file__).parent / "configs"
"""The settings files that come with this package."""

_FLOAT32_MAX = (2 - 2**-23) * 2.0**127


def require(holds: bool, name: str, value: object, wanted: str) -> None:
    """Raises an error that names the setting, what was given and what is wanted."""
    if not holds:
        raise InputError(f"{name} = {value} must be {wanted}", setting=name)


def require_int32(name: str, value: int) -> None:
    """Refuses a count beyond int32, in which tokens and positions are counted."""
    require(value < 2**31, name, value, "below 2**31")


def require_counts(settings: object, **least: int) -> None:
    """Refuses counts below their least, and beyond int32."""
    for name, bound in least.items():
        value = getattr(settings, name)
        require(
            value >= bound, name, value, f"at least {bound}" if bound else "0 or more"
        )
        require_int32(name, value)


def require_float32(name: str, value: float) -> None:
    """Refuses a number that would be infinite in float32."""
    require(value <= _FLOAT32_MAX, name, value, "at most 3.4e38, the end of float32")


def shortest(value: float) -> str:
    """Returns the shortest text that stands for this number alone, as 1 or 0.7."""
    return repr(value).removesuffix(".0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeConfig:
    """The dynamic tree of EAGLE-2 (section 4 and appendix A).

    The same tree under other names: `num_nodes` is `total_token` in the EAGLE
    repository and `num_draft_tokens` in SGLang; `depth` is their `depth + 1` and
    `num_steps`; `width` is their `top_k` and `eagle_topk`.

    Attributes:
        num_nodes: The number of nodes of one verification, `N`, root included.
        depth: The number of drafted levels below the root, `D`.
        width: The number of nodes expanded per level, and of children drafted per
            node, `K`.
        rank_by: What ranks nodes: "value" for whole paths, "confidence" for the last
            step alone (the paper's Table 3, "w/o value").
        rerank: If false, keep the expansion's own nodes, level by level (Table 3,
            "w/o reranking").
        calibration: A file of `eagle-jax calibrate`, which calibrates draft
            probabilities before ranking; "none" for none, `None` for
            `calibration.json` in the draft's own folder, if there is one.
        shared_noise: If false, children are the most likely tokens also where the
            noise of the target's draws is known: the same text in more rounds.
    """

    num_nodes: int = 60
    depth: int = 6
    width: int = 10
    rank_by: Literal["value", "confidence"] = "value"
    rerank: bool = True
    calibration: str | None = None
    shared_noise: bool = True

    def __post_init__(self) -> None:
        """Refuses sizes that describe no tree."""
        check_types(self)
        require_counts(self, num_nodes=1, depth=0, width=1)

    @property
    def levels(self) -> int:
        """The levels worth drafting: of `N` nodes none is deeper than `N - 1`."""
        return min(self.depth, self.num_nodes - 1)

    @property
    def shape(self) -> "TreeConfig":
        """The dynamic tree without the settings that choose drafts."""
        names = ("num_nodes", "depth", "width", "rank_by", "rerank")
        return TreeConfig(**{name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticConfig:
    """A tree of one shape, whatever the context (EAGLE-1, Medusa, Hydra).

    Attributes:
        choices: The shape: "eagle1_25", "mc_sim_7b_63" (Medusa's and Hydra's),
            "recycling_80", or a JSON file with a list of rank paths such as
            [[0], [1], [0, 0]]; `None` for the method's own.
        shared_noise: See `TreeConfig`.
    """

    choices: str | None = None
    shared_noise: bool = True

    def __post_init__(self) -> None:
        """Refuses values of another type."""
        check_types(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainConfig:
    """The most likely token after each: a tree of width 1.

    Attributes:
        depth: The number of drafted tokens, `D`.
        shared_noise: See `TreeConfig`.
    """

    depth: int = 6
    shared_noise: bool = True

    def __post_init__(self) -> None:
        """Refuses a length that is none."""
        check_types(self)
        require_counts(self, depth=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainConfig:
    """Plain decoding has no settings of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """The settings by which tokens are chosen.

    Attributes:
        temperature: The divisor of the logits, or 0 for the most likely token; those
            below 1e-6 count as 1e-6.
        top_p: Keep the most likely tokens with at least this mass; 1 keeps all.
        top_k: Keep this many of the most likely tokens; 0 or -1 keeps all.
        min_p: Keep tokens at least this likely, relative to the most likely one; 0
            keeps all.
        seed: The seed of the first request; the next ones draw with the next seeds.
        acceptance: The acceptance rule above temperature 0: "coupled" gives the very
            tokens of plain decoding with the same seed; "rejection" gives the same
            distribution with other tokens, and static trees and chains then draw their
            nodes from the draft, as published.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    acceptance: Acceptance = "coupled"

    def __post_init__(self) -> None:
        """Refuses values outside their range."""
        check_types(self)
        is_temperature = math.isfinite(self.temperature) and self.temperature >= 0
        require(is_temperature, "temperature", self.temperature, "finite, 0 or more")
        require_float32("temperature", self.temperature)
        is_mass = 2.0**-126 <= self.top_p <= 1  # Smaller ones are 0 in float32.
        require(is_mass, "top_p", self.top_p, "above 0 and at most 1")
        require(self.top_k >= -1, "top_k", self.top_k, "0 or -1 (off), or more")
        require_int32("top_k", self.top_k)
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "0 (off) to 1")
        require(0 <= self.seed < 2**31, "seed", self.seed, "0 to 2**31 - 1")

    @property
    def rule(self) -> Literal["greedy"] | Acceptance:
        """The acceptance rule that these settings mean: "greedy" at temperature 0."""
        return "greedy" if self.temperature == 0 else self.acceptance


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """The settings of decoding: its method, its limits and its arithmetic.

    Attributes:
        method: The method that drafts: dynamic, static or chained trees of an EAGLE
            head, static ones of Medusa or Hydra heads, the tree of a smaller model (a
            chain at width 1), earlier text, tokens that the target held likely after
            others, or none.
        max_new_tokens: The largest number of tokens to generate per prompt.
        max_length: The largest number of tokens of prompt and output together; `None`
            for the smaller of the model's positions and what the request needs.
        batch_size: The number of prompts decoded together, `B`.
        dtype: The type of weights, caches and activations; "auto" for float32 on CPUs
            and the checkpoint's own elsewhere.
        quantization: The type that the matrices of the target's layers are rounded to
            as they are read; "none" takes them as they are stored.
        draft_vocabulary: The tokens that an EAGLE-1/2 head drafts: "8192@texts.txt" for
            as many of the most frequent tokens of a text; "none", or `None` for all.
            The text stays the same.
        ignore_eos: Go on after stop tokens.
    """

    method: str = "eagle2"
    max_new_tokens: int = 128
    max_length: int | None = None
    batch_size: int = 1
    dtype: Dtype = "auto"
    quantization: Quantization = "none"
    draft_vocabulary: str | None = None
    ignore_eos: bool = False

    @property
    def bits(self) -> int | None:
        """The bits per weight of a quantized target; `None` for weights as stored."""
        return {"none": None, "int8": 8, "int4": 4}[self.quantization]

    def __post_init__(self) -> None:
        """Refuses counts below one."""
        check_types(self)
        require_counts(self, max_new_tokens=1, batch_size=1)
        if self.max_length is not None:
            length = self.max_length
            require(length >= 2, "max_length", length, "at least 2 (prompt + output)")
            require_int32("max_length", length)


def load_config(path: str | Path, kind: type[Settings], **given: Any) -> Settings:
    """Reads a TOML file of settings.

    Args:
        path: The file; where there is none, "configs/13b.toml", "13b.toml" and "13b"
            are the package's own.
        kind: A frozen dataclass, nested one level per TOML table.
        **given: What the own `from_table` of the class takes besides the table.

    Returns:
        An instance of `kind`; what the file leaves out keeps its default.

    Raises:
        InputError: If the file cannot be read, a key is unknown, a value has the
            wrong type or lies outside its range.
    """
    file = Path(path)
    own = CONFIGS / f"{file.name.removesuffix('.toml')}.toml"
    is_name = str(file.parent) in (".", "configs")
    if is_name and own.is_file() and not file.is_file():
        file = own
    elif is_name and not file.exists():
        known = ", ".join(sorted(one.name for one in CONFIGS.glob("*.toml")))
        raise InputError(f"{path} is no file and none of configs/: {known}")
    table: dict[str, Any] = read_toml(file)
    read = getattr(kind, "from_table", None)
    if read is not None:
        return read(table, str(path), **given)
    return from_table(kind, table, str(path))


def from_table(
    kind: type[Settings], table: dict[str, Any], where: str, **types: type
) -> Settings:
    """Builds a settings dataclass from a nested table.

    Args:
        kind: A frozen dataclass; its own `from_table(table, where)` is not asked.
        table: The values by field name, with nested tables for nested dataclasses.
        where: The file and, inside it, the table, which errors name.
        **types: The dataclasses of tables that annotations leave open.

    Returns:
        An instance of `kind`.

    Raises:
        InputError: If a key is unknown, or a value has the wrong type or lies outside
            its range.
    """
    hints = hints_of(kind)
    unknown = sorted(set(table) - set(hints))
    if unknown:
        known = f"{', '.join(hints)}{did_you_mean(unknown[0], hints)}"
        raise InputError(f"{where}: unknown key {unknown[0]!r}; known are {known}")
    values: dict[str, Any] = {}
    for name, value in table.items():
        hint = types.get(name, hints[name])
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise InputError(f"{where}: {name!r} must be a table, not {value!r}")
            values[name] = from_table(hint, value, f"{where} [{name}]")
        else:
            values[name] = check_type(hint, value, f"{where}: {name}")
    try:
        return kind(**values)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
