"""Find what a sample has beside its arrays: its members, its caption, its json."""

import logging
from collections.abc import Sequence

from wdsprep.dataset.aio import Bytes
from wdsprep.dataset.samples import parse_json
from wdsprep.dataset.tar import END
from wdsprep.dataset.tar.members import BadSampleError
from wdsprep.dataset.tar.read import TarSample, scan
from wdsprep.loading.datasets import Dataset
from wdsprep.loading.memory import Batch
from wdsprep.loading.wanted_arrays import TEXTS, WantedArrays
from wdsprep.sources.captions import caption_at

DAMAGED_JSON = "its json is damaged"
MANY = 1000  # samples without a text that captions= asks for, before a warning
_log = logging.getLogger("wdsprep")


class SampleTexts:
    """The captions and json of samples, and how they get into batches.

    If captions are picked among places in the json, `paths` has the place for each choice.
    """

    def __init__(self, datasets: Sequence[Dataset], paths: Sequence[str]) -> None:
        self._datasets, self._paths = datasets, paths
        self._lacking: dict[str, int] = {}
        """The number of samples without a text at each path; -1 once a sample had one."""

    def put(
        self, batch: Batch, row: int, slot: int, wanted: WantedArrays, sample: TarSample
    ) -> str:
        """Put a sample's texts into its row; return what is wrong with them, or nothing."""
        try:
            for name in wanted.texts:
                if name in TEXTS:
                    batch.out[name][row] = self._caption(batch, row, sample)
                else:
                    facts = parse_json(sample.fields.get("json", b"{}"))
                    made = batch.out[name]
                    made[row] = wanted.facts(made[row], facts) if slot else facts
        except (ValueError, TypeError, RecursionError):  # a hostile one is nested 1,000 deep
            return DAMAGED_JSON
        return ""

    def _caption(self, batch: Batch, row: int, sample: TarSample) -> str:
        """Return the caption of a sample, or the text at the picked place of its json."""
        if self._paths:
            path = self._paths[batch.choice[row]]
            found = caption_at(parse_json(sample.fields.get("json", b"{}")), path)
            if found is not None:
                self._lacking[path] = -1
                return found
            self._tell_of_path(batch.stream[row], path)
        return sample.fields.get("txt", b"").decode("utf-8", "replace")

    def _tell_of_path(self, stream: int, path: str) -> None:
        """Warn once if none of many samples has a text at this place of the json."""
        count = self._lacking.get(path, 0)
        if count < 0:
            return
        self._lacking[path] = count + 1
        if count + 1 == MANY:
            url = self._datasets[stream].store.url
            what = f"of the first {MANY:,} samples none has a text at {path} in its json"
            _log.warning("%s: %s, as captions= asks: they have their own captions", url, what)


def sample_behind(held: Bytes, rest: memoryview, start: int, key: str) -> "TarSample | str":
    """Return the members after the arrays of a sample, or what is wrong with them.

    Some of their bytes may lie in the row of the last array.
    """
    sample = parsed(held[start:].data, rest[max(0, start - len(held)) :])
    if not isinstance(sample, str) and sample.key != key:
        return "its members have different keys"
    return sample


def parsed(*parts: memoryview) -> "TarSample | str":
    """Parse the one sample in these bytes of a tar; return it, or what is wrong with it."""
    whole = b"".join((*parts, END))
    found = next(scan(lambda at, nbytes: whole[at : at + nbytes]), "it is empty")
    return str(found) if isinstance(found, BadSampleError) else found
