"""The command `explainers`, in this process: what it prints and writes, and one line for what a user can correct."""

import errno
import json
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
from functools import partial, partialmethod
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
from clips import random_directions
from conftest import wake
from PIL import Image
from safetensors.torch import save_file

import explainers
from explainers.app import command, options, page, session
from explainers.app.explanation import Explanation
from explainers.app.session import Session
from explainers.errors import InputError
from explainers.models import TargetModel
from explainers.models.heads import save_head
from explainers.report.overlays import wrap_title
from explainers.runtime import progress
from explainers.text import TextHead

ROOT = Path(__file__).parents[2]
MODEL = "test_vit"


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    file = tmp_path_factory.mktemp("weights") / "vit.safetensors"
    save_file(wake(timm.create_model(MODEL)).state_dict(), file)
    return file


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, no_sockets):
    """The folder in which commands run, with three images; pictures are small, and no command may open a connection."""
    monkeypatch.setattr(Explanation, "picture", partialmethod(Explanation.picture, size=192))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    draws = np.random.default_rng(0)
    for name in ("cat.jpg", "photos/dog.png", "photos/more/dog.jpg"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draws.integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(file)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(weights, capsys):
    """Run `explainers ...` with the small model: its exit status, and the lines of its output and of its errors."""

    def run(*words, model=True):
        chosen = ["--model", MODEL, "--weights", str(weights)] if model else []
        try:
            status = command.main([*words, *chosen])
        except SystemExit as exited:
            status = exited.code
        out, err = capsys.readouterr()
        return status, out.splitlines(), err.splitlines()

    return run


def written(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_an_image_gives_a_line_and_a_picture(run, folder, weights):
    status, lines, _ = run("explain", "cat.jpg", "--method", "GAE", "--top", "2")
    assert status == 0 and len(lines) == 2
    assert lines[0].startswith("cat.jpg: ") and " by GAE -> explained/cat_GAE.png (top 2: " in lines[0]
    assert lines[1].endswith(f"explainers serve --model {MODEL} --weights {weights} --method GAE")
    assert Image.open(folder / "explained/cat_GAE.png").width >= 160
    assert run("explain", "cat.jpg", "--method", "GAE", "--patches", "--output", "sharp.jpg")[0] == 0
    sharp = Image.open(folder / "sharp.jpg")
    assert sharp.format == "JPEG" and sharp.tobytes() != Image.open(folder / "explained/cat_GAE.png").tobytes()


def test_programs_read_objects_heatmaps_and_a_manifest(run, folder, weights):
    (folder / "names.txt").write_text("\n".join(f"number {index}" for index in range(1000)))
    (folder / "photos/broken.png").write_text("no image")
    words = ["--class", "504", "2", "--method", "GAE,RISE(masks=4)", "--class-names", "names.txt", "--batch-size", "2"]
    status, lines, errors = run("explain", "cat.jpg", "photos/broken.png", *words, "--json", "--npy")
    assert status == 1 and len(errors) == 2 and len(lines) == 4
    described = [json.loads(line) for line in lines]
    session = Session(timm.create_model(MODEL, checkpoint_path=weights), "GAE")
    for each in described:
        heatmap = np.load(each["heatmap"])
        assert list(heatmap.shape) == each["shape"] == [10, 10] and Image.open(each["picture"]).width >= 160
        (expected,) = session.explain("cat.jpg", each["class"]["index"])
        assert each["class"]["name"] == f"number {each['class']['index']}" and each["box"] == list(expected.box)
        assert each["class"]["score"] == pytest.approx(expected.explained.score, rel=1e-4)
        if each["method"] == "GAE":
            np.testing.assert_allclose(heatmap, expected.heatmap.numpy(), rtol=1e-4, atol=1e-6)
    manifest = json.loads((folder / "explained/manifest.json").read_text())
    assert manifest["explanations"] == described and list(manifest["failed"]) == ["broken.png"]
    target = session.target
    assert manifest["model"] == {"name": target.timm_name, "score": "softmax"} | target.identity()
    assert manifest["transform"]["size"] == [160, 160] and manifest["packages"]["torch"]
    assert manifest["methods"]["RISE(masks=4)"] == {"forward_passes": 4, "seed": 0}


def test_a_comparison_is_an_object_with_both_heatmaps(run, folder, weights):
    words = ["--similar-to", "photos/dog.png", "--json", "--npy", "--output", "map.png"]
    status, lines, _ = run("explain", "cat.jpg", *words)
    (described,) = map(json.loads, lines)
    model = timm.create_model(MODEL, checkpoint_path=weights)
    found = explainers.compare(folder / "cat.jpg", folder / "photos/dog.png", model)
    for kind, heatmap in {"heatmap": found.heatmap, "other_heatmap": found.other_heatmap}.items():
        np.testing.assert_allclose(np.load(described[kind]), heatmap.numpy(), rtol=1e-3, atol=1e-6)
    assert status == 0 and described["other"] == "dog.png" and -1 <= described["similarity"] <= 1
    assert json.loads((folder / "manifest.json").read_text())["explanations"] == [described]
    status, lines, _ = run("nearest", "cat.jpg", "photos", "--k", "2", "--output", "near")
    assert status == 0 and written(folder / "near") == [f"cat_DirectPaths_nearest_{n}.png" for n in (1, 2)]
    assert re.match(r"1. cat.jpg: -?\d\.\d\d like (more/)?dog.\w+ by DirectPaths -> near/", lines[0])


@pytest.mark.slow
def test_all_images_below_a_folder_but_no_earlier_pictures(run, folder):
    before = {name: (folder / name).read_bytes() for name in written(folder)}
    for _ in range(2):
        status, lines, _ = run("explain", ".", "cat.jpg", "--method", "Chance")
        assert status == 0 and len(lines) == 4
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert written(folder / "explained") == [f"{name}_Chance.png" for name in ("cat", "photos/dog", "photos/more/dog")]


def test_no_picture_replaces_an_image_or_another_picture(run, folder):
    for name in ("cat.png", "cat_Chance.png"):
        (folder / name).write_bytes((folder / "photos/dog.png").read_bytes())
    status, _, _ = run("explain", "cat.jpg", "cat.png", "cat_Chance.png", "--method", "Chance", "--output", ".")
    assert status == 0 and (folder / "cat_Chance.png").read_bytes() == (folder / "photos/dog.png").read_bytes()
    assert {"cat_Chance_2.png", "cat_Chance_3.png", "cat_Chance_Chance.png"} <= set(written(folder))


def test_a_loop_of_links_and_an_unknown_user_s_folder_end_in_no_traceback(run, folder):
    (folder / "photos/loop.jpg").symlink_to("loop.jpg")
    for words in (["~nobody at all/a.jpg"], ["cat.jpg", "--output", "photos/loop.jpg/maps"]):
        status, lines, errors = run("explain", *words, "--method", "Chance")
        assert status == 1 and lines == [] and len(errors) == 1
    assert run("explain", "cat.jpg", "--method", "Chance", "--output", "~nobody at all/maps")[0] == 0
    assert written(folder / "~nobody at all") == ["maps/cat_Chance.png"]


@pytest.fixture
def text_head(monkeypatch):
    """The model has a text head, of random directions."""
    head = TextHead(partial(random_directions, width=64))
    monkeypatch.setattr(session, "find_text_head", lambda target, _=None: head)


@pytest.mark.situation(26)
def test_twelve_bits_need_the_value_of_white(run, folder):
    Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64)).save("xray.png")
    status, _, errors = run("explain", "xray.png", "--method", "Chance")
    assert status == 1 and "give the model --white=4095" in errors[0]
    for white in ("4095", "0,4095"):
        assert run("explain", "xray.png", "--method", "Chance", "--white", white)[0] == 0
    _, _, errors = run("explain", "xray.png", "--method", "Chance", "--white", "2048")
    assert errors == ["explainers: 50.0% of the pixels are beyond white=2048.0, and are clipped to it"]


