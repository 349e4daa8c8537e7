"""The steps of `tools/bench gpu`: each puts models to work on a GPU and sends figures.

A step that finds something wrong raises an error, which is its outcome. Models and photos are made
when a step first needs them, and found by later ones. With `small` all of it is tiny and may run on
a CPU.
"""

import contextlib
import importlib
import io
import json
import os
import shutil
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    from wdsprep.encoding.models.encoder import LatentEncoder

KL = {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "norm_num_groups": 32}
CLIP_L = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
CLIP_H = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
}
CLIP_BIG_G = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
}
T5_XXL = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
T5_SHORT = T5_XXL | {"num_layers": 2}
MODELS: Mapping[str, tuple[str, Mapping[str, Mapping[str, Any]]]] = {
    "sd2": ("StableDiffusion", {"text_encoder": CLIP_H}),
    "sdxl": ("StableDiffusionXL", {"text_encoder": CLIP_L, "text_encoder_2": CLIP_BIG_G}),
    "flux-short": ("Flux", {"text_encoder": CLIP_L, "text_encoder_2": T5_SHORT}),
    "flux": ("Flux", {"text_encoder": CLIP_L, "text_encoder_2": T5_XXL}),
}
"""The pipeline of each model, and the sizes of its text encoders; each has the VAE `KL`."""
VIT_L = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
}
SO400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}
CAPTIONS = ("a cat", "a dog that sleeps on a red sofa", "", "one, two, three " * 40)
PROFILED = 30
"""The batches of a profile."""
DECODERS = 8
PHOTO_SIDE = 512
PLANTED = '''"""Break one process after some convolutions: whoever makes the file first."""
import os
import torch

plain, calls = torch.nn.Conv2d.forward, 0


def forward(self, pixels):
    global calls
    calls += pixels.device.type == os.environ["PLANT_ON"]
    if calls > int(os.environ["PLANT_AFTER"]):
        calls = -1 << 60
        try:
            os.close(os.open(os.environ["PLANT_ONCE"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return plain(self, pixels)
        if pixels.is_cuda:
            torch._assert_async(torch.zeros(1, device=pixels.device))
            torch.cuda.synchronize()
        raise RuntimeError("CUDA error: device-side assert triggered")
    return plain(self, pixels)


torch.nn.Conv2d.forward = forward
'''
"""A module that every Python imports at its start where it lies on its path."""


class Bench:
    """What steps share: the device, models and photos, and the pipe for figures."""

    def __init__(self, home: Path, sent: int, *, small: bool) -> None:
        self.home, self.small, self._sent = home, small, sent

    @cached_property
    def device(self) -> str:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    def send(self, **message: Any) -> None:
        os.write(self._sent, json.dumps(message).encode() + b"\n")

    def figure(self, name: str, value: Any) -> None:
        self.send(figure=name, value=value)

    def model(self, name: str) -> Path:
        """Return the folder of a model, made of random weights."""
        import torch

        from tools.benches.encode_peers import make_pipeline

        folder = self.home / name
        if not folder.is_dir():
            kind, towers = MODELS[name]
            dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
            part = folder.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            make_pipeline(kind, part, {} if self.small else towers, {} if self.small else KL, dtype)
            part.rename(folder)
        return folder

    def photos(self, count: int, side: int) -> Path:
        """Return a folder with `images`, a dataset of photos, all of one size."""
        from tools.benches.encode import make_images

        place = self.home / f"{count}-of-{side}"
        if not place.is_dir():
            part = place.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            make_images(part, count, side)
            part.rename(place)
        return place

    def encoder(self, model: Path, side: int, **options: Any) -> "LatentEncoder":
        import torch

        from wdsprep.encoding.models.encoder import LatentEncoder
        from wdsprep.encoding.models.find_model import find_model
        from wdsprep.encoding.models.load_networks import silence_libraries
        from wdsprep.encoding.recipe_defaults import settle_recipe
        from wdsprep.encoding.recipe_options import Encode

        silence_libraries()
        wanted = Encode(resolution=side, **options)
        recipe, found = settle_recipe(wanted, find_model(str(model), text=wanted.text), self.device)
        return LatentEncoder(found, recipe, torch.device(self.device))

    def pixels(self, count: int, side: int) -> "torch.Tensor":
        """Return a batch of photos on the device."""
        import torch
        from PIL import Image

        from tools.benches.encode import photo

        photos = [np.asarray(Image.open(io.BytesIO(photo(side, seed)))) for seed in range(4)]
        rows = [photos[number % len(photos)] for number in range(count)]
        return torch.from_numpy(np.stack(rows)).permute(0, 3, 1, 2).contiguous().to(self.device)

    def encode(self, place: Path, out: str, **options: Any) -> dict[str, Any]:
        """Encode photos in worker processes, and return the figures of the run."""
        import wdsprep
        from wdsprep.encoding.progress import Speeds
        from wdsprep.runners.job import JobListener

        speeds = Speeds()
        listener = JobListener(on_step=speeds.take)
        outcome = wdsprep.encode(
            place / "images", place / out, runner="local", listener=listener, **options
        )
        sizes = [worker.batch_size for worker in speeds.workers.values()]
        return {
            "images": outcome.samples,
            "images a second": round(sum(speeds.rates().values()), 1),
            "busy": round(speeds.busy, 3),
            "launching": round(speeds.launching, 3),
            "batch": min(sizes, default=0),
            "digests": [shard.digest for shard in outcome.manifest.shards],
            "quarantined": len(outcome.quarantined),
        }


