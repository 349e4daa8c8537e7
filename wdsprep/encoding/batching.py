"""The choice of the samples that share a batch: those of one shape, in their order.

Batches have one fixed size for each shape. If there are many shapes, of images or of captions, an
image or a caption waits for others of its shape until a batch is full. A batch is made of fewer
when `window` further samples have been added, when there is no memory for more and the oldest
sample waits for the batch, or when no more samples come. Such a batch is padded if it is of images,
or on a CPU: the bytes of a sample depend on the size of its batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.shapes import Size
from wdsprep.encoding.encoded_samples import PendingBlock, Row, SampleUnderWay
from wdsprep.encoding.models.base import Encoder, Part
from wdsprep.encoding.models.batch_size import text_size
from wdsprep.images.crop import Crop

ShapeT = TypeVar("ShapeT", bound=tuple[int, ...])


@dataclass
class Batcher:
    """The crops and captions of samples that wait for a batch.

    Captions are tokenized later, many at a time, and then sorted by shape. `refuse` is called for
    captions that have no tokens.
    """

    encoder: Encoder
    refuse: Callable[[Row, Code], object]
    flips: bool
    """True if the mirror image of each crop is encoded too."""
    image_window: int
    text_window: int
    """The number of further samples that may be added while a crop or a caption waits for others of
    its shape."""
    _come: int = 0
    _images: dict[Size, list[Row]] = field(default_factory=dict)
    _captions: list[SampleUnderWay] = field(default_factory=list)
    _texts: dict[tuple[int, ...], list[Row]] = field(default_factory=dict)

    def add(self, sample: SampleUnderWay) -> None:
        """Queue the crops of a sample, and its caption if a crop that was not rejected needs it.

        `sample.missing` is increased by the number of results that the sample then waits for.
        """
        self._come += 1
        sample.number = self._come
        sample.images = [{} for _ in sample.cuts]
        has_text = False
        for number, (cut, part) in enumerate(zip(sample.cuts, sample.parts, strict=True)):
            if not isinstance(cut, Crop):
                continue
            has_text = has_text or Part.TEXT in part
            if Part.IMAGE in part:
                self._add_cut(sample, number, cut)
        if has_text:
            sample.missing += 1
            self._captions.append(sample)

    def _add_cut(self, sample: SampleUnderWay, number: int, cut: Crop) -> None:
        rows = self._images.setdefault((cut.fit.width, cut.fit.height), [])
        rows.append(Row(sample, number, is_last=not self.flips))
        if self.flips:
            rows.append(Row(sample, number, is_mirrored=True))
        sample.missing += 1 + self.flips

    def next_images(
        self, size: int, size_of: Callable[[Size], int], *, now: bool, head: PendingBlock | None
    ) -> tuple[Size, list[Row], int] | None:
        """Remove a batch of crops; return its shape, rows and size, or None if none is ready.

        `size` is the batch size for squares, and `size_of` returns the batch size for a shape. A
        batch that is not full is ready if `now` is true, if its first crop is of `head`, the oldest
        block, or if that crop has waited too long.
        """
        most = 2 * size - 1 + self.image_window
        return self._take_batch(self._images, size_of, most=most, now=now, head=head)

    def next_texts(
        self, size: int, *, now: bool, head: PendingBlock | None
    ) -> tuple[tuple[int, ...], list[Row], int] | None:
        """Remove a batch of captions; return its shape, rows and size, or None if none is ready.

        A batch that is not full is ready if `now` is true, if its first caption is of `head`, the
        oldest block, or if that caption has waited too long. Captions are tokenized here, many
        together, and those without tokens are refused.
        """
        waiting = self._captions
        if waiting and (now or head is not None or self.count_after(waiting[0]) >= size - 1):
            self._tokenize()
        return self._take_batch(
            self._texts,
            lambda shape: text_size(shape, size),
            most=2 * size - 1 + self.text_window,
            now=now,
            head=head,
        )

    def count_after(self, sample: SampleUnderWay) -> int:
        """Return how many samples have been added after this one."""
        return self._come - sample.number

    def _tokenize(self) -> None:
        found = self.encoder.tokens([sample.caption for sample in self._captions])
        for sample, tokens in zip(self._captions, found, strict=True):
            sample.tokens = tokens
            row = Row(sample)
            if tokens.count:
                self._texts.setdefault(tokens.shape, []).append(row)
            else:
                self.refuse(row, Code.NO_TOKENS)
        self._captions.clear()

    def _take_batch(
        self,
        rows: dict[ShapeT, list[Row]],
        size_of: Callable[[ShapeT], int],
        *,
        most: int,
        now: bool,
        head: PendingBlock | None,
    ) -> tuple[ShapeT, list[Row], int] | None:
        """Remove a batch from `rows`; return its shape, rows and size, or None if none is ready.

        The batch has the shape of the oldest row, if `most` samples were added after that row or if
        the row is of the block `head`. Otherwise it is a full batch of any shape, or, if there is
        none and `now` is true, a batch of the oldest row's shape.
        """
        if not rows:
            return None
        oldest = min(rows, key=lambda shape: rows[shape][0].sample.number)
        first = rows[oldest][0].sample
        has_waited = self.count_after(first) >= most or first.block is head
        whole = (shape for shape, own in rows.items() if len(own) >= size_of(shape))
        shape = oldest if has_waited else next(whole, oldest if now else None)
        if shape is None:
            return None
        size, own = size_of(shape), rows.pop(shape)
        if len(own) > size:
            rows[shape] = own[size:]
        return shape, own[:size], size
