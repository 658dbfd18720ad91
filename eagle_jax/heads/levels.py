"""What Medusa's and Hydra's heads have in common: one of them drafts one level."""

import dataclasses
import re
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from eagle_jax.checkpoints.export_files import WRITTEN_BY, Export
from eagle_jax.checkpoints.hf_fields import Fields
from eagle_jax.checkpoints.weights import Weights
from eagle_jax.heads.head import Head, check_size
from eagle_jax.heads.settings import LevelLoss, LevelSettings
from eagle_jax.models.transformer import Tables, TransformerConfig, output_head


class LevelHeads(Head):
    """See `Head`.

    Attributes:
        published: The published numbers of heads, and of blocks of each.
    """

    loss_settings = LevelLoss
    is_ranked = False
    published: ClassVar[tuple[int, int]]

    def is_in(self, fields: Fields) -> bool:
        """See `Head.is_in`; they have a file, and fields, of their own."""
        files = fields.path.parent.glob(f"{self.name}_lm_head.*")
        return f"{self.name}_num_heads" in fields.values or any(files)

    def check(self, target: TransformerConfig, config: Any) -> None:
        """See `Head.check`."""
        check_size("hidden_size", config.hidden_size, target.layer.hidden_size)
        check_size("vocab_size", config.vocab_size, target.vocab_size)

    def new(
        self, target: TransformerConfig, settings: LevelSettings, length: int
    ) -> Any:
        """See `Head.new`."""
        del length
        num_heads, num_layers = self.published
        return self.config(
            num_heads=settings.draft_heads or num_heads,
            num_layers=settings.head_layers or num_layers,
            hidden_size=target.layer.hidden_size,
            vocab_size=target.vocab_size,
        )

    def fields(self, config: Any, how: Export) -> dict[str, Any]:
        """See `Head.fields`."""
        return {
            f"{self.name}_num_heads": config.num_heads,
            f"{self.name}_num_layers": config.num_layers,
            "base_model_name_or_path": how.base_model,
            "torch_dtype": how.dtype,
            "written_by": WRITTEN_BY,
        }

    def begin(self, params: Any, tables: Tables, tokens: jax.Array | None) -> Any:
        """See `Head.begin`."""
        del tokens
        table = output_head(tables)

        def begin(one: Any) -> Any:
            if one.output_head is None:
                return one
            own = jnp.asarray(table, one.output_head.dtype)
            return dataclasses.replace(one, output_head=own)

        return dataclasses.replace(params, heads=tuple(map(begin, params.heads)))

    def tie(self, params: Any) -> Any:
        """See `Head.tie`; residual blocks after one another are all the first.

        The official code repeats one module, so its files hold one block under several
        names; the first one's gradient is then the sum over all places.
        """

        def tie(one: Any) -> Any:
            return dataclasses.replace(one, blocks=one.blocks[:1] * len(one.blocks))

        return dataclasses.replace(params, heads=tuple(map(tie, params.heads)))

    def count(self, fields: Fields, files: Weights, block: str) -> tuple[int, int]:
        """Returns the numbers of heads, and of blocks of the first.

        Published fields name too few heads: the tensors decide.

        Args:
            fields: The fields of `config.json`.
            files: The folder's tensors.
            block: The pattern of the matrix of one block, whose first group is the
                number of the head.

        Raises:
            InputError: If `config.json` names another number of blocks.
        """
        found = [re.fullmatch(block, name) for name in files.names()]
        heads = [match[1] for match in found if match]
        num_layers, name = heads.count("0"), f"{self.name}_num_layers"
        if fields.size(name, default=num_layers) != num_layers:
            raise fields.refusal(
                f"{name} = {fields.get(name)}, but the file has {num_layers} for each "
                "head"
            )
        return len(set(heads)), num_layers


def num_rows(files: Weights, name: str) -> int:
    """Returns the first size of a tensor as files hold it; 0 where it has no axis.

    Args:
        files: The checkpoint.
        name: The tensor's name, one that is there.
    """
    shape = files.shape(name)
    return sum(shape[:1])
