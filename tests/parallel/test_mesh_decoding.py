"""Decoding over several devices gives the tokens of one.

Devices are fixed when a process starts, so all of it runs in two others.
"""

from pathlib import Path

from tests.devices import run_module


def test_every_mesh_gives_the_tokens_of_one_device(
    tiny_pair: Path, tmp_path: Path
) -> None:
    lines = run_module("on_eight_devices", tiny_pair, tmp_path, num_devices=8)
    assert [line for line in lines if line.startswith(("equal", "no weight"))] == [
        "equal llama data=2,tensor=4",
        "equal few key/value heads data=1,tensor=8",
        "equal gpt-oss data=1,tensor=4",
        "equal eagle3, processors data=2,tensor=2",
        "no weight moves in training data=2,tensor=2",
    ]


def test_files_heads_and_quantized_weights_are_split_over_a_mesh(
    tiny_pair: Path, tmp_path: Path
) -> None:
    module = "loading_on_eight_devices"
    lines = run_module(module, tiny_pair, tmp_path, num_devices=8)
    assert [line for line in lines if line.startswith("equal")] == [
        "equal files",
        "equal bits 8",
        "equal bits 4",
        "equal hydra, prefix",
        "equal dspark",
        "equal 100",
        "equal 99",
    ]
