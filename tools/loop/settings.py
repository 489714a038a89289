"""The loop's settings: read from TOML files and KEY=VALUE, inherited from another run, and recorded.

A setting has a name, such as `epochs` or `play.temperature`, and a value, a string or list of strings as on the
command line of the stage's program, whose own parser parses it.
"""

import dataclasses
import difflib
import functools
import json
import os
import re
import tomllib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools import assign_rewards, evaluate_belief, evaluate_games, evaluate_reasoning, play_llm_game
from tools.common.errors import UserError, user_errors
from tools.common.files import ROOT, read_json, read_text, read_words, write_json, write_words
from tools.common.flags import FlagGroup, build_parser, check_values, flag, flag_fields, is_compared, parse_flags
from tools.common.records import made_by
from tools.controls import CONTROLS, Control
from tools.games.flags import GameFlags

AUTO = "auto"  # as if unset: the machine decides
NONE = "none"
DEFAULTS = ROOT / "configs" / "default.toml"
FORMAT = 3  # of OUTPUT/settings.json
LORA_RATE = "1e-4"  # smaller updates are lost when adapters are merged into bf16 weights
PRECISION = ("bf16", "fp16", "dtype")  # flags set by `precision`
Value = str | list[str]
Settings = dict[str, Value | None]  # by name; None: unset


@dataclass(kw_only=True)
class OwnSettings(FlagGroup):
    """The loop's own settings; all others are flags of a stage.

    Models, games and words have compared=False, because the programs that read them compare their content.
    """

    model: str = flag("base model: a folder or a name on the hub", compared=False)
    words: str = flag("word list for self-play, one word per line", compared=False)
    output: str = flag("folder for all results", compared=False)
    imitation_model: str | None = flag(
        "use this imitation model instead of training one", default=None, compared=False
    )
    first_episodes: str | None = flag("use these episodes instead of playing epoch 1", default=None, compared=False)
    like: str | None = flag(
        "output of another run, whose settings, imitation model and epoch 1 games are reused",
        default=None,
        compared=False,
    )
    control: str | None = flag("train on a control's rows (configs/README.md)", default=None, choices=tuple(CONTROLS))
    until: str | None = flag(
        "stop after this stage, such as imitation or epoch1_play; rerun without it to continue",
        default=None,
        compared=False,
    )
    epochs: int = flag("epochs of self-play", default=3, at_least=0, compared=False)
    seed: int = flag(
        "seed of play, rows and training; epoch k uses seed + k, so choose seeds more than `epochs` apart",
        default=42,
        at_least=0,
    )
    max_words: int | None = flag("play only this many words, from the top of the list", default=None, at_least=1)
    games_per_word: int = flag("games per word in each epoch", default=1, at_least=1)
    global_batch: int = flag("rows per optimizer step, over all processes", default=128, at_least=1)
    match_every: int = flag("play a match every this many epochs", default=1, at_least=1, compared=False)
    machines: int = flag(
        "machines; run the same command on each, with a shared `output`", default=1, at_least=1, machine=True
    )
    machine: int = flag("index of this machine, from 0", default=0, at_least=0, machine=True)
    processes: int | None = flag(
        "processes on this machine; unset or auto: one per GPU, else 1", default=None, at_least=1, machine=True
    )
    precision: str | None = flag(
        "precision of training and play; unset or auto: bf16 if supported, else fp16 on GPUs and fp32 on CPUs",
        default=None,
        choices=("bf16", "fp16", "fp32"),
    )
    gradient_checkpointing: bool | None = flag(
        "True, False, or unset or auto: True with a GPU", default=None, machine=True
    )
    deepspeed: str | None = flag(
        "a DeepSpeed configuration or none; unset or auto: chosen by GPU memory", default=None, machine=True
    )
    # Port 0 lets torch pick a free one, so that several loops can run on one machine.
    rendezvous: str = flag("with several machines: host:port of machine 0", default="localhost:0", machine=True)
    rendezvous_id: str = flag(
        "name of this launch; machines join only launches of the same name", default="spag", machine=True
    )
    report: bool = flag("write report.html after each epoch", default=True, compared=False)
    check: bool = flag("only run the checks and print the command of each stage", default=False, compared=False)


