"""`score`: columns and embeddings of image shards, on any number of workers.

An image shard is a unit of work; its scores have the same name, keys and order. All models are
loaded once here, before anything is written, so that an unsuitable model is reported at once. Then
the plan is carried out as that of `encode` is (`do_plan`). Workers load what they need when they
open.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median_low
from typing import TYPE_CHECKING, Any

from wdsprep.dataset.manifest import Manifest
from wdsprep.dataset.npy_arrays import Field, layout
from wdsprep.dataset.sample_table import role_columns
from wdsprep.dataset.settings import SCORES, TEXT, columns_of
from wdsprep.dataset.shard_reader import ScoreReader
from wdsprep.encoding.gpus import prepare_allocator
from wdsprep.encoding.image_shards import find_image_shards, first_shards
from wdsprep.encoding.models.model_files import find_on_node
from wdsprep.encoding.options import EncodeWorkerOptions
from wdsprep.encoding.run_plan import RunPlan, do_plan, plan_dataset
from wdsprep.encoding.worker_plan import EncodeJob, settle_workers
from wdsprep.errors import UsageError
from wdsprep.images.options import check_has_image
from wdsprep.options import takes_options
from wdsprep.runners.base import Call
from wdsprep.runners.job import JobListener
from wdsprep.runners.run import Outcome
from wdsprep.scoring.heads import read_head
from wdsprep.scoring.languages import COLUMNS, language_library
from wdsprep.scoring.models import (
    CLASSIFIER,
    ScoreModel,
    find_score_model,
    score_columns,
    settings_of,
    with_labels,
)
from wdsprep.scoring.options import PRESETS, ScoreOptions, WantedHead
from wdsprep.sources.patterns import is_glob
from wdsprep.store import open_store
from wdsprep.store.base import absolute, check_apart

if TYPE_CHECKING:
    from wdsprep.scoring.networks import ScoreEncoder


CPU_BATCH, GPU_BATCH = 16, 64
STORED = {"fp16": "<f2", "fp32": "<f4"}


def make_encoder(models: Sequence[ScoreModel], device: str, dtype: str) -> "ScoreEncoder":
    """Load the models in a worker, after a check of the worker's GPU and of their files."""
    from wdsprep.encoding.models.device import check_gpu
    from wdsprep.scoring.networks import ScoreEncoder

    check_gpu(device)
    return ScoreEncoder([find_on_node(model, PRESETS) for model in models], device, dtype)


def open_worker(role: str, job: EncodeJob) -> Call:
    """Prepare a worker that scores the images in a role, or the targets where the role is ""."""
    prepare_allocator()
    from wdsprep.scoring.worker import ScoreWorker  # torch and models: for workers alone

    return ScoreWorker(job, role)


@takes_options(ScoreOptions)
def score(options: ScoreOptions) -> Outcome:
    """Score the image shards in `images` into the dataset `out`, by models and by captions.

        scored = wdsprep.score("shards/images", "shards/scores", model="clip", language=True)
        wdsprep.select("shards/images", "shards/good", join="shards/scores",
                       where="language == 'en' and similarity > 0.25")

    The options are those of `wdsprep score`; `model`, `label` and `head` may be one or several.
    After an interruption, the same call continues the run.
    """
    listener = options.listener_or_mute
    plan, made_by = _plan_of(options, listener)
    (outcome,) = do_plan(
        plan,
        partial(open_worker, options.role),
        listener=listener,
        limit=options.limit,
        track=options.track,
        extra=lambda _dataset: {"model": made_by},
        name="score",
    )
    return outcome


def example_condition(place: str, manifest: Manifest) -> str:
    """Return a condition that selects about half of the samples, or "" if scores have no column.

    It asks for the commonest text in the first column, or for the middle of its numbers. The
    samples of the first shard decide.
    """
    column, kind = next(iter(columns_of(manifest.settings).items()), ("", ""))
    if not column or not manifest.shards:
        return ""
    reader = ScoreReader(open_store(place), manifest.shards[0], manifest.settings)
    values = reader.table[column].to_pylist()
    if kind == TEXT:
        return f"{column} == {json.dumps(Counter(values).most_common(1)[0][0])}"
    return f"{column} >= {median_low(values)}"


