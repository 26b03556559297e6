"""The server as the Python packages of OpenAI and Anthropic, LangChain, litellm and the evaluation harness of EleutherAI meet it.

    python3 clients.py PROGRAM MODEL    # wants openai and anthropic, asks langchain-openai, litellm and lm-eval; `fracbit serve MODEL` is started on a free port
"""

import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import urllib.request

import anthropic
import openai
import pydantic


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
        (dict(tools=[{"type": "web_search"}]), "tools"),
        (dict(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}), "response_format"),
        (dict(temperature=-1), "temperature"),
        (dict(extra_body={"speed": 1}), "speed"),
    ]:
        try:
            client.chat.completions.create(**asked, **wrong)
        except openai.BadRequestError as error:
            assert error.param == param, error
        else:
            raise AssertionError(f"`{param}` was accepted")


def check_responses(base):
    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
    asked = dict(model="tiny", input="Hello", instructions="Be kind.", temperature=0)
    whole = client.responses.create(**asked, max_output_tokens=8)
    messages = [dict(role="system", content="Be kind."), dict(role="user", content="Hello")]
    chat = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=8)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 8 and whole.usage.input_tokens == chat.usage.prompt_tokens
    assert whole.instructions == "Be kind." and whole.temperature == 0 and not whole.store
    # What was said goes back as it came.
    following = [dict(role="user", content="Hello"), *whole.output, dict(role="user", content="And?")]
    following = client.responses.create(model="tiny", input=following, temperature=0, max_output_tokens=4)
    assert following.usage.output_tokens == 4
    with client.responses.stream(**asked, max_output_tokens=8) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == 8
    # JSON by a schema, and a function that is called, with what it returned.
    parsed = client.responses.parse(model="tiny", input="Hello", text_format=Pet, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Pet)
    adopt = dict(type="function", name="adopt", strict=True, parameters=PET)
    calling = dict(model="tiny", input="Hello", tools=[adopt], tool_choice="required", max_output_tokens=200)
    calling |= dict(parallel_tool_calls=False, temperature=0)
    called = client.responses.create(**calling)
    (call,) = called.output
    assert call.type == "function_call" and call.name == "adopt" and call.call_id.startswith("call_")
    assert Pet(**json.loads(call.arguments)) and called.status == "completed"
    # What was asked for is repeated.
    assert called.tools[0].to_dict() == adopt and called.tool_choice == "required"
    assert not called.parallel_tool_calls and called.max_output_tokens == 200
    assert parsed.text.format.type == "json_schema" and parsed.parallel_tool_calls
    with client.responses.stream(**calling) as stream:
        events = list(stream)
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments and len(pieces) > 3
    assert events[-1].response.output[0].arguments == call.arguments
    result = dict(type="function_call_output", call_id=call.call_id, output="Done.")
    history = [dict(role="user", content="Hello"), call, result]
    # A drawn text may end before.
    answer = client.responses.create(
        model="tiny", input=history, tools=[adopt], max_output_tokens=8, temperature=0
    )
    assert answer.usage.output_tokens == 8
    for wrong, param in [
        (dict(tools=[{"type": "web_search"}]), "tools"),
        (dict(previous_response_id="resp_1"), "previous_response_id"),
        (dict(reasoning={"effort": "low"}), "reasoning"),
        (dict(max_output_tokens=0), "max_output_tokens"),
    ]:
        try:
            client.responses.create(**asked, **wrong)
        except openai.BadRequestError as error:
            assert error.param == param, error
        else:
            raise AssertionError(f"`{param}` was accepted")


