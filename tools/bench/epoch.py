"""What an epoch of the method takes on GPUs that are not at hand: hours and memory, computed and not measured.

    python -m tools.bench.epoch --gpus 8

Play: each token of the games is computed once; each step reads the weights and the keys and values of the rules, once
for all games at a time, and those of every game. Of operations over peak rate and bytes over peak bandwidth the slower
one is the limit; the hours are those at --play_share of it. Games at a time: as many as play would choose.
Training, without offload: 6 operations a parameter and token, 8 with gradient checkpointing and 10 with the reference
pass, at --train_share of the peak rate. Memory: ZeRO-3 spreads 16 bytes a parameter over the GPUs (weights and
gradients in bf16, three float32 numbers of the optimizer), with offload two layers' weights at a time; and the
activations of 2 rows of 2048 tokens, kept at the borders of the layers.
"""

from dataclasses import asdict, dataclass

import utils
from tools.bench.common import SHAPES, Shape, print_table
from tools.engine.memory import MEMORY_SHARE, MOST_GAMES
from utils import flag

GIB = 2**30
TOKENS_HELD = 1024  # of a game, as play counts them: half of --max_length


@dataclass(frozen=True)
class GPU:
    """By the vendor's data sheet: memory, bandwidth, dense bf16 rate."""

    gib: float
    bytes_per_second: float
    operations_per_second: float


MODELS = ("1b", "7b", "13b", "70b")
GPUS = {
    "A100-40": GPU(40, 1.555e12, 312e12),
    "A100-80": GPU(80, 2.039e12, 312e12),
    "H100": GPU(80, 3.35e12, 989e12),
    "H200": GPU(141, 4.8e12, 989e12),
}


COLUMNS = dict.fromkeys(
    ["model", "GPU", "games at once", "play, hours", "training, hours", "ZeRO-3, GiB", "with offload, GiB"], "{}"
)


@dataclass
class Settings:
    """What an epoch consists of, by default the paper's."""

    gpus: int = flag("GPUs that share the work", default=8)
    games: int = flag("games of an epoch", default=47591)
    messages: float = flag("mean messages of a game", default=6.0)
    reply_tokens: float = flag("mean tokens of a message", default=60.0)
    rule_tokens: float = flag("tokens that all prompts begin with", default=330.0)
    instruction_tokens: float = flag("tokens at the end of a prompt that are its own", default=45.0)
    rows: float = flag("rows of training a game, its winner's messages", default=2.9)
    sft_rows: int = flag("SFT rows of an epoch", default=52000)
    sft_tokens: float = flag("mean tokens of an SFT row", default=120.0)
    play_share: float = flag("share of its limit that play reaches", default=0.25)
    train_share: float = flag("share of the peak rate that training reaches", default=0.4)

    def __post_init__(self):
        if problems := [
            f"--{name} must be above 0, got {value}" for name, value in asdict(self).items() if value <= 0
        ]:
            raise ValueError("\n".join(problems))


def games_at_once(model: Shape, gpu: GPU, spread: int) -> int:
    """Games whose caches fit beside the weights, on a GPU or on `spread` together."""
    free = spread * gpu.gib * GIB - 2 * model.parameters
    return min(MOST_GAMES, max(1, int(MEMORY_SHARE * free / (TOKENS_HELD * 2 * model.cache_numbers))))


def play_hours(args: Settings, model: Shape, gpu: GPU, spread: int) -> float:
    """Hours of play at `play_share` of the limit; GPUs that share a model take turns."""
    new = args.games * args.messages * args.reply_tokens
    prompts = args.games * args.messages * (args.reply_tokens + 5 + args.instruction_tokens)  # each token once
    seen = args.rule_tokens + args.messages / 2 * (args.reply_tokens + 5) + args.instruction_tokens
    at_once = games_at_once(model, gpu, spread)
    operations = 2 * model.parameters * (new + prompts) + 4 * model.layers * model.hidden_size * seen * new
    steps = new / at_once
    read = steps * (2 * model.parameters + args.rule_tokens * 2 * model.cache_numbers)
    read += new * (seen - args.rule_tokens) * 2 * model.cache_numbers
    seconds = max(operations / gpu.operations_per_second, read / gpu.bytes_per_second)
    return seconds * spread / args.gpus / args.play_share / 3600


def train_hours(args: Settings, model: Shape, gpu: GPU) -> float:
    """Hours of training with gradient checkpointing, the reference pass included."""
    row = args.rule_tokens + args.messages / 2 * (args.reply_tokens + 5) + args.instruction_tokens + args.reply_tokens
    game_tokens = args.games * args.rows * row
    operations = model.parameters * (10 * game_tokens + 8 * args.sft_rows * args.sft_tokens)
    return operations / gpu.operations_per_second / args.gpus / args.train_share / 3600


def train_gib(args: Settings, model: Shape, offload: bool) -> float:
    """Memory of each GPU under ZeRO-3, with two rows of 2048 tokens."""
    places = 2 * 2048
    borders = 2 * places * model.hidden_size * model.layers
    one_layer = 2 * places * (16 * model.hidden_size + 4 * model.intermediate_size)
    gathered = 2 * 2 * (model.parameters / model.layers)  # a layer's weights, and the next one's
    states = gathered if offload else gathered + 16 * model.parameters / args.gpus
    return (borders + one_layer + states) / GIB


def table_line(args: Settings, name: str, card: str) -> dict[str, str]:
    """One model on one kind of GPU; empty cells where it does not fit."""
    model, gpu = SHAPES[name], GPUS[card]
    spread = next(n for n in (1, 2, 4, 8, 16, 32) if 2 * model.parameters < 0.8 * n * gpu.gib * GIB)
    memory = [train_gib(args, model, offload) for offload in (False, True)]
    fits = [gib < 0.9 * gpu.gib for gib in memory]
    play = f"{play_hours(args, model, gpu, spread):.2g}" if spread <= args.gpus else ""
    cells = [
        name,
        card,
        f"{games_at_once(model, gpu, spread)}" + (f" on {spread} GPUs" if spread > 1 else ""),
        play,
        f"{train_hours(args, model, gpu):.2g}" if fits[0] else "",
        *(f"{gib:.0f}" + ("" if fit else " (too much)") for gib, fit in zip(memory, fits, strict=True)),
    ]
    return dict(zip(COLUMNS, cells, strict=True))


def main() -> None:
    args = utils.parse_flags(Settings, description=__doc__)
    print(f"{args.gpus} GPUs, {args.games} games and {args.games * args.rows + args.sft_rows:.0f} rows; computed:\n")
    print_table(COLUMNS, [table_line(args, name, card) for name in MODELS for card in GPUS])


if __name__ == "__main__":
    utils.run_program(main)
