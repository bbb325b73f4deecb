"""Small folders of corrupted images."""

import numpy as np
from PIL import Image


def cifar(folder, count=10, severities=1, names=("fog", "gaussian_noise", "clean"), labels=None):
    """Images whose pixels all have their number, so that a test can tell which is which."""
    folder.mkdir(exist_ok=True)
    numbers = np.arange(count * severities, dtype=np.uint8)
    for name in names:
        np.save(folder / f"{name}.npy", np.broadcast_to(numbers[:, None, None, None], (len(numbers), 8, 8, 3)))
    np.save(folder / "labels.npy", np.tile(np.arange(count) % 7, severities) if labels is None else labels)
    return folder


def picture(path, size, value, mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)


def acdc(folder):
    for condition in ("snow", "fog"):
        for i in range(3):
            name = f"{condition}/train/GP01/GP01_frame_{i:06d}"
            picture(folder / "rgb_anon" / f"{name}_rgb_anon.png", (48, 32), (50 * i,) * 3)
            picture(folder / "gt" / f"{name}_gt_labelTrainIds.png", (48, 32), i, "L")
    return folder
