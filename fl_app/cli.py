"""The ``dpfl`` command."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from fl_app.errors import DpflError

# Flower would install the app's dependencies, torch among them, once more before a simulation.
os.environ.setdefault("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "1")

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Differentially private federated learning on Flower.",
)
ledger_app = typer.Typer(no_args_is_help=True, help="Look at a privacy ledger.")
app.add_typer(ledger_app, name="ledger")

Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Hydra overrides, e.g. dataset=mnist mechanism=central_gaussian"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def run(
    overrides: Overrides = None,
    multirun: Annotated[
        bool, typer.Option("--multirun", "-m", help="Sweep over comma-separated values.")
    ] = False,
) -> None:
    """Train once, or sweep with -m."""
    from fl_app.run import run_one, run_sweep

    arguments = list(overrides or [])
    raise typer.Exit(run_sweep(["-m", *arguments]) if multirun else run_one(arguments))


@app.command()
def plan(
    overrides: Overrides = None,
    as_json: Json = False,
    show_partition: Annotated[
        bool, typer.Option("--show-partition", help="Add each client's labels (simulation only).")
    ] = False,
    plot_partition: Annotated[
        Path | None, typer.Option("--plot-partition", help="Write a picture of them to this file.")
    ] = None,
    cost: Annotated[
        bool,
        typer.Option("--cost", help="Add seconds, bytes and memory, measured here in a rehearsal."),
    ] = False,
    rows_per_client: Annotated[
        int | None,
        typer.Option(help="With --cost: rows of every client, whatever rows the dataset has."),
    ] = None,
) -> None:
    """Show what a run will cost, without training."""
    from fl_app.server_run import plan_of

    words = list(overrides or [])
    if rows_per_client is not None and not cost:
        from fl_app import checks

        raise checks.fail("--rows-per-client", rows_per_client, "says nothing without --cost")
    result = plan_of(words, show_partition=show_partition, plot_to=plot_partition)
    values, text = result.values, result.text
    if cost:
        from fl_app.cost import estimate

        found = estimate(words, rows_per_client=rows_per_client)
        values, text = values | {"cost": found.to_json()}, f"{text}\n{found.to_text()}"
    typer.echo(json.dumps(values, indent=2, allow_nan=False) if as_json else text)


@ledger_app.command()
def show(
    path: Path,
    as_json: Json = False,
    delta: Annotated[
        float | None,
        typer.Option("--delta", help="A node's ledger: delta of the stated epsilons."),
    ] = None,
    max_epsilon: Annotated[
        float | None,
        typer.Option("--max-epsilon", help="A node's ledger: what is left of it, not of its own."),
    ] = None,
) -> None:
    """Show every release in a ledger; of a node's ledger also what its data have spent."""
    from fl_app.ledger_view import ledger_view

    view = ledger_view(_ledger_file(path), delta=delta, max_epsilon=max_epsilon)
    typer.echo(json.dumps(view.values, indent=2, allow_nan=False) if as_json else view.text)


@ledger_app.command()
def verify(path: Path, as_json: Json = False) -> None:
    """Check a ledger's hash chain, and against what is kept beside it.

    That is results and checkpoint of a run, or the head file of a node's ledger.
    """
    from fl_app.run_directory import verify_ledger

    problems = verify_ledger(_ledger_file(path))
    if as_json:
        typer.echo(json.dumps({"ok": not problems, "problems": problems}))
    else:
        typer.echo("ledger is intact" if not problems else "\n".join(problems))
    raise typer.Exit(1 if problems else 0)


def _ledger_file(path: Path) -> Path:
    """Returns the ledger at `path`, which may be a run directory."""
    return path / "ledger.sqlite" if path.is_dir() else path


def main() -> None:
    """Runs the command; a refusal is one text on stderr and exit code 2."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)  # Flower's logger passes everything on
    logging.basicConfig(format="%(name)s: %(message)s", handlers=[handler])
    try:
        app()
    except DpflError as error:
        print(f"dpfl: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
