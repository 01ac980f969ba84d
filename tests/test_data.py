# SPDX-License-Identifier: Apache-2.0
"""data.py: prompt files, the data order, answers, tokenizers against transformers, the sandbox of chat templates."""
import copy
import json
import random
import re
import sys

import pytest

from distill_core import data
from distill_core.data import ByteTokenizer, answer_matches, batch_at, load_tokenizer, read_prompts, sample_at

BYTE = ByteTokenizer()
TEMPLATE = """\
{%- if messages[0].role != 'system' %}
    {{- bos_token + '<|system|>default ' + eos_token }}
{%- endif %}
{% set ns = namespace(count=0) %}
{% for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {% if message.role == 'assistant' %}
{% generation %}<|assistant|>{{ message.content }}{{ eos_token }}{% endgeneration %}
    {% else %}
<|{{ message.role }}|>{{ message.content | trim }} {{ message | tojson }}
    {% endif %}
    {%- if tools is not none or documents is defined and documents %}never{% endif %}
{% endfor %}
{{ ns.count }}{% if add_generation_prompt %}<|assistant|>{% endif %}
"""
MESSAGES = [{"role": "user", "content": "  <b>two & \u00e9</b>\n"}, {"role": "skip", "content": "x"},
            {"role": "assistant", "content": "4"}, {"role": "user", "content": "more", "name": None}]


