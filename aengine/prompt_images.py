"""Images of a prompt as plain data: the engine places them, the runtime computes their embeddings."""

from __future__ import annotations

import msgspec


class PlacedImage(msgspec.Struct, frozen=True, kw_only=True):
    """A resized image, and the places of its tokens in a prompt."""

    digest: bytes  # sha256 of its size and pixels
    width: int  # in pixels
    height: int
    pixels: bytes  # height * width * 3
    start: int  # index of its first token in the prompt
    rows: int  # of the tokens that have an embedding
    columns: int
    gap: int = 0  # ids of the vocabulary after each row of these tokens
    key: int = 0  # stands for the image in the prefix cache; 0: not chosen yet

    @property
    def end(self) -> int:
        """The index after its last token, which may be one of a gap."""
        return self.start + self.rows * (self.columns + self.gap)


class PromptImages(msgspec.Struct, frozen=True):
    """The images of a prompt, in order."""

    images: tuple[PlacedImage, ...]
    shift: int = 0  # added to the positions of the tokens after the last image; see `grid_positions`
    splittable: bool = True  # whether a chunk of the prompt may end within an image

    @property
    def end(self) -> int:
        """The index after the last token of an image."""
        return self.images[-1].end

    def least_end(self, start: int) -> int:
        """Return where a chunk that begins at `start` may end at the earliest."""
        return start + 1 if (cut := self._cut(start, start)) is None else cut.end

    def last_end(self, end: int) -> int:
        """Return the last index up to `end` where a chunk may end."""
        return end if (cut := self._cut(end - 1, end)) is None else cut.start

    def _cut(self, first: int, last: int) -> PlacedImage | None:
        """Return the image that begins at or before `first` and ends after `last`, if it may not be split."""
        if self.splittable:
            return None
        return next((one for one in self.images if one.start <= first and last < one.end), None)
