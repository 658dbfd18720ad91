"""The examples of the documentation run, and show what they print."""

import functools
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import nbformat
import pytest
from nbclient import NotebookClient

import eagle_jax
from docs.site import diagrams
from eagle_jax import assets
from examples import (
    own_drafter,
    own_stack_tests,
    own_target,
    peers,
    train_for_own_target,
)
from tests.devices import with_devices


def test_a_model_of_somebody_else_writes_its_own_text_in_fewer_passes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own_target.main()
    shown = capsys.readouterr().out
    greedy, sampled = re.findall(
        r"temperature [01]: identical tokens, (\d+) passes instead of (\d+)", shown
    )
    for passes, tokens in (greedy, sampled):
        assert int(passes) < int(tokens) == len(own_target.TEXT) - 8
    assert shown.startswith(" This is the house that Jack built")


def test_a_head_learns_from_the_texts_of_somebody_elses_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train_for_own_target.main(num_steps=24, num_texts=8)
    shown = capsys.readouterr().out
    rates = re.findall(
        r"identical tokens, .* ([\d.]+) before and ([\d.]+) after", shown
    )
    assert len(rates) == 2
    for before, after in rates:
        assert 1 <= float(before) < float(after) <= train_for_own_target.TREE.depth + 1


def test_a_drafter_of_somebody_else_leaves_the_text_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = functools.partial(
        eagle_jax.load_pair, str(assets.SMALL), method="autoregressive"
    )
    monkeypatch.setattr(eagle_jax, "load_embedded_pair", small)
    own_drafter.main(max_new_tokens=48)
    shown = capsys.readouterr().out
    (counts,) = re.findall(r"identical tokens, (\d+) passes instead of (\d+): ", shown)
    passes, tokens = map(int, counts)
    assert passes < tokens
    assert shown.count("|") == passes


@pytest.mark.parametrize(
    "claim", [name for name in vars(own_stack_tests) if name.startswith("test_")]
)
def test_a_stack_of_somebody_else_has_every_property(claim: str) -> None:
    getattr(own_stack_tests, claim)()


class SeesSiblings(own_target.OwnTarget):
    def forward(
        self, params: Any, tokens: Any, positions: Any, mask: Any, cache: Any
    ) -> Any:
        causal = None if mask is None else jnp.tri(mask.shape[-1], dtype=bool)
        return super().forward(params, tokens, positions, causal, cache)


def test_a_stack_that_sees_siblings_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_stack_tests, "TARGET", SeesSiblings())
    claim: Any = own_stack_tests.test_a_node_reads_its_ancestors_and_nothing_else
    siblings = (tuple(range(own_stack_tests.NODES)), (0,) * (own_stack_tests.NODES - 1))
    with pytest.raises(AssertionError):
        claim.hypothesis.inner_test(siblings)


@pytest.mark.torch
def test_other_programs_write_the_same_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in with_devices(1).items():  # Processes that compile quickly.
        monkeypatch.setenv(name, value)
    few = ["--prompts", "1", "--turns", "1", "--new-tokens", "12"]
    peers.main([*few, "--only", "transformers lookup"])
    rows = [row.split(" | ") for row in capsys.readouterr().out.splitlines()[-2:]]
    found = [(row[0].removeprefix("| "), row[-1]) for row in rows]
    named = ["eagle_jax plain", "transformers lookup"]
    assert found == [(name, "1 of 1 |") for name in named]


NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "tour.ipynb"


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [
        "".join(one.text for one in cell.outputs if one.get("name") == "stdout")
        for cell in cells
    ]


def test_the_tour_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process of its own compiles here as other tests do, and nothing again.
    for name, value in with_devices(1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    shown = printed(notebook)
    NotebookClient(notebook, timeout=None).execute()
    assert printed(notebook) == shown, "jupyter execute --inplace examples/tour.ipynb"


@pytest.mark.parametrize("name", diagrams.PICTURES)
def test_a_diagram_is_what_its_script_draws(name: str) -> None:
    title, height, draw = diagrams.PICTURES[name]
    drawn = diagrams.picture(title, height, draw())
    assert (diagrams.FOLDER / f"{name}.svg").read_text() == drawn
