"""The classes that commands are made of: options under headings, values, examples, exit codes.

Options of functions of the library are declared beside them: see `wdsprep.cli.declared_options`.
`wdsprep.errors` has the exit codes of errors.
"""

import importlib
from collections.abc import Callable
from functools import partial
from inspect import cleandoc
from typing import Any

import click

from wdsprep.errors import UsageError
from wdsprep.options import unknown_option_message
from wdsprep.terminal import TERMINAL


def import_function(function: str) -> Callable[..., Any]:
    """Import the function that is written as `module:name`."""
    module, _, name = function.partition(":")
    imported: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return imported


GENERAL = "General"
"""The heading of the options that all commands have, which comes last."""


class HeadedOption(click.Option):
    """An option that is listed under a heading in the help of its command."""

    def __init__(self, *args: Any, heading: str = GENERAL, **options: Any) -> None:
        super().__init__(*args, **options)
        self.heading = heading


option = partial(click.option, cls=HeadedOption)


PLACE = click.Path(readable=False)
"""The type of a file, folder, pattern or URL: shells complete it with files, nothing checks it."""


def _set_volume(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    """Take one of the options -q, -v and --debug, whose place is before a command or after it."""
    if wanted and param.name == "verbose":
        TERMINAL.be_verbose()
    TERMINAL.is_quiet |= wanted and param.name == "quiet"
    TERMINAL.is_debugging |= wanted and param.name == "debug"
    if TERMINAL.is_quiet and TERMINAL.is_verbose:
        raise click.UsageError("--quiet and --verbose contradict each other: give one of them", ctx)


def volume_options() -> list[click.Parameter]:
    """Return the options -q, -v and --debug, which may stand before a command or after it."""
    helps = {
        "-q --quiet": "Print nothing but errors, warnings, findings and what was asked for.",
        "-v --verbose": "Print a line for each unit that is done or tried again and each worker "
        "that is lost, and the traceback of an error.",
        "--debug": "Print the traceback of an error.",
    }
    said = partial(HeadedOption, is_flag=True, expose_value=False, callback=_set_volume)
    return [said(names.split(), help=text) for names, text in helps.items()]


class Command(click.Command):
    """A command whose help shows examples first, and then its options under headings.

    The examples end the docstring of its function.
    """

    def __init__(self, *args: Any, resumes: bool = True, **options: Any) -> None:
        """Make a command. `resumes` says that the same command goes on after an interrupt."""
        super().__init__(*args, **options)
        self.help, _, examples = cleandoc(self.help or "").partition("\n\nExamples:\n")
        self.examples, self.resumes = examples.splitlines(), resumes

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            names = [name for param in self.get_params(ctx) for name in param.opts]
            known = [name for name in names if name.startswith("--")]
            command = str(ctx.info_name)
            wrong = unknown_option_message(
                command, error.option_name, known, getattr(self, "declared", ())
            )
            raise UsageError(wrong) from None

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        *params, helping = super().get_params(ctx)
        return [*params, *volume_options(), helping]

    def get_short_help_str(self, _limit: int = 0) -> str:
        """Return the first paragraph of the help on one line, uncut."""
        return " ".join((self.help or "").partition("\n\n")[0].split())

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help_text(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"  {example}\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                groups.setdefault(getattr(param, "heading", GENERAL), []).append(record)
        for heading in sorted(groups, key=lambda heading: heading == GENERAL):
            with formatter.section(heading):
                formatter.write_dl(groups[heading])


DATASETS = click.argument("datasets", metavar="DATASET...", nargs=-1, required=True, type=PLACE)
"""The argument of a command that takes one or more datasets."""
OUTPUT = option(
    "--json", "as_json", heading="Output", is_flag=True, help="Print the result as JSON."
)
"""The option of a command that prints its result as JSON too."""


DONE_WITH_DAMAGE = 3
"""The exit code of a command that has to be run again, or whose result has to be looked at."""
INTERRUPTED = 130
