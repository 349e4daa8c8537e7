"""The command line: parse, call the library, print. Nothing heavy is imported before it is needed.

Option names have dashes; underscores mean the same.

`commands` has the help of each command and its call of the library, `plan` all of the command
`plan`, and `output` what commands print, in a file for each room. Options are declared beside the
functions of the library (`wdsprep.options`); `declared_options` makes click options of them.
`base_command` has the options that all commands have, what their help looks like, and exit codes.
`demo` has the pictures and the steps of the command `demo`.

In: The words of a command line.
Out: Calls of the library, text on the terminal, an exit code.
"""

import re
import sys
from typing import Any

import click

from wdsprep.cli.base_command import INTERRUPTED, Command
from wdsprep.cli.commands import COMMANDS, DAILY
from wdsprep.cli.output.shared import complain, echo
from wdsprep.errors import UsageError, WdsprepError
from wdsprep.terminal import TERMINAL
from wdsprep.version import __version__

IN_PYTHON = ("load", "stream", "table")
"""The functions without a command, which return what a program goes on with."""
OVERWRITE = "--overwrite"


def option_name(name: str) -> str:
    """Return the name of an option with dashes, as click knows it."""
    return name.replace("_", "-")


class CommandGroup(Command, click.Group):
    """The group of all commands. Its help lists those of daily use first."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        for heading, group in (("Commands", names[:DAILY]), ("More commands", names[DAILY:])):
            rows = [(name, self.commands[name].get_short_help_str()) for name in group]
            with formatter.section(heading):
                formatter.write_dl(rows)
        super().format_options(ctx, formatter)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in IN_PYTHON:
            ctx.fail(f'{args[0]} is for Python: "import wdsprep", then wdsprep.{args[0]}(...)')
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. If it is interrupted, raise an Abort that says whether it can be resumed.

        This comes before click's own way, which begins a new row first: the progress line would
        then stay on the screen.
        """
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort) as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            raise click.Abort(getattr(command, "resumes", True)) from error


@click.group(
    cls=CommandGroup,
    invoke_without_command=True,
    context_settings={
        "token_normalize_func": option_name,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
)
@click.version_option(__version__, prog_name="wdsprep")
@click.pass_context
def cli(context: click.Context) -> None:
    """Turn image-caption downloads into tar shards that diffusion trainers stream.

    Examples:
    $ wdsprep demo
    $ wdsprep pack photos shards/images
    $ wdsprep encode shards/images shards/latents-256 --resolution 256
    """
    if context.invoked_subcommand is None:
        echo(context.get_help())


for command in COMMANDS:
    cli.add_command(command)


def main(arguments: list[str] | None = None) -> int:
    """Run a command line, and return its exit code.

    A failure is printed as one line, before which --verbose and --debug may print a traceback.
    Nothing is printed if the program that reads the output has ended.
    """
    with TERMINAL.during_command():
        return _main(sys.argv[1:] if arguments is None else arguments)


def _main(arguments: list[str]) -> int:
    try:
        code = cli.main(arguments, prog_name="wdsprep", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        said = re.sub(
            r"\. Did you mean '?(.*?)'?\?$", r" (did you mean \1?)", error.format_message()
        )
        hint = f": see {context.command_path} --help" if context else ""
        complain(f"{said.rstrip('.')}{hint}", traced=False)
        return UsageError.exit_code
    except (KeyboardInterrupt, click.Abort) as error:
        resumes = isinstance(error, click.Abort) and error.args == (True,)
        left, is_kept = TERMINAL.left_off()
        following = "run the same command again"
        if resumes and is_kept:
            again = (
                f"the same without {OVERWRITE}" if OVERWRITE in arguments else "the same command"
            )
            following = f"run {again} to go on from here"
        complain(": ".join(filter(None, ("interrupted", left, following))), traced=False)
        return INTERRUPTED
    except WdsprepError as error:
        complain(str(error))
        return error.exit_code
    except BrokenPipeError:  # the program that read our output has ended
        sys.stderr.close()
        return 1
    except Exception as error:  # noqa: BLE001 (a bug: reported as one line, whole with --debug)
        from wdsprep.runners.stuck_workers import is_of_memory

        if is_of_memory(error):
            complain("out of memory: give the command more (ulimit -v), and run it again")
            return 1
        complain(f"a bug: {type(error).__name__}: {error}: --debug shows where")
        return 1
