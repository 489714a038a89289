"""Functions that our studies run before a seed's loops and after each loop.

    python -m tools.lab.preparations tools.lab.preparations:tiny '{"folder": ..., "seed": 0, "settings": {}}'

A `prepare` function takes the seed's folder, the seed, and the first arm's settings by name; an `after` function takes
the loop's folder.
"""

import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from tools.common.errors import UserError
from tools.common.files import ROOT, read_json, read_json_or_jsonl, read_text, read_words, write_json, write_words
from tools.common.programs import run_program, run_python
from tools.games.game import load_member
from tools.lab.table import IMITATION, OWN_MEASURES
from tools.lab.world import behaviour
from tools.lab.world.players import load_lexicon

ENGLISH = ROOT / "data" / "english"


# The toy world.


def tiny(folder: str, seed: int, settings: dict) -> None:
    run_python("-m", "tools.lab.world.build", "--output_dir", folder, "--seed", seed)


def what_models_do(loop: str) -> None:
    """Write LOOP/measures.json: what each model of a loop does in its games, and the rows it was trained on.

    The games are self-play and the match against the imitation model. The imitation model, if the loop trained it,
    plays that match against itself here, so that all models are measured on the same words.
    """
    folder = Path(loop)
    if (folder / "imitation" / "model").is_dir():
        match_of_imitation(folder)
    lexicon = load_lexicon()
    counts: dict[str, dict] = {}
    player = IMITATION
    for part in (folder / IMITATION, *sorted(folder.glob("epoch[0-9]"))):
        for path in part.glob("episodes/*_results.json"):  # played by the previous epoch's model
            counts.setdefault(player, {})["self-play"] = behaviour.count_games(read_json_or_jsonl(path), lexicon)
        player = part.name
        if (match := part / "eval" / "games_results.json").is_file():
            of_match = behaviour.count_games(read_json_or_jsonl(match), lexicon, player)
            counts.setdefault(player, {})["match"] = of_match
        for path in (part / "rows" / name for name in ("rows.json", "winners.json")):  # the latter for cloning
            if path.is_file() and (rows := behaviour.count_rows(read_json_or_jsonl(path))):
                counts.setdefault(player, {})["rows"] = rows
    write_json(
        folder / OWN_MEASURES, {model: {"counts": each, "measures": named(each)} for model, each in counts.items()}
    )


def named(counts: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    of_games = {kind: behaviour.measures(counts[kind]) for kind in ("match", "self-play") if kind in counts}
    measures = of_games | {"rows": behaviour.row_measures(counts.get("rows", {}))}
    return {f"{kind}: {name}": value for kind, of_kind in measures.items() for name, value in of_kind.items()}


def match_of_imitation(folder: Path) -> None:
    """Let the imitation model play epoch 1's match against itself, with the command in that match's log."""
    started = re.findall("^=== .*", read_text(folder / "logs" / "epoch1_eval.log"), re.MULTILINE)[-1]
    command = shlex.split(started)
    (program,) = (index for index, word in enumerate(command) if word.endswith("evaluate_games.py"))
    own = ["--players", f"{IMITATION}={folder / IMITATION / 'model'}", "--output_dir", folder / IMITATION / "eval"]
    run_python(*command[program:], *own)  # repeated flags override earlier ones


# Models that play in English.


def english(folder: str, seed: int, settings: dict) -> None:
    """Draw 300 imitation rows to serve as SFT rows."""
    rows = settings["imitation.train_data_path"]
    draw(rows[0] if isinstance(rows, list) else rows, 300, seed, Path(folder, "anchor.json"))


def qwen15(folder: str, seed: int, settings: dict) -> None:
    """Make imitation rows of all messages of this project's games, 500 of them as SFT rows, and the word list."""
    data = Path(folder, "data")
    run_python("-m", "tools.prepare_data", "imitation", "--output_dir", data)
    plain = ["--output_dir", data / "plain", "--games", ENGLISH / "plain_games.jsonl"]
    run_python("-m", "tools.prepare_data", "imitation", *plain)
    argv = ["--messages", "all", "--training_prompt", "play", "--chat_template", True]
    argv += ["--tokenizer", settings["model"], "--prompt_templates", ROOT / "configs/prompts/english.json"]
    argv += ["--input_data_path", data / "games.jsonl", data / "plain/games.jsonl"]
    run_python(ROOT / "tools/assign_rewards.py", *argv, "--output_data_path", data / "imitation.json")
    draw(data / "imitation.json", 500, seed, data / "anchor.json")
    held_out = set(read_words(data / "held_out.txt"))
    others = [word for word in read_words(ROOT / "data/target_words.txt") if word not in held_out]
    write_words(data / "words.txt", dict.fromkeys(read_words(data / "played.txt") + others))


def draw(rows: str | Path, number: int, seed: int, output: Path) -> None:
    argv = ["--rows", rows, "--number", number, "--seed", seed, "--output", output]
    run_python("-m", "tools.controls", "draw", *argv)


def gate(loop: str) -> None:
    """UserError if the arm `gate` guesses right too rarely or breaks the rules too often in epoch 1."""
    if Path(loop).name != "gate":
        return
    (summary,) = Path(loop).glob("epoch1/episodes/*_summary.json")
    games = read_json(summary)
    right = games["outcomes"]["defender wins"] / games["games"]
    breaches = games["outcomes"]["attacker breaks the rules"] / games["games"]
    print(f"gate: right guesses {right:.0%}, broken rules {breaches:.0%}")
    if right < 0.3 or breaches > 0.1:
        raise UserError("the model does not play well enough; the study stops here")


def main() -> None:
    function, arguments = sys.argv[1:]
    load_member(function)(**json.loads(arguments))


if __name__ == "__main__":
    run_program(main)
