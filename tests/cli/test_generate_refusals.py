"""Whatever is wrong with the input: one line that says so, exit code 2, no file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.conftest import Main

Refused = Callable[..., None]


@pytest.fixture
def pair(tiny_pair: Path, tmp_path: Path) -> Path:
    """A copy of the tiny pair to break."""
    return Path(shutil.copytree(tiny_pair, tmp_path / "pair"))


@pytest.fixture
def refused(main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs the command and checks how it is refused; `named` stands in the line."""

    def run(argv: list[str], *named: str) -> None:
        output = tmp_path / "out.json"
        assert main([*argv, "--json", str(output)]) == 2
        _check_refusal(capsys, *named)
        assert not list(tmp_path.glob("*out.json*"))

    return run


def _check_refusal(capsys: pytest.CaptureFixture[str], *named: str) -> None:
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert "compiling" not in err, "the refusal came too late"
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert err.splitlines()[-1] == errors[0], "nothing follows, and it is one line"
    for name in named:
        assert name in errors[0]


def _folders(pair: Path) -> list[str]:
    return ["--target", str(pair / "target"), "--draft", str(pair / "head")]


def _plain(pair: Path) -> list[str]:
    return ["--target", str(pair / "target"), "--method", "autoregressive"]


def _change_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _change_weights(folder: Path, **tensors: Any) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path)


