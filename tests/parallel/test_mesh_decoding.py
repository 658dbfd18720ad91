"""Decoding over several devices gives the tokens of one.

Devices are fixed when a process starts, so all of it runs in others.
"""

from pathlib import Path

from tests.devices import run_module


def test_every_mesh_gives_the_tokens_of_one_device(
    tiny_pair: Path, tmp_path: Path
) -> None:
    lines = run_module("on_eight_devices", tiny_pair, tmp_path, num_devices=8)
    assert [line for line in lines if line.startswith(("equal", "no weight"))] == [
        "equal llama data=2,tensor=4",
        "equal gpt-oss data=1,tensor=8",
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
        "equal draft vocabulary",
    ]


def test_explicit_axes_give_the_tokens_of_one_device() -> None:
    """A mesh of explicit axes, such as `jax.make_mesh` returns, is as one of ours."""
    lines = run_module("on_explicit_axes", num_devices=4)
    assert lines == [
        f"equal {what} {kind}"
        for kind in ("Auto", "Explicit")
        for what in ("rows of a cache", "texts", "texts within the mesh")
    ]
