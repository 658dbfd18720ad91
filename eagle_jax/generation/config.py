"""All settings of a generation, whatever its method."""

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

from eagle_jax.config import DecodingConfig, SamplingConfig, from_table
from eagle_jax.errors import InputError
from eagle_jax.methods import METHODS, PLAIN, Method, find_method
from eagle_jax.parsing import check_types, value_at


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """All settings of `eagle-jax generate`, one TOML table per attribute.

    Attributes:
        tree: The method's own settings (`Method.settings`) at temperature 0; `None`,
            which is replaced, for their defaults.
        sampled_tree: Its settings above temperature 0; `None` for `tree`.
        sampling: The settings by which tokens are chosen.
        decoding: The method, the limits and the arithmetic.
    """

    tree: Any = None
    sampled_tree: Any = None
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    decoding: DecodingConfig = dataclasses.field(default_factory=DecodingConfig)

    def __post_init__(self) -> None:
        """Refuses tables of another kind."""
        check_types(self)
        kind = self.method.settings
        if self.tree is None:
            object.__setattr__(self, "tree", kind())
        for name in ("tree", "sampled_tree"):
            given = getattr(self, name)
            if given is not None and type(given) is not kind:
                raise InputError(
                    f"{name} = {type(given).__name__} is not of method "
                    f"{self.method.name}, which has {kind.__name__}"
                )

    @classmethod
    def from_table(
        cls, table: dict[str, Any], where: str, method: str | None = None
    ) -> "GenerateConfig":
        """See `config.from_table`: the method says what its own tables hold.

        Args:
            table: The tables of the settings.
            where: The file that they are from.
            method: The method that is asked for. Where the tables name none it is
                theirs, if it has all that they set; `None` for the default.
        """
        trees = [table.get(name) for name in ("tree", "sampled_tree")]
        keys = {key for tree in trees if isinstance(tree, dict) for key in tree}
        named = value_at(table, "decoding", "method")
        decoding = table.get("decoding")
        decoding = decoding if isinstance(decoding, dict) else {}
        asked = METHODS.get(method or "")
        if named is None and asked and keys <= {*asked.own_settings}:
            named = asked.name
            table = table | {"decoding": {**decoding, "method": named}}
        own = METHODS.get(str(named or DecodingConfig.method), PLAIN).settings
        return from_table(cls, table, where, tree=own, sampled_tree=own)

    @property
    def method(self) -> Method:
        """The method that drafts."""
        return find_method(self.decoding.method)

    def with_method(self, name: str) -> "GenerateConfig":
        """Returns the settings with another method, which keeps those that it reads."""
        method = find_method(name)
        decoding = dataclasses.replace(self.decoding, method=name)
        if method.settings is self.method.settings:
            return dataclasses.replace(self, decoding=decoding)

        def convert(settings: Any) -> Any:
            if settings is None:
                return None
            shared = set(method.own_settings) & set(vars(settings))
            return method.settings(**{key: getattr(settings, key) for key in shared})

        return dataclasses.replace(
            self,
            tree=convert(self.tree),
            sampled_tree=convert(self.sampled_tree),
            decoding=decoding,
        )

    def at(self, temperature: float) -> "GenerateConfig":
        """Returns the settings at a temperature, with one tree."""
        is_other = temperature > 0 and self.sampled_tree is not None
        return dataclasses.replace(
            self,
            tree=self.sampled_tree if is_other else self.tree,
            sampled_tree=None,
            sampling=dataclasses.replace(self.sampling, temperature=temperature),
        )


def with_settings(
    config: GenerateConfig, settings: Mapping[str, Any]
) -> GenerateConfig:
    """Returns settings with others instead: those of decoding, and the trees.

    Raises:
        InputError: If one is unknown or outside its range.
    """
    known = [field.name for field in dataclasses.fields(DecodingConfig)]
    trees = ("tree", "sampled_tree")
    for name in settings:
        if name not in (*known, *trees):
            raise InputError(
                f"{name!r} is no setting; known are {', '.join((*known, *trees))}"
            )
    method = settings.get("method") or config.decoding.method
    config = config.with_method(method)
    given = {key: value for key, value in settings.items() if value is not None}
    decoding = {key: value for key, value in given.items() if key in known}
    return dataclasses.replace(
        config,
        decoding=dataclasses.replace(config.decoding, **decoding | {"method": method}),
        **{key: given[key] for key in trees if key in given},
    )


def of_call(config: GenerateConfig, settings: Mapping[str, Any]) -> GenerateConfig:
    """Returns the settings of one call, with those that it was given.

    Tokens are drawn as the call says, or else by the defaults.

    Raises:
        InputError: If one is unknown or outside its range.
    """
    fields: dict[str, dict[str, Any]] = {"sampling": {}, "decoding": {}}
    for name, value in settings.items():
        table = next((t for t, known in _PER_CALL.items() if name in known), None)
        if table is None:
            known = ", ".join(name for names in _PER_CALL.values() for name in names)
            raise InputError(f"{name!r} is no setting; known are {known}")
        if name == "seed" and value is None:
            value = secrets.randbelow(2**30)  # Every prompt's seed may be given again.
        if value is not None:
            fields[table][name] = value
    sampling = SamplingConfig(**fields["sampling"])
    decoding = dataclasses.replace(config.decoding, **fields["decoding"])
    joined = dataclasses.replace(config, sampling=sampling, decoding=decoding)
    return joined.at(sampling.temperature)


_PER_CALL = {
    "sampling": [field.name for field in dataclasses.fields(SamplingConfig)],
    "decoding": ["max_new_tokens", "max_length", "ignore_eos"],
}
