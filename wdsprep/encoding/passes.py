"""Encode a shard in two passes, where a device cannot hold encoders of images and text together.

First all its captions are encoded, and wait on a local disk (in TMPDIR); then its images, each of
which meets its caption again on the way into the shard. `network_swaps` says when a shard may begin
a pass.
"""

import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from wdsprep.dataset.arrays import Field, text_fields
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject, RejectedError
from wdsprep.dataset.samples import Sample
from wdsprep.encoding.captions.sources import CaptionUse
from wdsprep.encoding.encoded_samples import Result
from wdsprep.encoding.latent_shard import LatentShard
from wdsprep.store.spool import Spool


def text_nbytes(fields: Sequence[Field]) -> int:
    """Return how many bytes the arrays of one caption have at most."""
    return sum(field.array_nbytes for field in text_fields(fields))


class TextPass:
    """Takes the results of captions, in place of a latent shard."""

    def __init__(self) -> None:
        self._spool = Spool()
        self.nbytes = 0
        """The bytes of captions that wait here, or will at most; 0 once nothing does."""
        self._places: dict[str, tuple[int, int]] = {}
        self.rejects, self.counts, self.taken = _Lost(), Counter[str](), CaptionUse()

    def add(self, key: str, _sample: Sample, result: Result) -> None:
        own = {name: array.clone() for name, array in result.arrays.items()}  # not its whole batch
        data = pickle.dumps((result.tokens, own), protocol=5)
        self._places[key] = self._spool.put(data)

    def joined(self, key: str, result: Result) -> Result:
        """Return the result of an image together with the result of its caption."""
        if code := self.rejects.codes.get(key):
            raise RejectedError(code)
        tokens, arrays = pickle.loads(self._spool.get(self._places[key]))  # noqa: S301  ours
        return replace(result, tokens=tokens, arrays={**result.arrays, **arrays})

    def settle(self) -> None:
        """Count what has come, where all has."""
        self.nbytes = self._spool.nbytes

    def close(self) -> None:
        self.nbytes = 0
        self._spool.close()


class _Lost:
    """Why captions came to nothing. What else is rejected is rejected again with its image."""

    def __init__(self) -> None:
        self.codes: dict[str, Code] = {}

    def add(self, reject: Reject) -> None:
        if reject.code in (Code.NO_TOKENS, Code.NOT_FINITE):
            self.codes[reject.key] = reject.code


class ImagePass:
    """A latent shard to which captions are brought."""

    def __init__(self, output: LatentShard, texts: TextPass) -> None:
        self._output, self._texts = output, texts
        self.rejects, self.counts, self.taken = output.rejects, output.counts, output.taken

    def add(self, key: str, sample: Sample, result: Result) -> None:
        self._output.add(key, sample, self._texts.joined(key, result))
