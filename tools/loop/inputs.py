"""What would fail only after hours, or give wrong results, is found here, before the first stage begins."""

import json
import logging
import os
import re
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.common.errors import UserError, require
from tools.common.files import data_folder, read_json, read_records, read_words
from tools.common.models import load_tokenizer
from tools.common.records import files_setting, rows_record
from tools.common.rowformats import read_row
from tools.games import prompts
from tools.games.flags import GameChoice
from tools.games.game import Game
from tools.loop.keys import AUTO, NONE, OWN, PROGRAMS, TRAININGS, Loop, plays_games

PHASES = ("play", "rewards", "train")  # of an epoch, after which a loop may stop
MEASURING = len(PHASES)  # the phase after these, of match, belief and report
Position = tuple[int, int]  # epoch and number of a phase
RELEASED = "data/released_prompts.json"
MAKE_RELEASED = f", made by python -m tools.prepare_data prompts --release data/released_utils.py --output {RELEASED}"
# Flags that play and rows must share. A new flag that changes the prompts of play belongs here, as a flag of
# tools/assign_rewards.py too, and into FOUNDATION in tools/loop/settings.py if the imitation model depends on it.
SAME_IN_ROWS = ["game", "game_options", "prompt_templates", "chat_template", "thinking"]
logger = logging.getLogger(__name__)


def check_inputs(loop: Loop) -> list[str]:
    """Check settings, files and rows; no GPU is asked. Returns the words of an epoch, in the order of their games.

    The flags of each table are read here by the parser of its program (`Loop.of` in tools/loop/keys.py). Before the
    first stage `check_commands` in tools/run_spag.py reads whole commands so, when the GPUs are known.

    All epochs play these words. For other words in each epoch, write a file for each epoch where `write_record` in
    tools/loop/record.py writes words.txt, and name it as `data_path` in `play_step` of tools/run_spag.py.
    `check_record` in tools/loop/record.py must then compare these files: once there are games it refuses other words.
    """
    tables = {stage: loop.of(stage) for stage in PROGRAMS}
    play = tables["play"]
    rewards = tables["rewards"]
    check_limits(loop)
    check_files_and_packages(loop, tables)
    game = GameChoice(game=play.game, game_options=play.game_options).load_game()
    if "games" in loop.stages["belief"] and game.answer(game.example_task) is None:
        raise UserError(f"[belief] {game.title} has no message that names a secret; leave belief.games out")
    check_rows(loop, tables)
    check_control(loop, rewards)
    check_sft_rows(loop.model, rewards.sft_data_path, play.trust_remote_code)
    check_layout(loop, play, game)
    for _, path in tables["match"].words or ():
        read_words(path, game.check_task)
    words = read_words(loop.words, game.check_task)[: loop.max_words]
    return words * loop.games_per_word


def check_limits(loop: Loop) -> None:
    if loop.seed + loop.epochs >= 2**32:  # numpy takes no larger seed
        raise UserError(f"seed={loop.seed}: seed + epochs, the last epoch's seed, must be below {2**32}")
    if last_position(loop)[0] > loop.epochs:
        raise UserError(f"until={loop.until} lies behind the last epoch (epochs={loop.epochs})")
    if loop.machines > 1 and loop.rendezvous == OWN["rendezvous"].default:
        raise UserError(f"machines={loop.machines} needs rendezvous=HOST:PORT, where machine 0 is reached")
    if loop.machine >= loop.machines:
        raise UserError(f"machine={loop.machine}: machines={loop.machines}, and their numbers begin with 0")


def last_position(loop: Loop) -> Position:
    """The last epoch and phase that run; imitation is (0, 0). UserError for a wrong `until`."""
    if loop.until is None:
        return loop.epochs, MEASURING
    if loop.until == "imitation":
        return 0, 0
    any_phase = "|".join(PHASES)
    epoch_and_phase = re.fullmatch(rf"epoch([1-9]\d*)_({any_phase})", loop.until)
    if not epoch_and_phase:
        raise UserError(f"until={loop.until}: expected imitation, or epochK_ with {', '.join(PHASES)}")
    epoch, phase = epoch_and_phase.groups()
    return int(epoch), PHASES.index(phase)


