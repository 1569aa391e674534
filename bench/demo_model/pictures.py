"""Pictures that the tower learns from: coloured shapes, or one digit, on a plain background.

A picture varies in its size, aspect ratio, background, noise and sharpness, and in the artefacts of JPEG.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

SHAPES = ("circle", "square", "triangle", "star")
DIGITS = tuple("0123456789")
# Hue in degrees, saturation and value in percent: the least and the most of each.
COLOURS: dict[str, tuple[tuple[int, int], tuple[int, int], tuple[int, int]]] = {
    "red": ((-10, 8), (75, 100), (65, 100)),
    "orange": ((24, 36), (85, 100), (88, 100)),
    "yellow": ((51, 62), (75, 100), (88, 100)),
    "green": ((95, 150), (60, 100), (45, 90)),
    "blue": ((205, 245), (70, 100), (50, 100)),
    "purple": ((270, 300), (55, 100), (45, 85)),
    "black": ((0, 359), (0, 20), (0, 12)),
    "white": ((0, 359), (0, 4), (94, 100)),
}
MOST_SHAPES = 4
_GAP = 0.025  # between two shapes, as a share of the shorter side
_TRIES = 60

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Thing:
    """A shape or a digit in a picture."""

    kind: str  # of `SHAPES` or `DIGITS`
    colour: str
    x: float  # of its centre, as a share of the picture's width
    y: float  # the same of the height
    radius: float  # of a circle around it, as a share of the shorter side


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture and the things in it."""

    things: tuple[Thing, ...]
    image: Image.Image


def draw(rng: Random, size: tuple[int, int] | None = None) -> Picture:
    """Draw a picture. Its shapes are of at most two groups, each of one colour and kind.

    size: width and height in pixels. None: any.
    """
    size = size or choose_size(rng)
    if rng.random() < 0.28:
        return _drawn([(rng.choice(DIGITS), rng.choice(list(COLOURS)))], size, rng)
    groups: list[tuple[str, str]] = []
    for _ in range(1 if rng.random() < 0.8 else 2):
        while (group := (rng.choice(SHAPES), rng.choice(list(COLOURS)))) in groups:
            pass
        groups.append(group)
    counts = [1] * len(groups)
    if rng.random() < 0.5:
        counts = [rng.randint(1, MOST_SHAPES if len(groups) == 1 else 2) for _ in groups]
    return _drawn([group for group, count in zip(groups, counts) for _ in range(count)], size, rng)


def _drawn(wanted: list[tuple[str, str]], size: tuple[int, int], rng: Random) -> Picture:
    width, height = size
    things = _placed(wanted, width / height, rng)
    background = _background({colour for _, colour in wanted}, rng)
    image = Image.new("RGB", (width, height), background)
    if rng.random() < 0.15:
        image = _shaded(image, rng)
    pen = ImageDraw.Draw(image)
    shared = {group: _rgb(group[1], rng) for group in wanted}
    outline = rng.random() < 0.12
    for thing in things:
        _draw_thing(pen, thing, shared[thing.kind, thing.colour], (width, height), outline, rng)
    return Picture(tuple(things), _worn(image, rng))


def choose_size(rng: Random) -> tuple[int, int]:
    """Choose width and height of a picture."""
    side = rng.choice((64, 80, 96, 112, 128, 128, 160, 200, 256, 320)) * rng.uniform(0.9, 1.1)
    ratio = 1.0 if rng.random() < 0.5 else math.exp(rng.uniform(-0.6, 0.6))
    return max(32, round(side * ratio**0.5)), max(32, round(side / ratio**0.5))


def _placed(wanted: list[tuple[str, str]], ratio: float, rng: Random) -> list[Thing]:
    """Place things so that none overlaps another. ratio: of the picture's width to its height."""
    across, down = (ratio, 1.0) if ratio > 1 else (1.0, 1 / ratio)  # in shorter sides
    largest = {1: 0.42, 2: 0.24, 3: 0.2, 4: 0.17}.get(len(wanted), 0.15)
    smallest = 0.16 if wanted[0][0] in DIGITS else 0.09
    while True:
        placed: list[Thing] = []
        for kind, colour in wanted:
            for _ in range(_TRIES):
                radius = rng.uniform(smallest, largest)
                x, y = rng.uniform(radius, across - radius), rng.uniform(radius, down - radius)
                near = (math.hypot(x - one.x * across, y - one.y * down) - one.radius - radius for one in placed)
                if all(space > _GAP for space in near):
                    placed.append(Thing(kind, colour, x / across, y / down, radius))
                    break
        if len(placed) == len(wanted):
            return placed
        largest = max(smallest, largest * 0.9)


def _rgb(colour: str, rng: Random) -> tuple[int, int, int]:
    hue, saturation, value = (rng.uniform(*limits) for limits in COLOURS[colour])
    return _from_hsv(hue, saturation, value)


