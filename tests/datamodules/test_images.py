import resource
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import Dataset
from toys import SILENT

from datamodules.images import Images
from explainers.errors import InputError
from explainers.vectors.projections import some_images


class Numbers(Dataset):
    """Image i is filled with i."""

    classes = ["odd", "even"]

    def __init__(self, size=23):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        image = torch.full((3, 4, 4), index, dtype=torch.uint8)
        return {"image": image, "label": index % 2, "index": index, "truth": image[0] > 3}


class Limited(Numbers):
    """Its loader process may write files of 4 kB, and so no shared memory for a batch."""

    def __getitem__(self, index):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        return {"image": torch.zeros(3, 64, 64, dtype=torch.uint8), "label": 0, "index": index}


class Recorder(LightningModule):
    """Writes down the epoch and the indices of every training batch."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.zeros(1)), []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch["index"].tolist()))
        return self.weight.sum()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(datamodule, epochs, folder, resume=None, at_epoch_end=True):
    """The batches of a run that stops after `epochs`, and its last checkpoint."""
    recorder = Recorder()
    checkpoint = ModelCheckpoint(folder, save_top_k=-1, save_on_train_epoch_end=at_epoch_end)
    settings = SILENT | {"enable_checkpointing": True, "callbacks": [checkpoint], "use_distributed_sampler": False}
    trainer = Trainer(accelerator="cpu", max_epochs=epochs, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice about few workers and existing folders
        trainer.fit(recorder, datamodule, ckpt_path=resume)
    return recorder.seen, checkpoint.best_model_path


def as_rank(datamodule, rank, world_size):
    datamodule.trainer = SimpleNamespace(global_rank=rank, world_size=world_size, accumulate_grad_batches=1)
    return datamodule


def indices(loader):
    return [batch["index"].tolist() for batch in loader]


@pytest.mark.parametrize("world_size", [1, 3])
def test_no_image_is_counted_twice_across_ranks(world_size):
    shards = [
        as_rank(Images(val=Numbers, eval_batch_size=4, num_workers=0), rank, world_size).val_dataloader()
        for rank in range(world_size)
    ]
    seen = [sum(indices(shard), []) for shard in shards]
    assert sorted(sum(seen, [])) == list(range(23))
    assert all(shard == list(range(rank, 23, world_size)) for rank, shard in enumerate(seen))
    assert [len(shard) for shard in shards] == [len(indices(shard)) for shard in shards]


@pytest.mark.parametrize("size", [24, 31])
def test_two_processes_see_the_batches_of_one(size):
    def loader(batch_size, rank, world_size):
        datamodule = Images(partial(Numbers, size), batch_size=batch_size, num_workers=0, seed=3)
        loader = as_rank(datamodule, rank, world_size).train_dataloader()
        loader.sampler.set_epoch(2)
        return indices(loader)

    single, ranks = loader(6, 0, 1), [loader(3, rank, 2) for rank in range(2)]
    assert [set(batch) for batch in single] == [set(a) | set(b) for a, b in zip(*ranks, strict=True)]
    assert len(single) == size // 6


def test_the_order_depends_on_seed_and_epoch_only():
    def order(seed, epoch):
        loader = Images(Numbers, batch_size=4, num_workers=0, seed=seed).train_dataloader()
        loader.sampler.set_epoch(epoch)
        return indices(loader)

    torch.manual_seed(1)
    first = order(0, 0)
    torch.manual_seed(2)
    assert order(0, 0) == first
    assert order(0, 1) != first and order(1, 0) != first


def test_loading_takes_no_draw_from_the_models_random_numbers():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    indices(Images(Numbers, num_workers=0).train_dataloader())
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.slow
@pytest.mark.parametrize("read", ["train_dataloader", "some_images"])
def test_full_shared_memory_is_named_with_what_to_do(read):
    data = Images(Limited, Limited, num_workers=1)
    batches = some_images(data, "val", limit=20) if read == "some_images" else getattr(data, read)()
    with pytest.raises(InputError, match="^num_workers=1: expected shared memory for .* --shm-size=8g, ") as raised:
        list(batches)
    assert "\n" not in str(raised.value)
