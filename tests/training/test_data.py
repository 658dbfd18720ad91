"""The features that a run keeps on disk, and the prompts that it is measured on."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.training.data import cached_features, prompts_of
from eagle_jax.training.encode import EncodedExample
from eagle_jax.training.packing import PackedRows
from tests.helpers import refused

TOKENS = np.arange(66, dtype=np.int32).reshape(11, 6)
ONES = np.ones_like(TOKENS)
ROWS = PackedRows(tokens=TOKENS, segments=ONES, positions=ONES, loss_mask=ONES > 0)


class Target:
    """Computes features that name their token and column."""

    def __init__(self, dtype: str = "float32", fail_after: int = 99) -> None:
        self.sizes: list[int] = []
        self._dtype, self._left = jnp.dtype(dtype), fail_after

    def __call__(self, rows: PackedRows) -> np.ndarray:
        if len(self.sizes) == self._left:
            raise KeyboardInterrupt
        self.sizes.append(len(rows))
        return (rows.tokens[..., None] + np.arange(4) / 16).astype(self._dtype)


def kept(path: Path, compute: Target, **changes: Any) -> np.ndarray:
    given: dict[str, Any] = {"batch_size": 4, "dtype": "float32"}
    given |= {"progress": lambda done: None} | changes
    return cached_features(path, ROWS, compute, **given)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 50])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_read_is_what_was_computed(
    tmp_path: Path, batch_size: int, dtype: str
) -> None:
    path, compute, seen = tmp_path / "features.npy", Target(dtype), []
    given: dict[str, Any] = {"batch_size": batch_size, "dtype": dtype}
    found = kept(path, compute, progress=seen.append, **given)
    chosen = np.array([7, 0, 10, 7, 3])
    assert found.dtype == dtype
    np.testing.assert_array_equal(found[chosen], Target(dtype)(ROWS)[chosen])
    assert set(compute.sizes) == {batch_size}  # One compilation.
    assert seen == sorted(seen) and seen[-1] == len(ROWS)
    again = Target(dtype)
    np.testing.assert_array_equal(kept(path, again, **given), found)
    assert again.sizes == []


def test_features_are_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "features.npy"
    with pytest.raises(KeyboardInterrupt):
        kept(path, Target(fail_after=1))
    assert not path.exists()
    np.testing.assert_array_equal(kept(path, Target()), Target()(ROWS))
    path.write_bytes(path.read_bytes()[:-8])
    refused(lambda: kept(path, Target()), str(path), "remove it and go on")


def test_prompts_end_where_the_answer_begins() -> None:
    def sample(*mask: int) -> EncodedExample:
        tokens = np.arange(len(mask), dtype=np.int32)
        return EncodedExample(tokens=tokens, loss_mask=np.array(mask, bool))

    chat, plain = sample(0, 0, 0, 0, 1, 1), sample(*[0] + [1] * 7)
    long = sample(*[0] + [1] * 40)
    found = prompts_of([chat, plain, sample(0, 1), long], count=9, max_tokens=20)
    assert [len(prompt) for prompt in found] == [4, 4, 1, 16]
    assert found[0] == [0, 1, 2, 3]
    assert prompts_of([chat] * 5, count=2, max_tokens=4) == [[0, 1, 2, 3]] * 2
    assert prompts_of([chat, sample(0, 1)], count=2, max_tokens=3) == [[0]]
