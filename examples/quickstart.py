from loramux import LLM, SamplingParams
from loramux.demo import demo_base

styles = {name: f"examples/adapters/{name}" for name in ("pirate", "json")}
llm = LLM(str(demo_base()), adapters=styles)
chat = [{"role": "user", "content": "What is the opposite of hot?"}]
params = SamplingParams(temperature=0, max_tokens=24)
for answer in llm.chat([chat] * 3, params, adapter=[None, "pirate", "json"]):  # one batch
    print(answer.adapter or "base", "->", answer.text)
