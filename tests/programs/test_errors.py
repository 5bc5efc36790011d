"""A mistake of the user ends in one line that says what to do."""

import re
import sys
from pathlib import Path

import pytest
import timm
import torch
from commands import DIGITS, QUIET, TVE_RUN, composed, draw_images, evaluate, train
from forks import forked
from hydra.errors import MissingConfigException
from safetensors.torch import save_file

from explainers.errors import InputError
from explainers.running import program

EVALUATION = ("experiment=demo/eval", "target=tiny", "evaluation.levels=3", *QUIET)
DIGITS_EVALUATION = ("tasks=[digits]", "target=tiny", "evaluation.levels=3", *QUIET)


def error(function, *overrides, folder):
    """The line that ends a command."""
    with pytest.raises(SystemExit) as ending:
        function(*overrides, folder=folder)
    message = ending.value.code
    assert message.startswith("error: ") and "\n" not in message
    return message


@pytest.fixture
def no_download(monkeypatch):
    """Only a model without weights may be built, from which settings follow."""
    create_model = timm.create_model

    def built(*arguments, **settings):
        if torch.get_default_device().type != "meta":
            pytest.fail("built the target before it saw the data")
        return create_model(*arguments, **settings)

    monkeypatch.setattr(timm, "create_model", built)


@pytest.fixture
def ffcv():
    pytest.importorskip("ffcv", reason="FFCV is not installed: make ffcv")


@pytest.mark.slow
def test_without_imagenet_the_file_and_the_command_that_writes_it_are_named(tmp_path, no_download, ffcv):
    """Before weights are fetched, and before four processes are started."""
    message = error(train, "experiment=tve_vitb", f"data_dir={tmp_path}", folder=tmp_path / "run")
    assert str(tmp_path / "imagenet/train.beton") in message
    assert "python -m datamodules.write_beton" in message


@pytest.mark.parametrize("data", ["imagenet_folder", "imagenette", "cats_vs_dogs", "cifar10", "folder"])
def test_a_missing_folder_is_named(data, tmp_path, no_download):
    message = error(train, *TVE_RUN, f"data={data}", f"data_dir={tmp_path}", folder=tmp_path / "run")
    assert str(tmp_path) in message and "folder" in message


def test_missing_images_of_the_last_task_show_before_the_first_is_measured(tmp_path, no_download):
    missing = ("+data@tasks.mine.data=folder", "+tasks.mine.target.head=null", f"data_dir={tmp_path / 'nothing'}")
    message = error(evaluate, *EVALUATION, *missing, "tasks.odd.data.size.test=4", folder=tmp_path / "run")
    assert str(tmp_path / "nothing") in message


def test_settings_of_a_task_or_an_explainer_that_is_not_asked_for_are_named(tmp_path):
    message = error(evaluate, "experiment=studies/anyhead", "tasks=[digits]", *QUIET, folder=tmp_path)
    assert "expected tasks=[...] to name imagenet_val, got only settings of it" in message
    few = (*EVALUATION, "tasks.odd.data.size.test=4", "explainers=[chance]", "tasks.odd.target.head=null")
    message = error(evaluate, *few, "tasks.odd.data.task=digit", folder=tmp_path)
    assert "expected explainers=[...] to name oracle" in message and "(~explainers.oracle)" in message


def test_blocks_that_no_explainer_reads_are_named(tmp_path):
    message = error(train, "experiment=anyhead", f"data.root={tmp_path}", "blocks=[1]", folder=tmp_path / "run")
    assert "no setting blocks: nothing reads it; AnyHead reads explainer.network.blocks" in message


def test_an_unknown_experiment_lists_those_that_there_are(tmp_path):
    with pytest.raises(MissingConfigException, match="(?s)experiment/tve_vitg.*tve_vitb"):
        composed("experiment=tve_vitg", folder=tmp_path)


def test_without_ffcv_the_way_to_get_it_and_to_do_without_is_told(tmp_path, monkeypatch, no_download):
    monkeypatch.setitem(sys.modules, "ffcv", None)
    message = error(train, *TVE_RUN, "data=imagenet", folder=tmp_path)
    assert "make ffcv" in message and "data=imagenet_folder" in message


@pytest.mark.slow
def test_a_corrupt_beton_is_named(tmp_path, no_download, ffcv):
    (tmp_path / "images.beton").write_bytes(bytes(1000))
    paths = [f"data.{split}={tmp_path / 'images.beton'}" for split in ("train", "val")]
    message = error(train, *TVE_RUN, "data=imagenet", *paths, folder=tmp_path / "run")
    assert "images.beton is not a complete .beton" in message and "write it again" in message


