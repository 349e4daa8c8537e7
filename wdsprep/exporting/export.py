"""`export`: write a dataset in the layout of another reader, shard by shard, on any workers.

The files of a shard depend on the shard and the layout alone, so a run that was killed and goes on
writes the same bytes. A shard is exported again if it has no mark (`output`), has changed since, or
if one of its files is not as it was written.
"""

import json
import os
import pkgutil
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

from wdsprep.dataset.file_names import HUB_FILES, empty_name
from wdsprep.dataset.npy_arrays import text_fields
from wdsprep.dataset.sealed_json import canonical_json, read_record
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
)
from wdsprep.exporting.options import ExportOptions
from wdsprep.exporting.read_samples import ExportUnit, UnitSource
from wdsprep.options import takes_options
from wdsprep.runners.base import PROGRESS_S, Call
from wdsprep.runners.make_runner import Job, SizedUnit
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
    make_layout: type[Layout] | None = None
    if LAYOUTS[to]:  # only the module of that layout is imported
        make_layout = pkgutil.resolve_name(f"wdsprep.exporting.{LAYOUTS[to]}")
    exportable = Exportable(options, takes_images=bool(make_layout and make_layout.takes_images))
    datasets = exportable.datasets
    if make_layout is None:
        if options.joined:
            raise UsageError(
                "--to energon takes no --join, as tars stay as they are: let Energon join datasets"
            )
        return _export_metadata(exportable, target or exportable.url)
    if not target:
        raise UsageError(f"--to {to} needs a folder to write to: give it after the dataset")
    for dataset in datasets:
        check_apart(dataset.url, target)
    layout = make_layout(exportable)
    if left := [role for role in exportable.roles if role not in layout.roles]:
        options.listener_or_mute.on_message(
            f"--to {to} has no place for the images in roles of a sample: "
            f"those in {', '.join(left)} are left behind"
        )
    settings, *joined_settings = (dataset.settings for dataset in datasets)
    claim = {"form": FORM, "layout": repr(vars(layout)), "to": to}
    claim |= {"join": joined_settings, "settings": settings}
    store, units = open_store(target), tuple(_units(datasets, layout))
    existing = {entry.name: entry.nbytes for entry in store.list()}
    old_marks = _claim_folder(
        store, existing, claim=canonical_json(claim), units=units, options=options
    )
    marks_by_unit = {mark.name: mark for mark in old_marks}
    store.sweep(lambda name: name in existing or name.startswith(MARKS))
    pending = [unit for unit in units if unit.name not in marks_by_unit]
    index_names = tuple(layout.index(()))  # the same whatever shards there are
    if pending:
        for name in index_names:
            store.delete(name)
        export_unit = partial(export_shard, store.url, layout)
        results = _results(options, export_unit, pending, participle="exported")
        marks_by_unit |= {unit.name: mark for unit, mark in results}
    marks = [marks_by_unit[unit.name] for unit in units]
    exported = [file for mark in marks for file in mark.files]
    written = dict(layout.index(exported))
    # Arrays of the empty caption are copied as they are, from the dataset whose text is exported.
    text_names = {field.name for field in text_fields(exportable.fields.values())}
    for source in units[0].sources if units else ():
        for name in text_names.intersection(source.arrays or ()):
            with suppress(NotFoundError):
                written[empty_name(name)] = source.store.read(empty_name(name))
    for name, data in written.items():
        if pending or existing.get(name) != len(data) or store.read(name) != data:
            write_bytes(store, name, data)
    return Exported(
        to=to,
        out=store.url,
        samples=sum(file.samples for file in exported),
        left_out=sum(mark.left_out for mark in marks),
        files=len(exported),
        nbytes=sum(file.nbytes for file in exported),
        units=len(marks),
        units_before=len(units) - len(pending),
        index=index_names,
    )


