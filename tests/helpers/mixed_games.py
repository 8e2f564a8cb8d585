"""Three games for one run: of text, of tools, and an agent's. Each has its own columns, prompt and length."""

from letter_environment import LetterEnvironment, parse_letter

from g2po_trl import PromptTemplate

LAMP_PROMPT = PromptTemplate(
    "lamp {task} {observation}", "lamp {history} {observation}", parse_completion=parse_letter
)


class Lamp(LetterEnvironment):
    prompt_template = LAMP_PROMPT


class Shop:
    """A class with tools, as for TRL. The first text without a call ends it."""

    def reset(self, goal, hint=None, **columns):
        self.goal, self.bought, self.columns = goal, [], {"hint": hint, **columns}
        return f" {sorted(self.columns)}"

    def buy(self, thing: str) -> str:
        """Buy a thing.

        Args:
            thing: its name.
        """
        self.bought.append(thing)
        return f"you have {len(self.bought)}"

    def get_reward(self):
        return 1.0 if self.goal in self.bought else 0.25


def speaker(task, client):
    """Asks twice, about its columns."""
    messages = [{"role": "user", "content": f"room {sorted(task)}"}]
    said = ""
    for _ in range(2):
        made = client.openai().chat.completions.create(model=client.model, messages=messages)
        said = made.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"room {said[:1]}"}]
    return float("a" <= said[:1].lower() <= "m")


ROWS = []
for number in range(4):
    ROWS.append({"environment": "lamp", "seed": number})
    ROWS.append({"environment": "shop", "goal": f"mug {number}", "prompt": "Buy it."})
    ROWS.append({"environment": "speaker", "question": f"why {number}"})
