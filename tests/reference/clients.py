"""The server as OpenAI's own Python package and the evaluation harness of EleutherAI meet it.

    python3 clients.py PROGRAM MODEL    # wants openai; `fracbit serve MODEL` is started on a free port
"""

import json
import math
import subprocess
import sys
import urllib.request

import openai


def check_openai(base):
    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny", "gpt-4o-mini"]
    asked = dict(model="gpt-4o-mini", prompt="Once upon a time", max_tokens=12, seed=3)
    whole = client.completions.create(**asked)
    text = whole.choices[0].text
    assert whole.model == "gpt-4o-mini" and whole.usage.completion_tokens == 12
    stream = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.completion_tokens == 12
    several = client.completions.create(**{**asked, "prompt": ["Once upon a time", "The dog"]}, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == text
    scored = client.completions.create(**asked, logprobs=3, echo=True).choices[0]
    assert scored.text == "Once upon a time" + text
    probabilities = scored.logprobs
    assert "".join(probabilities.tokens) == scored.text and probabilities.token_logprobs[0] is None
    assert all(0 < math.exp(p) <= 1 for p in probabilities.token_logprobs[1:])
    asked = dict(model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=8, seed=5)
    chat = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, frequency_penalty=0.5)
    entries = chat.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == chat.choices[0].message.content
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    said = client.chat.completions.create(**asked).choices[0].message.content
    pieces = client.chat.completions.create(**asked, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == said
    for wrong, param in [
        (dict(tools=[{"type": "function", "function": {"name": "f"}}]), "tools"),
        (dict(temperature=-1), "temperature"),
        (dict(extra_body={"speed": 1}), "speed"),
    ]:
        try:
            client.chat.completions.create(**asked, **wrong)
        except openai.BadRequestError as error:
            assert error.param == param, error
        else:
            raise AssertionError(f"`{param}` was accepted")


def check_harness(base):
    """What `lm_eval --model local-completions` (0.4.13) sends, and how it reads the answer."""

    def post(path, body):
        head = {"Content-Type": "application/json", "Authorization": "Bearer EMPTY"}
        request = urllib.request.Request(base.removesuffix("/v1") + path, json.dumps(body).encode(), head)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    tokens = post("/tokenize", {"prompt": "Once upon a time, there was a little girl"})["tokens"]
    body = {
        "model": "tiny",
        "prompt": [tokens, tokens[:5]],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    choices = sorted(post("/v1/completions", body)["choices"], key=lambda choice: choice["index"])
    likelihoods = []
    for choice, context in zip(choices, [2, 2]):
        found = choice["logprobs"]
        logprobs = found["token_logprobs"][context:-1]
        tops = found["top_logprobs"][context:-1]
        likelihoods.append(sum(logprobs))
        assert all(p <= max(top.values()) for p, top in zip(logprobs, tops))
    assert [len(c["logprobs"]["tokens"]) for c in choices] == [len(tokens) + 1, 6]
    # What comes later changes nothing of what stands before.
    both = [choice["logprobs"]["token_logprobs"][1:5] for choice in choices]
    assert both[0] == both[1] and likelihoods[0] < likelihoods[1] < 0


def main():
    program, model = sys.argv[1:]
    command = [program, "serve", model, "--port", "0", "--name", "tiny", "--alias", "gpt-4o-mini"]
    serving = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        base = serving.stdout.readline().strip().removeprefix("serving at ")
        check_openai(base)
        check_harness(base)
    finally:
        serving.terminate()
    assert serving.wait(30) == 0


if __name__ == "__main__":
    main()
