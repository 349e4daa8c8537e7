"""`export`: write a dataset in the layout of another reader, shard by shard, on any workers.

The files of a shard depend on the shard and the layout alone, so a run that was killed and goes on
writes the same bytes. A shard is exported again if it has no mark (`output`), has changed since, or
if one of its files is not as it was written.
"""

import json
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

from wdsprep.dataset.file_names import HUB_FILES, empty_name, latent_unit
from wdsprep.dataset.image_positions import may_have_moved
from wdsprep.dataset.manifest import Manifest, differences
from wdsprep.dataset.npy_arrays import fields_of, text_fields
from wdsprep.dataset.sealed_json import read_record
from wdsprep.dataset.settings import columns_of
from wdsprep.dataset.stored_dataset import check_kind, open_dataset
from wdsprep.dataset.thread_map import read_each
from wdsprep.errors import FingerprintError, FormatError, NotFoundError, UsageError
from wdsprep.exporting.layout import Exportable, Layout, layout_of, to_json
from wdsprep.exporting.options import ExportOptions
from wdsprep.exporting.output import CLAIM, MARKS, CheckWork, ExportMark, Output, unit_of_mark
from wdsprep.exporting.read_samples import ExportUnit, UnitReader, UnitSource
from wdsprep.options import takes_options
from wdsprep.runners.base import PROGRESS_S, Unit, Work
from wdsprep.runners.job import Job, check_all_done, job_largest_first
from wdsprep.runners.make_runner import runner_for
from wdsprep.store import open_store, shared_store
from wdsprep.store.base import Store, absolute, check_apart, is_hidden, write_bytes
from wdsprep.text import EXAMPLES, NotebookTable, examples, plural, shown

FORM = 1
"""A version that rises if a layout writes other files."""


@dataclass(frozen=True, kw_only=True)
class Exported(NotebookTable):
    """The result of an export: `files` with `nbytes` in all, beside the `index`.

    `units_before` of the shards had been exported before. `left_out` counts the samples that joined
    datasets lack.
    """

    to: str
    out: str
    samples: int
    left_out: int
    files: int
    nbytes: int
    units: int
    units_before: int
    index: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<Exported {self.out!r}: {self.to}, {plural(self.samples, 'sample')}>"


@takes_options(ExportOptions)
def export(options: ExportOptions) -> Exported:
    """Write the dataset into `out` in the layout of another reader.

        exported = wdsprep.export("shards/latents-256", "shards/mds", to="mds")
        exported.samples, exported.files, exported.index

    The options are those of `wdsprep export`. After an interrupt or a kill, the same call goes on
    where it was.
    """
    to, named = options.to, options.joined
    places = [absolute(options.dataset), *map(absolute, named)]
    target = absolute(options.out) if os.fspath(options.out) else ""
    manifests = [open_dataset(place)[1] for place in places]
    chosen = layout_of(to) if to != "energon" else None
    takes_images = chosen is not None and chosen.takes_images
    found = _exportable(places, manifests, tower=options.tower, takes_images=takes_images)
    if chosen is None:
        if named:
            raise UsageError(
                "--to energon takes no --join, as tars stay as they are: let Energon join datasets"
            )
        return _export_metadata(found, target or places[0])
    if not target:
        raise UsageError(f"--to {to} needs a folder to write to: give it after the dataset")
    for place in places:
        check_apart(place, target)
    layout = chosen.check(found)
    claim = {
        "form": FORM,
        "join": [manifest.settings for manifest in manifests[1:]],
        "layout": repr(layout),
        "settings": manifests[0].settings,
        "to": to,
    }
    return _Export(
        dataset=found,
        layout=layout,
        units=tuple(_units(places, manifests, layout)),
        claim=to_json(claim),
        store=open_store(target),
        options=options,
    ).run()


def _exportable(
    places: Sequence[str], manifests: Sequence[Manifest], *, tower: str, takes_images: bool
) -> Exportable:
    """Return the dataset to export, with what is joined to it.

    Arrays of the same name come from the last dataset that has them, and all arrays of text from
    the last dataset with text. Raise UsageError if the datasets cannot be joined.
    """
    first, *joined = manifests
    has_images = takes_images and [m.dataset for m in joined].count("images") == 1
    for place, manifest in zip(places[1:], joined, strict=True):
        if not (has_images and manifest.dataset == "images"):
            check_kind(open_store(place), manifest.dataset, "latents")
        if manifest.is_scored and not manifest.complete:
            raise UsageError(
                f'{place} is not complete: run the same "wdsprep score" again, to its end, and '
                "then export"
            )
    if first.dataset != "latents" and not all(manifest.is_scored for manifest in joined):
        raise UsageError(
            f"{places[0]} is a dataset of images, to which scores alone can be joined: export "
            "latents or text with --join"
        )
    taken = _arrays_by_dataset(manifests)
    fields = [
        item
        for manifest, names in zip(manifests, taken, strict=True)
        for item in _fields_of(manifest)
        if item.name in names and first.dataset == "latents"
    ]
    with_latents = [m for m in manifests if m.settings.get("latents", "none") != "none"]
    of_texts = [m for m, names in zip(manifests, taken, strict=True) if _text_names(m) & names]
    return Exportable(
        url=places[0],
        kind=first.dataset,
        fields=tuple(fields),
        settings=(with_latents or [first])[-1].settings,
        model=str((of_texts or [first])[-1].extra.get("model", "")),
        tower=tower,
        shards=tuple((shard.name, shard.samples) for shard in first.shards),
        has_images=has_images,
        columns={n: holds for m in manifests for n, holds in columns_of(m.settings).items()},
    )


