"""The core runs where none of the extras is installed."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXTRAS = {
    *("transformers", "tokenizers", "huggingface_hub", "safetensors", "jinja2"),
    *("sentencepiece", "matplotlib", "torch"),
}
PROGRAM = """
import importlib, pkgutil, sys

EXTRAS = {extras}

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import eagle_jax

for part in {core}:
    module = importlib.import_module("eagle_jax." + part)
    folders = getattr(module, "__path__", [])
    for found in pkgutil.walk_packages(folders, module.__name__ + "."):
        importlib.import_module(found.name)

import jax.numpy as jnp
from eagle_jax.testing import ToyModel, ToyTarget

target = ToyTarget(vocab_size=8)
tree = eagle_jax.TreeConfig(num_nodes=4, depth=2, width=2)
drafter = eagle_jax.TreeDrafter(model=ToyModel(vocab_size=8), tree=tree)
decoder = eagle_jax.Decoder(target=target, drafter=drafter, acceptance="greedy")
params = eagle_jax.Params(target=(), drafter=jnp.float32(1))
requests = eagle_jax.make_requests([[1, 2]], max_new_tokens=5)
state = eagle_jax.generate(decoder, params, requests)
plain = eagle_jax.autoregressive.generate(decoder, params, requests)
assert state.tokens[0, :7].tolist() == plain.tokens[0, :7].tolist()
try:
    eagle_jax.load_embedded_pair()
except eagle_jax.InputError as error:
    print(error)
"""
CORE = [
    *("config", "files", "interface", "sampling", "constraints", "tree", "models"),
    *("drafting", "decoding", "adapters", "parallel", "testing", "training"),
]


def test_the_core_runs_without_any_extra() -> None:
    program = PROGRAM.format(extras=EXTRAS, core=CORE)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "is not installed" in done.stdout
    assert "pip install '.[hf]'" in done.stdout
