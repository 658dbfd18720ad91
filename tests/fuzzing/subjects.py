"""What reads files that anybody may have written, and good ones to start from."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from eagle_jax.checkpoints import has_torch
from eagle_jax.checkpoints.draft_files import load_calibration
from eagle_jax.cli.files import read_prompts
from eagle_jax.config import CONFIGS, TreeConfig, load_config
from eagle_jax.engine import wording
from eagle_jax.engine.config import PairConfig
from eagle_jax.engine.open import open_pair
from eagle_jax.evaluation import tables
from eagle_jax.evaluation.evaluate import read_records
from eagle_jax.evaluation.questions import read_questions
from eagle_jax.evaluation.runs import groups, in_order, read_runs
from eagle_jax.logs import JsonLines
from eagle_jax.training.checkpoint import LOG, read_rows
from eagle_jax.training.config import TrainConfig
from eagle_jax.training.conversations import read_examples
from eagle_jax.training.regenerate import next_index
from examples.embedded_pair.training import PretrainConfig
from tests.checkpoints.folders import save_bin, take_weights, write_shards
from tests.evaluation import synthetic
from tests.helpers import settings_of

_TREE = TreeConfig(num_nodes=4, depth=2, width=2)
_SETTINGS: dict[str, Any] = {
    "embedded": PairConfig,
    "head": TrainConfig,
    "small": PretrainConfig,
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
    pair = open_pair(str(target), str(head), settings_of(_TREE)).load()
    has_template = bool(pair.tokenizer.chat_template)
    ids = wording.encode(pair.tokenizer, "Hello é", chat=has_template)
    wording.continuation(pair.tokenizer, ids, ids[:2])


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
        tables.chain_acceptance_table(group)


def read_data(folder: Path) -> None:
    """Reads records to go on with, questions, prompts, texts and answers."""
    for act in (
        lambda: JsonLines(folder / "run.jsonl", synthetic.RUN).close(),
        lambda: read_records(folder / "run.jsonl", synthetic.RUN, []),
        lambda: read_questions(folder / "question.jsonl"),
        lambda: read_prompts(folder / "prompts.json"),
        lambda: read_examples(folder / "chats.json"),
        lambda: read_examples(folder / "chats.jsonl"),
        lambda: read_rows(folder / LOG),
        lambda: next_index(folder / "answers.jsonl"),
        lambda: load_calibration(
            folder / "calibration.json", vocab_size=300, depth=2, kind="sampled"
        ),
    ):
        act()


def make_subjects(
    home: Path, *, chat_pair: Path, eagle3_pair: Path, tables: Path
) -> dict[str, Subject]:
    """Writes good files into an empty folder, for all readers but training.

    Args:
        home: The folder.
        chat_pair: A target with a chat template, and its head.
        eagle3_pair: Likewise, of EAGLE-3.
        tables: A folder with files of settings.
    """
    pair = Path(shutil.copytree(chat_pair, home / "pair"))
    (pair / "target" / "generation_config.json").write_text('{"eos_token_id": [299]}')
    part = {"kappa": 1.5, "sharpness": 1.0, "exponents": [[1, 1], [1, 1]]}
    calibration = {"vocab_size": 300, "greedy": part, "sampled": part}
    _write(pair / "head" / "calibration.json", calibration)
    bins = Path(shutil.copytree(pair, home / "bins"))
    write_shards(
        pair / "target", take_weights(pair / "target"), save_file, "safetensors"
    )
    settings = Path(shutil.copytree(tables, home / "tables"))
    shutil.copy(CONFIGS / "embedded.toml", settings)
    records = synthetic.write_evaluation(home / "records", questions=3)
    files = ["target/*.json", "head/*.json", "*/*.safetensors", "target/*.jinja"]
    eagle3 = ["head/config.json", "head/model.safetensors"]
    data = _data(home / "data", calibration)
    subjects = {
        "pair": Subject(source=pair, files=files, read=read_pair),
        "eagle3": Subject(source=eagle3_pair, files=eagle3, read=read_pair),
        "settings": Subject(source=settings, files=["*.toml"], read=read_settings),
        "records": Subject(source=records, files=["*"], read=read_report),
        "data": Subject(source=data, files=["*"], read=read_data),
    }
    if has_torch():
        tensors = take_weights(bins / "target")
        save_bin(tensors, bins / "target" / "pytorch_model.bin")
        subject = Subject(source=bins, files=["target/*.bin"], read=read_pair)
        subjects["bins"] = subject
    return subjects


def _data(folder: Path, calibration: dict[str, Any]) -> Path:
    """Writes what `read_data` reads."""
    synthetic.write(folder / "run.jsonl", [synthetic.record(n) for n in range(3)])
    question = {"question_id": 1, "category": "math", "turns": ["one", "two"]}
    said = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    chats = [{"id": n, "conversations": said} for n in range(2)]
    for name, lines in (("question", [question]), ("chats", chats)):
        content = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(content)
    _write(folder / "chats.json", chats)
    _write(folder / "prompts.json", ["a", "b"])
    _write(folder / "calibration.json", calibration)
    with (
        JsonLines(folder / "answers.jsonl", {"seed": 0}) as answers,
        JsonLines(folder / LOG, {"seed": 0}) as log,
    ):
        for number in range(3):
            answers.append({"index": number, "text": "a"})
            log.append({"step": number, "tokens": 9, "loss": 1.0})
    return folder


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