def _units(datasets: Sequence[SourceDataset], layout: Layout) -> Iterator[ExportUnit]:
    """Yield a unit for each shard that all datasets have.

    Raise UsageError if they were not made of the same images.
    """
    first, *others = datasets
    for unit, shard in first.shards.items():
        if not shard.samples or not all(unit in dataset.shards for dataset in others):
            continue
        if others and len({dataset.inputs[unit] for dataset in datasets}) > 1:
            raise UsageError(
                f"{shard.name} of {first.url} and of a joined dataset were made of different "
                "images: join datasets that were encoded from the same images, all or none by "
                "--limit"
            )
        sources: list[UnitSource] = []
        for dataset in datasets:
            wanted = tuple(sorted(dataset.names.intersection(layout.arrays)))
            source = UnitSource(
                url=dataset.url,
                shard=dataset.shards[unit],
                arrays=None if dataset.has_images else wanted,  # of images all members are read
                roles=tuple(role for role in dataset.roles if role in layout.roles),
                scores=dataset.settings if dataset.is_scored else None,
                gives_caption=bool(dataset.texts),
                receipt=dataset.moved.get(unit) if others else None,
            )
            sources.append(source)
        yield ExportUnit(name=unit, sources=tuple(sources))


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
    output, total = Output(shared_store(out)), unit.sources[0].shard.samples
    exported, reported, samples = 0, time.monotonic(), unit.read(heads=layout.heads)
    if (first := next(samples, None)) is not None:  # without a sample there are no files
        with closing(layout.write(output, unit.name, chain([first], samples))) as steps:
            for _ in steps:
                exported += 1
                if time.monotonic() - reported > PROGRESS_S:
                    yield unit.nbytes * exported // total
                    reported = time.monotonic()
    mark = ExportMark(
        name=unit.name, inputs=unit.inputs, files=tuple(output.files), left_out=total - exported
    )
    write_bytes(output.store, mark.file_name, mark.to_bytes())
    return mark


def _claim_folder(
    store: Store,
    existing: Mapping[str, int],
    *,
    claim: bytes,
    units: Sequence[ExportUnit],
    options: ExportOptions,
) -> list[ExportMark]:
    """Claim a folder for an export, and return the marks of shards exported before.

    `existing` has the sizes of the files in it. `claim` has the settings that, with the shards,
    decide the bytes of the files. Files of shards whose inputs changed, or whose files are not as
    they were written, are deleted. Raise UsageError if the folder holds other files,
    and FingerprintError if it holds another export.
    """
    if CLAIM not in existing:
        others = (name for name in existing if not is_hidden(name) and name not in HUB_FILES)
        if names := [shown(name) for name in islice(others, EXAMPLES + 1)]:
            raise UsageError(
                f"{store.url} holds other files ({examples(names)}): give an empty or new "
                "folder for the export"
            )
        write_bytes(store, CLAIM, claim)
        return []
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
    names = sorted(
        n for n in existing if n != CLAIM and n.startswith(MARKS) and n.endswith(".json")
    )
    current: list[ExportMark] = []
    for mark in filter(None, read_each(partial(ExportMark.read, store), names, store.readers)):
        is_here = all(existing.get(file.name) == file.nbytes for file in mark.files)
        if mark.inputs == wanted.get(mark.name) and is_here:
            current.append(mark)
        else:
            _delete(store, mark)
    if not current:
        return []
    told = f"checking {plural(len(current), 'shard')} exported before"
    options.listener_or_mute.on_message(told)
    check_unit = partial(check_files, store.url)
    sound: list[ExportMark] = []
    for mark, is_sound in _results(options, check_unit, current, participle="checked"):
        if is_sound:
            sound.append(mark)
        else:
            _delete(store, mark)
    return sound


def _delete(store: Store, mark: ExportMark) -> None:
    """Delete the mark of a shard, and then the files that it lists."""
    for name in (mark.file_name, *(file.name for file in mark.files)):
        store.delete(name)


def _results(
    options: ExportOptions, do_unit: Call, units: Sequence[SizedUnit], *, participle: str
) -> Iterator[tuple[Any, Any]]:
    """Yield each unit with its result. Raise WorkError at the end if a unit failed.

    `participle` is the word in its message for what could not be done, such as "exported".
    """
    job = Job(options, do_unit, units, name="export")
    with closing(job):
        yield from job.results()
    job.check_all_done(participle, "run the same command again")
