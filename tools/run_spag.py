"""All of SPAG: imitation, then epochs of self-play, each of which is play, rewards, training, a match and a report.

    python -m tools.run_spag configs/llama2_7b.toml output=outputs/spag seed=142 play.temperature=1.0

Arguments are TOML files and KEY=VALUE settings. Later ones override earlier ones, and all override
configs/default.toml. A file has one table per stage, whose keys are flags of that stage's program. A key above the
tables is a setting of the loop, a flag shared by all stages, or sets that flag in every stage that has it. VALUE may
be a TOML list; `KEY=` unsets a setting. To continue a stopped loop, rerun the same command. Each stage writes to
OUTPUT/logs/STAGE.log.
"""

import dataclasses
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tools.common.errors import UserError
from tools.common.files import ROOT
from tools.common.programs import run_program
from tools.loop.check import ask, check_inputs
from tools.loop.settings import (
    NONE,
    OWN,
    SHARED,
    TABLES,
    Loop,
    check_record,
    command_line,
    flags_of,
    has_reference,
    read_loop,
    write_record,
)
from tools.loop.stages import StageFailed, Stages, hold_lock, say

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # precision -> dtype of play and evaluation


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command of the loop: a program and its arguments."""

    what: str  # imitation, play, rewards, train, eval, ...
    epoch: int | None = None
    program: str | None = None  # None: nothing to run, but `until` may name the step
    argv: list[str] = field(default_factory=list)
    stage: str | None = None  # the table with its flags
    processes: int | None = None  # per machine; None: a single process on machine 0
    trained: str | None = None  # model folder, whose checkpoints are deleted after training
    may_fail: bool = False  # a failure does not stop the loop

    @property
    def name(self) -> str:
        return self.what if self.epoch is None else f"epoch{self.epoch}_{self.what}"


Steps = Callable[[Loop], Iterable[Step]]
Ended = Callable[[Loop, Step], None]


# What runs, in this order.


def steps(loop: Loop) -> Iterator[Step]:
    """The commands of all stages, in order.

    In a run each step has finished before the next one is created, so a step may depend on earlier results. The
    checks at the start also iterate over the steps, before there are any results.
    """
    model = loop.first_player  # the newest model
    player = "imitation"  # its name in file names
    if loop.imitates:
        folder = f"{loop.output}/imitation/model"
        yield training_step(loop, "imitation", "imitation", None, folder, model, seed=loop.seed)
        model = loop.trained_model("imitation", folder)
    else:
        yield Step(what="imitation")
    # The opponent in all matches, called "imitation" even if it is `imitation_model` or the base model.
    imitation = model
    models = {"base": loop.model}
    if model != loop.model:
        models["imitation"] = model
    for epoch in range(1, loop.epochs + 1):
        folder = f"{loop.output}/epoch{epoch}"
        episodes = f"{folder}/episodes/{player}_{loop.of('play').task_type}_words_results.json"
        if epoch == 1 and loop.first_episodes:
            episodes = loop.first_episodes
            yield Step(what="play", epoch=1)
        else:
            yield play_step(loop, epoch, model, player) if loop.plays_games else Step(what="play", epoch=epoch)
        yield from rows_steps(loop, epoch, episodes)
        yield self_play_step(loop, epoch, model)
        model = loop.trained_model("training", f"{folder}/model")
        player = f"epoch{epoch}"
        models[player] = model
        if "words" in loop.tables["match"] and epoch % loop.match_every == 0:
            yield match_step(loop, epoch, imitation, model)
        if "games" in loop.tables["belief"]:
            # Base and imitation model are measured in epoch 1 only, because the belief games never change.
            yield belief_step(loop, epoch, models if epoch == 1 else {player: model})
        yield from report_steps(loop)
    # Once at the end, because the program writes one table of all models.
    if "tasks" in loop.tables["reasoning"]:
        flags = {
            "models": name_equals_path(models),
            "output_dir": f"{loop.output}/reasoning",
            "dtype": DTYPES[loop.precision],
        }
        yield stage_step(loop, "reasoning", "reasoning", None, flags)
        yield from report_steps(loop)


def planned_steps(loop: Loop, steps: Steps = steps) -> Iterator[Step]:
    """The steps up to and including `until`, or all."""
    for step in steps(loop):
        yield step
        if step.name == loop.until:
            return


def stage_step(
    loop: Loop, stage: str, what: str, epoch: int | None, flags: dict, defaults: Mapping = {}, **more
) -> Step:
    """A stage's step. `flags`, set by the loop, override the stage's table, which overrides `defaults`."""
    # The released commands combine --bf16 with --tf32. precision=fp32 means full fp32.
    faster = {"tf32": True} if loop.precision == "bf16" and "tf32" in flags_of(stage) else {}
    argv = command_line({**faster, **defaults, **loop.tables[stage], **flags})
    return Step(what=what, epoch=epoch, program=TABLES[stage].program, argv=argv, stage=stage, **more)


def training_step(loop: Loop, stage: str, what: str, epoch: int | None, folder: str, model: str, **flags) -> Step:
    """Train `model`, which also serves as the reference where the method has one.

    In self-play that makes the reference the policy that sampled the games, as the importance ratio requires.
    """
    table = loop.of(stage)
    rows_at_once = loop.processes * loop.machines * table.per_device_train_batch_size
    # Rounding the accumulation steps would make the effective batch, and so the results, depend on the GPU count.
    if not rows_at_once or loop.global_batch % rows_at_once:
        factors = f"processes x machines x {stage}.per_device_train_batch_size, {rows_at_once}"
        raise UserError(f"global_batch={loop.global_batch} must be a multiple of {factors}")
    flags |= {
        "output_dir": folder,
        "model_name_or_path": model,
        "ref_model_name_or_path": model if has_reference(table.train_method) else None,
        "gradient_accumulation_steps": loop.global_batch // rows_at_once,
        "gradient_checkpointing": loop.gradient_checkpointing,
        "deepspeed": None if loop.deepspeed == NONE else loop.deepspeed,
        "lora_merge": True if table.lora_rank else None,
    }
    if loop.precision != "fp32":
        flags[loop.precision] = True
    # Micro-batch of the reference, which needs less memory because it has no backward pass.
    defaults = {"per_device_eval_batch_size": max(8, table.per_device_train_batch_size)}
    return stage_step(loop, stage, what, epoch, flags, defaults, processes=loop.processes, trained=folder)


def self_play_step(loop: Loop, epoch: int, model: str) -> Step:
    """Train the newest model on this epoch's rows.

    Optimizer and learning-rate schedule restart in every epoch, so `epochs` may be changed between two starts.
    """
    folder = f"{loop.output}/epoch{epoch}"
    flags = {"train_data_path": f"{folder}/rows/rows.json", "seed": loop.seed + epoch}
    if loop.control and not loop.control_class.makes_game_rows:
        flags["allow_no_game_rows"] = True
    return training_step(loop, "training", "train", epoch, f"{folder}/model", model, **flags)


def play_step(loop: Loop, epoch: int, model: str, player: str) -> Step:
    """Self-play of the newest model.

    The seed differs by epoch. Otherwise every epoch would repeat the random draws of the one before: sampling, the
    prompts of rows, and the order of rows in training.
    """
    flags = {
        "attacker_model_name_or_path": model,
        "defender_model_name_or_path": model,
        "data_path": f"{loop.output}/words.txt",
        "output_dir": f"{loop.output}/epoch{epoch}/episodes",
        "model_prefix": player,
        "data_suffix": "words",
        "seed": loop.seed + epoch,
        "dtype": DTYPES[loop.precision],
    }
    return stage_step(loop, "play", "play", epoch, flags, processes=processes_of_play(loop, "play"))


def processes_of_play(loop: Loop, stage: str) -> int:
    """Processes that play on this machine, with `tensor_parallel_size` GPUs each."""
    gpus = loop.of(stage).tensor_parallel_size
    if loop.processes % gpus:
        raise UserError(f"processes={loop.processes} must be a multiple of {stage}.tensor_parallel_size, {gpus}")
    return loop.processes // gpus


def rows_steps(loop: Loop, epoch: int, episodes: str) -> Iterator[Step]:
    """Make epochK/rows/rows.json from the games or, for a control, by transforming rows."""
    rows = f"epoch{epoch}/rows/rows.json"
    if not loop.control:
        yield rewards_step(loop, "rewards", epoch, episodes, f"{loop.output}/{rows}")
        return
    source = f"{loop.like}/{rows}"
    if loop.plays_games:
        source = f"{loop.output}/epoch{epoch}/rows/winners.json"
        yield rewards_step(loop, "winners", epoch, episodes, source)
    elif not Path(source).is_file():
        raise UserError(f"control={loop.control}: {source} is missing; it should hold the rows of the `like` run")
    flags = {"rows": source, "output": f"{loop.output}/{rows}"} | flags_of_control(loop, epoch)
    argv = [loop.control, *command_line(flags)]
    yield Step(what="rewards", epoch=epoch, program="tools/controls.py", argv=argv)


def rewards_step(loop: Loop, what: str, epoch: int, episodes: str, output: str) -> Step:
    flags = {"input_data_path": episodes, "output_data_path": output, "seed": loop.seed + epoch}
    flags["tokenizer"] = tokenizer_of_rows(loop)
    # A thought belongs to the prompt that produced it, so training must use play's prompts.
    defaults = {"training_prompt": "play"} if loop.of("rewards").thinking else {}
    return stage_step(loop, "rewards", what, epoch, flags, defaults)


def tokenizer_of_rows(loop: Loop) -> str | None:
    return loop.first_player if loop.of("rewards").chat_template else None


def flags_of_control(loop: Loop, epoch: int) -> dict:
    """Flags of a control that the loop can fill in: those it shares with [rewards], and some more."""
    table = loop.of("training")
    is_by_step = table.loss_normalization == "step"  # the loss is averaged over a step, not a micro-batch
    known = {
        **loop.tables["rewards"],
        "tokenizer": tokenizer_of_rows(loop),
        "seed": loop.seed + epoch,
        "sft_coeff": table.lm_sft_coeff,
        "rows_at_once": loop.global_batch if is_by_step else table.per_device_train_batch_size,
    }
    names = [field.name for field in dataclasses.fields(loop.control_class)]
    return {name: known[name] for name in names if name in known}


def match_step(loop: Loop, epoch: int, imitation: str, model: str) -> Step:
    """The newest model against the imitation model.

    All epochs, and all runs that share the imitation model, have the same opponent, so their points are comparable.
    """
    flags = {
        "players": name_equals_path({"imitation": imitation, f"epoch{epoch}": model}),
        "against": "imitation",
        "output_dir": f"{loop.output}/epoch{epoch}/eval",
        "dtype": DTYPES[loop.precision],
    }
    return stage_step(loop, "match", "eval", epoch, flags, processes=processes_of_play(loop, "match"))


def belief_step(loop: Loop, epoch: int, models: dict[str, str]) -> Step:
    """Measure what the hints of stored games tell these models."""
    play_flags = loop.of("play")
    flags = {
        "models": name_equals_path(models),
        "output_dir": f"{loop.output}/epoch{epoch}/belief",
        # The longest prompt of play: play's max_length includes the reply, belief's does not.
        "max_length": play_flags.max_length - play_flags.max_new_tokens,
        "dtype": DTYPES[loop.precision],
    }
    return stage_step(loop, "belief", "belief", epoch, flags)


def report_steps(loop: Loop) -> Iterator[Step]:
    """Update the report, unless `report` is false. It may fail, because no results depend on it."""
    game = {name: loop.tables["play"].get(name) for name in ("game", "game_options")}
    if loop.report:
        argv = [loop.output, *command_line(game)]
        yield Step(what="report", program="tools/report.py", argv=argv, may_fail=True)


def name_equals_path(models: dict[str, str]) -> list[str]:
    return [f"{name}={model}" for name, model in models.items()]


# From the command line to the end.


def main(steps: Steps = steps, ended: Ended | None = None) -> None:
    """Run the loop. A script may pass its own `steps`.

    `ended` is called after every step that ran on this machine, also if an earlier start had already finished it.
    """
    argv = sys.argv[1:]
    if {"-h", "--help"}.intersection(argv):
        print(help_text())
        return
    loop = read_loop(argv)
    words = check_inputs(loop)
    became = ask(loop, partial(planned_steps, steps=steps))
    loop = dataclasses.replace(loop, **became)
    plan = planned_steps(loop, steps)
    stages = Stages(loop.output, loop.machine)
    # Only machine 0 takes the lock and writes the record, because all machines share one output. check=true takes no
    # lock, so that it works while a loop is running.
    if loop.machine == 0 and not loop.check:
        stages.lock = hold_lock(loop.output)
    if loop.machine == 0:
        check_record(loop, words)
    if loop.check:
        for step in plan:
            if step.program:
                print(f"{step.name}: {shlex.join(command(loop, step))}")
        return
    if loop.machine == 0:
        write_record(loop, became, words)
    run(loop, plan, stages, ended)


def run(loop: Loop, plan: Iterable[Step], stages: Stages, ended: Ended | None = None) -> None:
    """Run the steps one at a time, because each uses all GPUs, and delete the checkpoints of finished trainings.

    A restart runs every program again; each detects by itself that its work is done.
    """
    begin = time.monotonic()
    for step in plan:
        if step.program is None or (step.processes is None and loop.machine > 0):
            continue
        try:
            stages.run(step.name, command(loop, step), **threads(loop, step))
        except StageFailed as error:
            sys.stderr.write(f"{Path(sys.argv[0]).name}: {error}\n")
            if not step.may_fail:
                sys.exit(1)
        if step.trained and loop.machine == 0:
            delete_checkpoints(step.trained)
        if ended:
            ended(loop, step)
    if loop.until:
        say(f"stopped after {loop.until}, as set by until")
    else:
        say(f"finished in {(time.monotonic() - begin) / 60:.0f} min; results are in {loop.output}")


def command(loop: Loop, step: Step) -> list[str]:
    """A step's command line, with torchrun if it needs several processes."""
    program = [str(ROOT / str(step.program)), *step.argv]
    if not is_launched(loop, step):
        return [sys.executable, *program]
    # While machine 0 runs single-process stages, the others wait at the next rendezvous, for up to a day. is_host says
    # who opens the port; torch would guess from host names. Ids differ by step, so that machines at different stages
    # do not join the same launch.
    launcher = {
        "nproc_per_node": step.processes,
        "nnodes": loop.machines,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": loop.rendezvous,
        "rdzv_id": f"{loop.rendezvous_id}-{step.name}",
        "rdzv_conf": f"is_host={int(loop.machine == 0)},join_timeout=86400,read_timeout=86400",
    }
    return [sys.executable, "-m", "torch.distributed.run", *command_line(launcher), *program]


