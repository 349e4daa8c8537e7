"""What `wdsprep card` says: the card itself, or where it is, and how it gets to the hub."""

import json
from functools import partial

from wdsprep.cli.output import Kept, echo
from wdsprep.cli.report import asked
from wdsprep.reporting.card import LICENCE, Card
from wdsprep.runners.job import JobListener
from wdsprep.terminal import ProgressLine

LISTENER = JobListener(asked=partial(asked, kind="no card, or was changed since"))


def show_card(card: Card, *, as_json: bool) -> list[str]:
    """Return the lines about a card. Print the card itself where it was not written to a file.

    The next steps then go to stderr, so that stdout can be sent to a file.
    """
    if as_json:
        facts = {"card": card.output, "text": card.text, "uploads": card.uploads}
        return [Kept(json.dumps(facts, sort_keys=True))]
    steps = [f"next: {command}" for command in card.uploads]
    if card.output:
        todo = ", and say its license: at the top" if LICENCE in card.text else ""
        return [f"{card.output}: look it over{todo}", *steps]
    echo(card.text.rstrip("\n"))
    line = ProgressLine()
    for step in (*steps, "next: the same with -o README.md writes the card to a file"):
        line.say(step)
    return []