def serve(home: str, small: bool, sent: int) -> None:
    """Do the steps that come in, as `module:function`; send the figures of each, then its error.

    The error of a step that ends well is "".
    """
    bench = Bench(Path(home), sent, small=small)
    for line in sys.stdin:
        try:
            module, _, name = line.strip().partition(":")
            getattr(importlib.import_module(module), name)(bench)
        except BaseException as error:  # noqa: BLE001  it is the outcome of the step
            traceback.print_exc()
            bench.send(error=f"{type(error).__name__}: {error}"[:2000])
        else:
            bench.send(error="")


def versions(bench: Bench) -> None:
    """Import everything, and name the card, the driver and the libraries."""
    import torch

    began = time.monotonic()
    names = ("diffusers", "transformers", "wdsprep.encoding.models.encoder", "tests.kit.families")
    for name in names:
        importlib.import_module(name)
    bench.figure("seconds of imports after torch", round(time.monotonic() - began, 1))
    for name in ("torch", "diffusers", "transformers"):
        bench.figure(name, str(importlib.import_module(name).__version__))
    if bench.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        bench.figure("card", f"{properties.name}, {properties.total_memory / 1e9:.0f} GB")
        bench.figure("CUDA of torch", torch.version.cuda)
        bench.figure("cuDNN", torch.backends.cudnn.version())
        driver = Path("/proc/driver/nvidia/version")
        bench.figure("driver", driver.read_text().partition("\n")[0] if driver.exists() else "?")
    elif not bench.small:
        raise RuntimeError("torch finds no GPU here; --small tries this benchmark without")
    ones = torch.ones(64, 64, device=bench.device)
    if (ones @ ones).sum().item() != 64**3:
        raise RuntimeError("a product of matrices is wrong")


def bits(bench: Bench) -> None:
    """Compare noise with the CPU's, a batch with itself, and samples alone with a batch."""
    import torch

    from tests.kit.families import NAMES, small
    from wdsprep.encoding.models.noise import noise_keys, normal

    keys = noise_keys(0, [f"{number:06d}" for number in range(64)])
    here, there = normal(keys, (16, 64, 64)), normal(keys.to(bench.device), (16, 64, 64)).cpu()
    bench.figure("noise has the bits of the CPU", torch.equal(here, there))
    names = ("StableDiffusion", "Sana") if bench.small else NAMES
    unequal: dict[str, list[str]] = {"again": [], "alone": []}
    apart = 0.0
    for number, name in enumerate(names):
        folder = bench.home / f"family-{name}"
        if not folder.is_dir():
            small(name, folder)
        encoder = bench.encoder(folder, 64)
        pixels = bench.pixels(4, 64)
        first, second = (_encoded(encoder, pixels, range(4)) for _ in range(2))
        if not all(map(_equal, first, second)):
            unequal["again"].append(name)
        alone = [row for number in range(4) for row in _encoded(encoder, pixels, [number])]
        if not all(map(_equal, first, alone)):
            unequal["alone"].append(name)
            apart = max(apart, *map(_deviation, alone, first))
        bench.figure("families", number + 1)
        bench.figure("other bits the second time", unequal["again"])
        bench.figure("other bits alone", unequal["alone"])
        bench.figure("of which the largest deviation", float(f"{apart:.2e}"))
    if not torch.equal(here, there):
        raise RuntimeError("noise differs from that of the CPU")


