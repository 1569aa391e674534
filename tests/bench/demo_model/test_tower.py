"""The tower's trainer: it computes what transformers computes, and its pictures and questions are right."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoImageProcessor, AutoModelForImageTextToText

import aengine
from bench.demo_model import network as net
from bench.demo_model import tower as vision
from bench.demo_model import tower_trainer
from bench.demo_model.evaluate import MODEL
from bench.demo_model.picture_questions import FAMILIES, ask
from bench.demo_model.pictures import MOST_SHAPES, choose_size, draw
from bench.demo_model.tower_decoder import states_of
from bench.demo_model.tower_samples import Batch, Job, Pictures, make_batch, stream

pytestmark = pytest.mark.anyio

SHAPE = vision.TowerShape()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a random tower."""
    folder = tmp_path_factory.mktemp("seeing")
    for path in MODEL.iterdir():
        shutil.copyfile(path, folder / path.name)
    torch.manual_seed(1)
    vision.save(vision.Tower(SHAPE), folder)
    return folder


def test_pictures_are_resized_as_the_processor_resizes_them(seeing: Path) -> None:
    processor = AutoImageProcessor.from_pretrained(seeing, backend="pil")
    rng = Random(1)
    for _ in range(12):
        image = draw(rng).image
        theirs = processor(images=image, return_tensors="pt")
        patches, rows, columns = vision.patches_of(image, SHAPE)
        merge = SHAPE.spatial_merge_size
        assert theirs["image_grid_thw"].tolist() == [[1, rows * merge, columns * merge]]
        ours = vision.inputs_of(torch.from_numpy(patches))
        torch.testing.assert_close(ours, theirs["pixel_values"], atol=2.1 / 255, rtol=0)


def test_chats_about_pictures_are_computed_as_in_transformers(seeing: Path) -> None:
    """States at all tokens of several chats about one picture: the tower, its deep outputs, positions and masks."""
    theirs = AutoModelForImageTextToText.from_pretrained(seeing, dtype=torch.float32).eval()
    network, tower = net.load(seeing, torch.device("cpu")), vision.load(seeing)
    tokenizer = Tokenizer.from_file(str(seeing / "tokenizer.json"))
    image_token = theirs.config.image_token_id
    rng = Random(2)
    for _ in range(3):
        batch = make_batch(2, 2, SHAPE, tokenizer, rng)
        pictures = batch.pictures
        with torch.no_grad():
            pixels = vision.inputs_of(pictures.patches)
            states = states_of(network, batch, *tower(pixels, pictures.rows, pictures.columns))
            logits = network.logits(states)
        done = 0
        merge = SHAPE.spatial_merge_size
        grid = torch.tensor([[1, pictures.rows * merge, pictures.columns * merge]])
        for chat, picture in enumerate(batch.picture.tolist()):
            own = batch.ids[chat][batch.there[chat]]
            image = torch.full((pictures.rows * pictures.columns,), image_token)
            ids = torch.cat((batch.before, image, own))[None]
            with torch.no_grad():
                wanted = theirs(
                    ids,
                    pixel_values=pixels[picture],
                    image_grid_thw=grid,
                    mm_token_type_ids=(ids == image_token).int(),
                ).logits[0, -len(own) :]
            torch.testing.assert_close(logits[done : done + len(own)], wanted, atol=2e-3, rtol=1e-3)
            done += len(own)


def test_saving_and_loading_keeps_the_tower_and_the_decoder(seeing: Path, tmp_path: Path) -> None:
    """A plain decoder becomes one that sees. Saving again replaces its tower."""
    shape = net.Shape(num_hidden_layers=1)
    torch.manual_seed(0)
    network = net.Network(shape)
    net.save(network, tmp_path, turn_end=9, text_end=8)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((MODEL / name).read_bytes())
    for _ in range(2):
        tower = vision.Tower(SHAPE)
        vision.save(tower, tmp_path)
        for loaded, kept in zip(vision.load(tmp_path).parameters(), tower.parameters()):
            torch.testing.assert_close(loaded, kept.bfloat16().float())
        for loaded, kept in zip(net.load(tmp_path, torch.device("cpu")).parameters(), network.parameters()):
            torch.testing.assert_close(loaded, kept.bfloat16().float())
    assert (tmp_path / "tokenizer.json").read_bytes() == (seeing / "tokenizer.json").read_bytes()


