"""Write tars whose members have other names. A tar has the name of its shard."""

from collections.abc import Callable, Iterator

from wdsprep.dataset.file_names import index_name
from wdsprep.dataset.tar.write import Buffer, TarWriter
from wdsprep.exporting.layout import ExportSample, Writing
from wdsprep.exporting.output import Output

Members = list[tuple[str, Buffer]]


def write_tar(
    out: Output,
    unit: str,
    samples: Iterator[ExportSample],
    members: Callable[[ExportSample], Members],
    *,
    indexed: bool = False,
) -> Writing:
    """Write one tar, with its index if `indexed`. Yield after each sample.

    Nothing is written if there is no sample.
    """
    name = f"{unit}.tar"
    first = next(samples, None)
    if first is None:
        return
    with out.open(name) as file, TarWriter(file, hashed=False) as tar:
        tar.add(first.key, members(first))
        yield
        for sample in samples:
            tar.add(sample.key, members(sample))
            yield
        written = tar.finish()
        file.samples = written.samples
    if indexed:
        out.write(index_name(name), written.index)
