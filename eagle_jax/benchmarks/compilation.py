"""The whole generation and a training step through the compiler of other machines.

Weights, caches and requests are shapes only: nothing is allocated, and a 70B model
compiles on a laptop. The programs are those that the machine would run.
"""

import dataclasses
import functools
import importlib.util
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import use_abstract_mesh

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests, round_up_slots
from eagle_jax.drafting import TreeDrafter
from eagle_jax.heads import HEADS, Head
from eagle_jax.heads.eagle import EagleLoss
from eagle_jax.heads.eagle3 import Eagle3Settings
from eagle_jax.heads.rows import PackedRows
from eagle_jax.interface import Params
from eagle_jax.models import transformer
from eagle_jax.models.cache import KeyValues
from eagle_jax.models.joined import join_products
from eagle_jax.models.transformer import Transformer, TransformerConfig
from eagle_jax.parallel import MeshShape, PairSharding, shard_pair
from eagle_jax.prng import make_key
from eagle_jax.testing import programs
from eagle_jax.training.config import DataConfig, TrainConfig, new_head
from eagle_jax.training.step import (
    StepConfig,
    TrainState,
    read_target,
    state_shapes,
    train_step,
)

STEPS: dict[str, TrainConfig] = {
    **{
        f"training step, {name}": TrainConfig(head=kind.Settings())
        for name, kind in HEADS.items()
    },
    "training step, alignment 3": TrainConfig(
        loss=EagleLoss(alignment=3, top_k_loss=10)
    ),
}
"""The ways of training that are compiled, by the names of their programs."""

PROGRAMS = ("prefill", "round", "sampled round", "token", *STEPS)
"""Names of the compiled programs: "round" is all rounds, "token" is plain decoding."""

LOOPS = ("round", "sampled round", "token")
"""The `PROGRAMS` that decode; a "sampled round" draws, the others are greedy."""

GPU = "h100"
"""The topology of one NVIDIA H100, whose figures for the compiler stand beside this."""

_ENOUGH_LAYERS = 7  # For the three layers that published EAGLE-3 heads read.

