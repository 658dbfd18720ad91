"""Settings of every test, and a tiny pair that needs no download."""

import gc
import importlib.util
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy

from eagle_jax.engine.programs import PROGRAMS
from eagle_jax.engine.wording import load_tokenizer
from eagle_jax.models.devices import leave_out_tpus
from tests.devices import QUICK
from tests.stories import Stories, load_stories

leave_out_tpus()  # Before a test, or what one imports, asks JAX for anything.
if QUICK and importlib.util.find_spec("libtpu") is None:  # It ends a process with them.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}"

# From here on, as modules compile while they are collected.
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# Where each operation was written costs a twentieth of the suite.
jax.config.update("jax_traceback_in_locations_limit", 0)
jax.config.update("jax_include_full_tracebacks_in_locations", False)

Main = Callable[[list[str]], int]

NEEDS_TORCH = "needs torch: pip install '.[torch]'"

_REPOSITORY = Path(__file__).resolve().parents[1]

# Of the 65,530 that Linux gives a process; by then the programs take some 3 GB.
_MOST_MAPS = 6_000
HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS, _LAYERS = 32, 48, 4, 2, 1
_DEEP, KNOWN = 7, 150  # Of the target, and tokens of its head.
_WEIGHTS = "model.safetensors"
_PAIRS = (
    "thheineranreonatenndtiesorteofedisitalarsttontngsehaasouiolevecomedehiriroicneea"
    "race"
)
_MERGES = [_PAIRS[start : start + 2] for start in range(0, len(_PAIRS), 2)]
VOCABULARY = 256 + len(_MERGES) + 2
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def pytest_collection_finish() -> None:
    """Spares the collector what stays: tracing makes many objects, and few cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what is marked to need torch where there is none."""
    if item.get_closest_marker("torch"):
        pytest.importorskip("torch", reason=NEEDS_TORCH)


@pytest.fixture(scope="session", autouse=True)
def compile_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps what is compiled: what one worker made serves the other."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    cache = os.environ.get("EAGLE_JAX_TEST_CACHE") or folder / "jax"
    jax.config.update("jax_compilation_cache_dir", str(cache))


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """Frees the compiled programs before the process has too many memory maps.

    Each holds a few; those of the whole suite are more than Linux lets a process have,
    and it aborts.
    """
    yield
    maps = Path("/proc/self/maps")
    if not maps.exists() or len(maps.read_bytes().splitlines()) > _MOST_MAPS:
        _clear_programs()


@pytest.fixture(scope="module")
def optimised() -> Iterator[None]:
    """Compiles a module's programs as for users; elsewhere tests wait for compilers."""
    _clear_programs()
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
    _clear_programs()


def _clear_programs() -> None:
    PROGRAMS.clear()
    jax.clear_caches()


@pytest.fixture
def port() -> int:
    """One that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="session")
def main() -> Main:
    """`main` of `scripts/generate.py`."""
    return load_main("generate")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with trained models, recorded trees and questions."""
    named = os.environ.get("EAGLE_JAX_SHARED")
    folder = Path(named) if named else _REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip(
            f"{folder} is no folder; set EAGLE_JAX_SHARED to the one with models/, "
            "parity/ and data/"
        )
    return folder


