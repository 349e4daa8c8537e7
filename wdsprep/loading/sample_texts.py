"""Find what a sample has beside its arrays: its members, its caption, its json."""

import logging
from collections.abc import Sequence

from wdsprep.dataset.aio import Bytes
from wdsprep.dataset.samples import parse_json
from wdsprep.dataset.tar import END
from wdsprep.dataset.tar.members import BadSampleError
from wdsprep.dataset.tar.read import TarSample, scan
from wdsprep.loading.batch_memory import Batch
from wdsprep.loading.served_datasets import Dataset
from wdsprep.loading.wanted_arrays import TEXTS, WantedArrays
from wdsprep.sources.captions import caption_at

DAMAGED_JSON = "its json is damaged"
MANY = 1000  # samples without a text that captions= asks for, before a warning
_log = logging.getLogger("wdsprep")


class SampleTexts:
    """A writer of the captions and json of samples into batches.

    If captions are picked from the json, `paths` has the path for each choice.
    """

    def __init__(self, datasets: Sequence[Dataset], paths: Sequence[str]) -> None:
        self._datasets, self._paths = datasets, paths
        self._lacking: dict[str, int] = {}
        """The number of samples without a text at each path; -1 once a sample had one."""

    def put(
        self, batch: Batch, row: int, slot: int, wanted: WantedArrays, sample: TarSample
    ) -> str:
        """Put the texts of a sample into its row; return their fault, or "" if they have none.

        The json of a joined sample (a `slot` above 0) is merged with what the row has.
        """
        try:
            for name in wanted.texts:
                if name in TEXTS:
                    batch.out[name][row] = self._caption(batch, row, sample)
                else:
                    facts = parse_json(sample.fields.get("json", b"{}"))
                    made = batch.out[name]
                    made[row] = wanted.merge_json(made[row], facts) if slot else facts
        except (ValueError, TypeError, RecursionError):  # a hostile one is nested 1,000 deep
            return DAMAGED_JSON
        return ""

    def _caption(self, batch: Batch, row: int, sample: TarSample) -> str:
        """Return the text at the picked path of a sample's json, or else the sample's caption."""
        if self._paths:
            path = self._paths[batch.choice[row]]
            found = caption_at(parse_json(sample.fields.get("json", b"{}")), path)
            if found is not None:
                self._lacking[path] = -1
                return found
            self._warn_of_path(batch.stream[row], path)
        return sample.fields.get("txt", b"").decode("utf-8", "replace")

    def _warn_of_path(self, stream: int, path: str) -> None:
        """Count a sample without a text at this path of the json.

        Log a warning when MANY were counted and no sample had one.
        """
        count = self._lacking.get(path, 0)
        if count < 0:
            return
        self._lacking[path] = count + 1
        if count + 1 == MANY:
            url = self._datasets[stream].store.url
            what = f"none of the first {MANY:,} samples has a text at {path} in its json"
            _log.warning("%s: %s; captions= gives them their own captions instead", url, what)


def parse_tail(held: Bytes, rest: memoryview, start: int, key: str) -> "TarSample | str":
    """Return the members after the arrays of a sample, or their fault.

    `held` has what came into the row of the last array, and `rest` the bytes after that. The
    members begin at `start`, counted over both.
    """
    sample = parse_sample(held[start:].data, rest[max(0, start - len(held)) :])
    if not isinstance(sample, str) and sample.key != key:
        return "its members have different keys"
    return sample


def parse_sample(*parts: memoryview) -> "TarSample | str":
    """Parse the single sample in these bytes of a tar; return the sample, or its fault."""
    whole = b"".join((*parts, END))
    found = next(scan(lambda at, nbytes: whole[at : at + nbytes]), "it is empty")
    return str(found) if isinstance(found, BadSampleError) else found