OWN = {each.name: each for each in flag_fields(OwnSettings)}


@dataclass(frozen=True)
class Table:
    """A stage: its program, and what the loop needs to know about the program's flags.

    `flags`: their dataclass, or None for train.py, whose flags would import transformers. `set_by_loop`: flags that no
    setting may change. `inputs`: flags that name files or data sets of the hub. `results`: patterns of files in
    OUTPUT that show that the stage has begun; empty for evaluation, whose settings may change at any time.
    """

    program: str
    flags: type | None
    set_by_loop: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    results: tuple[str, ...] = ()


def _training(folder: str, *more: str) -> Table:
    sets = "output_dir model_name_or_path ref_model_name_or_path gradient_accumulation_steps gradient_checkpointing"
    return Table(
        "train.py",
        None,
        (*sets.split(), "deepspeed", "lora_merge", "seed", *more),
        ("train_data_path", "eval_data_path"),
        tuple(f"{folder}/model/{name}" for name in ("train_results.json", "*.safetensors", "checkpoint-*")),
    )


PLAYERS = ("attacker_model_name_or_path", "defender_model_name_or_path")
TABLES = {
    "imitation": _training("imitation"),
    "play": Table(
        "tools/play_llm_game.py",
        play_llm_game.Flags,
        (*PLAYERS, "data_path", "output_dir", "model_prefix", "data_suffix", "max_games", "seed"),
        ("prompt_templates",),
        ("epoch*/episodes/*_results.json", "epoch*/episodes/*_rank*.jsonl"),
    ),
    "rewards": Table(
        "tools/assign_rewards.py",
        assign_rewards.Flags,
        ("input_data_path", "output_data_path", "tokenizer", "seed"),
        ("sft_data_path", "prompt_templates"),
        ("epoch*/rows/rows.json",),
    ),
    "training": _training("epoch*", "train_data_path"),
    "match": Table("tools/evaluate_games.py", evaluate_games.Flags, ("players", "against", "output_dir"), ("words",)),
    "belief": Table(
        "tools/evaluate_belief.py",
        evaluate_belief.Flags,
        ("models", "output_dir", "max_length"),
        ("games", "candidates"),
    ),
    "reasoning": Table("tools/evaluate_reasoning.py", evaluate_reasoning.Flags, ("models", "output_dir")),
}
TRAININGS = ("imitation", "training")
SHARED = {
    each.name
    for table in TABLES.values()
    for each in (flag_fields(table.flags) if table.flags else ())
    if each.metadata["shared"]
}
# Settings and tables that determine the imitation model, and those that also determine the first games.
OF_IMITATION = SHARED | {"model", "precision", "imitation", "game_file"}
OF_GAMES = {"words", "max_words", "games_per_word", "seed", "play"}


@dataclass(kw_only=True)
class Loop(OwnSettings):
    """All settings: the loop's own as attributes, stages' flags in `tables`."""

    tables: dict[str, dict[str, Value]] = field(default_factory=dict)
    given: Settings = field(default_factory=dict)  # by name

    def of(self, stage: str) -> Namespace:
        """A stage's flags as its program parses them, including defaults. A UserError names the table."""
        with user_errors(f"[{stage}]", UserError):
            read = parser_of(stage).parse_args(command_line(self.tables[stage], joined=True))
            if flags := TABLES[stage].flags:
                check_values(read, flags)
            else:
                import arguments

                arguments.set_method_defaults(read)
        return read

    @property
    def first_player(self) -> str:
        """The model that plays epoch 1 or, if imitation trains it, its base. Later models keep its tokenizer."""
        return self.imitation_model or self.model

    @property
    def imitates(self) -> bool:
        """Whether the loop trains an imitation model. If not, `imitation_model` or the base model plays epoch 1."""
        return "train_data_path" in self.tables["imitation"] and not self.imitation_model

    def trained_model(self, stage: str, folder: str | Path) -> str:
        """Where training leaves the full model: with LoRA, the subfolder with merged adapters."""
        return str(Path(folder, "merged") if "lora_rank" in self.tables[stage] else folder)

    @property
    def control_class(self) -> type[Control] | None:
        return CONTROLS.get(self.control or "")

    @property
    def plays_games(self) -> bool:
        """False for controls that take another run's rows."""
        return self.control_class is None or self.control_class.plays_games


