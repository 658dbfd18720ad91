"""Decoding over several devices gives the tokens of one.

Devices are fixed when a process starts, so all of it runs in others.
"""

from pathlib import Path

from tests.devices import run_module


def test_every_mesh_gives_the_tokens_of_one_device(
    tiny_pair: Path, tmp_path: Path
) -> None:
    lines = run_module("on_eight_devices", tiny_pair, tmp_path, num_devices=8)
    assert [line for line in lines if line.startswith("equal")] == [
        *("equal 8 1 1", "equal 8 1 8", "equal 8 2 4", "equal 8 8 1"),
        "equal 2 1 8",
    ]


def test_experts_eagle3_heads_and_training_are_split_over_a_mesh() -> None:
    assert run_module("on_four_devices", num_devices=4) == [
        "equal mixtral data=1,tensor=4",
        "equal eagle3 data=2,tensor=2",
        "no weight moves in training data=2,tensor=2",
    ]


def test_heads_and_draft_vocabularies_are_split_over_a_mesh(
    tiny_pair: Path, tmp_path: Path
) -> None:
    module = "heads_on_eight_devices"
    lines = run_module(module, tiny_pair, tmp_path, num_devices=8)
    assert [line for line in lines if line.startswith("equal")] == [
        *("equal medusa", "equal hydra", "equal hydra, prefix"),
        *("equal small-model 100", "equal eagle2 99"),
    ]


def test_two_devices_load_and_decode_quantized_weights_as_one_does(
    tiny_pair: Path, tmp_path: Path
) -> None:
    module = "quantized_on_two_devices"
    lines = run_module(module, tiny_pair, tmp_path, num_devices=2)
    assert lines == ["equal 8", "equal 4"]
