"""The whole generation through the compiler of machines that are not at hand.

Weights, caches and requests are shapes only: nothing is allocated, and a 70B model
compiles on a laptop. What comes out is what the machine would run.
"""

import dataclasses
import functools
import time
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.requests import Requests, make_requests, round_up_slots
from eagle_jax.drafting import EagleHead, TreeDrafter
from eagle_jax.interface import Params
from eagle_jax.models import eagle_head, transformer
from eagle_jax.models.eagle_head import EagleHeadConfig
from eagle_jax.models.transformer import Transformer, TransformerConfig
from eagle_jax.parallel import MeshShape, Placement, place
from eagle_jax.testing import programs

HBM_GIB = {"v5e": 16.0, "v6e": 32.0, "v5p": 95.0}
"""Memory of a chip, by the name in front of a topology's colon."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is compiled.

    Attributes:
        name: Of the model.
        target: Sizes.
        head: Sizes of its EAGLE head.
        topology: Such as "v5e:2x2".
        mesh: Over its devices.
        tree: What is drafted.
        max_length: Prompt plus output. Give it a number that no weight has as a size:
            copies of the cache are found by their shape.
        prompt_length: Of the padded prompt.
        batch_size: `B`.
        dtype: Of weights and caches.
    """

    name: str
    target: TransformerConfig
    head: EagleHeadConfig
    topology: str
    mesh: MeshShape
    tree: TreeConfig
    max_length: int = 2100
    prompt_length: int = 512
    batch_size: int = 1
    dtype: str = "bfloat16"

    @property
    def num_slots(self) -> int:
        """`S` of its caches."""
        return round_up_slots(self.max_length, depth=self.tree.levels)

    @property
    def cache_shape(self) -> tuple[int, ...]:
        """Keys or values of one of the target's layers, on one device."""
        layer, mesh = self.target.layer, self.mesh
        rows = self.batch_size // mesh.data
        heads = max(layer.num_kv_heads // mesh.tensor, 1)
        return (rows, heads, self.num_slots, layer.head_dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What a compiled program is, per device.

    Attributes:
        program: "prefill", "round" for all rounds, or "token" for plain decoding.
        seconds: That compiling took.
        arguments: Bytes of weights, caches and requests.
        temporaries: Bytes beside them.
        aliased: Bytes of arguments whose memory the results take over.
        caches: Bytes of all caches of the target.
        copies: Instructions in loops that copy a whole cache.
        host_calls: Instructions in loops that wait for the host.
        collectives: Instructions in loops that move data between devices, by name.
    """

    program: str
    seconds: float
    arguments: int
    temporaries: int
    aliased: int
    caches: int
    copies: list[str]
    host_calls: list[str]
    collectives: dict[str, int]


def compile_case(case: Case) -> list[Report]:
    """Compiles prefill, all rounds and plain decoding of a case.

    Raises:
        jax.errors.JaxRuntimeError: If the compiler refuses, for instance because the
            program does not fit the chip.
    """
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=case.topology
    ).devices
    target = Transformer(config=case.target, dtype=case.dtype)
    model = EagleHead(config=case.head, dtype=case.dtype)
    drafter = TreeDrafter(model=model, tree=case.tree)
    placement, params = _placed_params(case, devices)
    requests = _shapes(_requests(case), placement)
    settings = {"num_slots": case.num_slots, "acceptance": "greedy"}
    prefill = functools.partial(speculative.prefill, target, drafter, **settings)
    state = _shapes(jax.eval_shape(prefill, params, requests), placement)
    rounds = functools.partial(
        speculative.decode, target, drafter, acceptance=settings["acceptance"]
    )
    plain = functools.partial(
        autoregressive.prefill, target, num_slots=case.num_slots, greedy=True
    )
    plain_state = _shapes(jax.eval_shape(plain, params.target, requests), placement)
    token = functools.partial(autoregressive.decode, target, greedy=True)
    every = (
        ("prefill", prefill, (params, requests), False),
        ("round", rounds, (params, requests, state), True),
        ("token", token, (params.target, requests, plain_state), True),
    )
    return [
        _compile(case, name, placement.spread(program, donates_state=donates), inputs)
        for name, program, inputs, donates in every
    ]


def _compile(case: Case, name: str, program: Any, inputs: tuple[Any, ...]) -> Report:
    started = time.perf_counter()
    compiled = program.lower(*inputs).compile()
    seconds = time.perf_counter() - started
    memory = compiled.memory_analysis()
    lines = programs.loop_lines(compiled.as_text())
    one_array = int(np.prod(case.cache_shape)) * np.dtype(case.dtype).itemsize
    return Report(
        program=name,
        seconds=seconds,
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        caches=2 * case.target.num_layers * one_array,
        copies=programs.find_copies(lines, case.cache_shape),
        host_calls=programs.find_host_calls(lines),
        collectives=programs.count_collectives(lines),
    )


def _placed_params(case: Case, devices: Any) -> tuple[Placement, Params]:
    """Returns the placement on the topology and the shapes of all weights there."""
    key = jax.random.key(0)

    def shapes(init: Any, config: Any) -> Any:
        return jax.eval_shape(lambda key: init(key, config, case.dtype), key)

    weights = shapes(transformer.init_params, case.target)
    head = shapes(eagle_head.init_params, case.head)
    placement = place(
        case.mesh, case.target, batch_size=case.batch_size, devices=devices
    )
    joined = EagleHead.params(head, weights)
    placement = placement.with_drafter(case.head.layer, joined)
    params = Params(
        target=_with(weights, placement.target_shardings(weights)),
        drafter=_with(joined, placement.drafter_shardings(joined)),
    )
    return placement, params


def _requests(case: Case) -> Requests:
    return make_requests(
        [[1] * case.prompt_length] * case.batch_size,
        max_new_tokens=case.max_length - case.prompt_length,
        prompt_bucket=case.prompt_length,
    )


def _shapes(rows: Any, placement: Placement) -> Any:
    """Returns the shapes of requests or a state, where they lie."""
    return _with(rows, placement.row_shardings(rows))


def _with(arrays: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        arrays,
        shardings,
    )
