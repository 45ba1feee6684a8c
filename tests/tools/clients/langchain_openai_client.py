"""langchain-openai: invoke, stream, tools, typed output and the error of a prompt that is too long."""
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI

from demo import ADD, PROMPT, QUESTION, TOO_LONG, Fruit, check_fruit, raises


def check(llm):
    answer = llm.invoke(QUESTION)
    assert "14" in answer.text, answer
    assert answer.usage_metadata["output_tokens"] > 5
    assert "".join(chunk.text for chunk in llm.stream(QUESTION)) == answer.text
    for method in ("json_schema", "function_calling"):
        check_fruit(llm.with_structured_output(Fruit, method=method).invoke(QUESTION))
    call_message = llm.bind_tools([ADD], tool_choice="required", parallel_tool_calls=False).invoke(QUESTION)
    call, = call_message.tool_calls
    assert call["name"] == "add" and call["args"]["a"] in (12, 17), call
    result = ToolMessage(content="17", tool_call_id=call["id"])
    assert llm.bind_tools([ADD]).invoke([HumanMessage(QUESTION), call_message, result]).text
    raises(ContextOverflowError, lambda: llm.invoke(TOO_LONG))


for use_responses_api in (False, True):
    check(ChatOpenAI(model="demo", temperature=0, max_tokens=120, max_retries=0, use_responses_api=use_responses_api))
text = OpenAI(model="demo", temperature=0, max_tokens=120, max_retries=0).invoke(PROMPT)
assert "14" in text, text
