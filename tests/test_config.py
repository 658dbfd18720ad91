"""Settings: their ranges, the strict reader of their files, and the files there are."""

import tomllib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import (
    CONFIGS,
    StaticConfig,
    TreeConfig,
    load_config,
)
from eagle_jax.drafting import LookupConfig, SwitchConfig
from eagle_jax.engine.config import PairConfig
from eagle_jax.engine.request import Request
from eagle_jax.training.config import (
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
from examples.embedded_pair.pair_step import TogetherConfig
from examples.embedded_pair.training import PretrainConfig
from tests.helpers import refused

NAN, INF, BIG = float("nan"), float("inf"), 10**12
TREE, REQUEST, PAIR = TreeConfig, Request, PairConfig
OPTIMIZER, RUN = OptimizerConfig, RunConfig


@pytest.mark.parametrize(
    ("kind", "name", "value", "wanted"),
    [
        *((TREE, n, 0, "at least 1") for n in ("num_nodes", "width")),
        (TREE, "depth", -1, "0 or more"),
        *((TREE, n, BIG, "below 2**31") for n in ("num_nodes", "width", "depth")),
        *((SwitchConfig, "min_match", x, "1 to 64") for x in (0, 65)),
        *((LookupConfig, "max_ngram", x, "1 to 64") for x in (0, 65)),
        *((REQUEST, "temperature", x, "finite, 0 or more") for x in (-1.0, NAN, INF)),
        (REQUEST, "temperature", 1e39, "at most 3.4e38"),
        *((REQUEST, "top_p", x, "above 0 and at most 1") for x in (0.0, 1.5, NAN)),
        (REQUEST, "top_k", -2, "0 or -1 (off), or more"),
        (REQUEST, "top_k", BIG, "below 2**31"),
        *((REQUEST, "min_p", x, "0 (off) to 1") for x in (1.5, -0.1, NAN)),
        *((REQUEST, "seed", x, "0 to 4294967295") for x in (-1, 2**32)),
        *((REQUEST, "max_new_tokens", x, "1 to 2147483647") for x in (0, -1, BIG)),
        (PAIR, "max_length", 1, "at least 2 (prompt + output)"),
        (PAIR, "batch_size", 0, "at least 1"),
        *((PAIR, name, BIG, "below 2**31") for name in ("max_length", "batch_size")),
        *((OPTIMIZER, "clip", x, "above 0 and finite") for x in (0.0, NAN, INF)),
        *((OPTIMIZER, "weight_decay", x, "0 or more and finite") for x in (-1.0, INF)),
    ],
)
def test_what_lies_outside_its_range_is_refused(
    kind: Any, name: str, value: float, wanted: str
) -> None:
    refused(lambda: kind(**{name: value}), f"{name} = {value} must be {wanted}")


@pytest.mark.parametrize(
    ("kind", "name", "value", "wanted"),
    [
        (REQUEST, "temperature", "0.7", "'0.7' must be float"),
        (REQUEST, "temperature", None, "None must be float"),
        (REQUEST, "seed", True, "True must be a whole number"),
        (REQUEST, "top_k", np.array([1, 2]), "array([1, 2]) must be a whole number"),
        (PAIR, "acceptance", "zz", "'zz' must be one of 'coupled', 'rejection'"),
        (PAIR, "batch_size", np.float32(2.5), "2.5 must be int"),
        (REQUEST, "ignore_eos", 1, "1 must be bool"),
        (PairConfig, "tree", {"num_nodes": 4}, "is not of method eagle2"),
        (RUN, "steps", "3", "'3' must be int"),
    ],
)
def test_what_has_another_type_is_refused(
    kind: Any, name: str, value: object, wanted: str
) -> None:
    refused(lambda: kind(**{name: value}), f"{name} = ", wanted)


def test_scalars_of_arrays_and_paths_are_settings() -> None:
    top_k: Any = np.int64(3)
    path: Any = Path("trees.json")
    request = Request(temperature=1, top_k=top_k, min_p=jnp.float32(0.5))
    assert repr(request) == repr(Request(temperature=1.0, top_k=3, min_p=0.5))
    assert StaticConfig(choices=path) == StaticConfig(choices="trees.json")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[tree]\nnodes = 60", "[tree]: unknown key 'nodes'; known are num_nodes"),
        ("[trees]\nnum_nodes = 60", "unknown key 'trees'; known are tree"),
        ('[tree]\nnum_nodes = "60"', "num_nodes = '60' must be int"),
        ("[tree]\nnum_nodes = true", "num_nodes = True must be int"),
        ("[tree]\nrerank = 1", "rerank = 1 must be bool"),
        ("tree = 60", "'tree' must be a table, not 60"),
        ('[pair]\nmethod = "eagle3"', "method = 'eagle3' is no method"),
        ("[request]\ntop_p = 0", "top_p = 0.0 must be above 0"),
        (f"[request]\nmax_new_tokens = {BIG}", f"{BIG} must be 1 to 2147483647"),
        ("[request]\nstop = 5", "[request]: stop = 5 must be a list"),
        ("[request]\nmethod = 5", "[request]: unknown key 'method'; known are max_new"),
        ("[pair]\nseed = 5", "[pair]: unknown key 'seed'; known are method, accep"),
        ("[sampling]\ntop_p = 0.5", "unknown key 'sampling'; known are tree, pair"),
        ('[pair]\ntree = "60"', "`tree` = '60' must be \"auto\""),
        ("[tree\nnum_nodes = 60", "is not valid TOML"),
        (None, "cannot read"),
    ],
)
def test_settings_files_are_read_strictly(
    tmp_path: Path, text: str | None, named: str
) -> None:
    path = tmp_path / "settings.toml"
    if text is not None:
        path.write_text(text)
    refused(lambda: load_config(path, PairConfig), str(path), named)


def test_a_name_among_others_or_none_is_read(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    text = '[head]\nkind = "medusa"\n[loss]\nlabels = "{}"'
    path.write_text(text.format("target"))
    assert load_config(path, TrainConfig).loss.labels == "target"
    path.write_text(text.format("targets"))
    wanted = "labels = 'targets' must be one of 'tokens', 'target'"
    refused(lambda: load_config(path, TrainConfig), wanted)


@pytest.mark.parametrize("name", ["embedded", "embedded.toml", "configs/embedded.toml"])
def test_configs_are_found_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = load_config(CONFIGS / "embedded.toml", PairConfig)
    assert load_config(name, PairConfig) == own
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "embedded.toml").write_text("")
    is_there = name.startswith("configs")
    assert (load_config(name, PairConfig) == PairConfig()) == is_there


OTHER_CONFIGS = {
    "head": TrainConfig,
    "small": PretrainConfig,
    "stories260k": TrainConfig,
    "together": TogetherConfig,
}
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.mark.parametrize(
    "path",
    [*sorted(CONFIGS.glob("*.toml")), *sorted(EXAMPLES.glob("*/*.toml"))],
    ids=lambda path: path.stem,
)
def test_every_config_loads_and_states_only_what_differs(path: Path) -> None:
    kind = OTHER_CONFIGS.get(path.stem, PairConfig)
    config, default = load_config(path, kind), kind()
    for table, values in tomllib.loads(path.read_text()).items():
        for name in values:
            # A tree of sampled text alone begins with the defaults too.
            if table == "pair":
                assert name == "tree" or getattr(config, name) != getattr(default, name)
                continue
            given = getattr(getattr(config, table), "settings", None)
            given = given or getattr(config, table)
            usual = getattr(getattr(default, table), "settings", None) or type(given)()
            assert getattr(given, name) != getattr(usual, name), name
