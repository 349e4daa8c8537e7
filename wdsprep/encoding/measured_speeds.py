"""Speeds that trials of `encode --limit` have measured, scaled to what is planned."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from wdsprep.dataset.stored_dataset import open_dataset
from wdsprep.encoding.cost_estimate import VAE_GFLOPS, Choice, Speed, gflops
from wdsprep.encoding.models.presets import PRESETS
from wdsprep.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A speed that was measured, with the model and the options that it was measured with."""

    speed: Speed
    model: str
    latents: str
    flip: bool
    text: str

    def choice_like(self, choice: Choice) -> Choice:
        """Return `choice` with the model and the options of this trial in place of its own.

        If the operations of the trial's model are not known, the model of `choice` stays.
        """
        known = self.model in PRESETS and PRESETS[self.model].vae in VAE_GFLOPS
        model = self.model if known else choice.model
        return replace(choice, text=self.text, latents=self.latents, flip=self.flip, model=model)


def read_trial(url: str) -> tuple[int, Trial]:
    """Return the resolution of a dataset, and the trial that `encode --limit` left in its manifest.

    Raise UsageError if there is no trial.
    """
    _, manifest = open_dataset(url)
    trial = manifest.extra.get("trial")
    if manifest.dataset != "latents" or trial is None:
        raise UsageError(f'{url} is not a trial: make one with "wdsprep encode --limit N"')
    resolution, model = manifest.settings["resolution"], manifest.extra["model"]
    what = f"{model} on {trial['device']} at {resolution}"
    launching = f", launching {trial['launching']:.0%}" if "launching" in trial else ""
    source = f"measured with {what}, busy {trial['busy']:.0%} of the time{launching}"
    speed = Speed(each=trial["each"], source=source)
    latents, text = (manifest.settings[name] for name in ("latents", "text"))
    flip = manifest.settings.get("flip", False)
    return resolution, Trial(speed=speed, model=model, latents=latents, flip=flip, text=text)


def nearest_speed(tried: Mapping[int, Trial], resolution: int, choice: Choice) -> Speed:
    """Return the speed of the trial with the nearest resolution.

    If it had another resolution or other options, the speed is scaled by the operations.
    """
    at = min(tried, key=lambda other: abs(other - resolution))
    trial = tried[at]
    share = gflops(at, trial.choice_like(choice)) / gflops(resolution, choice)
    if share == 1:
        return trial.speed
    source = f"{trial.speed.source}, scaled by the operations"
    return Speed(each=trial.speed.each * share, source=source)
