"""Fixtures that give a test the folder of a small pipeline; it is made once a session.

It stands beside `tests.kit.families`, not in it: pytest imports it at each start, and that package
imports torch and diffusers, which takes seconds.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`family("Sana")`: its folder. Tests leave it as it is."""
    root = tmp_path_factory.mktemp("families")

    def made(name: str) -> Path:
        from tests.kit.families import small

        folder = root / name
        return folder if folder.is_dir() else small(name, folder)

    return made


@pytest.fixture
def small_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edit pipelines scale images to a sixteenth of their area: a megapixel takes seconds. Those of
    Flux 2, which take small images as they are, still scale down to a megapixel."""
    from diffusers import Kandinsky5I2IPipeline
    from diffusers.pipelines.flux import pipeline_flux_kontext as kontext

    rooms = ["longcat_image.pipeline_longcat_image_edit", "qwenimage21.pipeline_qwenimage21"]
    rooms += [f"qwenimage.pipeline_qwenimage_{kind}" for kind in ("edit", "edit_plus")]
    for name in filter(lambda name: find_spec(f"diffusers.pipelines.{name.split('.')[0]}"), rooms):
        module = import_module(f"diffusers.pipelines.{name}")
        whole = module.calculate_dimensions
        monkeypatch.setattr(
            module, "calculate_dimensions", lambda area, *ratio, of=whole: of(area // 16, *ratio)
        )
    sizes = [(width // 4, height // 4) for width, height in kontext.PREFERRED_KONTEXT_RESOLUTIONS]
    monkeypatch.setattr(kontext, "PREFERRED_KONTEXT_RESOLUTIONS", sizes)
    given = property(lambda _: [(256, 256), (320, 192), (160, 352)], lambda *_: None)
    monkeypatch.setattr(Kandinsky5I2IPipeline, "resolutions", given, raising=False)