def write_jsonl(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def read(path, tokenizer=BYTE, max_prompt_tokens=100, long_prompts="drop"):
    return read_prompts(path, tokenizer, max_prompt_tokens=max_prompt_tokens, long_prompts=long_prompts)


def refusal(path, tokenizer=BYTE):
    """The message with which read_prompts refuses a file; always one line."""
    with pytest.raises(ValueError) as caught:
        read(path, tokenizer)
    message = str(caught.value)
    assert type(caught.value) is ValueError and message.isprintable() and len(message) < 800, message
    return message


# ---- prompt files

def test_the_three_kinds_of_line(tmp_path):
    """Catches ids that are not exactly those of the text, lost answers and teachers, and wrong line numbers."""
    first = write_jsonl(tmp_path / "a.jsonl", {"prompt": "1+1=", "answer": "2", "teacher": "math"}, "", "   ",
                        {"prompt_ids": [5, 256, 0], "prompt": None, "answer": None})
    second = write_jsonl(tmp_path / "b.jsonl", {"prompt": " \u00e9\n"})
    prompts, counts = read([first, str(second)])
    assert [prompt.ids for prompt in prompts] == [(49, 43, 49, 61), (5, 256, 0), (32, 195, 169, 10)]
    assert [prompt.source for prompt in prompts] == [f"{first}:1", f"{first}:4", f"{second}:1"]
    assert (prompts[0].answer, prompts[0].teacher, prompts[1].answer, prompts[1].teacher) == ("2", "math", None, None)
    assert counts == data.PromptCounts(read=3, dropped=0, cut=0)
    assert read(second)[0] == prompts[2:]


def test_byte_order_mark_crlf_and_last_line(tmp_path):
    """Catches a file from a Windows editor that is refused, and a last line without a line end that is lost."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b\xe2\x80\xa8"}')    # U+2028 is no line end
    assert [prompt.ids for prompt in read(path)[0]] == [(97,), (98, 226, 128, 168)]
    path.write_bytes(b'{"prompt": "a"}\n\xef\xbb\xbf{"prompt": "a"}')    # control: only at the start of the file
    assert ":2: malformed JSON" in refusal(path)


def test_long_prompts(tmp_path):
    """Catches a cut at the wrong end, a border off by one, and prompts that vanish without being counted."""
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": "abc"}, {"prompt": "abcd"}, {"prompt": "abcde"})
    prompts, counts = read(path, max_prompt_tokens=4)
    assert [bytes(prompt.ids) for prompt in prompts] == [b"abc", b"abcd"] and counts == data.PromptCounts(3, 1, 0)
    prompts, counts = read(path, max_prompt_tokens=3, long_prompts="cut")
    assert [bytes(prompt.ids) for prompt in prompts] == [b"abc", b"bcd", b"cde"]
    assert counts == data.PromptCounts(3, 0, 2)


def test_no_prompts_left(tmp_path):
    """Catches a run without data that ends with exit code 0."""
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": "abc"})
    with pytest.raises(ValueError, match=r"a.jsonl: no prompts left: 1 read, 1 dropped.*max_prompt_tokens=2.*cut"):
        read(path, max_prompt_tokens=2)
    assert "no prompts left" in refusal(write_jsonl(tmp_path / "b.jsonl", ""))
    assert "none.jsonl: cannot be read" in refusal(tmp_path / "none.jsonl")
    assert "cannot be read" in refusal(tmp_path)


@pytest.mark.parametrize("line, parts", [
    ('{"prompt": "a"', ["malformed JSON at column"]),
    ('{"prompt": "a"} x', ["malformed JSON", "Extra data"]),
    ("{'prompt': 'a'}", ["malformed JSON"]),
    ('{"prompt": "a", "prompt": "b"}', ["duplicate key 'prompt'"]),
    ('{"prompt_ids": [NaN]}', ["NaN"]),
    ('{"prompt_ids": [1e999]}', ["1e999"]),
    ('{"prompt_ids": [' + "9" * 5000 + "]}", [":2:"]),
    ("[" * 100000, ["nested too deeply"]),
    ('["prompt"]', ["expected a JSON object, got a list"]),
    ("3", ["expected a JSON object, got an integer"]),
    ("null", ["expected a JSON object, got null"]),
    ("{}", ["prompt, messages and prompt_ids, got none"]),
    ('{"answer": "2"}', ["got none"]),
    ('{"prompt": "a", "prompt_ids": [1]}', ["got prompt and prompt_ids"]),
    ('{"promt": "a"}', ["unknown key 'promt'", "did you mean 'prompt'?"]),
    ('{"prompt": "a", "zzz": 1}', ["unknown key 'zzz'", "a line has"]),
    ('{"prompt": ""}', ["empty"]),
    ('{"prompt_ids": []}', ["empty"]),
    ('{"prompt": 3}', ["prompt: expected text, got an integer"]),
    ('{"prompt": "a", "answer": 3}', ["answer: expected text"]),
    ('{"prompt": "a", "teacher": ["t"]}', ["teacher: expected text"]),
    ('{"prompt": "\\ud800"}', ["surrogate"]),
    ('{"prompt": "a", "answer": "\\udc00"}', ["surrogate"]),
    ('{"prompt_ids": "abc"}', ["prompt_ids: expected a list"]),
    ('{"prompt_ids": [1, true]}', ["prompt_ids[1]", "true"]),
    ('{"prompt_ids": [1, 2.0]}', ["prompt_ids[1]"]),
    ('{"prompt_ids": [1, -1]}', ["prompt_ids[1]", "-1"]),
    ('{"prompt_ids": [257]}', ["prompt_ids[0]", "0 to 256"]),
    ('{"messages": []}', ["messages: expected a list of messages"]),
    ('{"messages": {"role": "user", "content": "a"}}', ["messages"]),
    ('{"messages": ["a"]}', ["messages[0]"]),
    ('{"messages": [{"role": "user"}]}', ["messages[0].content: expected text, got null"]),
    ('{"messages": [{"role": "user", "content": "a"}]}', ["byte tokenizer has no chat template"]),
])
def test_messages_of_lines(tmp_path, line, parts):
    """Catches a bad line that is skipped, or refused without its number."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "ok"}\n' + line + "\n")
    message = refusal(path)
    assert message.startswith(f"{path}:2: ") and all(part in message for part in parts), message


def test_messages_of_bytes(tmp_path, monkeypatch):
    """Catches text in another encoding that is read with replacement characters, and a line that fills the memory."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9"}\n')
    assert ":2: not UTF-8 at byte 12" in refusal(path)
    monkeypatch.setattr(data, "MAX_LINE_BYTES", 20)
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "' + b"a" * 30)
    assert ":2: longer than 20 bytes" in refusal(path)


def test_fuzz_lines(tmp_path):
    """Catches any exception but a ValueError of one line that names the file and the line."""
    rng = random.Random(0)
    seeds = ['{"prompt": "1+1=", "answer": "2", "teacher": "t"}', '{"prompt_ids": [1, 2, 256], "answer": null}',
             '{"messages": [{"role": "user", "content": "caf\\u00e9"}]}']
    pieces = ['"', "{", "}", "[", "]", ",", ":", "\\", "\\ud800", "null", "NaN", "-", "1e999", "0", "9" * 50, "\t",
              "\0", "\r"]
    path = tmp_path / "a.jsonl"
    accepted = refused = 0
    for _ in range(500):
        line = bytearray(rng.choice(seeds).encode())
        for _ in range(rng.randint(1, 2)):
            i = rng.randrange(len(line))
            j = min(len(line), i + rng.choice([0, 1, 1, 4]))
            line[i:j] = rng.choice([b"", bytes([rng.randrange(256)]), rng.choice(pieces).encode()])
        path.write_bytes(b'{"prompt": "ok"}\n' + line)
        try:
            read(path)
            accepted += 1
        except ValueError as error:
            assert type(error) is ValueError and str(error).isprintable(), line
            assert str(error).startswith(f"{path}:2: ") or str(error).startswith(f"{path}:3: "), (line, str(error))
            refused += 1
    assert accepted > 25 and refused > 300, (accepted, refused)


# ---- order

def test_each_epoch_is_a_permutation():
    """Catches sampling with replacement, one order for all epochs, and a seed that is not used."""
    n = 97
    epochs = [batch_at(epoch * n, n, n, seed=3) for epoch in range(4)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert batch_at(0, n, n, seed=4) != epochs[0] and epochs[0] != list(range(n))
    assert batch_at(0, n, n, seed=1) != batch_at(n, n, n, seed=0)    # (seed, epoch) is not seed + epoch


def test_batches_are_windows_of_one_sequence():
    """Catches a batch that wraps into the same epoch again, one larger than the data, and sample_at that disagrees."""
    n = 10
    stream = batch_at(0, 50, n, seed=0)
    for position in range(0, 25):
        for size in (1, 3, 10, 25):
            assert batch_at(position, size, n, seed=0) == stream[position:position + size]
        assert sample_at(position, n, seed=0) == (position // n, stream[position])
    assert all(type(index) is int for index in stream)
    assert batch_at(5, 3, 1, seed=0) == [0, 0, 0]


def test_any_world_size_and_resume_see_the_same_samples():
    """Catches an order that depends on the ranks, and a resume inside an epoch that repeats or skips samples."""
    n, per_step = 50, 12
    def consumed(world_size, first_step, last_step):    # rank r of W takes every W-th sample of the global batch
        batches = [batch_at(step * per_step, per_step, n, seed=7) for step in range(first_step, last_step)]
        return [index for batch in batches for rank in range(world_size) for index in batch[rank::world_size]]
    straight = consumed(1, 0, 4)
    assert len(set(straight)) == 48    # less than one epoch: nothing twice
    for worlds in [(2, 2, 2), (4, 1, 3)]:
        resumed = [consumed(world, *steps) for world, steps in zip(worlds, [(0, 1), (1, 2), (2, 4)])]
        assert sorted(sum(resumed, [])) == sorted(straight)
    # control: an order drawn anew at each start repeats samples
    rng = random.Random(0)
    assert len({*rng.sample(range(n), 24), *rng.sample(range(n), 24)}) < 48


def test_order_is_frozen():
    """Catches a change of the order, which would make old checkpoints resume on other samples without a word."""
    assert batch_at(0, 12, 10, seed=0) == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9, 7, 4]


# ---- answers

def test_answer_matches():
    """Catches a match of the first instead of the last number, of a part of a number, and a missing match as right."""
    assert answer_matches(" 42\n", "42", None) and not answer_matches("42.", "42", None)
    pattern = r"answer: *(-?\d+)"
    assert answer_matches("answer: 1, no, answer: 42 apples", " 42 ", pattern)
    assert not answer_matches("answer: 42, no, answer: 1", "42", pattern)
    assert not answer_matches("answer: 421", "42", pattern)
    assert not answer_matches("42", "42", pattern) and not answer_matches("", "", pattern)
    assert not answer_matches("x", "", r"x|(y)")    # a group that took no part


# ---- the byte tokenizer

def test_byte_tokenizer():
    """Catches ids that do not decode to their text, and sampled bytes that are no UTF-8 ending a run."""
    tokenizer = load_tokenizer(None, "byte")
    text = "1+1=2 caf\u00e9 \U0001f600\n\0"
    assert tokenizer.decode(tokenizer.encode(text)) == text and max(tokenizer.encode(text)) < 256
    assert tokenizer.decode([72, 105, 256, 300]) == "Hi" and tokenizer.decode([195, 40]) == "\ufffd("
    assert (tokenizer.stop_ids, tokenizer.num_ids, tokenizer.has_text) == ((256,), 257, True)
    with pytest.raises(ValueError, match="expected auto or byte"):
        load_tokenizer(None, "bytes")


# ---- the tokenizer of a model folder

@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A model folder as transformers writes it: BPE with a post-processor that adds BOS, a template, stop ids."""
    tokenizers = pytest.importorskip("tokenizers")
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<s>", "</s>", "<|assistant|>", "<|user|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    engine.train_from_iterator(["the quick brown fox jumps over the lazy dog, two and two is four"] * 5, trainer)
    engine.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    engine.enable_truncation(max_length=4)    # stored in tokenizer.json; must not cut our prompts
    engine.enable_padding(length=50)
    folder = tmp_path_factory.mktemp("model")
    engine.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "config.json").write_text('{"eos_token_id": 2}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 2]}')
    return folder


