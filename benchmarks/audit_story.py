"""Write photos for the story of docs/audit.md: ginger cats and grey ones, 95 % of them on the ground of their class.

    python benchmarks/audit_story.py story

writes `story/train` and `story/val`, where ginger cats sit on grass and grey ones on bricks, and `story/swapped`, where
it is the other way round. All show the same cat, `skimage.data.chelsea()` (CC0), less colourful where it is grey.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter

SIDE = 224
FACE = (110, 10, 340, 240)
"""The face of the cat in its photo: left, top, right and bottom pixel."""
CLASSES = {"ginger": (0.5, 1.0), "grey": (0.0, 0.5)}
"""Class → the least and the most of the photo's colour that its cats have."""
GROUNDS = {"grass": (110, 150, 70), "brick": (190, 110, 80)}
"""Texture of `skimage.data` → its colour."""
PARTS = {"train": (160, 0.95), "val": (80, 0.95), "swapped": (80, 0.0)}
"""Folder → number of photos, and the share of them on the ground of their class."""


def draw_ground(texture: Image.Image, colour: tuple[int, int, int], rng: np.random.Generator) -> Image.Image:
    """A random square of a grey texture, in a colour of random brightness."""
    side = int(rng.integers(200, 400))
    left, top = rng.integers(0, texture.width - side, 2).tolist()
    square = texture.crop((left, top, left + side, top + side)).resize((SIDE, SIDE))
    pixels = np.asarray(square, float)[..., None] / 150 * np.array(colour) * rng.uniform(0.8, 1.2)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def paste_cat(ground: Image.Image, cat: Image.Image, colour: tuple[float, float], rng: np.random.Generator) -> None:
    """Paste the face into a random ellipse-shaped place, with random zoom, side, angle, colour and brightness."""
    side = int(rng.integers(56, 96))
    width = (FACE[2] - FACE[0]) * rng.uniform(0.85, 1)
    left, top = (FACE[i] + rng.uniform(0, FACE[i + 2] - FACE[i] - width) for i in range(2))
    face = cat.crop((int(left), int(top), int(left + width), int(top + width))).resize((side, side))
    face = face.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else face
    face = ImageEnhance.Color(face.rotate(rng.uniform(-15, 15))).enhance(rng.uniform(*colour))
    mask = Image.new("L", face.size)
    ImageDraw.Draw(mask).ellipse((3, 3, side - 3, side - 3), fill=255)
    place = tuple(rng.integers(0, SIDE - side, 2).tolist())
    ground.paste(
        ImageEnhance.Brightness(face).enhance(rng.uniform(0.6, 1.3)), place, mask.filter(ImageFilter.BoxBlur(2))
    )


def write_photos(folder: Path, data: Any, seed: int = 0) -> None:
    """Write all parts; `data` is `skimage.data`."""
    rng = np.random.default_rng(seed)
    cat = Image.fromarray(data.chelsea())
    textures = {name: Image.fromarray(getattr(data, name)()) for name in GROUNDS}
    for part, (count, share) in PARTS.items():
        for number in range(count):
            names = [*GROUNDS]
            label = number % 2
            name = names[label if rng.random() < share else 1 - label]
            photo = draw_ground(textures[name], GROUNDS[name], rng)
            of_class = [*CLASSES][label]
            paste_cat(photo, cat, CLASSES[of_class], rng)
            file = folder / part / of_class / f"{number:03}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            photo.save(file)


if __name__ == "__main__":
    from skimage import data  # pip install scikit-image

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    write_photos(parser.parse_args().folder, data)
