"""Training a small target further, together with its head."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from eagle_jax import checkpoints
from eagle_jax.checkpoints import Export
from eagle_jax.heads import export_head
from eagle_jax.heads.eagle import EagleHead, EagleHeadConfig, EagleLoss
from eagle_jax.heads.rows import PackedRows
from eagle_jax.models.transformer import TransformerConfig
from examples.embedded_pair import together as command
from examples.embedded_pair.pair_step import (
    PairParams,
    PairRows,
    own_rows,
    pair_losses,
    source_rows,
)
from examples.embedded_pair.training import next_token_loss
from tests.conftest import Main

CONFIG = """
[run]
steps = 4
batch_size = 16
row_length = 16
eval_every = 2
eval_rows = 2

[loss]
token_loss = "alpha"
"""
LOSS = EagleLoss(token_loss="alpha")


@pytest.fixture(scope="module")
def together() -> Main:
    return command.main


@pytest.fixture(scope="module")
def sizes(run: Path) -> tuple[TransformerConfig, EagleHead]:
    target, _ = checkpoints.load_target(run / "model")
    config = EagleHeadConfig(
        layer=target.layer, vocab_size=target.vocab_size, max_positions=64
    )
    return target, EagleHead(config=config)


@pytest.fixture(scope="module")
def pair(run: Path, sizes: tuple[TransformerConfig, EagleHead]) -> PairParams:
    head = sizes[1].init(jax.random.key(0), "float32")
    return PairParams(target=checkpoints.load_target(run / "model")[1], head=head)


@pytest.fixture(scope="module")
def begun(
    run: Path,
    flags: list[str],
    sizes: tuple[TransformerConfig, EagleHead],
    pair: PairParams,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[str]:
    folder = tmp_path_factory.mktemp("together")
    export_head(
        folder / "head",
        sizes[1],
        pair.head,
        Export(with_pickle=False),
    )
    texts = [json.dumps({"text": f"def f(x): return {i}\n"}) for i in range(80)]
    (folder / "texts.jsonl").write_text("\n".join(texts))
    (folder / "config.toml").write_text(CONFIG)
    library = flags[flags.index("--library") + 1]
    return [
        *("--run", str(run), "--head", f"{folder}/head", "--library", library),
        *("--texts", f"{folder}/texts.jsonl", "--config", f"{folder}/config.toml"),
    ]


def losses(
    params: PairParams,
    batch: PairRows,
    sizes: tuple[TransformerConfig, EagleHead],
) -> tuple[jax.Array, jax.Array]:
    target, head = sizes
    run = functools.partial(pair_losses, target=target, head=head, loss=LOSS)
    return jax.jit(run)(params, batch, None)[:2]


def rows() -> np.ndarray:
    return np.random.default_rng(0).integers(1, 256, (2, 17)).astype(np.int32)


def own_texts() -> PairRows:
    shape = (2, 16)
    packed = PackedRows(
        tokens=rows()[:, :-1],
        segments=np.ones(shape, np.int32),
        positions=np.broadcast_to(np.arange(16, dtype=np.int32), shape),
        loss_mask=np.ones(shape, np.bool_),
    )
    return own_rows(packed)


def largest(gradients: Any) -> float:
    return max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(gradients))


def test_a_target_learns_the_next_tokens_of_source_alone(
    pair: PairParams, sizes: tuple[TransformerConfig, EagleHead]
) -> None:
    source = source_rows(rows())
    read = jax.jit(next_token_loss, static_argnums=2)
    wanted = read(pair.target, jnp.asarray(rows()), sizes[0])
    np.testing.assert_allclose(losses(pair, source, sizes)[0], wanted, rtol=1e-5)
    both = jax.tree.map(lambda *x: np.concatenate(x), source, own_texts())
    np.testing.assert_allclose(losses(pair, both, sizes)[0], wanted, rtol=1e-5)
    assert float(losses(pair, own_texts(), sizes)[0]) == 0


def test_what_a_head_needs_reaches_every_layer_of_its_target(
    pair: PairParams, sizes: tuple[TransformerConfig, EagleHead]
) -> None:
    def drafting(params: PairParams) -> jax.Array:
        return losses(params, own_texts(), sizes)[1]

    gradients = jax.jit(jax.grad(drafting))(pair)
    for layer in gradients.target.layers:
        assert largest(layer) > 0
    assert largest(gradients.head) > 0


def test_the_new_pair_drafts_and_keeps_its_targets_text(
    main: Main, together: Main, begun: list[str], run: Path, tmp_path: Path
) -> None:
    output, out = tmp_path / "pair", tmp_path / "out.json"
    assert together([*begun, "--output", str(output)]) == 0
    found = safetensors.numpy.load_file(output / "model" / "model.safetensors")
    before = safetensors.numpy.load_file(run / "model" / "model.safetensors")
    assert any((found[name] != before[name]).any() for name in found)
    pair = ["--target", f"{output}/model", "--draft", f"{output}/head"]
    tree = ["--num-nodes", "4", "--depth", "2", "--width", "2", "--max-new-tokens", "8"]
    generate = [*pair, *tree, "--prompt", "def f", "--compare", "--json", str(out)]
    assert main(generate) == 0
    assert json.loads(out.read_text())["totals"]["identical"] is True


def test_a_target_can_be_made_deeper_first(
    together: Main,
    begun: list[str],
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    deeper = [*begun, "--num-layers", "4", "--output", f"{tmp_path}/pair"]
    assert together(deeper) == 0
    config, found = checkpoints.load_target(tmp_path / "pair" / "model")
    assert config.num_layers == 4
    # Had it begun with random weights, its own would be unlike the first run's.
    before = checkpoints.load_target(run / "model")[1].embedding
    difference = jnp.mean(jnp.abs(found.embedding - before))
    assert float(difference) < 0.1 * float(jnp.mean(jnp.abs(before)))
    assert together([*begun, "--output", f"{tmp_path}/pair", "--resume"]) == 2
    assert "log.jsonl: num_layers was" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["--run", "{tmp}"], "holds no model/"),
        (["--batch-size", "15"], "batch_size = 15 must be even"),
        (["--batch-size", "4000"], "too few for 4000 rows"),
        (["--num-layers", "3"], "a multiple of 2"),
        (["--num-layers", "0"], "a multiple of 2"),
        (["--head", "{tmp}"], "config.json"),
        (["--resume"], "holds no run"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    together: Main,
    begun: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: list[str],
    told: str,
) -> None:
    given = [change.format(tmp=tmp_path) for change in changes]
    assert together([*begun, "--output", f"{tmp_path}/run", *given]) == 2
    assert told in capsys.readouterr().err


def test_a_head_with_an_embedding_table_of_its_own_is_refused(
    together: Main,
    begun: list[str],
    sizes: tuple[TransformerConfig, EagleHead],
    pair: PairParams,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = pair.target.embedding + 1
    head = dataclasses.replace(pair.head, embedding=table)
    export_head(tmp_path / "head", sizes[1], head, Export(with_pickle=False))
    given = ["--head", f"{tmp_path}/head", "--output", f"{tmp_path}/run"]
    assert together([*begun, *given]) == 2
    assert "an embedding table of its own" in capsys.readouterr().err