def _fields_of(manifest: Manifest) -> tuple[Any, ...]:
    return fields_of(manifest.settings["layout"]) if manifest.dataset == "latents" else ()


def _text_names(manifest: Manifest) -> set[str]:
    return {item.name for item in text_fields(_fields_of(manifest))}


def _arrays_by_dataset(manifests: Sequence[Manifest]) -> list[set[str]]:
    """Return for each dataset the names of its arrays that are exported.

    Arrays of a later dataset replace those of the same names in an earlier one. If any of them is
    of text, they replace all arrays of text.
    """
    taken: list[set[str]] = []
    for manifest in manifests:
        names = {item.name for item in _fields_of(manifest)}
        has_text = bool(_text_names(manifest))
        for number, earlier in enumerate(manifests[: len(taken)]):
            taken[number] -= names | (_text_names(earlier) if has_text else set())
        taken.append(names)
    return taken


def _units(
    places: Sequence[str], manifests: Sequence[Manifest], layout: Layout
) -> Iterator[ExportUnit]:
    """Yield a unit for each shard that all datasets have.

    Raise UsageError if they were not made of the same images.
    """
    taken = _arrays_by_dataset(manifests)
    first, *others = manifests
    joins = manifests if others else []
    made_of = [_images_of(m) for m in joins]
    moved = [{r.unit: r for r in m.receipts if may_have_moved(r)} for m in joins] or [{}]
    beside = [{latent_unit(shard.name): shard for shard in m.shards} for m in manifests]
    for shard in first.shards:
        unit = latent_unit(shard.name)
        if not shard.samples or not all(unit in there for there in beside):
            continue
        if len({inputs[unit] for inputs in made_of}) > 1:
            raise UsageError(
                f"{shard.name} of {places[0]} and of a joined dataset were made of different "
                "images: join datasets that were encoded from the same images"
            )
        yield ExportUnit(
            name=unit,
            sources=tuple(
                UnitSource(
                    url=place,
                    shard=there[unit],
                    arrays=None  # of images all members are read
                    if manifest.dataset == "images"
                    else tuple(sorted(names.intersection(layout.arrays))),
                    scores=manifest.settings if manifest.is_scored else None,
                    gives_caption=bool(_text_names(manifest) & names),
                    receipt=units.get(unit),
                )
                for place, manifest, names, there, units in zip(
                    places, manifests, taken, beside, moved, strict=True
                )
            ),
        )


def _images_of(manifest: Manifest) -> dict[str, str]:
    """Return the digest of the image shard of each unit, by the name of the unit of latents.

    Latents state it as the input of the unit. After `encode --limit` the number of samples follows.
    """
    if manifest.dataset == "images":
        return {latent_unit(shard.name): shard.digest for shard in manifest.shards}
    return {receipt.unit: receipt.input for receipt in manifest.receipts}


