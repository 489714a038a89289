"""The settings of the loop: read, checked, filled in, recorded, and printed for the shell.

    eval "$(PYTHONPATH=. python tools/loop/settings.py configs/llama2_7b.sh SEED=142 OUTPUT=outputs/spag142)"

Arguments are settings, NAME=VALUE, and files of such lines; the last one counts. configs/defaults.sh has every setting
with its default and meaning; with LIKE=DIR, DIR/settings.json takes its place. Two options come first: --output only
prints OUTPUT, for machine 0; --lock takes the lock of the loop in descriptor 9, which the shell has opened.
"""

import dataclasses
import fcntl
import json
import logging
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import utils
from tools import assign_rewards, evaluate_belief, evaluate_games, evaluate_reasoning, play_llm_game
from tools.flags import parse_flags
from tools.games import prompts
from tools.games.game import Game
from tools.selfplay.flags import PlayFlags
from utils import ROOT, UserError, read_json

DEFAULTS_FILE = ROOT / "configs" / "defaults.sh"
LOCK = 9  # descriptor of OUTPUT/.loop.lock, which run_spag.sh and its stages keep open
SEVERAL = ("_ARGS", "IMITATION_DATA", "GAME_OPTIONS", "EVAL_WORDS", "EVAL_SEEDS", "_TASKS")  # ends of names
COUNT = r"[1-9]\d*"  # a number that begins with 0 would be octal
NUMBER = r"(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
PATTERNS = {  # of values before `auto` is replaced. Settings called like a flag of a stage are checked by its parser.
    f"0|{COUNT}": "EPOCHS SEED NODE_RANK",  # the shell computes with these and the next
    COUNT: "GLOBAL_BATCH TRAIN_BATCH NNODES TENSOR_PARALLEL_SIZE MAX_LENGTH MAX_NEW_TOKENS GAMES_PER_WORD EVAL_EVERY",
    f"|{COUNT}": "GAMES PLAY_BATCH LORA_RANK",
    f"auto|{COUNT}": "NPROC",
    NUMBER: "KL SFT_COEFF CLIP_RANGE IMITATION_KL SAVE_STEPS",
    f"|{NUMBER}": "LEARNING_RATE IMITATION_LR",
    "True|False": "CHAT_TEMPLATE THINKING DETACH_KL REPORT",  # the shell compares them
    "auto|True|False": "GRADIENT_CHECKPOINTING",
    "auto|bf16|fp16|fp32": "PRECISION",
    "|coin_by_length|cloning|sft|silent": "CONTROL",
    rf"|imitation|epoch{COUNT}_(play|train)": "UNTIL",
}
PACKAGES = {"LORA_RANK": ("peft", "peft>=0.21,<0.22"), "EVAL_TASKS": ("lm_eval", "lm-eval==0.4.13")}
FILES = ("WORDS", "SFT_DATA", "PROMPTS", "FIRST_EPISODES", "BELIEF_GAMES")  # of stages that may be hours away
STAGES = {  # flags by the first part of the names of a stage's settings
    "PLAY": play_llm_game.Flags,
    "REWARD": assign_rewards.Flags,
    "EVAL": evaluate_games.Flags,
    "BELIEF": evaluate_belief.Flags,
    "REASONING": evaluate_reasoning.Flags,
}
RESULT_FILES = ("*/*/*_results.json", "*/*/*_rank*.jsonl", "*/rows/rows.json", "*/model/*")
RELEASED = "data/released_prompts.json"
MAKE_RELEASED = f", made by python -m tools.prepare_data prompts --release SPAG/utils.py --output {RELEASED}"
logger = logging.getLogger(__name__)
Settings = dict[str, str]  # values by name


def read_file(path: str | Path) -> Settings:
    """The settings of a file: words NAME=VALUE and comments, as in a shell; $root is the project's folder."""
    # A comment begins at the start of a word: # inside a word, or between quotes, belongs to the value.
    text = re.sub(r"""("(?:\\.|[^"\\])*"|'[^']*'|\\.)|(?<!\S)#.*""", r"\1", utils.read_text(path))
    settings = {}
    for word in shlex.split(text):
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"{path}: {word!r} is not NAME=VALUE; a value with blanks needs quotes")
        root = shlex.quote(str(ROOT)) if name.endswith(SEVERAL) else str(ROOT)
        settings[name] = os.path.expanduser(value.replace("$root", root))
    return settings


