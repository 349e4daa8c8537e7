"""The engine, with a stand-in for the models: results keep apart, whatever batches they came in."""

import gc
import io
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.kit.encodes import Means
from tests.kit.gpus import pretend_cuda
from wdsprep.dataset.npy_arrays import FLIPPED
from wdsprep.dataset.reject_codes import Code
from wdsprep.dataset.rejects import RejectedError
from wdsprep.dataset.samples import Sample
from wdsprep.encoding.engine import Engine
from wdsprep.encoding.models.base import Encoded, Part, Tokens, fitting_batch_size, is_out_of_memory
from wdsprep.encoding.models.device import Device, ImageBatch
from wdsprep.encoding.role_images import DatasetCuts
from wdsprep.encoding.sample_chain import Block, EncodedSample, EncodingSample
from wdsprep.images.nearest_shape import Shapes

Engines = Callable[..., Engine]


@pytest.fixture
def engine() -> Iterator[Engines]:
    """Make engines, which are closed at the end."""
    usual = {"seed": 0, "batch_size": 4, "max_area": 10**8, "decoders": 2, "threads": 1}
    with ExitStack() as engines:

        def make(encoder: Any, **options: Any) -> Engine:
            cuts = [DatasetCuts(target=Shapes.square(encoder.resolution))]
            wanted = {**usual, "cuts": cuts, **options}
            return engines.enter_context(closing(Engine(encoder, **wanted)))

        yield make


def grey(level: int, size: tuple[int, int] = (16, 16)) -> bytes:
    out = io.BytesIO()
    Image.new("L", size, level).save(out, "PNG")
    return out.getvalue()


def sample_of(level: int, image: bytes, text: str) -> EncodingSample:
    sample = Sample(source="", image=image, captions=(text,))
    return EncodingSample(str(level), sample, {0: Part.BOTH})


def put(made: Engine, level: int, image: bytes, text: str) -> Block:
    """Feed one sample, in a block of its own."""
    block = Block([sample_of(level, image, text)])
    made.put(block)
    return block


def fed(made: Engine, levels: Iterable[int]) -> dict[int, Block]:
    with made.feeding(), made.turn():
        return {level: put(made, level, grey(level), "x" * level) for level in levels}


def only(block: Block) -> EncodedSample:
    """What came of an image that is cut in one way; raises why nothing did."""
    block.result(60)
    [sample] = block.samples
    return sample.result(0)


def level_of(block: Block) -> tuple[float, float]:
    arrays = only(block).arrays
    return arrays["latent.npy"].item(), arrays["emb.npy"].item()


def refusals(results: Mapping[int, Block]) -> dict[int, Code]:
    """The code of each sample that is refused; the others have the arrays of their levels."""
    codes = {}
    for level, block in results.items():
        try:
            assert level_of(block) == (level, level)
        except RejectedError as refused:
            codes[level] = refused.code
    return codes


class Cramped(Means):
    """Has memory for two images."""

    error: Exception = torch.OutOfMemoryError("CUDA out of memory")

    def encode_images(self, pixels: Tensor, *rest: Any, **options: Any) -> Encoded:
        made = super().encode_images(pixels, *rest, **options)
        if len(pixels) > 2:
            raise self.error
        return made


class Overflowing(Means):
    """Images over 100 overflow, those over 200 in fp32 too."""

    def encode_images(self, pixels: Tensor, *rest: Any, exact: bool = False) -> Encoded:
        found = super().encode_images(pixels, *rest)
        most = 200 if exact else 100
        return Encoded(arrays=found.arrays, ok=found.arrays["latent.npy"].flatten() <= most)


class CrampedLater(Overflowing):
    """The same, and from its second batch on there is memory for two images."""

    def encode_images(self, pixels: Tensor, *rest: Any, exact: bool = False) -> Encoded:
        found = super().encode_images(pixels, *rest, exact=exact)
        if len(pixels) > 2 and len(self.sizes) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found


@pytest.mark.parametrize("threads", [1, 3])
def test_results_are_never_mixed_between_samples(engine: Engines, threads: int) -> None:
    made = engine(Means(), threads=threads)
    results: dict[int, Block] = {}
    for some in (range(3), range(3, 50), range(50, 53)):
        with made.feeding(), made.turn():
            for level in some:
                results[level] = put(made, level, grey(level), "x" * level)
                if level >= 10:  # results are taken in order
                    level_of(results[level - 10])
                    made.leave(results[level - 10])
    assert not refusals(results)


