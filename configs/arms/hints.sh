# shellcheck shell=bash disable=SC2034,SC2154  # sourced by tools/study/run_study.sh, which sets root, seed and folder
# Does self-play teach the listener anything? A study of the embedded world (tools/tiny/README.md):
#
#   SEEDS="40 41 42 43 44 45 46 47 48 49" JOBS=2 tools/study/run_study.sh configs/arms/hints.sh outputs/hints_study
#
# Fixed before the first seed. Of the recorded hints, on which guesses are measured, three of ten are another word's:
# on seed 39 alone that chance was chosen, so that imitation's first guess is right in half to three quarters of the
# games (there 66%). Games are those of configs/tiny.sh. Primary comparisons, after epoch 3, Holm over the two:
# released minus silent (the same rows, those of games with weight 0) in the share of the right guess after the last
# hint, among the 40 held-out words, and in points. An interval of the shares' difference within +-0.1 nats is called
# none, otherwise one that excludes 0 an effect, and all else undecided. No seed is added after the first table. The
# words are the same in all seeds. (Its secondary comparisons named all 162 words: 155 are left, because of a word and
# another that it contains only one counts. That number was put right before the first table.)
before() {
  "$PYTHON" -m tools.tiny.build --output_dir "$folder" --seed "$seed"
  cat "$data/words.txt" "$data/held_out.txt" >"$folder/all_words.txt"
}
after() { # the newest model's share among all words but forms of others; that of imitation too
  local newest models
  newest=$(find "$1" -path '*/epoch*/model' | sort | tail -n 1)
  models=("$(basename "$(dirname "$newest")")=$newest")
  [ ! -d "$1/imitation" ] || models+=("imitation=$1/imitation/model")
  "$PYTHON" -m tools.evaluate_belief --models "${models[@]}" --games "$data/stray_belief_games.json" --max_length 136 \
    --prompt_templates "$root/data/tiny/prompts.json" --candidates "$folder/all_words.txt" --output_dir "$1/belief_all"
}
data=$folder/data
all=("$root/configs/tiny.sh" WORDS="$data/words.txt" SFT_DATA="$data/facts.json" EPOCHS=3 EVAL_EVERY=3
  EVAL_WORDS="played=$data/words.txt held_out=$data/held_out.txt" EVAL_SEEDS="$seed"
  BELIEF_GAMES="$data/stray_belief_games.json" SAVE_STEPS=0 REPORT=False PLAY_ARGS="--logging_steps 0"
  EVAL_ARGS="--logging_steps 0")

arm released MODEL="$folder/base" IMITATION_DATA="$data/imitation.json" # SPAG, loss as released
arm silent CONTROL=silent                                               # game rows of weight 0
arm detached DETACH_KL=True                                             # SPAG, KL detached
arm cloning CONTROL=cloning                                             # cloning of the winners
arm sft CONTROL=sft                                                     # SFT rows only, as many steps

table=(--primary "share among 40" released silent --primary points released silent
  --minus "share among 40" released imitation --minus "share among 40" silent imitation
  --minus "share among 155" released silent --minus "tempered share among 40" released silent
  --minus "tempered share among 155" released silent --minus "rank 1 among 40" released silent
  --minus "as attacker" released silent --minus "as defender" released silent --minus points detached cloning
  --minus "as attacker" detached cloning --minus "as defender" detached cloning --minus points released sft)
table+=(--minus points released cloning --minus "share among 155, 0 hints" released silent) # asked after the first table
