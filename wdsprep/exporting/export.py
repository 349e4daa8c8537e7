"""`export`: write a dataset in the layout of another reader, shard by shard, on any workers.

The files of a shard depend on the shard and the layout alone, so a run that was killed and goes on
writes the same bytes. A shard is exported again if it has no mark (`output`), has changed since, or
if one of its files is not as it was written.
"""

import importlib
import json
import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

from wdsprep.dataset.file_names import HUB_FILES, empty_name
from wdsprep.dataset.image_positions import may_have_moved
from wdsprep.dataset.manifest import Receipt
from wdsprep.dataset.npy_arrays import text_fields
from wdsprep.dataset.sealed_json import read_record
from wdsprep.dataset.settings import changed_settings
from wdsprep.dataset.thread_map import read_each
from wdsprep.errors import FingerprintError, FormatError, NotFoundError, UsageError
from wdsprep.exporting import LAYOUTS
from wdsprep.exporting.layout import (
    CLAIM,
    MARKS,
    Exportable,
    ExportMark,
    Layout,
    Output,
    SourceDataset,
    check_files,
    to_json,
)
from wdsprep.exporting.options import ExportOptions
from wdsprep.exporting.read_samples import ExportUnit, UnitSource
from wdsprep.options import takes_options
from wdsprep.runners.base import PROGRESS_S, FunctionWork, Unit, Work
from wdsprep.runners.job import Job, check_all_done
from wdsprep.runners.make_runner import job_largest_first
from wdsprep.store import open_store, shared_store
from wdsprep.store.base import Store, absolute, check_apart, is_hidden, write_bytes
from wdsprep.text import EXAMPLES, examples, plural, shortened, shown

FORM = 1
"""A version that rises if a layout writes other files."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The result of an export: `files` with `nbytes` in all, beside the `index`.

    `units_before` of the shards had been exported before. `left_out` counts the samples that joined
    datasets lack.
    """

    to: str
    out: str
    samples: int
    left_out: int = 0
    files: int = 0
    nbytes: int = 0
    units: int
    units_before: int = 0
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
    to = options.to
    target = absolute(options.out) if os.fspath(options.out) else ""
    datasets: list[SourceDataset] = []
    for place in (options.dataset, *options.joined):
        later = SourceDataset(place)
        for earlier in datasets:
            earlier.give_way(later)
        datasets.append(later)
    chosen: Layout | None = None
    if LAYOUTS[to]:  # only the module of that layout is imported
        module, _, name = LAYOUTS[to].partition(":")
        chosen = getattr(importlib.import_module(f"wdsprep.exporting.{module}"), name)()
    takes_images = chosen is not None and chosen.takes_images
    exportable = Exportable(datasets, tower=options.tower, takes_images=takes_images)
    if chosen is None:
        if options.joined:
            raise UsageError(
                "--to energon takes no --join, as tars stay as they are: let Energon join datasets"
            )
        return _export_metadata(exportable, target or exportable.url)
    if not target:
        raise UsageError(f"--to {to} needs a folder to write to: give it after the dataset")
    for dataset in datasets:
        check_apart(dataset.url, target)
    layout = chosen.check(exportable)
    if left := [role for role in exportable.roles if role not in layout.roles]:
        options.listener_or_mute.on_message(
            f"--to {to} has no place for the images in roles of a sample: "
            f"those in {', '.join(left)} are left behind"
        )
    first, *joined = (dataset.settings for dataset in datasets)
    claim = {"form": FORM, "join": joined, "layout": repr(layout), "settings": first, "to": to}
    store, units = open_store(target), tuple(_units(datasets, layout))
    there = {entry.name: entry.nbytes for entry in store.list()}
    marks_before = _claim_folder(store, there, claim=to_json(claim), units=units, options=options)
    done = {mark.name: mark for mark in marks_before}
    store.sweep(lambda name: name in there or name.startswith(MARKS))
    before = len(done)
    pending = [unit for unit in units if unit.name not in done]
    index = tuple(layout.index(()))
    if pending:
        for name in index:
            store.delete(name)
        work = FunctionWork(partial(export_shard, store.url, layout))
        done |= {unit.name: mark for unit, mark in _results(options, work, pending, "exported")}
    marks = [done[unit.name] for unit in units]
    exported = [file for mark in marks for file in mark.files]
    written = dict(layout.index(exported))
    texts = {field.name for field in text_fields(exportable.fields)}
    for source in units[0].sources if units else ():
        for name in texts.intersection(source.arrays or ()):
            with suppress(NotFoundError):
                written[empty_name(name)] = source.store.read(empty_name(name))
    for name, data in written.items():
        if pending or there.get(name) != len(data) or store.read(name) != data:
            write_bytes(store, name, data)
    return Exported(
        to=to,
        out=store.url,
        samples=sum(file.samples for file in exported),
        left_out=sum(mark.left_out for mark in marks),
        files=len(exported),
        nbytes=sum(file.nbytes for file in exported),
        units=len(marks),
        units_before=before,
        index=index,
    )


