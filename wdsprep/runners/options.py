"""What is said of options that several commands have."""

from collections.abc import Mapping

from wdsprep.options import About, about
from wdsprep.runners.track import TRACKERS, check_tracker

OUTPUT = "Output"
TRACK = about(
    "Tell Weights & Biases or TensorBoard how far the run is, every ten seconds.",
    OUTPUT,
    choices=TRACKERS,
    read=check_tracker,
    usual="no",
    page="tell it how far the run is: [tracking](../runners/README.md#tracking)",
)


def limit(samples: str, heading: str, rest: str) -> Mapping[str, About]:
    """Declare how many samples are taken, for a trial."""
    return about(
        f"Take the first N {samples} only, for a trial.",
        heading,
        least=0,
        page=f"the first N {samples} only, for a trial; {rest}",
        example="N",
    )


def overwrite(what: str) -> Mapping[str, About]:
    """Declare whether to start over."""
    return about(
        f"Remove {what} first, and start over.",
        OUTPUT,
        page="remove the dataset first and start over",
    )
