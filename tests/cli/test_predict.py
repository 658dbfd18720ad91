"""`eagle-jax compile-report --predict`, for which no TPU compiler is needed."""

import pytest

from eagle_jax.cli import compile_report


def test_more_tokens_per_round_are_more_speed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = []
    for tau in ("2", "4"):
        flags = ["--predict", "v5e-4", "--contexts", "512", "--tau", tau]
        assert compile_report.main(flags) == 0
        printed = capsys.readouterr().out
        assert printed.startswith("PREDICTION")
        (row,) = (x for x in printed.splitlines() if "Llama-3-8B" in x and "v5e" in x)
        found.append(float(row.strip("| ").split("|")[-1]))
    assert found[1] == pytest.approx(2 * found[0], abs=0.02)


def test_fewer_drafted_tokens_are_a_cheaper_round(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = []
    for drafted in ([], ["--draft-vocabulary", "8192"]):
        flags = ["--predict", "v5e-4", "--contexts", "512", *drafted]
        assert compile_report.main(flags) == 0
        printed = capsys.readouterr().out
        (row,) = (x for x in printed.splitlines() if "Llama-3-8B" in x and "v5e" in x)
        token, ratio = (float(row.strip("| ").split("|")[i]) for i in (4, 6))
        found.append((token, ratio))
    assert found[0][0] == found[1][0]
    assert found[0][1] > found[1][1] + 0.3


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["tpu-4"], "known are v4-"),
        (["v5e-4", "--tau", "0"], "--tau"),
        (["v5e-4", "--contexts", "0"], "--contexts"),
        (["v5e-4", "--draft-vocabulary", "0"], "--draft-vocabulary"),
        (["v5e-4", "--trees", "many"], "num_nodes/depth/width"),
        (["v5e-4", "--trees", "600/6/10"], "nodes of --trees = 600 must"),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compile_report.main(["--predict", *flags]) == 2
    assert said in capsys.readouterr().err