def test_a_missing_folder_is_refused(refused: Refused, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    refused(["--target", nowhere, "--draft", nowhere], nowhere, "is no folder; give")


def test_a_missing_head_folder_is_refused(refused: Refused, pair: Path) -> None:
    shutil.rmtree(pair / "head")
    refused(_folders(pair), str(pair / "head"), "is no folder; give")


def test_an_empty_folder_is_refused(refused: Refused, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    argv = ["--target", str(folder), "--draft", str(folder)]
    refused(argv, str(folder), "holds no config.json; give")


def test_an_unknown_home_is_refused(refused: Refused) -> None:
    name = "~nobody-of-that-name/model"
    refused(["--target", name, "--draft", name], name, "is no folder; give")


def test_a_file_instead_of_a_folder_is_refused(refused: Refused, pair: Path) -> None:
    file = str(pair / "target" / "config.json")
    refused(["--target", file, "--draft", file], file, "is no folder; give")


def test_a_name_that_the_hub_does_not_have_is_refused(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: object, **__: object) -> str:
        raise OSError("there is no network\nand more lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    refused(
        ["--target", "nobody/nothing", "--draft", "nobody/nothing"],
        "nobody/nothing is neither a local folder",
        "(there is no network)",
    )


def test_a_missing_head_is_refused(refused: Refused, pair: Path) -> None:
    refused(["--target", str(pair / "target")], "--draft", "autoregressive")


def test_a_missing_target_is_refused(refused: Refused) -> None:
    refused(["--draft", "head"], "--target", "--random tiny", "embedded")


def test_an_unknown_architecture_is_refused(refused: Refused, pair: Path) -> None:
    family = {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}
    _change_json(pair / "target" / "config.json", **family)
    refused(_folders(pair), "GemmaForCausalLM", "known are LlamaForCausalLM")


def test_a_config_that_is_no_json_is_refused(refused: Refused, pair: Path) -> None:
    path = pair / "target" / "config.json"
    path.write_text('{"model_type": "llama",')
    refused(_folders(pair), str(path))


def test_truncated_weights_are_refused(refused: Refused, pair: Path) -> None:
    path = pair / "target" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    refused(_folders(pair), str(path), "no complete safetensors file")


def test_truncated_weights_of_a_head_are_refused(refused: Refused, pair: Path) -> None:
    path = pair / "head" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    refused(_folders(pair), str(path), "no complete safetensors file")


def test_nan_weights_are_refused(refused: Refused, pair: Path) -> None:
    broken = np.full(32, np.nan, np.float32)
    _change_weights(pair / "target", **{"model.norm.weight": broken})
    refused(_folders(pair), "model.norm.weight", "NaN", "damaged")


def test_nan_weights_of_a_head_are_refused(refused: Refused, pair: Path) -> None:
    broken = np.full(32, np.nan, np.float32)
    _change_weights(pair / "head", **{"fc.bias": broken})
    refused(_folders(pair), "fc.bias", "NaN", "damaged")


@pytest.mark.parametrize(("name", "size"), [("hidden_size", 64), ("vocab_size", 512)])
def test_a_head_of_another_target_is_refused(
    refused: Refused, pair: Path, name: str, size: int
) -> None:
    _change_json(pair / "head" / "config.json", **{name: size})
    refused(_folders(pair), f"the head's {name} is {size}", "trained for this target")


def test_a_folder_without_tokenizer_is_refused(refused: Refused, pair: Path) -> None:
    for path in (pair / "target").glob("tokenizer*"):
        path.unlink()
    refused(_plain(pair), str(pair / "target"), "holds no usable tokenizer")


def test_a_tokenizer_without_its_vocabulary_is_refused(
    refused: Refused, pair: Path
) -> None:
    (pair / "target" / "tokenizer.json").unlink()
    path = pair / "target" / "tokenizer_config.json"
    _change_json(path, tokenizer_class="LlamaTokenizer")
    refused(_plain(pair), str(pair / "target"), "there is no vocabulary")


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"model": {"type": "other"}}'])
def test_a_broken_tokenizer_is_refused(refused: Refused, pair: Path, text: str) -> None:
    (pair / "target" / "tokenizer.json").write_text(text)
    refused(_plain(pair), str(pair / "target"), "holds no usable tokenizer")


def test_a_tokenizer_with_more_ids_than_the_embedding_is_refused(
    refused: Refused, pair: Path
) -> None:
    path = pair / "target" / "tokenizer.json"
    added = json.loads(path.read_text())["added_tokens"]
    _change_json(path, added_tokens=[*added, added[-1] | {"id": 300, "content": "<x>"}])
    refused(_plain(pair), "knows ids up to 300", "300 rows")


def _add_nothing(pair: Path) -> None:
    """Makes the tokenizer leave texts without `<s>`."""
    _change_json(pair / "target" / "tokenizer.json", post_processor=None)


def test_a_prompt_without_a_token_is_refused(refused: Refused, pair: Path) -> None:
    _add_nothing(pair)
    refused([*_plain(pair), "--prompt", ""], "prompt '' has no token", "give a prompt")


def test_one_prompt_without_a_token_among_others_is_refused(
    refused: Refused, pair: Path
) -> None:
    _add_nothing(pair)
    prompts = ["--prompt", "the", "--prompt", ""]
    refused([*_plain(pair), *prompts], "prompt '' has no token")


def test_a_prompt_longer_than_the_limit_is_refused(
    refused: Refused, pair: Path
) -> None:
    argv = [*_plain(pair), "--prompt", "x" * 9, "--max-length", "10"]
    refused(argv, "prompt 0 has 10 tokens", "may have 10", "--max-length")


def test_a_prompt_longer_than_the_positions_is_refused(
    refused: Refused, pair: Path
) -> None:
    refused(
        [*_plain(pair), "--prompt", "a", "--prompt", "x" * 300],
        "prompt 1 has 301 tokens",
        "256 positions",
    )


def test_a_limit_beyond_the_positions_is_refused(refused: Refused, pair: Path) -> None:
    refused([*_plain(pair), "--max-length", "257"], "max_length = 257", "256 positions")


def test_chat_without_a_template_is_refused(refused: Refused, pair: Path) -> None:
    refused([*_plain(pair), "--chat"], "--chat needs a chat template")


@pytest.mark.parametrize(
    ("flag", "value", "named"),
    [
        ("--max-new-tokens", "0", "max_new_tokens = 0 must be at least 1"),
        ("--max-new-tokens", "-1", "max_new_tokens = -1 must be at least 1"),
        ("--max-length", "1", "max_length = 1 must be at least 2"),
        ("--batch-size", "0", "batch_size = 0 must be at least 1"),
        ("--num-nodes", "0", "num_nodes = 0 must be at least 1"),
        ("--width", "0", "width = 0 must be at least 1"),
        ("--depth", "-1", "depth = -1 must be 0 or more"),
        ("--temperature", "-1", "temperature = -1.0 must be finite, 0 or more"),
        ("--temperature", "nan", "temperature = nan must be finite, 0 or more"),
        ("--temperature", "inf", "temperature = inf must be finite, 0 or more"),
        ("--top-p", "0", "top_p = 0.0 must be above 0 and at most 1"),
        ("--top-p", "1.5", "top_p = 1.5 must be above 0 and at most 1"),
        ("--top-p", "nan", "top_p = nan must be above 0 and at most 1"),
        ("--top-k", "-1", "top_k = -1 must be 0"),
        ("--min-p", "1.5", "min_p = 1.5 must be 0 (off) to 1"),
        ("--min-p", "-0.1", "min_p = -0.1 must be 0 (off) to 1"),
        ("--min-p", "nan", "min_p = nan must be 0 (off) to 1"),
        ("--kappa", "0", "kappa = 0.0 must be finite and above 0"),
        ("--kappa", "nan", "kappa = nan must be finite and above 0"),
        ("--calibration", "missing.json", "cannot read missing.json"),
        ("--seed", "-1", "seed = -1 must be 0"),
    ],
)
def test_settings_outside_their_range_are_refused(
    refused: Refused, flag: str, value: str, named: str
) -> None:
    refused(["--random", "tiny", flag, value], named)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[tree]\nnodes = 60", "[tree]: unknown key 'nodes'; known are num_nodes"),
        ("[trees]\nnum_nodes = 60", "unknown key 'trees'; known are tree"),
        ('[tree]\nnum_nodes = "60"', "num_nodes = '60' must be int"),
        ("[tree]\nnum_nodes = true", "num_nodes = True must be int"),
        ("[tree]\nrerank = 1", "rerank = 1 must be bool"),
        ("tree = 60", "'tree' must be a table, not 60"),
        ('[decoding]\nmethod = "eagle3"', "method = 'eagle3' must be one of"),
        ("[sampling]\ntop_p = 0", "top_p = 0.0 must be above 0"),
        ("[tree\nnum_nodes = 60", "is not valid TOML"),
    ],
)
def test_settings_files_are_read_strictly(
    refused: Refused, tmp_path: Path, text: str, named: str
) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    refused(["--random", "tiny", "--config", str(path)], str(path), named)


