"""The way of a sample through `encode`, from its image shard to its latent shard, step by step.

1. Read: `image_shards.read_rows` yields the key and the `Sample` of each row, or why it cannot be
   used. `begin` finds its caption, and says which datasets get which part of it: from here on it is
   an `EncodingSample`. `blocks_of` puts consecutive ones into a `Block`, which a thread of the
   `worker` feeds to its `engine`.
2. Decode and crop: `EncodingSample.crop_image`, in a pool of threads of the engine. The image is
   cut for each dataset that gets it, by `images.crop`, which rejects what is too small or large;
   images in roles by `role_images`.
3. Batch: each crop is a `Row` of a batch of its shape, and so is its mirror image; the caption is a
   row of another batch. `batching` says which rows share one.
4. VAE and text encoders: `models.device` computes a batch. Its `models.encoder` calls the VAE
   (`models.vae`, with `models.noise`) and the text encoders, and scales the latents. `Row.take`
   gives each sample its arrays.
5. Check: `models.encoder` marks rows that are not finite or too large for the dtype, and
   `models.device` computes these once more in fp32. A row that fails again gets a code in place of
   its arrays, as does a caption without tokens.
6. Write: `EncodingSample.result` returns the `EncodedSample` of one dataset, or raises why there
   is none. `write` of the `worker` gives it to the dataset's `latent_shard`, or a reject.

`score` takes the same way, with other crops and other shards (`scoring.worker`). A trainer that
encodes on the fly takes it from the third step on (`on_the_fly.encode_steps`), as its loader has
read and cut the images.

`encoding/engine.py` has the threads of these steps, and limits the images under way. Blocks save
time: threads that hand over one sample at a time spend more time on that than on the samples.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from wdsprep.dataset.npy_arrays import LATENT, mirrored_name
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import Reject, RejectedError
from wdsprep.dataset.samples import Sample
from wdsprep.dataset.shapes import Size
from wdsprep.dataset.tar.members import leads_out
from wdsprep.encoding.captions.options import replace_surrogates
from wdsprep.encoding.models.base import Part, Tokens
from wdsprep.encoding.models.device import Arrays
from wdsprep.encoding.models.noise import mirrored_noise_key
from wdsprep.encoding.role_images import DatasetCuts, prepare_references
from wdsprep.images.crop import NO_PIXELS, Crop, CropResult, crops, locate_crop
from wdsprep.images.nearest_shape import Fit

if TYPE_CHECKING:
    from wdsprep.encoding.models.references import ReferencePipeline

Cut = int | tuple[int, str]
"""What a crop of a sample is known by: the number of the dataset that gets it, and of an image in a
role its name too."""
CAPTION = -1
"""The number that stands for the caption of a sample, where crops have theirs."""
NO_TOKENS = Tokens("")
NO_CROP = Crop(pixels=NO_PIXELS, width=0, height=0, fit=Fit(0, 0, 0, 0))
"""The crop in a result of text alone, for which no image is opened."""
BLOCK_NBYTES = 1 << 20
"""The most bytes of the images of a block, so that the pool decodes several blocks at once."""
CaptionFinder = Callable[[str, Sample], str | None]
"""A function that finds the caption of the next sample, by its key, in a table or in a field of its
json. It returns None if the sample keeps its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedSample:
    """The arrays that a dataset gets of a sample, by field and in the dtype that is stored."""

    key: str
    sample: Sample
    crop: Crop
    tokens: Tokens
    arrays: Arrays
    role_sizes: Mapping[str, Size] = field(default_factory=dict)
    """The sizes to which images in roles were cut, by their names."""