@functools.cache
def parser_of(stage: str) -> ArgumentParser:
    """A stage's parser with no flag required, because tables lack the flags that the loop sets."""
    if flags := TABLES[stage].flags:
        parser: ArgumentParser = build_parser(flags)
    else:
        import arguments  # imports transformers, which takes 5 s

        parser = arguments.build_parser()
    for action in parser._actions:
        if action.required:
            action.required = False
            action.default = None
    return parser


@functools.cache
def flags_of(stage: str) -> set[str]:
    return {action.dest for action in parser_of(stage)._actions} - {"help"}


def command_line(flags: Mapping[str, Any], *, joined: bool = False) -> list[str]:
    """Flags as arguments: {"n": 3, "names": ["a", "b"]} gives --n 3 --names a b. None omits a flag.

    With `joined`, --n=3, so that argparse refuses a wrong value of a boolean flag instead of reading the flag alone.
    """
    argv = []
    for name, value in flags.items():
        if isinstance(value, list):
            argv += [f"--{name}", *map(str, value)]
        elif value is not None:
            argv += [f"--{name}={value}"] if joined or str(value).startswith("-") else [f"--{name}", str(value)]
    return argv


def has_reference(train_method: str) -> bool:
    """Whether a training method uses a reference model."""
    import arguments

    return arguments.REFERENCE_NAME in arguments.METHOD_ARGUMENTS.get(train_method, {})


# Reading.


def read_loop(arguments: Iterable[str]) -> Loop:
    """The loop of a command line: TOML files and KEY=VALUE, of which later ones override earlier ones."""
    changes: Settings = {}
    for argument in arguments:
        changes |= read_argument(argument.strip("\r"))  # from $(cat FILE) with Windows line endings
    if like := changes.get("like"):
        return begin_like(str(like), changes)
    base = read_file(DEFAULTS)
    return make_loop(base | changes | learning_rates(base, changes))


def read_argument(argument: str) -> Settings:
    """The settings of KEY=VALUE, or of a file, whose path may contain "=".

    A VALUE that is a TOML list or quoted TOML string is parsed; any other is taken literally. Empty unsets.
    """
    name, equals, value = argument.partition("=")
    if not equals or "/" in name or os.path.isfile(argument):
        return read_file(argument)
    read: Any = value
    with suppress(tomllib.TOMLDecodeError):
        read = tomllib.loads(f"value = {value}", parse_float=str)["value"]
    return settings_of_key(name, read if isinstance(read, str | list) else value)


def read_file(path: str | Path) -> Settings:
    """The settings of a TOML file, in which keys of tables override keys above the tables."""
    try:
        tree = tomllib.loads(read_text(path), parse_float=str)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not TOML: {error}") from None
    settings: Settings = {}
    with user_errors(path, UserError):
        for name in sorted(tree, key=lambda name: name in TABLES):
            if name not in TABLES:
                settings |= settings_of_key(name, tree[name])
            elif not isinstance(tree[name], dict):
                raise UserError(f"{name} is a table; write [{name}] with its keys below")
            else:
                for key, value in tree[name].items():
                    settings |= settings_of_key(f"{name}.{key}", value)
    return settings


def settings_of_key(name: str, value: Any) -> Settings:
    """The settings that one key stands for: a flag above the tables is set in every stage that has it."""
    if isinstance(value, dict):
        what = "write it as a JSON string" if "." in name else f"there is no table [{name}]{nearest(name, TABLES)}"
        raise UserError(f"{name}: {what}")
    if name in OWN and isinstance(value, list):
        raise UserError(f"{name}: takes one value, not a list")
    texts = [to_text(name, each) for each in value] if isinstance(value, list) else to_text(name, value)
    return dict.fromkeys(names_of_key(name), texts or None)


