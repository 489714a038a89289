"""The game side: words to episodes, episodes to rows, and everything measured about them.

    words.txt -> play_llm_game -> episodes -> assign_rewards -> rows -> train.py -> checkpoint -> play again

Programs stand here; what they are made of stands in rooms. Imports go one way, down this list:

    games      what is played: a game's rules, its prompts, chat templates
    players    who speaks: a person, a server, a script
    engine     how a model of this process answers the prompts of many games
    selfplay   games to files: flags, line-up, play, resume, merge
    matches    model against model: schedule, statistics, tables, plots
    pages      the report's numbers and its page
    tiny       the embedded world: scripted players, the learning tables
    reasoning  benchmarks by lm-evaluation-harness; stands alone
    bench      speed, memory and size of everything, measured and computed
    loop       what tools/run_spag.sh, quickstart.sh and test.sh share
"""

import utils  # noqa: F401  first: it says in one line what to do where packages are missing
