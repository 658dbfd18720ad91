"""Imports point down."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent / "eagle_jax"

# Each package may import those below it in this list, and itself.
_BELOW = {
    "__main__": "",
    "errors": "",
    "assets": "",
    "parsing": "errors",
    "reporting": "",
    "files": "errors parsing",
    "logs": "errors files parsing",
    "config": "errors parsing",
    "prng": "",
    "sampling": "prng",
    "tree": "config sampling",
    "processors": "config errors parsing",
    "constraints": "errors parsing processors tree",
    "interface": "constraints errors sampling tree",
    "models": "errors interface prng sampling",
    "drafting": "config constraints errors interface models parsing prng sampling tree",
    "decoding": "config constraints errors interface prng processors sampling tree",
    "adapters": "errors interface models",
    "checkpoints": "config drafting errors files models parsing prng tree",
    "methods": "assets checkpoints config drafting errors interface tree",
    "parallel": "checkpoints errors models",
    "testing": "config decoding drafting errors interface prng sampling tree",
    "heads": "checkpoints config drafting errors interface models parsing prng",
    "engine": (
        "assets checkpoints config constraints decoding drafting errors files heads "
        "interface methods models parallel parsing processors tree"
    ),
    "serve": "config errors engine parsing",
    "training": (
        "checkpoints config decoding drafting errors files engine heads "
        "interface logs methods models parallel parsing prng reporting tree"
    ),
    "benchmarks": (
        "config decoding drafting engine heads interface methods models parallel "
        "prng testing training"
    ),
    "evaluation": (
        "assets checkpoints config decoding drafting errors files engine heads "
        "interface logs methods models parsing reporting training tree"
    ),
    "cli": (
        "assets benchmarks checkpoints config decoding drafting errors evaluation "
        "files engine heads interface methods models parallel parsing reporting serve "
        "training tree"
    ),
}
ALLOWED = {part: set(below.split()) for part, below in _BELOW.items()}


def imported_parts(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "eagle_jax":
                names |= {f"eagle_jax.{alias.name}" for alias in node.names}
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("eagle_jax.")}


def test_imports_point_down() -> None:
    seen: set[str] = set()
    for path in ROOT.rglob("*.py"):
        part = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        seen.add(part)
        upward = imported_parts(path) - ALLOWED[part] - {part}
        assert not upward, f"{path.relative_to(ROOT)} imports {upward}"
    assert seen == set(ALLOWED)


def test_every_package_is_allowed_only_what_stands_before_it() -> None:
    order = list(ALLOWED)
    for part, below in ALLOWED.items():
        assert all(order.index(name) < order.index(part) for name in below), part


def test_what_is_skipped_without_torch_is_marked() -> None:
    """By their mark they are found and run where torch is installed."""
    for path in Path(__file__).parent.rglob("test_*.py"):
        text = path.read_text()
        is_skipped = 'importorskip("torch"' in text
        assert not is_skipped or "pytest.mark.torch" in text, path
