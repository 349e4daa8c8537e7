"""The output of `wdsprep export`: progress, what was written, and how to open that."""

from collections.abc import Iterator
from typing import Any

from wdsprep.cli.output.shared import CommandOutput
from wdsprep.exporting.export import Exported
from wdsprep.text import human_bytes, human_time, plural

OPENED = {
    "energon": "megatron.energon.get_train_dataset({out!r}, ...)",
    "primus": "give Primus {out} as its data path",
    "wids": "wids.ShardListDataset({out!r} + '/wids-meta.json')",
    "webshart": "webshart.discover_dataset(source=..., metadata={out!r})",
    "mds": "streaming.StreamingDataset(local={out!r})",
    "parquet": "datasets.load_dataset({out!r})",
    "imagefolder": "datasets.load_dataset('imagefolder', data_dir={out!r})",
    "kohya": "give sd-scripts --train_data_dir {out} --caption_extension .txt "
    "--cache_latents_to_disk",
    "musubi": "start musubi-tuner in {out} with --dataset_config dataset.toml",
    "automodel": "give Automodel {out} as the cache_dir of its image-edit dataset",
}


class ExportOutput(CommandOutput[Exported]):
    """The output of `export`: a progress line, and at the end what was written."""

    def facts(self, exported: Exported) -> Iterator[dict[str, Any]]:
        names = ("files", "index", "left_out", "nbytes", "out", "samples", "to", "units")
        yield {name: getattr(exported, name) for name in names}

    def summary(self, exported: Exported) -> Iterator[str]:
        wrote = f"{plural(exported.samples, 'sample')} in {plural(exported.units, 'shard')}"
        if exported.files:
            wrote += f", {plural(exported.files, 'file')}, {human_bytes(exported.nbytes)}"
        yield f"{exported.out}: {exported.to}: {wrote}, in {human_time(self.line.elapsed_s)}"
        if exported.units_before:
            yield f"{plural(exported.units_before, 'shard')} exported before"
        if exported.left_out:
            yield f"{plural(exported.left_out, 'sample')} left out, as a joined dataset lacks them"
        yield f"next: {OPENED[exported.to].format(out=exported.out)}"