@pytest.mark.slow
def test_texts_in_files_named_after_them(run, folder, text_head):
    words = ["--text", "a cat", "a/dog", "--against", "a bird", "--method", "GAE"]
    status, lines, errors = run("explain", "cat.jpg", "photos", *words)
    assert errors == [] and status == 0 and len(lines) == 7
    assert lines[0].startswith("cat.jpg: a cat ") and " rather than a bird by GAE -> explained/" in lines[0]
    assert written(folder / "explained")[0] == "cat_GAE_a_cat.png" and len(written(folder / "explained")) == 6


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_picture_is_written_leaves_no_half_of_it(number, run, folder, monkeypatch):
    before = signal.getsignal(number)
    write = Path.write_bytes

    def stopped(file, content):
        write(file, content[:100])
        if "dog" in file.name:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Path, "write_bytes", stopped)
    status, lines, errors = run("explain", "cat.jpg", "photos", "--method", "Chance")
    assert (status, len(lines), errors) == (128 + number, 1, ["explainers: stopped after 1 of 3 pictures"])
    assert written(folder / "explained") == ["cat_Chance.png"]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("command_line", ["explain cat.jpg --output map.png", "benchmark cat.jpg --output b.json"])
def test_a_full_disk_gives_one_line_and_no_half_of_a_file(command_line, run, folder, monkeypatch):
    before = written(folder)

    def full(file, content, *_, **__):
        file.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    for write in ("write_bytes", "write_text"):
        monkeypatch.setattr(Path, write, full)
    method = "--methods" if command_line.startswith("benchmark") else "--method"
    status, _, errors = run(*command_line.split(), method, "Chance")
    reason = "No space left on device: free some space, or use another path"
    assert (status, errors) == (1, [f"explainers: cannot read or write {command_line.split()[-1]}: {reason}"])
    assert written(folder) == before


