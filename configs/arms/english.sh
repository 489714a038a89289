# shellcheck shell=bash disable=SC2034,SC2154  # sourced by tools/study/run_study.sh, which sets root, seed and folder
# A study of a pretrained model of 135M parameters that plays in English. configs/english.sh says how its model
# (models/smollm2) and its rows of imitation (outputs/english/data) are made, once for all seeds:
#
#   SEEDS="0 1 2" tools/study/run_study.sh configs/arms/english.sh outputs/english_study
# Each seed draws 300 rows of imitation. All its arms have them as SFT rows, which anchor them to imitation.
data=outputs/english/data
before() {
  "$PYTHON" -m tools.controls repeat --rows "$data/imitation.json" --number 300 --seed "$seed" \
    --output "$folder/anchor.json"
}
all=("$root/configs/english.sh" WORDS="$data/played.txt" SFT_DATA="$folder/anchor.json" EPOCHS=2
  EVAL_WORDS="held_out=$data/held_out.txt" EVAL_SEEDS="$seed" BELIEF_GAMES="$root/data/imitation_games.jsonl"
  BELIEF_ARGS="--split held_out" REPORT=False PLAY_ARGS="--logging_steps 0" EVAL_ARGS="--logging_steps 0")

arm released MODEL=models/smollm2 IMITATION_DATA="$data/imitation.json" # SPAG, loss as released
arm sft CONTROL=sft                                                     # SFT rows only, as many steps
arm baseline DETACH_KL=True BASELINE=role                               # rewards minus the mean of their role
arm losers_ties DETACH_KL=True LOSERS=0.5 TIES=0.25                     # losers' rows too, ties cost

table=(--primary "share among 200" released sft --primary "share among 200" baseline sft)
