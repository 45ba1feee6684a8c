"""instructor: an output of bounded type in each mode that OpenAI's APIs have."""
import instructor
import openai

from demo import MESSAGES, Fruit, check_fruit

for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.RESPONSES_TOOLS):
    client = instructor.from_openai(openai.OpenAI(max_retries=0), mode=mode)
    check_fruit(client.create(model="demo", messages=MESSAGES, response_model=Fruit, temperature=0, max_retries=1))
