from types import SimpleNamespace

import pytest
import torch
from lightning import LightningModule, Trainer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch.utils.data import DataLoader
from toys import LIGHT, SILENT, training

from callbacks.heatmaps import Heatmaps
from callbacks.throughput import Throughput
from datamodules.cached import Cached
from datamodules.digits import Digits
from datamodules.images import Images
from explainers.report.heatmap_figure import draw_heatmaps
from explainers.tve import TVE

QUIET = {"accelerator": "cpu", **SILENT}


class Slow(LightningModule):
    """Explains every image with the same heatmap, and moves a clock in training."""

    def __init__(self, clock=None, seconds=0.0, first=0.0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.clock, self.seconds, self.first, self.calls = clock or [0.0], seconds, first, 0

    def forward(self, images, classes=None):
        self.calls += 1
        return torch.arange(4.0).view(1, 2, 2).expand(len(images), 2, 2)

    def training_step(self, batch, batch_idx):
        self.clock[0] += self.first if batch_idx == 0 else self.seconds
        return self.weight.sum()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samples(count):
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=random)
    return [{"image": image, "label": 0, "index": index} for index, image in enumerate(images)]


def drawn(heatmap):
    """The colour at a place of a drawn heatmap, from 0 to 1."""
    figure = draw_heatmaps(torch.full((1, 3, 8, 8), 128, dtype=torch.uint8), {"it": heatmap[None]}, signed={"it": True})
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture, box = torch.tensor(memoryview(canvas.buffer_rgba()).tolist()).float(), figure.axes[1].get_window_extent()
    top, left = picture.shape[0] - box.y1, box.x0
    return lambda row, column: picture[int(top + row * box.height), int(left + column * box.width), :3]


def test_a_planted_patch_is_red_and_what_speaks_against_the_class_blue_and_nothing_else_is():
    heatmap = torch.zeros(4, 4)
    heatmap[0, 3], heatmap[2, 1] = 1, -1
    colour = drawn(heatmap)
    red, _, blue = colour(0.125, 0.875)
    assert red > blue + 30
    red, _, blue = colour(0.625, 0.375)
    assert blue > red + 30
    for row, column in [(0.875, 0.125), (0.875, 0.875), (0.125, 0.125)]:
        red, _, blue = colour(row, column)
        assert abs(red - blue) < 20


def test_training_leaves_a_picture_of_the_validation_images(tmp_path):
    module = Slow()
    loader = DataLoader(samples(6), batch_size=3)
    Trainer(max_epochs=2, callbacks=[Heatmaps(str(tmp_path / "pictures"), images=2)], **QUIET).fit(
        module, loader, loader
    )
    assert (tmp_path / "pictures" / "heatmaps.png").read_bytes().startswith(b"\x89PNG")
    assert module.calls == 2  # at the first validation and after the training, and not for the sanity check


def test_images_are_read_beside_a_cache_without_pixels(tmp_path, target, grid, monkeypatch):
    drawn = []

    def recorded(images, heatmaps, truth, signed):
        assert signed == {"TVE": False, "DecompX-SkipPLUS": True, "chance": False}
        drawn.append((images, heatmaps["TVE"], truth))
        return Figure()

    monkeypatch.setattr("callbacks.heatmaps.draw_heatmaps", recorded)
    digits = Digits("test", size=3, image_size=32)
    data = Images(lambda: digits, lambda: digits, batch_size=2, num_workers=0)
    tve = TVE(target, grid, LIGHT)
    callbacks = [Heatmaps(str(tmp_path / "pictures"), images=2)]
    trainer = Trainer(max_epochs=1, precision="bf16-mixed", callbacks=callbacks, **QUIET)
    trainer.fit(training(tve), Cached(data, str(tmp_path / "rows")))
    ((images, heatmaps, truth),) = drawn
    assert torch.equal(images, torch.stack([digits[i]["image"] for i in range(2)]))
    assert torch.equal(truth, torch.stack([digits[i]["truth"] for i in range(2)]))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(heatmaps, tve.eval()(images))
    assert (tmp_path / "pictures" / "heatmaps.png").exists()


def test_batches_of_unknown_images_are_passed_over(tmp_path):
    loader = DataLoader([{"index": index} for index in range(4)], batch_size=2)
    Trainer(max_epochs=1, callbacks=[Heatmaps(str(tmp_path / "pictures"))], **QUIET).fit(Slow(), loader, loader)
    assert not (tmp_path / "pictures").exists()


def test_speed_counts_neither_the_warm_up_nor_the_images_in_it(monkeypatch):
    """Ten batches of 4 images take 50 ms each, after a first one of 2 s."""
    clock = [0.0]
    monkeypatch.setattr("callbacks.throughput.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    module = Slow(clock, seconds=0.05, first=2.0)
    trainer = Trainer(max_epochs=1, callbacks=[Throughput(warmup=1)], **QUIET)
    trainer.fit(module, DataLoader(samples(44), batch_size=4))
    assert trainer.callback_metrics["throughput/images_per_second"].item() == pytest.approx(80)