@dataclass(slots=True, eq=False)
class EncodingSample:
    """A sample that is being encoded.

    It is done when none of the rows that were made of it is `missing`.
    """

    key: str
    sample: Sample
    """The caption to encode and what is known of the sample; the image until it is cropped."""
    parts: Mapping[int, Part]
    """The part of the sample that each dataset gets, by the number of the dataset."""
    is_named: bool = False
    """True if the caption is from a table or a field."""
    crops: dict[Cut, CropResult] = field(default_factory=dict)
    """The crop of the image for each dataset that gets it, or why there is none, and the crops of
    its images in roles."""
    for_text: Any = None
    """The images on which the text depends, as the pipeline takes them."""
    tokens: Tokens = NO_TOKENS
    arrays: dict[Cut, Arrays] = field(default_factory=dict)
    """The arrays that were made of each crop, and under CAPTION those of the caption."""
    refused: dict[Cut, Code] = field(default_factory=dict)
    """The codes for which crops or the caption were rejected, by the same numbers."""
    number: int = 0
    """The number of the sample in the order of all samples."""
    missing: int = 0
    block: "Block" = field(init=False)

    def crop_image(
        self,
        cuts: Sequence[DatasetCuts],
        max_area: int,
        pipeline: "ReferencePipeline | None" = None,
    ) -> None:
        """Decode the image once, crop it for each dataset that gets it, and drop its bytes.

        `cuts` has the rules of each dataset. An image that is rejected gets a RejectedError in
        place of a crop. Images in roles are cut too; `pipeline` prepares references.
        """
        image = self.sample.image
        wanted = [number for number, part in self.parts.items() if Part.IMAGE in part]
        whole = [number for number in wanted if cuts[number].has_target]
        if whole:
            of_targets = crops(image, [cuts[n].target for n in whole], max_area=max_area)
            self.crops.update(zip(whole, of_targets, strict=True))
        for number in wanted:
            if number not in self.crops:
                self.crops[number] = locate_crop(image, cuts[number].target, max_area=max_area)
        if any(rules.sizes or rules.text_roles for rules in cuts):
            self._crop_roles(wanted, cuts, pipeline, max_area)
        self.drop_image()

    def drop_image(self) -> None:
        self.sample = replace(self.sample, image=b"", images=())

    def _crop_roles(
        self,
        wanted: Sequence[int],
        cuts: Sequence[DatasetCuts],
        pipeline: "ReferencePipeline | None",
        max_area: int,
    ) -> None:
        """Cut the images in roles for each dataset whose target was cut or located.

        A dataset for which one of them cannot be cut gets the RejectedError in place of its crops.
        If the references cannot be prepared, all datasets of the sample get it.
        """
        sample, prepared = self.sample, dict[str, torch.Tensor]()
        if pipeline:
            references = frozenset[str]().union(*(rules.references for rules in cuts))
            try:
                prepared, whole = prepare_references(
                    sample.images, references, pipeline, max_area=max_area
                )
                self.for_text = whole.for_text
            except RejectedError as refused:
                self.crops = dict.fromkeys(self.parts, refused)
        for number in wanted:
            target, rules = self.crops[number], cuts[number]
            if isinstance(target, RejectedError):
                continue
            try:
                cut = dict(rules.cut(sample.images, target, prepared, max_area=max_area))
            except RejectedError as refused:
                self.crops[number] = refused
                continue
            for name, crop in cut.items():
                if not rules.makes_latents(name):
                    self.arrays[number, name] = {f"{name}.npy": crop.pixels}
                    crop = crop.without_pixels()
                self.crops[number, name] = crop

    def image_rows(self, *, flips: bool) -> "Iterator[Row]":
        """Yield the rows of the crops that wait for a batch; with `flips` also mirrored ones."""
        for cut, crop in self.crops.items():
            if isinstance(crop, Crop) and crop.is_for_batch:
                yield Row(self, cut, is_last=not flips)
                if flips:
                    yield Row(self, cut, is_mirrored=True)

    @property
    def needs_text(self) -> bool:
        """Return whether a dataset that can get the sample gets its text."""
        return any(
            Part.TEXT in part and not isinstance(self.crops.get(number), RejectedError)
            for number, part in self.parts.items()
        )

    def result(self, number: int) -> EncodedSample:
        """Return what a dataset gets of the sample; raise RejectedError if that is nothing."""
        crop = self.crops.get(number, NO_CROP)
        if isinstance(crop, RejectedError):
            raise crop
        has_text = Part.TEXT in self.parts[number]
        cuts: dict[Cut, str] = {number: "", **({CAPTION: ""} if has_text else {})}
        cuts |= {cut: cut[1] for cut in self.crops if isinstance(cut, tuple) and cut[0] == number}
        arrays: Arrays = {}
        for cut, name in cuts.items():
            if code := self.refused.get(cut):
                raise RejectedError(code, name)
            arrays |= self.arrays.get(cut, {})
        in_roles = ((name, self.crops[cut]) for cut, name in cuts.items() if name)
        return EncodedSample(
            key=self.key,
            sample=self.sample,
            crop=crop,
            tokens=self.tokens if has_text else Tokens(self.sample.caption),
            arrays=arrays,
            role_sizes={name: crop.size for name, crop in in_roles if isinstance(crop, Crop)},
        )


def begin(
    key: str,
    row: Sample | Reject,
    captioned: Sequence[tuple[CaptionFinder, Mapping[int, Part]]],
    needed: Sequence[str] = (),
) -> Iterator[EncodingSample | Reject]:
    """Yield a sample of an image shard as it is to be encoded, once for each of its captions.

    `captioned` are the sources of captions, each with the part of the sample that datasets with
    these captions get. Yield a reject if the sample cannot be used, or if it has no image in a role
    that is `needed`.
    """
    if isinstance(row, Reject):
        yield replace(row, key=key)
        return
    if leads_out(key):
        yield Reject(key=key, source=row.source, code=Code.BAD_KEY)
        return
    for role in needed:
        if role not in {image.name for image in row.images}:
            yield Reject(key=key, source=row.source, code=Code.NO_ROLE, detail=role)
            return
    for find_caption, parts in captioned:
        caption = find_caption(key, row)
        has_image = any(Part.IMAGE in part for part in parts.values())
        sample = Sample(
            source=row.source,
            image=row.image if has_image else b"",
            captions=(replace_surrogates(row.caption if caption is None else caption),),
            facts=row.facts,
            images=row.images,
        )
        yield EncodingSample(key, sample, parts, caption is not None)


