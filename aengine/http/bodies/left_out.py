"""What a model that reads text only is told in the place of images and files in a conversation's history.

A refusal would end the conversation for good: agents send the same history with every request. What the newest message
of the user brings is refused all the same, as its sender is there to hear it.
"""

from __future__ import annotations

_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("file", "input_file", "document"), "file"),
    **dict.fromkeys(("audio", "input_audio", "audio_url"), "audio"),
    **dict.fromkeys(("video", "video_url"), "video"),
}


def left_out(kind: str) -> str | None:
    """Return the text for a part of this type; None if it is neither an image nor a file."""
    media = _MEDIA.get(kind)
    return None if media is None else f"[{media} left out: this model reads text only]"
