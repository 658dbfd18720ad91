"""Training a head: its sizes, and what is refused before anything is trained."""

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import chex
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from eagle_jax import checkpoints
from eagle_jax.config import StaticConfig, TreeConfig
from eagle_jax.drafting.heads import init_heads
from eagle_jax.files import fingerprint_file
from eagle_jax.generation.pair import load_pair
from eagle_jax.models.rope import RopeConfig
from eagle_jax.parallel import MeshShape
from eagle_jax.progress import show_nothing
from eagle_jax.training.config import (
    DataConfig,
    HeadConfig,
    LossConfig,
    RunConfig,
    TrainConfig,
)
from eagle_jax.training.heads import count_vocabulary, new_eagle_head
from eagle_jax.training.trainer import Trained, train_head
from tests import tiny
from tests.helpers import file_bytes, refused

TREE = TreeConfig(num_nodes=5, depth=2, width=2)
Train = Callable[..., Trained]
CONFIG = TrainConfig(data=DataConfig(row_length=32), run=RunConfig(batch_size=1))


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


@pytest.mark.parametrize(
    ("changes", "given", "named"),
    [
        ({}, {"data": [Path("missing.jsonl")]}, "missing.jsonl: it is no file"),
        ({"row_length": 4096}, {}, "row_length = 4096 is more than the target's 256"),
        ({"batch_size": 4000}, {}, "batch_size = 4000"),
        ({}, {"mesh": MeshShape(data=64, tensor=4)}, "for 256 devices, but there are"),
        ({}, {"resume": True}, "holds no run"),
        ({}, {"resume": True, "overwrite": True}, "exclude each other"),
    ],
)
def test_what_cannot_be_trained_is_refused_and_leaves_nothing(
    tiny_pair: Path, data: Path, tmp_path: Path, changes: Any, given: Any, named: str
) -> None:
    output = tmp_path / "run"
    given = {"data": [data]} | given
    refused(
        lambda: train_head(
            str(tiny_pair / "target"), output=output, config=config(**changes), **given
        ),
        named,
    )
    assert not output.exists()


@pytest.fixture
def begun(tiny_pair: Path, data: Path, tmp_path: Path) -> Path:
    """The mark of a run that has begun."""
    identity = {
        "target": str((tiny_pair / "target").resolve()),
        "data": [fingerprint_file(data)],
        "mesh": "data=1,tensor=1",
        "settings": dataclasses.asdict(CONFIG),
    }
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps(identity))
    return tmp_path / "run"


def test_a_resumed_run_keeps_its_settings_data_and_target(
    tiny_pair: Path, data: Path, tmp_path: Path, begun: Path
) -> None:
    def resume(
        target: Path = tiny_pair / "target",
        data: Path = data,
        held_out_data: Sequence[Path] = (),
        **changes: Any,
    ) -> None:
        train_head(
            *(str(target), [data], begun, config(**changes)),
            held_out_data=held_out_data,
            resume=True,
        )

    refused(lambda: resume(seed=1), "seed = 0, not 1")
    refused(lambda: resume(learning_rate=0.5), "learning_rate = 3e-05, not 0.5")
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"text": "hats " * 9}) + "\n")
    refused(lambda: resume(data=other), "other `data`")
    refused(lambda: resume(held_out_data=[data]), "other `held_out_data`")
    target = Path(shutil.copytree(tiny_pair / "target", tmp_path / "target"))
    path = target / "config.json"
    settings = json.loads(path.read_text()) | {"rms_norm_eps": 1e-6}
    path.write_text(json.dumps(settings))
    refused(lambda: resume(target=target), "of another target")
    path = begun / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": ""}))
    refused(resume, "run.json: dtype = '' must be one of 'float32', 'bfloat16'")
    assert [path.name for path in begun.iterdir()] == ["run.json"]


def test_an_output_with_a_run_is_kept_unless_told_otherwise(
    tiny_pair: Path, data: Path, begun: Path
) -> None:
    (begun / "log.csv").write_text("step\n")

    def train(**given: Any) -> None:
        wanted = config(**given.pop("changes", {}))
        train_head(str(tiny_pair / "target"), [data], begun, wanted, **given)

    refused(train, str(begun), "`resume`", "`overwrite`")
    # Nothing is removed before all else is known to be right.
    too_large = {"changes": {"batch_size": 4000}, "overwrite": True}
    refused(lambda: train(**too_large), "batch_size = 4000")
    (begun / "thesis.tex").write_text("years of work")
    refused(lambda: train(overwrite=True), "thesis.tex")
    names = {path.name for path in begun.iterdir()}
    assert names == {"run.json", "log.csv", "thesis.tex"}


