"""The arms of the study: ways of learning, all from the same imitation model and its games. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tools.games.game import DEFAULT_GAME

BASE, IMITATION, RELEASED = "base", "imitation", "released"
CONTROL = "-m tools.tiny.controls --control"  # rewards that only the embedded world has


@dataclass(frozen=True)
class Arm:
    """One way of learning from self-play."""

    name: str
    title: str
    settings: Mapping[str, object] = field(default_factory=dict)  # of tools/run_spag.sh
    every_epoch: bool = False  # whether the models of all epochs have matches, not only the last
    game: str = DEFAULT_GAME  # of its self-play; matches are at Taboo
    after_released: bool = False  # its rows depend on those of RELEASED
    matches: bool = True  # False: it is there for the questions outside the game alone
    epochs: int | None = None  # None: as many as the study has
    most_seeds: int | None = None  # None: all seeds

    @property
    def plays_on(self) -> bool:
        """Whether the last model's games against itself are wanted too."""
        return self.every_epoch or self.game != DEFAULT_GAME


ONE_GAME = {"games": 1, "games_per_word": 1}  # an epoch, where no rows are made of games
SHARE, COST = 0.5, 0.25  # of --losers and --ties; chosen on seed 100, which is not in the study
DETACHED = {"detach_kl": True}
FEW_ROWS = {  # where most games come to tie, few rows are left
    "reward_args": "--training_prompt play --min_game_rows 0",
    "train_args": "--allow_no_game_rows True",
}
ARMS = {
    arm.name: arm
    for arm in (
        Arm(RELEASED, "SPAG, loss as released", every_epoch=True),
        Arm("detached", "SPAG, KL detached", DETACHED, every_epoch=True),
        Arm("detached_twice", "SPAG, KL detached, two passes", {**DETACHED, "train_args": "--num_train_epochs 2"}),
        Arm("losers", "losers' rows too, KL detached", {**DETACHED, **FEW_ROWS, "losers": SHARE}, every_epoch=True),
        Arm(
            "losers_ties",
            "losers' rows too, KL detached, ties cost",
            {**DETACHED, **FEW_ROWS, "losers": SHARE, "ties": COST},
            every_epoch=True,
        ),
        Arm(
            "cloning_all",
            "cloning of all messages of both roles",
            {"control": "cloning", "reward_args": "--training_prompt play --messages all"},
        ),
        Arm("coin", "winner drawn by coin", {"control": "coin"}),
        Arm("sft", "SFT rows only, as many steps", {"control": "sft"}, after_released=True),
        Arm(
            "losers_released",
            "losers' rows too, loss as released",
            {
                **FEW_ROWS,
                "losers": SHARE,
                "train_args": f"{FEW_ROWS['train_args']} --allow_negative_rewards True",
            },
            every_epoch=True,
            epochs=2,
            most_seeds=2,
        ),
        Arm("cloning", "cloning of the winners", {"control": "cloning"}, most_seeds=2),
        Arm(
            "silent",
            "SPAG, game rows of weight 0",
            {"rewards": f"{CONTROL} silent --like {RELEASED}", **ONE_GAME},
            after_released=True,
            matches=False,
        ),
        Arm(
            "forms",
            "answered questions in place of game rows",
            {
                "rewards": f"{CONTROL} forms --like {RELEASED}",
                "train_args": "--allow_no_game_rows True",
                **ONE_GAME,
            },
            after_released=True,
            matches=False,
        ),
        Arm("questions", "SP-20Q: self-play of 20 Questions", game="twenty_questions", after_released=True),
        Arm("cities", "SP-GuessCity: self-play of Guess My City", game="guess_my_city", after_released=True),
    )
}
PAIRS = [
    *(("detached", RELEASED), ("losers", RELEASED), ("losers", "detached"), ("losers", "detached_twice")),
    *(("losers_ties", "losers"), ("losers_ties", RELEASED), ("losers", "cloning_all"), ("losers", "coin")),
    *((RELEASED, "cloning_all"), (RELEASED, "coin"), (RELEASED, "sft"), (RELEASED, "questions"), (RELEASED, "cities")),
]
MEETING = ("losers", RELEASED)  # whose last models meet each other
# The test of reasoning: its arms, and the differences in right answers that are shown.
REASONING = (RELEASED, "losers", "sft", "silent", "forms")
REASONING_PAIRS = [(RELEASED, "silent"), (RELEASED, IMITATION), ("losers", "silent"), ("forms", "silent")]