def values(settings: Settings, name: str) -> list[str]:
    """The values of a setting that takes several, split as by a shell, or its one value. [] if empty or unknown."""
    value = settings.get(name, "")
    return shlex.split(value) if name.endswith(SEVERAL) else [value] * bool(value)


def section(*names: str) -> set[str]:
    """The settings in these sections of configs/defaults.sh. A section begins with a comment: # [NAME] meaning."""
    sections = utils.read_text(DEFAULTS_FILE).split("\n\n# [")
    chosen = (text for text in sections if text.partition("]")[0] in names)
    return set(re.findall(r"^[A-Z_]+(?==)", "\n".join(chosen), re.MULTILINE))


def read_settings(words: list[str]) -> Settings:
    """The defaults, or the settings of LIKE, changed by the arguments. UserError for an unknown name."""
    defaults, changes = read_file(DEFAULTS_FILE), {}
    for word in (word.replace("\r", "") for word in words):  # of $(cat FILE), where FILE has Windows' line ends
        name, equals, value = word.partition("=")
        changes |= {name: os.path.expanduser(value)} if equals else read_file(word)
    if unknown := changes.keys() - defaults.keys():
        raise UserError(f"unknown settings: {', '.join(unknown)}; configs/defaults.sh has all")
    return (like(changes["LIKE"], changes, defaults) if changes.get("LIKE") else defaults) | changes


def like(run: str, changes: Settings, defaults: Settings) -> Settings:
    """The settings of another run, with its imitation model and its games of epoch 1 in the place of new ones.

    A change in the section `imitation` trains imitation anew, and with one there or in `play` epoch 1 is played anew.
    All other changes keep both, though both were made with the old value: SEED, PRECISION, LORA_RANK, GLOBAL_BATCH.
    The sections `run` and `machine` are not taken from the other run.
    """
    stored = read_json(Path(run, "settings.json"))["settings"]
    taken = defaults.keys() - section("run", "machine")  # no other names: the shell evaluates them
    settings = defaults | {name: value for name, value in stored.items() if name in taken}
    changed = {name for name, value in changes.items() if value != settings[name]}
    if changed & section("imitation"):
        if settings["IMITATION_DATA"] or changes.get("IMITATION_DATA"):  # else the model was given, not trained
            settings["IMITATION_MODEL"] = ""
    elif settings["IMITATION_DATA"] and not settings["IMITATION_MODEL"]:
        model = Path(run, "imitation", "model")
        if not read_json(model / "settings.json")["finished"]:
            raise UserError(f"LIKE={run}: its imitation has not ended; the same command of that run continues")
        settings["IMITATION_MODEL"] = str(model / "merged" if settings["LORA_RANK"] else model)
    games = settings["FIRST_EPISODES"] or f"{run}/epoch1/episodes/imitation_sampling_words_results.json"
    return settings | {"FIRST_EPISODES": "" if changed & section("imitation", "play") else games}


def fill(settings: Settings) -> None:
    """Replace what is `auto`, in place."""
    names = ("NPROC", "PRECISION", "GRADIENT_CHECKPOINTING", "DEEPSPEED")
    automatic = [name for name in names if settings[name] == "auto"]
    if not automatic:
        return
    import torch

    gpus = torch.cuda.device_count()
    if gpus and not torch.cuda.is_available():
        raise UserError("PyTorch cannot use the GPUs; is their driver too old? CUDA_VISIBLE_DEVICES= hides them")
    # GPUs before Ampere emulate bf16, most CPUs too: that is slow
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if gpus else torch.cpu._is_avx512_bf16_supported()
    chosen = {"NPROC": str(gpus or 1), "GRADIENT_CHECKPOINTING": str(gpus > 0), "DEEPSPEED": "none"}
    chosen["PRECISION"] = "bf16" if bf16 else "fp16" if gpus else "fp32"
    settings |= {name: chosen[name] for name in automatic}
    if gpus and "DEEPSPEED" in automatic:
        memory = min(torch.cuda.get_device_properties(index).total_memory for index in range(gpus))
        settings["DEEPSPEED"] = deepspeed_file(settings, memory)