@pytest.fixture(scope="session")
def stories(shared: Path) -> Stories:
    """The trained pair in the shared folder."""
    return load_stories(shared)


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target/` and `head/`, random and small; copy before changing.

    The target is a Llama of one layer with grouped-query attention and carries a
    byte-level tokenizer of 300 ids, which begins every text with `<s>` (298); `</s>`
    is 299. The head has an embedding table of its own and a bias in `fc`.
    """
    folder = tmp_path_factory.mktemp("pair")
    rng = np.random.default_rng(0)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "bos_token_id": VOCABULARY - 2,
        "eos_token_id": VOCABULARY - 1,
        "torch_dtype": "float32",
    }
    target = {
        "model.embed_tokens.weight": _matrix(rng, VOCABULARY, HIDDEN),
        "model.norm.weight": _norm(rng),
        "lm_head.weight": _matrix(rng, VOCABULARY, HIDDEN),
    }
    for number in range(_LAYERS):
        prefix = f"model.layers.{number}"
        target |= _layer(rng, prefix)
        target[f"{prefix}.input_layernorm.weight"] = _norm(rng)
    _write(folder / "target", config | {"num_hidden_layers": _LAYERS}, target)
    _write_tokenizer(folder / "target")
    head = {
        "embed_tokens.weight": target["model.embed_tokens.weight"],
        "fc.weight": _matrix(rng, HIDDEN, 2 * HIDDEN),
        "fc.bias": _matrix(rng, HIDDEN),
        **_layer(rng, "layers.0"),
    }
    head_config = config | {"num_hidden_layers": 1, "bias": True}
    _write(folder / "head", head_config, head)
    return folder


@pytest.fixture(scope="session")
def eagle3_pair(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of 7 layers and an EAGLE-3 head for it; copy before changing."""
    folder = tmp_path_factory.mktemp("eagle3")
    _write_eagle3_pair(folder, tiny_pair / "target")
    return folder


@pytest.fixture(scope="session")
def chat_pair(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair with a chat template; copy before changing."""
    folder = tmp_path_factory.mktemp("chat") / "pair"
    shutil.copytree(tiny_pair, folder)
    (folder / "target" / "chat_template.jinja").write_text(_TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def tokenizer(chat_pair: Path) -> Any:
    """The chat pair's."""
    return load_tokenizer(chat_pair / "target", 300)


def load_main(script: str) -> Main:
    """Returns `main` of a script's command."""
    return importlib.import_module(f"eagle_jax.cli.{script}").main


def _layer(rng: np.random.Generator, prefix: str) -> dict[str, np.ndarray]:
    """Returns one decoder layer without input norm."""
    kv_width = HIDDEN // _HEADS * _KV_HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv_width, HIDDEN),
        "self_attn.v_proj": (kv_width, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (_INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (_INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, _INTERMEDIATE),
    }
    tensors = {
        f"{prefix}.{name}.weight": _matrix(rng, *shape)
        for name, shape in shapes.items()
    }
    return {**tensors, f"{prefix}.post_attention_layernorm.weight": _norm(rng)}


def _write_eagle3_pair(folder: Path, shallow: Path) -> None:
    """Writes `target/`, which is `shallow` with more layers, and `head/`."""
    rng = np.random.default_rng(3)
    shutil.copytree(shallow, folder / "target")
    path = folder / "target" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_hidden_layers": _DEEP}))
    target = safetensors.numpy.load_file(shallow / _WEIGHTS)
    first = {name: x for name, x in target.items() if ".layers.0." in name}
    for number in range(config["num_hidden_layers"], _DEEP):
        for name, x in first.items():
            own = name.replace(".layers.0.", f".layers.{number}.")
            target[own] = _matrix(rng, *x.shape) if x.ndim > 1 else x
    safetensors.numpy.save_file(target, folder / "target" / _WEIGHTS)
    head = folder / "head"
    head.mkdir()
    # Another width of the feed-forward layer and other heads: nothing is the target's.
    own = config | {"intermediate_size": 40, "num_key_value_heads": 4}
    own |= {"draft_vocab_size": KNOWN, "num_hidden_layers": _DEEP}
    del own["rope_theta"]
    (head / "config.json").write_text(json.dumps(own))
    safetensors.numpy.save_file(_eagle3_head(rng), head / _WEIGHTS)


def _eagle3_head(rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {
        "fc": (HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj": (HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, HIDDEN),
        "midlayer.mlp.gate_proj": (40, HIDDEN),
        "midlayer.mlp.up_proj": (40, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, 40),
        "lm_head": (KNOWN, HIDDEN),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tokens = np.sort(rng.choice(VOCABULARY, size=KNOWN, replace=False))
    return {
        **{f"{name}.weight": _matrix(rng, *shape) for name, shape in shapes.items()},
        **{f"midlayer.{name}.weight": _norm(rng) for name in norms},
        "norm.weight": _norm(rng),
        "d2t": tokens - np.arange(KNOWN),
        "t2d": np.isin(np.arange(VOCABULARY), tokens),
    }


def _matrix(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.normal(size=shape) * 0.2).astype(np.float32)


def _norm(rng: np.random.Generator) -> np.ndarray:
    return (1 + 0.1 * rng.normal(size=HIDDEN)).astype(np.float32)


def _write(
    folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]
) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    safetensors.numpy.save_file(tensors, folder / _WEIGHTS)


def _write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of bytes and a few merges that adds `<s>` in front."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet()) + _MERGES
    tokenizer = Tokenizer(
        models.BPE(
            vocab={symbol: index for index, symbol in enumerate(symbols)},
            merges=[(merge[0], merge[1]) for merge in _MERGES],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", len(symbols))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
