"""The places of the datasets of a run: one for each resolution, or for each caption."""

import os
from collections.abc import Sequence
from itertools import product

from wdsprep.encoding.captions.options import CAPTION, OWN, OWN_CAPTIONS, CaptionOptions
from wdsprep.errors import UsageError
from wdsprep.store.base import lies_in

RESOLUTION = "{resolution}"
"""The part of a place that is replaced by the resolution of the dataset."""
LATENTS_PLACE, TEXT_PLACE = f"shards/latents-{RESOLUTION}", "shards/text"
"""The places of latents, and of text alone, unless a place is given."""


def _check_resolutions(latents: str, resolutions: Sequence[int]) -> None:
    """Check that latents have a resolution, and that text alone has at most one."""
    if latents != "none":
        if 0 in resolutions:
            raise UsageError("--resolution is missing: give pixels, such as --resolution 256")
    elif len(resolutions) > 1:
        raise UsageError(
            "--latents none makes one dataset, of the images for one resolution: give only the "
            "lowest --resolution, or leave it out for all images"
        )


def check_apart_text(text_out: "str | os.PathLike[str]", latents: str, text: str) -> None:
    """Raise UsageError if a place for text is given without latents, or without text."""
    if text_out and latents == "none":
        raise UsageError(
            "--text-out is for text beside latents, and --latents none makes text alone: leave "
            "--text-out out, and give its place after IMAGES"
        )
    if text_out and text == "none":
        raise UsageError("--text-out stores text, and --text none makes none: leave one out")


def places_of(
    out: "str | os.PathLike[str]",
    resolutions: Sequence[int],
    latents: str = "",
    captions: CaptionOptions = OWN_CAPTIONS,
    text_out: "str | os.PathLike[str]" = "",
) -> dict[int | str, str]:
    """Return the places of the datasets of a run, by the resolution of each.

    Text datasets of several captions, and text that is stored apart, are listed by the names of
    their captions instead. An empty `out` stands for the default place. Raise UsageError if a place
    needs a name that is not given, or if two datasets would have one place.
    """
    if text_out:
        return _places_apart(out, resolutions, captions, os.fspath(text_out))
    _check_resolutions(latents, resolutions)
    names = [source.name for source in captions.sources]
    text_place = TEXT_PLACE if names == [OWN] else f"{TEXT_PLACE}-{CAPTION}"
    place = os.fspath(out) or (text_place if latents == "none" else LATENTS_PLACE)
    _check_place(place, resolutions, latents, captions)
    if captions.paths:
        place = place.replace(RESOLUTION, str(resolutions[0]))
        return _text_places(place, latents, names)
    place = place.replace(CAPTION, names[0])
    if len(resolutions) > 1 and RESOLUTION not in place:
        raise UsageError(
            f"{place} is one place, and each of {len(resolutions)} resolutions makes a dataset: "
            f"write {RESOLUTION} where their names differ, as in {place.rstrip('/')}-{RESOLUTION}"
        )
    return {number: place.replace(RESOLUTION, str(number)) for number in resolutions}


def _places_apart(
    out: "str | os.PathLike[str]",
    resolutions: Sequence[int],
    captions: CaptionOptions,
    text_out: str,
) -> dict[int | str, str]:
    """Return the places of the latents, by resolution, and of the text stored apart, by caption."""
    if RESOLUTION in text_out:
        raise UsageError(
            f"--text-out {text_out}: text is stored once for all resolutions, so give a place "
            f"without {RESOLUTION}"
        )
    latents = places_of(out, resolutions)
    texts = places_of(text_out, [0], "none", captions).values()
    for one, other in product(latents.values(), texts):
        if lies_in(one, other) or lies_in(other, one):
            raise UsageError(
                f"latents go to {one} and text to {other}, which is in the same folder: give text "
                "another place"
            )
    names = (source.name for source in captions.sources)
    return {**latents, **dict(zip(names, texts, strict=True))}


def _check_place(
    place: str, resolutions: Sequence[int], latents: str, captions: CaptionOptions
) -> None:
    """Raise UsageError if nothing is given for a placeholder, such as {caption}, in a place."""
    if CAPTION in place and not (captions.caption_field or captions.paths or captions.caption_name):
        raise UsageError(
            f"{place} needs the name of captions: give --caption-field, --caption-fields or "
            f"--caption-name, or a place without {CAPTION}"
        )
    if RESOLUTION in place and latents == "none" and 0 in resolutions:
        raise UsageError(
            f"{place} needs a resolution: give --resolution, or a place without {RESOLUTION}"
        )


def _text_places(place: str, latents: str, names: Sequence[str]) -> dict[int | str, str]:
    if latents != "none":
        raise UsageError(
            "--caption-fields makes a text dataset of each field: give --latents none too, or one "
            "field by --caption-field"
        )
    if len(names) > 1 and CAPTION not in place:
        raise UsageError(
            f"{place} is one place, and each of {len(names)} fields makes a dataset: write "
            f"{CAPTION} where their names differ, as in {place.rstrip('/')}-{CAPTION}"
        )
    return {name: place.replace(CAPTION, name) for name in names}
