"""Settings of a run as frozen dataclasses, and the strict reader of `configs/`.

A TOML file states only what differs from the defaults, one table per class:

```toml
[tree]
num_nodes = 50
```
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from eagle_jax.errors import InputError, did_you_mean
from eagle_jax.parsing import check_type, check_types, hints_of, read_toml

Settings = TypeVar("Settings")

Acceptance = Literal["coupled", "rejection"]
"""Names of the rules of acceptance above temperature 0."""

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
"""Names of the types of weights and caches; "auto" chooses one for the devices."""

DraftQuantization = Literal["none", "int8"]
"""The types that an EAGLE head's matrices may be rounded to."""

Quantization = Literal["none", "int8", "int4"]
"""Names of the types that the matrices of a target's layers are rounded to."""

CONFIGS = Path(__file__).parent / "configs"
"""The settings files that come with this package."""

_FLOAT32_MAX = (2 - 2**-23) * 2.0**127


def require(holds: bool, name: str, value: object, wanted: str) -> None:
    """Raises an error that names the setting, what was given and what is wanted."""
    if not holds:
        raise InputError(f"{name} = {value} must be {wanted}", setting=name)


def require_counts(settings: object, **least: int) -> None:
    """Refuses counts below their least, and beyond int32."""
    for name, bound in least.items():
        wanted = f"at least {bound}" if bound else "0 or more"
        Range(bound, wanted=wanted).check(name, getattr(settings, name))


def require_float32(name: str, value: float) -> None:
    """Refuses a number that would be infinite in float32."""
    require(value <= _FLOAT32_MAX, name, value, "at most 3.4e38, the end of float32")


@dataclasses.dataclass(frozen=True)
class Range:
    """The values that a number may have.

    Attributes:
        least: The least of them.
        most: The largest; `inf` for the end of int32, or of float32.
        wanted: The range in words; `None` for "`least` to `most`".
    """

    least: float
    most: float = math.inf
    wanted: str | None = None

    def check(self, name: str, value: float) -> None:
        """Refuses a value outside the range, by the name of its setting."""
        wanted = self.wanted or f"{self.least} to {self.most}"
        is_within = self.least <= value <= self.most and value != math.inf
        require(is_within, name, value, wanted)
        if isinstance(value, float):
            require_float32(name, value)
        elif self.most == math.inf:  # Tokens and positions are counted in int32.
            require(value < 2**31, name, value, "below 2**31")


DRAWS = {
    "temperature": Range(0, wanted="finite, 0 or more"),
    # Smaller ones are 0 in float32.
    "top_p": Range(2.0**-126, 1, "above 0 and at most 1"),
    "top_k": Range(-1, wanted="0 or -1 (off), or more"),
    "min_p": Range(0, 1, "0 (off) to 1"),
}
"""The ranges of the settings by which tokens are drawn."""


class Without(str):
    """Why a setting has no flag, or no field of an HTTP request."""

    __slots__ = ()


def setting(default: Any, within: Range | None = None, **names: str) -> Any:
    """Returns a field of a request's settings, with what other parts know of it.

    Args:
        default: What holds where nobody says anything; a class makes it.
        within: The range of the number, or of each; `None` if another class checks it.
        **names: Its names elsewhere, if they are others than its own, or a `Without`:
            `flag`; `openai`, its fields of HTTP requests, OpenAI's or vLLM's; and
            `checkpoint`, the key of `generation_config.json` that it follows.
    """
    metadata = {"within": within, **names}
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


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
    read = getattr(kind, "from_table", functools.partial(from_table, kind))
    return read(read_toml(file), str(path), **given)


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
    check_known(table, hints, where)
    values: dict[str, Any] = {}
    for name, value in table.items():
        hint = types.get(name, hints[name])
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise InputError(f"{where}: {name!r} must be a table, not {value!r}")
            values[name] = from_table(hint, value, f"{where} [{name}]")
        else:
            values[name] = check_type(hint, value, f"{where}: {name}")
    return made(kind, values, where)


def made(kind: type[Settings], values: dict[str, Any], where: str) -> Settings:
    """Returns settings of a class; their refusal names where they stand."""
    try:
        return kind(**values)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def check_known(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Refuses a key that nobody would read."""
    names = [*known]
    for name in sorted(set(table) - set(names)):
        told = f"{', '.join(names)}{did_you_mean(name, names)}"
        raise InputError(f"{where}: unknown key {name!r}; known are {told}")
