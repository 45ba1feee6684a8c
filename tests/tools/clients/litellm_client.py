"""litellm: completions, streams, responses and Anthropic's API, and the errors that it maps."""
import os

import litellm

from demo import ADD, MESSAGES, QUESTION, TOO_LONG, URL, Fruit, raises

GREEDY = {"temperature": 0, "max_tokens": 120, "num_retries": 0}
PROVIDERS = ("openai", "anthropic", "hosted_vllm")
os.environ["HOSTED_VLLM_API_BASE"], os.environ["HOSTED_VLLM_API_KEY"] = URL, os.environ["OPENAI_API_KEY"]


def check_provider(provider):
    def ask(**more):
        return litellm.completion(**{"model": provider + "/demo", "messages": MESSAGES, **GREEDY, **more})

    text = ask().choices[0].message.content
    assert "14" in text, text
    chunks = ask(stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    call, = ask(tools=[ADD], tool_choice="required", parallel_tool_calls=False).choices[0].message.tool_calls
    assert call.function.name == "add", call
    Fruit.model_validate_json(ask(response_format=Fruit).choices[0].message.content)
    raises(litellm.ContextWindowExceededError, lambda: ask(messages=[{"role": "user", "content": TOO_LONG}]))
    raises(litellm.AuthenticationError, lambda: ask(api_key="wrong"))
    raises(litellm.NotFoundError, lambda: ask(model=provider + "/other"))


def check_responses():
    ask = {"model": "openai/demo", "input": QUESTION, "temperature": 0}
    whole = litellm.responses(**ask)
    events = list(litellm.responses(stream=True, **ask))
    assert events[-1].type == "response.completed", events[-1]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert "14" in text and whole.output[0].content[0].text == text


for provider in PROVIDERS:
    check_provider(provider)
check_responses()
