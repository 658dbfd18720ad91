"""The comparison with other programs, on one prompt."""

import pytest

from examples import peers
from tests.devices import with_devices


@pytest.mark.torch
def test_other_programs_write_the_same_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in with_devices(1).items():  # Processes that compile quickly.
        monkeypatch.setenv(name, value)
    few = ["--prompts", "1", "--turns", "1", "--new-tokens", "12"]
    peers.main([*few, "--only", "transformers lookup"])
    rows = [row.split(" | ") for row in capsys.readouterr().out.splitlines()[-2:]]
    found = [(row[0].removeprefix("| "), row[-1]) for row in rows]
    named = ["eagle_jax plain", "transformers lookup"]
    assert found == [(name, "1 of 1 |") for name in named]
