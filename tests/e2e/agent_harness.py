"""A harness that others have written: an agent of the OpenAI Agents SDK with one tool."""

from __future__ import annotations

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

from forgelite.types import Prompt
from tests.e2e.tool_model import FOUND


@function_tool
def lookup(key: str) -> str:
    """Look something up."""
    return "7"


async def play(*, base_url: str, api_key: str, session_id: str, prompt: Prompt) -> float:
    """The agent's answer is right if it says what the tool has said."""
    headers = {"X-Session-Id": session_id}
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, default_headers=headers, max_retries=0) as client:
        model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
        agent = Agent(name="finder", model=model, tools=[lookup])
        result = await Runner.run(agent, prompt.text, max_turns=4, run_config=RunConfig(tracing_disabled=True))
    return float(result.final_output == FOUND)
