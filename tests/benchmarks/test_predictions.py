"""What `eagle-jax compile-report --predict` says of its table."""

import pytest

from eagle_jax.cli import compile_report


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "nothing was measured"),
        (
            ["--draft-vocabulary", "32768"],
            "nothing was measured; heads draft 32,768 tokens, or all of a smaller "
            "vocabulary",
        ),
    ],
)
def test_the_title_names_the_drafted_vocabulary(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--predict", "v5e-4", "--contexts", "512", "--tau", "7", *flags]
    assert compile_report.main(argv) == 0
    title, blank, *_ = capsys.readouterr().out.splitlines()
    assert title == f"PREDICTION from published peaks; {said}"
    assert blank == ""


@pytest.mark.parametrize("flags", [[], ["--trees", "60/6/10"]])
def test_predictions_have_contexts_and_trees_without_flags(
    capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    assert compile_report.main(["--predict", "v5e-4", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.strip("| ").split("|") for line in lines if "v5e-4" in line]
    assert {row[2].strip() for row in rows} == {"512", "4,096", "16,384"}
    assert {row[3].strip() for row in rows} == {"60/6/10"}
