"""The rules by which families choose the size that an image is resized to. They need its size only, not its pixels.

`most_tokens` of a rule bounds the tokens of an image. `largest` returns a plan with at least as many tokens as any
image that has at most `most` of them.
"""

from __future__ import annotations

import math

import msgspec

from aengine.errors import InvalidRequestError

_MAX_RATIO = 200  # of the sides, for `AreaRule`


class ImagePlan(msgspec.Struct, frozen=True):
    """The size that an image is resized to, and the grid of its tokens."""

    width: int  # in pixels
    height: int
    rows: int  # of tokens
    columns: int

    @property
    def tokens(self) -> int:
        """The number of embeddings that the tower computes for the image."""
        return self.rows * self.columns


class AreaRule(msgspec.Struct, frozen=True, tag="area"):
    """Keeps the aspect ratio, and the area between two limits. Sides are rounded to whole tokens."""

    unit: int  # the side of a token in pixels
    min_pixels: int
    max_pixels: int

    @property
    def most_tokens(self) -> int:
        smallest, full = (pixels // self.unit**2 for pixels in (self.min_pixels, self.max_pixels))
        # A thin image is a token high at least, and a small one is rounded up.
        thin, grown = (math.isqrt(_MAX_RATIO * tokens) + 1 for tokens in (full, smallest + 1))
        return max(full, thin, smallest + grown + math.isqrt(smallest) + 2)

    def largest(self, most: int) -> ImagePlan:
        return _near_square(min(most, self.most_tokens), self.unit)

    def plan(self, width: int, height: int) -> ImagePlan:
        if max(width, height) > _MAX_RATIO * min(width, height):
            raise _unfit(width, height, f"one side is more than {_MAX_RATIO} times the other")
        unit = self.unit
        rows, columns = round(height / unit), round(width / unit)
        pixels = rows * columns * unit * unit
        if pixels > self.max_pixels:
            shrink = math.sqrt((height * width) / self.max_pixels)
            rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
        elif pixels < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
        return _of_tokens(rows, columns, unit)


class BudgetRule(msgspec.Struct, frozen=True, tag="budget"):
    """Chooses the largest size with the image's aspect ratio that has at most `max_tokens` tokens."""

    unit: int  # the side of a token in pixels
    patch: int  # the side of a patch in pixels
    max_tokens: int

    @property
    def most_tokens(self) -> int:
        return self.max_tokens

    def largest(self, most: int) -> ImagePlan:
        return _near_square(min(most, self.most_tokens), self.unit)

    def plan(self, width: int, height: int) -> ImagePlan:
        per_token = (self.unit // self.patch) ** 2
        factor = math.sqrt(self.max_tokens * per_token * self.patch**2 / (height * width))
        rows, columns = (math.floor(factor * side / self.unit) for side in (height, width))
        if rows == columns == 0:
            raise _unfit(width, height, f"{self.max_tokens} tokens are too few for any part of it")
        if rows == 0:
            rows, columns = 1, min(width // height, self.max_tokens)
        elif columns == 0:
            rows, columns = min(height // width, self.max_tokens), 1
        return _of_tokens(rows, columns, self.unit)


class EdgeRule(msgspec.Struct, frozen=True, tag="edge"):
    """Shrinks an image until its longest side fits. Sides are rounded up to whole tokens."""

    unit: int  # the side of a token in pixels
    longest: int  # in pixels

    @property
    def most_tokens(self) -> int:
        return int(((self.longest - 1) // self.unit + 1) ** 2)

    def largest(self, most: int) -> ImagePlan:
        return _near_square(min(most, self.most_tokens), self.unit)

    def plan(self, width: int, height: int) -> ImagePlan:
        ratio = max(height / self.longest, width / self.longest)
        rows, columns = (math.floor(side / ratio) if ratio > 1 else side for side in (height, width))  # of pixels
        if not rows or not columns:
            raise _unfit(width, height, f"one side vanishes if the other is resized to {self.longest} pixels")
        return _of_tokens((rows - 1) // self.unit + 1, (columns - 1) // self.unit + 1, self.unit)


class FixedRule(msgspec.Struct, frozen=True, tag="fixed"):
    """Resizes every image to the same square."""

    unit: int  # the side of a token in pixels
    side: int  # of the square in tokens

    @property
    def most_tokens(self) -> int:
        return int(self.side**2)

    def largest(self, most: int) -> ImagePlan:
        return _of_tokens(self.side, self.side, self.unit)

    def plan(self, width: int, height: int) -> ImagePlan:
        return _of_tokens(self.side, self.side, self.unit)


ResizeRule = AreaRule | BudgetRule | EdgeRule | FixedRule


def _near_square(tokens: int, unit: int) -> ImagePlan:
    """Return a plan of at least this many tokens, and hardly more."""
    rows = max(1, math.isqrt(tokens))
    return _of_tokens(rows, max(1, -(-tokens // rows)), unit)


def _of_tokens(rows: int, columns: int, unit: int) -> ImagePlan:
    return ImagePlan(columns * unit, rows * unit, rows, columns)


def _unfit(width: int, height: int, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"image: its size is {width} x {height}, and {why}; crop or pad it", "image")
