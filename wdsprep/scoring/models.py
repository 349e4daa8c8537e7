"""The search for models that score: they are found, fetched and checked before weights are loaded.

The files of a model say what it is: config.json names its class, by which transformers' Auto
classes load it, and its image processor has a file of its own. Only safetensors are read, and no
code that comes with a model is run. This module does not import torch.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from wdsprep.dataset.sample_table import IMAGE_COLUMNS, LATENT_COLUMNS
from wdsprep.dataset.settings import NUMBER
from wdsprep.encoding.models.config_files import (
    PROCESSORS,
    Config,
    check_sides,
    fetch_configs,
    of_images,
    unsuitable,
)
from wdsprep.encoding.models.load_networks import explain_load_errors
from wdsprep.encoding.models.model_files import (
    LocalModel,
    ModelFiles,
    fetch_files,
    find_files,
    weight_files,
)
from wdsprep.errors import UsageError, WorkError
from wdsprep.scoring.heads import Head
from wdsprep.scoring.options import NAME, PRESETS, WantedLabel
from wdsprep.text import brief, examples, plural, shortened

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER = frozenset(
    {"added_tokens.json", "special_tokens_map.json", "tokenizer.json"}
    | {"vocab.json", "merges.txt", "vocab.txt", "spiece.model", "tokenizer.model"}
)
CLASSIFIER, DUAL, ENCODER = "classifier", "dual encoder", "encoder"
"""The roles in which a model is used."""
MOST_LABELS = 64
"""The most labels that a model may have without the user saying which are wanted."""
RESERVED = frozenset(
    {"emb", "emb_mask", "image", "json", "latent", "made", "pixels", "pooled", "samples", "shape"}
    | {"txt", *IMAGE_COLUMNS, *LATENT_COLUMNS}
)
"""Names that the json of images, tables or batches use already."""
ANOTHER = "which wdsprep never does: choose another --model"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreModel(LocalModel):
    """A model on this machine, and the columns that it gives; picklable, for workers to load it."""

    prefix: str
    """The prefix of its columns' names, or nothing."""
    role: str
    labels: Mapping[int, str] = field(default_factory=dict)
    """the columns of a classifier, by the number of its output"""
    activation: str = ""
    """The function that makes probabilities of its outputs: softmax, sigmoid or nothing."""
    heads: tuple[Head, ...] = ()
    processor: str = "auto"
    """the kind of the image processor that is wanted"""
    embedding: str = ""
    """the dtype of the embeddings that are kept, or nothing"""

    @property
    def columns(self) -> tuple[str, ...]:
        is_dual = self.role == DUAL
        of_outputs = (self.column("similarity"),) if is_dual else self.labels.values()
        return (*of_outputs, *(head.column for head in self.heads))

    @property
    def member(self) -> str:
        """Return the name of the array of embeddings in a sample."""
        return f"{self.column('image_emb')}.npy"

    def column(self, name: str) -> str:
        return f"{self.prefix}_{name}" if self.prefix else name


def find_score_model(
    prefix: str, name: str, told: Callable[[str], None] = lambda _line: None
) -> ScoreModel:
    """Return the model that a user named, with all of its files on this machine.

    Files that are missing are downloaded from the hub. Raise UsageError if the model cannot score.
    """
    others = ", ".join(PRESETS)
    place = find_files(name, PRESETS, _files_of, others=others, patterns=(), tell=told)
    try:
        return _read_model(prefix, name, place)
    except OSError as error:
        raise WorkError(f"the files of {place.what} cannot be read: {error}") from error


def _files_of(place: ModelFiles) -> list[str]:
    """Return the files that a model needs, but for those of a tokenizer's vocabulary.

    They are a config, an image processor and weights in safetensors.
    """
    names = place.names()
    processors = [file for file in PROCESSORS if file in names] or [PROCESSORS[0]]
    tokenizer = [TOKENIZER_CONFIG] if TOKENIZER_CONFIG in names else []
    return [CONFIG, *processors, *tokenizer, *weight_files(names, "model")]


def _read_model(prefix: str, name: str, place: ModelFiles) -> ScoreModel:
    """Return the model in a folder or a repository.

    The configs are checked first, so that the weights of an unsuitable model are not downloaded.
    """
    files = _files_of(place)
    folder = fetch_configs(place, files, remedy=ANOTHER)
    processors = [of_images(Config.read(folder / file)) for file in PROCESSORS if file in files]
    if not any(processor.values for processor in processors):
        raise unsuitable(f"{place.what} has no image processor in {processors[0].path.name}")
    for processor in processors:
        check_sides(processor)
    config = Config.read(folder / CONFIG)
    with explain_load_errors(folder / CONFIG, "a config"):
        role = _role_of(place.what, config)
        labels, activation = _labels_of(place.what, config) if role == CLASSIFIER else ({}, "")
    vocabulary = TOKENIZER & place.names() if role == DUAL else ()
    return ScoreModel(
        name=name,
        prefix=prefix,
        **fetch_files(place, sorted({*files, *vocabulary})),
        role=role,
        labels=labels,
        activation=activation,
    )