def _encoded(
    encoder: "LatentEncoder", pixels: "torch.Tensor", numbers: Sequence[int]
) -> "list[dict[str, torch.Tensor]]":
    """Return the arrays of the samples of these numbers, computed together as `encode` does."""
    import torch

    from wdsprep.encoding.models.device import Device, ImageBatch, TextBatch

    device = Device(encoder, 4)
    padded = torch.zeros((4, *pixels.shape[1:]), dtype=torch.uint8)
    padded[: len(numbers)] = pixels[list(numbers)].cpu()
    images = ImageBatch.of(padded, [f"{number:06d}" for number in numbers], seed=0)
    rows: list[dict[str, torch.Tensor]] = [
        dict(row or {}) for row in device.finish(device.launch(images))
    ]
    tokens = encoder.tokens([CAPTIONS[number] for number in numbers])
    for shape in dict.fromkeys(text.shape for text in tokens):
        places = [number for number, text in enumerate(tokens) if text.shape == shape]
        batch = TextBatch.of([tokens[number] for number in places], 4, encoder.device)
        for number, row in zip(places, device.finish(device.launch(batch)), strict=True):
            rows[number] |= row or {}
    return rows


def _equal(one: "dict[str, torch.Tensor]", other: "dict[str, torch.Tensor]") -> bool:
    import torch

    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _deviation(one: "dict[str, torch.Tensor]", other: "dict[str, torch.Tensor]") -> float:
    """Return the largest difference of two samples' arrays, by the size of their numbers."""
    found = [0.0]
    for name, array in one.items():
        if array.shape == other[name].shape:
            error = (array.double() - other[name].double()).abs().max()
            found.append((error / other[name].double().square().mean().sqrt()).item())
    return max(found)


def whole(bench: Bench) -> None:
    """Encode photos with SD2 twice, and once more with a batch that needs too much memory."""
    from wdsprep.encoding import encode as encoding

    count, resolution, batch = (24, 64, 4) if bench.small else (1_000, 256, 0)
    place = bench.photos(count, PHOTO_SIDE)
    model = str(bench.model("sd2"))
    options = {"resolution": resolution, "model": model, "batch_size": batch, "workers": 1}
    first = bench.encode(place, "first", **options)
    digests = first.pop("digests")
    bench.figure("first run", first)
    again = bench.encode(place, "again", **options).pop("digests")
    bench.figure("a second run has the same bits", again == digests)
    plain = encoding.make_encoder
    encoding.make_encoder = make_tight
    try:
        tight = bench.encode(place, "tight", **{**options, "batch_size": 8 if bench.small else 64})
    finally:
        encoding.make_encoder = plain
    del tight["digests"]
    bench.figure("with memory for 12 images and batches of 64", tight)
    if tight["images"] != count:
        raise RuntimeError(f"{count - tight['images']} images were lost where memory is short")


def make_tight(model: Any, recipe: Any, device: str) -> "LatentEncoder":
    """Make an encoder that lacks memory: on a GPU really, on a CPU by what it raises."""
    import torch

    from wdsprep.encoding.models.base import peak_nbytes
    from wdsprep.encoding.models.encoder import LatentEncoder

    encoder = LatentEncoder(model, recipe, torch.device(device))
    if encoder.device.type == "cuda":
        room = torch.cuda.memory_reserved() + peak_nbytes(12, recipe.resolution, encoder.itemsize)
        torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info()[1])
        return encoder
    plain = encoder.encode_images

    def encode_images(pixels: "torch.Tensor", *rest: Any, **options: Any) -> Any:
        if len(pixels) > 2:
            raise torch.OutOfMemoryError("out of memory, as it was made to be")
        return plain(pixels, *rest, **options)

    encoder.encode_images = encode_images  # type: ignore[method-assign]
    return encoder


