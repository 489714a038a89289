# shellcheck shell=bash disable=SC2034,SC2154  # sourced by tools/study/run_study.sh, which sets root, seed and folder
# A player that can play: does a model of 1.5B parameters gain by one epoch of self-play? On one GPU, with all seeds at
# once. PLAYER names another model:
#
#   SEEDS="50 51 52" JOBS=3 tools/study/run_study.sh configs/arms/qwen15.sh outputs/qwen15_study
#
# It imitates all messages of this project's games. Then a gate: if it names the word in less than 30% of the games of
# epoch 1, or breaks the rules in more than 10%, the seed says so and stops. Fixed before the first seed: the primary
# comparisons are detached minus silent (the same rows, those of games with weight 0) in points and in right first
# guesses after the recorded hints of 200 held-out games, Holm over the two. RIGHT=0 BREACHES=1 opens the gate.
player=${PLAYER:-Qwen/Qwen2.5-1.5B-Instruct} data=$folder/data
before() {
  "$PYTHON" -m tools.prepare_data imitation --output_dir "$data"
  "$PYTHON" -m tools.prepare_data imitation --output_dir "$data/plain" --games "$root/data/english/plain_games.jsonl"
  "$PYTHON" "$root/tools/assign_rewards.py" --messages all --training_prompt play --chat_template True \
    --input_data_path "$data/games.jsonl" "$data/plain/games.jsonl" --tokenizer "$player" \
    --prompt_templates "$root/data/english/prompts.json" --output_data_path "$data/imitation.json"
  "$PYTHON" -m tools.controls repeat --rows "$data/imitation.json" --number 500 --seed "$seed" \
    --output "$data/anchor.json"
  grep -vxF -f "$data/held_out.txt" "$root/data/target_words.txt" | cat "$data/played.txt" - | awk '!seen[$0]++' \
    >"$data/words.txt"
}
after() { [ "$(basename "$1")" != gate ] || "$PYTHON" - "$1" <<'END'; }
import json, os, pathlib, sys
(path,) = pathlib.Path(sys.argv[1]).glob("epoch1/episodes/*_summary.json")
play = json.loads(path.read_text())
right, breaches = (play["outcomes"][name] / play["games"] for name in ("defender wins", "attacker breaks the rules"))
print(f"gate: right guesses {right:.0%}, broken rules {breaches:.0%}")
if right < float(os.environ.get("RIGHT", 0.3)) or breaches > float(os.environ.get("BREACHES", 0.1)):
    sys.exit("the model cannot play well enough; the study stops here")
END
all=("$root/configs/qwen15.sh" MODEL="$player" WORDS="$data/words.txt" SFT_DATA="$data/anchor.json" GAMES=1000 EPOCHS=1
  EVAL_WORDS="held_out=$data/held_out.txt" EVAL_SEEDS="$seed" BELIEF_GAMES="$root/data/imitation_games.jsonl"
  BELIEF_ARGS="--split held_out" REPORT=False PLAY_ARGS="--logging_steps 0" EVAL_ARGS="--logging_steps 0")

arm gate IMITATION_DATA="$data/imitation.json" UNTIL=epoch1_play
arm detached DETACH_KL=True                              # SPAG, KL detached
arm silent DETACH_KL=True LIKE="$folder/detached" CONTROL=silent # game rows of weight 0
arm cloning CONTROL=cloning                              # cloning of the winners
arm sft LIKE="$folder/detached" CONTROL=sft              # SFT rows only, as many steps

table=(--primary points detached silent --primary "rank 1 among 200" detached silent
  --minus points detached cloning --minus "rank 1 among 200" detached cloning --minus "share among 200" detached silent
  --minus "tempered share among 200" detached silent --minus points sft silent)
