"""The command `unisono`. Subcommands import their dependencies when they run, so `--help` is
fast."""

from __future__ import annotations

import io
import sys
from typing import Annotated, Any

import typer

from unisono import __version__
from unisono.commands.bench import bench, check, explain, prove
from unisono.commands.calibrate import calibrate
from unisono.commands.lab import lab
from unisono.commands.learn import learn
from unisono.commands.plan import plan
from unisono.commands.show import show
from unisono.commands.simulate import simulate
from unisono.commands.topo import topo
from unisono.commands.trace import app as trace_app
from unisono.commands.tune import tune
from unisono.errors import UnisonoError
from unisono.extras import with_cure

app = typer.Typer(
    name="unisono",
    help="Collective communication for AI training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"unisono {__version__}")
        raise typer.Exit


@app.callback()
def everything(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Collective communication for AI training."""


app.command(epilog="Example: unisono check -n 4")(check)
app.command(
    epilog="Example: unisono bench all_reduce -n 4 --sizes 8,64K,16M --against gloo,openmpi "
    "--json out.json"
)(bench)
app.command(
    epilog="Example: unisono lab --hosts 4 --rate 1gbit -- torchrun --nnodes 4 --node-rank {I} "
    "--master-addr host0 train.py"
)(lab)
app.command(epilog="Example: unisono explain all_reduce 64K -n 4")(explain)
app.command(epilog="Example: unisono tune -n 2,4 --out selection.json")(tune)
app.command(epilog="Example: unisono prove algorithm.xml --run 16")(prove)
app.command(epilog="Example: unisono show all_reduce ring -n 8 --size 64M --html ring.html")(show)
app.command(
    epilog="Example: unisono simulate all_reduce --topology torus:8x8 --size 64M --compare all "
    "--svg times.svg"
)(simulate)
app.command(epilog="Example: unisono plan --model gpt3-175b --cluster a100:1024 --batch 1536")(plan)
app.command(epilog="Example: unisono calibrate bench.json --out model.json")(calibrate)
app.command(epilog="Example: unisono topo torus:4x4 --svg torus.svg --html torus.html")(topo)
app.command(epilog="Example: unisono learn 2 --language zh")(learn)
app.add_typer(trace_app, name="trace")


@app.command(
    epilog="Example: unisono train digits -n 4",
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)
def train(context: typer.Context) -> None:
    """Train a small real model on several ranks (see `unisono train --help`)."""
    from unisono.commands.train import app as train_app

    raise typer.Exit(
        train_app(args=context.args, prog_name="unisono train", standalone_mode=False) or 0
    )


# typer does not export this base class of its errors; in some versions the class is click's.
_CommandError: Any = next(
    each for each in typer.BadParameter.__mro__ if each.__name__ == "ClickException"
)


def main() -> None:
    """Runs the command line. Errors of the user, of Unisono and of the system are printed as one
    line, without a box or a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # for characters that the locale does not have
            stream.reconfigure(errors="replace")
    try:
        code = app(prog_name="unisono", standalone_mode=False)
    except UnisonoError as error:
        code = _told(f"unisono: {type(error).__name__}: {error}", 1)
    except ModuleNotFoundError as error:
        if (cured := with_cure(error, "this command")) is error:
            raise  # a defect
        code = _told(f"unisono: {cured}", 1)
    except OSError as error:  # such as a full disk
        code = _told(f"unisono: {error}", 1)
    except typer.Abort:
        code = _told("unisono: interrupted", 1)
    except _CommandError as error:
        code = _told(_in_one_line(error), error.exit_code)
    sys.exit(code or 0)


def _told(text: str, code: int) -> int:
    typer.echo(text, err=True)
    return code


def _in_one_line(error: Any) -> str:
    """Returns the text of an error in the arguments of a command."""
    if type(error).__name__ == "NoArgsIsHelpError":  # typer has printed the help
        return str(error.format_message())
    command = "unisono" if error.ctx is None else error.ctx.command_path
    return f"{command}: {' '.join(error.format_message().split())} (see {command} --help)"
