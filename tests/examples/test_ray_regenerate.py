"""Two actors answer what the command does, one of them killed; skipped without Ray."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from eagle_jax import assets
from eagle_jax.cli import regenerate

pytest.importorskip("ray", reason="needs the extra `examples`")
# Ray warns of its own threads, sockets and settings.
pytestmark = pytest.mark.filterwarnings("ignore")


def lines(path: Path) -> list[str]:
    """The texts, without the settings."""
    return path.read_text().splitlines()[1:]


def test_actors_answer_what_the_command_does_though_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from examples import ray_regenerate

    data, dead = tmp_path / "texts.jsonl", tmp_path / "dead"
    texts = [f"def function_{i}(a):\n    return a + {i}\n" for i in range(20)]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    class Killed(ray_regenerate.Answerer):
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            if 8 in batch["id"] and not dead.exists():
                dead.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__call__(batch)

    monkeypatch.setattr(ray_regenerate, "Answerer", Killed)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")  # It would tell its makers.
    flags = ["--target", str(assets.SMALL), "--data", str(data), "--seed", "5"]
    flags += ["--temperature", "1", "--max-new-tokens", "8", "--batch-size", "1"]
    flags += ["--max-length", "96"]
    several, one = tmp_path / "several.jsonl", tmp_path / "one.jsonl"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        ray_regenerate.main([*flags, "--output", str(several), "--actors", "2"])
        # Killed itself, it goes on after the last whole line.
        whole = several.read_bytes().splitlines(keepends=True)
        again = tmp_path / "again.jsonl"
        again.write_bytes(b"".join(whole[:15]) + whole[15][:9])
        ray_regenerate.main([*flags, "--output", str(again)])
    finally:
        ray.shutdown()
    assert dead.exists()
    assert regenerate.main([*flags, "--output", str(one)]) == 0
    assert lines(several) == lines(again) == lines(one)
    assert len(lines(one)) == 20
