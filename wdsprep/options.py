"""Options, each of which is declared once, as a field of a frozen dataclass.

What is said about an option stands beside its default:

    @dataclass(frozen=True, kw_only=True)
    class PackRules(Options):
        min_size: int = option_field(
            "Reject images whose shorter side has fewer pixels.", "Images", default=0, least=0
        )

    @takes_options(PackRules)
    def pack(options: PackRules) -> Outcome: ...

From it come the signature of the function, which is that of the class's constructor, for type
checkers, editors and `help()` alike; the option of the command line and its help
(`wdsprep.cli.declared_options`); its row on a page (`tools.option_tables`); and the check, which
says the same line in Python and on the command line. Classes are put together by inheritance. A
field that is neither made by `option_field(...)`, nor has `about(...)` as its metadata, is an
argument of the function and not an option of a command.

Modules with declarations are light: a command line imports them to show its help.
"""

import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache, partial, wraps
from math import isfinite
from typing import Any, ClassVar, ParamSpec, Protocol, TypeAlias, TypeVar, cast, overload

from wdsprep.errors import UsageError
from wdsprep.text import (
    brief,
    check_one_of,
    nearest_name,
    one_line,
    plural,
    real_number,
    whole_number,
)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


MOST = (1 << 63) - 1
"""The largest absolute value of a whole number, unless its option has a limit of its own."""