def _plan_of(options: ScoreOptions, listener: JobListener) -> tuple[RunPlan, str]:
    """Return the plan of a run of `score`, and the names of what it scores by.

    Models are downloaded if they are missing, and each is loaded and tried once. Raise an error if
    the run is impossible.
    """
    images, out = absolute(options.images), absolute(options.out)
    source = find_image_shards(images, options.resolution, max_nbytes=int(options.max_bytes))
    check_apart(source.tars.url if is_glob(images) else images, out)
    told = listener.on_message
    workers = options.part(EncodeWorkerOptions)
    worker_plan = settle_workers(workers, told, doing="scoring")
    library = language_library() if options.language else ""
    check_has_image(images, source.roles, options.role)

    def in_role(name: str) -> str:
        """Return the name of a column, or the beginning of one, of the image that is scored."""
        return "_".join(filter(None, (options.role, name)))

    models = [find_score_model(in_role(name), place, told) for name, place in options.model]
    heads = [
        (in_role(column), name and in_role(name), place) for column, name, place in options.head
    ]
    models = _with_heads(with_labels(models, options.label), heads)
    models = [_settle_model(model, options) for model in models]
    of_captions = COLUMNS if options.language else {}
    columns = score_columns(models, of_captions, role_columns(source.roles))
    device = worker_plan.device
    usual = "fp32" if device == "cpu" else "fp16"
    dtype = usual if options.dtype == "auto" else options.dtype
    known, fields = _try(models, dtype, told)
    settings = {
        "latents": "none",
        "layout": layout(fields),
        "max_area": options.max_area,
        "resolution": source.resolution,
        SCORES: {
            "columns": columns,
            "language": library,
            "models": known,
            **({"role": options.role} if options.role else {}),
        },
        "text": "none",
    }
    dataset = plan_dataset(
        out,
        source,
        first_shards(source.shards, options.limit, source.count),
        settings,
        overwrite=options.overwrite,
        redo_changed=options.redo_changed,
        compared=listener.on_comparison,
    )
    job = EncodeJob(
        tars=source.tars,
        make_encoder=partial(make_encoder, models, device, dtype),
        worker_plan=worker_plan,
        max_area=options.max_area,
        batch_size=int(options.batch_size) or (CPU_BATCH if device == "cpu" else GPU_BATCH),
    )
    plan = RunPlan(source=replace(source, shards=()), job=job, datasets=(dataset,))
    return plan, ", ".join(filter(None, [*(model.name for model in models), library]))


def _with_heads(models: Sequence[ScoreModel], wanted: Sequence[WantedHead]) -> list[ScoreModel]:
    """Read the heads, and return the models with each head on the model that it is for.

    That is the model that the head names, or the only one with embeddings. Raise UsageError if no
    model fits, or if several do.
    """
    with_heads = list(models)
    for column, prefix, place in wanted:
        able = [
            number
            for number, model in enumerate(models)
            if model.role != CLASSIFIER and prefix in ("", model.prefix)
        ]
        if len(able) != 1:
            raise UsageError(
                f"--head {place} needs the embedding of one model, and {len(able)} that it may "
                "mean have one: give a --model with an embedding, or choose one by "
                "MODEL.COLUMN=FILE"
            )
        model = with_heads[able[0]]
        with_heads[able[0]] = replace(model, heads=(*model.heads, read_head(column, place)))
    return with_heads


def _settle_model(model: ScoreModel, options: ScoreOptions) -> ScoreModel:
    """Return the model with its processor, and the dtype in which its embeddings are kept, or "".

    Raise UsageError if nothing of the model would be kept.
    """
    kept = options.embedding
    if model.role == CLASSIFIER or kept == "none":
        kept = ""
    elif kept == "auto":
        kept = "" if model.columns else "fp32"
    if not (kept or model.columns):
        raise UsageError(
            f"nothing would be kept of {model.name}, which gives only an embedding: give "
            "--embedding fp16, or a --head"
        )
    return replace(model, processor=options.processor, embedding=kept)


def _try(
    models: Sequence[ScoreModel], dtype: str, told: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[Field]]:
    """Load and try each model, and tell the user what it is.

    Return the settings of each, and the fields of the embeddings that are kept.
    """
    settings: list[dict[str, Any]] = []
    fields: list[Field] = []
    for model in models:
        from wdsprep.scoring.networks import try_model  # torch

        processor, width = try_model(model)
        told(f"{model.name}: {model.role}, {processor}")
        settings.append(settings_of(model, processor, dtype))
        if model.embedding:
            fields.append(Field(name=model.member, dtype=STORED[model.embedding], shape=(width,)))
    return settings, fields