def broken(bench: Bench) -> None:
    """Let a device assert break one of two workers, and look whether all units are done."""
    import wdsprep

    count, resolution = (24, 64) if bench.small else (1_000, 256)
    place = bench.photos(count, PHOTO_SIDE)
    model = str(bench.model("sd2"))
    with _planted(bench, "encode", after=20 if bench.small else 100):
        options = {"batch_size": 4, "workers": 2, "resolution": resolution}
        run = bench.encode(place, "broken", model=model, **options)
    _check_planted(bench, "encode", run["images"], run["quarantined"], count)
    clip = _clip(bench)
    with _planted(bench, "score", after=2):
        scored = wdsprep.score(
            place / "images", place / "scores", model=str(clip), batch_size=4, workers=2
        )
    _check_planted(bench, "score", scored.samples, len(scored.quarantined), count)


@contextlib.contextmanager
def _planted(bench: Bench, name: str, *, after: int) -> Iterator[None]:
    """Plant an error in one of the processes that begin inside, after some convolutions."""
    folder = bench.home / f"planted-{name}"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PLANTED)
    before = dict(os.environ)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    os.environ.update(
        PYTHONPATH=path,
        PLANT_ON=bench.device,
        PLANT_AFTER=str(after),
        PLANT_ONCE=str(folder / "done"),
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _check_planted(bench: Bench, name: str, samples: int, quarantined: int, count: int) -> None:
    bench.figure(f"{name}: images, quarantined units", [samples, quarantined])
    if not (bench.home / f"planted-{name}/done").exists():
        raise RuntimeError(f"no worker of {name} broke: the error was not planted")
    if samples != count or quarantined:
        raise RuntimeError(f"{name} lost {count - samples} images to one broken worker")


def turns(bench: Bench) -> None:
    """Let the networks of Flux take turns, and look how much memory stays taken."""
    import torch

    from wdsprep.encoding.models.base import Part

    model = bench.model("flux-short")
    if bench.device == "cuda":
        _leave_free(sum(file.stat().st_size for file in model.rglob("*.safetensors")) * 1.35)
    side = 64 if bench.small else 512
    encoder = bench.encoder(model, side)
    bench.figure("networks take turns", encoder.is_split)
    if bench.small:
        encoder.is_split = True
    elif not encoder.is_split:
        raise RuntimeError("all networks were loaded, though memory is too small for them")
    pixels, taken = bench.pixels(2, side), []
    for _ in range(3):
        for part in (Part.IMAGE, Part.TEXT):
            encoder.bring(part)
            if part is Part.IMAGE:
                encoder.encode_images(pixels, torch.zeros(2, dtype=torch.int64).to(bench.device))
            else:
                encoder.encode_texts(encoder.tokens(["a cat", "a dog"]))
            if bench.device == "cuda":
                taken.append(round(torch.cuda.memory_allocated() / 1e9, 3))
    bench.figure("GB taken after images, text, images, ...", taken)
    if any(later > earlier * 1.02 for earlier, later in zip(taken, taken[2:], strict=False)):
        raise RuntimeError("each turn leaves memory behind")


def _leave_free(nbytes: float) -> None:
    """Take memory of the GPU, as another process would, until this is free."""
    import torch

    free = torch.cuda.mem_get_info()[0]
    size = int(free - nbytes)
    if size > 0:
        _TAKEN.append(torch.empty(size, dtype=torch.uint8, device="cuda"))


_TAKEN: list["torch.Tensor"] = []


def vae(bench: Bench) -> None:
    """Time a VAE in turns: layouts and precisions."""
    import torch

    _TAKEN.clear()
    model = bench.model("sd2")
    sides = ((64, 2),) if bench.small else ((256, 64), (1024, 4))
    seconds = 0.02 if bench.small else 0.4
    for side, size in sides:
        pixels = bench.pixels(size, side)
        encoders = {
            dtype: bench.encoder(model, side, dtype=dtype, text="none", latents="mean")
            for dtype in ("fp16", "bf16", "tf32", "fp32")
        }
        contenders = {dtype: _launcher(encoder, pixels) for dtype, encoder in encoders.items()}
        latents = {dtype: _latents(encoder, pixels) for dtype, encoder in encoders.items()}
        exact = latents.pop("fp32")
        deviations = {dtype: _rms(rounded, exact) for dtype, rounded in latents.items()}
        for dtype in ("fp16", "tf32"):
            other = bench.encoder(model, side, dtype=dtype, text="none", latents="mean")
            other._moments.get(exact=False).to(memory_format=torch.channels_last)
            contenders[f"{dtype}, channels_last"] = _launcher(other, pixels)
        bench.figure(f"images a second at {side}", _in_turns(contenders, size, seconds))
        bench.figure(f"deviation from fp32 at {side}, rms", deviations)


def _latents(encoder: "LatentEncoder", pixels: "torch.Tensor") -> "torch.Tensor":
    import torch

    noise = torch.zeros(len(pixels), dtype=torch.int64, device=pixels.device)
    rows = encoder.image_rows(pixels, noise)
    return next(iter(rows.arrays.values())).double().cpu()


def _rms(latents: "torch.Tensor", exact: "torch.Tensor") -> float:
    share = (latents - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    return float(f"{share.item():.2e}")


def _launcher(encoder: "LatentEncoder", pixels: "torch.Tensor") -> Callable[[], object]:
    import torch

    noise = torch.zeros(len(pixels), dtype=torch.int64, device=pixels.device)
    return lambda: encoder.encode_images(pixels, noise)


def _in_turns(
    contenders: Mapping[str, Callable[[], object]], size: int, seconds: float
) -> dict[str, float]:
    """Return the median rate of each contender over three rounds, which take turns."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for launch in contenders.values():
        launch()
    for _ in range(3):
        for name, launch in contenders.items():
            _wait()
            began, batches = time.perf_counter(), 0
            while time.perf_counter() - began < seconds:
                launch()
                batches += 1
                if batches % 4 == 0:
                    _wait()
            _wait()
            rates[name].append(batches * size / (time.perf_counter() - began))
    return {name: round(statistics.median(found), 1) for name, found in rates.items()}


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def profile(bench: Bench) -> None:
    """Profile batches of images and captions of SDXL, beside threads that decode photos."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiling

    from wdsprep.encoding.batching import DeviceBatches
    from wdsprep.encoding.models.device import ImageBatch, TextBatch

    side, size = (64, 2) if bench.small else (512, 16)
    encoder = bench.encoder(bench.model("sdxl"), side)
    pixels, keys = bench.pixels(size, side).cpu(), [f"{number:06d}" for number in range(size)]
    if bench.device == "cuda":
        pixels = pixels.pin_memory()
    texts = TextBatch.of(encoder.tokens(CAPTIONS * (size // 4 or 1)), size, encoder.device)
    batches = [ImageBatch.of(pixels, keys, seed=0), texts]
    device = DeviceBatches(encoder, size)
    device.warm_up(batches)
    activity = ProfilerActivity.CUDA if bench.device == "cuda" else ProfilerActivity.CPU
    with _decoding(side), profiling(activities=[activity]) as profiled:
        began = time.perf_counter()
        for future in [device.submit(batch) for _ in range(PROFILED // 2) for batch in batches]:
            future.result()
        wall_s = time.perf_counter() - began
    stats = device.stats
    device.close()
    bench.figure("ms a batch", round(1000 * wall_s / PROFILED, 2))
    bench.figure("share of launching", round(stats.launch_s / wall_s, 3))
    trace = bench.home / "trace.json"
    profiled.export_chrome_trace(str(trace))
    for name, value in _read_trace(json.loads(trace.read_text())["traceEvents"]).items():
        bench.figure(name, value)


@contextlib.contextmanager
def _decoding(side: int) -> Iterator[None]:
    """Decode photos in threads meanwhile, as workers of `encode` do."""
    from tools.benches.encode import photo
    from wdsprep.images.crop import crop

    data, is_over = photo(2 * side), threading.Event()

    def decode() -> None:
        while not is_over.is_set():
            crop(data, side)

    threads = [threading.Thread(target=decode, daemon=True) for _ in range(DECODERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def _read_trace(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a trace says of the device: its gaps, and what makes the host wait."""
    work = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    busy, end = 0.0, work[0][0] if work else 0.0
    for start, stop in work:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    names = [str(event.get("name", "")) for event in events]
    span = end - work[0][0] if work else 0.0
    return {
        "share of gaps": round(1 - busy / span, 3) if span else 0.0,
        "synchronisations": sum("Synchronize" in name for name in names),
        "pageable copies": sum("Pageable" in name for name in names),
        "kernels a batch": round(sum(e.get("cat") == "kernel" for e in events) / PROFILED),
    }


def score(bench: Bench) -> None:
    """Score photos with CLIP and SigLIP, from the first to the last."""
    import wdsprep

    count = 24 if bench.small else 1_000
    place = bench.photos(count, PHOTO_SIDE)
    for name, model in (("clip", _clip(bench)), ("siglip", _siglip(bench))):
        began = time.perf_counter()
        scored = wdsprep.score(place / "images", place / f"scores-{name}", model=str(model))
        rate = count / (time.perf_counter() - began)
        bench.figure(f"{name}: images a second, start included", round(rate, 1))
        if scored.samples != count:
            raise RuntimeError(f"{name} scored {scored.samples} of {count} images")


def _clip(bench: Bench) -> Path:
    sizes = {} if bench.small else {"vision": VIT_L, "text": CLIP_L}
    return _scoring_model(bench, "clip", sizes)


def _siglip(bench: Bench) -> Path:
    text = {name: SO400M[name] for name in CLIP_L}
    return _scoring_model(bench, "siglip", {} if bench.small else {"vision": SO400M, "text": text})


def _scoring_model(bench: Bench, kind: str, sizes: Mapping[str, Mapping[str, int]]) -> Path:
    """Return the folder of a small scoring model of the tests, or of one with these sizes."""
    import torch
    import transformers

    from tests.kit import scoring_models

    folder = bench.home / f"scoring-{kind}"
    if folder.is_dir():
        return folder
    scoring_models.small(kind, folder)
    if sizes:
        config = transformers.AutoConfig.from_pretrained(folder)
        config.vision_config.update(sizes["vision"])
        config.text_config.update(sizes["text"])
        side = sizes["vision"]["image_size"]
        with torch.device(bench.device):
            transformers.AutoModel.from_config(config).save_pretrained(folder)
        path = folder / "preprocessor_config.json"
        settings, square = json.loads(path.read_text()), {"height": side, "width": side}
        settings["size"] = {"shortest_edge": side} if kind == "clip" else square
        if kind == "clip":
            settings["crop_size"] = square
        path.write_text(json.dumps(settings))
    return folder


def compiled(bench: Bench) -> None:
    """Compile the VAE of SD2 for two shapes, and time it beside the one that is not."""
    import torch

    model = bench.model("sd2")
    side, size = (64, 2) if bench.small else (256, 64)
    sizes = ((side, side), (2 * side, side // 2))
    batches = [
        torch.randint(0, 256, (size, 3, high, wide), dtype=torch.uint8, device=bench.device)
        for wide, high in sizes
    ]
    plain = bench.encoder(model, side, text="none")
    fast = bench.encoder(model, side, text="none", compile=True, shapes=sizes)
    for pixels in batches:
        shape = "x".join(map(str, reversed(pixels.shape[2:])))
        began = time.perf_counter()
        _launcher(fast, pixels)()
        _wait()
        bench.figure(f"{shape}: seconds to compile", round(time.perf_counter() - began, 1))
        contenders = {"plain": _launcher(plain, pixels), "compiled": _launcher(fast, pixels)}
        rates = _in_turns(contenders, size, 0.02 if bench.small else 0.7)
        bench.figure(f"{shape}: images a second", rates)


def large_text(bench: Bench) -> None:
    """Time the text encoders of Flux with a T5-XXL of random weights, by batch."""
    import torch

    _TAKEN.clear()
    encoder = bench.encoder(bench.model("flux"), 64 if bench.small else 256, latents="none")
    rates = {}
    for size in (1, 4) if bench.small else (1, 8, 32):
        texts = encoder.tokens([f"picture number {number} of many" for number in range(size)])
        try:
            contenders = {"": lambda texts=texts: encoder.encode_texts(texts)}  # type: ignore[misc]
            rates[size] = _in_turns(contenders, size, 0.02 if bench.small else 1.0)[""]
        except torch.OutOfMemoryError:
            rates[size] = 0.0
    bench.figure("captions a second, by batch", rates)
    if bench.device == "cuda":
        bench.figure("GB at most", round(torch.cuda.max_memory_allocated() / 1e9, 1))
