"""The few numbers that the loop shows when a stage has ended."""

import pytest
from helpers import call

from tools.loop import numbers
from utils import write_json

ROW = {"player": "epoch1", "role": "both", "seed": None, "games": 80, "points": 0.5, "points_interval": [0.25, 0.75]}
STATE = {"global_step": 3, "log_history": [{"loss": 2.0}, {"loss": 1.0}, {"train_loss": 1.5}]}


@pytest.mark.parametrize(
    "stage, path, content, shown",
    [
        ("imitation", "imitation/model/trainer_state.json", STATE, "3 steps, loss 2.000 at the first and 1.000 at"),
        ("epoch1_train", "epoch1/model/trainer_state.json", STATE, "3 steps"),
        (
            "epoch1_play",
            "epoch1/episodes/x_summary.json",
            {"games": 4, "outcomes": {"attacker wins": 1, "tied game": 3}},
            "4 games, attacker wins 25%, tied game 75%",
        ),
        (
            "epoch1_rewards",
            "epoch1/rows/rows_rewards_settings.json",
            {"rows": {"attacker": 5, "sft": 2, "empty": 0}},
            "rows: attacker 5, sft 2",
        ),
        (
            "epoch1_eval",
            "epoch1/eval/matches.json",
            {"results": [ROW | {"words": "played", "points": 0.1}, ROW | {"words": "all"}]},
            "80 games against imitation, points 0.500 [0.250, 0.750]",
        ),
    ],
)
def test_a_stage_shows_its_few_numbers(tmp_path, stage, path, content, shown):
    write_json(tmp_path / path, content)
    assert call(numbers.main, tmp_path, stage).output.startswith(shown)


def test_other_stages_have_no_numbers(tmp_path):
    assert call(numbers.main, tmp_path, "report").output == ""
