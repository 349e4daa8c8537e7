"""What drawings are painted with: named colours, and textures of two shades of one.

A texture is a mask that says where the second shade is.
"""

from collections.abc import Callable, Iterable
from random import Random

from PIL import Image, ImageDraw

Size = tuple[int, int]
Colour = tuple[int, int, int]

COLOURS: dict[str, Colour] = {
    "black": (25, 25, 30),
    "blue": (45, 90, 200),
    "brown": (130, 85, 50),
    "green": (60, 150, 70),
    "grey": (135, 135, 140),
    "orange": (235, 140, 45),
    "pink": (240, 150, 180),
    "purple": (125, 65, 160),
    "red": (205, 50, 45),
    "white": (240, 240, 235),
    "yellow": (245, 215, 70),
}
FINEST = 4  # no stripe, dot or square is smaller than this, in pixels


def _plain(_random: Random, size: Size) -> Image.Image:
    return Image.new("L", size, 0)


def _striped(random: Random, size: Size) -> Image.Image:
    mask = Image.new("L", size, 0)
    canvas = ImageDraw.Draw(mask)
    step = max(FINEST * 2, min(size) // random.randint(4, 12))
    lean = random.choice((0.0, 0.5, 1.0)) * size[1]
    for left in range(-size[1], size[0] + size[1], step):
        canvas.line((left, 0, left + lean, size[1]), fill=255, width=step // 2)
    return mask.transpose(Image.Transpose.ROTATE_90).resize(size) if random.random() < 0.3 else mask


def _checkered(random: Random, size: Size) -> Image.Image:
    side = max(FINEST, min(size) // random.randint(4, 12))
    across, down = size[0] // side + 1, size[1] // side + 1
    cells = bytes(255 * ((x + y) % 2) for y in range(down) for x in range(across))
    small = Image.frombytes("L", (across, down), cells)
    scaled = small.resize((across * side, down * side), Image.Resampling.NEAREST)
    return scaled.crop((0, 0, *size))


def _dotted(random: Random, size: Size) -> Image.Image:
    mask = Image.new("L", size, 0)
    canvas = ImageDraw.Draw(mask)
    step = max(FINEST * 2, min(size) // random.randint(4, 10))
    for y in range(step // 2, size[1], step):
        for x in range(step // 2, size[0], step):
            canvas.circle((x, y), step / 4, fill=255)
    return mask


def _shaded(random: Random, size: Size) -> Image.Image:
    turns = Image.linear_gradient("L").rotate(random.randrange(360), expand=False, fillcolor=128)
    middle = turns.crop((38, 38, 218, 218))
    return middle.resize(size, Image.Resampling.BICUBIC)


def _glowing(_random: Random, size: Size) -> Image.Image:
    return Image.radial_gradient("L").resize(size, Image.Resampling.BICUBIC)


def cloudy(random: Random, size: Size) -> Image.Image:
    """Noise at several scales, the coarse ones strongest, as in clouds and in most photographs."""
    mask = Image.new("L", size, 128)
    for cells, share in ((3, 0.6), (7, 0.4), (15, 0.3), (40, 0.2)):
        shape = (cells, max(2, cells * size[1] // size[0]))
        noise = Image.frombytes("L", shape, random.randbytes(shape[0] * shape[1]))
        mask = Image.blend(mask, noise.resize(size, Image.Resampling.BICUBIC), share)
    return mask


TEXTURES: dict[str, Callable[[Random, Size], Image.Image]] = {
    "plain": _plain,
    "striped": _striped,
    "checkered": _checkered,
    "dotted": _dotted,
    "shaded": _shaded,
    "glowing": _glowing,
    "cloudy": cloudy,
}


def filled(random: Random, size: Size, texture: str, one: Colour, other: Colour) -> Image.Image:
    mask = TEXTURES[texture](random, size)
    return Image.composite(Image.new("RGB", size, other), Image.new("RGB", size, one), mask)


def grainy(random: Random, image: Image.Image) -> Image.Image:
    """As film is, a little."""
    size = (image.width // 2 + 1, image.height // 2 + 1)
    grain = Image.frombytes("L", size, random.randbytes(size[0] * size[1])).resize(image.size)
    return Image.blend(image, grain.convert("RGB"), 0.08)


def tinted(random: Random, name: str) -> Colour:
    """The colour as a painter would mix it this time."""
    return clipped(value + random.randint(-15, 15) for value in COLOURS[name])


def near(random: Random, name: str) -> Colour:
    """Lighter or darker, so that a textured thing still has its colour's name."""
    is_light = sum(COLOURS[name]) > 380
    shift = random.randint(35, 80)
    shift = -shift if is_light else shift
    return clipped(value + shift for value in COLOURS[name])


def clipped(values: Iterable[int]) -> Colour:
    red, green, blue = (min(255, max(0, value)) for value in values)
    return red, green, blue
