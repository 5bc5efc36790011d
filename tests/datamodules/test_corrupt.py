"""Images that cannot be decoded: replaced in training, so that all processes keep in step; left out of evaluation."""

from functools import partial

import pytest
import torch
from lightning import LightningModule, Trainer
from test_images import as_rank, indices
from torch.utils.data import Dataset
from toys import SILENT

from datamodules.images import Images
from datamodules.loaders import Readable
from explainers.errors import InputError


class Holes(Dataset):
    """Image i is filled with i; those that are named are corrupt."""

    def __init__(self, size=23, corrupt=()):
        self.size, self.corrupt = size, set(corrupt)

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index in self.corrupt:
            return None
        return {"image": torch.full((3, 4, 4), index, dtype=torch.uint8), "label": index % 2, "index": index}


def loaders(corrupt, rank=0, world_size=1, size=23, **settings):
    data = partial(Holes, size, corrupt)
    images = Images(data, data, data, **{"batch_size": 4, "num_workers": 0} | settings)
    return as_rank(images, rank, world_size)


def test_a_corrupt_image_is_replaced_by_the_next_readable_one():
    samples = Readable(Holes(6, {0, 2, 3, 5}))
    assert [samples[i]["index"] for i in range(6)] == [1, 1, 4, 4, 4, 1]
    assert len(samples) == 6


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_processes_have_equally_many_training_batches_of_equal_size(world_size):
    corrupt = {0, 3, 6, 9, 12, 13, 14, 22}
    shares = [loaders(corrupt, rank, world_size).train_dataloader() for rank in range(world_size)]
    batches = [indices(share) for share in shares]
    assert {len(share) for share in batches} == {23 // (4 * world_size)} == {len(share) for share in shares}
    assert {len(batch) for share in batches for batch in share} == {4}
    assert not {index for share in batches for batch in share for index in batch} & corrupt


def test_readable_images_come_where_they_come_without_corrupt_ones():
    whole, holes = indices(loaders(()).train_dataloader()), indices(loaders({5}).train_dataloader())
    assert holes == [[6 if index == 5 else index for index in batch] for batch in whole]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_corrupt_images_are_left_out_of_evaluation_and_so_is_a_batch_of_them(num_workers):
    images = loaders({1, 4, 5, 6, 7, 22}, size=11, num_workers=num_workers)
    for loader in (images.val_dataloader(), images.test_dataloader()):
        assert indices(loader) == [[0, 2, 3], [8, 9, 10]] and len(loader) == 3
    shares = [loaders({1, 3, 5}, rank, 2, size=6).val_dataloader() for rank in range(2)]
    assert [indices(share) for share in shares] == [[[0, 2, 4]], []]  # a process of which all images are corrupt


@pytest.mark.parametrize(
    ("stage", "corrupt"), [("fit", (4, 5, 6, 7)), ("validate", (0, 1, 2, 3)), ("test", (0, 8, 9, 10))]
)
def test_lightning_measures_all_readable_images_when_a_loader_ends_early(corrupt, stage):
    module = Measuring()
    trainer = Trainer(accelerator="cpu", max_epochs=2, **SILENT)
    getattr(trainer, stage)(module, loaders(corrupt, size=11))
    readable = [i for i in range(11) if i not in corrupt]
    assert trainer.callback_metrics["mean"].item() == pytest.approx(sum(readable) / len(readable))
    epochs = {"fit": 2, "validate": 1, "test": 1}[stage]
    assert [index for index in module.seen if index is not None] == readable * epochs
    assert module.seen.count(None) == epochs  # its epochs ended


class Measuring(LightningModule):
    """Logs the mean index of all images, and writes down what it sees."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.zeros(1)), []

    def training_step(self, batch, batch_idx):
        return self.weight.sum()

    def measure(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.seen.extend(batch["index"].tolist())
        self.log("mean", batch["index"].float().mean(), batch_size=len(batch["index"]), on_epoch=True)

    def epoch_end(self):
        if not self.trainer.sanity_checking:
            self.seen.append(None)

    validation_step = test_step = measure
    on_validation_epoch_end = on_test_epoch_end = epoch_end

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("split", "num_workers"), [("train", 1), ("val", 0), ("test", 1)])
def test_data_of_corrupt_images_only_are_an_error(split, num_workers):
    loader = getattr(loaders(range(5), size=5, num_workers=num_workers), f"{split}_dataloader")()
    with pytest.raises(InputError, match="expected at least 1 readable image, got 5 that are all corrupt; repair"):
        list(loader)
