"""Compiles the whole generation for TPUs that are not at hand, and says what comes out.

    pip install ".[tpu]"
    python scripts/compile_report.py --output docs/compile.md
    python scripts/compile_report.py --only "Llama-3-8B v5e:2x2"

Takes a minute or more per case: the layers of a model are compiled one by one.
"""

import argparse
import dataclasses
import importlib.util
import os
import sys
from pathlib import Path

# Nothing asks for a TPU's metadata: the compiler alone is needed.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

from eagle_jax.cli.command import run_command, say
from eagle_jax.config import TreeConfig, require
from eagle_jax.errors import InputError
from eagle_jax.evaluation.compilation import (
    HBM_GIB,
    Case,
    Report,
    compile_case,
)
from eagle_jax.evaluation.tables import markdown
from eagle_jax.models.eagle_head import EagleHeadConfig
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import TransformerConfig
from eagle_jax.parallel import parse_mesh
from eagle_jax.training.files import write_whole

_GIB = 2**30
_HEADER = (
    *("model", "topology", "mesh", "program", "arguments GiB", "temporaries GiB"),
    *("HBM GiB", "cache GiB", "aliased", "cache copies", "host calls"),
    *("collectives in loops", "compile s"),
)
_WORDS = """\
Per chip, bfloat16, batch size 1, the head included. *Arguments* are weights, caches and
requests; the tables that a head borrows from its target are counted twice, though a run
has them once. *Aliased* says whether the caches' memory is taken over by the results.
*Collectives* are instructions in the loops of a program: each runs once per round or
token, those that find the argmax of an accepted node once per accepted level."""


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
_RUNS = (
    ("Llama-3-8B", "v5e:2x2", "tensor=4", 60),
    ("Llama-3-8B", "v6e:2x2", "tensor=4", 60),
    ("Llama-2-70B", "v5p:2x2x2", "tensor=8", 48),
    ("Llama-3-70B", "v5p:2x2x2", "tensor=8", 48),
    ("Mixtral-8x7B", "v6e:2x2", "tensor=4", 60),
)


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    unwritable = "cannot write the report: {error}"
    return run_command(lambda: _report(_parse(argv)), unwritable=unwritable)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compile the whole generation for TPUs that are not at hand."
    )
    add = parser.add_argument
    names = [f"{name} {topology}" for name, topology, _, _ in _RUNS]
    add("--only", nargs="+", metavar="CASE", choices=names, help=", ".join(names))
    add("--layers", type=int, help="compile as many layers only, to have it quickly")
    add("--output", type=Path, metavar="FILE", help="markdown; without one, print it")
    return parser.parse_args(argv)


def _report(arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            "the TPU compiler is not installed; pip install '.[tpu]' brings it"
        )
    if arguments.layers is not None:
        require(arguments.layers >= 1, "--layers", arguments.layers, "at least 1")
    rows = []
    for case in _cases(arguments):
        name = f"{case.name} {case.topology}"
        say(f"compiling {name}")
        for report in compile_case(case):
            say(f"{name}: {report.program}, {report.seconds:.0f} s")
            rows.append(_row(case, report))
    text = f"{_WORDS}\n\n{markdown(_HEADER, rows)}\n"
    if arguments.output is None:
        print(text)
    else:
        write_whole(
            arguments.output,
            lambda part: _write(part, f"# Compiled for TPUs\n\n{text}"),
        )
        print(f"wrote {arguments.output}")
    return 0


def _cases(arguments: argparse.Namespace) -> list[Case]:
    cases = []
    for name, topology, mesh, num_nodes in _RUNS:
        if arguments.only and f"{name} {topology}" not in arguments.only:
            continue
        target = _MODELS[name]
        layers = arguments.layers or target.num_layers
        target = dataclasses.replace(target, num_layers=min(layers, target.num_layers))
        case = Case(
            name=name,
            target=target,
            head=_head(target),
            topology=topology,
            mesh=parse_mesh(mesh),
            tree=TreeConfig(num_nodes=num_nodes, depth=6, width=10),
        )
        cases.append(case)
    return cases


def _row(case: Case, report: Report) -> list[str]:
    collectives = [f"{n} {name}" for name, n in sorted(report.collectives.items())]
    return [
        case.name,
        case.topology,
        str(case.mesh),
        report.program,
        f"{report.arguments / _GIB:.2f}",
        f"{report.temporaries / _GIB:.2f}",
        f"{HBM_GIB[case.topology.split(':')[0]]:g}",
        f"{report.caches / _GIB:.2f}",
        "yes" if report.aliased >= report.caches else "no",
        str(len(report.copies)),
        str(len(report.host_calls)),
        ", ".join(collectives) or "none",
        f"{report.seconds:.0f}",
    ]


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
