"""Tasks of several texts each, side by side through the rows of one engine."""

from collections.abc import Generator

from eagle_jax.engine import Engine, Pair, PairConfig, Text
from eagle_jax.engine.converse import converse
from eagle_jax.interface import Params
from eagle_jax.models.transformer import Transformer
from tests import tiny

TARGET = Transformer(config=tiny.TARGET)
PARAMS = Params(target=tiny.target_params())
PAIR = Pair.of(
    TARGET, PARAMS, max_positions=200, config=PairConfig(method="autoregressive")
)


def task(engine: Engine, sizes: list[int]) -> Generator[Text, Text, list[int]]:
    """Texts of so many tokens, one after the other; returns their sizes."""
    found: list[int] = []
    for size in sizes:
        request = engine.pair.request(max_new_tokens=size)
        done = yield engine.pair.text([3, 5], request)
        found.append(len(done.token_ids))
    return found


def test_a_row_that_is_free_is_taken_while_others_are_written() -> None:
    """However few texts wait when the first ones begin together."""
    sizes = [[60], [2], [3, 4], [2], [5]]
    for rows in (2, 3):
        engine = PAIR.engine(batch_size=rows, max_length=100)
        tasks = (task(engine, one) for one in sizes)
        ended = dict(converse(engine, tasks, ahead=rows))
        assert ended == dict(enumerate(sizes))
        assert [*ended][-1] == 0, "the long one ends last"
