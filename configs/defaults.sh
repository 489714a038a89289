# shellcheck shell=bash disable=SC2034  # read by tools/loop/settings.py
# All settings of the loop, with their defaults and meanings:
#
#   tools/run_spag.sh configs/llama2_7b.sh SEED=142 OUTPUT=outputs/spag142
#
# An argument is a setting, NAME=VALUE, or a file of such lines. If a setting comes several times, the last one counts.
# A value with blanks needs quotes: EVAL_SEEDS="0 1". Where a setting takes several values, quotes inside hold words
# together: TRAIN_ARGS="--run_name 'second seed'". MODEL, WORDS and OUTPUT are needed; with LIKE, OUTPUT alone.
#
# The section of a setting says what a change means in a run that is LIKE another. Once a stage has begun in OUTPUT, only
# [scope] and [machine] may change there.

# [imitation] On these imitation depends: after a change here, a run LIKE another trains it anew.
MODEL=             # base model: a folder, or a name on the hub (needed, unless LIKE is set)
IMITATION_DATA=    # rows of imitation, one file or several; empty: MODEL plays as it is
IMITATION_LR=      # learning rate of imitation; empty: 5e-6, with LORA_RANK 1e-4
IMITATION_KL=0.1   # weight of the KL to MODEL in imitation
IMITATION_ARGS=    # further flags of train.py in imitation

# [play] On these games depend: after a change here or in [imitation], a run LIKE another plays epoch 1 anew.
IMITATION_MODEL=   # a trained imitation model, instead of training one on IMITATION_DATA
WORDS=             # word list of self-play, one word a line (needed)
GAME=taboo         # the game: a name, FILE.py:Class or module:Class
GAME_OPTIONS=      # its options, KEY=VALUE, one or several
PROMPTS=           # prompt file; empty: the game's own
CHAT_TEMPLATE=False # True: play, rows and matches use the model's chat template
THINKING=False     # True: replies begin with a private thought; MAX_NEW_TOKENS should then be 1024 or more
MAX_TURNS=         # turns of a game; empty: the game's own number
GAMES=             # play only this many words, the first of the list
GAMES_PER_WORD=1   # games of each word in an epoch
MAX_LENGTH=2048    # tokens of a row, and of prompt and reply together
MAX_NEW_TOKENS=256 # tokens of a reply
TEMPERATURE=1.2    # of sampling in play and matches
TOP_K=50           # sample from this many most likely tokens; 0: from all
FIRST_EPISODES=    # file of episodes that replaces the play of epoch 1
PLAY_ARGS=         # further flags of tools/play_llm_game.py

# [training] After a change here, a run LIKE another keeps its imitation and its games of epoch 1.
SEED=42            # seed of play, rewards and training; epoch k adds k, so take seeds that are further apart
PRECISION=auto     # bf16, fp16 or fp32; auto: bf16 where GPU or CPU compute it, else fp16 on GPUs and fp32 on CPUs
SFT_DATA=          # SFT examples to train on beside the rows of the games, e.g. Alpaca's
DECAY_WEIGHT=0.8   # reward decay gamma, applied backwards from the last message
LOSERS=0.0         # share of the winner's reward that the loser pays; needs DETACH_KL=True
TIES=0.0           # reward that both roles of a tied game are charged; needs DETACH_KL=True
BASELINE=none      # role: rewards less the mean of the role's; needs DETACH_KL=True
ROLE_WEIGHTS=paper # paper: the rows of both roles weigh the same in total; none: each row weighs 1
REWARD_ARGS=       # further flags of tools/assign_rewards.py
GLOBAL_BATCH=128   # rows of an optimizer step, over all processes
LEARNING_RATE=     # learning rate of self-play; empty: 2e-6, with LORA_RANK 1e-4
KL=0.2             # weight of the KL to the model that played
SFT_COEFF=0.5      # weight of the SFT rows in self-play
CLIP_RANGE=0.2     # clip of the importance ratio to the model that played
DETACH_KL=False    # True: no gradient through the KL inside the advantage
LORA_RANK=         # train LoRA adapters of this rank and play with them merged in; needs peft
TRAIN_ARGS=        # further flags of train.py in self-play

# [run] What this run is: a run LIKE another does not take these from it.
LIKE=              # OUTPUT of another run: its settings and, as far as they stay, its imitation and games of epoch 1
CONTROL=           # rows of a control: coin_by_length, cloning, sft or silent (configs/README.md)

# [scope] How far it runs and what it measures: these may change, unless a stage says that it would mix results.
EPOCHS=3           # epochs of self-play
TRAIN_BATCH=2      # rows of a micro-batch of one process
SAVE_STEPS=0.2     # steps between checkpoints; below 1: a share of all steps; 0: none
EVAL_WORDS=        # word lists of the match against imitation, FILE or NAME=FILE; empty: no match
EVAL_SEEDS=0       # seeds of the match, one or several
EVAL_GAMES_PER_WORD=1 # games of each word, role and seed of the match
EVAL_EVERY=1       # a match after every so many epochs
EVAL_ARGS=         # further flags of tools/evaluate_games.py
EVAL_TASKS=        # benchmarks for base, imitation and every epoch, e.g. MMLU ARC-c; empty: none
REASONING_ARGS=    # further flags of tools/evaluate_reasoning.py
BELIEF_GAMES=      # games whose hints are read to each epoch's model: what do they tell it? empty: none
BELIEF_ARGS=       # further flags of tools/evaluate_belief.py
REPORT=True        # True: make report.html after each epoch

# [machine] Where this start runs, and how far: these may change too, and a run LIKE another does not take them from it.
OUTPUT=            # folder of all results (needed)
UNTIL=             # stop after imitation, epochK_play or epochK_train; without it the same command goes on
NPROC=auto         # processes of this machine; auto: its GPUs, or 1 (with DEEPSPEED a stopped training needs the same)
NNODES=1           # machines; the same command runs on each, with OUTPUT on a shared folder
NODE_RANK=0        # number of this machine, from 0
RDZV_ENDPOINT=localhost:0 # with several machines: host:port of machine 0
RDZV_ID=spag       # the launch's name, the same on all machines; other launches at RDZV_ENDPOINT need another
TENSOR_PARALLEL_SIZE=1 # GPUs of each vLLM model; play then has NPROC / this number of processes
PLAY_BATCH=        # prompts answered at once; empty: by memory, with ENGINE=generate 32, with vllm 256
ENGINE=auto        # engine of play and matches: auto, vllm, slots or generate
DEEPSPEED=auto     # DeepSpeed's configuration, or none; auto: by the GPUs' memory
GRADIENT_CHECKPOINTING=auto # True or False; auto: True with a GPU
