"""Training a head: its sizes, and what is refused before anything is trained."""

import dataclasses
import functools
import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from eagle_jax import checkpoints
from eagle_jax.config import StaticConfig, TreeConfig
from eagle_jax.engine import load_pair
from eagle_jax.engine.open import open_pair
from eagle_jax.heads import HEADS, export_head
from eagle_jax.heads.eagle.loss import EagleLoss
from eagle_jax.heads.eagle3.loss import Eagle3Loss
from eagle_jax.logs import JsonLines
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import unembed_with
from eagle_jax.parallel import MeshShape
from eagle_jax.training import trainer
from eagle_jax.training.checkpoint import FEATURES, LOG
from eagle_jax.training.config import DataConfig, RunConfig, TrainConfig, new_head
from eagle_jax.training.conversations import fingerprint
from eagle_jax.training.head import export_checkpoint
from eagle_jax.training.packing import rows_at
from eagle_jax.training.step import eval_step, init_state, read_target
from eagle_jax.training.trainer import Trained, TrainJob, train_head
from tests import tiny
from tests.helpers import file_bytes, refused

TREE = TreeConfig(num_nodes=5, depth=2, width=2)
CONFIG = TrainConfig(data=DataConfig(row_length=32), run=RunConfig(batch_size=1))
# One step that changes no weight.
STILL: dict[str, Any] = {"steps": 1, "learning_rate": 1e-30, "tree": TREE}
STILL |= {"eval_prompts": 1, "eval_new_tokens": 4}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text((json.dumps({"text": "ten hats in the rain"}) + "\n") * 9)
    return path


def config(**changes: Any) -> TrainConfig:
    """The settings, but for fields of any of their tables."""
    tables = {}
    for name in ("data", "optimizer", "run"):
        table = getattr(CONFIG, name)
        own = {field.name for field in dataclasses.fields(table)} & changes.keys()
        values = {field: changes[field] for field in own}
        tables[name] = dataclasses.replace(table, **values)
    return dataclasses.replace(CONFIG, **tables)


def train(pair: Path, texts: Path, output: Path, **given: Any) -> Trained:
    """Trains on one device, with fields of a job and of the settings' tables."""
    names = {field.name for field in dataclasses.fields(TrainJob)} & given.keys()
    fields = {"data": [texts], "mesh": MeshShape(data=1)}
    fields |= {name: given.pop(name) for name in names}
    tables = {name: given.pop(name) for name in ("head", "loss", "tree") & given.keys()}
    job = TrainJob(target=str(pair / "target"), output=output, **fields)
    if "head" in tables:
        tables = {"loss": None} | tables
    wanted = dataclasses.replace(config(**given), **tables)
    return train_head(job, wanted)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"data": [Path("missing.jsonl")]}, "missing.jsonl: it is no file"),
        ({"row_length": 4096}, "row_length = 4096 is more than the target's 256"),
        ({"batch_size": 4000}, "batch_size = 4000"),
        ({"mesh": MeshShape(data=64, tensor=4)}, "for 256 devices, but there are"),
        ({"resume": True}, "holds no run"),
        ({"resume": True, "overwrite": True}, "exclude each other"),
    ],
)
def test_what_cannot_be_trained_is_refused_and_leaves_nothing(
    tiny_pair: Path, data: Path, tmp_path: Path, given: Any, named: str
) -> None:
    refused(lambda: train(tiny_pair, data, tmp_path / "run", **given), named)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def begun(tiny_pair: Path, data: Path, tmp_path: Path) -> Path:
    """The mark of a run that has begun."""
    identity = {
        "target": str((tiny_pair / "target").resolve()),
        "begin_with": None,
        "data": [fingerprint(data)],
        "held_out_data": [],
        "settings": dataclasses.asdict(config(dtype="float32")),
    }
    (tmp_path / "run").mkdir()
    JsonLines(tmp_path / "run" / LOG, identity).close()
    return tmp_path / "run"


