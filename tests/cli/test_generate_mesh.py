"""`--mesh` on one device; `tests/parallel/test_mesh_decoding.py` has eight."""

import json
from pathlib import Path

import jax
import pytest

from tests.conftest import Main

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def flags(tiny_pair: Path) -> list[str]:
    folders = ["--target", f"{tiny_pair}/target", "--draft", f"{tiny_pair}/head"]
    tree = ["--num-nodes", "6", "--depth", "2", "--width", "2"]
    return [*folders, *tree, "--max-new-tokens", "12", "--temperature", "0.8"]


def test_a_mesh_changes_no_text(main: Main, flags: list[str], tmp_path: Path) -> None:
    results = []
    for extra in ([], ["--mesh", f"data={jax.device_count()}"]):
        file = tmp_path / f"{len(results)}.json"
        extra = [*extra, "--batch-size", str(jax.device_count())]
        assert main([*flags, *extra, "--json", str(file)]) == 0
        results.append(json.loads(file.read_text()))
    assert results[0]["runs"] == results[1]["runs"]
    assert results[0]["settings"]["mesh"] is None
    assert results[1]["settings"]["mesh"] == f"data={jax.device_count()},tensor=1"


@pytest.mark.parametrize(
    ("mesh", "named"),
    [
        ("model=4", "'model=4' is no size of an axis"),
        ("tensor=four", "'tensor=four' is no size of an axis"),
        ("tensor=0", "'tensor=0' is no size of an axis"),
        ("data=2,data=2", "'data=2' is no size of an axis"),
        ("", "'' is no size of an axis"),
        ("data=99,tensor=3", "for 297 devices, but there are"),
    ],
)
def test_what_is_no_mesh_of_these_devices_is_refused(
    main: Main,
    flags: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    mesh: str,
    named: str,
) -> None:
    file = tmp_path / "out.json"
    assert main([*flags, "--mesh", mesh, "--json", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    assert named in line and "give" in line
    assert "compiling" not in err and not file.exists()
