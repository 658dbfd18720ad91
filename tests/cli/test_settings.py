"""Settings of a command: the later of defaults, file and flags win."""

import contextlib
from pathlib import Path

import pytest

from eagle_jax.cli.command import Parser
from eagle_jax.cli.request_flags import add_request_flags, take_request
from eagle_jax.cli.settings import add_settings, join_settings
from eagle_jax.engine.config import PairConfig
from eagle_jax.heads.eagle3 import Eagle3Settings
from eagle_jax.heads.settings import ChainLoss, LevelSettings
from eagle_jax.training.config import TrainConfig


def joined(path: Path | None, *flags: str) -> PairConfig:
    parser = Parser()
    names = ("num_nodes", "depth", "width", "max_new_tokens", "ignore_eos", "method")
    add_settings(parser, PairConfig, *names)
    return join_settings(path, parser.parse_args(flags))


def test_flags_win_over_the_file_and_that_over_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("[tree]\nwidth = 2\ndepth = 4\n[request]\nmax_new_tokens = 3\n")
    found = joined(path, "--max-new-tokens", "4", "--depth", "5", "--ignore-eos")
    assert (found.tree.width, found.tree.depth, found.tree.num_nodes) == (2, 5, 60)
    assert (found.request.max_new_tokens, found.request.ignore_eos) == (4, True)
    assert joined(None) == PairConfig()


@pytest.mark.parametrize(
    ("kind", "names", "more"),
    [
        (
            PairConfig,
            ("draft_vocabulary", "max_length", "calibration", "choices"),
            (),
        ),
        (
            TrainConfig,
            ("alignment", "draft_heads", "feature_layers"),
            (ChainLoss, LevelSettings, Eagle3Settings),
        ),
    ],
)
def test_the_help_of_settings_says_only_what_can_be_typed(
    kind: type, names: tuple[str, ...], more: tuple[type, ...]
) -> None:
    parser = Parser()
    add_settings(parser, kind, *names, more=more)
    text = " ".join(parser.format_help().split())
    assert "by default" in text and "None" not in text


def test_the_help_of_settings_says_what_holds_without_them_and_whose_they_are() -> None:
    parser = Parser()
    names = ("max_new_tokens", "max_ngram", "ignore_eos")
    add_settings(parser, PairConfig, "batch_size", usual={"batch_size": 16})
    add_settings(parser, PairConfig, *names)
    text = " ".join(parser.format_help().split())
    for part in ("(default: 128)", "(default: 16)", "Of lookup, rest. (default: 3)"):
        assert part in text
    assert text.count("default") == 3
    assert parser.parse_args([]).batch_size == 16


def test_a_schema_is_itself_or_a_files(tmp_path: Path) -> None:
    parser = Parser()
    add_request_flags(parser)
    text = '{"const": "https://a"}'
    (tmp_path / "schema.json").write_text(text)
    for given, wanted in ((text, text), ("schema.json", {"const": "https://a"})):
        with contextlib.chdir(tmp_path):
            taken = take_request(parser.parse_args(["--json-schema", given]))
        assert taken["json_schema"] == wanted
