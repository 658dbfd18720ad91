"""All kinds of heads, and whose a folder or a config is."""

import contextlib
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints.hf_fields import Fields
from eagle_jax.checkpoints.load import open_target
from eagle_jax.checkpoints.weights import Weights
from eagle_jax.errors import InputError
from eagle_jax.heads.block.head import DFlash, DSpark
from eagle_jax.heads.eagle.head import Eagle
from eagle_jax.heads.eagle3.head import Eagle3
from eagle_jax.heads.head import Head
from eagle_jax.heads.hydra.head import Hydra
from eagle_jax.heads.medusa.head import Medusa
from eagle_jax.models.transformer import TransformerConfig

HEADS: dict[str, Head] = {
    head.name: head
    for head in (Medusa(), Hydra(), DFlash(), DSpark(), Eagle3(), Eagle())
}
"""All kinds of heads by name."""


def find_head(folder: Path) -> Head | None:
    """Returns the kind of head that a folder holds; `None` for a whole model.

    Args:
        folder: A folder that holds `config.json` and weights.

    Raises:
        InputError: If these cannot be read.
    """
    fields = Fields.read(folder)
    return next((head for head in HEADS.values() if head.is_in(fields)), None)


def open_whole(folder: Path) -> tuple[TransformerConfig, Weights]:
    """Opens a target, see `open_target`; a head that is given as one is called so."""
    try:
        return open_target(folder)
    except InputError as error:
        refusal = error
    with contextlib.suppress(InputError):
        if head := find_head(folder):
            hint = "not a target; give it as `draft`, and its model as `target`"
            refusal = InputError(f"{folder} holds {head.title}, {hint}")
    raise refusal


def find_kind(config: Any) -> Head | None:
    """Returns the kind of head whose sizes these are, `None` if they are no head's."""
    return {head.config: head for head in HEADS.values()}.get(type(config))


def head_of(config: Any) -> Head:
    """Returns the kind of head whose sizes these are."""
    found = find_kind(config)
    assert found is not None, config
    return found