def edited_copy(folder, target, **edits):
    """A copy of a model folder with the JSON of some files (name without .json) edited by functions."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    for name, edit in edits.items():
        path = target / f"{name}.json"
        raw = json.loads(path.read_text()) if path.exists() else {}
        edit(raw)
        path.write_text(json.dumps(raw))
    return target


def test_text_equals_transformers(model_folder):
    """Catches a BOS that our encode adds, truncation or padding taken from the file, and special tokens split up."""
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(model_folder)
    tokenizer = load_tokenizer(model_folder, "auto")
    for text in ["the quick brown fox", " two\n\n", "<|user|>the</s>", "caf\u00e9 \U0001f600", ""]:
        expected = fast(text, add_special_tokens=False).input_ids
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == fast.decode(expected, skip_special_tokens=True)
    assert fast("the").input_ids[0] == 0 and len(fast("the " * 9, add_special_tokens=False).input_ids) > 4    # controls


def test_chat_equals_transformers(model_folder):
    """Catches another white space rule, missing helpers or variables, HTML escapes, and a wrong generation prompt."""
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(model_folder)
    tokenizer = load_tokenizer(model_folder, "auto")
    for messages in (MESSAGES, MESSAGES[:1], [{"role": "system", "content": "s"}, *MESSAGES]):
        before = copy.deepcopy(messages)
        rendered = tokenizer.render_chat(messages)
        assert rendered == fast.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.encode(rendered) == fast.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False)
        assert messages == before
    assert rendered != fast.apply_chat_template(messages, tokenize=False)    # control: without the generation prompt


def test_chat_lines(model_folder, tmp_path):
    """Catches chat prompts that go another way than render_chat and encode, and template errors without a line."""
    tokenizer = load_tokenizer(model_folder, "auto")
    path = write_jsonl(tmp_path / "a.jsonl", {"messages": MESSAGES[:1], "answer": "4"})
    assert read(path, tokenizer)[0][0].ids == tuple(tokenizer.encode(tokenizer.render_chat(MESSAGES[:1])))
    folder = with_template(model_folder, tmp_path / "m", "{{ raise_exception('roles must\nalternate') }}")
    message = refusal(path, load_tokenizer(folder, "auto"))
    assert message.startswith(f"{path}:1: chat template of {folder}: ") and "roles must alternate" in message


def with_template(folder, target, template):
    edited_copy(folder, target)
    (target / "chat_template.jinja").write_text(template)
    return target


def test_where_the_template_is_read_from(model_folder, tmp_path):
    """Catches folders in the older layouts: the template in tokenizer_config.json, alone or as a list by name."""
    messages = [{"role": "user", "content": "hi"}]
    for i, (template, expected) in enumerate([
            ("A{{ messages[0].content }}", "Ahi"),
            ([{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}], "D")]):
        folder = edited_copy(model_folder, tmp_path / str(i),
                             tokenizer_config=lambda raw: raw.update(chat_template=template))
        assert load_tokenizer(folder, "auto").render_chat(messages) != expected    # control: chat_template.jinja wins
        (folder / "chat_template.jinja").unlink()
        assert load_tokenizer(folder, "auto").render_chat(messages) == expected
    folder = edited_copy(folder, tmp_path / "none", tokenizer_config=lambda raw: raw.pop("chat_template"))
    with pytest.raises(ValueError, match="neither chat_template.jinja nor"):
        load_tokenizer(folder, "auto").render_chat(messages)


TOOL_TEMPLATE = """\
{%- set today = 'today' %}
{%- if strftime_now is defined %}{% set today = strftime_now('%d %b %Y') %}{% endif %}
{%- macro write(message, last=false) -%}
{{ '<|start_header_id|>' ~ message['role'] ~ '<|end_header_id|>\n\n' }}
{%- if message.content is string %}{{ message.content | trim }}
{%- elif message.content is iterable and message.content is not mapping %}
    {%- for part in message.content if part.type == 'text' %}{{ part.text + ('' if loop.last else ' ') }}{% endfor %}
{%- endif %}{{ '' if last else eos_token | default('</s>') }}
{%- endmacro -%}
{%- if messages[0]['role'] == 'system' %}
    {%- set system, loop_messages = messages[0]['content'] | trim, messages[1:] %}
{%- else %}{% set system, loop_messages = '', messages %}{% endif %}
{{- bos_token | d('<s>') }}{{ system | upper }}|{{ today | replace('o', '0') | capitalize | title | lower }}
{%- set tools = [{'type': 'function', 'function': {'name': 'f', 'parameters': {'x': {'type': ['int', 'null']}}}}] %}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{{ tool.function | tojson(indent=4) | safe }}
    {%- for name, value in tool.function.parameters.items() %}{{ name }}:{{ value.type | join(', ') }}{% endfor %}
    {%- for name, value in tool.function | dictsort %} {{ name | string | length }}{% endfor %}
{%- endfor %}
{%- set ns = namespace(multi_step=true, last=loop_messages | length - 1, text='') %}
{%- for message in loop_messages[::-1] %}
    {%- set index = (loop_messages | length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == 'user' and message.content is string and
           not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step = false %}{% set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in loop_messages %}
    {%- if message.role in ['user', 'system'] or (message.role == 'assistant' and not message.tool_calls) %}
        {%- set content, reasoning = message.content, '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>' + reasoning.strip('\\n') + '</think>' + content }}
        {%- else %}{{ write(message, last=loop.last) }}{% endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {%- for call in message.tool_calls %}
            {%- if call.function %}{% set call = call.function %}{% endif %}
            {{- '<tool_call>' + call.name + (call.arguments if call.arguments is string else call.arguments | tojson) }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop_messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '<tool_response>' ~ message['content'] ~ '</tool_response>' }}
        {%- if loop.last or (loop_messages[loop.index0 + 1].role != 'tool') %}{{ '<|im_end|>' }}{% endif %}
    {%- else %}{{ raise_exception('unknown role ' + message.role) }}{% endif %}
{%- endfor %}
{{- messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | last | string | length }}
{{- messages | rejectattr('role', 'in', ['user', 'tool']) | map(attribute='role') | unique | sort | join('+') }}
{{- messages | map(attribute='role') | reverse | first }}{{ loop_messages | length % 2 == 0 }}{{ '7' | int * 2 - 1 }}
{{- messages[0].get('name', 'nobody') }}{{ 'a, b' .split(', ') | reverse | join }}{{ ['a'] + ['b'] }}
{{- {'k': -1}.k | abs }}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
TOOL_MESSAGES = [
    {"role": "system", "content": " be brief "}, {"role": "user", "content": "what is <b>f(2)</b>?"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 2, "y": "\u00e9"}}}]},
    {"role": "tool", "content": "4"}, {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nfour"}]


def test_the_sandbox_renders_what_real_templates_use(model_folder, tmp_path):
    """Catches a construct of the SmolLM2, Qwen2.5, Qwen3 and Llama 3 templates that the bounded sandbox refuses."""
    transformers = pytest.importorskip("transformers")
    folder = with_template(model_folder, tmp_path / "m", TOOL_TEMPLATE)
    fast, tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder), load_tokenizer(folder, "auto")
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    for messages in (TOOL_MESSAGES, TOOL_MESSAGES[1:], TOOL_MESSAGES[:2], parts):
        ours, theirs = tokenizer.render_chat(messages), fast.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True)
        assert ours == re.sub(r"\|\d\d \w{3} \d{4}", "|t0day", theirs)    # we tell no dates


