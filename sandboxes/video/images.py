"""Images as files, and contact sheets of many images. The one door to Pillow's codecs."""

import io
import math
from collections.abc import Sequence
from functools import cache
from typing import Literal

import PIL
from PIL import Image, ImageDraw, ImageFont, features

ImageFormat = Literal["jpeg", "png"]
MEDIA_TYPES: dict[str, str] = {"jpeg": "image/jpeg", "png": "image/png"}
_QUALITY = 85
"""Quality of JPEG files. At 85, text in a frame stays readable at a fifth of the size of a PNG."""
_MARGIN, _LABEL = 4, 14
"""Pixels between the images of a sheet, and pixels for a label."""


def encoded(image: Image.Image, form: ImageFormat = "jpeg") -> bytes:
    """Return an image as a file without time and name: equal pixels give equal bytes."""
    out = io.BytesIO()
    if form == "png":
        image.save(out, "PNG", compress_level=1)
    else:
        image.save(out, "JPEG", quality=_QUALITY)
    return out.getvalue()


def decoded(data: bytes, max_side: int | None = None) -> Image.Image:
    """Return the image of a file that `encoded` made, its longer side at most `max_side`."""
    image = Image.open(io.BytesIO(data))
    if max_side is not None and max(image.size) > max_side:
        # A JPEG is decoded at a half, a quarter or an eighth of its size if that is enough.
        image.draft("RGB", (max_side, max_side))
        image.thumbnail((max_side, max_side), Image.Resampling.BOX)
    return image.convert("RGB")


def converted(data: bytes, form: ImageFormat, max_side: int) -> bytes:
    """Return a JPEG file of `encoded` in another format or size, unchanged if both fit already."""
    image = Image.open(io.BytesIO(data))
    if form == "jpeg" and max(image.size) <= max_side:
        return data
    return encoded(decoded(data, max_side), form)


def sheet(images: Sequence[Image.Image], labels: Sequence[str]) -> Image.Image:
    """Return images side by side in rows, each with its label below it."""
    across = math.ceil(math.sqrt(len(images)))
    down = math.ceil(len(images) / across)
    width, height = max(i.width for i in images), max(i.height for i in images)
    step_x, step_y = width + _MARGIN, height + _MARGIN + _LABEL
    whole = Image.new("RGB", (across * step_x + _MARGIN, down * step_y + _MARGIN), (24, 24, 24))
    draw, font = ImageDraw.Draw(whole), _font()
    for n, (image, label) in enumerate(zip(images, labels, strict=True)):
        x, y = _MARGIN + n % across * step_x, _MARGIN + n // across * step_y
        whole.paste(image, (x, y))
        draw.text((x + 1, y + height), label, font=font, fill=(230, 230, 230))
    return whole


@cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(_LABEL - 2)


def versions() -> str:
    """Return the versions of the encoders; another version may write other bytes."""
    return f"pillow{PIL.__version__} jpeg{features.version('libjpeg_turbo') or features.version('jpg')}"