class OptionError(UsageError, TypeError):
    """An error for a call whose arguments do not fit.

    An option is unknown, missing or given twice, or an argument lacks the name that it needs.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """The facts about an option beside its name, type and default."""

    help: str
    heading: str = ""
    """The heading above the option in the help of a command; empty for an argument."""
    spelling: str = ""
    """The spelling on a command line if that is not the name: `-o`."""
    metavar: str = ""
    usual: bool | str | None = None
    """What the help shows as default: the default itself (True), nothing (False), or these words.
    With None it is the default, unless that is empty or 0."""
    least: float | None = None
    most: float | None = None
    choices: Sequence[str] = ()
    read: Callable[[Any], Any] | None = None
    """Returns the value for what a user gives, or raises UsageError; its results pass unchanged."""
    bare: Any = None
    """The value that it has on a command line where no value follows it; None if one must."""
    parse: Callable[[str], Any] | None = None
    """Converts a word of a command line for `read`, if that takes neither a number nor a text."""
    inner: Sequence[str] = ()
    """Choices for internal calls, which no message or help lists."""
    order: int = 0
    """The place among the options under its heading: lower first, then in order of declaration."""
    is_place: bool = False
    """True if it names a file, a folder, a pattern or a URL."""
    is_many: bool = False
    """True if it may be given several times."""
    known: Sequence[str] = ()
    """Some of the words that it may be, which a shell completes."""
    also: Sequence[str] = ()
    """The names that other programs give this option."""
    code: str = ""
    """The reject code of the samples that it rejects."""
    remedy: str = ""
    """The words for a message that say how more of these samples pass."""
    decides: bool = False
    """True if the settings of a dataset state it, unless it is the default."""
    page: str = ""
    """The text of its row on a page, in Markdown; empty if that is the help."""
    example: str = ""
    """An example for its row, if the default is not a good one."""


LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
"""Matches a link of Markdown."""


def about(help: str, heading: str = "", **more: Any) -> Mapping[str, About]:
    """Return the metadata of a dataclass field that is an option; `more` are fields of `About`.

    The help may have links, as in Markdown, for the row of the option on a page.
    """
    plain = LINK.sub(r"\1", help)
    if plain != help:
        more = {"page": f"{help[0].lower()}{help[1:].rstrip('.')}", **more}
    return {"about": About(help=plain, heading=heading, **more)}


def option_field(help: str, heading: str = "", *, default: T, **more: Any) -> T:
    """Return a field of a dataclass that is an option; `more` are fields of `About`.

    Its type is that of the default, as type checkers know it of `dataclasses.field`.
    """
    return field(default=default, metadata=about(help, heading, **more))


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """An option as its class declares it."""

    name: str
    annotation: str
    default: Any
    is_argument: bool
    is_command: bool
    about: About

    @property
    def dashed(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def spelled(self) -> str:
        """The name of the option in messages: as on a command line, if a command has the option."""
        if not self.is_command:
            return self.name
        return self.name.upper() if self.is_argument else self.about.spelling or self.dashed

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    @property
    def is_flag(self) -> bool:
        return self.annotation == "bool"

    @property
    def kind(self) -> str:
        """Return the type of its values, but for None."""
        return self.annotation.removesuffix(" | None")

    @property
    def is_number(self) -> bool:
        return self.kind in NUMBERS

    @property
    def usual(self) -> bool | str:
        """Return what the help shows as default: the default itself (True), or other words."""
        usual = self.about.usual
        return bool(self.default) and not self.is_required if usual is None else usual

    def read(self, given: Any) -> Any:
        """Return the value of the option for what a user gave.

        Raise UsageError if that is wrong.
        """
        given = _plain(given)
        if isinstance(given, int) and abs(given) > MOST and not self.is_number:
            # too large for every reader
            raise UsageError(f"{self.spelled} {brief(given)}: give {MOST} or less")
        if self.default in ("", ()):
            takes_lists = self.default == () or re.search("Iterable|Sequence", self.annotation)
            kinds: tuple[type, ...] = (str, tuple, list) if takes_lists else (str,)
            if isinstance(given, kinds) and not given:
                return given
        if given is None and ("None" in self.annotation or self.default is None):
            return None
        if self.about.is_many:
            listed = [given] if isinstance(given, str | os.PathLike) else given
            if not isinstance(listed, Iterable):
                raise UsageError(f"{self.spelled} {brief(given)}: give a list")
            return tuple(map(self._read, listed))
        return self._read(given)

    def _read(self, given: Any) -> Any:
        if self.about.read is not None:
            try:
                value = self.about.read(given)
            except UsageError as error:
                said = str(error).strip()
                has_name = self.dashed in said if self.is_command else said.startswith(self.name)
                named = said if has_name else f"{self.spelled} {said}"
                raise UsageError(one_line(named)) from None
        elif self.about.is_place:
            value = _place(self.spelled, given)
        else:
            check = KINDS.get(self.kind)
            value = given if check is None else check(self.spelled, given)
        about = self.about
        if about.choices and value not in about.inner:
            check_one_of(self.spelled, value, about.choices)
        least, most = about.least, about.most
        if isinstance(value, int):
            least, most = -MOST if least is None else least, MOST if most is None else most
        shown = f"{value:g}" if isinstance(value, float) else brief(value)  # 2.0 as people write it
        if least is not None and not value >= least:
            raise UsageError(f"{self.spelled} {shown}: give {least} or more")
        if most is not None and not value <= most:
            raise UsageError(f"{self.spelled} {shown}: give {most} or less")
        if isinstance(value, float) and not isfinite(value):
            raise UsageError(f"{self.spelled} {shown}: give a number")
        return value

    def read_text(self, text: str) -> Any:
        """Return the value of the option for a word of a command line."""
        parse = self.about.parse or NUMBERS.get(self.kind)
        try:
            return self._read(text if parse is None else parse(text))
        except ValueError:
            return self._read(text)


def _plain(given: Any) -> Any:
    """Convert values of NumPy, torch and enumerations into those of Python, which settings keep."""
    if isinstance(given, str):
        return str.__str__(given)
    plain = getattr(given, "tolist", None)
    return plain() if callable(plain) else given


def flag(name: str, given: Any) -> bool:
    if isinstance(given, int) and given in (0, 1):
        return bool(given)
    raise UsageError(f"{name} {brief(given)}: give True or False")


def _text(name: str, given: Any) -> str:
    if not isinstance(given, str):
        raise UsageError(f"{name} {brief(given)}: give a string")
    return given


def _place(name: str, given: Any) -> Any:
    if not isinstance(given, str | os.PathLike) or "\0" in os.fspath(given):
        raise UsageError(f"{name} {brief(given)}: give a path or a URL")
    return given


NUMBERS: Mapping[str, Callable[[str], float]] = {"int": int, "float": float}
KINDS: Mapping[str, Callable[[str, Any], Any]] = {
    "int": whole_number,
    "float": real_number,
    "bool": flag,
    "str": _text,
    "str | os.PathLike[str]": _place,
}
"""The checks of options that have no `read` function, by their types."""


class Options:
    """The options of a call. Classes of options are dataclasses that inherit from this one.

    The constructor of such a class reads and checks the value of each option. It raises UsageError
    if a value is wrong or options contradict each other.
    """

    is_command: ClassVar[bool] = True
    """True if a command has these options too."""

    def __post_init__(self) -> None:
        for option in options_of(type(self)):
            object.__setattr__(self, option.name, option.read(getattr(self, option.name)))
        self.check_together()

    def check_together(self) -> None:
        """Raise UsageError if options contradict each other."""

    @contextmanager
    def during_call(self) -> Iterator["Options"]:
        """Prepare what a function needs while it runs, and yield the options that it gets."""
        yield self

    def part(self, kind: type[T]) -> T:
        """Return the options that are fields of another dataclass, as a value of that class."""
        return kind(**{f.name: getattr(self, f.name) for f in fields(cast("Any", kind))})


def options_of(declared: Callable[..., Any]) -> tuple[Option, ...]:
    """Return the options that a class declares, in their order."""
    return _options_of(declared)


@lru_cache(None)
def _options_of(declared: Any) -> tuple[Option, ...]:
    return tuple(
        Option(
            name=field.name,
            annotation=inspect.formatannotation(field.type).strip("\"'"),
            default=field.default,
            is_argument=not field.kw_only,
            is_command=getattr(declared, "is_command", True),
            about=field.metadata["about"],
        )
        for field in fields(declared)
        if "about" in field.metadata
    )


def options_in_settings(options: Options) -> dict[str, Any]:
    """Return by name the values of options that decide what a dataset is, without defaults."""
    decisive = [option for option in options_of(type(options)) if option.about.decides]
    values = ((option, getattr(options, option.name)) for option in decisive)
    return {option.name: value for option, value in values if value != option.default}


def options_given_under(options: Options, heading: str) -> list[str]:
    """Return the spellings of the options under a heading that differ from their defaults."""
    under = [option for option in options_of(type(options)) if option.about.heading == heading]
    return [option.spelled for option in under if getattr(options, option.name) != option.default]


def remedies_of(declared: Callable[..., Any]) -> dict[str, str]:
    """Return the words that say how more samples pass an option, by the code of its rejects."""
    abouts = [option.about for option in options_of(declared)]
    return {about.code: about.remedy for about in abouts if about.code}


def _suggestion(function: str, wrong: str, names: Iterable[str]) -> str:
    """Return a sentence with the name that may be meant, or the command that lists all names."""
    if near := nearest_name(wrong, names):
        return f"did you mean {near}?"
    if not wrong.startswith("-"):
        return f"help(wdsprep.{function.removesuffix('()')}) lists them"
    return f'"wdsprep {function} --help" lists them'.replace("wdsprep wdsprep", "wdsprep")


def unknown_option_message(
    function: str, wrong: str, names: Sequence[str], options: Sequence[Option]
) -> str:
    """Return the message that a call or a command has no option `wrong`, and what may be meant."""
    plain = wrong.lstrip("-").replace("-", "_")
    for option in options:
        if plain in option.about.also:
            what = option.about.help.rstrip(".")
            own = option.spelled if wrong.startswith("-") else option.name
            what = f"it is {own}, {what[0].lower()}{what[1:]}"
            return f"{function} has no option {wrong}: {what}"
    return f"{function} has no option {wrong}: {_suggestion(function, wrong, names)}"


def check_call(
    function: str,
    signature: inspect.Signature,
    options: Sequence[Option],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Raise OptionError, in words for a user, if the arguments do not fit the signature."""
    known = signature.parameters
    several = [p.name for p in known.values() if p.kind is p.VAR_POSITIONAL]
    if wrong := [name for name in kwargs if name not in known or name in several]:
        if near := nearest_name(wrong[0], several):
            takes = f"it takes {near} without a name, as {function}({brief(kwargs[wrong[0]])})"
            raise OptionError(f"{function}() has no option {wrong[0]}: {takes}")
        raise OptionError(unknown_option_message(f"{function}()", wrong[0], list(known), options))
    by_place = [p.name for p in known.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(by_place):
        takes = f"{plural(len(by_place), 'argument')} without a name ({', '.join(by_place)})"
        takes = takes if by_place else "no argument without a name"
        raise OptionError(f"{function}() takes {takes}: give {brief(args[len(by_place)])} a name")
    if twice := [name for name in by_place[: len(args)] if name in kwargs]:
        own = next(option for option in options if option.name == twice[0])
        raise OptionError(given_twice_message(own.spelled))
    for parameter in known.values():
        is_needed = parameter.default is parameter.empty and parameter is not DATASETS
        if is_needed and parameter.name not in (*kwargs, *by_place[: len(args)]):
            raise OptionError(missing_option_message(f"{function}()", parameter.name, options))


def given_twice_message(name: str) -> str:
    return f"{name} is given twice: give it once"


def missing_option_message(function: str, name: str, options: Sequence[Option]) -> str:
    """Return the message that a call or a command needs an option, and what that is for."""
    (own,) = [option for option in options if option.name == name]
    what = own.about.help.rstrip(".")
    return f"{function} needs {own.spelled}: {what[0].lower()}{what[1:]}"


def takes_options(options: Callable[P, T]) -> Callable[[Callable[[T], R]], Callable[P, R]]:
    """Return a decorator that gives a function of an options object the signature of `options`.

    Callers give the arguments of that class, and the function gets the object made of them.
    Arguments that do not fit raise OptionError; values that are wrong raise UsageError.
    """

    def decorate(function: Callable[[T], R]) -> Callable[P, R]:
        signature = inspect.signature(options)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            check_call(function.__name__, signature, options_of(options), args, kwargs)
            return _call_with(function, options(*args, **kwargs))

        return cast("Callable[P, R]", _set_signature(call, function, signature))

    return decorate


def _call_with(function: Callable[[T], R], options: T) -> R:
    with cast("Options", options).during_call() as prepared:
        return function(cast("T", prepared))


Place: TypeAlias = str | os.PathLike[str]


def as_places(given: Place | Sequence[Place]) -> tuple[Place, ...]:
    """Return places as a tuple, also if a single place was given without a list."""
    return (given,) if isinstance(given, str | os.PathLike) else tuple(given)


R_co = TypeVar("R_co", covariant=True)


Q = ParamSpec("Q")
S_co = TypeVar("S_co", covariant=True)


class OverloadedFunction(Protocol[P, R_co, Q, S_co]):
    """A function with two signatures, each of which has a result of its own."""

    @overload
    def __call__(self, *args: P.args, **options: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, *args: Q.args, **options: Q.kwargs) -> S_co: ...


class DatasetsFunction(Protocol[P, R_co]):
    """A function that takes any number of datasets, and options by name."""

    @overload
    def __call__(self, a: Place, /, *args: P.args, **options: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, a: Place, b: Place, /, *args: P.args, **options: P.kwargs) -> R_co: ...
    @overload
    def __call__(
        self, a: Place, b: Place, c: Place, /, *args: P.args, **options: P.kwargs
    ) -> R_co: ...
    @overload
    def __call__(
        self, a: Place, b: Place, c: Place, d: Place, /, *args: P.args, **options: P.kwargs
    ) -> R_co: ...


DATASETS = inspect.Parameter(
    "datasets", inspect.Parameter.VAR_POSITIONAL, annotation="str | os.PathLike[str]"
)


def takes_datasets(
    options: Callable[P, T],
) -> Callable[[Callable[[Sequence[Place], T], R]], DatasetsFunction[P, R]]:
    """Return a decorator that gives a function the signature `(*datasets, **options)`.

    The function gets the datasets as a list, and the object made of the options. Type checkers see
    up to four datasets that are written out, and any number behind a `*`.
    """

    def decorate(function: Callable[[Sequence[Place], T], R]) -> DatasetsFunction[P, R]:
        by_name = inspect.signature(options)
        signature = by_name.replace(parameters=[DATASETS, *by_name.parameters.values()])

        @wraps(function)
        def call(*datasets: Place, **kwargs: Any) -> R:
            check_call(function.__name__, signature, options_of(options), (), kwargs)
            places = [_place(DATASETS.name.upper(), dataset) for dataset in datasets]
            return _call_with(
                partial(function, places), cast("Callable[..., T]", options)(**kwargs)
            )

        return cast("DatasetsFunction[P, R]", _set_signature(call, function, signature))

    return decorate


def _set_signature(call: Any, function: Callable[..., Any], signature: inspect.Signature) -> Any:
    result = inspect.signature(function).return_annotation
    call.__signature__ = signature.replace(return_annotation=result)
    return call


def refuse_unknown_options(declared: type[T]) -> type[T]:
    """Make the constructor of a class of options raise OptionError for arguments that do not fit.

    The message on an unknown option names a similar option, if there is one.
    """
    construct: Callable[..., None] = declared.__init__
    signature = inspect.signature(declared)

    @wraps(construct)
    def init(self: T, *args: Any, **kwargs: Any) -> None:
        check_call(declared.__name__, signature, options_of(declared), args, kwargs)
        construct(self, *args, **kwargs)

    cast("Any", declared).__init__ = init
    return declared
