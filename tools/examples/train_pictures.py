"""The pictures that train_example.py leaves: a grid of samples and a plot of losses."""

from pathlib import Path
from textwrap import wrap

from PIL import Image, ImageDraw


def grid(rows: list[list[Image.Image]], captions: list[str]) -> Image.Image:
    side = rows[0][0].width
    sheet = Image.new("RGB", (side * len(captions), side * len(rows) + 48), "white")
    for y, row in enumerate(rows):
        for x, picture in enumerate(row):
            sheet.paste(picture, (x * side, y * side))
    for x, caption in enumerate(captions):
        lines = "\n".join(wrap(caption, side // 7)[:4])
        ImageDraw.Draw(sheet).text((x * side + 4, side * len(rows) + 2), lines, "black")
    return sheet


def plot(losses: list[float], path: Path, size: tuple[int, int] = (900, 400)) -> None:
    """Each loss as a dot, and their moving average as a line; the axis ends at the highest."""
    width, height = size
    sheet = Image.new("RGB", size, "white")
    canvas, top = ImageDraw.Draw(sheet), max(losses) * 1.05
    places = [
        (
            40 + number * (width - 60) / max(1, len(losses) - 1),
            height - 30 - (height - 50) * v / top,
        )
        for number, v in enumerate(losses)
    ]
    for tenth in range(0, int(top * 10) + 1, 2):
        y = height - 30 - (height - 50) * tenth / 10 / top
        canvas.line((40, y, width - 20, y), "#ddd")
        canvas.text((8, y - 6), f"{tenth / 10:.1f}", "black")
    slow, line = losses[0], []
    for (x, y), loss in zip(places, losses, strict=True):
        canvas.circle((x, y), 1, "#9bd")
        slow += 0.1 * (loss - slow)
        line.append((x, height - 30 - (height - 50) * slow / top))
    canvas.line(line, "#036", 2)
    canvas.text((width // 2 - 60, height - 20), f"steps 1 to {len(losses)}, loss", "black")
    sheet.save(path)
