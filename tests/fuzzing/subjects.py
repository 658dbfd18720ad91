"""What reads files that anybody may have written, and good ones to start from."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from eagle_jax.checkpoints import has_torch
from eagle_jax.checkpoints.draft_files import load_calibration
from eagle_jax.cli.files import read_prompts
from eagle_jax.config import CONFIGS, TreeConfig, load_config
from eagle_jax.evaluation import tables
from eagle_jax.evaluation.questions import read_questions
from eagle_jax.evaluation.record_files import read_records, read_runs
from eagle_jax.evaluation.runs import groups, in_order
from eagle_jax.generation import text
from eagle_jax.generation.config import GenerateConfig
from eagle_jax.generation.pairs import open_pair
from eagle_jax.logs import JsonLines
from eagle_jax.training.config import RegenerateConfig, TrainConfig
from eagle_jax.training.conversations import read_examples
from eagle_jax.training.features import FeatureStore
from eagle_jax.training.log import LOG, read_rows
from eagle_jax.training.regenerate import next_index
from examples.embedded_pair.training import PretrainConfig
from tests.checkpoints.folders import save_bin, write_shards
from tests.evaluation import synthetic
from tests.helpers import settings_of

_TREE = TreeConfig(num_nodes=4, depth=2, width=2)
_SETTINGS: dict[str, Any] = {
    "embedded": GenerateConfig,
    "head": TrainConfig,
    "small": PretrainConfig,
    "answers": RegenerateConfig,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """Something that is read.

    Attributes:
        source: A folder of good files.
        files: Patterns of those that are changed.
        read: Reads the folder as a command does.
    """

    source: Path
    files: list[str]
    read: Callable[[Path], object]


def read_pair(folder: Path) -> None:
    """Loads a target, its head and its tokenizer, and encodes a prompt."""
    target, head = folder / "target", folder / "head"
    source = open_pair(str(target), str(head), settings_of(_TREE))
    pair = source.load()
    has_template = bool(pair.tokenizer.chat_template)
    ids = text.encode(pair.tokenizer, "Hello é", chat=has_template)
    text.continuation(pair.tokenizer, ids, ids[:2])


def read_settings(folder: Path) -> None:
    """Reads every file of settings."""
    for name, kind in _SETTINGS.items():
        load_config(folder / f"{name}.toml", kind)


def read_report(folder: Path) -> None:
    """Makes the tables of a report, goes on with a file of records."""
    runs = in_order(read_runs([folder]))
    tables.shared_settings(runs)
    tables.runs_table(runs)
    for group in groups(runs):
        tables.speedup_tables(group)
        tables.ablation_tables(group)
        tables.n_alpha_table(group)


def read_record_file(folder: Path) -> None:
    """Goes on with a file of records."""
    JsonLines(folder / "run.jsonl", synthetic.RUN).close()
    read_records(folder / "run.jsonl", synthetic.RUN, [])


def read_data(folder: Path) -> None:
    """Reads questions, prompts, conversations, a log, answers and features."""
    for act in (
        lambda: read_questions(folder / "question.jsonl"),
        lambda: read_prompts(folder / "prompts.json"),
        lambda: read_examples(folder / "chats.json"),
        lambda: read_examples(folder / "chats.jsonl"),
        lambda: read_rows(folder / LOG),
        lambda: next_index(folder / "answers.jsonl"),
        lambda: FeatureStore(folder, batch_size=2).read(np.array([0])),
        lambda: load_calibration(
            folder / "calibration.json", vocab_size=300, depth=2, kind="sampled"
        ),
    ):
        act()


def make_subjects(
    home: Path,
    *,
    chat_pair: Path,
    eagle3_pair: Path,
    configs: Path,
    run: Path,
    resume: Callable[[Path], object],
) -> dict[str, Subject]:
    """Writes good files into a folder.

    Args:
        home: An empty folder.
        chat_pair: A target with a chat template, and its head.
        eagle3_pair: Likewise, of EAGLE-3.
        configs: Files of settings.
        run: Of training.
        resume: Goes on with it.

    Returns:
        By name.
    """
    settings = ["target/*.json", "head/config.json", "head/calibration.json"]
    pair = Path(shutil.copytree(chat_pair, home / "pair"))
    (pair / "target" / "generation_config.json").write_text('{"eos_token_id": [299]}')
    calibration = {"kappa": 1.5, "sharpness": 1.0, "exponents": [[1, 1], [1, 1]]}
    calibrations = dict.fromkeys(("greedy", "sampled"), calibration)
    _write(pair / "head" / "calibration.json", {"vocab_size": 300} | calibrations)
    shards = Path(shutil.copytree(pair, home / "shards"))
    tensors = _take(shards)
    write_shards(shards / "target", tensors, safetensors.numpy.save_file, "safetensors")
    weights = ["*/*.safetensors", "target/chat_template.jinja"]
    tables_folder = Path(shutil.copytree(configs, home / "tables"))
    shutil.copy(CONFIGS / "embedded.toml", tables_folder)
    subjects = {
        "pair": Subject(source=pair, files=[*settings, *weights], read=read_pair),
        "shards": Subject(source=shards, files=["target/*.index.json"], read=read_pair),
        "eagle3": Subject(
            source=eagle3_pair,
            files=["head/config.json", "head/model.safetensors"],
            read=read_pair,
        ),
        "settings": Subject(source=tables_folder, files=["*.toml"], read=read_settings),
        "run": Subject(
            source=run,
            files=[LOG, "checkpoints/*/*/*", "checkpoints/**/*"],
            read=resume,
        ),
        **_records(home),
        "data": Subject(source=_data(home / "data"), files=["*"], read=read_data),
    }
    if not has_torch():
        return subjects
    bins = Path(shutil.copytree(pair, home / "bins"))
    save_bin(_take(bins), bins / "target" / "pytorch_model.bin")
    return subjects | {
        "bins": Subject(source=bins, files=["target/*.bin"], read=read_pair)
    }


def _take(pair: Path) -> dict[str, np.ndarray]:
    """Removes and returns a target's tensors."""
    path = pair / "target" / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    path.unlink()
    return tensors


