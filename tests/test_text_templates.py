"""Rendering a stranger's template: what it must not do, and that every error of it is one line."""

from __future__ import annotations

import pytest
from chat_templates import GOOD

from minigpt.errors import ModelFolderError
from minigpt.text import templates


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}{% set x = [" + "1," * 20000 + "] %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}",
        "{% macro f() %}{% for i in range(100000) %}" + "x" * 60000 + "{% endfor %}{% endmacro %}{{ f() }}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set r = range(100000) | list %}{% for i in r %}{% for j in r if false %}{% endfor %}{% endfor %}",
        "{% set r = range(100000) | list %}{% for i in r %}{{ r | sum }}{% endfor %}",
        "{% set b = 'ab' * 100000 %}{{ b.replace('a', b) }}",
        "{% set b = 'ab' * 100000 %}{% for i in range(99999) %}{% set c = b[::-1] %}{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{{ 2 ** (10**10) }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ 'a' | center(10**9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ strftime_now('%999999999d') }}",
        "{{ [1] | tojson(indent=10**9) }}",
        "{{ range(100000) | map('string') | join('a' * 100000) }}",
    ],
)
def test_a_template_that_would_never_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "BUDGET", 1_000_000)
    with pytest.raises(ModelFolderError, match=r"too long|too wide"):
        templates.Template(source).render([], {}, False)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% set ns = namespace(__class__=1) %}", "__class__"),
        ("{% set ns = namespace() %}{% set ns.__html__ = 1 %}", "__html__"),
        ("{% include '/etc/passwd' %}", "loader"),
        ("{% if %}", "line 1"),
        ("a\n{% endif %}", "line 2"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ 1 // 0 }}", "division|modulo"),
        ("{{ " + "(" * 5000, "nested too deeply"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
        ("x" * 300_000, "300,000 characters"),
        ("{{ lipsum() }}", "lipsum"),
        ("{{ raise_exception('one\ntwo') }}", "one two"),
    ],
)
def test_every_error_of_a_template_is_one_line(source: str, reason: str) -> None:
    with pytest.raises(ModelFolderError, match=reason) as caught:
        templates.Template(source).render([{"role": "user", "content": "x"}], {}, False)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def turns(count: int) -> list[dict[str, str]]:
    return [{"role": role, "content": f"{role} {i}\n x"} for i in range(count) for role in ("user", "assistant")]


def test_a_long_conversation_is_well_within_the_limits() -> None:
    for name in ("qwen3", "llama3", "smollm2"):
        assert len(templates.Template(GOOD[name].source).render(turns(500), GOOD[name].names, True)) > 10_000


@pytest.mark.parametrize(
    "source",
    [known.source for known in GOOD.values()]
    + [
        "{{ messages | tojson(indent=2) }}{{ {'b': '<é>', 'a': none} | tojson }}",
        "{% for m in messages if m.role == 'user' %}{{ loop.index ~ '/' ~ loop.length }}{% if loop.last %}!{% endif %}"
        "{% if loop.index == 2 %}{% break %}{% endif %}{% else %}none{% endfor %}",
        "{% macro say(m, end='') %}{{ m.role | upper }}: {{ m.content | trim }}{{ end }}{% endmacro %}"
        "{% for m in messages %}{{ say(m, end='\n') }}{% endfor %}",
        "{%- for m in messages | selectattr('role', 'equalto', 'user') | list %}\n  {{ m.content.split(' ')[-1] }}\n"
        "{%- endfor %}\n  {# gone #}\n{% set x %}{{ 2 * 3 }}{% endset %}{{ x + '%s' % 7 + '{:>4}'.format('a') }}",
        "{% for m in messages recursive %}{{ m.role }}{{ loop(m.inner) if m.inner }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + loop.revindex %}{% endfor %}"
        "{{ ns.n }}{{ messages | map(attribute='content') | join(', ') }}{{ 'x' in ['x', 'y'] }}{{ dict(a=1).a }}",
        "{{ tools is none }}{{ documents is defined }}{{ unknown is defined }}",
        "{% macro wrapped() %}[{{ caller() }}]{% endmacro %}{% call wrapped() %}{{ messages[0].content }}{% endcall %}",
    ],
)
def test_what_is_rendered_equals_transformers(source: str) -> None:
    """The weighing changes nothing."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    for prompt in (False, True):
        theirs = utils.render_jinja_template([turns(3)], chat_template=source, add_generation_prompt=prompt, **names)
        assert templates.Template(source).render(turns(3), names, prompt) == theirs[0][0]