def names_of_key(name: str) -> list[str]:
    """The settings that a key stands for. UserError for an unknown key or one that the loop sets."""
    table, dot, key = name.rpartition(".")
    if not dot and (name in OWN or name in SHARED):
        return [name]
    if dot and table not in TABLES:
        raise UserError(f"{name}: there is no table [{table}]{nearest(table, TABLES)}")
    if key in PRECISION:
        raise UserError(f"{name}: set by `precision` (bf16, fp16 or fp32)")
    if re.search(r"[_-]token$", key):
        raise UserError(f"{name}: the token would end up in records and logs; export HF_TOKEN=... instead")
    having = [stage for stage in ([table] if dot else TABLES) if key in flags_of(stage)]
    if not having and dot:
        raise UserError(f"{name}: no flag of {TABLES[table].program}{nearest(key, flags_of(table))}")
    if not having:
        known = set(OWN).union(*map(flags_of, TABLES))
        raise UserError(f"{name}: neither a setting of the loop nor a flag of a stage{nearest(key, known)}")
    if key in SHARED:
        raise UserError(f"{name}: all stages share {key}; set it above the tables, not in [{table}]")
    names = [f"{stage}.{key}" for stage in having if key not in TABLES[stage].set_by_loop]
    if not names:
        raise UserError(f"{name}: the loop sets this flag")
    return names


def nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def to_text(name: str, value: Any) -> str:
    """A value as a string, with ~ and $ROOT expanded."""
    text = re.sub(r"\$ROOT\b", lambda _: str(ROOT), str(value).strip("\r"))
    # $NAME, ${NAME}, $(command) or a lone $, which no shell would expand in a settings file.
    if other := re.search(r"\$(\w+|\{\w*\}?|\(.*?\)|)", text):
        raise UserError(f"{name}: {other[0]} is not expanded; write the path, ~ or $ROOT")
    # ~ at the start of a path, also after "=" as in NAME=~/model
    return re.sub(r"(?:(?<=^)|(?<==))~(?=/|$)", lambda _: os.path.expanduser("~"), text)


def learning_rates(base: Settings, changes: Settings) -> Settings:
    """Learning rates for trainings in which `changes` turn LoRA on or off without setting a learning rate."""
    rates: Settings = {}
    for stage in TRAININGS:
        lora_rank, learning_rate = f"{stage}.lora_rank", f"{stage}.learning_rate"
        if lora_rank not in changes or learning_rate in changes:
            continue
        if bool(changes[lora_rank]) != bool(base.get(lora_rank)):
            rates[learning_rate] = LORA_RATE if changes[lora_rank] else read_file(DEFAULTS)[learning_rate]
    return rates


def make_loop(settings: Settings) -> Loop:
    """Build a Loop. A shared setting goes into the table of each stage that has the flag."""
    given = {name: value for name, value in settings.items() if value is not None}
    for name in ("model", "words", "output"):
        if name not in given:
            raise UserError(f"{name}=... is missing (--help lists the settings)")
    argv = command_line({name: value for name, value in given.items() if name in OWN and value != AUTO}, joined=True)
    own = parse_flags(OwnSettings, argv, description="")
    tables: dict[str, dict[str, Value]] = {stage: {} for stage in TABLES}
    for name, value in given.items():
        stage, _, key = name.rpartition(".")
        for taker in [stage] if stage else [each for each in TABLES if name in SHARED and name in flags_of(each)]:
            tables[taker][key] = value
    return Loop(**vars(own), tables=tables, given=given)


# Differences between runs, and `like`.


def differences(then: Loop, now: Loop, *, paths: bool = False) -> dict[str, str]:
    """A phrase for each compared setting that differs; with `paths`, also for settings that name files.

    A setting that was not given has its program's default on both sides.
    """
    found = {}
    for name, own in OWN.items():
        is_path = paths and name in ("model", "words")
        if own.metadata["compared"] or is_path:
            found[name] = [getattr(loop, name) for loop in (then, now)]
    for stage, table in TABLES.items():
        values = then.of(stage), now.of(stage)
        for name in flags_of(stage) if table.results else ():
            if (paths and name in table.inputs) or compares(stage, name, values[1]):
                found[name if name in SHARED else f"{stage}.{name}"] = [getattr(each, name) for each in values]
    different = {name: values for name, values in found.items() if real_paths(values[0]) != real_paths(values[1])}
    return {name: f"{name}: {old} then, {new} now" for name, (old, new) in different.items()}


