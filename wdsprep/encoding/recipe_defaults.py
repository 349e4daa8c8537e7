"""Defaults of a recipe, chosen for a model and a device, and the settings that follow."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wdsprep.dataset.npy_arrays import layout
from wdsprep.dataset.samples import is_mask
from wdsprep.dataset.shapes import shape_name
from wdsprep.encoding import HALF, TF32
from wdsprep.encoding.gpus import has_bf16, has_tf32
from wdsprep.encoding.models.presets import PRESETS
from wdsprep.encoding.recipe_options import ALIGNED, MASK_RULES, PIPELINE, SHAPES, Encode
from wdsprep.encoding.sample_arrays import fields
from wdsprep.errors import UsageError
from wdsprep.images.nearest_shape import DECODE
from wdsprep.limits import MAX_AREA, MAX_NBYTES

if TYPE_CHECKING:
    from wdsprep.encoding.models.find_model import Model


def settle_recipe(recipe: Encode, model: "Model", device: str) -> "tuple[Encode, Model]":
    """Return the recipe with its defaults filled in, and the model with the arrays that it makes.

    A pipeline is asked for its arrays in a dry run; torch is imported only then.
    """
    recipe = with_defaults(recipe, model, device)
    if not model.pipeline_kind:
        return recipe, model
    from wdsprep.encoding.models.dry_run import find_outputs

    return recipe, find_outputs(model, recipe)


def with_defaults(recipe: Encode, model: "Model", device: str) -> Encode:
    """Return the recipe with the values that depend on the model and the device filled in.

    Raise UsageError if the model cannot encode the resolution or the shapes.
    """
    if not recipe.is_of_text:
        check_multiples(model, recipe)
    text_length = recipe.text_length
    if model.components and not text_length:
        preset = PRESETS.get(model.name.partition("@")[0])
        text_length = preset.text_length if preset else 0
    elif text_length and not model.components:
        raise UsageError(
            f"--text-length cannot be chosen for {model.name}, whose text has one length: leave it "
            "out"
        )
    return replace(
        recipe,
        latents=latents_of(recipe.latents, model),
        dtype=recipe.dtype if recipe.dtype != "auto" else choose_dtype(recipe, model, device),
        role_size=tuple(_role_sizes(recipe, model)),
        text_length=text_length,
    )


def check_multiples(model: "Model", recipe: Encode) -> None:
    """Raise UsageError if a side of an image would not be a multiple of what the model needs."""
    sides = [(recipe.resolution, f"--resolution {recipe.resolution}")]
    lists = {"--shapes": recipe.sizes}
    lists |= {f"--role-size {role}": sizes for role, sizes in recipe.shape_lists.items()}
    for option, sizes in lists.items():
        for size in sizes:
            sides += [(side, f"{option}: {side} of {shape_name(size)}") for side in size]
    multiple = model.multiple
    for side, what in sides:
        if side % multiple:
            below = side // multiple * multiple
            near = f"{below} or {below + multiple}" if below else multiple
            why = f"is not a multiple of {multiple}, as {model.name} needs"
            raise UsageError(f"{what} {why}: give {near}")


def _role_sizes(recipe: Encode, model: "Model") -> Iterator[tuple[str, Any]]:
    """Yield the rule for each role: by default the pipeline's own, if it takes references.

    Raise UsageError if it takes none, and its rule is asked for.
    """
    rules = recipe.rules
    unsettled = [role for role in recipe.images_in_roles if rules.get(role, PIPELINE) == PIPELINE]
    is_taken = False
    if any(not is_mask(role) for role in unsettled) and model.pipeline_kind:
        from wdsprep.encoding.models.encode_prompt import takes_references  # torch

        is_taken = takes_references(model)
    for role in recipe.images_in_roles:
        if is_mask(role):
            yield role, rules.get(role, MASK_RULES[0])
            continue
        if rules.get(role) == PIPELINE and not is_taken:
            raise UsageError(
                f"--role-size {role}={PIPELINE}: {model.pipeline_kind or model.name} takes no "
                f"reference images: give {role}={ALIGNED}, or a list of shapes"
            )
        yield role, rules.get(role, PIPELINE if is_taken else ALIGNED)


def latents_of(wanted: str, model: "Model") -> str:
    if wanted == "none":
        return wanted
    if model.is_sampled:
        return "sample" if wanted == "auto" else wanted
    if wanted not in ("auto", "mean"):
        raise UsageError(
            f"--latents {wanted} needs a distribution, but the VAE of {model.name} "
            f"({model.vae_kind}) gives the latents themselves: leave --latents out"
        )
    return "mean"


def choose_dtype(recipe: Encode, model: "Model", device: str) -> str:
    """Return the dtype that `auto` stands for on a device: fp32 on a CPU.

    On a GPU, text encoders get their half precision, and a VAE gets fp16 if it does not overflow in
    it. Other VAEs get TF32, or fp32 on a GPU without it, as bf16 deviates more than fp16. If text
    encoders may need bf16 and the GPU lacks it, all networks get fp32.
    """
    if device != "cuda" or (recipe.is_of_text and recipe.text != "emb"):
        return "fp32"
    vae = "fp16" if model.fits_fp16 else TF32 if has_tf32() else "fp32"
    if recipe.text != "emb":
        return vae
    if model.components and not has_bf16():
        return "fp32"
    text = HALF if model.components else "fp16"
    return text if recipe.is_of_text or text == vae else f"{HALF}+{vae}"


def settings_of(model: "Model", recipe: Encode) -> dict[str, Any]:
    """Return the settings that decide the bytes of a dataset encoded with a model and a recipe.

    They include what a reader needs to know about the arrays. Limits and shapes of images are
    included if they are not the defaults. Two things are left out: what `encode` adds of captions
    that it joins, and, in a recipe for text alone, crop, seed, VAE, roles, shapes and limits.
    """
    of_images = {"crop": "centre", DECODE: recipe.decode, "seed": recipe.seed}
    of_images |= model.latent_settings
    if recipe.images_in_roles:
        lists = recipe.shape_lists
        sizes = {role: SHAPES if role in lists else rule for role, rule in recipe.rules.items()}
        of_images |= {"roles": list(recipe.roles), "role_sizes": sizes}
        shapes = {role: list(map(list, sizes)) for role, sizes in lists.items()}
        of_images |= {"role_shapes": shapes} if shapes else {}
    limits: dict[str, tuple[Any, Any]] = {  # each with its default
        "max_area": (recipe.max_area, MAX_AREA),
        "max_crop": (recipe.max_crop, 1.0),
        "upscale": (recipe.upscale, 1.0),
        "shapes": (list(map(list, recipe.sizes)), []),
    }
    if recipe.is_of_text:
        of_images, limits = {}, {}
    limits["max_bytes"] = recipe.max_bytes, MAX_NBYTES
    return {
        "dtype": recipe.dtype,
        "latents": recipe.latents,
        "layout": layout(fields(model, recipe)),
        "resolution": recipe.resolution,
        "text": recipe.text,
        "weights": model.weights,
        **of_images,
        **model.text_settings,
        **({"flip": True} if recipe.flip else {}),
        **{name: limit for name, (limit, usual) in limits.items() if limit != usual},
    }
