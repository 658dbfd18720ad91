"""REST: tokens that followed the last words in a given text may follow them again.

Retrieval-based speculative decoding (He et al. 2023, arXiv 2311.08252) in fixed shapes:
prompt lookup over a text file and, after it, the text so far. The published code keeps
a suffix array of gigabytes; here every round compares the text's end with every token
of the file, so that files of up to a million tokens pay.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.config import require
from eagle_jax.drafting.lookup import LookupConfig, LookupDrafter, LookupState
from eagle_jax.interface import Draws
from eagle_jax.parsing import read_bytes
from eagle_jax.tree import DraftTree

_MOST_TOKENS = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestConfig(LookupConfig):
    """Prompt lookup over a file, see `LookupConfig`.

    Attributes:
        datastore: The text file that is searched, in UTF-8.
    """

    datastore: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestDrafter(LookupDrafter):
    """Retrieval behind the `Drafter` protocol; it has no parameters.

    Attributes:
        datastore: The tokens that are searched before the text, as bytes of int32:
            they are part of the compiled program.
    """

    datastore: bytes = dataclasses.field(default=b"", repr=False)

    def propose(
        self, params: Any, state: LookupState, root: jax.Array, draws: Draws
    ) -> tuple[DraftTree, LookupState]:
        """See `Drafter.propose`."""
        stored = jnp.asarray(np.frombuffer(self.datastore, np.int32))
        stored = jnp.broadcast_to(stored, (root.shape[0], stored.size))
        searched = LookupState(
            tokens=jnp.concatenate([stored, state.tokens], axis=1),
            length=stored.shape[1] + state.length,
        )
        return self.draft(searched, root)[0], state


def make_rest(settings: RestConfig, encode: Callable[[str], list[int]]) -> RestDrafter:
    """Returns the drafter that searches the file of some settings.

    Args:
        settings: The settings; as many matches are followed as `num_nodes` allows.
        encode: The function from a text to its token ids.

    Raises:
        InputError: If there is no such file, it is no text in UTF-8, or it has no token
            or more than 2**20.
    """
    path = settings.datastore
    require(path is not None, "datastore", path, "a text file")
    file = Path(path or "")
    stamp = file.stat().st_mtime_ns if file.is_file() else 0
    return RestDrafter(
        depth=settings.levels,
        num_matches=settings.num_matches,
        max_ngram=settings.max_ngram,
        datastore=_read(file, stamp, encode),
    )


@functools.lru_cache(maxsize=4)
def _read(path: Path, stamp: int, encode: Callable[[str], list[int]]) -> bytes:
    """Returns a file's tokens, encoded once for every time that it was written."""
    content = read_bytes(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = None
    require(text is not None, "datastore", path, "a text in UTF-8")
    tokens = encode(text or "")
    wanted = f"a text of 1 to {_MOST_TOKENS} tokens, but has {len(tokens)}"
    require(1 <= len(tokens) <= _MOST_TOKENS, "datastore", path, wanted)
    return np.array(tokens, np.int32).tobytes()
