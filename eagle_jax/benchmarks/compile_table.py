"""The report of compiled programs: a markdown file that is made in pieces."""

import importlib.metadata
import re
from pathlib import Path

from eagle_jax.benchmarks.cases import every_case
from eagle_jax.benchmarks.compilation import (
    LOOPS,
    PROGRAMS,
    STEPS,
    Case,
    Report,
)
from eagle_jax.errors import InputError
from eagle_jax.files import write_whole
from eagle_jax.markdown import NOTHING, markdown

_GIB, _MIB = 2**30, 2**20
_KEY = ("model", "topology", "mesh", "rows", "program")
_HEADER = (
    *_KEY,
    *("HBM GiB", "arguments", "temporaries", "changed", "in place"),
    *("cache copies", "host calls", "collectives", "at most", "MiB moved"),
    "compile s",
    *("GFLOP", "GB in memory", "predicted ms"),
)
_OLD = _HEADER.index("GFLOP")  # Reports that are older end before it.
_WORDS = """\
# Compiled for TPUs

`eagle-jax compile-report` sends these programs through the TPU compiler, for which no
TPU is needed, and reads this table from what comes out (last with jax {jax} and libtpu
{libtpu}). Sizes are GiB per chip; weights are bfloat16; the EAGLE head is included.

- **Programs.** *prefill* reads prompts of 512 tokens; *round* is the loop over all
  rounds (60 nodes, of 70B models 48; depth 6, width 10) at temperature 0, *sampled
  round* the same at temperatures above 0, with the noise that drafting and verification
  share, and *token* the loop of plain decoding at temperature 0, all with {slots} cache
  slots; *training step* is one step of the head over rows of 2,048 tokens, target
  included, with a float32 head and AdamW, and those with a name after it are of HASS
  (three levels) and of heads of other kinds, in their published sizes.
- **Sizes.** *Arguments* are weights, caches and requests; the tables that a head
  borrows from its target are counted twice, though a run has them once. *Temporaries*
  are all memory beside them and the results. *Changed* are all caches, or the head and
  its optimizer; *in place* says whether the results take over their memory.
- **Copies** of a whole cache, **host calls** and **collectives** are instructions. Of
  the three loops they are those inside the loop: each runs once per round or token,
  those that find the argmax of an accepted node once per accepted level. Top-p, top-k
  and min-p run only where a row asks for one. In drafts one of their sums then runs
  once per pass of the search for a threshold: at most 10 times on 4 devices, 8 times on
  8 and 6 times on 16. A draw of the target repeats its argmax, one lookup and one sum
  until the token is one that they keep. *MiB moved* counts each instruction once. Of
  the other programs they are all.
- **At most** is the rule: a layer needs two all-reduces, and a table that is split over
  the vocabulary one to look tokens up, two for an argmax (its value and its place) and
  one for the sum that makes it a probability. With `L` layers and depth `D` a token
  takes `2 L + 3` and a round `2 L + 3 + 6 D`, whatever the batch and the tree's width;
  the compiler may join some. A sampled round takes `5 (D + 1) + 3` more: the filters
  of each call need the maximum and the sum of a softmax, the largest probability, and a
  mass and a count, which may travel together; the target's draw also an argmax and a
  lookup, to test a token. Its noise needs none: each device makes
  its own part. A mixture adds up the outputs of its experts on each device before
  they are summed over devices.
- **Compile s** is processor time, all cores together.
- **GFLOP** and **GB in memory** are what a chip computes by XLA's count and what it
  reads from and writes to its main memory: of the loops one round or one token.
  **Predicted ms** is a PREDICTION from the peaks that are published for the chip
  (`eagle_jax/benchmarks/peaks.py`), and a floor: the longer of operations over peak and
  bytes over bandwidth, and after it the collectives' bytes over the links. Rows without
  these figures are older than they.

Nothing runs on a TPU here: there are no speeds, and no tokens to compare. `jax.export`
writes the same programs into one file for CPUs, CUDA GPUs and TPUs;
`tests/decoding/test_export.py` shows how."""


class CompileTable:
    """The rows of a report by model, machine and program; new ones replace old ones.

    Attributes:
        rows: Each row's cells, by the first cells, which tell rows apart.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Begins with the rows of an earlier report, if there is one.

        Raises:
            InputError: If the file is no such report.
        """
        self.rows = {} if path is None else _read(path)

    def add(self, case: Case, report: Report) -> None:
        """Takes the report on a program of a case."""
        row = _row(case, report)
        self.rows[tuple(row[: len(_KEY)])] = row

    def markdown(self) -> str:
        """Returns the table, in the order in which cases and programs are named."""
        places = [(c.name, c.topology, str(c.mesh)) for c in every_case()]

        def order(row: list[str]) -> tuple[int, int, int]:
            place = (row[0], row[1], row[2])
            first = places.index(place) if place in places else len(places)
            return first, PROGRAMS.index(row[4]), int(row[3])

        return markdown(_HEADER, sorted(self.rows.values(), key=order))

    def write(self, path: Path) -> None:
        """Writes the report: the meaning of its columns, and the table."""
        words = _WORDS.format(
            slots=f"{every_case()[0].num_slots:,}",
            jax=importlib.metadata.version("jax"),
            libtpu=importlib.metadata.version("libtpu"),
        )
        write_whole(path, f"{words}\n\n{self.markdown()}\n")


def _row(case: Case, report: Report) -> list[str]:
    collectives = [f"{n} {name}" for name, n in sorted(report.collectives.items())]
    is_training = report.program in STEPS
    is_loop = report.program in LOOPS
    most = report.most_collectives
    return [
        case.name,
        case.topology,
        str(case.mesh),
        str(case.training_rows if is_training else case.batch_size),
        report.program,
        f"{case.chip.memory_gib:g}",
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
        f"{report.flops / 1e9:.1f}",
        f"{report.traffic / 1e9:.2f}",
        f"{1e3 * report.predicted_seconds(case):.2f}" if is_loop else NOTHING,
    ]


def _read(path: Path) -> dict[tuple[str, ...], list[str]]:
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    table = [line.strip("| ") for line in lines if line.startswith("|")]
    cells = [re.split(r"\s*\|\s*", line) for line in table]
    known = len(cells[0]) if cells else 0
    if known < _OLD or tuple(cells[0]) != _HEADER[:known]:
        raise InputError(f"{path} is no report of this command; give another file")
    missing = [NOTHING] * (len(_HEADER) - known)
    return {tuple(row[: len(_KEY)]): row + missing for row in cells[2:]}