def real_paths(value: Any) -> Any:
    """A value for comparison: existing paths made absolute, an empty list as None."""
    if isinstance(value, list):
        return [real_paths(each) for each in value] or None
    return os.path.realpath(value) if isinstance(value, str) and os.path.exists(value) else value


def compares(stage: str, name: str, values: Namespace) -> bool:
    """Whether a difference in this flag makes it another run. Inputs do not: programs compare their content."""
    table = TABLES[stage]
    if name in table.inputs:
        return False
    if table.flags:
        (declared,) = [each for each in flag_fields(table.flags) if each.name == name]
        return is_compared(declared, values)
    import arguments

    return arguments.compares(name, values)


def begin_like(folder: str, changes: Settings) -> Loop:
    """A loop with another run's settings, imitation model and epoch 1 games.

    UserError if a changed setting would change the imitation model or those games and no replacement is given.
    """
    stored, became = settings_of_like(folder, changes.get("output"))
    base = {name: value for name, value in stored.items() if name not in ("like", "control", "until", "check")}
    then = dataclasses.replace(make_loop(base), precision=became["precision"])
    if "imitation_model" not in changes:
        base["imitation_model"] = imitation_of(folder, then)
    loop = make_loop(base | {"output": None} | changes | learning_rates(base, changes))
    if loop.precision is None:
        loop = dataclasses.replace(loop, precision=then.precision)
    changed = set(differences(then, loop, paths=True))
    if not changed & SHARED:  # otherwise all are replaced anyway
        changed |= edited_files(folder, loop)
    of_imitation = {name for name in changed if name.partition(".")[0] in OF_IMITATION}
    of_games = {name for name in changed if name.partition(".")[0] in OF_GAMES} | of_imitation
    of_games |= {"imitation_model"} & changes.keys()  # a model must train on its own games
    has_games = base["first_episodes"] and loop.plays_games
    needed = {"imitation_model": of_imitation, "first_episodes": of_games if has_games else of_imitation}
    if missing := [f"{name}=" for name, why in needed.items() if why and name not in changes]:
        why = ", ".join(sorted(set().union(*needed.values())))
        remedy = f"add {' '.join(missing)} (empty: make it again; a path: use that one)"
        raise UserError(f"like={folder}: its imitation model or games do not fit a changed {why}; {remedy}")
    return loop


def edited_files(folder: str, loop: Loop) -> set[str]:
    """Which of `words`, `prompt_templates` and `game_file` have another content than in the run in `folder`."""
    if has_begun(loop.output) or not os.path.isfile(loop.words):
        return set()
    recorded = read_record(folder).get("sha256", {})
    edited = {name for name, digest in digests(loop).items() if recorded.get(name, digest) != digest}
    if read_words(Path(folder, "words.txt")) != words_of_epoch(loop):
        edited.add("words")
    return edited


def digests(loop: Loop) -> dict[str, str]:
    """SHA-256 of `prompt_templates` and of a user's own `game_file`."""
    play = loop.of("play")
    flags = GameFlags(game=play.game, game_options=play.game_options, prompt_templates=play.prompt_templates)
    settings = flags.settings(flags.load_game())
    return {name: settings[name]["sha256"] for name in ("prompt_templates", "game_file") if name in settings}


def words_of_epoch(loop: Loop, check: Callable[[str], None] = lambda word: None) -> list[str]:
    """An epoch's words in the order of their games. UserError for a word that `check` refuses."""
    return read_words(loop.words, check)[: loop.max_words] * loop.games_per_word


