"""Chat templates: as transformers fills them in, and shut in."""

import sys

import pytest

from streamload.core.errors import CheckpointError, CheckpointNotFoundError, MissingExtraError
from streamload.generation.chat import ChatTemplate, template_from

TOKENS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "n_token": 3}
# As published models have them: loops, conditions, filters, namespaces, blocks for training.
TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}",
    "tokens": "{{ bos_token }}{% for m in messages %}\n    {%- if m.role == 'user' %}\n"
    "[INST] {{ m.content | trim }} [/INST]\n    {%- endif %}\n{% endfor %}{{ eos_token }}",
    "training": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% break %}{% endfor %}",
    "json": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{{ m | tojson(indent=1) }}{% endfor %}{{ ns.n }} {{ {'a': '<ü>'} | tojson }}",
    "methods": "{{ messages[-1]['content'].split(' ')[0].upper() }}{{ tools is defined }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("system", [None, "be <b>brief</b> & kind"])
def test_it_is_filled_in_as_by_transformers(name, system):
    render = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    prompt = "  Hello, my 'name' is  \n"
    roles = [("system", system), ("user", prompt)] if system is not None else [("user", prompt)]
    messages = [{"role": role, "content": text} for role, text in roles]
    template = template_from({**TOKENS, "chat_template": TEMPLATES[name]}, None, {}, "m")
    (wanted,), _ = render(
        [messages],
        chat_template=TEMPLATES[name],
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
    )
    if name == "methods":
        wanted = wanted.replace("True", "False")  # there tools are defined, as none
    assert template.render(prompt, system=system) == wanted


def test_which_template_is_taken():
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    assert template_from({"chat_template": named}, None, {}, "m").text == "d"
    found = template_from({"chat_template": "c"}, "file", {"bos_token": "b"}, "m")
    assert (found.text, found.path, found.tokens) == (
        "file",
        "m/chat_template.jinja",
        {"bos_token": "b"},
    )
    for config in ({}, {"chat_template": []}, {"chat_template": named[:1]}):
        with pytest.raises(CheckpointNotFoundError, match="leave --chat away"):
            template_from(config, None, {}, "m")
    with pytest.raises(CheckpointError, match=r"m/tokenizer_config\.json.*of type int"):
        template_from({"chat_template": 3}, None, {}, "m")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{{ raise_exception('only users') }}", "only users"),
        ("{% for", "cannot use the chat template"),
        ("{{ nothing.at.all }}", "undefined"),
        # Out of the sandbox, by the known ways.
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "append"),
        ("{% include '/etc/passwd' %}", "cannot use"),
        # Without end, or as large as it likes.
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "time"),
        ("{% set a = 'a' * 10**9 %}{{ a }}", ""),
        ("{{ ('a' * 99999) | list | length }}{{ [0] * 10**10 }}", ""),
        ("{{ 9 ** (9 ** 9) }}", "time"),
        ("{{ range(10**12) | list }}", ""),
        ("x" * (2 << 20), "expected at most"),
        ("{" * 5000 + "{{ 1 }}", "cannot use"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "cannot use"),
    ],
)
def test_a_foreign_template_harms_nobody(text, says, capfd):
    with pytest.raises(CheckpointError, match=r"f\.jinja") as caught:
        ChatTemplate(text, "f.jinja").render("x")
    assert says in str(caught.value)
    assert len(str(caught.value)) < 1500
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["raise_exception.__globals__", "strftime_now.__code__"])
def test_what_is_inside_of_functions_is_nothing_to_a_template(name):
    assert ChatTemplate(f"<{{{{ {name} }}}}>", "f").render("x") == "<>"


def test_without_jinja_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=r"--chat needs .*'jinja2'.*streamload\[text\]"):
        ChatTemplate("x", "f").render("x")
