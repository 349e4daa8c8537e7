"""What `wdsprep export` says: how far it is, what is there at the end, and how that is opened."""

import json
from collections.abc import Callable, Iterator

from wdsprep.cli.output import Kept, ProgressLine
from wdsprep.exporting.export import Exported, ExportListener, ExportStatus
from wdsprep.text import human_bytes, human_time, plural

OPENED = {
    "energon": "megatron.energon.get_train_dataset({out!r}, ...)",
    "primus": "give Primus {out} as its data path",
    "wids": "wids.ShardListDataset({out!r} + '/wids-meta.json')",
    "webshart": "webshart.discover_dataset(source=..., metadata={out!r})",
    "mds": "streaming.StreamingDataset(local={out!r})",
    "parquet": "datasets.load_dataset({out!r})",
}


class ExportShow:
    """Prints a progress line, and at the end what was written."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._line = ProgressLine()
        self.listener = ExportListener(told=self._line.say, status=self._status)

    def _status(self, status: Callable[[], ExportStatus]) -> None:
        self._line.offer(lambda: self._progress(status()))

    def _progress(self, status: ExportStatus) -> list[str]:
        elapsed_s = self._line.elapsed_s
        parts = [
            f"{human_bytes(status.nbytes)} of {human_bytes(status.nbytes_of)}",
            f"{human_bytes(status.nbytes / elapsed_s)}/s",
            f"shard {status.units:,} of {status.units_of:,}",
        ]
        if 0 < status.nbytes < status.nbytes_of:
            left = elapsed_s * (status.nbytes_of / status.nbytes - 1)
            parts.insert(2, f"{human_time(left)} left")
        return parts

    def result(self, exported: Exported) -> list[str]:
        self._line.clear()
        if self._as_json:
            names = ("files", "index", "left_out", "nbytes", "out", "samples", "to", "units")
            return [Kept(json.dumps({name: getattr(exported, name) for name in names}))]
        return list(self._lines(exported))

    def _lines(self, exported: Exported) -> Iterator[str]:
        wrote = f"{plural(exported.samples, 'sample')} in {plural(exported.units, 'shard')}"
        if exported.files:
            wrote += f", {plural(exported.files, 'file')}, {human_bytes(exported.nbytes)}"
        yield f"{exported.out}: {exported.to}: {wrote}, in {human_time(self._line.elapsed_s)}"
        if exported.units_before:
            yield f"{plural(exported.units_before, 'shard')} exported before"
        if exported.left_out:
            yield f"{plural(exported.left_out, 'sample')} left out: what is joined lacks them"
        yield f"next: {OPENED[exported.to].format(out=exported.out)}"