ENVIRONMENT = {
    # The compiler alone is needed, and it asks for no TPU's metadata.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # Several processes may compile at once, as none holds a TPU.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""What stands in the environment of a process that compiles for TPUs without one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a machine and the sizes that its programs are compiled for.

    Attributes:
        name: The model's name.
        target: The target's sizes.
        topology: The machine's topology, such as "v5e:2x2", or `GPU`.
        mesh: The shape of the mesh over its devices.
        tree: The tree that is drafted.
        max_length: The tokens of prompt and output. Give it a number that no weight has
            as a size: copies of the cache are found by their shape.
        prompt_length: The tokens of the padded prompt, `T`.
        batch_size: The number of requests, `B`.
        training_rows: The number of rows of a training step.
        row_length: The number of tokens of each of these rows.
        dtype: The type of weights and caches; a head in training is float32.
        kind: The kind of head that drafts, whose trees are grown by its confidences.
    """

    name: str
    target: TransformerConfig
    topology: str
    mesh: MeshShape
    tree: TreeConfig
    max_length: int = 2100
    prompt_length: int = 512
    batch_size: int = 1
    training_rows: int = 4
    row_length: int = 2048
    dtype: str = "bfloat16"
    kind: str = "eagle2"

    @property
    def head(self) -> Head:
        """Its head, of the published sizes."""
        config = TrainConfig(head=HEADS[self.kind].Settings())
        return dataclasses.replace(new_head(self.target, config), dtype=self.dtype)

    @property
    def num_slots(self) -> int:
        """The number of slots of its caches, `S`."""
        return round_up_slots(self.max_length, depth=self.tree.levels)

    def with_layers(self, layers: int) -> "Case":
        """Returns the case with only `layers` layers, which compiles quickly."""
        target = dataclasses.replace(self.target, num_layers=layers)
        name = f"{self.name} ({layers} layers)"
        return dataclasses.replace(self, name=name, target=target)

    @property
    def extra(self) -> str:
        """The extra of this package that brings the machine's compiler."""
        return "gpu-compile" if self.topology == GPU else "tpu-compile"

    def __str__(self) -> str:
        """Returns its name with its machine, which no other case has."""
        kind = "" if self.kind == Case.kind else f"{self.kind} "
        return f"{self.name} {kind}{self.topology} {self.mesh} rows={self.batch_size}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The memory and the instructions of a compiled program, per device.

    Attributes:
        program: The program's name, one of `PROGRAMS`.
        memory: The bytes of arguments, temporaries and results that take over no
            argument's memory.
        temporaries: The bytes of memory beside arguments and results.
        aliased: The bytes of arguments whose memory the results take over.
        state: The bytes that it changes: all caches, or a head and its optimizer. 0 for
            a prefill, which makes them.
        lines: The instructions, where it decodes those of its loops; `testing.programs`
            reads them.
        copies: The instructions that copy a whole cache.
        kernels: How many kernels a GPU starts for a round or token, as
            `testing.programs` counts them; 0 elsewhere.
    """

    program: str
    memory: int
    temporaries: int
    aliased: int
    state: int
    lines: list[str]
    copies: list[str]
    kernels: int = 0

    @property
    def problems(self) -> list[str]:
        """What the program does and must not do, in words."""
        found = [f"copies a cache: {line}" for line in self.copies]
        calls = programs.find_host_calls(self.lines)
        found += [f"waits for the host: {line}" for line in calls]
        if self.aliased < self.state:
            found.append(f"changes {self.aliased} of {self.state} bytes in place")
        return found

    def __str__(self) -> str:
        """Returns what it takes, in one line."""
        found = programs.count_collectives(self.lines)
        collectives = [f"{number} {name}" for name, number in sorted(found.items())]
        parts = (
            self.program,
            f"{len(self.copies)} copies of caches",
            f"{len(programs.find_host_calls(self.lines))} host calls",
            f"{len(programs.find_open_loops(self.lines))} open loops",
            *([f"{self.kernels} kernels"] if self.kernels else []),
            ", ".join(collectives) or "no collectives",
            f"{self.memory / 2**30:.2f} GiB per chip, {self.temporaries / 2**30:.2f} "
            "of them temporary",
        )
        return " | ".join(parts)


def has_compiler(extra: str) -> bool:
    """Returns whether the compiler is installed that an extra brings."""
    module = {"gpu-compile": "jax_cuda13_plugin", "tpu-compile": "libtpu"}[extra]
    return importlib.util.find_spec(module) is not None


def compile_case(case: Case, only: Sequence[str]) -> Iterator[Report]:
    """Compiles the programs of a case that are named, one after the other.

    Raises:
        jax.errors.JaxRuntimeError: If the compiler refuses, for instance because a
            program does not fit the chip.
    """
    sharding, params = _sharded_params(case, _devices(case))
    if set(only) - STEPS.keys():
        yield from _decoding(case, sharding, params, only)
    for program in STEPS:
        if program in only:
            yield _training(case, sharding, params, program)


def _devices(case: Case) -> Any:
    """Returns the devices of a topology, which are not there."""
    if case.topology == GPU:
        figures = Path(__file__).with_name(f"{GPU}.txtpb").read_text()
        kind: dict[str, Any] = {"platform": "cuda", "topology": "1x1x1"}
        return topologies.get_topology_desc(target_config=figures, **kind).devices
    # A host of one chip must be asked for: libtpu takes several for granted.
    alone = {"chips_per_host_bounds": (1, 1, 1)} if case.mesh.num_devices == 1 else {}
    return topologies.get_topology_desc(
        platform="tpu", topology_name=case.topology, **alone
    ).devices


def _decoding(
    case: Case, sharding: PairSharding, params: Params, only: Sequence[str]
) -> Iterator[Report]:
    config = case.head.with_features(case.target)
    target = Transformer(config=config, dtype=case.dtype)
    drafter = TreeDrafter(model=case.head, tree=case.tree)
    requests = make_requests(
        [[1] * case.prompt_length] * case.batch_size,
        max_new_tokens=case.max_length - case.prompt_length,
        prompt_bucket=case.prompt_length,
    )
    requests = _shapes(requests, sharding)
    bind, slots = functools.partial, {"num_slots": case.num_slots}
    greedy = Decoder(target=target, drafter=drafter, acceptance="greedy")
    sampled = dataclasses.replace(greedy, acceptance="coupled")
    prefill = bind(speculative.prefill, greedy, **slots)
    alone = Decoder(target=target, acceptance="greedy")
    plain = bind(speculative.prefill, alone, **slots)
    state = _shapes(jax.eval_shape(prefill, params, requests), sharding)
    plain_state = _shapes(jax.eval_shape(plain, params, requests), sharding)
    every = {
        "prefill": (prefill, requests),
        "round": (bind(speculative.decode, greedy), state),
        "sampled round": (bind(speculative.decode, sampled), state),
        "token": (bind(speculative.decode, alone), plain_state),
    }
    for name, (program, rows) in every.items():
        if name in only:
            donates = name in LOOPS
            if case.mesh.num_devices == 1:
                sharded = jax.jit(program, donate_argnums=(1,) if donates else ())
            else:
                sharded = sharding.shard(program, donates_state=donates)
            yield _compile(case, name, sharded, (params, rows), _caches(rows))


def _training(
    case: Case, sharding: PairSharding, params: Params, program: str
) -> Report:
    """Compiles a step, sharded as a run of `training.loop` shards it."""
    config = _step_config(case, STEPS[program])
    layer = getattr(config.head.config, "layer", None) or case.target.layer
    head = jax.eval_shape(lambda: config.head.init(make_key(0)))
    sharding = sharding.with_drafter(layer, head)
    state = state_shapes(config, sharding)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    shape = (case.training_rows, case.row_length)
    numbers = np.zeros(shape, np.int32)
    rows = PackedRows(
        tokens=numbers,
        segments=numbers,
        positions=numbers,
        loss_mask=numbers.astype(bool),
    )
    read = sharding.shard(functools.partial(read_target, config))

    def run(state: TrainState, target: Any, rows: PackedRows) -> Any:
        return train_step(state, target, rows, read(target, rows), config=config)

    step = jax.jit(
        run,
        donate_argnums=(0,),
        out_shardings=(shardings, sharding.everywhere),
    )
    inputs = (state, params.target, _shapes(rows, sharding))
    return _compile(case, program, step, inputs, jax.tree.leaves(state))


def _step_config(case: Case, config: TrainConfig) -> StepConfig:
    """Returns the static settings of a step, with a head of the published sizes."""
    settings = config.head
    if isinstance(settings, Eagle3Settings) and case.target.num_layers < _ENOUGH_LAYERS:
        settings = dataclasses.replace(settings, feature_layers="0 1 2")
    data = DataConfig(row_length=case.row_length)
    config = dataclasses.replace(config, head=settings, data=data)
    head = new_head(case.target, config)
    target = head.with_features(case.target)
    return StepConfig.of(config, Transformer(config=target, dtype=case.dtype), head)


def _compile(
    case: Case, name: str, program: Any, inputs: tuple[Any, ...], changed: list[Any]
) -> Report:
    """Compiles a program that changes the arrays `changed`; reports on it."""
    is_gpu = case.topology == GPU
    mesh = jax.tree.leaves(inputs)[0].sharding.mesh
    # From it kernels learn which device they are compiled for.
    with use_abstract_mesh(mesh.abstract_mesh):
        lowered = program.lower(*inputs)
    compiled, text = _with_text(lowered, is_gpu=is_gpu)
    memory = compiled.memory_analysis()
    is_loop = name in LOOPS
    lines = programs.loop_lines(text) if is_loop else programs.every_line(text)
    parts = [x.sharding.shard_shape(x.shape) for x in changed]
    pairs = zip(parts, changed, strict=True)
    state = sum(math.prod(part) * x.dtype.itemsize for part, x in pairs)
    taken = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return Report(
        program=name,
        memory=taken + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        state=state,
        lines=lines,
        kernels=programs.count_kernels(text) if is_gpu and is_loop else 0,
        copies=[
            line
            for part in (set(parts) if is_loop else ())
            for line in programs.find_copies(lines, part)
        ],
    )


def _with_text(lowered: Any, *, is_gpu: bool) -> tuple[Any, str]:
    """Returns the compiled program and its optimised HLO, as the compiler writes it.

    `Compiled.as_text` reads the program back first, and jaxlib refuses some that libtpu
    makes: those whose gathers run on a chip's SparseCore.
    """
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        if is_gpu:
            options["xla_gpu_autotune_level"] = 0  # It would run programs on a device.
        compiled = lowered.compile(compiler_options=options)
        # Modules that it compiles on the way are numbered after it.
        file = min(Path(folder).glob("module_*after_optimizations.txt"))
        return compiled, file.read_text()


def _caches(state: Any) -> list[Any]:
    """Returns the keys and values of all layers, the head's included."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, KeyValues))
    return jax.tree.leaves([node for node in nodes if isinstance(node, KeyValues)])


def _sharded_params(case: Case, devices: Any) -> tuple[PairSharding, Params]:
    """Returns the sharding on the topology, and the sharded shapes of all weights."""

    def shapes(init: Any, *sizes: Any) -> Any:
        return jax.eval_shape(lambda: init(make_key(0), *sizes, case.dtype))

    weights = shapes(transformer.init_params, case.target)
    sharding = shard_pair(
        case.mesh, case.target, batch_size=case.batch_size, devices=devices
    )
    head = shapes(case.head.init)
    if case.mesh.num_devices == 1:  # As the engine opens them.
        weights, head = jax.eval_shape(join_products, (weights, head))
    joined = case.head.join(head, weights)
    sharding = sharding.with_drafter(case.head.config.layer, joined)
    params = Params(
        target=_with(weights, sharding.target_shardings(weights)),
        drafter=_with(joined, sharding.drafter_shardings(joined)),
    )
    return sharding, params


def _shapes(rows: Any, sharding: PairSharding) -> Any:
    """Returns the shapes of requests or a state, with their shardings."""
    return _with(rows, sharding.row_shardings(rows))


def _with(arrays: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        arrays,
        shardings,
    )
