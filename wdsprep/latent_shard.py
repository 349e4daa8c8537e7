"""A latent shard being written: arrays of fixed shape first in each sample, then json and txt."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from wdsprep.arrays import Field, empty_name
from wdsprep.engine import Result
from wdsprep.errors import ExistsError, NotFoundError, TarError
from wdsprep.image_shards import ImageShard
from wdsprep.manifest import Receipt, Settings, Shard
from wdsprep.rejects import RejectsFile, rejects_name
from wdsprep.samples import Code, RejectedError, Sample, facts_bytes
from wdsprep.shard_file import ShardFile
from wdsprep.store import Store, write_bytes

Files = Mapping[str, str]


class LatentShard:
    """The latent shard in the making, and the rejects beside it."""

    def __init__(self, store: Store, shard: ImageShard, fields: Sequence[Field]) -> None:
        self._store, self._unit = store, shard.name
        self._is_packed = bool(shard.sha256)
        self._fields = fields
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
        fields = members_of(self._fields, key, sample, result, is_packed=self._is_packed)
        self.add_members(key, fields, cut=result.tokens.cut)

    def add_members(self, key: str, members: Sequence[tuple[str, bytes]], *, cut: bool) -> None:
        """The same for what `members_of` has made before; `cut` is whether the caption was."""
        try:
            self._tar().add(key, members)
        except TarError as error:
            raise RejectedError(Code.BAD_KEY, str(error)) from error
        self.samples += 1
        self.nbytes += sum(len(data) for _, data in members)
        self.counts["cut"] += int(cut)
        self.counts["empty_caption"] += int(not members[-1][1])

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

    def receipt(
        self, shard: ImageShard, settings: Settings, written: tuple[Shard, ...], empty: Files
    ) -> Receipt:
        """What is said of the finished shard; `empty` are the files of the empty caption."""
        return Receipt(
            dataset="latents",
            unit=self._unit,
            generation=0,
            settings=settings,
            input=shard.input,
            inputs=self.samples + self.rejects.counts.total(),
            shards=written,
            rejects=dict(self.rejects.counts),
            counts=dict(self.counts),
            files={rejects_name(self._unit): self.rejects.sha256, **empty},
        )


def members_of(
    fields: Sequence[Field], key: str, sample: Sample, result: Result, *, is_packed: bool
) -> list[tuple[str, bytes]]:
    """The members of a latent sample, by their names and in their order."""
    members = [
        (field.name, field.header + array.numpy().tobytes())
        for field, array in zip(fields, result.arrays, strict=True)
    ]
    members.append(("json", json_of(key, sample, result, is_packed=is_packed)))
    members.append(("txt", sample.caption.encode("utf-8", "replace")))
    return members


def json_of(key: str, sample: Sample, result: Result, *, is_packed: bool) -> bytes:
    packed = _kept(sample.facts) if is_packed else {}
    return facts_bytes(facts_of(key, sample, result) | packed)


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
    names = ("source", "source_height", "source_width")
    return {name: facts[name] for name in names if name in facts}


def write_empty(
    store: Store, fields: Sequence[Field], empty: Callable[[], Mapping[str, Any]]
) -> dict[str, str]:
    """What the empty caption becomes, for classifier-free guidance; one worker is enough. The
    SHA-256 of each file, by its name."""
    digests = {}
    for field in fields[1:]:
        name = empty_name(field)
        try:
            data = store.read(name)
        except NotFoundError:
            data = field.header + empty()[field.name].numpy().tobytes()
            try:
                write_bytes(store, name, data, exclusive=True)
            except ExistsError:
                data = store.read(name)
        digests[name] = hashlib.sha256(data).hexdigest()
    return digests
