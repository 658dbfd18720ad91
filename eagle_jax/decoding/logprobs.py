"""Log-probabilities of a text's tokens, and of the likeliest ones beside them.

They are the target's own: no processor, constraint, temperature or filter changes them.
They are taken where the logits are: in the prefill, in each round and in each step. A
decoder that nobody asked for them compiles none of it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.config import require_counts
from eagle_jax.decoding.windows import write_window
from eagle_jax.errors import InputError
from eagle_jax.interface import PromptChunk
from eagle_jax.tree.top_k import top_k


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogprobsConfig:
    """Which log-probabilities are wanted; a static setting.

    Attributes:
        num_top: The number of likeliest tokens beside each token, `n`.
        prompt: Whether those of the prompt's tokens are wanted too.

    Raises:
        InputError: If a setting is outside its range.
    """

    num_top: int = 0
    prompt: bool = False

    def __post_init__(self) -> None:
        """Refuses settings outside their range."""
        require_counts(self, num_top=0)


@struct.dataclass(kw_only=True)
class Logprobs:
    """The log-probabilities of a batch's tokens, each in the place of its token.

    Undefined where there are none: after a text's end, at a prompt's first token, and
    at all of a prompt's unless they were asked for.

    Attributes:
        own: `[B, S]` float32, of the tokens themselves.
        top_tokens: `[B, S, n]` int32, the likeliest tokens in their places, best first.
        top: `[B, S, n]` float32, the log-probabilities of these.
        config: What was asked for. Static.
    """

    own: jax.Array
    top_tokens: jax.Array
    top: jax.Array
    config: LogprobsConfig = struct.field(pytree_node=False)

    def after_chunk(self, chunk: PromptChunk, logits: jax.Array) -> "Logprobs":
        """Writes those of the tokens that follow upon a chunk's, up to a prompt's end.

        Args:
            chunk: The chunk, whose last token is followed by the next chunk's first.
            logits: `[B, C, V]` float32, the target's after its tokens.
        """
        size = logits.shape[1]
        # What comes round to the end follows upon no prompt's last token.
        following = jnp.roll(chunk.prompts, -1, axis=1)
        tokens = jax.lax.dynamic_slice_in_dim(following, chunk.begin, size, axis=1)
        count = jnp.clip(chunk.lengths - 1 - chunk.begin, 0, size)
        begin = jnp.full_like(chunk.lengths, chunk.begin + 1)
        return self.written(logits, tokens, begin, count)

    def written(
        self, logits: jax.Array, tokens: jax.Array, begin: jax.Array, count: jax.Array
    ) -> "Logprobs":
        """Writes those of some tokens.

        Args:
            logits: `[B, W, V]` float32, the target's before them.
            tokens: `[B, W]` int32, the tokens, padded at the end.
            begin: `[B]` int32, the place of each row's first.
            count: `[B]` int32, real tokens per row.

        Raises:
            InputError: If more of the likeliest are wanted than there are tokens.
        """
        num_top, num_tokens = self.config.num_top, logits.shape[-1]
        if num_top > num_tokens:
            raise InputError(
                f"num_top = {num_top} log-probabilities were asked for, but the target "
                f"knows {num_tokens} tokens"
            )
        total = jax.nn.logsumexp(logits, axis=-1)
        own = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0] - total
        new = {"own": own}
        if num_top:
            best, new["top_tokens"] = top_k(logits, num_top)
            new["top"] = best - total[..., None]
        new = {
            name: write_window(getattr(self, name), values, begin, count)
            for name, values in new.items()
        }
        return dataclasses.replace(self, **new)


def no_logprobs(
    config: LogprobsConfig | None, batch: int, num_slots: int
) -> Logprobs | None:
    """Returns those of texts without a token; `None` unless they are asked for."""
    if config is None:
        return None
    top = batch, num_slots, config.num_top
    return Logprobs(
        own=jnp.zeros((batch, num_slots), jnp.float32),
        top_tokens=jnp.zeros(top, jnp.int32),
        top=jnp.zeros(top, jnp.float32),
        config=config,
    )
