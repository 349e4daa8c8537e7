"""The output of `wdsprep card`: the card or its file, and the commands that upload it."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from wdsprep.cli.output.report import ask_to_replace
from wdsprep.cli.output.shared import CommandOutput, echo
from wdsprep.reporting.card import LICENCE, Card
from wdsprep.runners.job import JobListener


class CardOutput(CommandOutput[Card]):
    """The output of `card`: the file and the next steps, or the card itself."""

    waits = False

    def __init__(self, options: Mapping[str, Any], *, as_json: bool) -> None:
        super().__init__(options, as_json=as_json)
        self.listener = JobListener(
            asked=partial(ask_to_replace, kind="not a card, or was changed since")
        )

    def facts(self, card: Card) -> Iterator[dict[str, Any]]:
        yield {"card": card.output, "text": card.text, "uploads": card.uploads}

    def summary(self, card: Card) -> Iterator[str]:
        """Yield the last lines. Without a file there are none: the card itself is printed.

        The next steps then go to stderr, so that stdout can be redirected to a file.
        """
        steps = [f"next: {command}" for command in card.uploads]
        if card.output:
            todo = ", and state the license at the top" if LICENCE in card.text else ""
            yield from [f"{card.output}: look it over{todo}", *steps]
            return
        echo(card.text.rstrip("\n"))
        for step in (
            *steps,
            "next: run the same command with -o README.md to write the card to a file",
        ):
            self.line.say(step)
