"""Word lists, words that are held out, the rows of our own games, and the files of the English world."""

from conftest import ROOT
from helpers import call, flags_of

from tools import prepare_data
from tools.common.files import read_json_or_jsonl
from tools.games import load_game
from tools.games.prompts import load_templates, play_prompt


def prepare(command: str, status: int = 0, **flags):
    return call(prepare_data.main, command, *flags_of(flags), status=status)


def test_a_list_is_split_into_words_of_training_and_held_out_ones_which_have_none_in_common_in_any_case(tmp_path):
    first = [*(f"word{number}" for number in range(40)), "New  York", "Stra\u00dfe", "caf\u00e9"]
    again = [*map(str.upper, first), "new york", "STRASSE", "cafe\u0301"]
    (tmp_path / "all.txt").write_text("\n".join(first + again), encoding="utf-8")
    paths = {"input": tmp_path / "all.txt", "output": tmp_path / "train.txt", "held_out": tmp_path / "held.txt"}

    def split(seed: int) -> list[list[str]]:
        prepare("split", **paths, number=10, seed=seed)
        return [paths[name].read_text(encoding="utf-8").splitlines() for name in ("output", "held_out")]

    train, held_out = split(seed=0)
    assert len(held_out) == 10 and sorted(train + held_out) == sorted(first)
    assert [train, held_out] == [sorted(each, key=first.index) for each in (train, held_out)]
    assert split(seed=0) == [train, held_out] != split(seed=1)
    for number in (0, -1, len(first)):
        assert "number is" in prepare("split", **paths, number=number, status=2).errors


def test_the_games_of_this_project_are_divided_by_their_split(tmp_path):
    prepare("imitation", output_dir=tmp_path)
    words = {split: (tmp_path / f"{split}.txt").read_text().split() for split in ("played", "tuning", "held_out")}
    assert all(words.values())
    assert {game["target_word"] for game in read_json_or_jsonl(tmp_path / "games.jsonl")} == set(words["played"])


RELEASE = '''
import shutil, torch_of_2023
GAME_RULE_PROMPTS = [
    "Hints, but not the word. {max_turns} turns.\\n",
    """Say it
and lose. {max_turns} turns.
""",
]
shutil.rmtree(HERE)
PLAYER_INSTRUCT_PROMPTS = {"attacker": "Hide `{target_word}`" ".", "defender": "Guess."}
'''


def test_prompts_of_the_release_become_a_prompt_file_and_none_of_its_code_runs(tmp_path):
    release, output = tmp_path / "utils.py", tmp_path / "prompts.json"
    release.write_text(RELEASE)
    prepare("prompts", release=release, output=output)
    templates = load_templates(output, load_game())
    rules = ["Hints, but not the word. {max_turns} turns.\n", "Say it\nand lose. {max_turns} turns.\n"]
    instructions = {"attacker_instruction": "Hide `{target_word}`.", "defender_instruction": "Guess."}
    assert templates == {"rules": rules} | instructions
    prompt = play_prompt(load_game(), [], "cat", 5, templates)
    assert prompt.startswith("Hints, but not the word. 5 turns.\nThe game is just") and "Hide `cat`." in prompt


def test_english_makes_rows_of_the_plain_games_and_some_to_keep(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(prepare_data, "run_python", lambda *words: commands.append([*map(str, words)]))
    prepare("english", model="m", output_dir=tmp_path)
    rows, anchor = commands
    assert rows[0].endswith("assign_rewards.py") and rows[-4:] == ["--chat_template", "True", "--tokenizer", "m"]
    assert anchor[1:] == ["draw", "--rows", f"{tmp_path}/imitation.json", "--number", "300", "--output", anchor[-1]]
    assert anchor[-1] == f"{tmp_path}/anchor.json" and len(read_json_or_jsonl(tmp_path / "games.jsonl")) == 498
    settings = (ROOT / "configs/english.toml").read_text()
    for name in ("imitation.json", "anchor.json", "played.txt", "held_out.txt"):
        assert f"outputs/english/data/{name}" in settings