@pytest.mark.parametrize("template", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('id') }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ strftime_now.__globals__['os'].getcwd() }}",
    "{{ (''|attr('__class__')).__mro__ }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ messages.append('x') }}",
    "{{ messages[0].update(role='system') }}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{{ 'x' * 9000000 }}",
    "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "{% include '/etc/passwd' %}",
    "{{ 1 / 0 }}",
    "{{ messages.nothing.at_all }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% if %}",
    "{% unknown_tag %}",
    "{{ raise_exception('no') }}",
])
def test_templates_that_leave_the_sandbox_or_fail(model_folder, tmp_path, template):
    """Catches a model folder whose template runs code, reads files, changes the data or ends in a traceback."""
    folder = with_template(model_folder, tmp_path / "m", template)
    tokenizer = load_tokenizer(folder, "auto")
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(ValueError, match="chat template of") as caught:
        tokenizer.render_chat(messages)
    assert str(caught.value).isprintable() and messages == [{"role": "user", "content": "a"}]


def test_the_sandbox_is_what_refuses(model_folder):
    """Control for the one above: the same template reaches every class of the process in plain jinja2."""
    jinja2 = pytest.importorskip("jinja2")
    assert "class" in jinja2.Environment().from_string("{{ ''.__class__.__mro__[1].__subclasses__() }}").render()


