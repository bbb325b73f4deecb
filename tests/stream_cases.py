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


def samples(folder, count=6, size=16):
    """ImageNet images by their class."""
    for i in range(count):
        picture(folder / f"{7 * i:04d}_n{i:08d}.jpg", (size, size), (40 * i, 100, 200 - 20 * i))
    return folder


def camvid(folder, count=3, size=(48, 32)):
    """Road scenes: by day and at dusk, half of each road (class 3), half void."""
    for split in ("train", "val", "test"):
        for sequence in ("0001TP", "Seq05VD"):
            for i in range(count):
                picture(folder / split / "images" / f"{sequence}_{i:05d}.jpg", size, (60 * i, 90, 120))
                picture(folder / split / "labels" / f"{sequence}_{i:05d}.png", size, 3, "L")
                path = folder / split / "labels" / f"{sequence}_{i:05d}.png"
                label = np.array(Image.open(path))
                label[:, : size[0] // 2] = 11
                Image.fromarray(label).save(path)
    return folder


def acdc(folder):
    for condition in ("snow", "fog"):
        for i in range(3):
            name = f"{condition}/train/GP01/GP01_frame_{i:06d}"
            picture(folder / "rgb_anon" / f"{name}_rgb_anon.png", (48, 32), (50 * i,) * 3)
            picture(folder / "gt" / f"{name}_gt_labelTrainIds.png", (48, 32), i, "L")
    return folder
