"""Which samples share a batch: those of one shape, in the order in which they came.

Batches have one fixed size for each shape. Where there are many shapes, of images or of captions,
a part of a sample waits for others of its shape until a batch is full, but not for ever: a batch is
made of fewer when `window` further samples have come, when there is no memory for more and the
oldest sample waits for it, or when nothing more comes. On a CPU, and of images, it is padded then:
the bytes of a sample depend on the size of its batch.
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
    """Parts of samples that wait for a batch.

    Captions come as they are, and are then sorted by shape. `refuse` is told of those that become
    no tokens.
    """

    encoder: Encoder
    refuse: Callable[[Row, Code], object]
    flips: bool
    """True if each crop is mirrored too."""
    image_window: int
    text_window: int
    """The number of further samples that may come while a crop or a caption waits for others of its
    shape."""
    _come: int = 0
    _images: dict[Size, list[Row]] = field(default_factory=dict)
    _captions: list[SampleUnderWay] = field(default_factory=list)
    _texts: dict[tuple[int, ...], list[Row]] = field(default_factory=dict)

    def add(self, sample: SampleUnderWay) -> None:
        """Take a sample whose image is cut.

        Those that are refused have a place in the order too.
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
        """Return a batch of cuts of one shape, and its size.

        `size` is that of squares. `now` brings one that is not full, as does `head`, the oldest
        block, if a cut of it waits.
        """
        most = 2 * size - 1 + self.image_window
        return self._take_out(self._images, size_of, most=most, now=now, head=head)

    def next_texts(
        self, size: int, *, now: bool, head: PendingBlock | None
    ) -> tuple[tuple[int, ...], list[Row], int] | None:
        """Return a batch of captions of one shape, by the same rules."""
        waiting = self._captions
        if waiting and (now or head is not None or self._since(waiting[0]) >= size - 1):
            self._sort()
        return self._take_out(
            self._texts,
            lambda shape: text_size(shape, size),
            most=2 * size - 1 + self.text_window,
            now=now,
            head=head,
        )

    def _since(self, sample: SampleUnderWay) -> int:
        """Return how many samples have come after this one."""
        return self._come - sample.number

    def _sort(self) -> None:
        found = self.encoder.tokens([sample.caption for sample in self._captions])
        for sample, tokens in zip(self._captions, found, strict=True):
            sample.tokens = tokens
            row = Row(sample)
            if tokens.count:
                self._texts.setdefault(tokens.shape, []).append(row)
            else:
                self.refuse(row, Code.NO_TOKENS)
        self._captions.clear()

    def _take_out(
        self,
        rows: dict[ShapeT, list[Row]],
        size_of: Callable[[ShapeT], int],
        *,
        most: int,
        now: bool,
        head: PendingBlock | None,
    ) -> tuple[ShapeT, list[Row], int] | None:
        """Return a batch of the shape whose first row has waited for long enough, or of a full one.

        If there is none, `now` brings a part of one.
        """
        if not rows:
            return None
        oldest = min(rows, key=lambda shape: rows[shape][0].sample.number)
        first = rows[oldest][0].sample
        has_waited = self._since(first) >= most or first.block is head
        whole = (shape for shape, own in rows.items() if len(own) >= size_of(shape))
        shape = oldest if has_waited else next(whole, oldest if now else None)
        if shape is None:
            return None
        size, own = size_of(shape), rows.pop(shape)
        if len(own) > size:
            rows[shape] = own[size:]
        return shape, own[:size], size
