"""Encode a shard in two passes if a device cannot hold the networks for images and text together.

First all its captions are encoded, and wait on a local disk (in TMPDIR); then its images, each of
which meets its caption again on the way into the shard. `network_swaps` says when a shard may begin
a pass.
"""

import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from wdsprep.dataset.npy_arrays import Field, text_fields
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject, RejectedError
from wdsprep.dataset.samples import Sample
from wdsprep.encoding.encoded_samples import Result
from wdsprep.encoding.latent_shard import LatentShard
from wdsprep.store.spool import Spool


def text_nbytes(fields: Sequence[Field]) -> int:
    """Return the most bytes that the arrays of one caption can have."""
    return sum(field.array_nbytes for field in text_fields(fields))


class TextPass:
    """The encoded captions of a shard, which wait on disk for their images."""

    def __init__(self) -> None:
        self._spool = Spool()
        self.nbytes = 0
        """The bytes of the captions: first an upper estimate, then those on disk, 0 at the end."""
        self._places: dict[str, tuple[int, int]] = {}
        self._codes: dict[str, Code] = {}
        """The reasons for which captions were rejected, by key."""
        self.counts = Counter[str]()

    def refuse(self, reject: Reject) -> None:
        """Note that a caption was rejected.

        A sample that is rejected for another reason is rejected again in the pass over images.
        """
        if reject.code in (Code.NO_TOKENS, Code.NOT_FINITE):
            self._codes[reject.key] = reject.code

    def add(self, key: str, _sample: Sample, result: Result) -> None:
        own = {name: array.clone() for name, array in result.arrays.items()}  # not its whole batch
        data = pickle.dumps((replace(result.tokens, results={}), own), protocol=5)
        self._places[key] = self._spool.put(data)

    def join(self, key: str, result: Result) -> Result:
        """Return the result of an image together with the result of its caption.

        Raise RejectedError if the caption was rejected.
        """
        if code := self._codes.get(key):
            raise RejectedError(code)
        tokens, arrays = pickle.loads(self._spool.get(self._places[key]))  # noqa: S301  ours
        return replace(result, tokens=tokens, arrays={**result.arrays, **arrays})

    def settle(self) -> None:
        """Set `nbytes` to the bytes on disk, once all captions have been added."""
        self.nbytes = self._spool.nbytes

    def close(self) -> None:
        self.nbytes = 0
        self._spool.close()


class ImagePass:
    """A latent shard that gets encoded images, each joined with its caption from a `TextPass`."""

    def __init__(self, output: LatentShard, texts: TextPass) -> None:
        self._output, self._texts = output, texts
        self.refuse, self.counts = output.refuse, output.counts

    def add(self, key: str, sample: Sample, result: Result) -> None:
        self._output.add(key, sample, self._texts.join(key, result))
