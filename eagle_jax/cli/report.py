"""Makes tables and figures of the records of an evaluation.

    eagle-jax report runs/evaluation --output runs/evaluation/report

Writes `report.md` and the PNG files that it shows. Everything comes from the `*.jsonl`
files of the folders, which `eagle-jax evaluate` wrote; several folders are read
together.
"""

from pathlib import Path

from eagle_jax.cli.command import Parser, command
from eagle_jax.cli.files import check_folder
from eagle_jax.errors import InputError
from eagle_jax.evaluation.report import write_report
from eagle_jax.evaluation.runs import read_runs


@command(unwritable="cannot read the records or write the report: {error}")
def main(argv: list[str] | None = None) -> None:
    """Runs the command."""
    parser = Parser(__doc__)
    add = parser.add_argument
    records = "what eagle-jax evaluate wrote"
    add("folders", nargs="+", type=Path, metavar="FOLDER", help=records)
    made = "gets report.md and its figures; made if it is missing"
    add("--output", required=True, type=Path, metavar="DIR", help=made)
    arguments = parser.parse_args(argv)
    output: Path = arguments.output
    if output.exists() and not output.is_dir():
        raise InputError(f"--output {output} is no folder; give another name")
    check_folder(output)
    print(write_report(read_runs(arguments.folders), output))
