"""A decorator for commands whose options are the fields of a dataclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from typing import Any, TypeVar, get_type_hints

import typer

_Options = TypeVar("_Options")


def with_options(
    options: type[_Options],
) -> Callable[[Callable[[typer.Context, _Options], None]], Callable[..., None]]:
    """Decorates a command. The fields of the dataclass `options` become its arguments and options.

    The type of a field is `Annotated[type, typer.Argument(...)]` or `Annotated[type,
    typer.Option(...)]`. The field's default is the default of the option. Typer reads the signature
    of the returned function, which has one parameter per field.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Greeting:
    ...     name: str = "you"
    >>> @with_options(Greeting)
    ... def greet(context: typer.Context, options: Greeting) -> None:
    ...     print("Hello,", options.name)
    >>> greet(None, name="world")
    Hello, world
    """
    parameters = _parameters(options)

    def decorate(command: Callable[[typer.Context, _Options], None]) -> Callable[..., None]:
        def run(context: typer.Context, **values: Any) -> None:
            command(context, options(**values))

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def _parameters(options: type) -> list[Parameter]:
    """Returns the parameters of a command with these options: the context, and one parameter per
    field."""
    types = get_type_hints(options, include_extras=True)
    return [
        Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
        *(
            Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if field.default is MISSING else field.default,
                annotation=types[field.name],
            )
            for field in fields(options)
        ),
    ]