def test_output_to_a_full_disk_gives_one_line(monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", open("/dev/full", "w"))  # noqa: SIM115
        assert command.main(["list"]) == 1
    assert capsys.readouterr().err.startswith("explainers: cannot read or write the output: No space left on device: ")


def test_the_head_and_the_score_are_those_of_the_options(run, folder, weights):
    target = TargetModel(timm.create_model(MODEL, checkpoint_path=str(weights)))
    head = torch.nn.Linear(target.embed_dim, 3)
    save_head(head, folder / "head.safetensors", target.backbone_identity(), ["red", "green", "blue"])
    headed = TargetModel(target, folder / "head.safetensors", "sigmoid").eval()
    expected = explainers.explain("cat.jpg", headed, method="Chance", classes="green").title
    options = ["--head", "head.safetensors", "--class", "green", "--method", "Chance", "--score", "sigmoid"]
    status, lines, _ = run("explain", "cat.jpg", *options)
    assert status == 0 and lines[0].startswith(f"cat.jpg: {expected} by") and "--score sigmoid" in lines[1]


def test_a_broken_image_stops_no_others_and_no_output_has_characters_that_turn_text(run, folder, weights):
    turning = "\u202e"
    (folder / "photos/dog.png").rename(folder / f"photos/{turning}gpj.png")
    (folder / f"photos/{turning}broken.png").write_text("no image")
    target = TargetModel(timm.create_model(MODEL, checkpoint_path=str(weights)))
    classes = [f"{turning}red", "green", "blue"]
    save_head(torch.nn.Linear(target.embed_dim, 3), folder / "h.safetensors", target.backbone_identity(), classes)
    status, lines, errors = run("explain", "photos", "--head", "h.safetensors", "--class", "0", "--method", "GAE")
    assert status == 0 and lines[0].startswith("\ufffdgpj.png: \ufffdred 0.")
    assert len(lines) == 3 and len(errors) == 2 and errors[0].startswith("explainers: \ufffdbroken.png: ")
    assert errors[1] == "explainers: left out: 1 file (\ufffdbroken.png), of 3 images"
    assert turning not in "".join([*lines, *errors, *written(folder / "explained")])
    assert wrap_title(f"{turning}red 0.83", 20, len) == ["\ufffdred 0.83"]


def test_thin_photos_are_drawn_and_bad_files_end_no_folder_unless_they_are_named(run, folder):
    for width, height in ((1000, 1), (2, 900)):
        Image.new("RGB", (width, height), "red").save(folder / f"photos/{width}.png")
    bad = ["a.jpg", "b.npy", "c.npy"]
    (folder / "photos/a.jpg").write_bytes((folder / "cat.jpg").read_bytes()[:200])
    np.save(folder / "photos/b.npy", np.zeros((5, 8, 7), np.uint8))
    np.save(folder / "photos/c.npy", np.zeros((8, 8, 3)))
    status, lines, errors = run("explain", "photos", "--method", "Chance")
    assert status == 0 and len(lines) == 5 and len(written(folder / "explained")) == 4
    assert [line.split(": ")[1] for line in errors[:3]] == bad
    assert errors[3:] == ["explainers: left out: 3 files (a.jpg, b.npy, c.npy), of 7 images"]
    for words in ("photos photos/a.jpg --method Chance", "photos/a.jpg --similar-to cat.jpg --method DirectPaths"):
        assert run("explain", *words.split())[0] == 1


def test_many_passes_are_announced_and_reported_within_an_image(run, folder, monkeypatch):
    monkeypatch.setattr(options, "MANY", 10)
    monkeypatch.setattr(progress, "EVERY", 0)
    methods = ["--method", "GAE", "--method", "RISE(chunk_size=8)", "--passes", "16", "--class", "1", "504"]
    status, lines, errors = run("explain", "cat.jpg", *methods)
    assert status == 0 and len(lines) == 5 and " by Refined(prior=GAE, passes=16) -> " in lines[0]
    assert any(": 16 forward passes for each picture" in line for line in errors)
    reported = [line.partition(" passes")[0] for line in errors if "by RISE" in line and ": 0 of" not in line]
    assert reported == [f"cat.jpg by RISE(chunk_size=8, masks=16): {n} of 32" for n in (8, 16, 24, 32)]
    assert len(written(folder / "explained")) == 4


BAD = {
    "explain missing.jpg": (1, "there is no such file"),
    "explain cat.jpg --class tabbi": (1, "--class=tabbi: expected one of the model's 1000 classes: did you mean tabby"),
    "explain cat.jpg --method RISE(100)": (2, "RISE(100)"),
    "explain cat.jpg --method GAE,RISE --output map.png": (1, "expected a folder for 2 pictures"),
    "explain cat.jpg --output cat.jpg": (1, "expected another file than the image itself"),
    "explain cat.jpg --output notes.txt/maps": (1, "expected a folder for pictures"),
    "explain cat.jpg --top -1": (2, "got -1"),
    "explain cat.jpg --similar-to photos": (1, "--similar-to: expected one image"),
    "explain cat.jpg --similar-to cat.jpg --method CAM,CAT": (1, "--method CAM, CAT: expected one method"),
    "explain cat.jpg --bands a,2,3": (2, "--bands"),
    "explain cat.jpg --bands 2,1,0": (1, "--bands=2,1,0: the model has 3 channels"),
    "explain cat.jpg --class-names notes.txt": (1, "--class-names"),
    "explain cat.jpg --image-size 17": (1, "--image-size"),
    "explain cat.jpg --method GAE,GAE": (1, "GAE, GAE"),
    "benchmark cat.jpg --output photos": (1, "the folder photos"),
    "explain cat.jpg --model test_resnet --weights {weights}": (1, "it lacks "),
    "explain cat.jpg --model test_vit": (1, "--weights=FILE"),
    "explain cat.jpg --head none.safetensors": (1, "no head at none.safetensors"),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_gives_one_line(words, run, folder, weights):
    (folder / "notes.txt").write_text("no image")
    method = [] if "explain" not in words or "--method" in words or "--explainer" in words else ["--method", "Chance"]
    given = [word.format(weights=weights) for word in words.split()]
    status, lines, errors = run(*given, *method, model="--model" not in words)
    assert status == BAD[words][0] and BAD[words][1] in errors[-1]
    assert lines == [] and len(errors) == 1 and errors[0].startswith("explainers")


def test_settings_of_messages_are_written_as_options():
    error = InputError("image_size: take image_size=(32, 48), as the 2 classes: labels=folder", "image_size", "labels")
    assert error.setting == "image_size"
    assert error.spell(command.name_option) == (
        "--image-size: take --image-size=32x48, as the 2 classes: --labels=folder"
    )
    assert pickle.loads(pickle.dumps(error)).settings == error.settings  # from another process


def test_serve_passes_the_options_on(run, monkeypatch):
    calls = []
    monkeypatch.setattr(page, "serve", lambda *of, **settings: calls.append((of, settings)))
    assert run("serve", "--port", "7861", "--method", "GAE")[0] == 0
    (((session,), settings),) = calls
    assert (session.target.name, session.method) == (MODEL, "GAE")
    assert settings == {"host": "127.0.0.1", "port": 7861, "open_browser": False, "domain": None, "audit": None}


def test_list_names_explainers_methods_extras_and_what_explains_a_model(run):
    assert f"(those that explain {MODEL}):" in "\n".join(run("list")[1])
    status, lines, _ = run("list", model=False)
    text = "\n".join(lines)
    assert status == 0 and repr(explainers.available()).splitlines()[0] in text
    names = text.partition("for --method (")[2].partition("Behind")[0].replace("\n", " ")
    assert {"GAE", "RISE", "GradCAM"} <= {name.strip() for name in names.partition(":")[2].split(",")}
    assert "PLUS," not in names and "  methods  installed, for" in text


def test_help_version_and_list_import_neither_torch_nor_timm(folder):
    program = (
        "import sys\nfrom explainers.app.command import main\n"
        "for words in (['--help'], ['--version'], ['list', '--help']):\n"
        "    try: main(words)\n    except SystemExit as exited: assert exited.code == 0\n"
        "assert main(['list']) == 0\n"
        "print(sorted({'torch', 'timm', 'starlette'} & sys.modules.keys()))"
    )
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=ascii_only)
    assert done.returncode == 0 and done.stdout.endswith("[]\n"), done.stderr
    assert "examples:" in done.stdout and f"explainers {explainers.__version__}" in done.stdout


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTED = sorted(
    {line for page in PAGES for line in re.findall(r"^(?:\$ )?explainers (.*)$", page.read_text(), re.M)}
)


def test_what_the_documentation_says_to_type_has_these_options():
    assert len(DOCUMENTED) > 10
    for line in DOCUMENTED:
        words = shlex.split(line, comments=True)
        assert words[0] in ("--help", "--version") or command.parser().parse_args(words).run


@pytest.mark.slow
def test_benchmark_prints_a_table_and_writes_all_numbers(run, folder):
    status, lines, errors = run("benchmark", "photos", "cat.jpg", "--methods", "auto,GAE", "--output", "a/b.json")
    assert status == 0
    content = json.loads((folder / "a/b.json").read_text())
    assert list(content["results"]) == ["Chance", "DecompX-SkipPLUS", "GAE"] and len(content["images"]) == 3
    assert content["identity"]["backbone_sha256"] and content["packages"]["torch"]
    assert content["transform"]["resize"] == "center" and content["transform"]["crop_pct"] < 1
    assert content["results"]["GAE"]["forward_passes"] == 1 and content["differences"]["fidelity_plus"]
    assert any("minus DecompX-SkipPLUS" in line for line in lines)