def check_anthropic(base):
    client = anthropic.Anthropic(base_url=base.removesuffix("/v1"), api_key="none", max_retries=0)
    said = [dict(role="user", content=[dict(type="text", text="Hello")])]
    # The package has no names for how tokens are picked; the API has.
    asked = dict(model="tiny", messages=said, system="Be kind.", extra_body={"temperature": 0})
    whole = client.messages.create(**asked, max_tokens=8)
    text = whole.content[0].text
    openais = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
    messages = [dict(role="system", content="Be kind."), dict(role="user", content="Hello")]
    chat = openais.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=8)
    assert text == chat.choices[0].message.content
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 8
    prompt = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert prompt == chat.usage.prompt_tokens
    counted = client.messages.count_tokens(model="tiny", messages=said, system="Be kind.")
    assert counted.input_tokens == prompt
    with client.messages.stream(**asked, max_tokens=8) as stream:
        assert "".join(stream.text_stream) == text
        last = stream.get_final_message()
    assert last.content[0].text == text and last.stop_reason == "max_tokens" and last.usage.output_tokens == 8
    # A stop text ends the answer before it, and is named.
    word = text.split()[1]
    stopped = client.messages.create(**asked, max_tokens=8, stop_sequences=[word])
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == word
    assert text.startswith(stopped.content[0].text) and word not in stopped.content[0].text
    for wrong, param in [
        (dict(tools=[dict(name="f", input_schema=3)]), "tools"),
        (dict(thinking=dict(type="enabled", budget_tokens=1024)), "thinking"),
        (dict(extra_body={"top_p": 2}), "top_p"),
    ]:
        try:
            client.messages.create(**{**asked, **wrong}, max_tokens=8)
        except anthropic.BadRequestError as error:
            assert error.body["type"] == "error" and error.body["error"]["param"] == param, error.body
        else:
            raise AssertionError(f"`{param}` was accepted")
    # A function is called, and what it returned goes back.
    adopt = dict(name="adopt", description="Adopts a pet.", input_schema=PET)
    calling = asked | dict(tools=[adopt], tool_choice=dict(type="tool", name="adopt"), max_tokens=200)
    called = client.messages.create(**calling)
    (call,) = called.content
    assert called.stop_reason == "tool_use" and call.type == "tool_use" and call.name == "adopt"
    assert Pet(**call.input) and call.id.startswith("toolu_")
    with client.messages.stream(**calling) as stream:
        pieces = [e.partial_json for e in stream if e.type == "input_json"]
        last = stream.get_final_message()
    assert last.content[0].input == call.input and last.stop_reason == "tool_use" and len(pieces) > 3
    result = dict(type="tool_result", tool_use_id=call.id, content=[dict(type="text", text="Done.")])
    history = [*said, dict(role="assistant", content=called.content), dict(role="user", content=[result])]
    answer = client.messages.create(**{**asked, "messages": history}, tools=[adopt], max_tokens=8)
    assert answer.content[0].type == "text" and answer.usage.output_tokens == 8
    with_tools = client.messages.count_tokens(model="tiny", messages=said, tools=[adopt])
    assert with_tools.input_tokens > client.messages.count_tokens(model="tiny", messages=said).input_tokens
    try:
        client.messages.create(**{**asked, "model": "other"}, max_tokens=8)
    except anthropic.NotFoundError as error:
        assert error.body["error"]["type"] == "not_found_error", error.body
    else:
        raise AssertionError("another model was served")


def check_origins(base):
    """What a browser asks before a page of another origin may ask the server."""

    def ask(origin):
        head = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        head["Access-Control-Request-Headers"] = "authorization,content-type"
        request = urllib.request.Request(base + "/chat/completions", headers=head, method="OPTIONS")
        with urllib.request.urlopen(request) as answer:
            return answer.headers

    allowed, other = ask("https://chat.example"), ask("https://evil.example")
    assert allowed["Access-Control-Allow-Origin"] == "https://chat.example"
    assert "authorization" in allowed["Access-Control-Allow-Headers"]
    assert other["Access-Control-Allow-Origin"] is None


def check_state(base):
    """What says how busy the server is, and what holds where a request says nothing."""

    def get(path):
        with urllib.request.urlopen(base.removesuffix("/v1") + path) as answer:
            return json.load(answer)

    props = get("/props")
    assert props["total_slots"] == 4 and props["default_generation_settings"]["n_ctx"] == 512
    assert "assistant:" in props["chat_template"]
    slots = get("/slots")
    assert [slot["id"] for slot in slots] == [0, 1, 2, 3] and not any(s["is_processing"] for s in slots)