def test_old_jinja2_is_refused(model_folder, monkeypatch):
    """Catches a sandbox with published escapes."""
    monkeypatch.setattr(data.importlib.metadata, "version", lambda name: "3.1.5")
    with pytest.raises(ValueError, match="jinja2 3.1.5 has known sandbox escapes: pip install"):
        load_tokenizer(model_folder, "auto").render_chat(MESSAGES)


def test_stop_ids(model_folder, tmp_path):
    """Catches a response that runs on since only one of the three files was asked, or a list was taken as an id."""
    assert load_tokenizer(model_folder, "auto").stop_ids == (1, 2, 3)    # tokenizer </s> = 1, config 2, generation 3, 2
    folder = edited_copy(model_folder, tmp_path / "a", config=lambda raw: raw.update(eos_token_id=None),
                         tokenizer_config=lambda raw: raw.update(eos_token={"content": "<|user|>", "special": True}))
    (folder / "generation_config.json").unlink()
    assert load_tokenizer(folder, "auto").stop_ids == (3,)
    folder = edited_copy(folder, tmp_path / "b", tokenizer_config=lambda raw: raw.update(eos_token="<unknown>"))
    assert load_tokenizer(folder, "auto").stop_ids == ()
    for i, bad in enumerate(["2", True, -1, [2, None], 1.0, {"a": 1}]):
        folder = edited_copy(model_folder, tmp_path / f"bad{i}", config=lambda raw: raw.update(eos_token_id=bad))
        with pytest.raises(ValueError, match="config.json: eos_token_id: expected a token id"):
            load_tokenizer(folder, "auto")


