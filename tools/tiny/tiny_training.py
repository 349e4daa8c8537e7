"""Train the toy autoencoder of encoding/models/tiny on drawings, on one core of a CPU, in minutes.

Its encoder is thin where pictures are large, since tests run it hundreds of times. It begins as a
network that scales pictures down and up again, set by hand and by least squares, and learns the
rest from crops; the average of the late weights is kept. Then latents are shifted and scaled within
the network, so that over drawings latents times SCALE have mean 0 and deviation 1 in every channel,
which changes no picture that the decoder makes.
"""

import copy
import random

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, interpolate, unfold

from tools.tiny.drawings import draw

SCALE = 0.18215  # as Stable Diffusion's
SIDE = 256
TRAINED, HELD_OUT, PAINTED = 1000, 48, 150
STEPS, CROPS, CROP = 1000, 4, 128
RATE = 1e-3
WARM_UP = 0.1
LEVEL = 8.0
FITTED, FITTED_LARGE = 24, 6
NOISE = 0.05  # within latents of deviation 1, so that near ones look alike
LOGVAR = -6.0
AVERAGING = 0.995
SHOWN_EVERY = 200


def new_vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(16, 24, 48, 64),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        sample_size=SIDE,
        scaling_factor=SCALE,
        force_upcast=False,
    )


@torch.no_grad()
def set_out(vae: AutoencoderKL, pictures: Tensor) -> None:
    """Begin as a network that scales pictures down and up again: convolutions of the main path
    pass on the first channels, a little blurred where sides change, and the blocks beside it do
    nearly nothing. Training then has to find the details alone, not the colours."""
    for name, layer in vae.named_modules():
        if name.endswith(("conv2", "to_out.0")):
            layer.weight *= 0.1
        elif name.endswith(("conv_shortcut", "samplers.0.conv", "coder.conv_in")):
            layer.weight *= 0.1
            pass_on(layer.weight, blurred="samplers" in name)
    # A norm takes a picture's mean and contrast away, unless its group holds more than that.
    vae.encoder.mid_block.resnets[1].conv2.bias[8:16] += LEVEL * torch.tensor([1.0, -1.0] * 4)
    vae.decoder.up_blocks[3].resnets[1].conv2.bias[3] += LEVEL
    for conv in (vae.quant_conv, vae.post_quant_conv):
        conv.weight.copy_(torch.eye(conv.out_channels)[:, :, None, None])
        conv.bias.zero_()
    wanted = pictures.float() / 127.5 - 1
    fit(vae.encoder, wanted, avg_pool2d(wanted, 8))
    latents = vae.encode(wanted).latent_dist.mean
    vae.encoder.conv_out.weight[3] /= 2 * latents[:, 3].std()
    few = wanted[:FITTED_LARGE]
    fit(vae.decoder, vae.encode(few).latent_dist.mean, few)


