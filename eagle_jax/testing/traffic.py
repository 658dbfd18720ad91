"""What a compiled program moves in memory, read from its optimised HLO.

XLA's own count, `jax.stages.Compiled.cost_analysis`, counts the body of a loop once,
however often it runs, a table of which a few rows are gathered in full, and what passes
through the vector memory of a TPU as often as it is touched there. Here a loop counts
as often as the program says that it runs, a gather its rows, and vector memory nothing.
Programs for CPUs say it; those for TPUs do not, so their loops count once.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

from eagle_jax.testing.programs import called_by, computations_of, operation_of

_FREE = {
    *("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "iota"),
}
_PARTS = ("slice", "dynamic-slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # Which operand is written.
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ENTRY = re.compile(r"^ENTRY %?([\w.\-]+)", re.MULTILINE)
_ARRAY = re.compile(r"\b[a-z]+(\d+)\w*\[([\d,]*)\](\{[^}]*\})?")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")


@dataclasses.dataclass(frozen=True)
class _Instruction:
    """One line of a computation: its result's name and type, and what it reads."""

    name: str
    kind: str
    operation: str
    operands: tuple[str, ...]
    line: str


_Computation = Mapping[str, _Instruction]
_Program = Mapping[str, _Computation]


def memory_bytes(text: str, *, in_loops: bool = False) -> int:
    """Returns the bytes that a device reads from and writes to its main memory.

    A loop that is not known to end after so many steps counts once: of the loop of a
    whole generation that is one round, or one token. Of the branches of a condition the
    largest counts.

    Args:
        text: The program's text, as `jax.stages.Compiled.as_text` returns it.
        in_loops: Whether to leave out what runs once before and after the loops, such
            as copies of weights in another layout.
    """
    program, entry = _parse(text), _entry(text)

    def bytes_of(name: str) -> int:
        total = 0
        for one in program[name].values():
            if in_loops and name == entry and one.operation != "while":
                continue
            if one.operation in ("while", "call"):
                total += _trips(one) * sum(map(bytes_of, called_by(one.line)))
            elif one.operation == "conditional":
                total += max(map(bytes_of, called_by(one.line)))
            else:
                total += _accessed(one, program[name], program)
        return total

    return bytes_of(entry)


def repeated_flops(text: str) -> int:
    """Returns the operations of matrix products that XLA's own count leaves out.

    They are those of all steps but the first of loops that are known to end after so
    many; a product of `[m, k]` and `[k, n]` has `2 * m * k * n`.

    Args:
        text: The program's text, as `jax.stages.Compiled.as_text` returns it.
    """
    program = _parse(text)

    def flops_of(name: str, times: int) -> int:
        total = 0
        for one in program.get(name, {}).values():
            if one.operation == "dot":
                total += (times - 1) * _dot_flops(one, program[name])
            for called in called_by(one.line):
                total += flops_of(called, times * _trips(one))
        return total

    return flops_of(_entry(text), 1)


def _accessed(one: _Instruction, scope: _Computation, program: _Program) -> int:
    """Returns the bytes of an instruction's operands and result in main memory."""
    name = one.operation
    if name in _FREE or name.endswith(("-done", "-update")):
        return 0
    operands = [_bytes(scope[operand].kind) for operand in one.operands]
    if name in _PARTS:
        return min(operands[0], _size(one.kind)) + _bytes(one.kind)
    if name.removesuffix("-start") in _PARTS:
        # Its type names the operands, and after them the part.
        size, _, layout = _arrays(one.kind)[len(operands)]
        return min(operands[0], size) + (0 if "S(" in layout else size)
    if name in _UPDATES:
        update = one.operands[_UPDATES[name]]
        return _bytes(scope[update].kind) + min(operands[0], _size(scope[update].kind))
    inner = program[called_by(one.line)[0]] if _is_fused(one) else None
    read = sum(operands)
    if inner is not None:
        parameters = _parameters(inner)
        read = sum(
            min(size, _read(parameters[number], inner, program))
            for number, size in enumerate(operands)
        )
    written = _bytes(one.kind)
    if name.endswith("-start"):
        # Its type names the operands too.
        written = max(written - sum(operands), 0)
    if inner is not None:
        written = max(written - _kept(inner), 0)
    return read + written


