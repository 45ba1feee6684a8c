"""openai: chat, completions and responses; streams, parsed output, tool calls and errors."""
import json

import openai

from demo import ADD, ADD_PARAMETERS, MESSAGES, PROMPT, QUESTION, TOO_LONG, Fruit, check_fruit, raises

client = openai.OpenAI(max_retries=0)
GREEDY = {"model": "demo", "temperature": 0}


def check_chat():
    chat = client.chat.completions
    text = chat.create(messages=MESSAGES, **GREEDY).choices[0].message.content
    assert "14" in text, text
    chunks = list(chat.create(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens > 0
    check_fruit(chat.parse(messages=MESSAGES, response_format=Fruit, **GREEDY).choices[0].message.parsed)
    with chat.stream(messages=MESSAGES, response_format=Fruit, **GREEDY) as stream:
        check_fruit(stream.get_final_completion().choices[0].message.parsed)


def check_chat_tools():
    chat = client.chat.completions
    called = chat.create(messages=MESSAGES, tools=[ADD], tool_choice="required", parallel_tool_calls=False, **GREEDY)
    call, = called.choices[0].message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments)["a"] in (12, 17)
    with chat.stream(messages=MESSAGES, tools=[ADD], tool_choice="required", parallel_tool_calls=False,
                     **GREEDY) as stream:
        streamed, = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    history = [*MESSAGES, called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "17"}]
    assert chat.create(messages=history, tools=[ADD], max_tokens=40, **GREEDY).choices[0].message.content


def check_completions():
    text = client.completions.create(prompt=PROMPT, max_tokens=120, **GREEDY).choices[0].text
    assert "14" in text, text
    stream = client.completions.create(prompt=PROMPT, max_tokens=120, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == text


def check_responses():
    whole = client.responses.create(input=QUESTION, **GREEDY)
    assert "14" in whole.output_text, whole
    with client.responses.stream(input=QUESTION, **GREEDY) as stream:
        assert stream.get_final_response().output_text == whole.output_text
    check_fruit(client.responses.parse(input=QUESTION, text_format=Fruit, **GREEDY).output_parsed)
    add = {"type": "function", "name": "add", "parameters": ADD_PARAMETERS, "strict": True}
    called = client.responses.create(input=QUESTION, tools=[add], tool_choice="required", parallel_tool_calls=False,
                                     **GREEDY)
    call, = called.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "17"}
    assert client.responses.create(input=[result], previous_response_id=called.id, tools=[add], max_output_tokens=40,
                                   **GREEDY).output_text


def check_errors():
    chat = client.chat.completions
    long = raises(openai.BadRequestError, lambda: chat.create(messages=[{"role": "user", "content": TOO_LONG}], **GREEDY))
    assert long.code == "context_length_exceeded", long
    raises(openai.NotFoundError, lambda: chat.create(model="other", messages=MESSAGES))
    raises(openai.AuthenticationError, lambda: openai.OpenAI(api_key="wrong", max_retries=0).models.list())


for check in (check_chat, check_chat_tools, check_completions, check_responses, check_errors):
    check()