def _role_of(what: str, config: Config) -> str:
    """Return the role of a model, by its class in transformers, or raise UsageError for others."""
    from transformers.models.auto import modeling_auto as auto

    kinds = config.get("architectures", [])
    kind = kinds[0] if isinstance(kinds, list) and kinds else ""
    model_type = config.get("model_type", "")
    if kind in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.values():
        return CLASSIFIER
    if model_type in auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        return DUAL
    if model_type in auto.MODEL_MAPPING_NAMES:
        return ENCODER
    shown = shortened(str(kind or model_type or "of no class"))
    raise UsageError(
        f"{what} is {shown}, which the transformers here does not know as a classifier or an "
        "encoder of images: install a newer one, or choose another --model"
    )


def _labels_of(what: str, config: Config) -> tuple[dict[int, str], str]:
    """Return the labels of a classifier by number, and the function that makes probabilities."""
    by_number = config.get("id2label", {})
    count = config.whole("num_labels", len(by_number) or 2)
    if not isinstance(by_number, dict) or len(by_number) != count:
        by_number = {number: f"LABEL_{number}" for number in range(count)}
    try:
        labels = {int(number): str(label) for number, label in by_number.items()}
    except ValueError:
        labels = {}
    if sorted(labels) != list(range(count)):
        why = f"that does not number its {count} labels"
        raise unsuitable(f"{what} has an id2label in its config {why}")
    problem = config.get("problem_type")
    is_plain = problem == "regression" or (count == 1 and not problem)
    several = "sigmoid" if problem == "multi_label_classification" else "softmax"
    return labels, "" if is_plain else several


def with_labels(models: Sequence[ScoreModel], wanted: Sequence[WantedLabel]) -> list[ScoreModel]:
    """Return the models, the classifiers among them with the columns of the labels that they keep.

    A classifier keeps the labels that `wanted` names, in upper or lower case. If none of its labels
    is named, it keeps all, in columns with names in lower case. Raise UsageError if a wanted label
    is in no classifier, or if all labels of a classifier are too many or cannot name columns.
    """
    labels = [label for model in models for label in model.labels.values()]
    there = {label.casefold() for label in labels}
    if lost := [label for label, _ in wanted if label.casefold() not in there]:
        raise UsageError(
            f"no model has the label {brief(lost[0])}: give labels that a classifier has"
            + (f", such as {examples(labels)}" if labels else "")
        )
    columns = {label.casefold(): column for label, column in wanted}
    return [replace(model, labels=_kept_labels(model, columns)) for model in models]


def _kept_labels(model: ScoreModel, columns: Mapping[str, str]) -> dict[int, str]:
    """Return the columns of the labels of a model that are kept, by the number of the output."""
    numbered = sorted(model.labels.items())
    named = {n: columns[label.casefold()] for n, label in numbered if label.casefold() in columns}
    if not named:
        labels = [label for _, label in numbered]
        if len(labels) > MOST_LABELS:
            raise UsageError(
                f"{model.name} has {plural(len(labels), 'label')} ({examples(labels)}): choose "
                "some, with --label LABEL or --label LABEL=COLUMN for each"
            )
        if wrong := [brief(label) for label in labels if not NAME.fullmatch(label)]:
            raise UsageError(
                f"{model.name} has the label {wrong[0]}, which cannot be the name of a column: "
                f"give the labels to keep, as --label {wrong[0]}=COLUMN"
            )
        named = {number: label.lower() for number, label in numbered}
    return {number: model.column(column) for number, column in named.items()}


def score_columns(
    models: Sequence[ScoreModel], of_captions: Mapping[str, str], in_roles: Collection[str]
) -> dict[str, str]:
    """Return the type of each column of models and of captions.

    Raise UsageError if two models give a column or an array of the same name, or if a column has a
    name that samples or batches use already: `in_roles` are those of columns of images in roles.
    SQL takes names that differ in capital letters alone as the same.
    """
    columns = [name for model in models for name in model.columns]
    names = [*columns, *of_captions, *(model.member for model in models if model.embedding)]
    seen = Counter(map(str.lower, names))
    if twice := [name for name in names if seen[name.lower()] > 1]:
        raise UsageError(
            f"two models give the column {brief(twice[0])}: give --model another NAME=, or "
            "--label LABEL=COLUMN"
        )
    reserved = RESERVED.union(in_roles)
    if taken := [name for name in columns if name.lower() in reserved]:
        raise UsageError(
            f"a column cannot be named {taken[0]}, as samples use that name already: give --label "
            "LABEL=COLUMN, or --model NAME=MODEL"
        )
    return {**dict.fromkeys(columns, NUMBER), **of_captions}


def settings_of(model: ScoreModel, processor: str, dtype: str) -> dict[str, Any]:
    """Return the settings of a model that decide the bytes of scores."""
    heads = {head.column: head.digest for head in model.heads}
    return {
        "columns": list(model.columns),
        "dtype": dtype,
        "embedding": model.member if model.embedding else "",
        "processor": processor,
        "weights": model.weights,
        **({"heads": heads} if heads else {}),
    }