def test_a_resumed_run_keeps_its_settings_data_and_target(
    tiny_pair: Path, chat_pair: Path, data: Path, tmp_path: Path, begun: Path
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"text": "hats " * 9}) + "\n")
    table: list[tuple[dict[str, Any], str]] = [
        ({"seed": 1}, "settings: run: seed was 0 and is 1 now"),
        ({"learning_rate": 0.5}, "optimizer: learning_rate was 3e-05 and is 0.5"),
        ({"data": [other]}, "data was"),
        ({"held_out_data": [data]}, "held_out_data was"),
        ({"begin_with": str(tiny_pair / "head")}, "begin_with was None"),
        ({"pair": chat_pair}, "target was"),
    ]
    for given, named in table:
        of = given.pop("pair", tiny_pair)
        run = functools.partial(train, of, data, begun, resume=True, **given)
        refused(run, f"{begun}/log.jsonl: ", named)
    assert [path.name for path in begun.iterdir()] == [LOG]


def test_an_output_with_a_run_is_kept_unless_told_otherwise(
    tiny_pair: Path, data: Path, begun: Path
) -> None:
    (begun / FEATURES).touch()
    run = functools.partial(train, tiny_pair, data, begun)
    refused(run, str(begun), "`resume`", "`overwrite`")
    # Nothing is removed before all else is known to be right.
    refused(lambda: run(batch_size=4000, overwrite=True), "batch_size = 4000")
    (begun / "thesis.tex").write_text("years of work")
    refused(lambda: run(overwrite=True), "thesis.tex")
    assert {path.name for path in begun.iterdir()} == {LOG, FEATURES, "thesis.tex"}


def test_a_head_has_nothing_that_only_its_target_can_have() -> None:
    """The official layout has neither norms of queries nor experts."""
    biases = {"qkv_bias": True, "qk_norm": True}
    target = tiny.target_config(**biases, num_experts=4, experts_per_token=2)
    head = new_head(target, TrainConfig()).config
    assert head.layer == tiny.LAYER
    assert (head.vocab_size, head.max_positions) == (64, 512)
    assert new_head(target, CONFIG).config.max_positions == 32


def test_a_head_has_the_sizes_that_are_set() -> None:
    def layer(**sizes: Any) -> Any:
        wanted = dataclasses.replace(CONFIG, head=HEADS["eagle2"].Settings(**sizes))
        return new_head(tiny.TARGET, wanted).config.layer

    found = layer(num_heads=2, intermediate_size=40)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (2, 2, 16)
    assert found.intermediate_size == 40
    assert layer(num_heads=1).num_kv_heads == 1
    refused(lambda: layer(num_heads=3), "num_heads = 3", "hidden_size = 32")
    refused(lambda: layer(num_kv_heads=3), "num_kv_heads = 3", "num_heads = 4")


SHORT = Eagle3Loss(alignment=2)  # A compilation traces every level.
VARIED = {
    "draft_vocab_size": 40,
    "has_feature_norms": True,
    "norm_before_fc": True,
    "norm_before_residual": True,
    "recycles_normed": True,
    "qk_norm": True,
    "sliding_window": 8,
    "num_layers": 2,
}


@pytest.mark.parametrize(
    ("pair", "kind", "sizes"),
    [
        ("eagle3_pair", "eagle3", VARIED),
        ("tiny_pair", "hydra", {"draft_heads": 2, "head_layers": 1}),
    ],
)
def test_heads_of_every_kind_are_exported_and_drafted_with(
    request: pytest.FixtureRequest,
    data: Path,
    tmp_path: Path,
    pair: str,
    kind: Any,
    sizes: Any,
) -> None:
    folder = request.getfixturevalue(pair)
    settings = STILL | {"steps": 2, "learning_rate": 0.01, "cache_features": True}
    settings["head"] = HEADS[kind].Settings(**sizes)
    if kind == "eagle3":
        settings["loss"] = SHORT
    trained = train(folder, data, tmp_path / "run", **settings)
    assert (tmp_path / "run" / FEATURES).is_file()
    target, head, tree = str(folder / "target"), str(trained.head), TREE
    if kind == "hydra":
        choices = tmp_path / "choices.json"
        choices.write_text("[[0], [1], [0, 0], [1, 0]]")
        tree = StaticConfig(choices=str(choices))
    method = "eagle2" if kind == "eagle3" else kind
    plain, drafted = (
        one.generate("ten hats", max_new_tokens=12)[0]
        for one in (
            load_pair(target, method="autoregressive"),
            load_pair(target, head, method=method, tree=tree),
        )
    )
    assert drafted.token_ids == plain.token_ids
    assert drafted.accept_lengths