def test_a_missing_settings_file_is_refused(refused: Refused, tmp_path: Path) -> None:
    path = str(tmp_path / "nowhere.toml")
    refused(["--random", "tiny", "--config", path], path, "cannot read")


@pytest.mark.parametrize(
    "sizes", ["huge", "hidden=64", "hidden=64,layers=2,heads=5,vocabulary=300"]
)
def test_random_sizes_that_make_no_model_are_refused(
    refused: Refused, sizes: str
) -> None:
    refused(["--random", sizes], "--random", sizes)


def test_a_random_vocabulary_without_room_for_bytes_is_refused(
    refused: Refused,
) -> None:
    sizes = "hidden=64,layers=2,heads=4,vocabulary=100"
    refused(["--random", sizes], "vocabulary=100", "at least 258")


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("prompts.csv", "a", "must end in .txt, .json or .jsonl"),
        ("prompts.txt", "", "holds no prompt"),
        ("prompts.jsonl", '{"prompt": "a"}\n{', "line 2 is not valid JSON"),
    ],
)
def test_prompt_files_that_hold_none_are_refused(
    refused: Refused, tmp_path: Path, name: str, text: str, named: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    refused(["--random", "tiny", "--prompts", str(path)], str(path), named)


def test_an_output_in_no_folder_is_refused(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nowhere" / "out.json"
    assert main(["--random", "tiny", "--json", str(path)]) == 2
    _check_refusal(capsys, f"cannot write {path}", "give a file in a folder")
    assert not list(tmp_path.iterdir())


def test_a_folder_as_output_is_refused(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--random", "tiny", "--json", str(tmp_path)]) == 2
    _check_refusal(capsys, f"cannot write {tmp_path}", "give a file name")
    assert not list(tmp_path.iterdir())


def test_a_trace_without_a_file_is_refused(
    main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--random", "tiny", "--trace"]) == 2
    _check_refusal(capsys, "--trace needs --json FILE")


def test_streaming_several_texts_at_a_time_is_refused(refused: Refused) -> None:
    argv = ["--random", "tiny", "--stream", "--batch-size", "2"]
    refused(argv, "--stream", "batch_size = 2")


@pytest.mark.parametrize(
    "argv",
    [
        ["--method", "eagle3"],
        ["--dtype", "float64"],
        ["--acceptance", "always"],
        ["--max-new-tokens", "many"],
        ["--no-such-flag"],
    ],
)
def test_flags_that_do_not_parse_exit_with_2(
    main: Main, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert main(["--random", "tiny", *argv]) == 2
    _check_refusal(capsys, argv[0])