def test_num_ids_counts_added_tokens(model_folder, tmp_path):
    """Catches a vocabulary size taken from len(vocab), which holes and added tokens make wrong."""
    base = load_tokenizer(model_folder, "auto").num_ids
    raw = json.loads((model_folder / "tokenizer.json").read_text())
    assert base == 1 + max(raw["model"]["vocab"].values())
    folder = edited_copy(model_folder, tmp_path / "a", tokenizer=lambda raw: raw["added_tokens"].append(
        {"id": base + 9, "content": "<far>", "special": True}))
    assert load_tokenizer(folder, "auto").num_ids == base + 10
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt_ids": [base + 9]})
    assert read(path, load_tokenizer(folder, "auto"))[0]
    assert "is no token id" in refusal(path, load_tokenizer(model_folder, "auto"))


def test_fingerprint(model_folder, tmp_path):
    """Catches tokenizers taken for equal though their ids differ, and equal ones refused for how they are stored."""
    def fingerprint(name, **edits):
        return load_tokenizer(edited_copy(model_folder, tmp_path / name, **edits), "auto").fingerprint

    def other_merge_form(raw):
        raw["model"]["merges"] = [" ".join(pair) if isinstance(pair, list) else pair.split(" ")
                                  for pair in raw["model"]["merges"]]

    def reorder(raw):
        raw["model"]["vocab"] = dict(reversed(raw["model"]["vocab"].items()))
        raw["added_tokens"].reverse()
        raw["truncation"] = None

    def swap_ids(raw):
        vocab = raw["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]

    base = load_tokenizer(model_folder, "auto").fingerprint
    assert len(base) == 64
    assert fingerprint("same", tokenizer=other_merge_form) == fingerprint("order", tokenizer=reorder) == base
    different = {fingerprint("swap", tokenizer=swap_ids),
                 fingerprint("merges", tokenizer=lambda raw: raw["model"]["merges"].reverse()),
                 fingerprint("added", tokenizer=lambda raw: raw["added_tokens"][3].update(content="<|tool|>"))}
    assert len(different) == 3 and base not in different


def test_unigram_vocabulary(tmp_path):
    """Catches a SentencePiece tokenizer.json, whose vocabulary is a list of [token, score]."""
    raw = {"model": {"type": "Unigram", "vocab": [["<unk>", 0], ["a", -1.5], ["b", -2.5]]}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert load_tokenizer(tmp_path, "auto").num_ids == 3


def test_without_the_tokenizers_package(model_folder, tmp_path, monkeypatch):
    """Catches an import of an optional package that token ids do not need, and its absence told as a traceback."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)    # import and find_spec fail
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    tokenizer = load_tokenizer(model_folder, "auto")
    assert tokenizer.stop_ids == (1, 2, 3) and not tokenizer.has_text
    assert read(write_jsonl(tmp_path / "a.jsonl", {"prompt_ids": [1, 2]}), tokenizer)[0][0].ids == (1, 2)
    message = refusal(write_jsonl(tmp_path / "b.jsonl", {"prompt": "a"}), tokenizer)
    assert "b.jsonl:1: text needs the tokenizers package: pip install -r requirements-text.txt" in message


def test_folder_without_tokenizer_json(model_folder, tmp_path):
    """Catches a folder of weights only that is refused for token ids, or accepted for text."""
    folder = edited_copy(model_folder, tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    tokenizer = load_tokenizer(folder, "auto")
    assert (tokenizer.num_ids, tokenizer.fingerprint, tokenizer.has_text) == (None, None, False)
    assert tokenizer.stop_ids == (2, 3)
    assert read(write_jsonl(tmp_path / "a.jsonl", {"prompt_ids": [10**6]}), tokenizer)[0]
    assert "m/tokenizer.json: no such file" in refusal(write_jsonl(tmp_path / "b.jsonl", {"prompt": "a"}), tokenizer)
    with pytest.raises(ValueError, match="no such folder"):
        load_tokenizer(tmp_path / "nothing", "auto")


@pytest.mark.parametrize("name, content", [
    ("tokenizer.json", "{"), ("tokenizer.json", "[]"), ("tokenizer.json", "{}"), ("tokenizer.json", '{"model": 3}'),
    ("tokenizer.json", '{"model": {"vocab": {}}}'), ("tokenizer.json", '{"model": {"vocab": {"a": -1}}}'),
    ("tokenizer.json", '{"model": {"vocab": {"a": true}}}'), ("tokenizer.json", '{"model": {"vocab": [3]}}'),
    ("tokenizer.json", '{"model": {"vocab": [[["a"], 0]]}}'), ("tokenizer.json", '{"model": {"vocab": [[1, 0]]}}'),
    ("tokenizer.json", '{"model": {"vocab": {"a": 0}, "merges": ["a"]}}'),
    ("tokenizer.json", '{"model": {"vocab": {"a": 0}, "merges": 3}}'),
    ("tokenizer.json", '{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]}'),
    ("tokenizer.json", '{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": "1", "content": "b"}]}'),
    ("tokenizer.json", '{"model": {"vocab": {"a": 0, "a": 1}}}'),
    ("config.json", "3"), ("config.json", '{"a": Infinity}'), ("generation_config.json", "\ufeff{}"),
    ("tokenizer_config.json", "[" * 100000),
])
def test_malformed_folders(tmp_path, name, content):
    """Catches a traceback, or half a tokenizer, from a damaged file."""
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name}: ") as caught:
        load_tokenizer(tmp_path, "auto")
    assert type(caught.value) is ValueError and str(caught.value).isprintable()


def test_damaged_tokenizer_json_for_the_package(tmp_path):
    """Catches the bare Exception of the tokenizers package for a file that only our own reader accepts."""
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    with pytest.raises(ValueError, match="tokenizer.json: not a tokenizer: "):
        load_tokenizer(tmp_path, "auto").encode("a")
