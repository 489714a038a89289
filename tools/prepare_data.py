"""Make the files that play and training start from.

    python -m tools.prepare_data words --output data/target_words.txt
    python -m tools.prepare_data tasks --game GAME --number 1000 --output tasks.txt
    python -m tools.prepare_data split --input WORDS.txt --output train_words.txt --held_out held_out_words.txt
    python -m tools.prepare_data alpaca --input alpaca_data.json --output data/alpaca_train.json
    python -m tools.prepare_data imitation --episodes games_results.json --output data/train_imitation.json
    python -m tools.prepare_data prompts --from_release SPAG/utils.py --output configs/release_prompts.json

`words` makes the list of target words, `tasks` that of another game; `split` holds some back, for evaluation on words
that self-play never sees; `alpaca` turns raw Alpaca records into SFT rows; `imitation` makes rows for SFTwithKL out of
a strong model's games; `prompts` takes the wording of all prompts out of a checkout of the released code, for models
that were trained on it. Beside its output X.EXT each writes X_source.json: what it was made of, with which settings,
counts, and the SHA-256 of inputs and output.
"""

from tools.flags import parse_command
from tools.selfplay.prepare import Alpaca, Imitation, Prompts, Split, Tasks, Words
from utils import end_with_launcher, run_program, set_up_logging

COMMANDS = {kind.__name__.lower(): kind for kind in (Words, Tasks, Split, Alpaca, Imitation, Prompts)}


def main() -> None:
    end_with_launcher()
    command = parse_command(COMMANDS, description=__doc__)
    set_up_logging()
    command.run()


if __name__ == "__main__":
    run_program(main)
