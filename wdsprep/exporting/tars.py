"""Shards whose samples have members of other names, under the names that the shards have."""

from collections.abc import Callable, Iterator

from wdsprep.dataset.names import index_name
from wdsprep.dataset.tar.write import Buffer, TarWriter
from wdsprep.exporting.layout import ExportedFile, ExportSample, Writing
from wdsprep.store.base import Store, write_bytes

Members = list[tuple[str, Buffer]]


def write_tar(
    out: Store,
    unit: str,
    samples: Iterator[ExportSample],
    members: Callable[[ExportSample], Members],
    *,
    indexed: bool = False,
) -> Writing:
    """Write one tar, `indexed` with its index beside it. Write none where no sample is left."""
    name = f"{unit}.tar"
    first = next(samples, None)
    if first is None:
        return []
    with out.write(name) as sink, TarWriter(sink, None) as tar:
        tar.add(first.key, members(first))
        yield
        for sample in samples:
            tar.add(sample.key, members(sample))
            yield
        written = tar.finish()
    files = [ExportedFile(name=name, nbytes=written.nbytes, samples=written.samples)]
    if indexed:
        write_bytes(out, index_name(name), written.index)
        files.append(ExportedFile(name=index_name(name), nbytes=len(written.index), samples=0))
    return files