def _export_metadata(dataset: Exportable, target: str) -> Exported:
    """Write metadata for a reader that takes the tars of wdsprep as they are."""
    from wdsprep.exporting.tars import metadata_beside

    store, files = open_store(target), metadata_beside(dataset, target)
    for name, data in files.items():
        write_bytes(store, name, data)
    return Exported(
        to="energon",
        out=target,
        samples=sum(samples for _name, samples in dataset.shards),
        left_out=0,
        files=0,
        nbytes=0,
        units=len(dataset.shards),
        units_before=0,
        index=tuple(files),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportWork:
    """The work of exporting shards, which can be pickled.

    Its progress is in bytes of the shard.
    """

    out: str
    layout: Layout

    def open(self) -> "Callable[[ExportUnit], Generator[int, None, ExportMark]]":
        return self._export

    def _export(self, unit: ExportUnit) -> Generator[int, None, ExportMark]:
        store = shared_store(self.out)
        reading = UnitReader(unit, heads=self.layout.heads)
        told = time.monotonic()
        output = Output(store)
        with closing(self.layout.write(output, unit.name, iter(reading))) as steps:
            for _ in steps:
                if time.monotonic() - told > PROGRESS_S:
                    yield reading.nbytes
                    told = time.monotonic()
        mark = ExportMark(
            name=unit.name,
            inputs=tuple(unit.inputs),
            files=tuple(output.files),
            left_out=reading.left_out,
        )
        write_bytes(store, mark.file_name, mark.to_bytes())
        return mark


@dataclass(kw_only=True)
class _Export:
    """A run of an export: the dataset, the layout, and the shards as units of work.

    `claim` has the settings that decide the bytes of files, beside the shards themselves.
    """

    dataset: Exportable
    layout: Layout
    units: tuple[ExportUnit, ...]
    claim: bytes
    store: Store
    options: ExportOptions

    def run(self) -> Exported:
        store, layout = self.store, self.layout
        there = {entry.name: entry.nbytes for entry in store.list()}
        done = {mark.name: mark for mark in self._claim_folder(there)}
        store.sweep(lambda name: name in there or name.startswith(MARKS))
        before = len(done)
        pending = [unit for unit in self.units if unit.name not in done]
        index = tuple(layout.index(()))
        if pending:
            for name in index:
                store.delete(name)
            work = ExportWork(out=store.url, layout=layout)
            done |= {unit.name: mark for unit, mark in self._run(work, pending, "exported")}
        marks = [done[unit.name] for unit in self.units]
        files = [file for mark in marks for file in mark.files]
        for name, data in chain(layout.index(files).items(), self._empty_captions()):
            if pending or there.get(name) != len(data) or store.read(name) != data:
                write_bytes(store, name, data)
        return Exported(
            to=self.options.to,
            out=store.url,
            samples=sum(file.samples for file in files),
            left_out=sum(mark.left_out for mark in marks),
            files=len(files),
            nbytes=sum(file.nbytes for file in files),
            units=len(marks),
            units_before=before,
            index=index,
        )

    def _claim_folder(self, there: Mapping[str, int]) -> Iterator[ExportMark]:
        """Claim the folder for this export, and yield the marks of shards exported before.

        `there` has the sizes of the files in it. Files of shards whose inputs changed, or whose
        files are not as they were written, are deleted. Raise UsageError if the folder holds other
        files, and FingerprintError if it holds another export.
        """
        store = self.store
        if CLAIM not in there:
            others = (name for name in there if not is_hidden(name) and name not in HUB_FILES)
            if some := [shown(name) for name in islice(others, EXAMPLES + 1)]:
                raise UsageError(
                    f"{store.url} holds other files ({examples(some)}): give an empty or new "
                    "folder for the export"
                )
            write_bytes(store, CLAIM, self.claim)
            return
        try:
            said = read_record(dict[str, Any], store.read(CLAIM), f"{store.url}/{CLAIM}")
        except FormatError as error:
            raise FormatError(f"{error}: give another folder, or remove it first") from None
        if changed := differences(said, json.loads(self.claim)):
            names = ", ".join(line.partition(":")[0] for line in changed)
            raise FingerprintError(
                f"{store.url} holds another export ({names} differ): give another folder, or "
                "remove it first"
            )
        wanted = {unit.name: unit.inputs for unit in self.units}
        units = sorted(filter(None, map(unit_of_mark, there)))
        current = []
        for mark in filter(None, read_each(partial(ExportMark.read, store), units, store.readers)):
            is_here = all(there.get(file.name) == file.nbytes for file in mark.files)
            if list(mark.inputs) == wanted.get(mark.name) and is_here:
                current.append(mark)
            else:
                self._delete(mark)
        if current:
            told = f"checking {plural(len(current), 'shard')} exported before"
            self.options.heard_by.told(told)
            for mark, is_sound in self._run(CheckWork(store.url), current, "checked"):
                if is_sound:
                    yield mark
                else:
                    self._delete(mark)

    def _delete(self, mark: ExportMark) -> None:
        """Delete the mark of a shard, and then the files that it lists."""
        for name in (mark.file_name, *(file.name for file in mark.files)):
            self.store.delete(name)

    def _empty_captions(self) -> Iterator[tuple[str, bytes]]:
        """Yield the name and bytes of the empty caption's file for each exported array of text."""
        for source in self.units[0].sources if self.units else ():
            for name in source.arrays or ():
                if self.dataset.is_text(name):
                    with suppress(NotFoundError):
                        yield empty_name(name), shared_store(source.url).read(empty_name(name))

    def _run(self, work: Work, units: Sequence[Unit], done: str) -> Iterator[tuple[Any, Any]]:
        """Yield each unit with its result. Raise WorkError at the end if a unit failed.

        `done` is the word in its message for what could not be done.
        """
        listener = self.options.heard_by
        make_runner = partial(runner_for, self.options, told=listener.told, name="export")
        job: Job[Any, Any] = job_largest_first(make_runner, work, units, heard=listener.status)
        with closing(job):
            yield from job.results()
        check_all_done(job.quarantined, "shard", done, "run the same command again")