def check_files_and_packages(loop: Loop, tables: dict[str, Namespace]) -> None:
    """Raise one UserError for all files and packages that are missing, those of stages that may be hours away too."""
    if errors := [*missing_files(loop, tables), *missing_packages(loop)]:
        raise UserError("; ".join(errors))


def missing_files(loop: Loop, tables: dict[str, Namespace]) -> Iterator[str]:
    paths = [loop.words, loop.first_episodes, tables["belief"].games, tables["belief"].candidates]
    paths += dict.fromkeys(tables[stage].prompt_templates for stage in ("play", "match", "belief"))
    paths += [path for _, path in tables["match"].words or ()]
    paths += [] if loop.deepspeed in (AUTO, NONE) else [loop.deepspeed]
    # Any other name may be one of the hub, even if it looks like a path.
    paths += [name for name in (loop.model, loop.imitation_model) if name and name.startswith(("/", "."))]
    for path in filter(is_missing, paths):
        yield f"{path}: no such file{MAKE_RELEASED if RELEASED in path else ''}"
    rows = [tables["rewards"].sft_data_path]
    rows += [] if loop.imitation_model else tables["imitation"].train_data_path or []
    rows += [path for stage in TRAININGS for path in tables[stage].eval_data_path or ()]
    for path in filter(is_missing, rows):
        try:
            data_folder(path)  # of the hub
        except UserError as error:
            yield str(error)


def is_missing(path: str | None) -> bool:
    return path is not None and not os.path.exists(path)


def missing_packages(loop: Loop) -> Iterator[str]:
    needed = []
    if any("lora_rank" in loop.stages[stage] for stage in TRAININGS):
        needed.append(("peft", "peft>=0.21,<0.22"))
    # `lm_eval` is the command of the harness, which may be installed in another environment.
    if "tasks" in loop.stages["reasoning"] and "lm_eval" not in loop.stages["reasoning"]:
        needed.append(("lm_eval", "lm-eval==0.4.13"))
    for module, requirement in needed:
        try:
            require(module, requirement)
        except UserError as error:
            yield str(error)


def check_rows(loop: Loop, tables: dict[str, Namespace]) -> None:
    """Raise UserError for flags of rows that do not fit those of play or of training."""
    play = tables["play"]
    rewards = tables["rewards"]
    training = tables["training"]
    names = [*SAME_IN_ROWS, "trust_remote_code"] if play.chat_template else SAME_IN_ROWS
    if different := [name for name in names if getattr(play, name) != getattr(rewards, name)]:
        remedy = "rows must have the prompts of play; write the setting above the tables"
        raise UserError(f"[play] and [rewards] differ in {', '.join(different)}: {remedy}")
    negative = rewards.losers or rewards.ties
    if negative and not training.detach_kl and not training.allow_negative_rewards:
        raise UserError("[rewards] losers and ties make rewards below 0, which need training.detach_kl=True")
    if play.thinking and "games" in loop.stages["belief"]:
        raise UserError("[belief] asks for messages without thoughts; leave belief.games out with thinking")


def check_control(loop: Loop, rewards: Namespace) -> None:
    """Raise UserError for a control without the rows or the coefficient that it takes."""
    if loop.control == "cloning":
        coefficient = loop.of("training").lm_sft_coeff
        if coefficient is None or coefficient <= 0:
            raise UserError("control=cloning divides by training.lm_sft_coeff, which must be set and above 0")
        if rewards.losers or rewards.ties:
            raise UserError("control=cloning copies winners; take back rewards.losers and rewards.ties")
    if loop.control == "sft" and not rewards.sft_data_path:
        raise UserError("control=sft needs rewards.sft_data_path, the only rows that it trains on")
    if plays_games(loop.control):
        return
    if not loop.like:
        raise UserError(f"control={loop.control} needs like, the run whose rows it takes")
    last_epoch, last_phase = last_position(loop)
    # The run `like` may still be at work: it needs to have the rows of those epochs alone that this start reaches.
    needed = last_epoch if last_phase >= PHASES.index("rewards") else last_epoch - 1
    epochs_with_rows = 0
    while Path(loop.like, f"epoch{epochs_with_rows + 1}", "rows", "rows.json").is_file():
        epochs_with_rows += 1
    if epochs_with_rows < needed:
        plural = "" if epochs_with_rows == 1 else "s"
        have = f"rows of {epochs_with_rows} epoch{plural}"
        raise UserError(f"control={loop.control}: like={loop.like} has {have}, epochs is {loop.epochs}")


