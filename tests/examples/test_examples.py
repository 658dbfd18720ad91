"""The examples of the documentation run."""

import re
from typing import Any

import jax.numpy as jnp
import pytest

from examples import own_drafter, own_stack_tests, own_target, train_for_own_target


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
    capsys: pytest.CaptureFixture[str],
) -> None:
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
