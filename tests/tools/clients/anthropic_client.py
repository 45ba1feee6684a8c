"""anthropic: messages, streams, tool calls, parsed output and errors."""
import anthropic

from demo import ADD_PARAMETERS, MESSAGES, QUESTION, TOO_LONG, Fruit, check_fruit, raises

client = anthropic.Anthropic(max_retries=0)
GREEDY = {"model": "demo", "max_tokens": 120, "extra_body": {"temperature": 0}}
ADD = {"name": "add", "description": "Adds two numbers.", "input_schema": ADD_PARAMETERS}


def check_text():
    text = client.messages.create(messages=MESSAGES, **GREEDY).content[0].text
    assert "14" in text, text
    with client.messages.stream(messages=MESSAGES, **GREEDY) as stream:
        assert "".join(stream.text_stream) == text
    assert client.messages.count_tokens(model="demo", messages=MESSAGES).input_tokens > 10
    check_fruit(client.messages.parse(messages=MESSAGES, output_format=Fruit, **GREEDY).parsed_output)


def check_tools():
    forced = {"tools": [ADD], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    message = client.messages.create(messages=MESSAGES, **forced, **GREEDY)
    call, = message.content
    assert call.name == "add" and call.input["a"] in (12, 17), call
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "17"}
    history = [*MESSAGES, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=history, tools=[ADD], **GREEDY).content[0].type == "text"


def check_errors():
    ask = client.messages.create
    long = raises(anthropic.BadRequestError, lambda: ask(messages=[{"role": "user", "content": TOO_LONG}], **GREEDY))
    assert "prompt is too long" in str(long), long
    raises(anthropic.NotFoundError, lambda: ask(model="other", max_tokens=1, messages=MESSAGES))
    raises(anthropic.AuthenticationError, lambda: anthropic.Anthropic(api_key="wrong", max_retries=0).models.list())


for check in (check_text, check_tools, check_errors):
    check()