def is_launched(loop: Loop, step: Step) -> bool:
    return step.processes is not None and step.processes * loop.machines > 1


def threads(loop: Loop, step: Step) -> dict[str, str]:
    """OMP_NUM_THREADS for torchrun, whose default of 1 starves the CPU optimizer under offload."""
    if "OMP_NUM_THREADS" in os.environ or not is_launched(loop, step):
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // step.processes))}


def delete_checkpoints(folder: str) -> None:
    """Delete a finished training's checkpoints: at 7B each takes 94 GB."""
    for path in Path(folder).glob("checkpoint-*"):
        try:
            shutil.rmtree(path)
        except OSError as error:
            sys.stderr.write(f"{Path(sys.argv[0]).name}: warning: could not delete {path}: {error}\n")


def help_text() -> str:
    lines = [__doc__.strip(), "", "settings of the loop:"]
    for name, own in OWN.items():
        default = "required" if own.default is dataclasses.MISSING else f"default: {own.default}"
        lines.append(f"  {name:23}{own.metadata['help']} ({default})".replace(" (default: None)", ""))
    lines += ["", f"flags shared by all stages, set above the tables: {' '.join(sorted(SHARED))}"]
    lines += ["", "tables, and how to list the flags of each:"]
    lines += [f"  {f'[{stage}]':23}python {table.program} --help" for stage, table in TABLES.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    run_program(main)