def deepspeed_file(settings: Settings, memory: int) -> str:
    """The first way of training that fits GPUs of `memory` bytes: none, ZeRO-2, ZeRO-3, or offload to the CPU.

    Computed, not measured on a GPU, in bytes a parameter: weights, gradients and Adam in fp32, and half-precision
    copies. With LoRA: frozen half-precision weights, and adapters of a hundredth of the parameters.
    """
    parameters = count_parameters(settings["MODEL"])
    gpus = int(settings["NPROC"]) * int(settings["NNODES"])
    ways = {"none": 18 if gpus == 1 else 22, "configs/zero2.json": 4 + 16 / gpus, "configs/zero3.json": 20 / gpus}
    if settings["LORA_RANK"]:
        ways = {"none": 2.2, "configs/zero3.json": 2.2 / gpus}
    for way, each in ways.items():
        if each * parameters <= 0.85 * memory:  # the rest is for activations
            return way if way == "none" else str(ROOT / way)
    return str(ROOT / "configs/default_offload_opt_param.json")


def count_parameters(model: str) -> float:
    """The parameters of a model, by the bytes of its safetensors."""
    folder = utils.model_folder(model)
    config = read_json(folder / "config.json")
    bytes_of_one = 4 if "float32" in (config.get("dtype"), config.get("torch_dtype")) else 2
    return sum(path.stat().st_size for path in folder.glob("model*.safetensors")) / bytes_of_one


def check(settings: Settings) -> list[str]:
    """Raise UserError for what would fail only after hours, or give wrong results. Returns the words of play.

    The parsers of the stages end the program with their own message. The stages check the rest.
    """
    check_values(settings)
    check_no_token(settings)
    flags = {prefix: stage_flags(settings, prefix, kind) for prefix, kind in STAGES.items()}
    if words := values(settings, "IMITATION_ARGS") + values(settings, "TRAIN_ARGS"):
        check_train_flags(words)
    word_lists = [words.path for words in flags["EVAL"].words] if settings["EVAL_WORDS"] else []
    check_files(settings, word_lists)
    game, rewards = flags["PLAY"].load_game(), flags["REWARD"]
    rewards.check_rewards(game)
    check_row_flags(settings, flags["PLAY"], rewards)
    if settings["THINKING"] == "True" and settings["BELIEF_GAMES"]:
        raise UserError("BELIEF_GAMES asks for messages without thoughts; leave it out with THINKING=True")
    if settings["CONTROL"] == "sft" and not settings["SFT_DATA"]:
        raise UserError("CONTROL=sft needs SFT_DATA, the only rows that it trains on")
    if settings["CONTROL"] in ("sft", "silent") and not settings["LIKE"]:
        raise UserError(f"CONTROL={settings['CONTROL']} needs LIKE, the run whose rows it takes")
    check_sft_data(settings, flags["PLAY"].trust_remote_code)
    check_layout(settings, flags["PLAY"], game)
    for path in word_lists:
        utils.read_words(path, game.check_task)
    return utils.read_words(settings["WORDS"], game.check_task)


def check_values(settings: Settings) -> None:
    """Raise UserError for a value of another kind, and for seeds that training would refuse after play."""
    for pattern, names in PATTERNS.items():
        for name in names.split():
            if not re.fullmatch(pattern, settings[name]):
                raise UserError(f"{name}={settings[name]}: expected {pattern}")
    if int(settings["SEED"]) + int(settings["EPOCHS"]) >= 2**32:
        raise UserError(f"SEED={settings['SEED']}: SEED + EPOCHS, the last epoch's seed, must be below {2**32}")


def check_no_token(settings: Settings) -> None:
    """Raise UserError for a token among further flags: OUTPUT/settings.json and the logs would hold it."""
    for name in settings:
        words = values(settings, name) if name.endswith("_ARGS") else []
        for flag in (word.partition("=")[0] for word in words):
            if re.fullmatch(r"--[\w-]+[_-]token", flag):
                raise UserError(f"{name}: {flag} would stand in records and logs; export HF_TOKEN=... instead")


def check_row_flags(settings: Settings, play: PlayFlags, rewards: assign_rewards.Flags) -> None:
    """Raise UserError for flags of rows that do not fit those of play or of training."""
    negative = rewards.losers or rewards.ties or rewards.baseline != "none"
    if negative and settings["DETACH_KL"] != "True" and "--allow_negative_rewards" not in settings["TRAIN_ARGS"]:
        raise UserError("LOSERS, TIES and BASELINE make rows with rewards below 0, which need DETACH_KL=True")
    if play.trust_remote_code and settings["CHAT_TEMPLATE"] == "True" and not rewards.trust_remote_code:
        remedy = 'rows load the tokenizer too: REWARD_ARGS="--trust_remote_code True"'
        raise UserError(f"PLAY_ARGS has --trust_remote_code True; {remedy}")