def test_a_batch_that_does_not_fit_is_halved_with_the_same_result(engine: Engines) -> None:
    encoder = Cramped()
    made = engine(encoder, batch_size=8)
    assert not refusals(fed(made, range(21)))
    assert made.batches.stats.batch_size == 2
    assert made.batches.stats.samples == 21
    assert encoder.sizes[:3] == [8, 4, 2]
    assert set(encoder.sizes[3:]) <= {2, 8}  # those that were filled before


@pytest.mark.parametrize(
    ("said", "free", "is_memory"),
    [
        ("CUDA error: out of memory", 9, True),
        ("DefaultCPUAllocator: can't allocate memory", 9, True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", 1, True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", 9, False),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`", 1, True),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED", 1, True),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED", 9, False),
        ("CUDA error: an illegal memory access was encountered", 1, False),
    ],
)
def test_lack_of_memory_is_known_by_its_words(said: str, free: int, *, is_memory: bool) -> None:
    assert is_out_of_memory(RuntimeError(said), free=free, wanted=5) == is_memory


@pytest.mark.parametrize(
    ("resolution", "nbytes", "size"),
    [(256, 10**12, 128), (512, 10**12, 63), (1024, 10**12, 15), (8192, 10**12, 1), (512, 10**9, 2)],
)
def test_a_batch_fits_into_memory_and_its_widest_tensor_into_31_bits(
    resolution: int, nbytes: int, size: int
) -> None:
    assert fitting_batch_size(nbytes, resolution, itemsize=2) == size


def test_fewer_images_of_a_shape_larger_than_the_square_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where memory says how many; on a CPU the size of a batch shows in what is stored."""
    encoder = Means()
    encoder.device = torch.device("cuda")
    pretend_cuda(monkeypatch, mem_get_info=(10**9, 10**9))
    device = Device(encoder, 0)
    sizes = [device.size_of(shape) for shape in [(16, 16), (8, 16), (24, 16), (256, 256)]]
    assert sizes == [128, 128, 85, 1]
    assert Device(encoder, 4).size_of((24, 16)) == 4
    assert Device(Means(), 0).size_of((24, 16)) == Device(Means(), 0).size


@pytest.mark.parametrize("kind", [Overflowing, CrampedLater])
def test_what_overflows_is_computed_exactly_and_rejected_only_then(
    engine: Engines, kind: type[Means]
) -> None:
    made = engine(kind())
    levels = [5, 150, 250, 7, 101, 9, 255, 199, 11, 12, 13, 200]
    refused = [level for level in levels if level > 200]
    assert refusals(fed(made, levels)) == dict.fromkeys(refused, Code.NOT_FINITE)
    assert made.batches.stats.exact == sum(level > 100 for level in levels)
    assert made.batches.stats.samples == len(levels)


class Launching(Means):
    """Launches slowly, for a device that starves: `marks` are the seconds that each batch takes
    between its marks."""

    is_compiled = True  # so that it is warmed up

    def encode_images(self, *arguments: Any, **options: Any) -> Encoded:
        time.sleep(0.02)
        return super().encode_images(*arguments, **options)


class Event:
    """An event on the stream of a GPU, as far as it is used."""

    times: Iterator[float]

    def __init__(self, **options: bool) -> None:
        assert options == {"enable_timing": True, "blocking": True}  # waiting takes no core

    def record(self) -> None:
        self.at_s = next(Event.times)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return (end.at_s - self.at_s) * 1000


def gpu(monkeypatch: pytest.MonkeyPatch, encoder: Means, seconds: list[float]) -> Device:
    """A GPU whose events say that batches took so long, and whose work a CPU does."""
    encoder.device = torch.device("cuda")
    made = Device(encoder, 4)
    encoder.device = torch.device("cpu")
    Event.times = iter([at for each in seconds for at in (0.0, each)])
    empty = torch.empty
    pretend_cuda(monkeypatch, Event=Event)
    monkeypatch.setattr(torch, "empty", lambda shape, **how: empty(shape, dtype=how["dtype"]))
    return made


def some(size: int) -> ImageBatch:
    pixels = torch.zeros((size, 3, 16, 16), dtype=torch.uint8)
    return ImageBatch.of(pixels, ["key"] * size, seed=0)


def test_waiting_for_the_host_is_not_busy_nor_is_warming_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder = Launching()
    # Compiling, the warmed-up time, and then batches of 10 ms that the host launched late.
    made = gpu(monkeypatch, encoder, [60.0, 0.010, 0.030, 0.012, 0.030, 60.0, 0.005, 0.020])
    made.warm_up(some(4))
    assert (made.stats.samples, made.stats.busy_s, made.stats.launch_s) == (0, 0, 0)
    for size in (4, 4, 2):  # the first one in 30 ms is part of warming up
        made.finish(made.launch(some(size)))
    assert made.stats.busy_s == pytest.approx(0.010 + 0.010 + 0.005)
    assert 0.06 <= made.stats.launch_s <= made.stats.wall_s
    assert encoder.sizes == [4, 4, 4, 4, 4, 2, 2, 2]


class Counting(Means):
    """Sees how many cores it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.cores: list[int] = []

    def encode_images(self, *arguments: Any, **options: Any) -> Encoded:
        self.cores.append(torch.get_num_threads())
        return super().encode_images(*arguments, **options)

    def empty(self) -> dict[str, Tensor]:
        self.cores.append(torch.get_num_threads())
        return super().empty()


def test_all_is_computed_on_one_core_each_so_that_their_count_never_shows(engine: Engines) -> None:
    encoder, before = Counting(), torch.get_num_threads()
    torch.set_num_threads(2)  # for whichever thread says nothing else
    try:
        made = engine(encoder, threads=2)
        made.empty()
        for found in fed(made, range(12)).values():
            only(found)
    finally:
        torch.set_num_threads(before)
    assert len(encoder.cores) == 4
    assert set(encoder.cores) == {1}


SHAPES, SQUARE = Shapes(((16, 16), (8, 32))), Shapes.square(8)
CUTS = DatasetCuts(target=SHAPES), DatasetCuts(target=SQUARE)
ROLES = (
    DatasetCuts(
        target=SHAPES,
        sizes={"source": "shapes", "more": "aligned", "style": "pipeline"},
        shapes={"source": Shapes(((24, 8),))},
    ),
    DatasetCuts(target=SQUARE, has_target=False, sizes={"mask": "latent"}),
)


@pytest.mark.parametrize(
    ("is_compiled", "cuts", "wanted"),
    [
        (True, CUTS, {(4, 16, 16), (4, 32, 8), (4, 8, 8)}),
        (True, ROLES, {(4, 16, 16), (4, 32, 8), (4, 8, 24)}),
        (False, ROLES, set()),
    ],
)
def test_networks_are_compiled_for_all_known_shapes_before_samples_come(
    engine: Engines, is_compiled: bool, cuts: Sequence[DatasetCuts], wanted: set[tuple[int, ...]]
) -> None:
    class Compiled(Means):
        def encode_images(self, pixels: Tensor, *rest: Any, **options: Any) -> Encoded:
            shapes.append((len(pixels), *pixels.shape[2:]))
            return super().encode_images(pixels, *rest, **options)

    shapes: list[tuple[int, ...]] = []
    encoder = Compiled()
    encoder.is_compiled = is_compiled
    engine(encoder, cuts=cuts)
    assert {*shapes} == wanted


# Captions


class ByLength(Means):
    """As a pipeline that pads to the longest caption of a batch: each batch has one length."""

    text_batch_size, groups_texts = 3, True

    def tokens(self, captions: Iterable[str], _images: object = ()) -> list[Tokens]:
        return [Tokens(text, count=1, shape=(len(text) % 7,)) for text in captions]

    def encode_texts(self, texts: Sequence[Tokens], *, exact: bool = False) -> Encoded:
        assert len(texts) == self.text_batch_size
        assert len({text.shape for text in texts}) == 1
        return super().encode_texts(texts, exact=exact)


def test_a_full_memory_brings_the_oldest_caption_on_its_way(
    engine: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for bytes is free again in the order in which samples came, and the oldest waits for
    others of its length, which cannot come for want of room."""
    monkeypatch.setattr("wdsprep.encoding.engine.WAITING_NBYTES", 20 * len(grey(7)))
    made = engine(ByLength())
    results: dict[int, Block] = {}
    taken = 0

    def take() -> None:
        nonlocal taken
        assert level_of(results[taken])[0] == taken
        made.leave(results[taken])
        taken += 1

    with made.feeding(), made.turn():
        for level in range(100):
            text = "x" * (3 if level % 40 == 5 else 7)  # seldom come
            results[level] = put(made, level, grey(level), text)
            while taken <= level and results[taken].done():
                take()
    while taken < 100:
        take()
    assert made.is_idle


def test_samples_of_a_block_keep_their_order_and_a_damaged_one_costs_no_other(
    engine: Engines,
) -> None:
    made = engine(Means(), batch_size=16)
    images = {level: grey(level) for level in range(40)}
    images[7] = images[7][:60]
    samples = [sample_of(n, image, "x" * n) for n, image in images.items()]
    assert made.block_size == 4
    blocks = [Block(samples[n : n + 4]) for n in range(0, 40, 4)]
    with made.feeding(), made.turn():
        for block in blocks:
            made.put(block)
    for block in blocks:
        block.result(60)
    for level, sample in enumerate(samples):
        if level == 7:
            with pytest.raises(RejectedError):
                sample.result(0)
        else:
            arrays = sample.result(0).arrays
            assert arrays["latent.npy"].item() == arrays["emb.npy"].item() == level


def test_nothing_is_kept_of_a_block_whose_results_were_taken(engine: Engines) -> None:
    made = engine(Means(), batch_size=4)
    results = fed(made, range(8))
    kept = [weakref.ref(found) for found in results.values()]
    for level, found in results.items():
        assert level_of(found) == (level, level)
        made.leave(found)
    del found
    results.clear()
    end_s = time.monotonic() + 60
    while any(each() is not None for each in kept):  # a thread may be about to let go
        assert time.monotonic() < end_s
        gc.collect()
        time.sleep(0.05)
    assert (made.limit.samples, made.limit.nbytes) == (0, 0)


class BadText(Means):
    """Numbers of long captions are not finite, whatever the precision."""

    def encode_texts(self, texts: Sequence[Tokens], *, exact: bool = False) -> Encoded:
        found = super().encode_texts(texts, exact=exact)
        return Encoded(found.arrays, found.arrays["emb.npy"].flatten() < 50)


def test_a_caption_without_finite_numbers_is_rejected_and_its_neighbours_are_not(
    engine: Engines,
) -> None:
    made = engine(BadText())
    codes = refusals(fed(made, [10, 60, 20, 70, 30]))
    assert codes == {60: Code.NOT_FINITE, 70: Code.NOT_FINITE}


class Mirroring(Overflowing):
    """Makes latents of mirror images too."""

    fields = (Means.fields[0], replace(Means.fields[0], name=FLIPPED), Means.fields[1])


@pytest.mark.parametrize("batch_size", [3, 4])
def test_a_refused_image_harms_no_other_when_it_and_its_mirror_image_are_in_two_batches(
    engine: Engines, batch_size: int
) -> None:
    made = engine(Mirroring(), batch_size=batch_size)
    levels = [5, 250, 150, 7, 255, 9, 101, 11, 12, 201, 13, 14, 15]
    results = fed(made, levels)
    for level, found in results.items():
        if level > 200:
            with pytest.raises(RejectedError):
                only(found)
        else:
            arrays = only(found).arrays
            assert arrays["latent.npy"].item() == arrays[FLIPPED].item() == level


class Shaped(Means):
    """Notes the shape of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def encode_images(self, pixels: Tensor, *rest: Any, **options: Any) -> Encoded:
        self.shapes.append(tuple(pixels.shape))
        return super().encode_images(pixels, *rest, **options)


@pytest.mark.parametrize("waiting", [0, 16])
def test_batches_have_one_shape_and_one_that_seldom_comes_waits_but_not_for_ever(
    engine: Engines, waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = Shaped()
    shapes = Shapes(((16, 16), (8, 32), (32, 8)))
    monkeypatch.setattr("wdsprep.encoding.engine.MOST_WAITING", waiting)
    made = engine(encoder, cuts=[DatasetCuts(target=shapes)])
    results: dict[int, Block] = {}
    behind = waiting + 8
    with made.feeding(), made.turn():
        for level in range(120):
            results[level] = put(made, level, grey(level, size_of(level)), "x" * level)
            if level >= behind:
                block = results[level - behind]
                assert level_of(block) == (level - behind, level - behind)
                assert only(block).crop.fit == shapes.fit(*size_of(level - behind))
                made.leave(block)
    for level in range(120 - behind, 120):
        assert level_of(results[level])[0] == level
    assert {shape[2:] for shape in encoder.shapes} == {(16, 16), (32, 8), (8, 32)}
    assert {shape[0] for shape in encoder.shapes} == {4}
    assert len(encoder.shapes) <= 120 / 4 + 3 + 2 * (waiting == 0) * 40


def size_of(level: int) -> tuple[int, int]:
    return (40, 10) if level in (5, 60) else (10, 40) if level % 3 == 0 else (20, 20)
