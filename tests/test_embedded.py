"""The embedded pair: its sizes, its files, its text."""

import json
import re
import shlex
import sys
from pathlib import Path

import jax
import pytest

from eagle_jax import assets
from eagle_jax.checkpoints import load_target, stored_dtype, target_config
from eagle_jax.config import load_config
from eagle_jax.decoding.rates import repetition
from eagle_jax.engine.config import PairConfig
from eagle_jax.engine.wording import load_tokenizer
from examples.embedded_pair import corpus
from tests.conftest import Main
from tests.heads.samples import load_head

# As optimised as for users it runs in the README's first command, and CI reads what
# that says of the tokens.

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "embedded.toml"


def count(params: object) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def test_the_pair_is_of_the_promised_size() -> None:
    config, target_params = load_target(assets.TARGET)
    _, head_params = load_head(assets.HEAD, config, target_params)
    assert head_params.embedding is None  # The target's: no second table in memory.
    size = count(target_params) + count(head_params)
    assert 8_000_000 <= size <= 22_000_000
    assert count(load_target(assets.SMALL)[1]) <= 1_500_000
    folder = Path(assets.__file__).parent
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 45_000_000
    for name in (assets.TARGET, assets.HEAD, assets.SMALL):
        assert stored_dtype(name) == "bfloat16"


def test_both_models_share_a_tokenizer() -> None:
    tokenizers = [
        (folder / "tokenizer.json").read_bytes()
        for folder in (assets.TARGET, assets.SMALL)
    ]
    assert tokenizers[0] == tokenizers[1]
    vocabulary = target_config(assets.TARGET).vocab_size
    tokenizer = load_tokenizer(assets.TARGET, vocabulary)
    text = 'def f(x):\n    return "é€🙂"\n'
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id == 0
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="the prompts are from Python 3.11's library"
)
def test_prompts_come_from_held_out_modules() -> None:
    prompts = json.loads((assets.TARGET.parent / "prompts.json").read_text())
    assert len(prompts) >= 40 and len(set(prompts)) == len(prompts)
    trained_on, held_out = (
        "".join(corpus.read_texts(files)) for files in corpus.library_files()
    )
    for prompt in prompts:
        assert prompt in held_out and prompt not in trained_on


def test_the_readmes_first_command_writes_varied_text_that_is_the_targets(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    readme = (CONFIG.parents[1] / "README.md").read_text()
    (command,) = re.findall(r"generate\.py (.*--compare)$", readme, re.MULTILINE)
    assert main([*shlex.split(command), "--json", str(file)]) == 0
    out, err = capsys.readouterr()
    assert "calibrated" not in err  # Its own calibration fits.
    assert "plausible, not working, Python" in err
    result = json.loads(file.read_text())
    (run,) = result["runs"]
    assert out.startswith(run["prompt"] + run["text"])
    # A loop is easy to draft; the figures of one would promise too much.
    assert repetition([run["generated_ids"]]) <= 0.05
    assert result["settings"]["target"] == str(assets.TARGET)
    tree = load_config(CONFIG, PairConfig).own
    assert result["settings"]["tree"]["num_nodes"] == tree.num_nodes
    assert result["totals"]["identical"] is True
    # A head that knows nothing reaches 1.05, the most likely drafts 1.5.
    assert result["totals"]["tokens_per_round"] > 2
