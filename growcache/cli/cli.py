"""The command line: the commands in the order of ``--help``, and the handling of errors."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from growcache import __version__
from growcache.cli import cache_commands, config_commands
from growcache.cli.completion import complete_code
from growcache.cli.examples import examples_epilog
from growcache.cli.terminal import NO_COLOR, apply_no_color, fold_to_width
from growcache.errors import GrowcacheError, code_hint

app = typer.Typer(
    name="growcache",
    help="A bounded local cache of random samples from object storage. It grows while you "
    "train.\n\nExample: growcache demo",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# typer's errors for bad usage. The module of their base class depends on typer's version.
UsageError: Any = typer.BadParameter.__mro__[1]
INTERRUPTED_EXIT_CODE = 130


def explain(
    code: Annotated[
        str | None,
        typer.Argument(
            metavar="[CODE]", help="The code, such as GC401.", autocompletion=complete_code
        ),
    ] = None,
) -> None:
    """Explain an error code: its meaning, cause and remedy. Without a code, list all."""
    from growcache.cli.explain import explain_code

    explain_code(code)


START, PLAN, WATCH = "Start", "Plan and measure", "Watch"
SAMPLES, CARE, ERRORS = "Look at samples", "Care for a cache", "Understand an error"

# The commands in the order of docs/commands.md, each with its panel in `--help`.
COMMANDS = (
    (config_commands.demo, START),
    (config_commands.init, START),
    (config_commands.schema, START),
    (config_commands.plan, PLAN),
    (config_commands.run, START),
    (config_commands.doctor, PLAN),
    (cache_commands.status, WATCH),
    (cache_commands.dashboard, WATCH),
    (cache_commands.check, CARE),
    (cache_commands.peek, SAMPLES),
    (cache_commands.replay, SAMPLES),
    (cache_commands.report, WATCH),
    (cache_commands.export, SAMPLES),
    (cache_commands.purge, CARE),
    (cache_commands.release, CARE),
    (cache_commands.clear, CARE),
    (explain, ERRORS),
)


@app.callback(invoke_without_command=True)
def _root_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    no_color: Annotated[
        bool, typer.Option(NO_COLOR, help="No colours. Also after a command, or as NO_COLOR=1.")
    ] = False,
) -> None:
    if version:
        typer.echo(f"growcache {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


for command, panel in COMMANDS:
    described = app.command(epilog=examples_epilog(command.__name__), rich_help_panel=panel)
    described(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return its exit code: 0 success, 1 a finding, 2 bad usage."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without UTF-8 shows a ? instead
            stream.reconfigure(errors="replace")
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        code = app(apply_no_color(given), prog_name="growcache", standalone_mode=False)
    except UsageError as error:
        return _print_error(f"{_usage_sentence(error)} See: {_command_path(error)} --help", 2)
    except GrowcacheError as error:
        return _print_error(str(error), error.exit_code, code_hint(error.code))
    except typer.Abort:
        return _print_error("nothing was changed", 1)
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    return code if isinstance(code, int) else 0


def _usage_sentence(error: Any) -> str:
    message = error.format_message().rstrip(".")
    message = re.sub(r" \(Possible options: ([^,)]+)[^)]*\)", r". Did you mean \1?", message)
    return message if message.endswith("?") else f"{message}."


def _command_path(error: Any) -> str:
    context = getattr(error, "ctx", None)
    return context.command_path if context is not None else "growcache"


def _print_error(message: str, code: int, hint: str = "") -> int:
    from growcache.usercode import printable

    lines = [printable(line) for line in message.splitlines() if line.strip()][:2]
    lines[-1:] = [f"{line} {hint}".rstrip() for line in lines[-1:]]
    typer.echo(fold_to_width("growcache: " + "\n".join(lines), sys.stderr), err=True)
    return code