def settings_of_like(folder: str, output: Value | None) -> tuple[Settings, dict]:
    """The settings of the run in `folder` with its first games, and the values that it chose for `auto`.

    That run may still be going on. Once a stage in `output` has begun, the copy in `output`'s own record is used.
    """
    if output and has_begun(str(output)) and Path(str(output), "settings.json").is_file():
        record = read_record(str(output))
        recorded = with_folders(record["settings"], str(output)).get("like")
        if recorded and os.path.realpath(str(recorded)) == os.path.realpath(folder):
            return with_folders(record["like"]["settings"], folder), record["like"]["became"]
    record = read_record(folder)
    settings = with_folders(record["settings"], folder)
    games = sorted(map(str, Path(folder, "epoch1", "episodes").glob("*_words_results.json")))
    first = {"first_episodes": settings.get("first_episodes") or (games[0] if games else None)}
    return settings | first, record["became"]


def imitation_of(folder: str, then: Loop) -> str | None:
    """A run's imitation model; None if its base model plays."""
    if not then.imitates:
        return then.imitation_model
    trained = Path(folder, "imitation", "model")
    if not is_finished(trained):
        raise UserError(f"like={folder}: its imitation is unfinished; rerun that run's command to continue it")
    return then.trained_model("imitation", trained)


def is_finished(model: Path) -> bool:
    record = model / "settings.json"
    return record.is_file() and read_json(record)["finished"]


# The record.


def has_begun(output: str) -> bool:
    """Whether any stage whose settings are compared has left results."""
    return any(any(Path(output).glob(pattern)) for table in TABLES.values() for pattern in table.results)


def check_record(loop: Loop, words: list[str]) -> None:
    """UserError if a stage has begun in OUTPUT and a result-changing setting or the words differ."""
    path = Path(loop.output, "settings.json")
    if not path.is_file() or not has_begun(loop.output):
        return
    record = read_record(loop.output)
    then = make_loop(with_folders(record["settings"], loop.output) | {"output": loop.output})
    then = dataclasses.replace(then, precision=record["became"]["precision"])
    way = f"start a new run with like={loop.output} output=..."
    if different := differences(then, loop):
        raise UserError(f"{path}: made with other settings ({'; '.join(different.values())}); {way}")
    if read_words(path.with_name("words.txt")) != words:
        raise UserError(f"words={loop.words} differs from OUTPUT/words.txt; restore the list or {way}")


def write_record(loop: Loop, became: Mapping, words: list[str]) -> None:
    """Write OUTPUT/settings.json (the settings given and the values chosen for `auto`) and OUTPUT/words.txt."""
    record = {"format": FORMAT, "settings": without_folders(loop.given, loop.output)}
    record["became"] = without_folders(became, loop.output)
    record["sha256"] = digests(loop)
    record["made_by"] = made_by()
    if loop.like:
        then, of_like = settings_of_like(loop.like, loop.output)
        record["like"] = {"settings": without_folders(then, loop.like), "became": of_like}
    write_json(Path(loop.output, "settings.json"), record)
    write_words(Path(loop.output, "words.txt"), words)


def read_record(folder: str | Path) -> dict:
    """A loop's record. UserError if it is missing or of another format."""
    path = Path(folder, "settings.json")
    if not path.is_file():
        raise UserError(f"{path}: no such file; is {folder} a loop's output?")
    record = read_json(path)
    if record.get("format") != FORMAT:
        raise UserError(f"{path}: written by an older version of the loop; use another output")
    return record


def without_folders(settings: Settings, output: str) -> Settings:
    """Settings with paths in OUTPUT and the project written as $OUTPUT/... and $ROOT/..., because both may move."""
    names = {in_json(folder): "$OUTPUT" for folder in (Path(output), os.path.realpath(output))} | {
        in_json(ROOT): "$ROOT"
    }
    inside = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, names))})(?=/)")
    return json.loads(inside.sub(lambda at: names[at[1]], json.dumps(settings)))


def with_folders(settings: Settings, output: str) -> Settings:
    """The inverse of `without_folders`, for the folders' present locations."""
    text = json.dumps(settings).replace("$OUTPUT", in_json(Path(output))).replace("$ROOT", in_json(ROOT))
    return json.loads(text)


def in_json(folder: str | Path) -> str:
    """A path as escaped inside a JSON string."""
    return json.dumps(str(folder))[1:-1]
