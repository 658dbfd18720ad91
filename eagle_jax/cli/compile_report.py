"""Compiles generation and training for TPUs that are not at hand; says what comes out.

    pip install ".[tpu-compile]"
    eagle-jax compile-report --output docs/compile.md
    eagle-jax compile-report --only "Llama-3-8B v5e:2x2" --layers 2

Takes minutes per case: the layers of a model are compiled one by one. So a report can
be made in pieces: rows of an earlier one that are not compiled now stay in it.
"""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import os
import re
from pathlib import Path

import jax

from eagle_jax.benchmarks.compilation import (
    HBM_GIB,
    LOOPS,
    PROGRAMS,
    Case,
    Report,
    compile_case,
)
from eagle_jax.cli.command import Parser, run_command, say
from eagle_jax.cli.files import check_writable
from eagle_jax.config import TreeConfig, require
from eagle_jax.errors import InputError
from eagle_jax.evaluation.markdown import NOTHING, markdown
from eagle_jax.files import write_whole
from eagle_jax.models.eagle_head import EagleHeadConfig
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import TransformerConfig
from eagle_jax.parallel import parse_mesh

_ENVIRONMENT = {
    # Nothing asks for a TPU's metadata: the compiler alone is needed.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # Several may compile at once: none holds a TPU.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_GIB, _MIB = 2**30, 2**20
_KEY = ("model", "topology", "mesh", "rows", "program")
_HEADER = (
    *_KEY,
    *("HBM GiB", "arguments", "temporaries", "changed", "in place"),
    *("cache copies", "host calls", "collectives", "at most", "MiB moved"),
    "compile s",
)
_WORDS = """\
# Compiled for TPUs

`scripts/compile_report.py` sends these programs through the TPU compiler, for which no
TPU is needed, and reads this table from what comes out (last with jax {jax} and libtpu
{libtpu}). Sizes are GiB per chip; weights are bfloat16; the EAGLE head is included.

- **Programs.** *prefill* reads prompts of 512 tokens; *round* is the loop over all
  rounds (60 nodes, of 70B models 48; depth 6, width 10) at temperature 0, *sampled
  round* the same at temperatures above 0, with the noise that drafting and verification
  share, and *token* the loop of plain decoding at temperature 0, all with {slots} cache
  slots; *training step* is one step of the head over rows of 2,048 tokens, target
  included, with a float32 head and AdamW.
- **Sizes.** *Arguments* are weights, caches and requests; the tables that a head
  borrows from its target are counted twice, though a run has them once. *Temporaries*
  are all memory beside them and the results. *Changed* are all caches, or the head and
  its optimizer; *in place* says whether the results take over their memory.
- **Copies** of a whole cache, **host calls** and **collectives** are instructions. Of
  the three loops they are those inside the loop: each runs once per round or token,
  those that find the argmax of an accepted node once per accepted level. Top-p, top-k
  and min-p run only where a row asks for one; two of their collectives run thirty times
  then, once per step of the search for thresholds. *MiB moved* counts each instruction
  once. Of the other programs they are all.
- **At most** is the rule: a layer needs two all-reduces, and a table that is split over
  the vocabulary one to look tokens up, two to find the likeliest (value and place) and
  one for the sum that makes it a probability. With `L` layers and depth `D` a token
  takes `2 L + 3` and a round `2 L + 3 + 6 D`, whatever the batch and the tree's width;
  the compiler may join some. A sampled round takes `5 (D + 1)` more: the filters of
  each call need the maximum and the sum of a softmax, the largest probability, and the
  mass and the count of a step of the search. Its noise needs none: each device makes
  its own part. In a mixture each expert has one of a layer's two, and only those run
  whose expert is chosen.
- **Compile s** is processor time, all cores together.

Nothing runs on a TPU here: there are no speeds, and no tokens to compare. `jax.export`
writes the same programs into one file for CPUs, CUDA GPUs and TPUs;
`tests/decoding/test_export.py` shows how."""


def _target(
    sizes: tuple[int, int, int, int, int, int], *, theta: float, experts: int = 0
) -> TransformerConfig:
    """Returns a decoder: width, inner width, layers, heads, key/value heads, tokens."""
    width, inner, layers, heads, kv_heads, vocabulary = sizes
    layer = LayerConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width // heads,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=theta),
        num_experts=experts,
        experts_per_token=2 if experts else 0,
    )
    return TransformerConfig(
        layer=layer, num_layers=layers, vocab_size=vocabulary, max_positions=8192
    )


