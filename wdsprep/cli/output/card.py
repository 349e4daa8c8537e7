"""The output of `wdsprep card`: the card or its file, and the commands that upload it."""

import json
from functools import partial

from wdsprep.cli.output.report import ask_to_replace
from wdsprep.cli.output.shared import KeptLine, echo
from wdsprep.reporting.card import LICENCE, Card
from wdsprep.runners.job import JobListener
from wdsprep.terminal import ProgressLine

LISTENER = JobListener(asked=partial(ask_to_replace, kind="not a card, or was changed since"))


def show_card(card: Card, *, as_json: bool) -> list[str]:
    """Return the last lines of `card`: the JSON if `as_json`, or else the file and the next steps.

    If there is neither JSON nor a file, print the card itself and return no lines. The next steps
    then go to stderr, so that stdout can be redirected to a file.
    """
    if as_json:
        facts = {"card": card.output, "text": card.text, "uploads": card.uploads}
        return [KeptLine(json.dumps(facts, sort_keys=True))]
    steps = [f"next: {command}" for command in card.uploads]
    if card.output:
        todo = ", and state the license at the top" if LICENCE in card.text else ""
        return [f"{card.output}: look it over{todo}", *steps]
    echo(card.text.rstrip("\n"))
    line = ProgressLine()
    for step in (
        *steps,
        "next: run the same command with -o README.md to write the card to a file",
    ):
        line.say(step)
    return []
