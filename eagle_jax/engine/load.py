"""Pairs from names or folders."""

import warnings
from reprlib import repr as short
from typing import Any, Literal, Unpack

from eagle_jax import assets
from eagle_jax.config import CONFIGS, load_config
from eagle_jax.engine.config import PairConfig
from eagle_jax.engine.keywords import PairKeywords, shown
from eagle_jax.engine.pair import Pair
from eagle_jax.engine.pairs import open_pair
from eagle_jax.engine.request import checkpoint_defaults
from eagle_jax.errors import InputError
from eagle_jax.methods import METHODS
from eagle_jax.parallel import MeshShape, shard_pair

_shown = shown(PairKeywords, PairConfig, *(x.settings for x in METHODS.values()))


@_shown
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
        source, sharding = open_pair(target, draft, config), None
        if mesh is not None:
            rows = mesh.data if rows is None else rows
            sharding = shard_pair(mesh, source.config, batch_size=rows)
        defaults: dict[str, Any] = {}
        if source.folder is not None and generation_config == "auto":
            defaults = checkpoint_defaults(source.folder, source.config.vocab_size)
        if defaults:
            said = ", ".join(f"{name} {short(x)}" for name, x in defaults.items())
            warnings.warn(
                f"{target} asks for {said} (generation_config.json), which holds where "
                'a request says nothing else; generation_config="none" ignores it',
                stacklevel=2,
            )
        pair = Pair(source, config, sharding, defaults)
        return pair if is_lazy else pair.load()
    except ModuleNotFoundError as error:
        raise InputError(
            f"the package {error.name} is not installed, which reading checkpoints "
            "needs; pip install '.[hf]' in the clone brings it"
        ) from error


@_shown
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
