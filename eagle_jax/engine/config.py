"""All settings of a generation, whatever its method."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle_jax.config import DecodingConfig, SamplingConfig, from_table
from eagle_jax.errors import InputError, did_you_mean
from eagle_jax.methods import METHODS, PLAIN, Method, find_method
from eagle_jax.parsing import check_types, value_at


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairConfig:
    """All settings of `eagle-jax generate`, one TOML table per attribute.

    Attributes:
        tree: The method's own settings (`Method.settings`); `None`, which is replaced,
            for their defaults.
        sampling: The settings by which tokens are chosen.
        decoding: The method, the limits and the arithmetic.
    """

    tree: Any = None
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    decoding: DecodingConfig = dataclasses.field(default_factory=DecodingConfig)

    def __post_init__(self) -> None:
        """Refuses a tree of another kind."""
        check_types(self)
        kind = self.method.settings
        if self.tree is None:
            object.__setattr__(self, "tree", kind())
        if type(self.tree) is not kind:
            raise InputError(
                f"tree = {type(self.tree).__name__} is not of method "
                f"{self.method.name}, which has {kind.__name__}"
            )

    @classmethod
    def from_table(
        cls, table: dict[str, Any], where: str, method: str | None = None
    ) -> "PairConfig":
        """See `config.from_table`: the method says what its own tables hold.

        Args:
            table: The tables of the settings.
            where: The file that they are from.
            method: The method that is asked for. Where the tables name none it is
                theirs, if it has all that they set; `None` for the default.
        """
        tree = table.get("tree")
        keys = {*tree} if isinstance(tree, dict) else set[str]()
        named = value_at(table, "decoding", "method")
        decoding = table.get("decoding")
        decoding = decoding if isinstance(decoding, dict) else {}
        asked = METHODS.get(method or "")
        if named is None and asked and keys <= {*asked.own_settings}:
            named = asked.name
            table = table | {"decoding": {**decoding, "method": named}}
        own = METHODS.get(str(named or DecodingConfig.method), PLAIN).settings
        return from_table(cls, table, where, tree=own)

    @property
    def method(self) -> Method:
        """The method that drafts."""
        return find_method(self.decoding.method)

    def with_method(self, name: str) -> "PairConfig":
        """Returns the settings with another method, which keeps those that it reads."""
        method = find_method(name)
        decoding = dataclasses.replace(self.decoding, method=name)
        if method.settings is self.method.settings:
            return dataclasses.replace(self, decoding=decoding)
        shared = set(method.own_settings) & set(vars(self.tree))
        tree = method.settings(**{key: getattr(self.tree, key) for key in shared})
        return dataclasses.replace(self, tree=tree, decoding=decoding)


def with_settings(config: PairConfig, settings: Mapping[str, Any]) -> PairConfig:
    """Returns settings with others instead: those of decoding, `tree`, and its own.

    Raises:
        InputError: If one is unknown or outside its range, or of another method.
    """
    config = config.with_method(settings.get("method") or config.decoding.method)
    common = [*vars(config.decoding), "tree"]
    known = [*common, *config.method.own_settings]
    given = {key: value for key, value in settings.items() if value is not None}
    for name in given:
        if any(name in method.own_settings for method in METHODS.values()):
            check_read(config, name)
        elif name not in known:
            near = did_you_mean(name, known)
            raise InputError(
                f"{name!r} is no setting; known are {', '.join(known)}{near}"
            )
    own = {name: given.pop(name) for name in [*given] if name not in common}
    tree = given.pop("tree", config.tree)
    decoding = dataclasses.replace(config.decoding, **given)
    config = dataclasses.replace(config, decoding=decoding, tree=tree)
    return dataclasses.replace(config, tree=dataclasses.replace(config.tree, **own))


def check_read(config: PairConfig, name: str) -> None:
    """Refuses a setting that is given, but that the method does not read.

    Args:
        config: The method and its settings.
        name: The setting.
    """
    if name not in config.method.reads:
        readers = [one for one, method in METHODS.items() if name in method.reads]
        raise InputError(
            f"method {config.method.name} does not read `{name}`; leave it out, or "
            f"choose {', '.join(readers)}"
        )


def of_call(config: PairConfig, temperature: float, **given: Any) -> PairConfig:
    """Returns the settings of one call.

    Args:
        config: The settings of the pair.
        temperature: The highest temperature of a request.
        **given: `acceptance` and `max_length`, where they differ; `None` stands for
            the pair's.
    """
    values = {name: value for name, value in given.items() if value is not None}
    length = {"max_length": values.pop("max_length")} if "max_length" in values else {}
    return dataclasses.replace(
        config,
        sampling=dataclasses.replace(
            config.sampling, temperature=temperature, **values
        ),
        decoding=dataclasses.replace(config.decoding, **length),
    )
