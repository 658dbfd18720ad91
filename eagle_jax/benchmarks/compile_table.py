"""The report of compiled programs: a markdown file that is made in pieces.

People may write into the file: only the tables of this command change in it, and the
versions that it names.
"""

import dataclasses
import importlib.metadata
import itertools
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
_VERSIONS = re.compile(r"(last\s+with\s+jax\s+)\S+(\s+and\s+libtpu\s+)[^\s)]+(?=\))")
_WORDS = """\
# Compiled for TPUs

`eagle-jax compile-report` sends these programs through the TPU compiler, for which no
TPU is needed, and reads this table from what comes out (last with jax ? and libtpu
?). Sizes are GiB per chip; weights are bfloat16; the EAGLE head is included.

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
  takes `2 L + 3` and a round `2 L + 3 + 6 D`, of one row whatever the tree's width; the
  compiler may join some, and gather more for several rows. A sampled round takes
  `5 (D + 1) + 3` more: the filters of each call need the maximum and the sum of a
  softmax, the largest probability, and a mass and a count, which may travel together;
  the target's draw also an argmax and a lookup, to test a token. Its noise needs none:
  each device makes its own part. A mixture adds up the outputs of its experts on each
  device before they are summed over devices.
- **Compile s** is processor time, all cores together.
- **GFLOP** and **GB in memory** are what a chip computes by XLA's count and what it
  reads from and writes to its main memory: of the loops one round or one token, in
  which a loop over the blocks of a cache counts once. Copies of weights in another
  layout that are made once, before the loop, are *temporaries* alone.
  **Predicted ms** is a PREDICTION from the peaks that are published for the chip
  (`eagle_jax/benchmarks/peaks.py`), and a floor: the longer of operations over peak and
  bytes over bandwidth, and after it the collectives' bytes over the links. Rows made
  before these columns existed lack them.

Nothing runs on a TPU here: there are no speeds, and no tokens to compare. `jax.export`
writes the same programs into one file for CPUs, CUDA GPUs and TPUs;
`tests/decoding/test_export.py` shows how."""


@dataclasses.dataclass
class _Table:
    """A table of a report.

    Attributes:
        rows: Each row's cells, as many as the header of new reports has.
        written: The lines that an earlier report has; `None` once a row is new.
    """

    rows: list[list[str]]
    written: str | None = None

    def add(self, row: list[str]) -> None:
        """Takes a row: in place of the old one, or before the first that is later."""
        self.written = None
        keys = [old[: len(_KEY)] for old in self.rows]
        if row[: len(_KEY)] in keys:
            self.rows[keys.index(row[: len(_KEY)])] = row
        else:
            after = (i for i, old in enumerate(self.rows) if _order(old) > _order(row))
            self.rows.insert(next(after, len(self.rows)), row)

    def markdown(self) -> str:
        """Returns the table, as it was read where nothing is new."""
        return markdown(_HEADER, self.rows) if self.written is None else self.written


class CompileTable:
    """The report: rows by model, machine and program; new ones replace old ones."""

    def __init__(self, path: Path | None = None) -> None:
        """Begins with all lines of an earlier report, if there is one.

        Raises:
            InputError: If the file is no such report.
        """
        if path is not None and path.exists():
            self._parts = _read(path)
        else:
            words = _WORDS.format(slots=f"{every_case()[0].num_slots:,}")
            self._parts = [f"{words}\n", _Table([]), ""]
        self._tables = [part for part in self._parts if isinstance(part, _Table)]

    def add(self, case: Case, report: Report) -> None:
        """Takes the report on a program of a case.

        A row that no table has goes to one with rows of the same model, or else to the
        first.
        """
        row = _row(case, report)
        for size in (len(_KEY), 1):
            for table in self._tables:
                if any(old[:size] == row[:size] for old in table.rows):
                    table.add(row)
                    return
        self._tables[0].add(row)

    def markdown(self) -> str:
        """Returns the tables alone; new rows are in the order of cases and programs."""
        return "\n\n".join(table.markdown() for table in self._tables)

    def write(self, path: Path) -> None:
        """Writes the report: what was read, or what columns mean, and the tables."""
        text = "\n".join(
            part.markdown() if isinstance(part, _Table) else part
            for part in self._parts
        )
        if any(table.written is None for table in self._tables):
            jax, libtpu = map(importlib.metadata.version, ("jax", "libtpu"))
            text = _VERSIONS.sub(rf"\g<1>{jax}\g<2>{libtpu}", text)
        write_whole(path, text)


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


def _order(row: list[str]) -> tuple[int, int, int]:
    """Returns where a row stands: by its case, program and number of rows."""
    places = [(c.name, c.topology, str(c.mesh)) for c in every_case()]
    # The name of a model that is not whole goes on with " (", see `cases`.
    place = (row[0].split(" (")[0], row[1], row[2])
    case = places.index(place) if place in places else len(places)
    program = PROGRAMS.index(row[4]) if row[4] in PROGRAMS else len(PROGRAMS)
    return case, program, int(row[3])


def _read(path: Path) -> list[str | _Table]:
    """Returns what a report holds, in its order: tables, and the text between them."""
    parts: list[str | _Table] = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        lines = []
    for _, part in itertools.groupby(lines, lambda line: line.startswith("|")):
        parts.append(_parse("\n".join(part), path))
    if not any(isinstance(part, _Table) for part in parts):
        raise InputError(f"{path} is no report of this command; give another file")
    return parts


def _parse(text: str, path: Path) -> str | _Table:
    """Returns the table that lines of a report hold; the lines if it is another."""
    cells = [re.split(r"\s*\|\s*", line.strip("| ")) for line in text.split("\n")]
    known = len(cells[0])
    if known < _OLD or tuple(cells[0]) != _HEADER[:known]:
        return text
    for row in cells[2:]:
        if len(row) != known or not row[_KEY.index("rows")].isdecimal():
            raise InputError(
                f"{path}: the row {' | '.join(row)[:60]!r} is none of this command; "
                "mend it or give another file"
            )
    missing = [NOTHING] * (len(_HEADER) - known)
    return _Table([row + missing for row in cells[2:]], text)
