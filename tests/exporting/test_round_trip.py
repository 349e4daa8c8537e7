"""What is exported is imported again: both rooms have one mind about each layout."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wdsprep
from tests.exporting.test_export import FLUX
from tests.importing.test_import import of_sample
from tests.kit.joined_sets import LATENTS, VARIED, Images, write_part
from wdsprep.errors import UsageError

IMAGES = Images(sizes=(5, 4))
VAE = {"scale": 0.3611, "shift": 0.1159}
ROUNDED = {"rtol": 2**-8}
"""To bfloat16."""


def there_and_back(
    root: Path, to: str, fields: Any, latents: str, **options: Any
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each sample as it was and as it comes back."""
    more = {**VAE, "latents": latents}
    ours = write_part(str(root / "ours"), IMAGES, fields, more=more)
    wdsprep.export(ours, root / "out", to=to)
    back = wdsprep.import_(root / "out", root / "back", resolution=256, **options)
    assert back.samples == 9
    assert {Path(shard.name).parent.name for shard in back.manifest.shards} == {"256"}
    assert not wdsprep.verify(str(root / "back")).findings
    keys = [IMAGES.key(n, at) for n, count in enumerate(IMAGES.sizes) for at in range(count)]
    both = [tuple(of_sample(root / name, key) for name in ("ours", "back")) for key in keys]
    has_captions = (to, latents, fields) != ("parquet", "moments", FLUX)  # as MLPerf's have not
    assert all(back["txt"] == ours["txt"].strip() * has_captions for ours, back in both)
    return both  # type: ignore[return-value]


def test_mds_brings_back_moments_and_embeddings_of_their_length(tmp_path: Path) -> None:
    """And goes out once more, to what it was; PRX has no columns of sizes that nobody knows."""
    fields = (*LATENTS, *VARIED)
    for ours, back in there_and_back(tmp_path, "mds", fields, "moments", **VAE):
        assert np.allclose(ours["latent"], back["latent"], atol=4e-3)
        assert np.array_equal(ours["pooled"], back["pooled"])
        assert np.array_equal(ours["emb"], back["emb"])
    again = wdsprep.export(tmp_path / "back", tmp_path / "again", to="mds", tower="t")
    assert again.samples == 9


def test_mds_brings_back_a_latent_as_the_vae_gave_it(tmp_path: Path) -> None:
    for ours, back in there_and_back(tmp_path, "mds", LATENTS, "sample", **VAE):
        mean, logvar = np.split(back["latent"], 2)
        assert np.allclose((mean - VAE["shift"]) * VAE["scale"], ours["latent"], atol=4e-3)
        assert logvar.max() < -40


def test_parquet_brings_back_arrays_to_the_bit(tmp_path: Path) -> None:
    for ours, back in there_and_back(tmp_path, "parquet", FLUX, "sample"):
        assert all(np.array_equal(ours[name], back[name]) for name in ("latent", "emb", "pooled"))
    with pytest.raises(UsageError, match="imported latents of unknown scale"):
        wdsprep.export(tmp_path / "back", tmp_path / "mds", to="mds")


@pytest.mark.parametrize(
    ("to", "kind", "options"),
    [("parquet", "moments", {}), ("primus", "moments", VAE), ("primus", "sample", {})],
)
def test_mlperf_and_primus_round_to_bfloat16(
    to: str, kind: str, options: dict[str, float], tmp_path: Path
) -> None:
    for ours, back in there_and_back(tmp_path, to, FLUX, kind, **options):
        for name in ("latent", "emb", "pooled"):
            assert np.allclose(ours[name], back[name], **ROUNDED)


def test_wids_brings_back_the_latent(tmp_path: Path) -> None:
    for ours, back in there_and_back(tmp_path, "wids", FLUX, "sample"):
        assert np.array_equal(ours["latent"], back["latent"])


def test_primus_pads_bfloat16_as_it_is(tmp_path: Path) -> None:
    for ours, back in there_and_back(tmp_path, "primus", (*LATENTS, *VARIED), "sample"):
        there = len(ours["emb"])
        assert np.array_equal(back["emb"][:there], ours["emb"])
        assert not back["emb"][there:].any()
