"""Draw pictures with captions, for the training of the toy model.

A drawing is a scene of shapes or a landscape, in named colours and textures, and its caption says
what is in it. It depends on its seed and its size alone. A change here changes the toy model.

A texture is a mask of the pixels that have the second shade of a colour.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw

PictureSize = tuple[int, int]
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


def _mask_plain(_random: Random, size: PictureSize) -> Image.Image:
    return Image.new("L", size, 0)


def _mask_stripes(random: Random, size: PictureSize) -> Image.Image:
    mask = Image.new("L", size, 0)
    canvas = ImageDraw.Draw(mask)
    step = max(FINEST * 2, min(size) // random.randint(4, 12))
    lean = random.choice((0.0, 0.5, 1.0)) * size[1]
    for left in range(-size[1], size[0] + size[1], step):
        canvas.line((left, 0, left + lean, size[1]), fill=255, width=step // 2)
    return mask.transpose(Image.Transpose.ROTATE_90).resize(size) if random.random() < 0.3 else mask


def _mask_checks(random: Random, size: PictureSize) -> Image.Image:
    side = max(FINEST, min(size) // random.randint(4, 12))
    across, down = size[0] // side + 1, size[1] // side + 1
    cells = bytes(255 * ((x + y) % 2) for y in range(down) for x in range(across))
    small = Image.frombytes("L", (across, down), cells)
    scaled = small.resize((across * side, down * side), Image.Resampling.NEAREST)
    return scaled.crop((0, 0, *size))


def _mask_dots(random: Random, size: PictureSize) -> Image.Image:
    mask = Image.new("L", size, 0)
    canvas = ImageDraw.Draw(mask)
    step = max(FINEST * 2, min(size) // random.randint(4, 10))
    for y in range(step // 2, size[1], step):
        for x in range(step // 2, size[0], step):
            canvas.circle((x, y), step / 4, fill=255)
    return mask


def _mask_gradient(random: Random, size: PictureSize) -> Image.Image:
    turns = Image.linear_gradient("L").rotate(random.randrange(360), expand=False, fillcolor=128)
    middle = turns.crop((38, 38, 218, 218))
    return middle.resize(size, Image.Resampling.BICUBIC)


def _mask_glow(_random: Random, size: PictureSize) -> Image.Image:
    return Image.radial_gradient("L").resize(size, Image.Resampling.BICUBIC)


def mask_clouds(random: Random, size: PictureSize) -> Image.Image:
    """Return noise at several scales, the coarse ones strongest, as in clouds and photographs."""
    mask = Image.new("L", size, 128)
    for cells, share in ((3, 0.6), (7, 0.4), (15, 0.3), (40, 0.2)):
        shape = (cells, max(2, cells * size[1] // size[0]))
        noise = Image.frombytes("L", shape, random.randbytes(shape[0] * shape[1]))
        mask = Image.blend(mask, noise.resize(size, Image.Resampling.BICUBIC), share)
    return mask


TEXTURES: dict[str, Callable[[Random, PictureSize], Image.Image]] = {
    "plain": _mask_plain,
    "striped": _mask_stripes,
    "checkered": _mask_checks,
    "dotted": _mask_dots,
    "shaded": _mask_gradient,
    "glowing": _mask_glow,
    "cloudy": mask_clouds,
}


def fill_texture(
    random: Random, size: PictureSize, texture: str, one: Colour, other: Colour
) -> Image.Image:
    """Return an image with a texture in two colours."""
    mask = TEXTURES[texture](random, size)
    return Image.composite(Image.new("RGB", size, other), Image.new("RGB", size, one), mask)


def add_grain(random: Random, image: Image.Image) -> Image.Image:
    """Return a copy of an image with some grain, as film has it."""
    size = (image.width // 2 + 1, image.height // 2 + 1)
    grain = Image.frombytes("L", size, random.randbytes(size[0] * size[1])).resize(image.size)
    return Image.blend(image, grain.convert("RGB"), 0.08)


def vary_colour(random: Random, name: str) -> Colour:
    """Return a named colour with a small random change."""
    return clip_colour(value + random.randint(-15, 15) for value in COLOURS[name])


def second_shade(random: Random, name: str) -> Colour:
    """Return a lighter or darker shade of a named colour, for the second shade of a texture."""
    is_light = sum(COLOURS[name]) > 380
    shift = random.randint(35, 80)
    shift = -shift if is_light else shift
    return clip_colour(value + shift for value in COLOURS[name])


def clip_colour(values: Iterable[int]) -> Colour:
    """Return a colour with its three values limited to 0 to 255."""
    red, green, blue = (min(255, max(0, value)) for value in values)
    return red, green, blue


Point = tuple[float, float]

NUMBERS = ("", "a", "two", "three")
REACHES = {"small ": 0.13, "": 0.19, "large ": 0.28}


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """A picture with its caption."""

    image: Image.Image
    caption: str


def draw(seed: object, size: PictureSize) -> Drawing:
    """Draw an RGB picture of a size, with its caption."""
    random = Random(f"{seed}")
    scene = _landscape if random.random() < 0.35 else _shapes
    image, caption = scene(random, size)
    if random.random() < 0.3:
        image = add_grain(random, image)
    return Drawing(image=image, caption=caption)


# --- scenes of shapes
def _ring(count: int, radii: tuple[float, ...], turn: float) -> list[Point]:
    """Return the corners of a shape around (0, 0), turned by an angle in radians.

    `count` is the number of corners. Their distances from the middle are `radii`, in turn.
    """
    angles = [turn + 2 * math.pi * number / count for number in range(count)]
    return [
        (
            math.sin(angle) * radii[number % len(radii)],
            -math.cos(angle) * radii[number % len(radii)],
        )
        for number, angle in enumerate(angles)
    ]


OUTLINES: dict[str, list[Point]] = {
    "circle": _ring(64, (1.0,), 0),
    "triangle": _ring(3, (1.0,), 0),
    "square": _ring(4, (1.0,), math.pi / 4),
    "diamond": _ring(4, (1.0, 0.6), 0),
    "hexagon": _ring(6, (1.0,), 0),
    "star": _ring(10, (1.0, 0.42), 0),
    "flower": _ring(60, (1.0, 1.0, 0.95, 0.8, 0.65, 0.55, 0.65, 0.8, 0.95, 1.0), 0),
    "moon": [
        *_ring(40, (1.0,), 0)[:21],
        *((x * 0.45, y) for x, y in reversed(_ring(40, (1.0,), 0)[:21])),
    ],
}


def _shapes(random: Random, size: PictureSize) -> tuple[Image.Image, str]:
    texture = random.choice(list(TEXTURES))
    ground = random.choice(list(COLOURS))
    image = fill_texture(
        random, size, texture, vary_colour(random, ground), second_shade(random, ground)
    )
    names = random.sample(list(OUTLINES), random.randint(1, 3))
    places = random.sample([(x, y) for x in (0.22, 0.5, 0.78) for y in (0.25, 0.5, 0.75)], 5)
    said = []
    for name in names:
        colour = random.choice([other for other in COLOURS if other != ground])
        how = random.choice([*TEXTURES, "plain", "plain", "shaded"])
        count = random.randint(1, 2) if len(names) < 3 else 1
        large = random.choice(list(REACHES))
        reach = REACHES[large] * min(size)
        for _ in range(count):
            _place(random, image, OUTLINES[name], how, colour, places.pop(), reach)
        what = "" if how == "plain" else f"{how} "
        words = f"{large}{colour} {what}{name}"
        said.append(_article(words) if count == 1 else f"{NUMBERS[count]} {words}s")
    behind = "" if texture == "plain" else f"{texture} "
    return image, f"{_join_parts(said)} on {_article(behind + ground)} background"


def _place(
    random: Random,
    image: Image.Image,
    outline: list[Point],
    texture: str,
    colour: str,
    at: Point,
    reach: float,
) -> None:
    """Paste one shape, turned a little, into an image.

    `reach` is about half the width of the shape, in pixels. The edge is smooth, as the mask is
    drawn at twice the size.
    """
    side = max(8, round(2 * reach))
    turn = random.uniform(-0.3, 0.3)
    points = [
        (side + side * (x * math.cos(turn) - y * math.sin(turn)),
         side + side * (x * math.sin(turn) + y * math.cos(turn)))
        for x, y in outline
    ]  # fmt: skip
    mask = Image.new("L", (2 * side, 2 * side), 0)
    ImageDraw.Draw(mask).polygon(points, fill=255)
    mask = mask.resize((side, side), Image.Resampling.BOX)
    one, other = vary_colour(random, colour), second_shade(random, colour)
    fill = fill_texture(random, (side, side), texture, one, other)
    left = round(at[0] * image.width - reach + random.uniform(-0.2, 0.2) * reach)
    image.paste(fill, (left, round(at[1] * image.height - reach)), mask)


def _article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _join_parts(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


# --- landscapes
HOURS: dict[str, tuple[Colour, Colour, str]] = {
    "by day": ((85, 145, 225), (205, 228, 245), "yellow"),
    "at sunset": ((85, 65, 125), (250, 160, 85), "orange"),
    "at night": ((8, 12, 38), (45, 55, 100), "white"),
    "in fog": ((165, 172, 180), (222, 222, 215), ""),
}
LANDS: dict[str, Colour] = {
    "green hills": (75, 140, 70),
    "grey mountains": (120, 120, 130),
    "a blue sea": (40, 95, 150),
    "a brown desert": (195, 155, 100),
}


def _landscape(random: Random, size: PictureSize) -> tuple[Image.Image, str]:
    hour, land = random.choice(list(HOURS)), random.choice(list(LANDS))
    high, low, lamp = HOURS[hour]
    upright = Image.linear_gradient("L").resize(size, Image.Resampling.BICUBIC)
    image = Image.composite(Image.new("RGB", size, low), Image.new("RGB", size, high), upright)
    if random.random() < 0.5:
        white = Image.new("RGB", size, (235, 235, 240) if hour != "at night" else (70, 75, 95))
        clouds = mask_clouds(random, size).point(
            [max(0, 3 * (level - 130)) for level in range(256)]
        )
        image.paste(white, None, clouds)
    if lamp:
        at = (random.uniform(0.15, 0.85), random.uniform(0.12, 0.3))
        _place(random, image, OUTLINES["circle"], "plain", lamp, at, 0.09 * min(size))
    level = random.uniform(0.5, 0.68)
    _draw_land(random, image, land, level, dim=hour == "at night")
    thing = "boat" if "sea" in land else random.choice(("house", "tree", "tower"))
    count = random.randint(1, 3)
    for left in random.sample((0.15, 0.32, 0.5, 0.68, 0.85), count):
        _build(random, image, thing, (left, level + random.uniform(0.05, 0.2)))
    things = f"{NUMBERS[count]} {thing}{'s' * (count > 1)}"
    light = {
        "yellow": "a yellow sun and ",
        "orange": "an orange sun and ",
        "white": "a white moon and ",
    }
    return image, f"{light.get(lamp, '')}{things} before {land} {hour}"


def _draw_land(random: Random, image: Image.Image, land: str, level: float, *, dim: bool) -> None:
    """Draw the land over the lower part of the picture."""
    width, height = image.size
    rough = {"green hills": 0.05, "grey mountains": 0.18}.get(land, 0.0)
    steps = 5 if rough > 0.1 else 24
    phase = random.uniform(0, 6)
    line = []
    for step in range(steps + 1):
        wave = random.uniform(-1, 1) if steps == 5 else math.sin(phase + step / 3)
        line.append((width * step / steps, height * (level - 0.04 + rough * wave)))
    mask = Image.new("L", image.size, 0)
    ImageDraw.Draw(mask).polygon([*line, (width, height), (0, height)], fill=255)
    base = clip_colour(value // (3 if dim else 1) for value in LANDS[land])
    texture = "striped" if "sea" in land else "cloudy"
    fill = fill_texture(
        random, image.size, texture, base, clip_colour(value * 4 // 5 for value in base)
    )
    image.paste(fill, None, mask)


def _build(random: Random, image: Image.Image, thing: str, at: Point) -> None:
    """Draw a house, tree, tower or boat whose foot is at a point."""
    unit = min(image.size) * random.uniform(0.1, 0.16)
    left, foot = at[0] * image.width, at[1] * image.height

    def polygon(colour: str, *points: Point) -> None:
        placed = [(left + x * unit, foot + y * unit) for x, y in points]
        ImageDraw.Draw(image).polygon(placed, fill=vary_colour(random, colour))

    if thing == "house":
        polygon(random.choice(("white", "yellow", "pink")), (-1, 0), (-1, -1), (1, -1), (1, 0))
        polygon(random.choice(("red", "brown")), (-1.25, -1), (0, -1.9), (1.25, -1))
        polygon("brown", (-0.2, 0), (-0.2, -0.6), (0.2, -0.6), (0.2, 0))
    elif thing == "tower":
        polygon("grey", (-0.4, 0), (-0.3, -2.4), (0.3, -2.4), (0.4, 0))
        polygon("red", (-0.5, -2.4), (0, -3.2), (0.5, -2.4))
    elif thing == "boat":
        polygon("brown", (-1, -0.5), (1, -0.5), (0.6, 0), (-0.6, 0))
        polygon("white", (0, -0.6), (0, -2.2), (0.9, -0.6))
    else:
        polygon("brown", (-0.12, 0), (-0.12, -1), (0.12, -1), (0.12, 0))
        polygon("green", *((x * 0.75, y * 0.95 - 1.6) for x, y in OUTLINES["flower"]))
