"""Markdown on the page: every construct, hostile texts and long ones. Skips itself without a
browser.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api")
pytest_plugins = ["page_fixtures"]


def markdown(page: Any, text: str) -> str:
    return page.evaluate(
        "text => { const root = make('div'); showMarkdown(root, text); return root.innerHTML; }",
        text,
    )


DOCUMENT = """# Title #
Some **bold**, *italic*, __bold__, _italic_, ***both***, ~~gone~~, `a <b> *c*`, snake_case_word.
Second line with a [link](https://example.org/a_b "t") and https://example.org/x_y).

```python
def f():
    return "<b>"
```
~~~
plain ``` text
~~~
1. one
   - nested **item**
     continued

     ```
     code in an item
     ```
2. two
- [x] done
- [ ] open

> quote
> > deeper

| a | b |
|:--|--:|
| `x` | 1 \\| 2 |
| y |

---
![picture](https://example.org/p.png) <https://example.org> line<br>break \\*no\\* 2 * 3 * 4
"""


def test_every_construct_of_markdown(page: Any) -> None:
    html = markdown(page, DOCUMENT)
    link = 'target="_blank" rel="noopener noreferrer"'
    for expected in (
        "<h3>Title</h3>",
        "<strong>bold</strong>, <em>italic</em>, <strong>bold</strong>, <em>italic</em>",
        "<em><strong>both</strong></em>, <del>gone</del>, <code>a &lt;b&gt; *c*</code>",
        "snake_case_word.<br>Second line",
        f'<a href="https://example.org/a_b" title="https://example.org/a_b" {link}>link</a>',
        f'title="https://example.org/x_y" {link}>https://example.org/x_y</a>).',
        "<span>python</span>",
        'code>def f():\n    return "&lt;b&gt;"</code>',
        "<code>plain ``` text</code>",
        '<ol class="tight"><li><p>one</p><ul class=""><li><p>nested <strong>item</strong><br>'
        "continued</p>",
        "<code>code in an item</code>",
        '<li class="task"><input type="checkbox" disabled="" aria-label="done"><p>done</p></li>',
        "<blockquote><p>quote</p><blockquote><p>deeper</p></blockquote></blockquote>",
        '<td><code>x</code></td><td style="text-align: right;">1 | 2</td>',
        "<hr>",
        f'title="https://example.org/p.png" {link}>picture</a>',
        "line<br>break *no* 2 * 3 * 4",
    ):
        assert expected in html, expected
    assert page.evaluate(
        """text => {
          const grown = make("div"), view = new MarkdownView(grown);
          for (let end = 0; end <= text.length; end++) view.update(text.slice(0, end));
          return grown.innerHTML;
        }""",
        DOCUMENT,
    ) == html, "piece by piece it is the same"  # fmt: skip


HOSTILE = """<script>alert(1)</script> <img src=x onerror=alert(1)>
[a](javascript:alert(1)) [b](data:text/html,x) [c]( JaVaScRiPt:alert(1)) [d](//x)
<javascript:alert(1)>
![e](javascript:alert(1)) [f](https://x.org" onclick="alert(1)) `<script>`
| <img src=x onerror=alert(1)> | b |
|--|--|
| [g](vbscript:x) | b |

```<script>alert(1)</script>
<script>alert(2)</script>"""


def test_hostile_text_stays_text(page: Any) -> None:
    page.evaluate("text => showMarkdown($('talk'), text)", HOSTILE)
    assert page.locator("#talk :is(script, img, iframe, style, object)").count() == 0
    links = page.eval_on_selector_all("#talk a", "all => all.map((a) => [a.href, a.onclick])")
    assert links == [["https://x.org/", None]]
    shown = page.inner_text("#talk")
    for text in ("<script>alert(1)</script> <img src=x", "[a](javascript:alert(1))", "alert(2)"):
        assert text in shown
    assert "<script>alert(2)" in page.inner_text("#talk .code code"), "a fence that is not closed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "```\n" + "line of code\n" * 20_000,
        "- item\n" * 20_000,
        "word *emphasis*\n" * 20_000,
        "*a " * 50_000 + "a* " * 50_000,
        "[" * 100_000 + "](x" * 30_000,
        "![a" * 20_000 + "](https://x.org)" * 20_000,
        "`" + "".join("`" * (n % 300) + "x" for n in range(2_000)),
        "> " * 50_000,
        "- " * 50_000,
        "| a " * 20_000 + "\n" + "|-" * 20_000 + "\n" + "| b " * 20_000,
        "http://" + "." * 200_000,
    ],
    ids=lambda text: text[:4].strip(),
)
def test_long_and_hostile_texts_take_linear_time(page: Any, text: str) -> None:
    seconds = page.evaluate(
        """text => {
          const began = performance.now();
          showMarkdown(make("div"), text);
          return (performance.now() - began) / 1000;
        }""",
        text,
    )
    assert seconds < 10


@pytest.mark.slow
def test_a_long_fence_grows_without_being_made_anew(page: Any) -> None:
    made = page.evaluate(
        """() => {
          const root = make("div"), view = new MarkdownView(root);
          let text = "Before.\\n\\n```py\\n", made = 0;
          const first = fenceElement;
          fenceElement = (...given) => { made += 1; return first(...given); };
          for (let line = 0; line < 300; line++) view.update(text += `line ${line}\\n`);
          view.update(text += "```\\nAfter.");
          return [made, root.querySelectorAll(".code").length, root.innerText.includes("line 299")];
        }"""
    )
    assert made[0] < 5
    assert made[1:] == [1, True]


@pytest.mark.slow
def test_random_text_is_the_same_whole_and_piece_by_piece(page: Any) -> None:
    marks = (
        "a|é😀| |  |\n|\n\n|*|**|_|`|```|\n```\n|~~|[|](|](https://x.org)|![|)|<br>|- |1. |> |# "
    )
    parts = [*marks.split("|"), "|", "| a | b |\n|--|--|\n", "\n- ", "\n  - ", "---", "\\", "\r\n"]
    draw = random.Random(0)
    documents = ["".join(draw.choices(parts, k=draw.randint(1, 50))) for _ in range(400)]
    differing = page.evaluate(
        """documents => documents.filter((text) => {
          const grown = make("div"), view = new MarkdownView(grown), whole = make("div");
          for (let end = 0; end <= text.length; end++) view.update(text.slice(0, end));
          showMarkdown(whole, text);
          const coloured = make("div");
          showMarkdown(coloured, text, new Painter([[3, "accepted"], [9, "bonus"]]));
          const same = grown.innerHTML === whole.innerHTML;
          return !same || coloured.textContent !== whole.textContent;
        })""",
        documents,
    )
    assert differing == []