def _records(home: Path) -> dict[str, Subject]:
    """Runs of all methods, and one file that is gone on with."""
    everything = synthetic.write_evaluation(home / "records", questions=3)
    lines = [synthetic.record(number) for number in range(3)]
    synthetic.write(home / "file" / "run.jsonl", lines)
    return {
        "records": Subject(source=everything, files=["*"], read=read_report),
        "file": Subject(source=home / "file", files=["*"], read=read_record_file),
    }


def _data(folder: Path) -> Path:
    """Writes what `read_data` reads."""
    folder.mkdir()
    question = {"question_id": 1, "category": "math", "turns": ["one", "two"]}
    said = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    chats = [{"id": n, "conversations": said} for n in range(2)]
    for name, lines in (("question", [question]), ("chats", chats)):
        content = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(content)
    _write(folder / "chats.json", chats)
    _write(folder / "prompts.json", ["a", "b"])
    calibration = {"kappa": 1.5, "sharpness": 1.0, "exponents": [[1, 1], [1, 1]]}
    _write(folder / "calibration.json", {"vocab_size": 300, "sampled": calibration})
    with (
        JsonLines(folder / "answers.jsonl", {"seed": 0}) as answers,
        JsonLines(folder / LOG, {"seed": 0}) as log,
    ):
        for number in range(3):
            answers.append({"index": number, "text": "a"})
            log.append({"step": number, "tokens": 9, "loss": 1.0})
    features = {"features": np.zeros((2, 3, 4), np.float32)}
    safetensors.numpy.save_file(features, folder / "features-00000.safetensors")
    return folder


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
