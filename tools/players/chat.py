"""A player that is shown the game through a chat template."""

from tools.games import taboo
from tools.games.chat import ChatTemplate
from tools.players.player import GameView, Player, Reply


class ChatPlayer:
    """Shows a player the game through a chat template; the prompt text that it is asked with is not used."""

    def __init__(self, player: Player, chat: ChatTemplate, templates: taboo.Templates | None = None):
        self.player, self.chat, self.templates = player, chat, templates

    async def reply(self, prompt: str, *, view: GameView) -> Reply:
        """The player's reply to the rendered prompt."""
        rendered = self.chat.play_prompt(view.history, view.target_word, view.max_turns, self.templates)
        return await self.player.reply(rendered, view=view)