def _head(target: TransformerConfig) -> EagleHeadConfig:
    """Returns the head that was published for such a target."""
    layer = dataclasses.replace(
        target.layer,
        num_experts=0,
        experts_per_token=0,
        num_kv_heads=(
            target.layer.num_heads
            if target.layer.num_experts
            else target.layer.num_kv_heads
        ),
    )
    return EagleHeadConfig(
        layer=layer, vocab_size=target.vocab_size, max_positions=2048
    )


_MODELS = {
    "Llama-3-8B": _target((4096, 14336, 32, 32, 8, 128256), theta=5e5),
    "Llama-2-70B": _target((8192, 28672, 80, 64, 8, 32000), theta=1e4),
    "Llama-3-70B": _target((8192, 28672, 80, 64, 8, 128256), theta=5e5),
    "Mixtral-8x7B": _target((4096, 14336, 32, 32, 8, 32000), theta=1e6, experts=8),
}
# Model, topology, mesh, nodes, rows of a batch, rows of a training step.
_RUNS = (
    ("Llama-3-8B", "v5e:2x2", "tensor=4", 60, 1, 1),
    ("Llama-3-8B", "v5e:2x2", "tensor=4", 60, 8, 4),
    ("Llama-3-8B", "v6e:1x1", "tensor=1", 60, 1, 1),
    ("Llama-3-8B", "v6e:2x2", "tensor=4", 60, 1, 4),
    ("Llama-3-8B", "v6e:2x2", "data=2,tensor=2", 60, 8, 4),
    ("Llama-2-70B", "v5p:2x2x2", "tensor=8", 48, 1, 4),
    ("Llama-3-70B", "v6e:4x4", "tensor=16", 48, 1, 4),
    ("Mixtral-8x7B", "v6e:2x2", "tensor=4", 60, 1, 1),
)


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    unwritable = "cannot write the report: {error}"
    return run_command(lambda: _report(_parse(argv)), unwritable=unwritable)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        description="Compile generation and training for TPUs that are not at hand."
    )
    add = parser.add_argument
    names = ", ".join(_label(case) for case in _every_case())
    add("--only", metavar="CASE", help=f"those that begin so: {names}")
    add("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    add("--layers", type=int, help="compile as many layers only, to have it quickly")
    add("--output", type=Path, metavar="FILE", help="markdown; without one, print it")
    return parser.parse_args(argv)


def _report(arguments: argparse.Namespace) -> int:
    if arguments.layers is not None:
        require(arguments.layers >= 1, "--layers", arguments.layers, "at least 1")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    if "JAX_ENABLE_COMPILATION_CACHE" not in os.environ:
        # What is compiled for a chip that is not there cannot be read back.
        jax.config.update("jax_enable_compilation_cache", False)
    cases, rows = _chosen(arguments), {}
    if arguments.output is not None:
        check_writable(arguments.output)
        rows = _read(arguments.output)
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            "the TPU compiler is not installed; pip install '.[tpu-compile]' brings it"
        )
    refused, wanted = 0, list[str](arguments.programs)
    for case, program in itertools.product(cases, wanted):
        name = f"{_label(case)}: {program}"
        try:
            (report,) = compile_case(case, (program,))
        except jax.errors.JaxRuntimeError as error:
            say(f"{name}: the compiler refuses it: {str(error).splitlines()[0]}")
            refused += 1
            continue
        say(f"{name}, {report.seconds:.0f} s")
        row = _row(case, report)
        rows[tuple(row[: len(_KEY)])] = row
        if arguments.output is not None:
            _write(arguments.output, rows)
    if arguments.output is None:
        print(markdown(_HEADER, rows.values()))
    else:
        print(f"wrote {arguments.output}")
    return 1 if refused else 0