def stage_flags(settings: Settings, prefix: str, kind: type):
    """A stage's flags, read by its own parser: those called like a setting (PREFIX_FLAG or FLAG), and PREFIX_ARGS."""
    settings = settings | {"REASONING_TASKS": settings["EVAL_TASKS"]}  # the only one that is not called like its flag
    words = []
    for field in dataclasses.fields(kind):
        own, common = f"{prefix}_{field.name.upper()}", field.name.upper()
        is_required = field.default is field.default_factory  # both are MISSING: it has no default
        given = values(settings, own if own in settings else common) or ["some=value"] * is_required
        words += [f"--{field.name}", *given] if given else []
    return parse_flags(kind, [*words, *values(settings, f"{prefix}_ARGS")], description="")


def check_train_flags(words: list[str]) -> None:
    """Let train.py's parser read these flags, in a process of its own: it imports transformers, which takes 5 s."""
    required = "'--train_method=SFT', '--model_name_or_path=m', '--train_data_path=d', '--output_dir=o'"
    parse = f"import sys, arguments; arguments.build_parser().parse_args([{required}, *sys.argv[1:]])"
    done = subprocess.run([sys.executable, "-c", parse, *words], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"IMITATION_ARGS, TRAIN_ARGS: {done.stderr.partition('error: ')[2].strip()}")


def check_files(settings: Settings, word_lists: list[str]) -> None:
    """Raise UserError that names all files and packages that are missing."""
    paths = [path for name in FILES for path in values(settings, name)] + word_lists
    paths += [] if settings["IMITATION_MODEL"] else values(settings, "IMITATION_DATA")
    missing = [path for path in paths if not os.path.exists(path)]
    errors = [f"{path}: no such file{MAKE_RELEASED if RELEASED in path else ''}" for path in missing]
    for name in filter(settings.get, PACKAGES):
        try:
            utils.require(*PACKAGES[name])
        except UserError as error:
            errors.append(str(error))
    if errors:
        raise UserError("; ".join(errors))


def check_sizes(settings: Settings) -> None:
    """Raise UserError for processes that do not divide a batch or have no GPU, and for matches of too large models."""
    names = ("NPROC", "NNODES", "TRAIN_BATCH", "GLOBAL_BATCH", "TENSOR_PARALLEL_SIZE")
    processes, machines, rows, batch, tensor = (int(settings[name]) for name in names)
    at_once = processes * machines * rows
    if batch % at_once or processes % tensor:
        multiple = f"GLOBAL_BATCH must be a multiple of NPROC x NNODES x TRAIN_BATCH, {at_once}"
        raise UserError(f"{multiple}, and NPROC of TENSOR_PARALLEL_SIZE")
    parameters = count_parameters(settings["MODEL"]) if settings["EVAL_WORDS"] else 0
    models = 2 * parameters * (4 if settings["PRECISION"] == "fp32" else 2)  # bytes of a match's weights
    import torch

    if torch.cuda.is_available():
        utils.check_gpus(torch.cuda.device_count(), processes=processes)
        memory = 0.9 * tensor * torch.cuda.get_device_properties(0).total_memory
        if models > memory:
            sizes = f"{models / 2**30:.0f} GiB, and they may take {memory / 2**30:.0f} GiB"
            raise UserError(f"EVAL_WORDS: the two models of a match have {sizes}; EVAL_WORDS= leaves matches out")


def check_sft_data(settings: Settings, trust_remote_code: bool = False) -> None:
    """Raise UserError for SFT rows that cannot be read and for messages without a chat template, before hours of play.

    What a template says of a single row, training finds.
    """
    path, model = settings["SFT_DATA"], settings["MODEL"]
    conversations = utils.read_records(path, utils.row_messages) if path else []
    if not any(conversations):
        return
    if not utils.load_tokenizer(model, trust_remote_code=trust_remote_code).chat_template:
        raise UserError(f"{path}: messages need a chat template, and the tokenizer of {model} has none")


