"""openai-agents: agents on both of OpenAI's APIs: a run, a stream, a tool call with its result, and typed output."""
import asyncio
from typing import Literal

from agents import (Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool,
                    set_tracing_disabled)
from openai import AsyncOpenAI

from demo import QUESTION, Fruit, check_fruit

set_tracing_disabled(True)
client = AsyncOpenAI(max_retries=0)
added = []


@function_tool(name_override="add")
def add_tool(a: Literal[12, 17], b: Literal[5, -3]) -> int:
    """Adds two numbers."""
    added.append((a, b))
    return a + b


def agent(model, **more):
    settings = {"temperature": 0, "max_tokens": 120, **more.pop("settings", {})}
    return Agent(name="demo", model=model, model_settings=ModelSettings(**settings), **more)


async def check(model):
    text = (await Runner.run(agent(model), QUESTION)).final_output
    assert "14" in text, text
    stream = Runner.run_streamed(agent(model), QUESTION)
    deltas = [event.data.delta async for event in stream.stream_events()
              if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"]
    assert stream.final_output == "".join(deltas) == text
    check_fruit((await Runner.run(agent(model, output_type=Fruit), QUESTION)).final_output)
    caller = agent(model, tools=[add_tool], settings={"tool_choice": "required", "parallel_tool_calls": False})
    for run in (Runner.run, run_streamed):
        added.clear()
        result = await run(caller, QUESTION)
        assert len(added) == 1 and result.final_output, result


async def run_streamed(*args):
    result = Runner.run_streamed(*args)
    async for _ in result.stream_events():
        pass
    return result


async def main():
    for api in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        await check(api("demo", openai_client=client))


asyncio.run(main())
