"""What cannot be in memory is refused before it is made, and nothing else is."""

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from eagle_jax.checkpoints.load import target_shapes
from eagle_jax.config import Method, TreeConfig
from eagle_jax.generation import room
from eagle_jax.generation.pairs import PairSource
from eagle_jax.generation.random_pairs import open_random
from eagle_jax.models.quantized import num_bytes
from eagle_jax.models.transformer import Transformer
from eagle_jax.tree.structure import empty_candidates
from tests.helpers import refused

_GIB = 2**30
_SIZES = "hidden=64,layers=3,heads=4,kv_heads=2,vocabulary=300"


def _open(
    tree: TreeConfig | None = None,
    *,
    method: Method = "eagle2",
    bits: int | None = None,
) -> PairSource:
    return open_random(
        _SIZES,
        tree=tree or TreeConfig(num_nodes=8, depth=3, width=2),
        dtype="float32",
        with_tokenizer=False,
        method=method,
        bits=bits,
    )


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 16 GiB."""
    monkeypatch.setattr(room, "_memory", lambda: 16 * _GIB)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    ("method", "tree", "nodes"),
    [
        ("eagle2", TreeConfig(num_nodes=1_000_000), "1000000, width = 10"),
        ("eagle2", TreeConfig(width=1_000_000), "60, width = 1000000"),
        (
            "eagle2",
            TreeConfig(num_nodes=2**31 - 1, width=2**31 - 1),
            "2147483647, width = 2147483647",
        ),
        ("lookahead", TreeConfig(guesses=4_000_000), "16000028"),
        ("lookahead", TreeConfig(guesses=2**31 - 1, level=64), "135291470202"),
        ("lookahead", TreeConfig(level=2**31 - 1), "1152921509975556102"),
        ("lookahead", TreeConfig(window=2**31 - 1), "8589934616"),
    ],
)
def test_a_tree_that_cannot_be_in_memory_is_refused(
    method: Method, tree: TreeConfig, nodes: str
) -> None:
    source = _open(tree, method=method)
    refused(
        lambda: source.check_room(batch_size=1, max_length=128),
        f"num_nodes = {nodes}: a run takes",
        "GiB, but there are 16.0 GiB of memory; lower one of them",
    )


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("method", ["eagle2", "chain", "lookup", "autoregressive"])
def test_no_text_is_drafted_further_ahead_than_its_target_reaches(
    method: Method,
) -> None:
    tree = TreeConfig(depth=1_000_000)
    refused(lambda: _open(tree, method=method), "depth = 1000000", "4096 positions")


@pytest.mark.usefixtures("memory")
def test_a_batch_that_cannot_be_in_memory_is_refused() -> None:
    source = _open()
    source.check_room(batch_size=1, max_length=128)
    refused(
        lambda: source.check_room(batch_size=10**9, max_length=128),
        "batch_size = 1000000000",
    )


@pytest.mark.usefixtures("memory")
def test_slots_that_cannot_be_in_memory_are_refused() -> None:
    refused(
        lambda: _open().check_room(batch_size=1, max_length=10**12, grows=False),
        "1000000000000 cache slots",
    )


@pytest.mark.usefixtures("memory")
def test_of_a_cache_that_grows_only_its_first_size_must_be_there() -> None:
    _open().check_room(batch_size=1, max_length=2**31 - 1)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize(
    "sizes",
    [
        "hidden=1000000,layers=1,heads=4,vocabulary=300",
        "hidden=64,layers=999999999,heads=4,vocabulary=300",
        "hidden=64,layers=1,heads=4,vocabulary=999999999",
    ],
)
def test_random_sizes_that_cannot_be_in_memory_are_refused(
    sizes: str, bits: int | None
) -> None:
    def act() -> PairSource:
        tree = TreeConfig()
        return open_random(
            sizes, tree=tree, dtype="float32", with_tokenizer=False, bits=bits
        )

    hidden, layers = sizes.split(",")[:2]
    for part in (hidden, layers):
        refused(act, part.replace("=", " = "), "give a smaller one")


@pytest.mark.usefixtures("memory")
def test_training_batches_that_cannot_be_in_memory_are_refused() -> None:
    target = _open().config

    def act(rows: int, length: int) -> None:
        room.check_training(target, "float32", batch_size=rows, row_length=length)

    act(8, 2048)
    refused(lambda: act(10**6, 2048), "batch_size = 1000000 rows", "lower one")
    refused(lambda: act(8, 10**9), "row_length = 1000000000 tokens", "lower one")


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_no_more_is_asked_for_than_a_run_has_at_once(
    bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(room, "_check_memory", lambda size, *_: asked.append(size))
    tree, rows, slots = TreeConfig(num_nodes=8, depth=3, width=2), 2, 128
    source = _open(tree, bits=bits)
    source.check_room(batch_size=rows, max_length=slots, grows=False)
    target, drafter = Transformer(config=source.config), source.drafter
    assert drafter is not None
    there = (
        target_shapes(source.config, bits),
        jax.eval_shape(lambda: target.init_cache(rows, slots)),
        jax.eval_shape(lambda: drafter.init_state(rows, slots)),
    )
    at_times = (
        [jax.eval_shape(lambda: empty_candidates(tree.levels, tree.width))] * rows,
        jax.ShapeDtypeStruct((rows, tree.num_nodes, tree.num_nodes), jnp.bool),
        jax.ShapeDtypeStruct((rows, tree.num_nodes, 300), jnp.float32),
    )
    most = num_bytes(there) + max(map(num_bytes, at_times))
    assert 0.95 * most < max(asked) <= most


def test_devices_that_tell_their_memory_are_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 3 * _GIB})
    monkeypatch.setattr(jax, "local_devices", lambda: [device, device])
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert room._memory() == 6 * _GIB


def test_where_nobody_tells_the_memory_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(room, "_MEMINFO", tmp_path / "nowhere")
    source = _open(TreeConfig(num_nodes=1_000_000))
    source.check_room(batch_size=1, max_length=128)


def test_a_host_has_its_memory_and_its_swap(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "meminfo"
    path.write_text(
        "MemTotal:  4 kB\nMemFree:  1 kB\nHugePages_Total:  0\nSwapTotal:  2 kB\n"
    )
    monkeypatch.setattr(room, "_MEMINFO", path)
    assert room._memory() == 6 * 1024
