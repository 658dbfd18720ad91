"""Facts about a compiled program, read from its optimised HLO."""

import collections
import re
from collections.abc import Iterable, Sequence

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
"""The operations that move data between devices."""

# A scatter writes in place: where it cannot, XLA puts a copy before it.
_COPIES = ("copy", "copy-start", "transpose", "gather", "select")
_VECTOR_MEMORY = "S(1)"
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(
    r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TUPLE = r"\([^()]*\)"
for _ in range(3):  # Layouts have parentheses too.
    _TUPLE = rf"\([^()]*(?:{_TUPLE}[^()]*)*\)"
_OPERATION = re.compile(rf"^\s*(?:ROOT )?%?[\w.\-]+ = ({_TUPLE}|\S+) ([\w\-]+)\(")
_TIMES = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_NO_KERNELS = ("bitcast", "conditional", "constant", "get-tuple-element")
_NO_KERNELS += ("after-all", "parameter", "tuple")
_ARRAY = re.compile(r"\b[a-z]+\d+\w*\[([\d,]*)\]")


def every_line(text: str) -> list[str]:
    """Returns all instructions of `jax.stages.Compiled.as_text`, a line each."""
    return [line for lines in _computations_of(text).values() for line in lines]


def loop_lines(text: str) -> list[str]:
    """Returns the instructions that run inside the loops of `Compiled.as_text`.

    They are those of all bodies and conditions of `while`, and of all computations that
    they call; each once, however often it runs.
    """
    computations = _computations_of(text)
    loops = [line for line in every_line(text) if " while(" in line]
    waiting = [name for line in loops for name in _called_by(line)]
    seen: dict[str, list[str]] = {}
    while waiting:
        name = waiting.pop()
        if name in seen or name not in computations:
            continue
        seen[name] = computations[name]
        for line in seen[name]:
            waiting += _called_by(line)
    return [line for lines in seen.values() for line in lines]


def count_kernels(text: str) -> int:
    """Returns how many kernels a round of the loops of `Compiled.as_text` starts.

    Those of loops inside a round count as often as they run, where the compiler knows
    that; what runs on a condition is left out. A GPU's compiler without a GPU chooses
    among fewer products, so that there it may be some more or less.
    """
    computations = _computations_of(text)

    def count(lines: Sequence[str]) -> int:
        total = 0
        for line in lines:
            name = operation_of(line)[1]
            if name in ("while", "call"):
                times = _TIMES.search(line)
                inner = sum(count(computations[name]) for name in _called_by(line))
                total += inner * (int(times[1]) if times else 1)
            elif name not in _NO_KERNELS:
                total += 1
        return total

    # The program itself stands last.
    *_, lines = computations.values()
    return count([line for line in lines if " while(" in line])


def count_collectives(lines: Sequence[str]) -> dict[str, int]:
    """Returns how many instructions of each collective there are.

    An asynchronous instruction counts where it starts.
    """
    names = (operation_of(line)[1].removesuffix("-start") for line in lines)
    return dict(collections.Counter(name for name in names if name in COLLECTIVES))


def find_copies(lines: Sequence[str], shape: Sequence[int]) -> list[str]:
    """Returns the instructions that copy a whole array of one shape.

    The copy may have its axes in another order. Moves into a TPU's vector memory and
    back are none: small arrays are brought there before they are read.

    Args:
        lines: The instructions that `loop_lines` or `every_line` returned.
        shape: The array's shape on one device. Give it a size that nothing else has:
            only whole shapes are compared.
    """
    wanted = _without_order(shape)
    found = []
    for line in lines:
        kind, name = operation_of(line)
        if name not in _COPIES or _VECTOR_MEMORY in kind:
            continue
        shapes = (map(int, re.findall(r"\d+", x)) for x in _ARRAY.findall(kind))
        if any(_without_order(one) == wanted for one in shapes):
            found.append(line.strip())
    return found


def find_host_calls(lines: Sequence[str]) -> list[str]:
    """Returns the instructions that wait for the host."""
    return [
        line.strip()
        for line in lines
        if operation_of(line)[1] in ("infeed", "outfeed", "send", "recv")
        or ("custom-call" in line and "callback" in line)
    ]


def find_open_loops(lines: Sequence[str]) -> list[str]:
    """Returns the loops whose number of rounds the compiler does not know."""
    return [
        line.strip()
        for line in lines
        if operation_of(line)[1] == "while" and "known_trip_count" not in line
    ]


def operation_of(line: str) -> tuple[str, str]:
    """Returns the result's type and the operation of an instruction."""
    match = _OPERATION.match(line)
    return (match[1], match[2]) if match else ("", "")


def _without_order(shape: Iterable[int]) -> list[int]:
    return sorted(size for size in shape if size != 1)


def _called_by(line: str) -> list[str]:
    """Returns the names of the computations that an instruction calls."""
    names = _CALLED.findall(line)
    for branches in _BRANCHES.findall(line):
        names += [name.strip().lstrip("%") for name in branches.split(",")]
    return names


def _computations_of(text: str) -> dict[str, list[str]]:
    """Returns the instructions of each computation by its name."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = found.setdefault(header[2], [])
        elif line.startswith(" "):
            current.append(line)
    return found