def _is_fused(one: _Instruction) -> bool:
    return one.operation in ("fusion", "async-start")


def _is_root(one: _Instruction) -> bool:
    return one.line.lstrip().startswith("ROOT ")


def _parameters(computation: _Computation) -> dict[int, str]:
    """Returns the names of a computation's parameters by their numbers."""
    found = {}
    for one in computation.values():
        if one.operation == "parameter":
            number = re.search(r" parameter\((\d+)\)", one.line)
            assert number is not None
            found[int(number[1])] = one.name
    return found


def _read(name: str, scope: _Computation, program: _Program) -> int:
    """Returns how many bytes of an array a fused computation reads."""
    total = 0
    for one in scope.values():
        if name not in one.operands:
            continue
        place = one.operands.index(name)
        if one.operation in _PARTS and place == 0:
            total += _size(one.kind)
        elif one.operation == "bitcast" and not _is_root(one):
            total += _read(one.name, scope, program)
        elif one.operation in _UPDATES and place == 0:
            continue  # It is written in place.
        elif _is_fused(one):
            inner = program[called_by(one.line)[0]]
            total += _read(_parameters(inner)[place], inner, program)
        else:
            return _size(scope[name].kind)
    return total


def _kept(scope: _Computation) -> int:
    """Returns how many bytes of a fused computation's results are not written.

    They are those of an array that is updated in place, beside the update.
    """
    (root,) = filter(_is_root, scope.values())
    results = root.operands if root.operation == "tuple" else (root.name,)
    kept = 0
    for name in results:
        while scope[name].operation == "bitcast":
            (name,) = scope[name].operands
        one = scope[name]
        if one.operation in _UPDATES:
            written = scope[one.operands[_UPDATES[one.operation]]]
            kept += _size(one.kind) - _size(written.kind)
    return kept


def _dot_flops(one: _Instruction, scope: _Computation) -> int:
    contracted = _CONTRACTED.search(one.line)
    sizes = _arrays(scope[one.operands[0]].kind)[0][1]
    axes = contracted[1].split(",") if contracted and contracted[1] else []
    shared = math.prod(sizes[int(axis)] for axis in axes)
    return 2 * math.prod(_arrays(one.kind)[0][1]) * shared


def _trips(one: _Instruction) -> int:
    """Returns how often a loop is known to run; 1 for all else."""
    found = _TRIPS.search(one.line) if one.operation == "while" else None
    return int(found[1]) if found else 1


def _bytes(kind: str) -> int:
    """Returns the bytes of a type's arrays that lie in main memory."""
    return sum(size for size, _, layout in _arrays(kind) if "S(" not in layout)


def _size(kind: str) -> int:
    """Returns the bytes of a type's arrays, wherever they lie."""
    return sum(size for size, _, _ in _arrays(kind))


def _arrays(kind: str) -> list[tuple[int, tuple[int, ...], str]]:
    """Returns the bytes, shape and layout of each array of a type."""
    found = []
    for bits, sizes, layout in _ARRAY.findall(kind):
        shape = tuple(int(size) for size in sizes.split(",") if size)
        found.append((math.prod(shape) * int(bits) // 8, shape, layout))
    return found


def _entry(text: str) -> str:
    found = _ENTRY.search(text)
    assert found is not None, "a compiled program has an entry"
    return found[1]


def _parse(text: str) -> _Program:
    """Returns the instructions of each computation, both by name."""
    program: dict[str, dict[str, _Instruction]] = {}
    for name, lines in computations_of(text).items():
        program[name] = {}
        for line in lines:
            kind, operation = operation_of(line)
            if operation:
                one = line.strip().removeprefix("ROOT ").split(" ", 1)[0].lstrip("%")
                rest = line[line.index(f" {operation}(") + len(operation) + 2 :]
                operands = tuple(re.findall(r"%([\w.\-]+)", _first(rest)))
                program[name][one] = _Instruction(one, kind, operation, operands, line)
    return program


def _first(text: str) -> str:
    """Returns the text before the bracket that closes an instruction's operands."""
    depth = 1
    for place, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return text[:place]
    return text