@pytest.mark.slow
def test_a_corrupt_image_is_named_and_skipped_only_if_asked(tmp_path):
    """num_workers=1: the message comes out of another process."""
    draw_images(tmp_path / "train", count=9), draw_images(tmp_path / "val", count=4)
    (tmp_path / "train/dog/1.jpg").write_bytes(b"no image")
    command = (*TVE_RUN, "data=folder", f"data_dir={tmp_path}", "data.batch_size=9")
    for workers in (0, 1):
        message = error(train, *command, f"data.num_workers={workers}", folder=tmp_path / f"run_{workers}")
        assert message.startswith(f"error: {tmp_path}/train/dog/1.jpg: expected an image")
        assert "skip_corrupt=true" in message and "Traceback" not in message
    with pytest.warns(UserWarning, match=r"left out: .*train/dog/1\.jpg"):
        train(*command, "data.num_workers=0", "data.skip_corrupt=true", folder=tmp_path / "skipped")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "trained"
    train(*TVE_RUN, *DIGITS, folder=folder)
    return folder


WIDER = ("target.model.embed_dim=96", "target.model.num_heads=3")


def test_the_checkpoint_of_another_backbone_is_refused_with_both_widths(trained, tmp_path):
    path = trained / "checkpoints/last.ckpt"
    message = error(train, *TVE_RUN, *DIGITS, *WIDER, f"ckpt_path={path}", folder=tmp_path)
    assert "48 → 96" in message


def test_the_explainer_of_another_backbone_is_refused_with_both_widths(trained, tmp_path):
    path = trained / "explainer.safetensors"
    message = error(train, *TVE_RUN, *DIGITS, *WIDER, f"explainer.weights={path}", folder=tmp_path)
    assert str(path) in message and "48 → 96" in message


def test_the_explainer_of_another_grid_is_refused_with_both_grids(trained, tmp_path):
    path = trained / "explainer.safetensors"
    message = error(
        train,
        *TVE_RUN,
        *DIGITS,
        "grid.patch_size=16",
        "++grid.differs=true",
        f"explainer.weights={path}",
        folder=tmp_path,
    )
    assert "grid.patch_size: 8 → 16" in message


def test_the_head_of_another_backbone_is_refused_with_both_widths(tmp_path):
    save_file({"weight": torch.zeros(2, 24), "bias": torch.zeros(2)}, tmp_path / "head.safetensors")
    message = error(
        evaluate, *EVALUATION, f"tasks.odd.target.head={tmp_path / 'head.safetensors'}", folder=tmp_path / "run"
    )
    assert "width 24" in message and "48" in message


def test_a_grid_that_does_not_divide_the_image_is_refused(tmp_path):
    message = error(train, *TVE_RUN, *DIGITS, "grid.patch_size=7", folder=tmp_path)
    assert "image_size 64 is not a multiple of patch_size 7" in message


@pytest.mark.parametrize(
    ("common", "override", "told"),
    [
        (EVALUATION, "tasks.odd.target.head={}", "experiment=linear_head"),
        (DIGITS_EVALUATION, "target.head={}", "experiment=linear_head"),
        ((*TVE_RUN, *DIGITS), "explainer.weights={}", "train.py"),
        ((*TVE_RUN, *DIGITS), "ckpt_path={}", "[Cc]heckpoint"),
    ],
)
def test_a_missing_file_is_named_with_what_to_do(common, override, told, tmp_path):
    path = tmp_path / "nowhere.safetensors"
    function = evaluate if "evaluation.levels=3" in common else train
    message = error(function, *common, override.format(path), folder=tmp_path / "run")
    assert str(path) in message and re.search(told, message)


def test_to_resume_needs_a_checkpoint(tmp_path):
    message = error(train, *TVE_RUN, *DIGITS, "ckpt_path=last", folder=tmp_path)
    assert str(tmp_path / "checkpoints/last.ckpt") in message


def test_an_error_in_the_code_keeps_its_traceback(tmp_path):
    composed(*TVE_RUN, folder=tmp_path)
    for mistake in (RuntimeError("shapes"), TypeError("unsupported operand"), KeyError("embedding")):
        with pytest.raises(type(mistake)), program.errors_in_one_line():
            raise mistake


def test_the_traceback_can_be_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(InputError):
        train(*TVE_RUN, "data=folder", f"data_dir={tmp_path}", folder=tmp_path / "run")