def _units(datasets: Sequence[SourceDataset], layout: Layout) -> Iterator[ExportUnit]:
    """Yield a unit for each shard that all datasets have.

    Raise UsageError if they were not made of the same images.
    """
    first, *others = datasets
    # Of each unit the digest of the image shard, which latents state as its input (after `encode
    # --limit` the number of samples follows), and its receipt if samples may have moved.
    made_of: list[dict[str, str]] = []
    moved: list[dict[str, Receipt]] = []
    for dataset in datasets:
        receipts = dataset.manifest.receipts if others else ()
        images = {unit: shard.digest for unit, shard in dataset.shards.items()}
        made_of.append(images if dataset.has_images else {r.unit: r.input for r in receipts})
        moved.append({r.unit: r for r in receipts if may_have_moved(r)})
    for unit, shard in first.shards.items():
        if not shard.samples or not all(unit in dataset.shards for dataset in others):
            continue
        if others and len({inputs[unit] for inputs in made_of}) > 1:
            raise UsageError(
                f"{shard.name} of {first.url} and of a joined dataset were made of different "
                "images: join datasets that were encoded from the same images, all or none by "
                "--limit"
            )
        yield ExportUnit(
            name=unit,
            sources=tuple(
                UnitSource(
                    url=dataset.url,
                    shard=dataset.shards[unit],
                    arrays=None  # of images all members are read
                    if dataset.has_images
                    else tuple(sorted(dataset.names.intersection(layout.arrays))),
                    roles=tuple(role for role in dataset.roles if role in layout.roles),
                    scores=dataset.settings if dataset.is_scored else None,
                    gives_caption=bool(dataset.texts),
                    receipt=receipts.get(unit),
                )
                for dataset, receipts in zip(datasets, moved, strict=True)
            ),
        )


def _export_metadata(dataset: Exportable, target: str) -> Exported:
    """Write metadata for a reader that takes the tars of wdsprep as they are."""
    from wdsprep.exporting.tars import metadata_beside

    store, files = open_store(target), metadata_beside(dataset, target)
    for name, data in files.items():
        write_bytes(store, name, data)
    counts = dataset.shards.values()
    return Exported(
        to="energon", out=target, samples=sum(counts), units=len(counts), index=tuple(files)
    )


def export_shard(out: str, layout: Layout, unit: ExportUnit) -> Generator[int, None, ExportMark]:
    """Write the files that a shard becomes, and its mark last.

    Yield now and then about how many bytes of the shard have been read so far.
    """
    output, of = Output(shared_store(out)), unit.sources[0].shard.samples
    count, reported, samples = 0, time.monotonic(), unit.read(heads=layout.heads)
    if (first := next(samples, None)) is not None:
        with closing(layout.write(output, unit.name, chain([first], samples))) as steps:
            for count, _ in enumerate(steps, 1):
                if time.monotonic() - reported > PROGRESS_S:
                    yield unit.nbytes * count // of
                    reported = time.monotonic()
    mark = ExportMark(
        name=unit.name, inputs=unit.inputs, files=tuple(output.files), left_out=of - count
    )
    write_bytes(output.store, mark.file_name, mark.to_bytes())
    return mark


def _claim_folder(
    store: Store,
    there: Mapping[str, int],
    *,
    claim: bytes,
    units: Sequence[ExportUnit],
    options: ExportOptions,
) -> Iterator[ExportMark]:
    """Claim a folder for an export, and yield the marks of shards exported before.

    `there` has the sizes of the files in it. `claim` has the settings that decide the bytes of
    files, beside the shards themselves. Files of shards whose inputs changed, or whose files
    are not as they were written, are deleted. Raise UsageError if the folder holds other files,
    and FingerprintError if it holds another export.
    """
    if CLAIM not in there:
        others = (name for name in there if not is_hidden(name) and name not in HUB_FILES)
        if names := [shown(name) for name in islice(others, EXAMPLES + 1)]:
            raise UsageError(
                f"{store.url} holds other files ({examples(names)}): give an empty or new "
                "folder for the export"
            )
        write_bytes(store, CLAIM, claim)
        return
    try:
        stored = read_record(dict[str, Any], store.read(CLAIM), f"{store.url}/{CLAIM}")
    except FormatError as error:
        raise FormatError(f"{error}: give another folder, or remove it first") from None
    if changed := changed_settings(stored, json.loads(claim)):
        differing = ", ".join(shortened(name.replace("_", "-")) for name in changed)
        raise FingerprintError(
            f"{store.url} holds another export ({differing} differ): give another folder, or "
            "remove it first"
        )
    wanted = {unit.name: unit.inputs for unit in units}
    names = sorted(n for n in there if n != CLAIM and n.startswith(MARKS) and n.endswith(".json"))
    current = []
    for mark in filter(None, read_each(partial(ExportMark.read, store), names, store.readers)):
        is_here = all(there.get(file.name) == file.nbytes for file in mark.files)
        if mark.inputs == wanted.get(mark.name) and is_here:
            current.append(mark)
        else:
            _delete(store, mark)
    if current:
        told = f"checking {plural(len(current), 'shard')} exported before"
        options.listener_or_mute.on_message(told)
        work = FunctionWork(partial(check_files, store.url))
        for mark, is_sound in _results(options, work, current, "checked"):
            if is_sound:
                yield mark
            else:
                _delete(store, mark)


def _delete(store: Store, mark: ExportMark) -> None:
    """Delete the mark of a shard, and then the files that it lists."""
    for name in (mark.file_name, *(file.name for file in mark.files)):
        store.delete(name)


def _results(
    options: ExportOptions, work: Work, units: Sequence[Unit], done: str
) -> Iterator[tuple[Any, Any]]:
    """Yield each unit with its result. Raise WorkError at the end if a unit failed.

    `done` is the word in its message for what could not be done.
    """
    job: Job[Any, Any] = job_largest_first(options, work, units, name="export")
    with closing(job):
        yield from job.results()
    check_all_done(job.quarantined, "shard", done, "run the same command again")
