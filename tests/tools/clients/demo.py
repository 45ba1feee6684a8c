"""What the scripts of this folder ask the demo checkpoint."""
import os
from typing import Literal

from pydantic import BaseModel

URL = os.environ["OPENAI_BASE_URL"]  # ends with /v1
QUESTION = "Tom has 12 apples. Tom buys 5 more and gives 3 to Ana. How many apples does Tom have now?"
PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"  # of /v1/completions
MESSAGES = [{"role": "user", "content": QUESTION}]
TOO_LONG = "x " * 2000


class Fruit(BaseModel):
    """The tiny models never end a free string, so every value is one of a few."""
    name: Literal["apple", "pear"]
    count: Literal[12, 14, 17]


ADD_PARAMETERS = {"type": "object", "properties": {"a": {"enum": [12, 17]}, "b": {"enum": [5, -3]}},
                  "required": ["a", "b"], "additionalProperties": False}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds two numbers.", "parameters": ADD_PARAMETERS}}


def check_fruit(fruit):
    assert isinstance(fruit, Fruit), fruit


def raises(error, ask):
    try:
        ask()
    except error as caught:
        return caught
    raise AssertionError(f"no {error.__name__}")
