"""What several tests share."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.decoding.state import DecodeState
from eagle_jax.drafting import TreeDrafter
from eagle_jax.engine.config import PairConfig
from eagle_jax.errors import InputError
from eagle_jax.interface import Draws, Params, PromptChunk
from eagle_jax.models.transformer import Transformer
from eagle_jax.sampling import SamplingParams
from eagle_jax.testing import assert_valid_tree
from eagle_jax.tree import DraftTree


@contextlib.contextmanager
def on_platform(name: str) -> Iterator[None]:
    """What is traced here for the first time is what such a platform would run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            jax.lax, "platform_dependent", lambda *args, **kinds: kinds[name](*args)
        )
        yield


def texts(requests: Requests, state: DecodeState) -> list[list[int]]:
    """The generated tokens of each row."""
    tokens, lengths = np.asarray(state.tokens), np.asarray(state.lengths)
    starts = np.asarray(requests.prompt_lengths)
    return [
        tokens[row, starts[row] : lengths[row]].tolist() for row in range(len(lengths))
    ]


def whole_prompts(
    prompts: jax.Array, lengths: jax.Array, features: jax.Array | None = None
) -> PromptChunk:
    """Prompts `[B, T]` in one chunk, of features `[B, T, F]` that somebody reads."""
    if features is None:
        features = jnp.zeros((*prompts.shape, 1))
    begin = jnp.int32(0)
    return PromptChunk(prompts=prompts, lengths=lengths, begin=begin, features=features)


def make_draws(
    rows: int,
    noise: jax.Array | None = None,
    *,
    temperature: float | Sequence[float] = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
) -> Draws:
    """Draws of one round, each row with a key of its own."""
    return Draws(
        sampling=SamplingParams(
            temperature=jnp.broadcast_to(jnp.array(temperature, jnp.float32), rows),
            top_p=jnp.full(rows, top_p, jnp.float32),
            top_k=jnp.full(rows, top_k, jnp.int32),
            min_p=jnp.full(rows, min_p, jnp.float32),
        ),
        noise=noise,
        keys=jax.random.split(jax.random.key(0), rows),
    )


def decoded_rounds(
    target: Transformer,
    drafter: TreeDrafter,
    params: Params,
    prompt: list[int],
    max_new_tokens: int,
) -> tuple[list[DraftTree], list[int], list[int]]:
    """The trees of all rounds, what was accepted in all but the last, and the text.

    Our last round may be cut by the limit, where the official code overshoots.
    """
    requests = make_requests(
        [prompt], max_new_tokens=max_new_tokens, stop_tokens=[2], prompt_bucket=64
    )
    decoder = Decoder(target=target, drafter=drafter, acceptance="greedy")
    state = speculative.prefill(decoder, params, requests, num_slots=256)
    trees: list[DraftTree] = []
    accepted: list[int] = []
    while bool(state.is_running.any()):
        state, done = speculative.decode_round(decoder, params, state)
        trees.append(jax.tree.map(lambda x: np.asarray(x)[0], done.tree))
        accepted.append(int(np.asarray(done.acceptance.num_accepted)[0]))
    (generated,) = texts(requests, state)
    return trees, accepted[:-1], generated


def check_recorded_rounds(
    target: Transformer, drafter: TreeDrafter, params: Params, recorded: dict[str, Any]
) -> None:
    """Compares trees, what was accepted and the texts with the official code's."""
    for run in recorded["runs"]:
        trees, accepted, generated = decoded_rounds(
            target,
            drafter,
            params,
            run["prompt_ids"],
            recorded["config"]["max_new_tokens"],
        )
        # The official code overshoots the limit; all rounds before are compared.
        assert len(trees) >= len(run["trees"]) - 2
        for tree, official in zip(trees, run["trees"], strict=False):
            assert_valid_tree(tree)
            assert tree.is_node.all()
            assert tree.tokens.tolist() == official["tokens"]
            assert tree.parents.tolist() == official["parents"]
            np.testing.assert_allclose(
                tree.log_values, official["log_values"], atol=1e-4, rtol=0
            )
        assert accepted == run["accept_lengths"][: len(accepted)]
        assert generated == run["generated_ids"][: len(generated)]


def as_tree(paths: list[tuple[int, ...]], num_nodes: int) -> DraftTree:
    """Paths in level order as a tree; the nodes left over are padding."""
    missing = num_nodes - len(paths)
    parents = [paths.index(path[:-1]) if path else -1 for path in paths]
    return DraftTree(
        tokens=jnp.array([p[-1] if p else 9 for p in paths] + [0] * missing, jnp.int32),
        parents=jnp.array(parents + [-1] * missing, jnp.int32),
        log_values=jnp.where(jnp.arange(num_nodes) < len(paths), 0.0, -jnp.inf),
        is_node=jnp.arange(num_nodes) < len(paths),
    )


def refused(act: Callable[[], object], *named: str) -> str:
    """Returns the one line of the refusal, which names all of these."""
    with pytest.raises(InputError) as error:
        act()
    message = str(error.value)
    assert "\n" not in message, message
    for name in named:
        assert name in message, message
    return message


def file_bytes(folder: Path) -> dict[str, bytes]:
    """What all files in a folder and in those below hold, by name."""
    return {name: (folder / name).read_bytes() for name in file_names(folder)}


def file_names(folder: Path) -> list[str]:
    """The names of all files in a folder and in those below, sorted."""
    paths = sorted(folder.rglob("*"))
    return [path.relative_to(folder).as_posix() for path in paths if path.is_file()]


def settings_of(
    tree: Any = None, *, method: str = PairConfig.method, **more: Any
) -> PairConfig:
    """Settings in float32; of a dynamic tree a method takes what it reads."""
    if tree is None or type(tree) is TreeConfig:
        config = PairConfig(dtype="float32", tree=tree).with_method(method)
    else:
        config = PairConfig(dtype="float32", method=method, tree=tree)
    return config.with_(**more)