class Pet(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    legs: int = pydantic.Field(ge=0, le=8)


# Without the last word other members may follow, and this model never ends them.
PET = Pet.model_json_schema() | {"additionalProperties": False}


class Pets(pydantic.BaseModel):
    pets: list[Pet] = pydantic.Field(min_length=1, max_length=2)


def check_structure(base):
    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
    ask = client.chat.completions
    asked = dict(model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=200, seed=5)
    parsed = ask.parse(**asked, response_format=Pets).choices[0]
    assert parsed.finish_reason == "stop" and 1 <= len(parsed.message.parsed.pets) <= 2
    with ask.stream(**asked, response_format=Pets) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == parsed.message.parsed
    body = {"structured_outputs": {"regex": "[0-9]{4}"}}
    assert len(str(int("1" + ask.create(**asked, extra_body=body).choices[0].message.content))) == 5
    # A function is called, and what it returned goes back.
    tool = openai.pydantic_function_tool(Pet, name="adopt")
    asked |= dict(tools=[tool], tool_choice="required", parallel_tool_calls=False)
    called = ask.parse(**asked).choices[0]
    assert called.finish_reason == "tool_calls" and called.message.content is None
    (call,) = called.message.tool_calls
    assert call.function.name == "adopt" and isinstance(call.function.parsed_arguments, Pet)
    pieces = list(ask.create(**asked, stream=True))
    deltas = [d for p in pieces for d in (p.choices[0].delta.tool_calls or [])]
    assert (deltas[0].index, deltas[0].function.name) == (0, "adopt") and deltas[0].id
    assert "".join(d.function.arguments for d in deltas) == call.function.arguments
    assert len(deltas) > 3 and pieces[-1].choices[0].finish_reason == "tool_calls"
    history = asked["messages"] + [
        called.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Done."},
    ]
    asked |= dict(messages=history, tool_choice="none", max_tokens=8)
    assert ask.create(**asked).choices[0].message.content


def check_langchain(base):
    try:
        from langchain_openai import ChatOpenAI
    except ImportError:
        print("skipped: LangChain is not installed (langchain-openai==1.7.4)", file=sys.stderr)
        return
    model = ChatOpenAI(base_url=base, api_key="none", model="tiny", max_tokens=200, seed=5, max_retries=0)
    # Without `strict` other members may follow, and this model never ends them; two pets, spelled by
    # it, do not fit its context.
    for method in ["json_schema", "function_calling"]:
        pet = model.with_structured_output(Pet, method=method, strict=True).invoke("Hello")
        assert isinstance(pet, Pet), pet
    bound = model.bind_tools([Pet], tool_choice="Pet", strict=True)
    answer = bound.invoke("Hello")
    (call,) = answer.tool_calls
    assert call["name"] == "Pet" and Pet(**call["args"])
    streamed = None
    for chunk in bound.stream("Hello"):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.tool_calls[0]["args"] == call["args"]
    from langchain_core.messages import HumanMessage, ToolMessage

    history = [HumanMessage("Hello"), answer, ToolMessage("Done.", tool_call_id=call["id"])]
    assert model.bind(max_tokens=8).invoke(history).content


def check_litellm(base):
    # Its list of prices comes from the network unless it is told to take its own.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    try:
        import litellm
    except ImportError:
        print("skipped: litellm is not installed (litellm==1.110.2)", file=sys.stderr)
        return
    litellm.suppress_debug_info = True
    client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)
    said = [dict(role="user", content="Hello")]
    asked = dict(messages=said, max_tokens=8, temperature=0)
    want = client.chat.completions.create(model="tiny", **asked).choices[0].message.content
    there = dict(api_base=base, api_key="none", num_retries=0)
    adopt = dict(type="function", function=dict(name="adopt", strict=True, parameters=PET))
    # The same server by the names of OpenAI's API and of vLLM.
    for model in ["openai/tiny", "hosted_vllm/tiny"]:
        whole = litellm.completion(model=model, **asked, **there)
        assert whole.choices[0].message.content == want and whole.choices[0].finish_reason == "length"
        assert whole.usage.completion_tokens == 8
        pieces = list(litellm.completion(model=model, **asked, **there, stream=True, stream_options={"include_usage": True}))
        assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == want
        assert any(getattr(p, "usage", None) and p.usage.completion_tokens == 8 for p in pieces)
        long = asked | dict(model=model, max_tokens=200) | there
        parsed = litellm.completion(**long, response_format=Pet).choices[0].message.content
        assert Pet.model_validate_json(parsed)
        vectors = litellm.embedding(model=model, input=["Once upon a time", "The dog"], **there)
        assert len(vectors.data) == 2 and len(vectors.data[0]["embedding"]) > 8
        # As for vLLM it leaves out that no other members may follow, and this model never ends them.
        if model != "openai/tiny":
            continue
        calling = long | dict(tools=[adopt], tool_choice="required", parallel_tool_calls=False)
        called = litellm.completion(**calling).choices[0]
        assert called.finish_reason == "tool_calls"
        (call,) = called.message.tool_calls
        assert call.function.name == "adopt" and Pet.model_validate_json(call.function.arguments)
        chunks = list(litellm.completion(**calling, stream=True))
        streamed = litellm.stream_chunk_builder(chunks).choices[0]
        assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
        result = dict(role="tool", tool_call_id=call.id, content="Done.")
        history = dict(messages=[*said, called.message.model_dump(exclude_none=True), result])
        after = litellm.completion(**asked | there | history, model=model, tools=[adopt], tool_choice="none")
        assert after.choices[0].message.content
    # And by that of Anthropic's.
    claude = litellm.completion(model="anthropic/tiny", **asked, **there | dict(api_base=base.removesuffix("/v1")))
    assert claude.choices[0].message.content == want
    texts = litellm.text_completion(model="text-completion-openai/tiny", prompt="Once", max_tokens=4, **there)
    assert texts.choices[0].text
    try:
        litellm.completion(model="openai/other", **asked, **there)
    except litellm.NotFoundError:
        pass
    else:
        raise AssertionError("another model was served")


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


