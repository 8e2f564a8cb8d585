"""Sokoban's tiny model: its files, how it plays, whom it learned from; and advantages by exact distances."""

import random

import numpy as np
import pytest
import torch
from tiny_models import exam_of
from transformers import AutoTokenizer

from g2po_envs.sokoban import (
    SIZES,
    SOKOBAN_COMPACT_PROMPT,
    SokobanEnvironment,
    distance_of,
    expert,
    level_rows,
    limited_expert,
    make_tiny_vision_model,
)
from g2po_envs.sokoban.exact import ExactAdvantage
from g2po_envs.sokoban.make_tiny_model import FIRST_LEVEL, make_tokenizer
from g2po_envs.sokoban.panels import load_panel
from g2po_envs.sokoban.tiny import (
    HISTORY_LENGTH,
    MAX_TURNS,
    describing_expert,
    drawn_environment,
    tiny_environment,
    tiny_model_path,
)
from g2po_trl import StateGraph, Step, Trajectory
from g2po_trl.prompts.images import load_processor
from g2po_trl.prompts.tokenization import ChatEncoder
from g2po_trl.utils.images import as_picture

ROOM = "# # # # #\n# p x o #\n# _ _ _ #\n# # # # #\n# # # # #"


def test_files_are_small_and_the_tokenizer_is_the_one_that_is_made():
    files = {path.name: path.stat().st_size for path in tiny_model_path().iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(files)
    assert sum(files.values()) < 1_000_000
    text = "up\nleft\nyou+1+1 wall+0+3 box+0+1 goal+0+2"
    ids = AutoTokenizer.from_pretrained(tiny_model_path())(text)["input_ids"]
    assert ids == make_tokenizer()(text)["input_ids"] and len(ids) == 4 + 4, "a token a direction and a thing"


def test_it_solves_some_levels_at_both_temperatures():
    torch.set_num_threads(1)
    rows, template = level_rows("small", 64, held_out=True), SOKOBAN_COMPACT_PROMPT
    for temperature in (0.4, 1.0):
        about = (tiny_environment, rows, template, HISTORY_LENGTH, MAX_TURNS, temperature)
        summary = exam_of(tiny_model_path(), *about, length=8)
        assert summary["valid_action_ratio"] > 0.97 and 0.05 < summary["success_rate"] < 0.7, summary


def test_levels_of_the_recipe_were_not_demonstrated():
    shown = {row["number"] for row in level_rows("small", 50, first=FIRST_LEVEL)}
    assert not shown & {row["number"] for row in level_rows("small", 320)}


def test_where_boxes_and_goals_are():
    environment = tiny_environment()
    seen = environment.reset(level=ROOM)
    words = "you+1+1 wall+2+0 wall+2+1 wall+2+2 box+0+1 goal+0+2"
    assert seen.text == f"{ROOM}\n{words}" and distance_of(seen.text) == 1
    (message,) = SOKOBAN_COMPACT_PROMPT.messages(seen.text, admissible_actions=seen.admissible_actions)
    assert message["content"] == f"down\nright\n{words}", "without the grid"
    assert environment.step("down").observation.text.endswith("\nyou+2+1 wall+1+0 wall+1+1 wall+1+2 box-1+1 goal-1+2")
    two = environment.reset(level="# # # # #\n# p x o #\n# _ _ _ #\n# o x _ #\n# # # # #").text
    assert two.endswith("\nyou+1+1 box+0+1 box+2+1 goal+0+2 goal+2+0")


def test_the_limited_expert_knows_no_more_than_what_is_beside_it():
    rng, environment = random.Random(0), SokobanEnvironment()
    environment.reset(level=ROOM)
    assert {limited_expert(environment, rng) for _ in range(20)} == {"right"}
    environment.step("down")
    assert {limited_expert(environment, rng) for _ in range(40)} == {"up", "right"}
    environment.step("right")
    assert {limited_expert(environment, rng) for _ in range(20)} == {"left"}, "beside the box: back to push it"


def test_exact_distances_as_values():
    rows = [{"level": ROOM}]
    environment = SokobanEnvironment()
    episodes = []
    for moves in ("right", "down up right", "down right down down"):
        steps, seen = [], environment.reset(**rows[0])
        for name in moves.split():
            steps.append(Step(seen.text, name))
            result = environment.step(name)
            seen = result.observation
        won = result.terminated
        episodes.append(Trajectory("one", steps, 10.0 * won, "success" if won else "truncated"))
    graph = StateGraph.from_groups([episodes], gamma=0.5)
    told = []
    ExactAdvantage(rows, estimator=lambda exact: told.append(exact) or np.zeros(exact.num_steps))(graph)
    assert told[0].node_values.tolist() == [5.0, 2.5, 1.25, 10.0, 10.0, 0.0]
    assert graph.node_values[:2].tolist() != [5.0, 2.5], "mean returns differ"
    assert np.isfinite(ExactAdvantage(rows)(graph)).all()
    for other in (([{"size": "tiny"}], environment), (rows, tiny_environment())):  # its states would be worth 0
        with pytest.raises(ValueError, match="unknown distance"):
            ExactAdvantage(*other)(graph)


def test_panels():
    panel = load_panel("medium", number=3, skip=2)
    assert [row["number"] for row in panel.rows] == [r["number"] for r in level_rows("medium", 5, held_out=True)][2:]
    assert "\nyou" in load_panel(number=2, compact=True).environment_factory().reset(level=ROOM).text
    with pytest.raises(ValueError, match="size"):
        load_panel("huge")


def test_the_model_that_sees_has_a_token_for_each_square_and_is_taught_to_say_what_it_sees(tmp_path):
    processor = make_tiny_vision_model.make_processor()
    model = make_tiny_vision_model.build_model(processor.tokenizer)
    for part in (model, processor):
        part.save_pretrained(tmp_path)
    processor, environment = load_processor(str(tmp_path)), drawn_environment()
    seen = environment.reset(number=FIRST_LEVEL)
    encode = ChatEncoder(processor)
    picture = as_picture(seen.images[0])
    prompt = SOKOBAN_COMPACT_PROMPT.messages("", admissible_actions=seen.admissible_actions, images=[picture])
    ids, _ = encode(prompt)
    assert ids.count(processor.image_token_id) == 36
    pixels = processor(text=[processor.image_token], images=[[picture.open()]], return_tensors="pt")["pixel_values"]
    shown = pixels[0, 0].permute(1, 2, 0) * 0.5 + 0.5
    assert (shown * 255).round().byte().numpy().tobytes() == seen.images[0].tobytes(), "no pixel is changed"
    completion = describing_expert(environment)
    assert SOKOBAN_COMPACT_PROMPT.read(completion).action == expert(environment)
    words = tiny_environment().reset(number=FIRST_LEVEL).text.splitlines()[-1]
    things = len(words.split())
    assert f"<think>{words}</think>" in completion and things == 6, "you, three walls, a box and a goal"
    assert len(encode.ids([completion])[0]) == things + 5 < 20
    assert SIZES["small"].side == make_tiny_vision_model.SIDE
