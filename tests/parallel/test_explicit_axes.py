"""A mesh of explicit axes, such as `jax.make_mesh` returns, serves as one of ours."""

from tests.devices import run_module


def test_explicit_axes_give_the_tokens_of_one_device() -> None:
    lines = run_module("on_explicit_axes", num_devices=4)
    assert lines == [
        f"equal {what} {kind}"
        for kind in ("Auto", "Explicit")
        for what in ("rows of a cache", "texts", "texts within the mesh")
    ]