def check_lm_eval(base):
    """The harness itself, with the defaults of its two models, on tasks of a file."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    with tempfile.TemporaryDirectory() as place:
        os.environ["HF_HOME"] = place
        try:
            import lm_eval
        except ImportError:
            print("skipped: the evaluation harness is not installed (lm-eval[api]==0.4.13)", file=sys.stderr)
            return
        docs = [
            dict(text="Once upon a time, there was a little", choices=[" girl", " the"]),
            dict(text="The dog ran to the", choices=[" park", " was"]),
            dict(text="She was very", choices=[" happy", " girl"]),
        ]
        path = os.path.join(place, "docs.jsonl")
        with open(path, "w") as file:
            file.writelines(json.dumps(doc) + "\n" for doc in docs)
        data = dict(dataset_path="json", dataset_kwargs={"data_files": {"test": path}}, test_split="test")
        said = data | dict(doc_to_text="{{text}}", doc_to_target="{{choices[0]}}")
        choice = said | dict(task="choice", output_type="multiple_choice", doc_to_choice="{{choices}}")
        choice |= dict(doc_to_target=0, target_delimiter="", metric_list=[dict(metric="acc")])
        rolling = data | dict(task="rolling", output_type="loglikelihood_rolling", doc_to_text="")
        rolling |= dict(doc_to_target="{{text}}", metric_list=[dict(metric="word_perplexity")])
        written = said | dict(task="written", output_type="generate_until")
        written |= dict(generation_kwargs=dict(until=["."], max_gen_toks=12))
        written |= dict(metric_list=[dict(metric="bypass", aggregation="bypass")])

        def evaluate(kind, path, tasks, **more):
            args = dict(model="tiny", base_url=base + path)
            chat = kind == "local-chat-completions"
            tasks = [dict(task) for task in tasks]
            return lm_eval.simple_evaluate(
                kind, args, tasks=tasks, apply_chat_template=chat, bootstrap_iters=0, **more
            )

        def said_of(found, task):
            return [sample["filtered_resps"] for sample in found["samples"][task]]

        alone = evaluate("local-completions", "/completions", [choice, rolling, written])
        assert alone["results"]["choice"]["acc,none"] == 1
        assert 1 < alone["results"]["rolling"]["word_perplexity,none"] < 1000
        # Lists of prompts are those of single ones.
        together = evaluate("local-completions", "/completions", [choice, written], batch_size=4)
        for task in ["choice", "written"]:
            assert said_of(together, task) == said_of(alone, task)
        chat = evaluate("local-chat-completions", "/chat/completions", [written])
        assert all(text and "." not in text for (text,) in said_of(chat, "written"))


def main():
    program, model = sys.argv[1:]
    command = [program, "serve", model, "--port", "0", "--name", "tiny", "--alias", "gpt-4o-mini"]
    command += ["--allow-origin", "https://chat.example"]
    serving = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        base = serving.stdout.readline().strip().removeprefix("serving at ")
        # Before anybody else asks.
        check_state(base)
        # The harness takes half a minute to be imported, which the other clients need not wait for.
        harness = multiprocessing.get_context("fork").Process(target=check_lm_eval, args=[base])
        harness.start()
        check_openai(base)
        check_responses(base)
        check_anthropic(base)
        check_origins(base)
        check_structure(base)
        check_langchain(base)
        check_litellm(base)
        check_harness(base)
        harness.join()
        assert harness.exitcode == 0
    finally:
        serving.terminate()
    assert serving.wait(30) == 0


if __name__ == "__main__":
    main()