def check_layout(settings: Settings, play: PlayFlags, game: Game) -> None:
    """Raise UserError for rows of imitation in another layout than that of play.

    A record beside the rows names it. If imitation is still to be trained, rows without a record that hold games must
    hold one of play's rule texts somewhere.
    """
    prompt_file = settings["PROMPTS"] or game.prompt_file
    templates = prompts.load_templates(prompt_file, game)
    foreign = []  # of other people, or of tools/controls.py
    for path in values(settings, "IMITATION_DATA"):
        record = Path(path).with_name(f"{Path(path).stem}_rewards_settings.json")
        made = read_json(record)["settings"] if record.is_file() else {}
        if "prompt_templates" not in made:
            foreign.append(path)
            continue
        chat = template_digest(settings["MODEL"], play) if play.chat_template else None
        of_play = (chat, play.thinking, utils.files_setting(prompt_file)["sha256"])
        if (made["chat_template"], bool(made.get("thinking")), made["prompt_templates"]["sha256"]) != of_play:
            how = f"its chat template, THINKING or prompts are not those of play ({settings['MODEL']}, {prompt_file})"
            raise UserError(f"{path}: {how}")
    imitation = Path(settings["OUTPUT"], "imitation", "model", "settings.json")
    if not foreign or settings["IMITATION_MODEL"] or imitation.is_file() and read_json(imitation)["finished"]:
        return
    rows = bare([utils.read_json_or_jsonl(path) for path in foreign])

    def is_there(rule: str) -> bool:
        return all(bare(part) in rows for part in prompts.SLOT.split(rule)[::2])

    if bare(prompts.NO_HISTORY) not in rows:
        logger.warning("%s: no record says how these rows were made; are their prompts those of play?", foreign)
    elif not any(map(is_there, templates[prompts.RULES])):
        remedy = f"take PROMPTS={RELEASED}{MAKE_RELEASED}; else make rows by tools/assign_rewards.py"
        rules = f"these games have none of play's rules ({prompt_file})"
        raise UserError(f"{' '.join(foreign)}: {rules}; for the authors' rows {remedy}")


def template_digest(model: str, play: PlayFlags) -> str:
    """The digest of a model's chat template, as records of rows have it. UserError if play could not use it."""
    from tools.games.chat import ChatTemplate  # brings transformers

    tokenizer = utils.load_tokenizer(model, trust_remote_code=play.trust_remote_code)
    return ChatTemplate(tokenizer, model, play.thinking).sha256


def bare(value) -> str:
    """The JSON of a text or a list, without what begins and ends it, and without blanks, those in its texts too."""
    text = json.dumps(value, ensure_ascii=False).replace("\\n", " ")
    return "".join(text.split())[1:-1]


def lock_output(folder: str) -> None:
    """Keep other loops out of OUTPUT. The shell and its stages hold the lock until all of them have ended."""
    try:
        fcntl.flock(LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{folder}: another loop is at work here; end that one first") from None
    except OSError as error:
        logger.warning("%s: no file locks here (%s); run one loop at a time", folder, error)


def record(settings: Settings, words: list[str]) -> None:
    """Write OUTPUT/settings.json and OUTPUT/words.txt. UserError if there are results of other settings."""
    folder = Path(settings["OUTPUT"])
    path = folder / "settings.json"
    if path.is_file() and any(any(folder.glob(pattern)) for pattern in RESULT_FILES):
        stored = read_file(DEFAULTS_FILE) | read_json(path)["settings"]
        outputs = (re.escape(str(Path(output))) for output in (stored["OUTPUT"], folder))
        inside = re.compile(rf"(?<![\w./-])({'|'.join(outputs)})/")  # OUTPUT may have been moved
        compared = sorted(settings.keys() - section("scope", "machine"))
        then, now = ({name: inside.sub("OUTPUT/", of[name]) for name in compared} for of in (stored, settings))
        if different := "; ".join(utils.differences(then, now)):
            way = f"use another OUTPUT, or delete {path} if no finished stage used them"
            raise UserError(f"{path}: made with other settings ({different}); {way}")
    utils.write_json(path, {"settings": settings, "made_by": utils.made_by()})
    utils.write_words(folder / "words.txt", words)


def main() -> None:
    words = sys.argv[1:]
    option = words.pop(0) if words[:1] in (["--output"], ["--lock"]) else ""
    settings = read_settings(words)
    is_first = settings["NODE_RANK"] == "0"
    if option == "--output":
        print(settings["OUTPUT"] if is_first else "")
        return
    for name in ("MODEL", "WORDS", "OUTPUT"):
        if not settings[name]:
            raise UserError(f"{name}=... is missing")
    if option == "--lock":
        lock_output(settings["OUTPUT"])
    words = check(settings)
    fill(settings)
    check_sizes(settings)
    if is_first:
        played = words[: int(settings["GAMES"] or len(words))]
        record(settings, played * int(settings["GAMES_PER_WORD"]))
    for name, value in settings.items():  # for `eval`; a setting of several values is an array
        several = f"({shlex.join(values(settings, name))})"
        print(f"{name}={several if name.endswith(SEVERAL) else shlex.quote(value)}")


if __name__ == "__main__":
    utils.run_program(main)