async def test_the_engine_answers_as_the_trainers_network(seeing: Path) -> None:
    """Greedy answers about pictures. The decoder's text stays as it was."""
    network, tower = net.load(seeing, torch.device("cpu")), vision.load(seeing)
    tokenizer = Tokenizer.from_file(str(seeing / "tokenizer.json"))
    rng = Random(6)
    async with aengine.Engine(str(seeing), device="cpu", kv_cache_gib=0.1, progress=False) as engine:
        greeting = await engine.chat([{"role": "user", "content": "hi"}], max_tokens=24)
        assert greeting.text == "Hello! 👋 How can I help you?"
        for _ in range(3):
            image = draw(rng).image
            part, text = {"type": "image", "image": image}, {"type": "text", "text": "What is this?"}
            answer = await engine.chat([{"role": "user", "content": [text, part]}], max_tokens=12, ignore_eos=True)
            assert list(answer.token_ids) == greedy(network, tower, tokenizer, image, "What is this?", 12)


def greedy(
    network: net.Network, tower: vision.Tower, tokenizer: Tokenizer, image: Image.Image, question: str, count: int
) -> list[int]:
    patches, rows, columns = vision.patches_of(image, SHAPE)
    ids = tokenizer.encode(f"{question}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False).ids
    nothing = torch.zeros(1, rows * columns, dtype=torch.int64)
    pictures = Pictures(torch.from_numpy(patches)[None], rows, columns, nothing, nothing)
    before = torch.tensor(tokenizer.encode("<|im_start|>user\n", add_special_tokens=False).ids)
    drawn: list[int] = []
    with torch.no_grad():
        seen = tower(vision.inputs_of(pictures.patches), rows, columns)
        for _ in range(count):
            own = torch.tensor([[*ids, *drawn]])
            batch = Batch(pictures, before, torch.zeros(1, dtype=torch.int64), own, own >= 0, own)
            drawn.append(int(network.logits(states_of(network, batch, *seen))[-1].argmax()))
    return drawn


def test_every_step_has_its_batch_whichever_process_makes_it() -> None:
    job = Job("answers", 2, 2, SHAPE, str(MODEL / "tokenizer.json"), seed=3)
    here, elsewhere = (list(stream(job, range(4, 7), processes)) for processes in (1, 2))
    assert [one.ids.tolist() for one in here] == [one.ids.tolist() for one in elsewhere]
    assert all(torch.equal(a.pictures.patches, b.pictures.patches) for a, b in zip(here, elsewhere))
    assert here[0].ids.tolist() == job.batch(4).ids.tolist() != here[1].ids.tolist()


def test_training_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of some steps each give the tower of one run."""

    def train(folder: str, *lengths: int) -> dict[str, torch.Tensor]:
        for steps in lengths:
            words = f"--out {tmp_path / folder} --head-steps 1 --head-pictures 2 --pictures 2 --chats 1 --steps {steps}"
            monkeypatch.setattr(sys, "argv", ["tower_trainer", *words.split()])
            tower_trainer.main()
        return dict(vision.load(tmp_path / folder).named_parameters())

    monkeypatch.setattr(tower_trainer, "learning_rate", lambda *_: 0.001)  # it depends on the length otherwise
    whole, parts = train("whole", 3), train("parts", 1, 3)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_every_picture_has_things_that_do_not_overlap() -> None:
    rng = Random(3)
    for _ in range(60):
        size = choose_size(rng)
        picture = draw(rng, size)
        assert picture.image.size == size
        assert 1 <= len(picture.things) <= MOST_SHAPES
        short = min(size)
        for i, one in enumerate(picture.things):
            assert one.radius * short <= one.x * size[0] + 1
            assert one.radius * short <= one.y * size[1] + 1
            for other in picture.things[:i]:
                apart = np.hypot((one.x - other.x) * size[0], (one.y - other.y) * size[1])
                assert apart > (one.radius + other.radius) * short


def test_a_seed_fixes_a_picture() -> None:
    assert draw(Random(4)).image.tobytes() == draw(Random(4)).image.tobytes()


@pytest.mark.parametrize("unseen", [False, True])
def test_answers_name_all_that_the_picture_has(unseen: bool) -> None:
    rng = Random(5)
    asked = set()
    for _ in range(200):
        picture = draw(rng)
        question = ask(picture, rng, unseen=unseen)
        assert question is not None
        asked.add(question.family)
        assert "{" not in question.text
        counts = Counter((thing.kind, thing.colour) for thing in picture.things)
        parts = question.answer.lower().removesuffix(".").split(" and ")
        numbers = {"a": 1, "an": 1, "two": 2, "three": 3, "four": 4}
        told = {}
        for part in parts:
            number, colour, kind = part.split()
            told[kind.removesuffix("s"), colour] = numbers[number]
        assert told == counts
    assert asked == set(FAMILIES)