def _from_hsv(hue: float, saturation: float, value: float) -> tuple[int, int, int]:
    """hue in degrees, saturation and value in percent."""
    top = value / 100 * 255

    def channel(n: int) -> int:
        k = (n + hue / 60) % 6
        return round(top - top * saturation / 100 * max(0.0, min(k, 4 - k, 1.0)))

    return channel(5), channel(3), channel(1)


def _background(colours: set[str], rng: Random) -> tuple[int, int, int]:
    """Choose a grey or a pale tint that differs from all colours."""
    light, dark = "white" not in colours, "black" not in colours
    while True:
        roll = rng.random()
        if roll < 0.4 and light:
            return (255, 255, 255)
        if roll < 0.5 and dark:
            return (0, 0, 0)
        value = rng.uniform(0, 100)
        if (value > 78 and not light) or (value < 30 and not dark):
            continue
        return _from_hsv(rng.uniform(0, 360), rng.uniform(0, 14), value)


def _shaded(image: Image.Image, rng: Random) -> Image.Image:
    """Make the background a little darker from one side to the other."""
    width, height = image.size
    along = np.linspace(1.0, rng.uniform(0.8, 0.95), width if rng.random() < 0.5 else height, dtype=np.float32)
    factor = along[None, :, None] if len(along) == width else along[:, None, None]
    return Image.fromarray((np.asarray(image) * factor).astype(np.uint8))


def _draw_thing(
    pen: ImageDraw.ImageDraw, thing: Thing, colour: tuple[int, int, int], size: tuple[int, int], outline: bool,
    rng: Random,
) -> None:  # fmt: skip
    width, height = size
    short = min(size)
    x, y, radius = thing.x * width, thing.y * height, thing.radius * short
    line = None
    if outline and thing.kind in SHAPES and thing.colour != "black":
        line = (20, 20, 20)
    thick = max(1, round(radius * 0.08))
    if thing.kind == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour, outline=line, width=thick)
    elif thing.kind in SHAPES:
        pen.polygon(_corners(thing.kind, x, y, radius, rng), fill=colour, outline=line, width=thick)
    else:
        _draw_digit(pen, thing.kind, (x, y), radius, colour, rng)


def _corners(kind: str, x: float, y: float, radius: float, rng: Random) -> list[Point]:
    turn = 0.0 if rng.random() < 0.4 else math.radians(rng.uniform(-15, 15))
    if kind == "square":
        parts = [(math.pi / 4 + i * math.pi / 2, 1.0) for i in range(4)]
    elif kind == "triangle":
        parts = [(-math.pi / 2 + i * 2 * math.pi / 3, 1.0) for i in range(3)]
    else:
        inner = rng.uniform(0.38, 0.5)
        parts = [(-math.pi / 2 + i * math.pi / 5, inner if i % 2 else 1.0) for i in range(10)]
    return [
        (x + radius * part * math.cos(angle + turn), y + radius * part * math.sin(angle + turn))
        for angle, part in parts
    ]


@cache
def _fonts() -> tuple[Path | None, ...]:
    """The files of fonts: None is Pillow's own, the others come with matplotlib."""
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    names = [f"DejaVu{kind}{weight}.ttf" for kind in ("Sans", "Serif", "SansMono") for weight in ("", "-Bold")]
    return None, None, *(folder / name for name in names)


@cache
def _font(path: Path | None, size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size) if path is None else ImageFont.truetype(str(path), size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError("Pillow was built without FreeType, which draws the digits")
    return font


def _draw_digit(
    pen: ImageDraw.ImageDraw, digit: str, centre: Point, radius: float, colour: tuple[int, int, int], rng: Random
) -> None:
    font = _font(rng.choice(_fonts()), max(8, round(radius * 2.2)))
    left, top, right, bottom = pen.textbbox((0, 0), digit, font=font)
    at = centre[0] - (left + right) / 2, centre[1] - (top + bottom) / 2
    pen.text(at, digit, fill=colour, font=font)


def _worn(image: Image.Image, rng: Random) -> Image.Image:
    """Blur the picture, add noise, or store it as JPEG: each sometimes."""
    if rng.random() < 0.2:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 0.012 * min(image.size))))
    if rng.random() < 0.35:
        noise = np.random.default_rng(rng.getrandbits(32))
        spread = rng.uniform(2, 16)
        values = np.asarray(image) + noise.standard_normal((*image.size[::-1], 3), np.float32) * spread
        image = Image.fromarray(values.clip(0, 255).astype(np.uint8))
    if rng.random() < 0.4:
        file = BytesIO()
        image.save(file, "JPEG", quality=rng.randint(35, 95))
        image = Image.open(file).convert("RGB")
    return image
