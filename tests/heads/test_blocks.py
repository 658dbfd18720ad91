"""Block heads, scored by plain PyTorch from published files."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.drafting import TreeDrafter
from eagle_jax.engine.open import open_pair
from tests.conftest import NEEDS_TORCH
from tests.helpers import settings_of

torch = pytest.importorskip("torch", reason=NEEDS_TORCH)

# It imports torch itself: without it the line above skips the file first.
from tests.heads import judged_blocks  # noqa: E402
from tests.heads.judged_heads import sizes_of  # noqa: E402

# Their files hold copies of the target's tables, too.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.* holds tensors that are not read"),
]

MASK, BLOCK, ROUNDS = 3, 5, 3
FEATURES = [-1, 1, 2]
FIELDS: dict[str, dict[str, Any]] = {
    "dflash": {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"target_layer_ids": FEATURES, "mask_token_id": MASK},
    },
    "dspark": {
        "architectures": ["Qwen3DSparkModel"],
        "target_layer_ids": FEATURES,
        "mask_token_id": MASK,
        "markov_rank": judged_blocks.RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "num_anchors": 512,
    },
}


@pytest.mark.parametrize("kind", FIELDS)
def test_blocks_and_their_trees_are_those_of_plain_pytorch(
    shared: Path, tmp_path: Path, kind: str
) -> None:
    """Over three rounds, the text growing by more than a token in some of them."""
    folder = shared / "models" / "stories260K"
    sizes, is_next = sizes_of(folder), kind == "dspark"
    state = judged_blocks.block_state(sizes, len(FEATURES), has_markov=is_next)
    fields = FIELDS[kind] | {"num_target_layers": 5}
    head = judged_blocks.write_block(tmp_path / "head", state, sizes, BLOCK, **fields)
    pair = open_pair(str(folder), str(head), settings_of(method=kind)).load()
    stored = load_file(folder / "model.safetensors")
    table = torch.from_numpy(stored["model.embed_tokens.weight"])
    lm_head = torch.from_numpy(stored.get("lm_head.weight", table.numpy()))
    depth, first = (BLOCK, 0) if is_next else (BLOCK - 1, 1)
    # As wide as a tree of so few nodes can be.
    tree, whole = TreeConfig(num_nodes=9, depth=depth, width=8), pair.drafter
    assert isinstance(whole, TreeDrafter)
    drafter, model = dataclasses.replace(whole, tree=tree), whole.model
    decoder = Decoder(target=pair.target, drafter=drafter, acceptance="greedy")
    requests = make_requests([[1, 400, 30, 4]], max_new_tokens=40, prompt_bucket=16)
    held = speculative.prefill(decoder, pair.params, requests, num_slots=96)
    for _ in range(ROUNDS):
        text = held.tokens[:, : int(held.lengths[0])]
        positions = jnp.arange(text.shape[1])[None]
        empty = pair.target.init_cache(1, 0)
        read = pair.target.forward(pair.params.target, text, positions, None, empty)
        # The root is not read yet: what is known is what stands before it.
        features = torch.from_numpy(np.array(read.features[0, :-1]))
        root = int(text[0, -1])
        embedded = table[[root, *[MASK] * (BLOCK - 1)]]
        _, rows = judged_blocks.block_rows(state, sizes, features, embedded, lm_head)

        def log_probs(level: int, before: int, rows: Any = rows) -> Any:
            added = judged_blocks.markov(state, before)
            return (rows[first + level] + added).log_softmax(-1)

        drafting = pair.params.drafter, held.drafter_state, jnp.array([root])
        output, _ = model.read(*drafting)
        for level in range(depth):
            # As if the root stood before every level.
            found = model.logits(pair.params.drafter, output, level=level + 1)
            expected = rows[first + level] + judged_blocks.markov(state, root)
            np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-5)
        held, done = speculative.decode_round(decoder, pair.params, held)
        drafted = jax.tree.map(lambda x: np.asarray(x)[0], done.tree)
        paths: list[tuple[int, ...]] = [()]
        for parent, token in zip(drafted.parents[1:], drafted.tokens[1:], strict=True):
            paths.append((*paths[parent], int(token)))
        wanted = judged_blocks.best_tree(root, depth, tree.num_nodes - 1, log_probs)
        assert set(paths[1:]) == wanted