def check_sft_rows(model: str, path: str | None, trust_remote_code: bool) -> None:
    """Raise UserError for SFT rows that cannot be read and for messages without a chat template, before hours of play.

    What a template says of a single row, training finds.
    """
    rows = read_records(path, read_row) if path else []
    if not any("messages" in row for row in rows):
        return
    if not load_tokenizer(model, trust_remote_code=trust_remote_code).chat_template:
        raise UserError(f"{path}: messages need a chat template, and the tokenizer of {model} has none")


def check_layout(loop: Loop, play: Namespace, game: Game) -> None:
    """Raise UserError for rows of imitation in another layout than that of play.

    The model learns to answer the prompts that it imitates, and would meet those of play unprepared. A record beside
    the rows names their layout. If imitation is still to be trained, rows without a record that hold games must hold
    one of play's rule texts somewhere.
    """
    prompt_file = play.prompt_templates or game.prompt_file
    templates = prompts.load_templates(prompt_file, game)
    chat = template_digest(loop.model, play) if play.chat_template else None
    if loop.imitation_model:  # which rows it has learned is not known here; its prompts are the user's affair
        return
    foreign = []  # of other people, or of tools/controls.py
    for path in loop.of("imitation").train_data_path or ():
        record = rows_record(path)
        made = read_json(record)["settings"] if record.is_file() else {}
        if "prompt_templates" not in made:
            foreign.append(path)
            continue
        of_play = (chat, play.thinking, files_setting(prompt_file)["sha256"])
        if (made["chat_template"], bool(made.get("thinking")), made["prompt_templates"]["sha256"]) != of_play:
            how = f"its chat template, thinking or prompts are not those of play ({loop.model}, {prompt_file})"
            raise UserError(f"{path}: {how}")
    if foreign and not is_finished(Path(loop.output, "imitation", "model")):
        check_rules(foreign, templates, prompt_file)


def is_finished(model: Path) -> bool:
    record = model / "settings.json"
    return record.is_file() and read_json(record)["finished"]


def check_rules(paths: Iterable[str], templates: prompts.Templates, prompt_file: str | Path) -> None:
    """Raise UserError for rows of games that hold none of play's rules; warn of rows that hold no game."""
    rows = bare([read_records(path) for path in paths])
    # The first prompt of each game has this text, in the authors' rows too.
    if bare(prompts.NO_HISTORY) not in rows:
        logger.warning("%s: no record says how these rows were made; are their prompts those of play?", paths)
        return
    for rule in templates[prompts.RULES]:
        if all(bare(part) in rows for part in prompts.SLOT.split(rule)[::2]):
            return
    remedy = f"take prompt_templates={RELEASED}{MAKE_RELEASED}; else make rows by tools/assign_rewards.py"
    rules = f"these games have none of play's rules ({prompt_file})"
    raise UserError(f"{' '.join(paths)}: {rules}; for the authors' rows {remedy}")


def template_digest(model: str, play: Namespace) -> str:
    """The digest of a model's chat template, as records of rows have it. UserError if play could not use it."""
    from tools.games.chat import ChatTemplate  # brings transformers

    tokenizer = load_tokenizer(model, trust_remote_code=play.trust_remote_code)
    return ChatTemplate(tokenizer, model, play.thinking).sha256


def bare(value) -> str:
    """A text or a list as JSON without any blanks, and without the quotes or brackets around it.

    A rule text, made bare, can be looked for in bare rows: their JSON escapes characters in the same way, and other
    line breaks and blanks do not matter.
    """
    text = json.dumps(value, ensure_ascii=False).replace("\\n", " ")
    return "".join(text.split())[1:-1]
