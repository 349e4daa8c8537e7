"""A latent shard being written: arrays of fixed shape first in each sample, then json and txt."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from wdsprep.arrays import Field, empty_name
from wdsprep.encoder import Encoder
from wdsprep.engine import Engine, Result
from wdsprep.errors import ExistsError, NotFoundError, TarError
from wdsprep.image_shards import ImageShard
from wdsprep.manifest import Shard
from wdsprep.rejects import RejectsFile, rejects_name
from wdsprep.samples import Code, RejectedError, Sample, facts_bytes
from wdsprep.shard_file import ShardFile
from wdsprep.store import Store, write_bytes


class LatentShard:
    """The latent shard in the making, and the rejects beside it."""

    def __init__(self, store: Store, shard: ImageShard, encoder: Encoder) -> None:
        self._store, self._unit = store, shard.name
        self._is_packed = bool(shard.sha256)
        self._fields = encoder.fields
        self._stack = ExitStack()
        self._file: ShardFile | None = None
        self.samples = self.nbytes = 0
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> "LatentShard":
        sink = self._stack.enter_context(self._store.write(rejects_name(self._unit)))
        self.rejects = RejectsFile(sink)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def add(self, key: str, sample: Sample, result: Result) -> None:
        fields = [
            (field.name, field.header + array.numpy().tobytes())
            for field, array in zip(self._fields, result.arrays, strict=True)
        ]
        packed = _kept(sample.facts) if self._is_packed else {}
        fields.append(("json", facts_bytes(facts_of(key, sample, result) | packed)))
        fields.append(("txt", sample.caption.encode("utf-8", "replace")))
        try:
            self._tar().add(key, fields)
        except TarError as error:
            raise RejectedError(Code.BAD_KEY, str(error)) from error
        self.samples += 1
        self.nbytes += sum(len(data) for _, data in fields)
        self.counts["cut"] += int(result.tokens.cut)
        self.counts["empty_caption"] += int(not sample.caption)

    def _tar(self) -> ShardFile:
        """Begun with the first sample: there are no empty shards."""
        if self._file is None:
            self._file = ShardFile(self._store, f"{self._unit}.tar", self._stack)
        return self._file

    def finish(self) -> tuple[Shard, ...]:
        """Complete the files; what was written."""
        shards = (self._file.finish(),) if self._file else ()
        self._stack.close()
        return shards


def facts_of(key: str, sample: Sample, result: Result) -> dict[str, Any]:
    """The json of a latent sample. The crop is left, top, right, bottom in the scaled image."""
    crop, tokens = result.crop, result.tokens
    side = crop.pixels.shape[-1]
    return {
        "caption": sample.caption,
        "crop": [crop.left, crop.top, crop.left + side, crop.top + side],
        "cut": tokens.cut,
        "height": crop.height,
        "key": key,
        "scaled_height": crop.scaled_height,
        "scaled_width": crop.scaled_width,
        "source": sample.source,
        "source_height": crop.height,
        "source_width": crop.width,
        "tokens": tokens.count,
        "width": crop.width,
    }


def _kept(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What the json of a packed image sample knows better: where the image came from."""
    return {name: facts[name] for name in ("source", "source_height", "source_width")}


def write_empty(store: Store, fields: Sequence[Field], engine: Engine) -> dict[str, str]:
    """What the empty caption becomes, for classifier-free guidance; one worker is enough. The
    SHA-256 of each file, by its name."""
    digests = {}
    for field in fields[1:]:
        name = empty_name(field)
        try:
            data = store.read(name)
        except NotFoundError:
            data = field.header + engine.empty()[field.name].numpy().tobytes()
            try:
                write_bytes(store, name, data, exclusive=True)
            except ExistsError:
                data = store.read(name)
        digests[name] = hashlib.sha256(data).hexdigest()
    return digests
