# What breaks the protocols is the subject here, so types may not forbid it.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false
"""What a decoder refuses before anything is compiled."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.drafting import TreeDrafter
from eagle_jax.interface import Params
from eagle_jax.testing import ToyModel, ToyTarget
from tests.helpers import refused

TARGET = ToyTarget(vocab_size=8)
DRAFTER = TreeDrafter(
    model=ToyModel(vocab_size=8), tree=TreeConfig(num_nodes=4, depth=2, width=2)
)
PARAMS = Params(target=(), drafter=jnp.float32(1))


def test_equal_decoders_are_one_static_argument() -> None:
    first = Decoder(target=TARGET, drafter=DRAFTER)
    assert first == Decoder(target=ToyTarget(vocab_size=8), drafter=DRAFTER)
    assert hash(first) == hash(Decoder(target=TARGET, drafter=DRAFTER))
    assert first != Decoder(target=TARGET, drafter=DRAFTER, acceptance="greedy")


@dataclasses.dataclass
class Mutable:
    """Not frozen, so it has no hash."""


@dataclasses.dataclass(frozen=True)
class Weighted(ToyTarget):
    weights: Any = None


def make(**parts: Any) -> Decoder:
    return Decoder(**{"target": TARGET, **parts})


ONE = make_requests([[1]], max_new_tokens=1)
HOT = make_requests([[1], [2]], max_new_tokens=1, temperature=[0.0, 0.5])


@pytest.mark.parametrize(
    ("act", "named"),
    [
        (
            lambda: make(drafter=TreeDrafter),
            "drafter is the class TreeDrafter; give an",
        ),
        (lambda: make(target=Mutable()), "a Mutable that has no hash (unhashable type"),
        (lambda: make(target=Weighted(weights=[1])), "(unhashable type: 'list'); make"),
        (
            lambda: make(acceptance="couple"),
            "'couple' is no acceptance rule; there are",
        ),
        (
            lambda: speculative.generate(make(), {"weights": 1}, ONE),
            "params is a dict; give Params(target=..., drafter=...)",
        ),
        (
            lambda: autoregressive.generate(make(acceptance="greedy"), PARAMS, HOT),
            "acceptance = 'greedy' takes the argmax, but temperature = 0.5",
        ),
    ],
)
def test_what_would_fail_later_is_refused(act: Callable[[], Any], named: str) -> None:
    refused(act, named)


def replaced(**changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that changes fields of what it is given."""
    return lambda x: dataclasses.replace(
        x, **{name: change(getattr(x, name)) for name, change in changes.items()}
    )


@pytest.mark.parametrize(
    ("method", "change", "named"),
    [
        ("init_cache", replaced(codes=jnp.transpose), "codes of shape [64, 1] uint32"),
        ("init_cache", replaced(codes=jnp.transpose), "must return [1, 1] uint32"),
        ("forward", replaced(features=lambda x: x[:, 0]), "features of shape [1, 1]"),
        ("forward", replaced(hidden=lambda x: x[:, :1]), "hidden of shape [1, 1, 1]"),
        ("forward", replaced(hidden=lambda x: x[:, :1]), "must return [1, 16, 1]"),
        ("forward", lambda output: (output.hidden, 0), "a tuple, but must return"),
        ("unembed", lambda logits: logits.max(axis=-1), "logits of shape [1] float32"),
        ("unembed", lambda x: x.astype(jnp.bfloat16), "[1, 8] bfloat16, but must"),
        ("commit", replaced(codes=lambda x: x[:, 1:]), "must return [1, 64] uint32"),
        ("commit", lambda cache: {"cache": cache}, "the pytree PyTreeDef({'cache'"),
    ],
)
def test_a_target_that_breaks_the_protocol_is_named(
    method: str, change: Callable[[Any], Any], named: str
) -> None:
    refused_broken(TARGET, method, change, named)


@pytest.mark.parametrize(
    ("method", "change", "named"),
    [
        ("init_state", replaced(length=lambda x: x[0]), "length of shape [] int32"),
        ("prefill_chunk", lambda state: state.length, "returns the pytree"),
        ("advance", replaced(length=lambda x: x[:, None]), "must return [1] int32"),
        (
            "propose",
            lambda both: (replaced(log_values=lambda x: x[:, 1:])(both[0]), both[1]),
            "log_values of shape [1, 3] float32, but must return [1, 4] float32",
        ),
    ],
)
def test_a_drafter_that_breaks_the_protocol_is_named(
    method: str, change: Callable[[Any], Any], named: str
) -> None:
    refused_broken(DRAFTER, method, change, named)


def refused_broken(
    model: Any, method: str, change: Callable[[Any], Any], named: str
) -> None:
    """Refuses a model whose method returns something changed, and names it."""

    def changed(self: Any, *arguments: Any) -> Any:
        return change(getattr(type(model), method)(self, *arguments))

    fields = {
        field.name: getattr(model, field.name) for field in dataclasses.fields(model)
    }
    broken = type("Broken", (type(model),), {method: changed})(**fields)
    is_target = model is TARGET
    decoder = Decoder(
        target=broken if is_target else TARGET,
        drafter=DRAFTER if is_target else broken,
    )
    requests = make_requests([[1, 2]], max_new_tokens=2)
    refused(
        lambda: speculative.generate(decoder, PARAMS, requests),
        f"Broken.{method}",
        named,
    )
