"""The worker of `score`: that of `encode`, with an engine and a shard for scores."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from wdsprep.dataset.npy_arrays import NUMBERS
from wdsprep.dataset.receipts import Receipt
from wdsprep.dataset.rejects import Reject, RejectedError
from wdsprep.dataset.samples import Sample
from wdsprep.dataset.score_columns import SCORES, columns_of
from wdsprep.encoding.encoded_samples import Result
from wdsprep.encoding.latent_shard import Files, LatentShard, npy_of
from wdsprep.encoding.models.base import Part
from wdsprep.encoding.models.device import Arrays
from wdsprep.encoding.worker import EncodeWorker
from wdsprep.encoding.worker_plan import EncodeTarget
from wdsprep.scoring.engine import ScoreEngine
from wdsprep.scoring.languages import RepeatedCaptions, caption_columns
from wdsprep.scoring.networks import ScoreEncoder


class ScoreShard(LatentShard):
    """The scores of an image shard, gathered until the last sample has come, and then written.

    A column says how often a caption occurs in the whole shard.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._entries: list[tuple[str, Sample, Arrays] | Reject] = []

    @property
    def so_far(self) -> tuple[int, int, Mapping[str, int]]:
        codes = Counter(own.code.value for own in self._entries if isinstance(own, Reject))
        return len(self._entries) - codes.total(), 0, codes

    def refuse(self, reject: Reject) -> None:
        self._entries.append(reject)

    def add(self, key: str, sample: Sample, result: Result) -> None:
        self._entries.append((key, sample, result.arrays))

    def finish(self, files: Files) -> Receipt:
        columns, repeats = columns_of(self.settings), RepeatedCaptions()
        if has_captions := bool(self.settings[SCORES]["language"]):
            repeats.add(own[1].caption for own in self._entries if not isinstance(own, Reject))
        for entry in self._entries:
            if isinstance(entry, Reject):
                super().refuse(entry)
                continue
            key, sample, arrays = entry
            numbers = map(short_number, arrays.get(NUMBERS, ()))
            facts: dict[str, Any] = dict(zip(columns, numbers, strict=False))  # captions' come last
            if has_captions:
                facts |= caption_columns(sample.caption)
                facts["caption_repeats"] = repeats.of(sample.caption)
            try:
                self._write(key, sample, facts, arrays)
            except RejectedError as refused:
                code, detail = refused.code, refused.detail
                super().refuse(Reject(key=key, source=sample.source, code=code, detail=detail))
        return super().finish(files)

    def _write(self, key: str, sample: Sample, facts: dict[str, Any], arrays: Arrays) -> None:
        facts |= {"key": key, "source": sample.facts.get("source", sample.source)}
        members = [(field.name, npy_of(field, arrays[field.name])) for field in self.fields]
        self.add_members(key, members, facts)


class ScoreWorker(EncodeWorker):
    """A worker of `score`: a process with its models, which scores several shards at once."""

    engine_class = ScoreEngine
    shard_class = ScoreShard
    _encoder: ScoreEncoder

    def _part_of(self, _target: EncodeTarget) -> Part:
        return Part.of(self._encoder.fields)


def short_number(value: Tensor) -> float:
    """Return the number with the fewest digits that is equal to a value in fp32."""
    return float(str(value.numpy()))