def test_a_head_has_nothing_that_only_its_target_can_have() -> None:
    """The official layout has neither norms of queries nor experts."""
    biases = {"qkv_bias": True, "qk_norm": True}
    target = tiny.target_config(**biases, num_experts=4, experts_per_token=2)
    head = new_eagle_head(target, TrainConfig())
    assert head.layer == tiny.LAYER
    assert (head.vocab_size, head.max_positions) == (64, 512)
    assert new_eagle_head(target, CONFIG).max_positions == 32


def test_a_head_has_the_sizes_that_are_set() -> None:
    def layer(**sizes: Any) -> Any:
        wanted = dataclasses.replace(CONFIG, head=HeadConfig(**sizes))
        return new_eagle_head(tiny.TARGET, wanted).layer

    found = layer(num_heads=2, intermediate_size=40)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (2, 2, 16)
    assert found.intermediate_size == 40
    assert layer(num_heads=1).num_kv_heads == 1
    refused(lambda: layer(num_heads=3), "num_heads = 3", "hidden_size = 32")
    refused(lambda: layer(num_kv_heads=3), "num_kv_heads = 3", "num_heads = 4")


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_heads_of_every_kind_are_exported_and_drafted_with(
    tiny_pair: Path, data: Path, tmp_path: Path, kind: Any
) -> None:
    settings = config(steps=2, batch_size=2, eval_prompts=1, eval_new_tokens=4)
    head = HeadConfig(kind=kind, draft_heads=2, head_layers=1)
    settings = dataclasses.replace(settings, head=head)
    target = str(tiny_pair / "target")
    trained = train_head(
        target, [data], tmp_path / "run", settings, mesh=MeshShape(data=1)
    )
    choices = tmp_path / "choices.json"
    choices.write_text("[[0], [1], [0, 0], [1, 0]]")
    tree = StaticConfig(choices=str(choices))
    plain = load_pair(target, method="autoregressive")
    pair = load_pair(target, str(trained.head), method=kind, tree=tree)
    plain, drafted = (
        loaded.generate("ten hats", max_new_tokens=12) for loaded in (plain, pair)
    )
    assert drafted[0].token_ids == plain[0].token_ids
    assert drafted[0].accept_lengths


@pytest.fixture
def train_eagle3(eagle3_pair: Path, data: Path, tmp_path: Path) -> Train:
    def train(
        name: str, changes: dict[str, Any], layers: str | None = None, **given: Any
    ) -> Trained:
        usual = {"steps": 4, "batch_size": 2, "eval_every": 2, "learning_rate": 0.01}
        limits = {"warmup_steps": 1, "eval_prompts": 1, "eval_new_tokens": 4}
        return train_head(
            str(eagle3_pair / "target"),
            [data],
            tmp_path / name,
            dataclasses.replace(
                config(**(usual | limits | changes)),
                head=HeadConfig(
                    kind="eagle3", draft_vocab_size=40, feature_layers=layers
                ),
                loss=LossConfig(alignment=2),
                tree=TREE,
            ),
            mesh=MeshShape(data=1),
            **given,
        )

    return train


