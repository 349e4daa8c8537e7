"""Make click options and arguments of declared options (`wdsprep.options`)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import click
from click.shell_completion import CompletionItem

from wdsprep import options
from wdsprep.cli.base_command import Command, HeadedOption, import_function
from wdsprep.errors import UsageError
from wdsprep.options import Option, options_of
from wdsprep.runners.options import OUTPUT, WORKERS


class Value(click.ParamType):  # type: ignore[type-arg]
    """The type of a declared option.

    It converts a word of the command line. A wrong one raises the error of a call from Python.
    """

    name = "text"

    def __init__(self, declared: Option) -> None:
        self._declared = declared

    def convert(self, value: Any, _param: Any, _ctx: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._declared.read_text(value)
        except UsageError as error:
            if self._declared.about.bare is None or value[:1].isdecimal():
                raise
            raise UsageError(f"{error}, or put the option last, without one") from None

    def shell_complete(self, _ctx: Any, _param: Any, incomplete: str) -> list[CompletionItem]:
        about = self._declared.about
        words = [word for word in (*about.choices, *about.known) if word.startswith(incomplete)]
        items = [CompletionItem(word) for word in words if word]
        if about.known:
            return [CompletionItem(incomplete, type="dir"), *items]
        return [CompletionItem(incomplete, type="file")] if about.is_place else items


def metavar_of(declared: Option) -> str:
    """Return the word that stands for the value of an option in the help."""
    about = declared.about
    if about.metavar:
        return about.metavar
    if about.choices:
        return f"[{'|'.join(filter(None, about.choices))}]"
    return "N" if declared.is_number else "TEXT"


def option_of(declared: Option) -> HeadedOption:
    """Return the click option for a declared option."""
    about = declared.about
    names = [about.spelling or declared.dashed, declared.name]
    bare: dict[str, Any] = {"is_flag": True if declared.is_flag else None}
    if about.bare is not None:
        bare = {"is_flag": False, "flag_value": about.bare}
    return HeadedOption(
        names,
        heading=about.heading,
        # with False instead of None, the value of `--min-size=-5` would be an option of its own
        **bare,
        multiple=about.is_many,
        required=declared.is_required,
        type=None if declared.is_flag else Value(declared),
        metavar=None if declared.is_flag else metavar_of(declared),
        show_default=declared.usual,
        help=about.help,
    )


def argument_of(declared: Option) -> click.Argument:
    """Return the click argument for a declared argument."""
    return click.Argument(
        [declared.name],
        type=Value(declared),
        required=declared.is_required,
        nargs=-1 if declared.about.is_many else 1,
        metavar=declared.about.metavar or None,
    )


LAST = {WORKERS: 1, OUTPUT: 2}
"""The headings that come last in a help, in this order."""


class DeclaredCommand(Command):
    """A command with declared options.

    The class at `declared` (such as `wdsprep.packing.options:PackOptions`) has the options. It is
    imported only if the command is used.

    The help has the headings of the options in the order of their declaration, those of workers and
    output last; `first` are headings that come before. Options that are not declared, such as
    --json, follow declared ones under their heading.
    """

    _is_full = False

    def __init__(self, *args: Any, declared: str, first: Sequence[str] = (), **more: Any) -> None:
        super().__init__(*args, **more)
        self._place, self._first = declared, first

    @cached_property
    def declared(self) -> tuple[Option, ...]:
        return options_of(import_function(self._place))

    @property
    def params(self) -> list[click.Parameter]:
        """Return the parameters in one list, which click adds to and removes from."""
        if not self._is_full:
            self._is_full = True
            self._params[:] = self._sorted_params(self._params)
        return self._params

    @params.setter
    def params(self, own: list[click.Parameter]) -> None:
        self._params, self._is_full = own, False

    def _sorted_params(self, own: Sequence[click.Parameter]) -> Iterator[click.Parameter]:
        """Yield the arguments, then the options under each heading."""
        yield from (argument_of(option) for option in self.declared if option.is_argument)
        yield from (param for param in own if isinstance(param, click.Argument))
        options = [option_of(option) for option in self.declared if not option.is_argument]
        options += [param for param in own if isinstance(param, HeadedOption)]
        headings = [*dict.fromkeys([*self._first, *(option.heading for option in options)])]
        headings.sort(key=lambda heading: LAST.get(heading, 0))
        order = {option.name: option.about.order for option in self.declared}
        options.sort(key=lambda option: order.get(str(option.name), 0))
        for heading in headings:
            yield from (option for option in options if option.heading == heading)

    @property
    def defaults(self) -> Mapping[str, Any]:
        return {option.name: option.default for option in self.declared if not option.is_required}

    def invoke(self, ctx: click.Context) -> Any:
        given = {name: value for name, value in ctx.params.items() if value is not None}
        ctx.params = {**dict.fromkeys(ctx.params), **self.defaults, **given}
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        ctx.default_map = dict(self.defaults)
        super().format_options(ctx, formatter)

    def make_parser(self, ctx: click.Context) -> Any:
        """Return a parser that refuses an option given twice; click's would take the last."""
        parser = super().make_parser(ctx)
        parse: Callable[..., tuple[Any, Any, Any]] = parser.parse_args

        def parse_once(args: list[str]) -> tuple[Any, Any, Any]:
            opts, rest, order = parse(args)
            for param in self.params:
                if order.count(param) > 1 and not getattr(param, "multiple", False):
                    raise UsageError(options.given_twice_message(param.opts[0]))
            return opts, rest, order

        parser.parse_args = parse_once  # type: ignore[method-assign]
        return parser

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = [*args]  # the parser takes those of `args` away
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter as error:
            name = str(error.param.name) if error.param else ""
            places = self.make_parser(ctx).parse_args(words)[0]
            if name == "datasets" and isinstance(places.get("out"), str):
                name = "out"  # in whose place the only dataset stands
            if name not in {option.name for option in self.declared}:
                raise
            raise UsageError(
                options.missing_option_message(str(ctx.info_name), name, self.declared)
            ) from None