class Block(Future[None]):
    """Consecutive samples of a shard, and rejects among them; done when all samples are.

    The samples count against the limits of the engine until the block leaves it.
    """

    def __init__(self, entries: Sequence[EncodingSample | Reject]) -> None:
        super().__init__()
        self.entries = entries
        self.samples = [entry for entry in entries if isinstance(entry, EncodingSample)]
        for sample in self.samples:
            sample.block = self
        self.decoded: Future[None] | None = None
        """The decoding of the images; None if nothing is cropped."""
        self.missing = len(self.samples)
        """The number of samples that are not done."""
        self.nbytes = 0
        """The bytes of the arrays that were made from the samples."""
        self.has_left = False

    def count(self, nbytes: int) -> int:
        """Add `nbytes` to the bytes of the block's arrays, and return the number that was added.

        If the block has left the engine, that is 0.
        """
        if self.has_left:
            return 0
        self.nbytes += nbytes
        return nbytes

    @property
    def has_images(self) -> bool:
        return any(
            sample.sample.images or any(Part.IMAGE in part for part in sample.parts.values())
            for sample in self.samples
        )

    @property
    def image_nbytes(self) -> int:
        return sum([sample.sample.images_nbytes for sample in self.samples])

    @property
    def pixels_nbytes(self) -> int:
        cuts = [cut for sample in self.samples for cut in sample.crops.values()]
        return sum([cut.pixels.nbytes for cut in cuts if isinstance(cut, Crop)])

    @property
    def arrays_nbytes(self) -> int:
        made = [arrays for sample in self.samples for arrays in sample.arrays.values()]
        return sum([array.nbytes for arrays in made for array in arrays.values()])


def blocks_of(
    rows: Iterable[tuple[str, Sample | Reject]],
    captioned: Sequence[tuple[CaptionFinder, Mapping[int, Part]]],
    needed: Sequence[str],
    *,
    most: int,
) -> Iterator[Block]:
    """Yield blocks of at most about `most` samples that `begin` makes of the rows of a shard."""
    entries: list[EncodingSample | Reject] = []
    nbytes = 0
    for key, row in rows:
        entries += begin(key, row, captioned, needed)
        nbytes += row.images_nbytes if isinstance(row, Sample) else 0
        if len(entries) >= most or nbytes >= BLOCK_NBYTES:
            yield Block(entries)
            entries, nbytes = [], 0
    if entries:
        yield Block(entries)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a batch: a crop of a sample, or its caption.

    If a crop is mirrored too, its mirrored row comes last.
    """

    sample: EncodingSample
    cut: Cut = CAPTION
    is_mirrored: bool = False
    is_last: bool = True

    @property
    def crop(self) -> Crop:
        crop = self.sample.crops[self.cut]
        assert isinstance(crop, Crop)  # noqa: S101  for mypy: no other is waiting
        return crop

    @property
    def is_reference(self) -> bool:
        """Return whether the row is an image in a role. Its latent has no noise: the VAE's mode."""
        return isinstance(self.cut, tuple)

    @property
    def pixels(self) -> torch.Tensor:
        pixels = self.crop.pixels
        return pixels.flip(-1) if self.is_mirrored else pixels

    @property
    def noise(self) -> str:
        """Return the key that decides the noise of the row's latents."""
        key = self.sample.key
        return mirrored_noise_key(key) if self.is_mirrored else key

    def drop_pixels(self) -> int:
        """Drop pixels that no later row needs, and return their bytes."""
        if self.cut == CAPTION or not self.is_last:
            return 0
        crop = self.crop
        self.sample.crops[self.cut] = crop.without_pixels()
        return crop.pixels.nbytes

    def take(self, result: "Arrays | Code") -> int:
        """Give the sample the arrays that were made of the row, or the code of its reject.

        Return the bytes of the arrays, or 0 for a code. The latent of an image in a role gets its
        name, and that of a mirrored row becomes `latent_flipped.npy` or `source_flipped.npy`.
        """
        sample = self.sample
        sample.missing -= 1
        if isinstance(result, Code):
            sample.refused[self.cut] = result
            return 0
        name = f"{self.cut[1]}.npy" if isinstance(self.cut, tuple) else LATENT
        if self.is_mirrored:
            result = {mirrored_name(name): result[LATENT]}
        elif self.is_reference:
            result = {name: result[LATENT]}
        sample.arrays.setdefault(self.cut, {}).update(result)
        return sum([array.nbytes for array in result.values()])