def tensors_of(head: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(head / "model.safetensors")


@pytest.mark.usefixtures("quick_compilation")
def test_an_eagle3_head_is_trained_resumed_and_drafted_with(
    train_eagle3: Train, eagle3_pair: Path, tmp_path: Path
) -> None:
    whole = train_eagle3("whole", {})

    def stop(line: str) -> None:
        if "step 2" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_eagle3("stopped", {}, report=stop)
    assert not (whole.head.parent.parent / "stopped" / "head").exists()
    resumed = train_eagle3("stopped", {}, resume=True)
    assert file_bytes(resumed.head) == file_bytes(whole.head)
    # It knows the tokens that its texts have most often, and gradients let them be.
    offsets = tensors_of(whole.head)["d2t"]
    known = count_vocabulary(whole.data.rows, whole.step_config.head)
    assert offsets.dtype == np.int64
    np.testing.assert_array_equal(offsets + np.arange(40), known)
    target = str(eagle3_pair / "target")
    plain = load_pair(target, method="autoregressive")
    pair = load_pair(target, str(whole.head), tree=TREE)
    plain, drafted = (
        loaded.generate("ten hats", max_new_tokens=12) for loaded in (plain, pair)
    )
    assert drafted[0].token_ids == plain[0].token_ids
    still = {"steps": 1, "learning_rate": 1e-30, "cache_features": True}
    further = train_eagle3("further", still, begin_with=str(whole.head))
    kept = further.head.parent / "features"
    (features,) = safetensors.numpy.load_file(next(kept.glob("*.safetensors"))).values()
    assert features.shape[-1] == 4 * tiny.LAYER.hidden_size
    refused(
        lambda: train_eagle3("further", still, resume=True), "the same `begin_with`"
    )
    # Features of the layers that this head reads are none for another's.
    other = functools.partial(train_eagle3, "other", still, "1 2 4")

    def interrupt(label: str, *_: object) -> Any:
        if label == "computing features":
            raise KeyboardInterrupt
        return show_nothing()

    with pytest.raises(KeyboardInterrupt):
        other(progress=interrupt)
    shutil.copytree(kept, tmp_path / "other" / "features")
    refused(lambda: other(resume=True), "features of other settings (feature_layers")


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("kind", ["eagle2", "eagle3"])
def test_a_head_that_is_trained_further_keeps_what_no_setting_names(
    eagle3_pair: Path, tiny_pair: Path, data: Path, tmp_path: Path, kind: Any
) -> None:
    begun = tmp_path / "begun"
    rope = RopeConfig(theta=77.0)
    usual: Any
    if kind == "eagle2":
        usual = checkpoints.head_config(tiny_pair / "head")
        layer = dataclasses.replace(usual.layer, rope=rope, qkv_bias=True)
        head = dataclasses.replace(usual, layer=layer)
        weights = init_heads(jax.random.key(0), head)
        checkpoints.export_head(begun, head, weights, dtype="float32")
    else:
        usual = checkpoints.eagle3_config(eagle3_pair / "head")
        layer = dataclasses.replace(usual.layer, rope=rope)
        head = dataclasses.replace(usual, layer=layer, has_feature_norms=True)
        weights = init_heads(jax.random.key(0), head)
        checkpoints.export_eagle3(begun, head, weights, dtype="float32")
    still = config(steps=1, learning_rate=1e-30, eval_prompts=1, eval_new_tokens=4)
    sizes = HeadConfig(kind=kind, include_embedding=False)
    further = train_head(
        str(eagle3_pair / "target"),
        [data],
        tmp_path / "further",
        dataclasses.replace(still, head=sizes, tree=TREE),
        begin_with=str(begun),
        mesh=MeshShape(data=1),
    )
    read = checkpoints.head_config if kind == "eagle2" else checkpoints.eagle3_config
    assert read(further.head) == head
    kept, given = tensors_of(further.head), tensors_of(begun)
    chex.assert_trees_all_close(kept, given, rtol=0, atol=1e-20)


@pytest.mark.usefixtures("quick_compilation")
def test_a_table_is_the_targets_if_it_is_in_the_type_of_the_run(
    tiny_pair: Path, data: Path, tmp_path: Path
) -> None:
    """A run in bfloat16 exports the table rounded, and goes on with what it exports."""
    target = tiny_pair / "target"
    quick = {"steps": 1, "dtype": "bfloat16", "eval_prompts": 1, "eval_new_tokens": 4}
    further = tiny_pair / "head"
    for name in ("first", "second"):
        further = train_head(
            str(target),
            [data],
            tmp_path / name,
            dataclasses.replace(config(**quick), tree=TREE),
            begin_with=str(further),
            mesh=MeshShape(data=1),
        ).head
    table = tensors_of(further)["embed_tokens.weight"]
    exact = np.asarray(checkpoints.read_embedding(target, "float32"))
    assert (table != exact).any()
    np.testing.assert_array_equal(table, exact.astype(ml_dtypes.bfloat16))


def test_heads_of_another_kind_or_size_are_not_trained_further(
    eagle3_pair: Path, tiny_pair: Path, data: Path, tmp_path: Path
) -> None:
    eagle2, eagle3 = tiny_pair / "head", eagle3_pair / "head"
    own = Path(shutil.copytree(eagle2, tmp_path / "own"))
    tensors = tensors_of(eagle2)
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"] + 1
    safetensors.numpy.save_file(tensors, own / "model.safetensors")

    def begin(folder: Path, *named: str, kind: Any = "eagle2", **sizes: Any) -> None:
        settings = dataclasses.replace(CONFIG, head=HeadConfig(kind=kind, **sizes))
        target, output = str(eagle3_pair / "target"), tmp_path / "run"
        run = functools.partial(train_head, target, [data], output, settings)
        refused(lambda: run(begin_with=str(folder), mesh=MeshShape(data=1)), *named)
        assert not output.exists()

    begin(eagle2, "holds an EAGLE-1/2 head", "kind eagle3", kind="eagle3")
    begin(eagle3, "holds an EAGLE-3 head", "kind eagle2")
    begin(eagle3, "size is 150, not 200", kind="eagle3", draft_vocab_size=200)
    begin(eagle3, "recycles_normed is", kind="eagle3", recycles_normed=True)
    begin(eagle3, "(2, 3, 4), not (1, 2, 4)", kind="eagle3", feature_layers="1 2 4")
    begin(eagle2, "intermediate_size is 48, not 40", intermediate_size=40)
    begin(eagle2, "for EAGLE heads", kind="medusa")
    begin(tmp_path / "none", "none")
    begin(own, "embedding table of its own")
    fields = json.loads((eagle2 / "config.json").read_text()) | {"head_dim": 6}
    (own / "config.json").write_text(json.dumps(fields))
    begin(own, "has no head_dim")


def test_a_head_to_begin_with_may_be_a_published_one(
    tiny_pair: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, resolve = tiny_pair / "head", checkpoints.resolve

    def at_hand(name: str) -> Path:
        return head if name == "somebody/head" else resolve(name)

    monkeypatch.setattr(checkpoints, "resolve", at_hand)
    target, settings = str(tiny_pair / "target"), HeadConfig(kind="eagle3")
    refused(
        lambda: train_head(
            *(target, [data], tmp_path / "run"),
            dataclasses.replace(CONFIG, head=settings),
            begin_with="somebody/head",
        ),
        f"{head} holds an EAGLE-1/2 head",
    )


def test_a_run_does_not_replace_what_it_reads(
    tiny_pair: Path, data: Path, begun: Path
) -> None:
    head = Path(shutil.copytree(tiny_pair / "head", begun / "head"))
    before = file_bytes(head)

    given = (str(tiny_pair / "target"), [data], begun, CONFIG)
    refused(
        lambda: train_head(*given, begin_with=str(head), overwrite=True),
        f"{head} is read from it",
    )
    assert file_bytes(head) == before


@pytest.fixture
def train_briefly(tiny_pair: Path, data: Path, tmp_path: Path) -> Train:
    """Trains for a few steps, each of which is evaluated, in the same folder."""

    def train(steps: int, **given: Any) -> Trained:
        brief = config(steps=steps, eval_every=1, eval_prompts=1, eval_new_tokens=4)
        return train_head(
            str(tiny_pair / "target"),
            [data],
            tmp_path / "run",
            dataclasses.replace(brief, tree=TREE),
            mesh=MeshShape(data=1),
            **given,
        )

    return train


@pytest.mark.usefixtures("quick_compilation")
def test_a_finished_run_keeps_what_was_added_to_its_head(train_briefly: Train) -> None:
    head = train_briefly(1).head
    for name in ("calibration.json", "draft_vocabulary.json"):
        (head / name).write_text("{}")
    before = file_bytes(head)
    assert train_briefly(1, resume=True).summary == "finished before"
    assert file_bytes(head) == before


@pytest.mark.usefixtures("quick_compilation")
def test_a_resumed_run_computes_in_the_type_that_it_began_with(
    train_briefly: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(line: str) -> None:
        if "step 1" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_briefly(2, report=stop)
    monkeypatch.setattr("eagle_jax.training.trainer.on_cpu", lambda: False)
    assert train_briefly(2, resume=True).step_config.dtype == "float32"
