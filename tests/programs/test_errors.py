"""A mistake of the user ends in one line that says what to do."""

import errno
import re
import sys
from pathlib import Path

import pytest
import timm
import torch
from commands import DIGITS, QUIET, TVE_RUN, composed, draw_images, evaluate, train
from fork_server import PATIENCE
from forks import forked

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


def test_a_missing_folder_is_named(tmp_path, no_download):
    message = error(train, *TVE_RUN, "data=folder", f"data_dir={tmp_path}", folder=tmp_path / "run")
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


def test_without_ffcv_the_way_to_get_it_and_to_do_without_is_told(tmp_path, monkeypatch, no_download):
    monkeypatch.setitem(sys.modules, "ffcv", None)
    message = error(train, *TVE_RUN, "data=imagenet", folder=tmp_path)
    assert "make ffcv" in message and "data=imagenet_folder" in message


@pytest.mark.slow
def test_a_corrupt_image_is_named_and_skipped_only_if_asked(tmp_path):
    """num_workers=1: the message comes out of another process."""
    draw_images(tmp_path / "train", count=9), draw_images(tmp_path / "val", count=4)
    (tmp_path / "train/dog/1.jpg").write_bytes(b"no image")
    command = (*TVE_RUN, "data=folder", f"data_dir={tmp_path}", "data.batch_size=9")
    message = error(train, *command, "data.num_workers=1", folder=tmp_path / "run")
    assert message.startswith(f"error: {tmp_path}/train/dog/1.jpg: expected an image")
    assert "skip_corrupt=true" in message and "Traceback" not in message
    with pytest.warns(UserWarning, match=r"left out: .*train/dog/1\.jpg"):
        train(*command, "data.num_workers=0", "data.skip_corrupt=true", folder=tmp_path / "skipped")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "trained"
    train(*TVE_RUN, *DIGITS, folder=folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "name"), [("ckpt_path", "checkpoints/last.ckpt"), ("explainer.weights", "explainer.safetensors")]
)
def test_what_was_trained_for_another_backbone_is_refused_with_both_widths(key, name, trained, tmp_path):
    wider = ("target.model.embed_dim=96", "target.model.num_heads=3")
    assert "48 → 96" in error(train, *TVE_RUN, *DIGITS, *wider, f"{key}={trained / name}", folder=tmp_path)


@pytest.mark.parametrize(
    ("common", "override", "told"),
    [
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


def test_an_error_in_the_code_keeps_its_traceback(tmp_path):
    cfg = composed(*TVE_RUN, folder=tmp_path)
    for mistake in (RuntimeError("shapes"), KeyError("embedding"), FileNotFoundError(errno.ENOENT, "none", "/x")):
        with pytest.raises(type(mistake)), program.errors_in_one_line(cfg):
            raise mistake


def test_the_command_itself_prints_that_line_and_no_traceback(tmp_path):
    folder = tmp_path / "run"
    with forked("train.py", *TVE_RUN, "data=folder", f"data_dir={tmp_path}/nowhere", folder=folder) as process:
        process.join(PATIENCE)
    output = Path(f"{folder}.log").read_text()
    assert process.exitcode == 1 and "Traceback" not in output
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "nowhere" in line


@pytest.fixture(scope="module")
def two_classes(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    draw_images(root / "train"), draw_images(root / "val")
    return root


HEAD_RUN = ("target=tiny", "data.num_workers=0", *QUIET)


def test_embeddings_of_a_backbone_in_training_are_not_stored(two_classes, tmp_path):
    command = ("experiment=linear_head", "data=folder", f"data.root={two_classes}", f"cache_dir={tmp_path}")
    message = error(train, *command, *HEAD_RUN, "module.tune=all", folder=tmp_path / "run")
    assert "module.tune=head" in message and "set cache=none" in message


def test_a_class_that_only_the_validation_images_have_is_named(tmp_path, no_download):
    draw_images(tmp_path / "train"), draw_images(tmp_path / "val", classes=("cat", "cow"))
    command = ("experiment=full_finetuning", "data=folder", f"data.root={tmp_path}")
    message = error(train, *command, *HEAD_RUN, folder=tmp_path / "run")
    assert "['cow', 'dog']" in message and "add the missing folders" in message


@pytest.mark.parametrize("content", [None, b"torn"])
def test_a_missing_or_damaged_file_of_the_target_is_named(content, tmp_path):
    path = tmp_path / "target.safetensors"
    if content is not None:
        path.write_bytes(content)
    for function, command in ((train, (*TVE_RUN, *DIGITS)), (evaluate, DIGITS_EVALUATION)):
        message = error(function, *command, f"target.model.checkpoint_path={path}", folder=tmp_path / "run")
        assert str(path) in message
