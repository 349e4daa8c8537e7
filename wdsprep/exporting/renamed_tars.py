"""Write tars whose members have other names. A tar has the name of its shard."""

from collections.abc import Callable, Iterator

from wdsprep.dataset.file_names import index_name
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
    """Write one tar, with its index if `indexed`, and return the files. Yield after each sample.

    Nothing is written if there is no sample.
    """
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