def _every_case() -> list[Case]:
    return [
        Case(
            name=name,
            target=_MODELS[name],
            head=_head(_MODELS[name]),
            topology=topology,
            mesh=parse_mesh(mesh),
            tree=TreeConfig(num_nodes=num_nodes, depth=6, width=10),
            batch_size=batch_size,
            training_rows=training_rows,
        )
        for name, topology, mesh, num_nodes, batch_size, training_rows in _RUNS
    ]


def _label(case: Case) -> str:
    return f"{case.name} {case.topology} {case.mesh} rows={case.batch_size}"


def _chosen(arguments: argparse.Namespace) -> list[Case]:
    """Returns the cases to compile.

    Raises:
        InputError: If none begins with what was asked for.
    """
    cases = _every_case()
    if arguments.only is not None:
        cases = [case for case in cases if _label(case).startswith(arguments.only)]
    if not cases:
        names = ", ".join(_label(case) for case in _every_case())
        raise InputError(f"--only {arguments.only!r}: no case begins so; see {names}")
    if arguments.layers is None:
        return cases
    return [_cut(case, arguments.layers) for case in cases]


def _cut(case: Case, layers: int) -> Case:
    target = dataclasses.replace(case.target, num_layers=layers)
    name = f"{case.name} ({layers} layers)"
    return dataclasses.replace(case, name=name, target=target)


def _row(case: Case, report: Report) -> list[str]:
    collectives = [f"{n} {name}" for name, n in sorted(report.collectives.items())]
    is_training = report.program == "training step"
    is_loop = report.program in LOOPS
    most = report.most_collectives
    return [
        case.name,
        case.topology,
        str(case.mesh),
        str(case.training_rows if is_training else case.batch_size),
        report.program,
        f"{HBM_GIB[case.topology.split(':')[0]]:g}",
        f"{report.arguments / _GIB:.2f}",
        f"{report.temporaries / _GIB:.2f}",
        f"{report.state / _GIB:.2f}" if report.state else NOTHING,
        ("yes" if report.is_in_place else "no") if report.state else NOTHING,
        str(len(report.copies)) if is_loop else NOTHING,
        str(len(report.host_calls)),
        ", ".join(collectives) or "none",
        NOTHING if most is None else str(most),
        f"{report.moved / _MIB:.1f}",
        f"{report.seconds:.0f}",
    ]


def _read(path: Path) -> dict[tuple[str, ...], list[str]]:
    """Returns the rows of an earlier report by model, place and program.

    Raises:
        InputError: If the file is something else.
    """
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    table = [line.strip("| ") for line in lines if line.startswith("|")]
    cells = [re.split(r"\s*\|\s*", line) for line in table]
    if not cells or tuple(cells[0]) != _HEADER:
        raise InputError(f"{path} is no report of this command; give another file")
    return {tuple(row[: len(_KEY)]): row for row in cells[2:]}


def _write(path: Path, rows: dict[tuple[str, ...], list[str]]) -> None:
    """Writes the report, in the order in which cases and programs are named here."""
    places = [(c.name, c.topology, str(c.mesh)) for c in _every_case()]

    def order(row: list[str]) -> tuple[int, int, int]:
        place = (row[0], row[1], row[2])
        first = places.index(place) if place in places else len(places)
        return first, PROGRAMS.index(row[4]), int(row[3])

    words = _WORDS.format(
        slots=f"{_every_case()[0].num_slots:,}",
        jax=importlib.metadata.version("jax"),
        libtpu=importlib.metadata.version("libtpu"),
    )
    text = f"{words}\n\n{markdown(_HEADER, sorted(rows.values(), key=order))}\n"
    write_whole(path, text)