def pass_on(weight: Tensor, *, blurred: bool) -> None:
    for channel in range(min(weight.shape[:2])):
        kernel = weight[channel, channel]
        middle = slice(kernel.shape[0] // 2, kernel.shape[0] // 2 + 1)
        part = kernel if blurred else kernel[middle, middle]
        part += 1 / part.numel()


def fit(half: nn.Module, given: Tensor, wanted: Tensor) -> None:
    """Set the first rows of a half's last convolution by least squares."""
    conv, half.conv_out = half.conv_out, nn.Identity()
    columns = unfold(half(given), 3, padding=1).transpose(0, 1).flatten(1)
    half.conv_out = conv
    columns = torch.cat([columns, torch.ones(1, columns.shape[1])]).double()
    gram = columns @ columns.T
    gram += 1e-6 * gram.trace() / len(gram) * torch.eye(len(gram))
    found = torch.linalg.solve(gram, columns @ wanted.transpose(0, 1).flatten(1).double().T).T
    rows = wanted.shape[1]
    conv.weight[:rows] = found[:, :-1].reshape(conv.weight[:rows].shape)
    conv.bias[:rows] = found[:, -1]


def train(seed: int) -> AutoencoderKL:
    torch.manual_seed(seed)
    random.seed(seed)
    pictures = torch.cat([drawings("train", TRAINED), paintings(PAINTED)])
    held_out = drawings("held out", HELD_OUT)
    vae = new_vae().to(memory_format=torch.channels_last)
    set_out(vae, pictures[:FITTED])
    average = copy.deepcopy(vae).requires_grad_(False)
    optimiser = torch.optim.AdamW(vae.parameters(), lr=RATE, weight_decay=1e-4, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, STEPS, pct_start=WARM_UP)
    for step in range(STEPS):
        if step % SHOWN_EVERY == 0:
            psnr = quality(average, held_out[:16]).mean()
            print(f"step {step} of {STEPS}: PSNR of other drawings {psnr:.2f} dB", flush=True)
        loss = loss_of(vae, batch_of(pictures))
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        follow(average, vae, min(AVERAGING, (step + 1) / (step + 11)))
    print(f"PSNR of other drawings {quality(average, held_out).mean():.2f} dB")
    return spread(average, pictures[:64])


def batch_of(pictures: Tensor) -> Tensor:
    crops = [crop(pictures[random.randrange(len(pictures))], CROP) for _ in range(CROPS)]
    batch = torch.stack(crops).float() / 127.5 - 1
    return batch.to(memory_format=torch.channels_last)


def crop(picture: Tensor, side: int) -> Tensor:
    """A place of the picture; now and then a mirror image, or in other colours."""
    top, left = random.randrange(SIDE - side + 1), random.randrange(SIDE - side + 1)
    found = picture[:, top : top + side, left : left + side]
    found = found.flip(-1) if random.random() < 0.5 else found
    return found[random.sample(range(3), 3)] if random.random() < 0.3 else found


def loss_of(vae: AutoencoderKL, batch: Tensor) -> Tensor:
    means = vae.encode(batch).latent_dist.mean
    made = vae.decode(means + NOISE * torch.randn_like(means)).sample
    away = made - batch
    coarse = avg_pool2d(away, 8).square().mean()
    size = means.square().mean() - 1
    return away.square().mean() + 0.1 * away.abs().mean() + coarse + 0.01 * size.square()


@torch.no_grad()
def follow(average: AutoencoderKL, vae: AutoencoderKL, kept: float) -> None:
    for one, other in zip(average.parameters(), vae.parameters(), strict=True):
        one.lerp_(other, 1 - kept)


@torch.no_grad()
def quality(vae: AutoencoderKL, pictures: Tensor) -> Tensor:
    """The PSNR of each picture, in dB, through the means of its latents."""
    found = []
    for part in pictures.split(8):
        wanted = part.float() / 127.5 - 1
        made = vae.decode(vae.encode(wanted).latent_dist.mean).sample.clamp(-1, 1)
        found.append(-10 * torch.log10((made - wanted).square().flatten(1).mean(1) / 4))
    return torch.cat(found)


@torch.no_grad()
def spread(vae: AutoencoderKL, pictures: Tensor) -> AutoencoderKL:
    """Move a scale and a shift from the far side of the latents to the near one, and make the
    log-variances small and nearly constant."""
    near, far = vae.quant_conv, vae.post_quant_conv
    parts = [vae.quant_conv(vae.encoder(part.float() / 127.5 - 1)) for part in pictures.split(8)]
    found = torch.cat(parts).transpose(0, 1).flatten(1)
    deviation, centre = found[:4].std(1) * SCALE, found[:4].mean(1)
    near.bias[:4] = (near.bias[:4] - centre) / deviation
    near.weight[:4] /= deviation[:, None, None, None]
    near.weight[4:] *= 0.5 / found[4:].std()
    near.bias[4:] = LOGVAR
    far.bias += far.weight[:, :, 0, 0] @ centre
    far.weight *= deviation[None, :, None, None]
    return vae


def drawings(seed: str, count: int) -> Tensor:
    """uint8 squares, cut as `encode` cuts them."""
    sizes = random.Random(seed)
    found = []
    for number in range(count):
        size = (sizes.randrange(256, 560), sizes.randrange(256, 560))
        image = draw(f"{seed} {number}", size).image
        square = ImageOps.fit(image, (SIDE, SIDE), Image.Resampling.BICUBIC)
        found.append(torch.from_numpy(np.array(square)).permute(2, 0, 1))
    return torch.stack(found)


def paintings(count: int) -> Tensor:
    """With the look of photographs to a filter: shapes, shades and grain at all sizes."""
    picture = torch.zeros(count, 3, SIDE, SIDE)
    for level in range(1, 9):
        noise = torch.randn(count, 3, 2**level, 2**level)
        mixed = noise + 1.5 * noise.mean(1, keepdim=True)
        picture += interpolate(mixed, SIDE, mode="bilinear") / 1.6**level
    edges = torch.sign(picture.mean(1, keepdim=True)) * torch.rand(count, 3, 1, 1)
    return ((picture + 0.4 * edges).clamp(-1, 1) * 127.5 + 127.5).byte()
