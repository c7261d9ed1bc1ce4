"""Draw docs/images/corruptions.png: every corruption at every severity, on CIFAR-10 test images.

PLATEAUX_DATA=... python docs/make_corruption_sheet.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from plateaux.core.registry import dataset
from plateaux.data.corruptions.corrupt import CORRUPTIONS, EXTRA, corrupt

PICTURE = Path(__file__).parent / "images" / "corruptions.png"
# The number of a test image, and the corruptions shown on it.
GROUPS = {
    9: CORRUPTIONS[:3],
    3: CORRUPTIONS[3:7],
    24: CORRUPTIONS[7:11],
    1: CORRUPTIONS[11:15],
    82: EXTRA,
}
SCALE, GAP, NAMES, HEAD, LETTERS = 3, 4, 172, 28, 17


def main() -> None:
    """Read the test images, corrupt some, and write the picture."""
    source = dataset.get("cifar10")().test
    cell = 32 * SCALE + GAP
    rows = sum(len(names) for names in GROUPS.values())
    sheet = Image.new("RGB", (NAMES + 6 * cell, HEAD + rows * cell), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(LETTERS)
    for column, title in enumerate(["clean", *"12345"]):
        middle = NAMES + column * cell + 16 * SCALE
        pen.text((middle, HEAD / 2), title, fill="black", font=font, anchor="mm")
    shown = [(number, name) for number, names in GROUPS.items() for name in names]
    for row, (number, name) in enumerate(shown):
        top = HEAD + row * cell
        pen.text((NAMES - 10, top + cell / 2), name, fill="black", font=font, anchor="rm")
        ids = torch.tensor([number])
        x, _ = source.fetch(ids)
        assert isinstance(x, Tensor)
        for column, image in enumerate([x, *(corrupt(x, ids, name, severity) for severity in range(1, 6))]):
            sheet.paste(enlarge(image[0]), (NAMES + column * cell, top))
    PICTURE.parent.mkdir(exist_ok=True)
    sheet.save(PICTURE, optimize=True)


def enlarge(image: Tensor) -> Image.Image:
    """Return an image `[3, H, W]`, enlarged without interpolation."""
    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    return picture.resize((SCALE * picture.width, SCALE * picture.height), Image.Resampling.NEAREST)


if __name__ == "__main__":
    main()