def printed(*overrides, folder):
    """What `python train.py` printed, which ended with exit code 1."""
    with forked("train.py", *overrides, folder=folder) as process:
        process.join(120)
    assert process.exitcode == 1
    return Path(f"{folder}.log").read_text()


@pytest.mark.slow
def test_the_command_itself_prints_that_line_and_no_traceback(tmp_path, ffcv):
    """Of the four processes that the experiment would take, none was started."""
    output = printed("experiment=tve_vitb", f"data_dir={tmp_path}", folder=tmp_path / "run")
    assert "Traceback" not in output
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "imagenet/train.beton" in line
    assert not (tmp_path / "run").exists()


def test_a_misspelt_name_on_the_command_line_prints_no_traceback(tmp_path):
    output = printed("experiment=tve_vitg", folder=tmp_path / "run")
    assert "Traceback" not in output and "tve_vitb" in output


@pytest.fixture(scope="module")
def two_classes(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    draw_images(root / "train"), draw_images(root / "val")
    return root


HEAD_RUN = ("target=tiny", "data.num_workers=0", *QUIET)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["linear_head", "full_finetuning"])
def test_another_number_of_classes_than_the_folder_has_is_refused_with_both(experiment, two_classes, tmp_path):
    command = (f"experiment={experiment}", "data=folder", f"data.root={two_classes}", f"cache_dir={tmp_path}")
    message = error(train, *command, *HEAD_RUN, "module.num_classes=3", folder=tmp_path / "run")
    assert "the 3 classes of module.num_classes, got 2 (cat, dog)" in message and "leave the number out" in message


@pytest.mark.slow
def test_a_single_class_is_too_few_for_a_head_and_enough_for_an_explainer(tmp_path):
    for split in ("train", "val"):
        draw_images(tmp_path / split, count=8, classes=("all",))
    data = ("data=folder", f"data.root={tmp_path}", "data.num_workers=0", "data.batch_size=8")
    message = error(train, "experiment=full_finetuning", *HEAD_RUN, *data, folder=tmp_path / "head")
    assert "at least 2 classes to tell apart, got 1; add images of another class" in message
    train(*TVE_RUN, *data, "debug=fast", folder=tmp_path / "tve")


@pytest.mark.parametrize("number", ["null", "2"])
def test_images_without_labels_give_no_head(number, two_classes, tmp_path):
    roots = [f"data.{split}.roots=[{two_classes / split}]" for split in ("train", "val")]
    command = ("experiment=linear_head", "data=unlabelled", "cache=sources", *roots, *HEAD_RUN, f"cache_dir={tmp_path}")
    message = error(train, *command, f"module.num_classes={number}", folder=tmp_path / "run")
    assert "take labelled images" in message


def test_embeddings_of_a_backbone_in_training_are_not_stored(two_classes, tmp_path):
    command = ("experiment=linear_head", "data=folder", f"data.root={two_classes}", f"cache_dir={tmp_path}")
    message = error(train, *command, *HEAD_RUN, "module.tune=all", folder=tmp_path / "run")
    assert "module.tune=head" in message and "set cache=none" in message


def test_a_class_that_only_the_validation_images_have_is_named(tmp_path, no_download):
    draw_images(tmp_path / "train"), draw_images(tmp_path / "val", classes=("cat", "cow"))
    command = ("experiment=full_finetuning", "data=folder", f"data.root={tmp_path}")
    message = error(train, *command, *HEAD_RUN, folder=tmp_path / "run")
    assert "['cow', 'dog']" in message and "add the missing folders" in message


def test_a_folder_that_is_not_mura_is_named(tmp_path, no_download):
    message = error(train, "experiment=linear_head", "data=mura", f"data_dir={tmp_path}", folder=tmp_path / "run")
    assert str(tmp_path / "MURA-v1.1/train") in message and "study1_positive/image1.png" in message


@pytest.mark.parametrize("content", [None, b"", b"torn"])
def test_a_missing_or_damaged_file_of_the_target_is_named(content, tmp_path):
    """timm would not name it."""
    path = tmp_path / "target.safetensors"
    if content is not None:
        path.write_bytes(content)
    for function, command in ((train, (*TVE_RUN, *DIGITS)), (evaluate, (*EVALUATION, "~tasks.odd", "~tasks.loop"))):
        message = error(function, *command, f"target.model.checkpoint_path={path}", folder=tmp_path / "run")
        told = f"no model at {path}: train it first" if content is None else f"{path}: expected weights, got a damaged"
        assert told in message
