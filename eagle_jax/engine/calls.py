"""One call of a pair: an engine with the rows and the lengths that its texts need."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from eagle_jax.checkpoints import check_max_length
from eagle_jax.config import require
from eagle_jax.decoding.requests import bucket_rows
from eagle_jax.engine.engine import Engine
from eagle_jax.engine.text import Text
from eagle_jax.errors import InputError
from eagle_jax.models.transformer import Transformer

if TYPE_CHECKING:
    from eagle_jax.engine.pair import Pair

_MOST_ROWS = 8


def engine_for(
    pair: "Pair", texts: Sequence[Text], batch_size: int | None = None
) -> Engine:
    """Returns an engine that holds texts, with the rows and the lengths they need.

    Args:
        pair: What writes.
        texts: The texts; those that share a constraint are written together.
        batch_size: The most texts that are written together; `None` for 8.

    Raises:
        InputError: If a prompt leaves no room for a token, the rounds cannot be in
            memory, or an expression or schema cannot be used.
    """
    engine = empty_engine_for(pair, texts, batch_size)
    grammars = [text.needs.grammar for text in texts]
    for text in sorted(texts, key=lambda text: grammars.index(text.needs.grammar)):
        engine.add(text, name=f"prompt {text.index}")
    return engine


def empty_engine_for(
    pair: "Pair", texts: Sequence[Text], batch_size: int | None = None
) -> Engine:
    """Returns an engine for texts like these, see `engine_for`."""
    limit = _MOST_ROWS if batch_size is None else batch_size
    require(limit >= 1, "batch_size", limit, "at least 1")
    most = -(-limit // pair.num_parts)
    each = -(-len(texts) // pair.num_parts)
    rows, samples = min(bucket_rows(each), most), texts[0].request.n
    if samples <= most and all(text.request.n == samples for text in texts):
        # As many as read each prompt once.
        rows = samples * min(bucket_rows(-(-each // samples)), most // samples)
    longest = _longest(pair, texts)
    return pair.engine(batch_size=pair.num_parts * rows, max_length=longest)


def _longest(pair: "Pair", texts: Sequence[Text]) -> int:
    """Returns the most tokens of a text, prompt and output together."""
    limit = pair.config.max_length
    if limit is not None and isinstance(pair.target, Transformer):
        check_max_length(pair.sizes, limit)
    needed = max(len(x.prompt_ids) + x.request.max_new_tokens for x in texts)
    # More slots would cost time for nothing.
    max_length = min(limit or pair.max_positions, needed)
    for text in texts:
        if (size := len(text.prompt_ids)) >= max_length:
            raise InputError(
                f"prompt {text.index} has {size} tokens, but prompt and output "
                f"together may have {max_length}; shorten it or raise `max_length` "
                f"(the target has {pair.max_positions} positions)"
            )
    return max_length