def tensors_of(head: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(head / "model.safetensors")


@pytest.fixture(scope="module")
def further(
    eagle3_pair: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path, functools.partial[Trained]]:
    """Sizes that no setting names, a head of them, and its training, which is over."""
    folder, kind = tmp_path_factory.mktemp("further"), HEADS["eagle3"]
    usual: Any = kind.read_config(eagle3_pair / "head")
    layer = dataclasses.replace(usual.layer, rope=RopeConfig(theta=77.0))
    sizes = dataclasses.replace(usual, layer=layer, has_feature_norms=True)
    head, begun = kind(config=sizes), folder / "begun"
    export_head(begun, head, head.init(jax.random.key(0)))
    given = STILL | {"head": kind.Settings(), "loss": SHORT, "begin_with": str(begun)}
    run = functools.partial(train, eagle3_pair, data, folder / "run", **given)
    run()
    return sizes, begun, run


def test_a_head_that_is_trained_further_keeps_what_no_setting_names(
    further: tuple[Any, Path, functools.partial[Trained]],
) -> None:
    sizes, begun, run = further
    trained = run.args[2] / "head"
    assert HEADS["eagle3"].read_config(trained) == sizes
    kept, given = tensors_of(trained), tensors_of(begun)
    chex.assert_trees_all_close(kept, given, rtol=0, atol=1e-20)


def test_a_finished_run_keeps_what_was_added_to_its_head(
    further: tuple[Any, Path, functools.partial[Trained]],
) -> None:
    *_, run = further
    head = run.args[2] / "head"
    (head / "calibration.json").write_text("{}")
    before = file_bytes(head)
    assert run(resume=True).summary == "finished before"
    assert file_bytes(head) == before


def test_a_head_learns_from_the_logits_that_its_target_has(
    tiny_pair: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_capped(*given: Any) -> Any:
        source: Any = open_pair(*given)
        config = dataclasses.replace(source.sizes, logit_cap=3.0)
        target = dataclasses.replace(source.target, config=config)
        return dataclasses.replace(source, target=target)

    monkeypatch.setattr(trainer, "open_pair", open_capped)
    monkeypatch.setattr(trainer, "_run", lambda trained, *_: trained)
    step = train(tiny_pair, data, tmp_path / "run", **STILL).step_config
    assert step.unembed is unembed_with(3.0)


def test_steps_compare_the_most_frequent_tokens_and_evaluations_all(
    tiny_pair: Path, data: Path, tmp_path: Path
) -> None:
    """As a target would be learnt from that gives all other tokens no chance."""
    size = 7

    def run(name: str, **loss: Any) -> tuple[Trained, dict[str, float]]:
        given = STILL | {"loss": EagleLoss(noise=0.0, **loss), "batch_size": 2}
        trained = train(tiny_pair, data, tmp_path / name, **given)
        return trained, json.loads((tmp_path / name / LOG).read_text().splitlines()[-1])

    trained, of_all = run("all")
    some, of_some = run("some", loss_vocab_size=size)
    rows, step = trained.data.rows, trained.step_config
    texts = rows.tokens[rows.loss_mask & (rows.segments > 0)].tolist()
    counts = Counter(texts)
    every = np.arange(step.head.config.vocab_size)
    is_known = np.isin(every, sorted(every, key=lambda x: (-counts[x], x))[:size])

    def unembed(table: jax.Array, hidden: jax.Array) -> jax.Array:
        return jnp.where(is_known, step.unembed(table, hidden), -jnp.inf)

    chosen = rows[rows_at(len(rows), 0, 2, seed=0)]
    features = read_target(step, trained.target_params, chosen)
    # The weights that the run began with.
    params = init_state(step, 0, trained.target_params).params
    masked = dataclasses.replace(step, unembed=unembed)
    wanted = eval_step(params, trained.target_params, chosen, features, config=masked)
    np.testing.assert_allclose(of_some["loss"], wanted.loss, rtol=1e-5)
    assert abs(of_all["loss"] - of_some["loss"]) > 1e-3
    assert of_all["held_out_loss"] == of_some["held_out_loss"]
    own = some.head / "vocabulary.json"  # What this head will draft.
    assert json.loads(own.read_text()) == np.flatnonzero(is_known).tolist()
    export_checkpoint(tmp_path / "some/checkpoints/1", tmp_path / "again")
    assert file_bytes(tmp_path / "again") == file_bytes(some.head)
    assert not (trained.head / "vocabulary.json").exists()
    many = functools.partial(run, "many", loss_vocab_size=len(every) + 1)
    refused(many, f"loss_vocab_size = {len(every) + 1} must be at most")
    assert not (tmp_path / "many").exists()


def test_what_the_curve_needs_is_missed_before_anything_is_written(
    tiny_pair: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="matplotlib"):
        train(tiny_pair, data, tmp_path / "run", **STILL)
    assert not (tmp_path / "run").exists()


def with_table(head: Path, folder: Path, table: np.ndarray) -> Path:
    """A copy of a head, with another embedding table."""
    shutil.copytree(head, folder)
    tensors = tensors_of(head) | {"embed_tokens.weight": table}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_table_is_the_targets_if_it_is_in_the_type_of_the_run(
    tiny_pair: Path, data: Path, tmp_path: Path
) -> None:
    """A run in bfloat16 exports the table rounded, and goes on with what it exports."""
    exact = np.asarray(checkpoints.read_embedding(tiny_pair / "target", "float32"))
    rounded = exact.astype(ml_dtypes.bfloat16).astype(np.float32)
    begun = with_table(tiny_pair / "head", tmp_path / "begun", rounded)
    given = STILL | {"dtype": "bfloat16", "begin_with": str(begun)}
    # One that is stored exactly is the target's, too.
    stored = given | {"begin_with": str(tiny_pair / "head"), "batch_size": 4000}
    run = functools.partial(train, tiny_pair, data, tmp_path / "run")
    refused(lambda: run(**stored), "batch_size = 4000")
    head = run(**given).head
    assert (rounded != exact).any()
    np.testing.assert_array_equal(tensors_of(head)["embed_tokens.weight"], rounded)


def test_heads_of_another_kind_or_size_are_not_trained_further(
    eagle3_pair: Path, tiny_pair: Path, data: Path, tmp_path: Path
) -> None:
    eagle2, eagle3 = tiny_pair / "head", eagle3_pair / "head"
    table = tensors_of(eagle2)["embed_tokens.weight"] + 1
    own = with_table(eagle2, tmp_path / "own", table)

    def begin(folder: Path, *named: str, kind: Any = "eagle2", **sizes: Any) -> None:
        output, head = tmp_path / "run", HEADS[kind].Settings(**sizes)
        given = {"head": head, "begin_with": str(folder)}
        refused(lambda: train(eagle3_pair, data, output, **given), *named)
        assert not output.exists()

    begin(eagle2, "holds an EAGLE-1/2 head", "kind eagle3", kind="eagle3")
    begin(eagle3, "holds an EAGLE-3 head", "kind eagle2")
    begin(eagle2, "intermediate_size = 40: the head", intermediate_size=40)
    begin(eagle2, "for EAGLE heads", kind="medusa")
    begin(tmp_path / "none", "none")
    begin(own, "embedding table of its own")
    fields = json.loads((eagle2 / "config.json").read_text()) | {"head_dim": 6}
    (own / "config.json").write_text(json.dumps(fields))
    begin(own, "q_proj.weight has shape (32, 32)")
