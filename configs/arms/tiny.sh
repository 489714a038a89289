# shellcheck shell=bash disable=SC2034,SC2154  # sourced by tools/study/run_study.sh, which sets root, seed and folder
# A study of the embedded world (tools/tiny/README.md):
#
#   SEEDS="20 21 22" JOBS=2 tools/study/run_study.sh configs/arms/tiny.sh outputs/tiny_study
# Three epochs; after the last one come games against itself.
before() { "$PYTHON" -m tools.tiny.build --output_dir "$folder" --seed "$seed"; }
after() { # asks all models of a loop
  local model models=("base=$folder/base" "imitation=$folder/released/imitation/model")
  for model in "$1"/epoch*/model; do models+=("$(basename "$(dirname "$model")")=$model"); done
  "$PYTHON" -m tools.tiny.questions --models "${models[@]}" --output_dir "$1"
}
data=$folder/data
all=("$root/configs/tiny.sh" WORDS="$data/words.txt" SFT_DATA="$data/facts.json" BELIEF_GAMES="$data/belief_games.json"
  EVAL_WORDS="played=$data/words.txt held_out=$data/held_out.txt" EVAL_SEEDS="$seed"
  EPOCHS=4 UNTIL=epoch4_play SAVE_STEPS=0 REPORT=False PLAY_ARGS="--logging_steps 0" EVAL_ARGS="--logging_steps 0")

arm released MODEL="$folder/base" IMITATION_DATA="$data/imitation.json" # SPAG, loss as released
arm losers_ties DETACH_KL=True LOSERS=0.5 TIES=0.25                     # losers' rows too, ties cost
arm baseline DETACH_KL=True BASELINE=role                               # rewards minus the mean of their role
arm sft CONTROL=sft                                                     # SFT rows only, as many steps
arm cloning CONTROL=cloning                                             # cloning of the winners
arm coin_by_length CONTROL=coin_by_length                               # outcomes permuted among games of equal length
arm silent CONTROL=silent                                               # game rows of weight 0
arm detached DETACH_KL=True                                             # SPAG, KL detached

table=(--minus points losers_ties released --minus points baseline released --minus points baseline losers_ties
  --minus "share among 40" losers_ties released --minus "share among 40" baseline released
  --minus "share among 40" released imitation --minus "share among 40" released sft --minus points released sft)
