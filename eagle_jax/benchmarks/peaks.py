"""Published peaks of chips, from which costs are predicted where none can be measured.

A peak is what a chip cannot exceed, so a time that is made of peaks is a floor. The
memory on TPUs themselves is that of `jax.experimental.pallas.tpu.get_tpu_info`, the
second-level cache of H100 and H200 that of NVIDIA's white paper on Hopper.
"""

import dataclasses
import re

from eagle_jax.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """The peaks of one chip.

    Attributes:
        name: The chip's name.
        flops: The bfloat16 operations per second, without sparsity.
        bandwidth: The bytes per second that its memory gives.
        link: The bytes per second that it receives over all its links together: half of
            what is published where that counts both directions.
        links: Pairs `(chips, links)`: from so many chips on, the least connected one
            uses so many links; the last pair names all of them. A chip at the edge of a
            slice has no neighbour there unless the slice is closed to a torus.
        memory_gib: The memory in GiB.
        near: The bytes of the memory on the chip itself: a TPU's vector memory, a GPU's
            second-level cache.
        counts: The numbers that machine names of it may end with.
        per_chip: How many of such a number make a chip: names of v4 and v5p count
            TensorCores, of which a chip has two.
        source: Where the figures are published.
    """

    name: str
    flops: float
    bandwidth: float
    link: float
    links: tuple[tuple[int, int], ...] = ((1, 1),)
    memory_gib: float
    near: float
    counts: tuple[int, ...]
    per_chip: int = 1
    source: str


# Only axes of 16 chips are closed in two dimensions, only cubes of 4 in three.
_FLAT = ((1, 1), (4, 2), (128, 3), (256, 4))
_CUBE = ((1, 1), (4, 2), (8, 3), (64, 6))
_LINKS = {"v4": _CUBE, "v5p": _CUBE, "v5e": _FLAT, "v6e": _FLAT}
_SLICES = (1, 4, 8, 16, 32, 64, 128, 256)
_CORES = (8, 16, 32, 64, 128, 256, 512)
_DOCS = "https://cloud.google.com/tpu/docs/"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_WITHOUT = "(SXM: half of the FLOP/s with sparsity, half of both directions of NVLink)"
_GPUS = (1, 2, 4, 8)
_FIGURES = (
    # TFLOP/s, GB/s of memory, GB/s of links, GiB, MiB on the chip, counts, per chip.
    ("v4", 275, 1200, 300, 32, 32, _CORES, 2, f"{_DOCS}v4; links: arXiv 2304.01433"),
    ("v5e", 197, 819, 200, 16, 128, _SLICES, 1, f"{_DOCS}v5e"),
    ("v5p", 459, 2765, 600, 95, 128, _CORES, 2, f"{_DOCS}v5p"),
    ("v6e", 918, 1638, 400, 32, 128, _SLICES, 1, f"{_DOCS}v6e"),
    ("h100", 989, 3350, 450, 74.5, 50, _GPUS, 1, f"{_NVIDIA}h100/ {_WITHOUT}"),
    ("h200", 989, 4800, 450, 131.3, 50, _GPUS, 1, f"{_NVIDIA}h200/ {_WITHOUT}"),
)

CHIPS = {
    name: Chip(
        name=name,
        flops=tera * 1e12,
        bandwidth=memory * 1e9,
        link=link * 1e9,
        links=_LINKS.get(name, ((1, 1),)),  # Switches join all GPUs.
        memory_gib=gib,
        near=near * 2**20,
        counts=counts,
        per_chip=per_chip,
        source=source,
    )
    for name, tera, memory, link, gib, near, counts, per_chip, source in _FIGURES
}
"""The chips whose peaks are known, by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Some chips of a kind, which share the work of every row.

    Attributes:
        chip: The peaks of each chip.
        num_chips: The number of chips.
    """

    chip: Chip
    num_chips: int = 1

    @property
    def gib(self) -> float:
        """The memory of all chips, in GiB."""
        return self.num_chips * self.chip.memory_gib

    @property
    def link(self) -> float:
        """The bytes per second that the least connected chip receives from others."""
        used = max(links for least, links in self.chip.links if least <= self.num_chips)
        return self.chip.link * used / self.chip.links[-1][1]

    def __str__(self) -> str:
        """Returns the name that `parse_machine` reads."""
        return f"{self.chip.name}-{self.num_chips * self.chip.per_chip}"


def parse_machine(text: str) -> Machine:
    """Reads a machine's name as its maker writes it: `v5e-4`, `v5p-8`, `h200-1`.

    >>> parse_machine("v5e-4").num_chips, parse_machine("v5p-8").num_chips
    (4, 4)

    Raises:
        InputError: If the chip or the count is not known.
    """
    found = re.fullmatch(r"([a-z]+\d+[a-z]*)(?:-(\d{1,9}))?", text.strip().lower())
    chip = CHIPS.get(found[1]) if found else None
    count = int(found[2] or 1) if found else 0
    if chip is None or count not in chip.counts:
        known = "; ".join(
            f"{name}-{{{','.join(map(str, chip.counts))}}}"
            for name, chip in CHIPS.items()
        )
        raise InputError(
            f"no peaks are known for machine {text[:99]!r}; known are {known}"
        )
    return Machine(chip=chip, num_chips=count // chip.per_chip)
